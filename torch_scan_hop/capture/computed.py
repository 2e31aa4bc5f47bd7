"""What Python makes of a number that steps count, as in ``if self.n / self.total < 0.3``.

Each step's answer is known before the scan, as Python itself computes it. Of what only rises or
only falls, an answer turns at one count, and the branch is one on that count: ``self.n < 30``.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.made_numbers import NUMBER
from torch_scan_hop.capture.counting import Branch, Counting, Int, later
from torch_scan_hop.capture.number_arithmetic import COMPARISONS, FUNCTIONS, IN_PLACE, of_number
from torch_scan_hop.capture.weak_numbers import carry_of

#: what Python raises of a number; the loop says so
WRONG = (ArithmeticError, ValueError)
#: of which each is looked at
_MOST_STEPS = 2**12
#: no count is beyond it
FARTHEST = 2**40

_ORDERS = {operator.lt, operator.le, operator.gt, operator.ge}
#: what only rises or only falls with a number, beside a constant one if there are two
_MONOTONE = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.neg,
    operator.pos,
    int,
    float,
    round,
}
_MONOTONE |= {
    getattr(math, name)
    for name in (
        "floor ceil sqrt exp expm1 log log2 log10 log1p sinh tanh asin atan erf erfc".split()
    )
}
_BY_NAME = {name: function for function, name in FUNCTIONS.items()} | {
    "int": int,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}
#: methods, to torch 2.9
_METHODS: dict[str, Callable[[Any], Any]] = {"clone": operator.pos, "__abs__": abs}
_CASTS = {torch.int64: int, torch.float64: float}


class Computed(NamedTuple):
    """What a step makes of leaf ``k`` of the carry: ``at(n)``, if that was ``n`` at first."""

    k: int
    at: Callable[[Any], Any]
    is_monotone: bool = True


def computed(value: Any) -> Computed | None:
    """Return what the node ``value`` is, if Python makes it of one number of the carry."""
    if not isinstance(value, fx.Node) or NUMBER not in value.meta:
        return None
    k = carry_of(value)
    if k is not None:
        return Computed(k, lambda n: n)
    function, operands = call_of(value)
    parts = [computed(v) if isinstance(v, fx.Node) else v for v in operands]
    made = [part for part in parts if isinstance(part, Computed)]
    is_known = all(isinstance(part, (int, float, Computed)) for part in parts)
    if function is None or not is_known or len({part.k for part in made}) != 1:
        return None

    def at(n: Any) -> Any:
        return function(*(p.at(n) if isinstance(p, Computed) else p for p in parts))

    return Computed(made[0].k, at, made[0].is_monotone and _is_monotone(function, parts))


def call_of(node: fx.Node) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
    """Return the function of Python's that ``node`` stands for, and its operands; no function if
    none is known. A copy is ``+n``."""
    operands: tuple[Any, ...] = node.args
    target: Any = IN_PLACE.get(node.target, node.target)
    target = COMPARISONS.get(target, target)
    if target is of_number:
        return _BY_NAME.get(str(operands[0])), operands[1:]
    if target in _METHODS:
        return _METHODS[target], operands
    if target == "to" and len(operands) == 2:
        return _CASTS.get(operands[1]), operands[:1]
    if target in (torch.minimum, torch.maximum):
        return (min if target is torch.minimum else max), operands
    if target is torch.clamp and len(operands) == 1:
        given = (node.kwargs.get("min"), node.kwargs.get("max"))
        ends = [e if g is None else g for g, e in zip(given, _ENDS, strict=True)]
        return _clamp, (*operands, *ends)
    is_pythons = getattr(target, "__module__", "") == "_operator" and not node.kwargs
    return (target if is_pythons else None), operands


_ENDS = (-math.inf, math.inf)


def _clamp(n: Any, low: Any, high: Any) -> Any:
    return min(max(n, low), high)


def _is_monotone(function: Any, parts: list[Any]) -> bool:
    """Return True if what ``function`` makes of ``parts`` only rises with the one that is counted,
    or only falls, also as Python rounds it."""
    counted = [k for k, part in enumerate(parts) if isinstance(part, Computed)]
    if len(counted) != 1:
        return False
    if function is operator.pow or function is math.pow:
        return counted == [1] and parts[0] > 0 and math.isfinite(parts[0])
    if function is _clamp:
        return counted == [0]
    if not all(math.isfinite(p) for p in parts if not isinstance(p, Computed)):
        return False
    if function in (operator.truediv, operator.floordiv):
        return counted == [0]
    return function in _MONOTONE


def turning(made: Computed, compare: Any, bound: Any, start: int) -> tuple[int, bool] | None:
    """Return from which count on ``compare(made, bound)`` is another one, and what it is before;
    None if it may turn more than once, or Python raises at ``start``."""
    if not made.is_monotone or compare not in _ORDERS or abs(start) >= FARTHEST:
        return None

    def answer(n: int) -> bool:
        return bool(compare(made.at(n), bound))

    try:
        first = answer(start)
    except WRONG:
        return None
    sides = _sides(answer, start, 1) or _sides(answer, start, -1)
    if sides is None:
        return FARTHEST, first
    low, high = sorted(sides)
    before = answer(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if answer(middle) == before else (low, middle)
    return high, before


def _sides(answer: Callable[[int], bool], start: int, by: int) -> tuple[int, int] | None:
    """Return a count on either side of where ``answer`` turns, if it does so after ``start``."""
    first, near, far = answer(start), start, start + by
    with contextlib.suppress(*WRONG):  # whoever comes there sees what Python raises
        while abs(far) <= FARTHEST:
            if answer(far) != first:
                return near, far
            near, far = far, 2 * far - start
    return None


@dataclass(frozen=True)
class ComputedBranch(Branch):
    """One that is known only of steps whose number is known, and what they begin with."""

    counted: Computed  # type: ignore[assignment]

    def is_known(self, start: Int) -> bool:
        try:
            return type(start) is int and self.answer(start) is not None
        except WRONG:
            return False

    def period(self, start: Int, counting: Counting, steps: Int) -> int:
        found = self._answers(start, counting, steps) or [None]
        return next(p for p in range(1, len(found) + 1) if found[p:] == found[: len(found) - p])

    def alike(self, start: Int, counting: Counting, steps: Int) -> Int:
        found = self._answers(start, counting, steps)
        if found is None:
            return 0
        return next((k for k, answer in enumerate(found) if answer != found[0]), steps)

    def _answers(self, start: Int, counting: Counting, steps: Int) -> list[Any] | None:
        """Return what all steps find; None if that is not known."""
        if type(steps) is not int or steps > _MOST_STEPS:
            return None
        try:
            return [self.answer(later(start, k, *counting)) for k in range(steps)]
        except WRONG:
            return None
