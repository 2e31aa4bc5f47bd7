"""Branches on what Python makes of counters: ``if self.n / self.total < 0.3``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import written_loop as loop
from torch import nn
from torch._dynamo.testing import CompileCounter

from torch_scan_hop import NotTraceableError, fallback, scan

pytestmark = [pytest.mark.torch_version, pytest.mark.usefixtures("nothing_captured")]


class Counting:
    def __init__(self, of: Any, start: int = 0, count: Any = lambda n: n + 1) -> None:
        torch.manual_seed(0)
        self.layers = [nn.Linear(3, 3).double() for _ in range(12)]
        self.of, self.n, self.count = of, start, count

    def __call__(self, h: Any, x: Any) -> Any:
        found = self.of(self.n)
        if isinstance(found, bool):
            found = 1 if found else 0
        h = torch.tanh(self.layers[found](h) + x)
        self.n = self.count(self.n)
        return h, h * 2


#: what turns at one count, which is known of all calls
TURNING: dict[str, Callable[[int], Any]] = {
    "a fraction": lambda n: n / 10 < 0.3,
    "bound first": lambda n: 0.3 > n / 10,
    "equal": lambda n: bool(n / 10 == 0.3),
    "not equal": lambda n: n / 10 != 0.3,
    "a float": lambda n: n < 2.5,
    "int": lambda n: int(n / 4) == 1,
    "round": lambda n: round(n / 4) == 1,
    "floor": lambda n: n // -4 >= -1,
    "exp": lambda n: math.exp(-n / 3) > 0.2,
    "power": lambda n: 0.9**n > 0.6,
    "root": lambda n: math.sqrt(n + 1) >= 2,
    "warm-up": lambda n: min(1.0, n / 5) < 1.0,
    "max": lambda n: max(0.0, 1 - n / 4) > 0,
    "never": lambda n: n / 10 < -0.3,
    "position": lambda n: n // 3,
    "last position": lambda n: min(n, 3),
}
#: what is known if it is known what the scan begins with
OTHERS: dict[str, Callable[[int], Any]] = {
    "every other third": lambda n: n // 3 % 2 == 1,
    "square": lambda n: n**2 < 10,
    "twice": lambda n: n * n - n < 10,
    "wave": lambda n: math.cos(n) > 0,
    "reciprocal": lambda n: 1 / (n + 1) < 0.3,
    "distance": lambda n: abs(n - 4) < 2,
    "flags": lambda n: bool((n > 2) & (n < 5)),
    "both sides": lambda n: n * 3 > n + 7,
    "bits": lambda n: bool(n >> 1 & 1),
    "remainder": lambda n: (n % 4) / 4 < 0.5,
    "rectified": lambda n: n - 2 - 2 * n * 0.9**n / (1 - 0.9 ** (n + 1)) > 0,
}


def outcome(run: Any, cell: Counting, steps: int = 9) -> Any:
    xs = torch.linspace(-1, 1, steps * 3, dtype=torch.float64).reshape(steps, 3)
    h, ys = run(cell, torch.zeros(3, dtype=torch.float64), xs)
    weights = [p for layer in cell.layers for p in layer.parameters()]
    grads = torch.autograd.grad(h.sum() + (ys * ys).sum(), weights, materialize_grads=True)
    return h, ys, grads, cell.n


def check(run: Any, make: Callable[[], Counting], calls: int) -> None:
    ours, theirs = make(), make()
    for _ in range(calls):
        with fallback("error"):
            torch.testing.assert_close(outcome(run, ours), outcome(loop, theirs))


@pytest.mark.parametrize("name", TURNING)
def test_what_turns_once(name: str) -> None:
    check(scan, lambda: Counting(TURNING[name]), calls=3)


@pytest.mark.parametrize("name", OTHERS)
def test_what_turns_at_times(name: str) -> None:
    check(scan, lambda: Counting(OTHERS[name]), calls=1)


@pytest.mark.parametrize("of", [TURNING["equal"], TURNING["position"], OTHERS["bits"]])
def test_compiled(of: Any) -> None:
    run = torch.compile(scan, backend="aot_eager", fullgraph=True)
    check(run, lambda: Counting(of), calls=1)


@pytest.mark.parametrize(
    ("of", "start", "count"),
    [
        (lambda n: n / 3 < 0.5, 0, lambda n: (n + 1) % 3),
        (lambda n: n / 10 > 0.5, 9, lambda n: n - 1),
        (lambda n: n * 0.1 < 0.7, 0, lambda n: n + 3),
        (lambda n: math.log(n) < 1.2, 1, lambda n: n + 1),
    ],
)
def test_what_counts_in_another_way(of: Any, start: int, count: Any) -> None:
    check(scan, lambda: Counting(of, start, count), calls=2)


@torch._dynamo.config.patch(automatic_dynamic_shapes=True)  # torch_xla turns it off
def test_a_program_serves_all_counts_between_turns() -> None:
    counter, cell = CompileCounter(), Counting(lambda n: n / 100 < 0.85)
    other = Counting(cell.of)

    run = torch.compile(scan, backend=counter, fullgraph=True)
    for _ in range(10):
        torch.testing.assert_close(outcome(run, cell), outcome(loop, other))
    assert counter.frame_count <= 3  # an int, any int, and the turn


def test_what_python_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), fallback("allow"):
        outcome(scan, Counting(lambda n: 1 / (n - 5) > 0))


def test_what_is_not_known_of_a_later_call_is_a_loop() -> None:
    cell, other = (Counting(OTHERS["wave"]) for _ in range(2))
    with fallback("error"):
        torch.testing.assert_close(outcome(scan, cell), outcome(loop, other))
        with pytest.raises(NotTraceableError, match="decides by the value"):
            outcome(scan, cell)
    with fallback("allow"):
        torch.testing.assert_close(outcome(scan, cell), outcome(loop, other))
