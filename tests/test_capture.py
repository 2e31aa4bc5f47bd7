"""Eager capture: what changes is captured again, what only looks new is not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version

W = torch.randn(3, 3) * 0.3


class Cell(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())

    def step(self, h, x):
        h = torch.tanh(h @ self.w + x)
        return h, h

    forward = step


def scaled(w, h, x, *, scale):
    h = torch.tanh(h @ w * scale + x)
    return h, h


cell = Cell()
# each call makes the function anew, as a model's forward does
FUNCTIONS = {
    "module": lambda: cell,
    "bound method": lambda: cell.step,
    "lambda": lambda: lambda h, x: (torch.tanh(h @ W + x), h),
    "partial": lambda: functools.partial(scaled, W, scale=2.0),
    "partial of a method": lambda: functools.partial(cell.step),
}


def run(fn, steps=5):
    _, ys = scan(fn, torch.zeros(2, 3), torch.randn(steps, 2, 3, requires_grad=True))
    ys.sum().backward()


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_the_same_function_is_captured_once(make):
    run(make())
    captured = counters["stats"]["unique_graphs"]
    assert captured > 0
    for _ in range(3):
        run(make())
    assert counters["stats"]["unique_graphs"] == captured


def test_a_new_trip_count_is_captured_once_more():
    for steps in (5, 6):
        run(cell, steps)
    captured = counters["stats"]["unique_graphs"]
    for steps in (7, 9, 12):
        run(cell, steps)
    assert counters["stats"]["unique_graphs"] == captured


def test_another_default_argument_is_another_function():
    totals = []
    for k in (1.0, 2.0, 3.0):
        carry, _ = scan(lambda c, x, k=k: (c + k * x, None), torch.zeros(1), torch.ones(4, 1))
        totals.append(float(carry))
    assert totals == [4.0, 8.0, 12.0]


def test_another_closure_is_seen():
    def total(w):
        return scan(lambda c, x: (c + w * x, None), torch.zeros(2), torch.ones(3, 2))[0]

    torch.testing.assert_close(total(torch.ones(2)), torch.full((2,), 3.0))
    torch.testing.assert_close(total(torch.full((2,), 5.0)), torch.full((2,), 15.0))


@pytest.mark.filterwarnings("error:.*could not be traced")
def test_a_call_under_a_users_mode_does_not_end_capturing():
    class Logger(TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
            return fn(*args, **(kwargs or {}))

    def add(c, x):
        return c + x, c * 2

    def call(n):
        return scan(add, torch.zeros(n), torch.ones(3, n))[0].tolist()

    with Logger():
        assert call(2) == [3, 3]
    assert call(2) == [3, 3]
    assert call(5) == [3] * 5
