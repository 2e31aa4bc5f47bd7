"""What is known of the steps of the scan that is being captured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch_scan_hop._torch.replaced import ambient, replaced

Steady = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass
class _Told:
    #: the leaves that differ after the first step, and the places where steps leave something
    steady: Steady
    #: which leaves of the carry are Python numbers, in the loop
    numbers: set[int] = field(default_factory=set)


_telling = [_Told(((), ()))]


@contextlib.contextmanager
def told(
    settled: Iterable[str] = (), places: Iterable[str] = (), numbers: Iterable[int] = ()
) -> Iterator[None]:
    _telling.append(_Told((tuple(settled), tuple(places)), set(numbers)))
    try:
        yield
    finally:
        _telling.pop()


def steady_state() -> Steady:
    return _telling[-1].steady


def numbers_carried() -> set[int]:
    """Return which leaves are numbers; more may be added, for other scans of the same steps."""
    return _telling[-1].numbers


_state = ambient(most_products=math.inf)


def a_loop_may_run(most_products: float) -> contextlib.AbstractContextManager[None]:
    """Within, a body may be refused, since a loop runs it then.

    ``most_products``: of so many multiplications in a step, for rows that a mask may leave out, the
    loop is slower.
    """
    return replaced(_state, most_products=most_products)


def most_products() -> float:
    return float(_state.most_products)
