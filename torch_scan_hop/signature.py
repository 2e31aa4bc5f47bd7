"""Who is who in a scan's flat argument lists: carry, xs, additional -> carry, ys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Inputs(Generic[Item]):
    carry: list[Item]
    xs: list[Item]
    additional: list[Item]

    def flat(self) -> list[Item]:
        return [*self.carry, *self.xs, *self.additional]


@dataclass(frozen=True)
class Outputs(Generic[Item]):
    carry: list[Item]
    ys: list[Item]

    def flat(self) -> list[Item]:
        return [*self.carry, *self.ys]


@dataclass(frozen=True)
class Signature:
    """Counts of each role.

    >>> Signature(1, 2, 1).split_inputs(["h", "a", "b", "w"])
    Inputs(carry=['h'], xs=['a', 'b'], additional=['w'])
    """

    n_carry: int
    n_xs: int
    n_additional: int

    @property
    def n_inputs(self) -> int:
        return self.n_carry + self.n_xs + self.n_additional

    def split_inputs(self, flat: Sequence[Item]) -> Inputs[Item]:
        assert len(flat) == self.n_inputs, (len(flat), self)
        return Inputs(
            list(flat[: self.n_carry]),
            list(flat[self.n_carry : self.n_carry + self.n_xs]),
            list(flat[self.n_carry + self.n_xs :]),
        )

    def split_outputs(self, flat: Sequence[Item]) -> Outputs[Item]:
        return Outputs(list(flat[: self.n_carry]), list(flat[self.n_carry :]))
