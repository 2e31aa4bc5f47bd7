"""What is known of the steps of the scan that is being captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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
