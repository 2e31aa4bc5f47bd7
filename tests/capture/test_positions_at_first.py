"""What is read at 0-d tensors, where the first step runs on its own, outside of a body."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import written_loop as loop

from torch_scan_hop import NotTraceableError, fallback, scan

pytestmark = [pytest.mark.torch_version, pytest.mark.usefixtures("nothing_captured")]
F64 = torch.float64


class Cell:
    """``h`` is None before the first step."""

    def __init__(self) -> None:
        self.h: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.t = torch.tensor(0)
        self.rows = torch.zeros(24, 3, dtype=F64)
        self.w = torch.linspace(-1, 1, 72, dtype=F64).reshape(24, 3).requires_grad_()

    def __call__(self, c: torch.Tensor, x: torch.Tensor) -> Any:
        read = self.step(x)
        self.h = torch.tanh(read + x + (0 if self.h is None else self.h))
        return c + self.h, read * 2

    def step(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Table(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.t = self.t + 1
        return self.w[self.t % 24]


class Window(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.t += 1
        return self.w[self.t : self.t + 2].sum(0) + self.w.narrow(0, self.t, 2).mean(0)


class Cache(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[self.t] = x
        self.t += 1
        return self.rows.sum(0) * self.w[self.t - 1]


class Delay(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        before = self.rows[self.t].clone()
        self.rows[self.t] = x
        self.t = (self.t + 1) % 5
        return before * self.w[0]


class DelayInPlace(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        before = self.rows[self.t].clone()
        self.rows[self.t] = x
        self.t += 1
        self.t %= 5
        return before * self.w[0]


class ViewKept(Cell):
    """A view of a row changes with the row, which is written after it was read."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.rows[self.t]
        self.rows[self.t] = x
        self.t = self.t + 1
        return self.w[1]


class ViewRead(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        row = self.rows[self.t]
        self.rows[self.t] = x
        self.t = self.t + 1
        return row + self.w[0]


class RowWritten(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[self.t].add_(x)
        self.t = self.t + 1
        return self.rows.sum(0) * self.w[0]


class RowWrittenAsAdvised(Cell):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        row = self.rows[self.t].clone()
        self.rows[self.t] = row + x
        self.t = self.t + 1
        return self.rows.sum(0) * self.w[0]


CAPTURED = [Table, Window, Cache, Delay, DelayInPlace, ViewKept, RowWrittenAsAdvised]


def outcome(run: Any, cell: Cell) -> Any:
    xs = torch.linspace(-1, 1, 60, dtype=F64).reshape(20, 3)
    c, ys = run(cell, torch.zeros(3, dtype=F64), xs)
    grads = torch.autograd.grad((ys * ys).sum() + c.sum(), cell.w)
    return c, ys, grads, cell.h, cell.t, cell.rows, cell.kept


@pytest.mark.parametrize("kind", CAPTURED)
@pytest.mark.parametrize("backend", ["no", "aot_eager"])
def test_is_captured(kind: type[Cell], backend: str) -> None:
    run = scan if backend == "no" else torch.compile(scan, backend=backend, fullgraph=True)
    with fallback("error"):
        torch.testing.assert_close(outcome(run, kind()), outcome(loop, kind()))


class Part(Cell):
    """A copy of a part of a row, of which only the length is a size of the program's."""

    width = 2

    def step(self, x: torch.Tensor) -> torch.Tensor:
        before = self.rows[self.t, : self.width].clone()
        self.rows[self.t] = x
        self.t += 1
        return before.sum() * self.w[0]


def test_a_size_beside_a_position_that_changes() -> None:
    def program(cell: Part, init: torch.Tensor, xs: torch.Tensor, width: int) -> Any:
        cell.width = width
        return scan(cell, init, xs)

    run = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    for width in (2, 3):
        other = Part()
        other.width = width
        found = outcome(lambda *args, width=width: run(*args, width), Part())
        torch.testing.assert_close(found, outcome(loop, other))


@pytest.mark.parametrize("kind", [ViewRead, RowWritten])
def test_what_writes_to_a_view_is_a_loop(kind: type[Cell]) -> None:
    with pytest.raises(NotTraceableError, match=r"read a copy"), fallback("error"):
        outcome(scan, kind())
    with fallback("allow"):
        torch.testing.assert_close(outcome(scan, kind()), outcome(loop, kind()))
