"""Branches on what steps count, as in ``if self.n == 0``.

A number that steps carry is a scalar, whose value a trace does not know. But if each step adds the
same int to it, it is known before the scan what the first and the last step find. A branch is taken
as the first step takes it; after the trace, both ends show if all steps do. The program is guarded
by what they show, so that a call that branches in another way is another capture.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.number_functions import comparisons_are_known
from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.dynamo.variables import VariableTracker, example_value
from torch_scan_hop.capture.first_steps import FirstStepDiffers
from torch_scan_hop.capture.number_arithmetic import COMPARISONS, IN_PLACE, of_number
from torch_scan_hop.capture.told import counters_told
from torch_scan_hop.capture.weak_numbers import carry_of
from torch_scan_hop.signature import output_node

#: an int, or a symbol of one
Int = Any

Comparison = Callable[[Int, Int], bool]
_MIRRORED: dict[Comparison, Comparison] = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}
#: by operator of a number and an int: what the int makes of the number, as a factor and a sum
_AFFINE: dict[Any, Callable[[int], tuple[int, int]]] = {
    operator.add: lambda n: (1, n),
    operator.sub: lambda n: (1, -n),
    operator.mul: lambda n: (n, 0),
}


@dataclass(frozen=True)
class _Counted:
    """``times`` what leaf ``k`` of the carry was at the beginning of a step, and ``more``."""

    k: int
    times: int = 1
    more: int = 0

    def at(self, start: Int) -> Int:
        return self.times * start + self.more

    def scaled(self, times: int, more: int) -> _Counted:
        return _Counted(self.k, self.times * times, self.more * times + more)


@dataclass(frozen=True)
class _Branch:
    compare: Comparison
    counted: _Counted
    bound: int
    line: str

    def is_alike(self, first: Int, by: int, steps: Int) -> bool:
        """Return True if ``steps`` steps branch alike, of which each counts ``by`` on."""
        last = first + by * (steps - 1)
        low, high = (first, last) if by >= 0 else (last, first)
        if self.compare in (operator.eq, operator.ne):
            return bool(by == 0 or low > self.bound or high < self.bound)
        return bool(self.compare(first, self.bound)) == bool(self.compare(last, self.bound))


class Counters:
    """The numbers that a scan begins with, by leaf of the carry, and the branches on them."""

    def __init__(self, starts: Mapping[int, Int]) -> None:
        self._starts = {k: n for k, n in starts.items() if isinstance(n, (int, torch.SymInt))}
        #: each once, though Dynamo asks if a value is a constant before it asks for it
        self._asked: dict[_Branch, None] = {}

    def __bool__(self) -> bool:
        return bool(self._starts)

    def decide(self, flag: Any) -> bool | None:
        """Return what the node ``flag`` is at the first step; None if it compares no counter."""
        if flag.target is of_number and flag.args[0] in ("not", "bool"):
            decided = self.decide(flag.args[1])
            return not decided if decided is not None and flag.args[0] == "not" else decided
        compare, operands = COMPARISONS.get(flag.target), flag.args
        if compare is None:  # a number is asked if it is 0
            compare, operands = operator.ne, (flag, 0)
        if len(operands) != 2:
            return None
        number, bound = operands
        if type(number) is int:
            number, bound, compare = bound, number, _MIRRORED.get(compare, compare)
        counted = _counted(number)
        if counted is None or counted.k not in self._starts or type(bound) is not int:
            return None
        self._asked[_Branch(compare, counted, bound, users_line())] = None
        return bool(compare(counted.at(self._starts[counted.k]), bound))

    def check(self, graph: fx.Graph, steps: Int) -> None:
        """Raise an error if not all ``steps``, each of which is ``graph``, branch alike:
        FirstStepDiffers if it is the first one alone that does not."""
        results: Any = output_node(graph).args[0]
        for branch in self._asked:
            counted = branch.counted
            after = _counted(results[counted.k])
            first = counted.at(self._starts[counted.k])
            if after is not None and (after.k, after.times) == (counted.k, 1):
                by = counted.times * after.more
                if branch.is_alike(first, by, steps):
                    continue
                if branch.is_alike(first + by, by, steps - 1):
                    raise FirstStepDiffers(f"the first step takes another branch at {branch.line}")
            raise Unsupported(
                f"steps do not all take the same branch, at {branch.line}. Of a number that steps "
                "count only the first step may take another one. Choose with torch.where"
            )


def branches_are_decided() -> contextlib.AbstractContextManager[None]:
    """Python branches on a comparison of a counter as the first step does, if counters are told."""
    if counters_told() is None:
        return contextlib.nullcontext()

    def decide(variable: VariableTracker) -> bool | None:
        counters = counters_told()  # of this scan: one in its body has its own, or none
        return None if counters is None else counters.decide(variable.as_proxy().node)

    return comparisons_are_known(decide)


def check_branches(graph: fx.Graph, xs: VariableTracker) -> None:
    """Check what was decided in the trace of ``graph``, for as many steps as ``xs`` has."""
    counters = counters_told()
    if counters is not None:
        counters.check(graph, example_value(xs).shape[0])


def _counted(value: Any) -> _Counted | None:
    """Return what ``value`` is, if it is a number that steps carry, scaled and shifted by ints."""
    if not isinstance(value, fx.Node):
        return None
    k = carry_of(value)
    if k is not None:
        return _Counted(k)
    target, operands = IN_PLACE.get(value.target, value.target), value.args
    if target is of_number and operands[0] == "int":
        return _counted(operands[1])
    if target is operator.neg:
        target, operands = operator.mul, (operands[0], -1)
    if target not in _AFFINE or len(operands) != 2:
        return None
    scale = 1
    if type(operands[0]) is int:
        scale, operands = -1 if target is operator.sub else 1, operands[::-1]
    before = _counted(operands[0])
    if before is None or type(operands[1]) is not int:
        return None
    times, more = _AFFINE[target](operands[1])
    return before.scaled(scale * times, scale * more)
