"""Branches on what steps count, as in ``if self.n == 0`` and ``if self.n % 3 == 0``.

A number that steps carry is a scalar, whose value a trace does not know. But if each step adds the
same int to it, it is known before the scan what each step finds. A branch is taken as the first
step takes it; after the trace, the count shows how many steps do. The program is guarded by what it
shows, so that a call that branches in another way is another capture.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.number_functions import comparisons_are_known
from torch_scan_hop._torch.dynamo.number_identity import numbers_are_told
from torch_scan_hop._torch.dynamo.number_positions import positions_are_known
from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.dynamo.variables import VariableTracker, example_value
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.capture.computed import (
    WRONG,
    Computed,
    ComputedBranch,
    call_of,
    computed,
    turning,
)
from torch_scan_hop.capture.counting import (
    MOST_PARTS,
    Branch,
    Comparison,
    Counted,
    Counting,
    Int,
    asked_position,
)
from torch_scan_hop.capture.number_arithmetic import COMPARISONS, of_number
from torch_scan_hop.capture.steady import BRANCH
from torch_scan_hop.capture.told import at_hand
from torch_scan_hop.capture.weak_numbers import carry_of
from torch_scan_hop.signature import output_node

_MIRRORED: dict[Comparison, Comparison] = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}
#: as ``n in (2, 5)`` is traced
_OF_FLAGS = (operator.or_, operator.and_)
#: by operator of a number and an int: what the int makes of the number, as a factor and a sum
_AFFINE: dict[Any, Callable[[int], tuple[int, int]]] = {
    operator.add: lambda n: (1, n),
    operator.sub: lambda n: (1, -n),
    operator.mul: lambda n: (n, 0),
}


_ANOTHER_ITEM = (
    ": each takes another item of a list or a dict, or gives torch another number. Index a tensor, "
    "as torch.stack(items)[n], add to one, as torch.arange(4) + n, or compare: (n == 2) | (n == 3)"
)


class StepsBranchDifferently(Unsupported):
    """``alike`` steps take the branch that the first one takes, and the next one another; with the
    same remainders again after ``period`` steps."""

    def __init__(self, where: str, alike: int = 0, period: int = 1) -> None:
        super().__init__(f"steps do not all take the same branch, at {where}")
        self.leaf, self.alike, self.period = f"{BRANCH}{where}", alike, period


class Counters:
    """The numbers that a scan begins with, by leaf of the carry, and the branches on them."""

    def __init__(self, starts: Mapping[int, Int]) -> None:
        self._starts = {k: n for k, n in starts.items() if isinstance(n, (int, torch.SymInt))}
        #: each once, though Dynamo asks if a value is a constant before it asks for it
        self._asked: dict[Branch, None] = {}
        #: by leaf, those of which it is known after the trace
        self.counting: dict[int, Counting] = {}

    def __bool__(self) -> bool:
        return bool(self._starts)

    def decide(self, flag: Any) -> Any:
        """Return what the node ``flag`` is at the first step; None if it compares no counter."""
        if flag.target is of_number and flag.args[0] in ("not", "bool"):
            decided = self.decide(flag.args[1])
            return not decided if decided is not None and flag.args[0] == "not" else decided
        if flag.target in _OF_FLAGS and all(map(_is_flag, flag.args)):
            parts = [self.decide(operand) for operand in flag.args]
            return None if None in parts else flag.target(*parts)
        compare, operands = COMPARISONS.get(flag.target), flag.args
        if compare is None:  # a number is asked if it is 0
            compare, operands = operator.ne, (flag, 0)
        if len(operands) != 2:
            return None
        number, bound = operands
        if all(isinstance(operand, fx.Node) for operand in operands):
            number, bound, compare = flag, 0, operator.ne
        if isinstance(number, (int, float)):
            number, bound, compare = bound, number, _MIRRORED.get(compare, compare)
        return self._ask(compare, number, bound)

    def position(self, number: Any) -> int | None:
        """Return what the node ``number`` is at the first step, where a list is asked for an item;
        None if it counts nothing."""
        return self._ask(asked_position, number, 0)

    def _ask(self, compare: Comparison, number: Any, bound: Any) -> Any:
        counted = _counted(number)
        if counted is not None and type(bound) is int:
            return self._note(Branch(compare, counted, bound, users_line()))
        made = computed(number)
        if made is None or not isinstance(bound, (int, float)) or made.k not in self._starts:
            return None
        if compare is asked_position:
            return self._computed_position(made)
        return self._compare(compare, made, bound)

    def _compare(self, compare: Comparison, made: Computed, bound: Any) -> bool | None:
        if compare in (operator.eq, operator.ne):  # neither below nor above
            sides = [self._compare(side, made, bound) for side in (operator.lt, operator.gt)]
            return None if None in sides else any(sides) == (compare is operator.ne)
        turn = turning(made, compare, bound, likely_value(self._starts[made.k]))
        if turn is None:
            return self._note(ComputedBranch(compare, made, bound, users_line()))
        count, before = turn
        ordered = operator.lt if before else operator.ge
        return self._note(Branch(ordered, Counted(made.k), count, users_line()))

    def _computed_position(self, made: Computed) -> int | None:
        """Return the item that is asked for, between the counts where another one is."""
        try:
            position = made.at(likely_value(self._starts[made.k]))
        except WRONG:
            return None
        is_it = type(position) is int and self._compare(operator.eq, made, position)
        return position if is_it else None

    def _note(self, branch: Branch) -> Any:
        k = branch.counted.k
        if k is None:
            return branch.answer(0)
        if k not in self._starts or not branch.is_known(self._starts[k]):
            return None
        self._asked[branch] = None
        return branch.answer(self._starts[k])

    def asked(self) -> tuple[tuple[int, int], ...]:
        """Return the leaves that branches ask for, with what they begin with if that is known."""
        leaves = {branch.counted.k for branch in self._asked}
        known = {k: n for k, n in self._starts.items() if type(n) is int}
        return tuple((k, n) for k, n in known.items() if k in leaves)

    def check(self, graph: fx.Graph, steps: Int) -> None:
        """Raise StepsBranchDifferently if not all ``steps``, each of which is ``graph``, branch
        alike."""
        results: Any = output_node(graph).args[0]
        found = {k: _counting(k, results[k], start) for k, start in self._starts.items()}
        self.counting = {k: counting for k, counting in found.items() if counting is not None}
        changing, periods = {}, [1]
        for branch in self._asked:
            k = branch.counted.k
            if k is None or k not in self.counting:
                raise StepsBranchDifferently(branch.line)
            alike = branch.alike(self._starts[k], self.counting[k], steps)
            if alike == 1 and branch.never_again(self.counting[k]) and _are_many(steps):
                raise StepsBranchDifferently(branch.line + _ANOTHER_ITEM)
            if alike is not steps:
                changing[alike] = branch.line
                periods.append(branch.period(self._starts[k], self.counting[k], steps) or 1)
        if changing:
            first = min(changing)
            raise StepsBranchDifferently(changing[first], first, math.lcm(*periods))


def _counting(k: int, after: Any, start: Int) -> Counting | None:
    """Return how leaf ``k``, which a step leaves as ``after``, goes on; None if it is not known."""
    counted = _counted(after)
    if counted is None or counted.shift:
        return None
    if counted.k is None:
        return Counting(0, counted.more, 0)
    if counted.k != k or (counted.modulus and not 0 <= start < counted.modulus):
        return None
    if counted.times == -1 and not counted.modulus:
        return Counting(-1, counted.more, 0)
    if counted.times != 1:
        return None
    return Counting(1, counted.more, counted.modulus)


def _are_many(steps: Int) -> bool:
    return type(steps) is int and steps > MOST_PARTS


def _is_flag(operand: Any) -> bool:
    return isinstance(operand, fx.Node) and operand.meta["example_value"].dtype == torch.bool


@contextlib.contextmanager
def branches_are_decided() -> Iterator[None]:
    """Python branches on a comparison of a counter as the first step does, if counters are told,
    and takes the item, the key and the text that it takes."""

    def known_by(ask: Callable[[Counters, Any], Any]) -> Callable[[VariableTracker], Any]:
        def answer(variable: VariableTracker) -> Any:
            counters = at_hand.counters  # of this scan: one in its body has its own, or none
            return None if counters is None else ask(counters, variable.as_proxy().node)

        return answer

    with (
        comparisons_are_known(known_by(Counters.decide)),
        positions_are_known(known_by(Counters.position)),
        numbers_are_told(known_by(Counters.position)),
    ):
        yield


def check_branches(graph: fx.Graph, xs: VariableTracker) -> None:
    """Check what was decided in the trace of ``graph``, for as many steps as ``xs`` has."""
    counters = at_hand.counters
    if counters is not None:
        counters.check(graph, example_value(xs).shape[0])


def _counted(value: Any) -> Counted | None:
    """Return what ``value`` is, if it is a number that steps carry, scaled and shifted by ints."""
    if not isinstance(value, fx.Node):
        return None
    k = carry_of(value)
    if k is not None:
        return Counted(k)
    if value.target is torch.full and value.args[0] == () and type(value.args[1]) is int:
        return Counted(None, 0, value.args[1])
    function, operands = call_of(value)
    if function in (int, operator.pos):
        return _counted(operands[0])
    if function is operator.neg:
        function, operands = operator.mul, (operands[0], -1)
    if (
        function is operator.and_
        and type(operands[1]) is int
        and operands[1] & (operands[1] + 1) == 0
    ):
        function, operands = operator.mod, (operands[0], operands[1] + 1)
    if function is operator.mod:
        before, modulus = _counted(operands[0]), operands[1]
        return before.remainder(modulus) if before and type(modulus) is int else None
    if function not in _AFFINE:
        return None
    scale = 1
    if type(operands[0]) is int:
        scale, operands = -1 if function is operator.sub else 1, operands[::-1]
    before = _counted(operands[0])
    if before is None or type(operands[1]) is not int:
        return None
    times, more = _AFFINE[function](operands[1])
    return before.scaled(scale * times, scale * more)
