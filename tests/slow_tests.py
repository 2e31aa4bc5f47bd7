"""Which tests `make test` leaves to `make test-slow`, by what they took.

    make test ARGS=--durations=0 > log; python -m tests.slow_tests log

adds to `slow_tests.txt` (of several logs, such as those of two versions of torch, the longest time
of each test counts), to be run where `make test` no longer ends in its 15 minutes. With ``-m ''``
in ARGS, tests that are no longer slow leave it. A test is slow above `SECONDS`; of the cases of one function the quickest stays, up to `SECONDS_OF_ONE`,
so that nearly everything is tried in each run. Seconds are those of a machine on which the whole
suite once took 55 minutes, which is twice to three times the time of others.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 1.5
SECONDS_OF_ONE = 6.0
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*?)\s*$")


def listed() -> frozenset[str]:
    return frozenset(LIST.read_text().splitlines())


def slow(seconds: dict[str, float]) -> set[str]:
    cases = defaultdict(list)
    for name, taken in seconds.items():
        cases[name.split("[")[0]].append((taken, name))
    found = set()
    for quickest, *others in map(sorted, cases.values()):
        found.update(name for taken, name in others if taken > SECONDS)
        if quickest[0] > SECONDS_OF_ONE:
            found.add(quickest[1])
    return found


def durations(logs: list[Path]) -> dict[str, float]:
    """Seconds of each test, of what `pytest --durations=0` prints."""
    longest: dict[str, float] = {}
    for log in logs:
        for name, taken in _durations(log.read_text()).items():
            longest[name] = max(taken, longest.get(name, 0.0))
    return longest


def _durations(text: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for match in map(_LINE.match, text.splitlines()):
        if match:
            found[match[2]] += float(match[1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+")
    seconds = durations(parser.parse_args().logs)
    names = slow(seconds) | (listed() - seconds.keys())
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"{len(names)} tests in {LIST}")
