"""Norms of narrow inputs with wide weights, as autocast on a CPU has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import written_loop
from torch_scan_hop import scan

NORMS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "layer, no bias": lambda: nn.LayerNorm(6, bias=False),
    "batch": lambda: nn.BatchNorm1d(6),
    "batch, eval": lambda: nn.BatchNorm1d(6).eval(),
}


def _gradients(run: Any, norm: nn.Module, trip_count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 6), (6, 6), (trip_count, 4, 6))
    w, u, xs = (torch.randn(*shape, generator=generator) for shape in shapes)
    leaves = [w.requires_grad_(), u.requires_grad_(), *norm.parameters()]

    def body(h: Any, x: Any) -> Any:
        h = torch.tanh(norm(x @ w + h @ u))
        return h, h

    with torch.autocast("cpu", torch.bfloat16):
        _, ys = run(body, torch.zeros(4, 6), xs)
    return list(torch.autograd.grad(ys.float().pow(2).sum(), leaves))


def _in_a_program(*args: Any) -> Any:
    return torch.compile(scan, fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.torch_version
@pytest.mark.parametrize("trip_count", [3, 40])
@pytest.mark.parametrize("run", [scan, _in_a_program])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_under_autocast(name, run, trip_count):
    """The statistics of steps were stacked in bfloat16, and the backward raised."""
    expected = _gradients(written_loop, NORMS[name](), trip_count)
    for found, wanted in zip(_gradients(run, NORMS[name](), trip_count), expected, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
