"""Many programs: one after the other, or in child processes that may die."""

from __future__ import annotations

import collections
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .check import Outcome, check
from .generate import generate
from .modes import Mode, parse_mode
from .program import Program
from .shrink import shrink, tidied

CHUNK = 25
#: without a line for that long, a child hangs
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Found:
    seed: int
    mode: str
    outcome: Outcome

    @property
    def cluster(self) -> str:
        """Crashes with one message are one cause; of wrong numbers each may be another."""
        alone = f" seed {self.seed}" if self.outcome.status == "wrong" else ""
        return self.outcome.kind + alone


@dataclass
class Tally:
    """What became of the programs."""

    programs: int = 0
    seconds: float = 0.0
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    loops: collections.Counter[str] = field(default_factory=collections.Counter)
    #: by kernel of a GPU: the programs that reached it
    kernels: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Found] = field(default_factory=list)

    def add(self, found: Found) -> bool:
        """True for the first failure of its cluster."""
        self.statuses[found.outcome.status] += 1
        self.kernels.update(set(found.outcome.kernels))
        if found.outcome.status == "loop":
            self.loops[found.outcome.where] += 1
        if not found.outcome.is_failure:
            return False
        is_new = all(f.cluster != found.cluster for f in self.failures)
        self.failures.append(found)
        return is_new


def run_here(
    seeds: Sequence[int], modes: Sequence[Mode], features: Sequence[str]
) -> Iterator[Found]:
    for seed in seeds:
        program = generate(seed, features)
        for mode in modes:
            yield Found(seed, mode.name, check(program, mode))


def run_isolated(
    seeds: Sequence[int], modes: Sequence[Mode], features: Sequence[str]
) -> Iterator[Found]:
    """As :func:`run_here`, in a child for each chunk; one that dies is a failure of its seed."""
    rest = list(seeds)
    while rest:
        chunk = rest[:CHUNK]
        last: tuple[int, str] | None = None
        done = 0
        child = _Child(chunk, modes, features)
        for line in child.lines():
            if "start" in line:
                last = (line["start"], line["mode"])
                continue
            last, done = None, chunk.index(line["seed"])
            yield Found(line["seed"], line["mode"], Outcome(**line["outcome"]))
        if child.ended_well:
            rest = rest[len(chunk) :]
            continue
        seed, mode = last or (chunk[done], modes[0].name)
        yield Found(seed, mode, Outcome("died", child.reason, child.reason))
        rest = rest[chunk.index(seed) + 1 :]


class _Child:
    """A process that runs some seeds and tells of each in a line of JSON."""

    def __init__(self, seeds: Sequence[int], modes: Sequence[Mode], features: Sequence[str]):
        self.reason = ""
        names = ",".join(m.name for m in modes)
        arguments = ["--seed", str(seeds[0]), "--programs", str(len(seeds)), "--modes", names]
        arguments += ["--features", ",".join(features), "--child"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", __package__, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    @property
    def ended_well(self) -> bool:
        return not self.reason

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        buffered = b""
        while True:
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
            if not ready:
                self.process.kill()
                self.process.wait()
                self.reason = f"no answer for {PATIENCE_S:.0f} s"
                return
            read = self.process.stdout.read1(65536)  # type: ignore[attr-defined]
            if not read:
                break
            *whole, buffered = (buffered + read).split(b"\n")
            yield from (json.loads(line) for line in whole if line.startswith(b"{"))
        code = self.process.wait()
        self.reason = "" if code == 0 else f"the process ended with {code}"


def tell_as_child(seeds: Sequence[int], modes: Sequence[Mode], features: Sequence[str]) -> None:
    for seed in seeds:
        program = generate(seed, features)
        for mode in modes:
            print(json.dumps({"start": seed, "mode": mode.name}), flush=True)
            outcome = check(program, mode)
            print(
                json.dumps({"seed": seed, "mode": mode.name, "outcome": vars(outcome)}), flush=True
            )


# --- one failure ---


def shrunk(found: Found, features: Sequence[str], seconds: float) -> Program:
    mode = parse_mode(found.mode)
    program = tidied(generate(found.seed, features))

    def fails(candidate: Program) -> bool:
        return check(candidate, mode).kind == found.outcome.kind

    return shrink(program, fails, seconds) if fails(program) else generate(found.seed, features)


def printed(program: Program, found: Found) -> str:
    """A Python file that shows the failure when it is run."""
    outcome = check(program, parse_mode(found.mode))
    message = " ".join((outcome.message or found.outcome.message).split())[:300]
    return (
        f"# seed {found.seed}, mode {found.mode}: {outcome.status or found.outcome.status}\n"
        f"# {message}\n{program.text()}\n\n"
        "if __name__ == '__main__':  # PYTHONPATH=. python this_file.py\n"
        "    from tests.fuzz.check import show\n\n"
        f"    show(__file__, {found.mode!r})\n"
    )


def timed(outcomes: Iterator[Found], tally: Tally) -> Iterator[Found]:
    start = time.monotonic()
    for found in outcomes:
        tally.seconds = time.monotonic() - start
        yield found
