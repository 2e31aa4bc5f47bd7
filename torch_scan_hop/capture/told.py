"""Keep what is known of the scan that is being captured: its steps, and what may run instead."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_scan_hop._torch.replaced import ambient, replaced

Steady = tuple[tuple[str, ...], tuple[str, ...]]


class SomeSteps(NamedTuple):
    """Some of a scan's steps, which are parted since they branch differently."""

    #: if more steps come after it: what it counts are numbers in its carry
    keeps_counts: bool = False
    #: how many steps are traced as one
    block: int = 1
    #: by number of steps before the parts that were traced so far: what those began with
    before: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    #: how many steps are before this one
    begin: int = 0


_state = ambient(
    steady=((), ()),
    numbers=frozenset(),
    counters=None,
    reads=None,
    is_in_body=False,
    is_within=False,
    most_products=math.inf,
    part=SomeSteps(),
)


def told(
    settled: Iterable[str] = (),
    places: Iterable[str] = (),
    numbers: Iterable[int] = (),
    counters: Any = None,
    reads: list[Any] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Within, these leaves of the carry differ after the first step, steps leave something at these
    places, these leaves are Python numbers in the loop, and ``counters`` decide its branches.

    ``reads``: the tensors whose values a step reads as numbers; None if that is refused."""
    steady = (tuple(settled), tuple(places))
    numbers = frozenset(numbers)
    known = {"steady": steady, "numbers": numbers, "counters": counters, "reads": reads}
    is_within = is_within_a_body() or is_in_a_body()
    return replaced(_state, **known, is_in_body=False, is_within=is_within, part=SomeSteps())


def steady_state() -> Steady:
    """Return the leaves that differ after the first step, and the places of what steps leave."""
    steady: Steady = _state.steady
    return steady


def numbers_carried() -> frozenset[int]:
    """Return which leaves are numbers, also of other scans of the same steps."""
    numbers: frozenset[int] = _state.numbers
    return numbers


def in_a_body() -> contextlib.AbstractContextManager[None]:
    """Within, a body is traced: a scan that it calls is another one, or a part of this one."""
    return replaced(_state, is_in_body=True)


def is_in_a_body() -> bool:
    return bool(_state.is_in_body)


def is_within_a_body() -> bool:
    """Return True if the scan that is being captured is called in the body of another."""
    return bool(_state.is_within)


def counters_told() -> Any:
    """Return the Counters that decide branches; None if a branch on a number is refused."""
    return _state.counters


def reads_told() -> list[Any] | None:
    """Return where a tensor is noted that is read as a number; None if that is refused."""
    reads: list[Any] | None = _state.reads
    return reads


def also_carried(numbers: Iterable[int]) -> None:
    """Add to the numbers until what is ``told`` ends."""
    _state.numbers |= frozenset(numbers)


def a_loop_may_run(most_products: float) -> contextlib.AbstractContextManager[None]:
    """Within, a body may be refused, since a loop runs it then.

    ``most_products``: of so many multiplications in a step, for rows that a mask may leave out, the
    loop is slower.
    """
    return replaced(_state, most_products=most_products)


def most_products() -> float:
    return float(_state.most_products)


def in_part(part: SomeSteps) -> contextlib.AbstractContextManager[None]:
    return replaced(_state, part=part)


def part_told() -> SomeSteps:
    return _state.part  # type: ignore[no-any-return]


def loop_may_run() -> bool:
    return most_products() < math.inf
