"""Keep what is known of the scan that is being captured: its steps, and what may run instead."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_scan_hop._torch.replaced import replaced

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


class _AtHand(threading.local):
    """What is :func:`told` of the scan that is being captured."""

    #: the leaves that differ after the first step, and the places of what steps leave
    steady: Steady = ((), ())
    #: which leaves are numbers, also of other scans of the same steps
    numbers: frozenset[int] = frozenset()
    #: the Counters that decide branches; None if a branch on a number is refused
    counters: Any = None
    #: where a tensor is noted that is read as a number; None if that is refused
    reads: list[Any] | None = None
    #: if a body is traced: a scan that it calls is another one, or a part of this one
    is_in_body = False
    #: if the scan is called in the body of another
    is_within = False
    #: of so many multiplications in a step, for rows that a mask may leave out, a loop is slower
    most_products: float = math.inf
    part = SomeSteps()

    @property
    def loop_may_run(self) -> bool:
        """True if a body may be refused, since a loop runs it then."""
        return self.most_products < math.inf


at_hand = _AtHand()


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
    is_within = at_hand.is_within or at_hand.is_in_body
    return replaced(at_hand, **known, is_in_body=False, is_within=is_within, part=SomeSteps())


def in_a_body() -> contextlib.AbstractContextManager[None]:
    return replaced(at_hand, is_in_body=True)


def a_loop_may_run(most_products: float) -> contextlib.AbstractContextManager[None]:
    return replaced(at_hand, most_products=most_products)


def in_part(part: SomeSteps) -> contextlib.AbstractContextManager[None]:
    return replaced(at_hand, part=part)
