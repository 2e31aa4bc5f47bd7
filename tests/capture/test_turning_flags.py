"""Flags, and other constants, that each step turns: two to four steps are traced as one."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from oracle import written_loop as loop
from torch import nn

from torch_scan_hop import fallback, scan

pytestmark = [pytest.mark.torch_version, pytest.mark.usefixtures("nothing_captured")]
F64 = torch.float64


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even, self.odd = (nn.Linear(3, 3).double() for _ in range(2))
        self.is_odd, self.is_late, self.n = False, False, 0
        self.last: Any = torch.zeros(3, dtype=F64)

    def forward(self, h: Any, x: Any) -> Any:
        self.turn()
        h = torch.tanh((self.odd if self.is_odd else self.even)(h) + x)
        return h, h * 2

    def turn(self) -> None:
        self.is_odd = not self.is_odd


class Counting(Turning):
    def forward(self, h: Any, x: Any) -> Any:
        self.n += 1
        return super().forward(h * 0.5 if self.is_odd else h / self.n, x)


class Keeping(Turning):
    def forward(self, h: Any, x: Any) -> Any:
        h, y = super().forward(h + self.last, x)
        if self.is_odd:
            self.last = h
        return h, y


class AndBack(Turning):
    def turn(self) -> None:
        self.is_odd, self.is_late = not self.is_odd, self.is_odd


class EveryFourth(Turning):
    def turn(self) -> None:
        self.is_late = not self.is_late
        if self.is_late:
            self.is_odd = not self.is_odd


class EveryFifth(Turning):
    name = "a"

    def turn(self) -> None:
        self.name = {"a": "b", "b": "c", "c": "d", "d": "e"}.get(self.name, "a")
        self.is_odd = self.name == "a"


class Phase(enum.Enum):
    COLD, WARM, HOT = 1, "warm", 3


class Phases(Turning):
    """Three, by three kinds of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.name, self.act = Phase.COLD, "even", torch.tanh

    def turn(self) -> None:
        self.phase = {Phase.COLD: Phase.WARM, Phase.WARM: Phase.HOT}.get(self.phase, Phase.COLD)
        self.name = {"even": "odd", "odd": "last"}.get(self.name, "even")
        self.act = {torch.tanh: torch.sin, torch.sin: torch.cos}.get(self.act, torch.tanh)
        self.is_odd = self.phase is not Phase.WARM

    def forward(self, h: Any, x: Any) -> Any:
        h, y = super().forward(h, x)
        self.n += 1
        return h, (y if self.name == "odd" else self.act(y)) * self.n


class TurnedAsAdvised(Turning):
    def __init__(self) -> None:
        super().__init__()
        self.late, self.flag = torch.tensor(False), torch.tensor(False)

    def forward(self, h: Any, x: Any) -> Any:
        self.late = ~self.late
        self.flag = torch.where(self.late, ~self.flag, self.flag)
        h = torch.tanh(torch.where(self.flag, self.odd(h), self.even(h)) + x)
        return h, h * 2


def outcome(run: Any, cell: Turning, steps: int, calls: int = 2) -> Any:
    xs = torch.linspace(-1, 1, steps * 3, dtype=F64).reshape(steps, 3)
    found: list[Any] = []
    for _ in range(calls):  # each call goes on from where the last one ended
        h, ys = run(cell, torch.zeros(3, dtype=F64), xs)
        weights = [*cell.parameters()]
        grads = torch.autograd.grad((ys * ys).sum() + h.sum(), weights, materialize_grads=True)
        found += [h, ys, grads, cell.is_odd, cell.is_late, cell.n, cell.last]
        cell.last = cell.last.detach()
    return found


@pytest.mark.parametrize("kind", [Turning, Phases])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 18, 19])
def test_of_so_many_steps(steps: int, kind: type[Turning]) -> None:
    with fallback("error"):
        found = outcome(scan, kind(), steps)
    torch.testing.assert_close(found, outcome(loop, kind(), steps))


@pytest.mark.parametrize("kind", [Counting, Keeping, AndBack, EveryFourth, Phases])
def test_beside_other_state(kind: type[Turning]) -> None:
    with fallback("error"):
        found = outcome(scan, kind(), 12)
    torch.testing.assert_close(found, outcome(loop, kind(), 12))


@pytest.mark.parametrize("kind", [Turning, Counting, Phases])
def test_compiled(kind: type[Turning]) -> None:
    run = torch.compile(scan, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outcome(run, kind(), 9), outcome(loop, kind(), 9))


def test_no_step_turns_nothing() -> None:
    cell = Turning()
    h, ys = scan(cell, torch.zeros(3, dtype=F64), torch.zeros(0, 3, dtype=F64))
    assert not cell.is_odd and ys.shape == (0, 3) and not h.any()


def test_what_four_steps_do_not_bring_back_is_a_loop() -> None:
    cell, other = EveryFifth(), EveryFifth()
    with pytest.warns(UserWarning, match=r"turns attribute '.*' of a EveryFifth.* = ~flag"):
        found = outcome(scan, cell, 20, calls=1)
    torch.testing.assert_close(found, outcome(loop, other, 20, calls=1))


def test_a_flag_that_is_a_tensor_does_as_advised() -> None:
    with fallback("error"):
        advised = outcome(scan, TurnedAsAdvised(), 20, calls=1)
    torch.testing.assert_close(advised[:3], outcome(loop, EveryFourth(), 20, calls=1)[:3])
