"""What a mutant is, and how long the fuzzer looks for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from ..campaign import Found, run_here
from ..check import check
from ..generate import generate
from ..modes import Mode, parse_mode, parse_modes


@dataclass(frozen=True)
class Mutant:
    """A mend taken out.

    ``issue``: the letter of the bug in the issue. ``modes`` and ``features``: what finds it.
    ``taken_out``: the first line of its docstring.
    """

    name: str
    issue: str
    modes: str
    features: tuple[str, ...]
    taken_out: str
    applied: Callable[[], AbstractContextManager[object]]

    @property
    def patience(self) -> int:
        """So many programs are tried: fewer where each is compiled."""
        is_compiled = any(mode.backend == "inductor" for mode in parse_modes(self.modes))
        return 100 if is_compiled else 200


MUTANTS: dict[str, Mutant] = {}


def mutant(
    issue: str, modes: str, features: str
) -> Callable[[Callable[[], Iterator[object]]], Mutant]:
    """Register a generator function as the mutant of its name."""

    def register(function: Callable[[], Iterator[object]]) -> Mutant:
        first_line = (function.__doc__ or "").strip().splitlines()[0]
        made = Mutant(
            function.__name__,
            issue,
            modes,
            tuple(features.split(",")),
            first_line,
            contextmanager(function),
        )
        MUTANTS[made.name] = made
        return made

    return register


@dataclass(frozen=True)
class Search:
    """``programs`` were run until ``found``, or until there were no more."""

    programs: int
    found: Found | None
    seconds: float = 0.0


def search(
    name: str,
    seeds: Sequence[int] | None = None,
    modes: Sequence[Mode] | None = None,
    features: Sequence[str] | None = None,
) -> Search:
    """Run programs with the mutant until one fails that does not fail without it."""
    chosen = MUTANTS[name]
    seeds = range(chosen.patience) if seeds is None else seeds
    modes = parse_modes(chosen.modes) if modes is None else modes
    features = chosen.features if features is None else features
    start = time.monotonic()
    for n, seed in enumerate(seeds, 1):
        with chosen.applied():
            failures = [f for f in run_here([seed], modes, features) if f.outcome.is_failure]
        for found in failures:
            if not _fails_anyway(found, features):
                return Search(n, found, time.monotonic() - start)
    return Search(len(seeds), None, time.monotonic() - start)


def _fails_anyway(found: Found, features: Sequence[str]) -> bool:
    program = generate(found.seed, features)
    return check(program, parse_mode(found.mode)).kind == found.outcome.kind
