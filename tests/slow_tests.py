"""Which tests `make test` leaves to `make test-slow`, by what they took.

    make test ARGS=--durations=0 > log; python -m tests.slow_tests log

writes `slow_tests.txt`, to be run where `make test` no longer ends in its 15 minutes. A test is
slow above `SECONDS`; of the cases of one function the quickest stays, up to `SECONDS_OF_ONE`,
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


def durations(log: str) -> dict[str, float]:
    """Seconds of each test, of what `pytest --durations=0` prints."""
    found: dict[str, float] = defaultdict(float)
    for match in map(_LINE.match, log.splitlines()):
        if match:
            found[match[2]] += float(match[1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--add", action="store_true", help="keep what is listed already")
    args = parser.parse_args()
    names = slow(durations(args.log.read_text())) | (listed() if args.add else frozenset())
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"{len(names)} tests in {LIST}")
