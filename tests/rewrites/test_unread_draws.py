"""A draw that nothing reads changes those after it, as in the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import written_loop as loop
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.torch_version
W = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3)


def step(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ w + x + torch.rand(3, dtype=x.dtype))


def before(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    torch.randn(2), torch.randint(5, (2,)), torch.randperm(4)
    n = step(h, x, w)
    return n, n * 2


def after(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    n = step(h, x, w)
    F.dropout(n), torch.empty(2).exponential_(), torch.multinomial(torch.ones(4), 2)
    return n, n * 2


def of_a_draw(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    mean = torch.rand(3)
    torch.normal(mean, 1.0)
    torch.bernoulli(x.abs() / 2)
    n = step(h, x, w)
    return n, n + mean * x


def no_other(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    torch.rand(3)
    return torch.tanh(h @ w + x), h * 2


def a_carry(c: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
    n = step(c[0], x, w)
    return (n, torch.normal(c[1], 1.0)), n * 2


def in_a_checkpoint(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    def inner(h: torch.Tensor) -> torch.Tensor:
        torch.rand(2)
        return step(h, x, w)

    n = checkpoint(inner, h, use_reentrant=False)
    return n, n * 2


def a_nested_scan(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    scan(lambda c, x: (c + torch.rand(3), None), h, x.expand(20, 3))
    n = step(h, x, w)
    return n, n * 2


BODIES = [before, after, of_a_draw, no_other, a_carry, in_a_checkpoint, a_nested_scan]


def outcome(run: Any, body: Any, steps: int, **options: Any) -> Any:
    torch.manual_seed(0)
    w, init = W.clone().requires_grad_(), torch.zeros(3, dtype=W.dtype)
    xs = torch.linspace(-1, 1, steps * 3, dtype=W.dtype).reshape(steps, 3)
    carry: Any = (init, init) if body is a_carry else init
    _, ys = run(lambda h, x: body(h, x, w), carry, xs, **options)
    return ys, torch.autograd.grad((ys * ys).sum(), w), torch.rand(2)


@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("body", BODIES)
def test_in_eager_mode(body: Any, steps: int) -> None:
    with fallback("error"):
        torch.testing.assert_close(outcome(scan, body, steps), outcome(loop, body, steps))


@pytest.mark.parametrize("body", BODIES)
def test_checkpointed(body: Any) -> None:
    ours = outcome(scan, body, 20, checkpoint=8)
    torch.testing.assert_close(ours, outcome(loop, body, 20))


@pytest.mark.parametrize("body", BODIES[:-1])  # of a nested scan, AOTAutograd drops the call
@torch._inductor.config.patch(fallback_random=True)  # else it drops draws of programs, too
def test_compiled(body: Any) -> None:
    run = torch.compile(scan, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outcome(run, body, 20), outcome(loop, body, 20))
