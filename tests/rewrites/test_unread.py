"""What steps do besides their results: draws, which change those after them, checks, and calls."""

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


logged: list[float] = []


@torch.library.custom_op("torch_scan_hop_tests::log", mutates_args=())
def log(x: torch.Tensor) -> None:
    logged.append(x.sum().item())


@log.register_fake
def _log_of_fakes(x: torch.Tensor) -> None:
    return None


def logs(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    log(x), log(h.detach())
    n = step(h, x, w)
    log(n.detach())
    return n, n * 2


def logs_what_is_the_same(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    log(w.detach() * 2), log(torch.ones(2))
    return torch.tanh(h @ w + x), h * 2


def logs_in_a_scan(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    scan(lambda c, x: (log(c.detach()), (c + x, None))[1], h, x.expand(20, 3))
    n = step(h, x, w)
    return n, n * 2


@pytest.mark.parametrize("options", [{}, {"checkpoint": 8}], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("body", [logs, logs_what_is_the_same, logs_in_a_scan])
def test_calls_that_return_nothing(body: Any, steps: int, options: Any) -> None:
    logged.clear()
    expected = outcome(loop, body, steps)
    of_the_loop = list(logged)
    logged.clear()
    with fallback("error"):
        torch.testing.assert_close(outcome(scan, body, steps, **options), expected)
    torch.testing.assert_close(logged[: len(of_the_loop)], of_the_loop)
    if not options:  # else segments run again in the backward, and log again
        assert len(logged) == len(of_the_loop)


@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("check", [torch._assert_async, lambda c: torch._assert_async(c, "h > 1")])
def test_checks(check: Any, steps: int) -> None:
    def body(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        n = torch.tanh(h @ w + x)
        check((n <= limit).all())
        return n, n * 2

    limit = 1.0
    with fallback("error"):
        torch.testing.assert_close(outcome(scan, body, steps), outcome(loop, body, steps))
        limit = 0.5
        with pytest.raises(RuntimeError, match=r"h > 1|Expected Tensor with single nonzero value"):
            outcome(scan, body, steps)


@pytest.mark.parametrize("body", [logs, logs_what_is_the_same, logs_in_a_scan])
def test_compiled_programs_make_no_such_calls(body: Any) -> None:
    run = torch.compile(scan, backend="aot_eager", fullgraph=True)
    logged.clear()
    outcome(run, body, 20)
    assert not logged  # as torch.compile drops them from a loop
