"""Mends taken out again, one at a time: does the fuzzer find what they mended?

Each entry is a context manager that breaks the package as it was broken before the mend.
``python -m tests.fuzz --until-found NAME --modes ...`` tells after how many programs a failure
shows that is none without the mutant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest import mock

from .campaign import Found, run_here
from .check import check
from .generate import generate
from .modes import Mode, parse_mode

Mutant = Callable[[], AbstractContextManager[object]]
MUTANTS: dict[str, Mutant] = {}


def mutant(function: Callable[[], Iterator[object]]) -> Mutant:
    """Register a generator function as the mutant of its name."""
    made = contextmanager(function)
    MUTANTS[function.__name__] = made
    return made


@dataclass(frozen=True)
class Search:
    """``programs`` were run until ``found``, or until there were no more."""

    programs: int
    found: Found | None


def search(name: str, seeds: range, modes: list[Mode], features: tuple[str, ...]) -> Search:
    for n, seed in enumerate(seeds, 1):
        with MUTANTS[name]():
            failures = [f for f in run_here([seed], modes, features) if f.outcome.is_failure]
        for found in failures:
            if not _fails_anyway(found, features):
                return Search(n, found)
    return Search(len(seeds), None)


def _fails_anyway(found: Found, features: tuple[str, ...]) -> bool:
    program = generate(found.seed, features)
    return check(program, parse_mode(found.mode)).kind == found.outcome.kind


@mutant
def gradient_of_init_lost() -> Iterator[object]:
    """Every backend: what ``init`` is made of gets no gradient."""
    import torch_scan_hop
    from torch_scan_hop import tree

    real = torch_scan_hop.scan

    def scan(body: object, init: object, *args: object, **kwargs: object) -> object:
        init = tree.map_leaves(lambda v: v.detach() if hasattr(v, "detach") else v, init)
        return real(body, init, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(torch_scan_hop, "scan", scan):
        yield None
