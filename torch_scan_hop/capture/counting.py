"""What a number that steps count is at each step, and which steps it makes branch alike."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: an int, or a symbol of one
Int = Any

Comparison = Callable[[Int, Int], Any]
#: what all remainders answer is looked at
_LARGEST_MODULUS = 2**16
#: of a scan whose steps branch differently: each costs a trace, and the code of a scan
MOST_PARTS = 12


class Counting(NamedTuple):
    """How a number goes on: a step adds ``by`` to ``times`` what it was, which is 1, 0 or -1 (it
    turns at each step), and takes the remainder of ``modulus`` if that is not 0."""

    times: int
    by: int
    modulus: int


def later(start: Int, steps: Int, times: int, by: int, modulus: int) -> Int:
    """Return what a number that goes on like that is after so many steps."""
    if times == 0:
        return by if steps > 0 else start
    if times == -1:
        return start + steps % 2 * (by - 2 * start)
    end = start + by * steps
    return end % modulus if modulus else end


def _remainder(number: Int, modulus: int) -> Int:
    """Return ``number % modulus``. Of a negative symbol, torch 2.9 takes it for a negative number
    at times, so that such a symbol is made the number that it is."""
    return (int(number) if number < 0 else number) % modulus


@dataclass(frozen=True)
class Counted:
    """What a step makes of leaf ``k`` of the carry: ``times`` what it was at the beginning, and
    ``more``; the remainder of that by ``modulus`` if not 0; and ``shift``. If k is None, it is
    ``more``, whatever there was."""

    k: int | None
    times: int = 1
    more: int = 0
    modulus: int = 0
    shift: int = 0

    def at(self, start: Int) -> Int:
        value = self.times * start + self.more
        return (_remainder(value, self.modulus) if self.modulus else value) + self.shift

    def scaled(self, times: int, more: int) -> Counted | None:
        if not self.modulus:
            return replace(self, times=self.times * times, more=self.more * times + more)
        return replace(self, shift=self.shift + more) if times == 1 else None

    def remainder(self, modulus: int) -> Counted | None:
        if not 0 < modulus <= _LARGEST_MODULUS or self.modulus not in (0, modulus):
            return None
        return replace(self, more=(self.more + self.shift) % modulus, modulus=modulus, shift=0)


@dataclass(frozen=True)
class Branch:
    compare: Comparison
    counted: Counted
    bound: int
    line: str

    def is_known(self, start: Int) -> bool:
        """Return True if it is known what the first step finds."""
        return True

    def answer(self, start: Int) -> Int:
        answer = self.compare(self.counted.at(start), self.bound)
        return int(answer) if self.compare is asked_position else bool(answer)

    def period(self, start: Int, counting: Counting, steps: Int) -> int:
        """Return after how many steps it answers the same again; 0 if it may never do."""
        if counting.times == -1:
            return 2
        modulus = self._modulus(counting)
        by = counting.by if counting.modulus else counting.by * self.counted.times
        return modulus // math.gcd(modulus, by) if modulus else 0

    def never_again(self, counting: Counting) -> bool:
        """Return True if no two steps take the same item."""
        if self.compare is not asked_position or self._modulus(counting):
            return False
        return counting.times == 1 and counting.by * self.counted.times != 0

    def _modulus(self, counting: Counting) -> int:
        return counting.modulus or self.counted.modulus

    def alike(self, start: Int, counting: Counting, steps: Int) -> Int:
        """Return how many of ``steps`` branch as the first one does, before one that does not."""
        later_steps: Any
        is_position = self.compare is asked_position
        if counting.times != 1 or (is_position and not self._modulus(counting)):
            later_steps = range(1, 2)  # what the next step finds, all others find, or none
        elif modulus := self._modulus(counting):
            start = int(_remainder(start, modulus))  # of a symbol, this is a guard
            later_steps = range(1, self.period(start, counting, steps))
        elif self._is_alike(start, counting, steps):
            return steps
        else:
            start = int(start)
            crossing = (self.bound - self.counted.at(start)) // (self.counted.times * counting.by)
            later_steps = range(max(1, crossing - 1), crossing + 3)
        first = self.answer(start)
        for k in later_steps:
            if self.answer(later(start, k, *counting)) != first:
                return k if k < steps else steps
        return steps

    def _is_alike(self, start: Int, counting: Counting, steps: Int) -> bool:
        """Return True if that is known from both ends alone, of a symbol without its value."""
        by = self.counted.times * counting.by
        first = self.counted.at(start)
        last = first + by * (steps - 1)
        low, high = (first, last) if by >= 0 else (last, first)
        if self.compare in (operator.eq, operator.ne):
            return bool(by == 0 or low > self.bound or high < self.bound)
        return bool(self.compare(first, self.bound)) == bool(self.compare(last, self.bound))


def asked_position(number: Int, _: int) -> Int:
    """Return the item that is asked for in a list: steps are alike that ask for the same one."""
    return number
