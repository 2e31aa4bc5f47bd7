"""State in attributes, a first step that differs, facts and hooks, on XLA: one While for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_scan_hop import fallback, scan
from torch_scan_hop.reference import scan_loop

pytest.importorskip("torch_xla")

import xla_harness  # it uses the device before autograd counts devices

pytestmark = pytest.mark.xla

XS = torch.linspace(-1.0, 1.0, 20).reshape(5, 4)
W = torch.linspace(-0.5, 0.5, 16).reshape(4, 4)


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(W.clone())
        self.v: Any = None
        self.steps = 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * x
        self.v = torch.tanh(x @ self.w + (0 if self.v is None else self.v) + self.mean)
        return self.v


def state(steps: Any, device: Any) -> list[Any]:
    cell, xs = Leaky().to(device), XS.to(device)
    _, ys = steps(lambda _, x: (None, cell(x)), None, xs)
    return [ys, cell.v, cell.mean, cell.steps, *torch.autograd.grad(ys.sum(), [cell.w])]


def _of_cell(cell_of: Any, init: Any) -> Any:
    def run(steps: Any, device: Any) -> list[Any]:
        w = W.to(device).requires_grad_()
        start = tuple(v if v is None else v.to(device) for v in init)
        _, ys = steps(cell_of(w), start, XS.to(device))
        return [ys, *torch.autograd.grad(ys.sum(), [w])]

    return run


def _previous(w: Tensor) -> Any:
    def cell(carry: Any, x: Tensor) -> Any:
        h, before = carry
        h = torch.tanh(h @ w + x + (0 if before is None else before))
        return (h, x), h

    return cell


def _hooked(w: Tensor) -> Any:
    def cell(carry: Any, x: Tensor) -> Any:
        h = torch.tanh(carry[0] @ w + x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return (h,), h

    return cell


def _asks(w: Tensor) -> Any:
    def cell(carry: Any, x: Tensor) -> Any:
        (h,) = carry
        h = h.detach() if h.requires_grad else h * 2
        h = torch.tanh(h @ w + x)
        return (h,), h

    return cell


PROGRAMS = {
    "state": state,
    "first step": _of_cell(_previous, (torch.zeros(4), None)),
    "hook": _of_cell(_hooked, (torch.zeros(4),)),
    "fact": _of_cell(_asks, (torch.ones(4),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_loop(name: str) -> None:
    run = PROGRAMS[name]
    expected = run(lambda f, init, xs: scan_loop(f, init, xs, len(xs), False), "cpu")
    with fallback("error"):
        found = run(scan, xla_harness.DEVICE)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, int):
            assert type(a) is int and a == b
        else:
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
