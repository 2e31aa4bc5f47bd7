"""Every target of the project beside the number reached, measured anew: what ``make bench`` runs.

    python -m benchmarks.targets [--section NAME ...]

Fewer rounds, sizes and contestants than on the pages of single modules, which take over an hour
in all; the same measurements otherwise, each in a fresh process, results compared there with the
Python loop's. XLA's rows need torch_xla, and those beside jax need jax.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.contestants import COMPILED, EAGER, JAX, LOOP
from benchmarks.page import Page
from benchmarks.report import HOW, MODULE, Rows
from benchmarks.sections import Session

ROUNDS = 7


@dataclass(frozen=True)
class Line:
    """``reached`` is at most ``limit``, or at least."""

    what: str
    reached: float
    limit: float
    unit: str = ""
    at_least: bool = False

    def cells(self) -> list[object]:
        is_met = self.reached >= self.limit if self.at_least else self.reached <= self.limit
        relation = ">=" if self.at_least else "<="
        return [
            self.what,
            f"{self.reached:.2f}{self.unit}",
            f"{relation} {self.limit:g}{self.unit}",
            "met" if is_met else "**not met**",
        ]


def rows(session: Session, where: str, *arguments: Any, **how: Any) -> Rows:
    """What fails is told of on the page: the other sections are measured all the same."""
    what = f"{where} of {', '.join(map(str, arguments)) or 'all'}"
    return session.run(what, f"benchmarks.{where}", *arguments, **how)


@dataclass(frozen=True)
class Medians:
    """By direction and contestant; what was not timed or was wrong is missing."""

    of: dict[tuple[str, str], dict[str, Any]]

    @classmethod
    def of_rows(cls, found: Rows) -> Medians:
        return cls({(r["direction"], r["contestant"]): r for r in found if r["median"]})

    def ratio(self, name: str, direction: str, who: str, base: str, limit: float) -> Iterator[Line]:
        mine, other = self.of.get((direction, who)), self.of.get((direction, base))
        if mine and other:
            what = f"{name} {HOW[direction]}, {who} / {base}"
            yield Line(what, mine["median"] / other["median"], limit)

    def value(
        self, name: str, direction: str, what: str, key: str, limit: float, **how: Any
    ) -> Iterator[Line]:
        """Of ours compiled."""
        mine = self.of.get((direction, COMPILED))
        if mine:
            yield Line(f"{name} {HOW[direction]}, {what}", mine[key], limit, **how)


def speed(session: Session, workload: str, *contestants: str) -> Medians:
    found = rows(session, "speed:measure", workload, list(contestants), ROUNDS, limit=600)
    session.failures += [
        f"- {workload}, {HOW[r['direction']]}, {r['contestant']}: {r['skipped']}"
        for r in found
        if r["skipped"] and r["contestant"] not in (MODULE, JAX)
    ]
    return Medians.of_rows(found)


# forward and training in eager mode beside the loop; compiled training beside jax's
RECURRENCES = {
    "lstm": (0.9, 0.6, 0.4),
    "gru": (0.9, 0.6, 0.4),
    "lru": (0.9, 0.6, 0.6),
    "layers": (1.05, 1.05, 1.0),
    "ssm": (1.05, 1.05, 0.6),
}


def recurrences(session: Session) -> Iterator[Line]:
    for name, (forward, train, jax) in RECURRENCES.items():
        found = speed(session, name, LOOP, EAGER, COMPILED, MODULE, JAX)
        yield from found.ratio(name, "forward", EAGER, LOOP, forward)
        yield from found.ratio(name, "train", EAGER, LOOP, train)
        yield from found.ratio(name, "train", COMPILED, LOOP, 1.0)
        yield from found.ratio(name, "train", COMPILED, MODULE, 1.0)
        yield from found.ratio(name, "train", COMPILED, JAX, jax)
        if name != "layers":
            what = "of the machine's limit"
            yield from found.value(name, "train", what, "of_limit", 0.6, at_least=True)


def bodies(session: Session) -> Iterator[Line]:
    found = speed(session, "gae", LOOP, EAGER, COMPILED, JAX)
    for direction in ("forward", "train"):
        yield from found.value("gae", direction, COMPILED, "median", 0.1, unit=" ms")
        yield from found.ratio("gae", direction, COMPILED, JAX, 2.0)
    for name in ("complex lru", "hmm", "attention", "solve", "cholesky"):
        found = speed(session, name, LOOP, EAGER, COMPILED, JAX)
        for direction in ("forward", "train"):
            yield from found.ratio(name, direction, EAGER, LOOP, 1.05)
            yield from found.ratio(name, direction, COMPILED, LOOP, 0.3)
            yield from found.ratio(name, direction, COMPILED, JAX, 0.6)
    for name in ("time x layers", "transformer layers"):
        found = speed(session, name, LOOP, EAGER, COMPILED)
        for direction in ("forward", "train"):
            yield from found.ratio(name, direction, EAGER, LOOP, 1.05)
            yield from found.ratio(name, direction, COMPILED, LOOP, 0.9)


def calls(session: Session) -> Iterator[Line]:
    for T in (1, 5, 20):
        for _, how, *microseconds in rows(session, "calls:measure", T):
            limit = 0.1 if how == "fwd" else 0.3
            more = float(microseconds[-1]) / 1000
            yield Line(f"eager call of T={T} {how}, beyond the loop's", more, limit, " ms")


def compiled_in_eager(session: Session) -> Iterator[Line]:
    took = {(name, who): float(ms) for name, who, ms, _ in rows(session, "eager_programs:compiled")}
    for name in dict.fromkeys(name for name, _ in took):
        ours, whole = (
            took[name, who] for who in ("scan(compile=True)", "torch.compile of the call")
        )
        yield Line(f"{name} fwd+bwd, compile=True / torch.compile of the call", ours / whole, 1.2)


def busy(session: Session) -> Iterator[Line]:
    for case in ("gae", "small lstm", "narrow lru", "lstm"):
        took = {(r["how"], r["who"]): r for r in rows(session, "busy:measure", case, 3)}
        for how in HOW.values():
            ours, jax = took.get((how, COMPILED)), took.get((how, JAX))
            if ours:
                yield Line(f"{case} {how}, busy / quiet machine", ours["busy"] / ours["quiet"], 2.5)
            if ours and jax:
                yield Line(
                    f"{case} {how}, {COMPILED} / jax, both busy", ours["busy"] / jax["busy"], 1
                )


def thin(session: Session) -> Iterator[Line]:
    from benchmarks.thin import ASSOCIATIVE, OURS
    from benchmarks.thin import JAX as SCAN_OF_JAX

    for case in ("ema", "gae"):
        for lanes in (1, 8):
            for found in rows(session, "thin:measure", case, lanes, 5, cold=True):
                for how, timings in found.items():
                    for other in (SCAN_OF_JAX, ASSOCIATIVE):
                        if other in timings:
                            what = f"{case}, lanes: {lanes}, T=1,000,000 {HOW[how]}, scan / {other}"
                            yield Line(what, timings[OURS][0] / timings[other][0], 1.0)


def products(session: Session) -> Iterator[Line]:
    for width in (64, 256, 1024):
        for batch in (1, 32, 128):
            sizes = rows(session, "lstm_sizes:measure", width, batch, 5, limit=600)
            found = Medians.of_rows(sizes)
            for direction in HOW:
                name = f"lstm H={width} B={batch}"
                yield from found.ratio(name, direction, COMPILED, MODULE, 1.0)


def first_calls(session: Session) -> Iterator[Line]:
    for seconds in rows(session, "probes:first_eager_call"):
        yield Line("first call, eager lstm, training", seconds, 0.4, " s")
    lstm = "probes:compile_time", "lstm", COMPILED, 256
    name = "lstm fwd+bwd, compile time"
    for row in rows(session, *lstm, cold=True):
        yield Line(f"{name}, an empty machine", row["compile"], 5, " s")
    rows(session, *lstm)  # fills the caches, whatever has run before
    for row in rows(session, *lstm):
        yield Line(f"{name}, a second process", row["compile"], 1.5, " s")


def memory(session: Session) -> Iterator[Line]:
    peak = {
        r["contestant"]: r["allocator"]
        for who in (LOOP, EAGER, COMPILED)
        for r in rows(session, "probes:peak_memory", "lstm", who, [64])
    }
    for who in (EAGER, COMPILED):
        if who in peak and LOOP in peak:
            yield Line(
                f"lstm T=64 fwd+bwd, peak memory, {who} / {LOOP}", peak[who] / peak[LOOP], 1.1
            )


def xla(session: Session) -> Iterator[Line]:
    limits = {"lstm fwd": 1.05, "lstm fwd+bwd": 0.75}
    for sizes in ((256, 16, 128), (256, 1, 128), (256, 64, 128)):
        for workload, ratio in rows(session, "xla:beside_jax", *sizes, 5, limit=600):
            yield Line(f"XLA, {workload}, T, B, D = {sizes}, ours / jax", ratio, limits[workload])


SECTIONS: dict[str, Callable[[Session], Iterator[Line]]] = {
    section.__name__: section
    for section in (
        recurrences,
        bodies,
        calls,
        compiled_in_eager,
        busy,
        thin,
        products,
        first_calls,
        memory,
        xla,
    )
}

TITLES = {"xla": "XLA"}
ABOUT = [
    f"Medians of {ROUNDS} rounds or fewer, contestants in turns in one process; ratios but for",
    "what has a unit. What stands in the way of a target that is not met: `not_met.md`.",
    "",
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__)
    parser.add_argument("--section", choices=SECTIONS, nargs="+", help="these only, not written")
    options = parser.parse_args()
    page, session = Page("Targets", "targets"), Session(options)
    tables: list[str] = []
    reached = met = 0
    for name in options.section or SECTIONS:
        lines = [line.cells() for line in SECTIONS[name](session)]
        reached, met = reached + len(lines), met + sum(cells[-1] == "met" for cells in lines)
        tables += [f"## {TITLES.get(name) or name.replace('_', ' ').capitalize()}", ""]
        tables += report.table(["", "reached", "target", ""], lines)
        print(name, *lines, sep="\n", flush=True)
    failed = ["## Failed", "", *session.failures, ""] if session.failures else []
    about = [f"{met} of {reached} are met.", "", *ABOUT]
    page.write([*about, *tables, *failed], keep=not options.section)


if __name__ == "__main__":
    main()
