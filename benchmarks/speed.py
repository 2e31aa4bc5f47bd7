"""One workload, all contestants, in this process: results are compared, then times are taken."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.body_workloads import BODIES
from benchmarks.contestants import CONTESTANTS, LOOP, Contestant, Skipped
from benchmarks.limits import least_ms, machine_rates
from benchmarks.timing import interleaved
from benchmarks.workloads import WORKLOADS, Case, Workload, case

TOLERANCE = 2e-3  # of the largest element, float32, sums over T
DIRECTIONS = ("forward", "train")


@dataclass(frozen=True)
class Row:
    """One cell of the table: a time, or the reason why there is none."""

    workload: str
    direction: str
    contestant: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    first_seconds: float = 0.0
    error: float | None = None
    #: what the machine could do it in, as a part of the median
    of_limit: float | None = None
    skipped: str = ""


def reason_of(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "alias" in line] or lines or [""]
    text = re.sub(r"\s+", " ", wanted[0]).replace("|", "/")
    return f"{type(error).__name__}: {text[:110]}"


def worst_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest element of its tensor."""
    assert len(found) == len(expected), (len(found), len(expected))
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item())
    return worst


class Field:
    """The contestants that can run a workload, each warmed up and compared with the loop."""

    def __init__(self, workload: Workload, names: list[str]) -> None:
        self.workload = workload
        self.given: Case = case(workload)
        self.expected = [t.detach().clone() for t in self._reference()]
        self.ready: dict[str, Contestant] = {}
        self.error: dict[str, float | None] = {}
        self.first: dict[str, dict[str, float]] = {}
        self.skipped: dict[str, dict[str, str]] = {d: {} for d in DIRECTIONS}
        for name in names:
            self._admit(name)

    def _reference(self) -> list[Tensor]:
        results = CONTESTANTS[LOOP](self.workload, self.given).results
        assert results is not None
        return results()

    def _admit(self, name: str) -> None:
        try:
            contestant = CONTESTANTS[name](self.workload, self.given)
        except Exception as error:
            reason = str(error) if isinstance(error, Skipped) else reason_of(error)
            for direction in DIRECTIONS:
                self.skipped[direction][name] = reason
            return
        self.ready[name] = contestant
        self.first[name] = {}
        self.error[name] = None
        for direction in DIRECTIONS:
            try:
                start = time.perf_counter()
                getattr(contestant, direction)()
                self.first[name][direction] = time.perf_counter() - start
                getattr(contestant, direction)()
            except Exception as error:
                self.skipped[direction][name] = reason_of(error)
        if contestant.results is None or name in self.skipped["train"]:
            return
        self.error[name] = worst_error(contestant.results(), self.expected)
        if not self.error[name] < TOLERANCE:  # type: ignore[operator]
            for direction in DIRECTIONS:
                self.skipped[direction][name] = f"WRONG: off by {self.error[name]:.1e}"

    def times(self, direction: str, rounds: int) -> list[Row]:
        out = self.skipped[direction]
        calls = {n: getattr(c, direction) for n, c in self.ready.items() if n not in out}
        rows, least = [], least_ms(self.given, direction)
        for name, timing in interleaved(calls, rounds).items():
            scale = self.ready[name].scale
            rows.append(
                Row(
                    self.workload.name,
                    direction,
                    name,
                    timing.median * scale,
                    timing.low * scale,
                    timing.high * scale,
                    timing.samples,
                    self.first[name][direction],
                    self.error[name],
                    least / (timing.median * scale),
                )
            )
        return rows + [Row(self.workload.name, direction, n, skipped=r) for n, r in out.items()]


def measure(workload: str, names: list[str], rounds: int) -> list[dict[str, Any]]:
    return measure_workload((WORKLOADS | BODIES)[workload], names, rounds)


def measure_workload(workload: Workload, names: list[str], rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    machine_rates()
    field = Field(workload, names)
    return [asdict(row) for d in DIRECTIONS for row in field.times(d, rounds)]
