"""Checkpoint policies: saved bytes and time against T: ``benchmarks/results/memory.md``.

    python -m benchmarks.memory [--quick]

Eager; the cell of ``tests/autodiff/test_memory.py`` in float32, and a tanh RNN. A policy takes no
larger T once its first call, which traces it, took ``LIMIT_SECONDS``, or fwd+bwd of the next T
would.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.child import RESULTS, measured
from benchmarks.contestants import python_loop
from benchmarks.plots import plot
from benchmarks.timing import interleaved
from tests.cells import Problem, TanhRNN
from tests.policies import keep_products
from torch_scan_hop import scan
from torch_scan_hop.schedule.policy import Binomial

LIMIT_SECONDS = 20.0
B, D, H = 4, 32, 64
LOOP = "python loop"


POLICIES: dict[str, Any] = {
    "None": None,
    "full": "full",
    "sqrt": "sqrt",
    "16": 16,
    "Binomial(8)": Binomial(8),
    "keep products": keep_products,
}


class ManyValues(TanhRNN):
    """The cell of ``tests/autodiff/test_memory.py``: several values per step for the backward."""

    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = D, H: int = H) -> Problem:
        given = super().problem(dtype, T, B, D, H)
        w, u = given.params["w"], given.params["u"]

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            a = torch.sin(x @ w + h @ u)
            h = torch.tanh(a) * torch.cos(a)
            return h, h.sum(-1)

        return Problem(cell, given.init, given.xs, {"w": w, "u": u})


CELLS = {"many values": ManyValues(), "tanh rnn": TanhRNN()}


@dataclass
class Training:
    """fwd+bwd of one cell under each policy."""

    cell: str
    T: int

    def __post_init__(self) -> None:
        self.problem = CELLS[self.cell].problem(torch.float32, self.T, B, D, H)
        self.problem.xs.requires_grad_()
        self.wanted = [*self.problem.params.values(), self.problem.xs]
        self.cotangents: list[Tensor] | None = None

    def outputs(self, policy: str) -> list[Tensor]:
        init, xs = self.problem.init, self.problem.xs
        if policy == LOOP:
            return list(python_loop(self.problem.combine_fn, init, xs))
        return list(scan(self.problem.combine_fn, init, xs, checkpoint=POLICIES[policy]))

    def train(self, policy: str) -> tuple[Tensor, ...]:
        outputs = self.outputs(policy)
        if self.cotangents is None:
            make = torch.Generator().manual_seed(2)
            self.cotangents = [torch.randn(o.shape, generator=make) for o in outputs]
        return torch.autograd.grad(outputs, self.wanted, self.cotangents)

    def saved_carries(self, policy: str) -> float:
        """What autograd holds between forward and backward, in carries' bytes.

        Unique storages; neither inputs nor the results that the caller holds anyway.
        """
        kept: list[Tensor] = []  # alive, so that addresses stay distinct

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self.outputs(policy)
        known = [*self.wanted, *self.problem.params.values(), self.problem.init, *outputs]
        skip = {t.untyped_storage().data_ptr() for t in known}
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        saved = sum(size for pointer, size in sizes.items() if pointer not in skip)
        return saved / self.problem.init.untyped_storage().nbytes()


def worst_difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(cell: str, T: int, policies: list[str], rounds: int) -> list[dict[str, Any]]:
    """All policies at one T, taking turns; gradients are compared first."""
    training = Training(cell, T)
    expected = training.train("None")
    calls, first, errors = {}, {}, {}
    for policy in policies:
        call = partial(training.train, policy)
        first[policy] = seconds(call)
        calls[policy] = call
        errors[policy] = worst_difference(call(), expected)
    rows = []
    for policy, timing in interleaved(calls, rounds).items():
        rows.append(
            {"cell": cell, "T": T, "policy": policy, "ms": timing.median, "low": timing.low,
             "high": timing.high, "n": timing.samples, "first": first[policy],
             "error": errors[policy], "saved": training.saved_carries(policy)}
        )  # fmt: skip
    return rows


def sweep(cell: str, sizes: list[int], rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    policies = [*POLICIES, LOOP]
    for T in sizes:
        found = measured("benchmarks.memory:measure", cell, T, policies, rounds, limit=400)
        if isinstance(found, dict):
            notes.append(f"- {cell}, T={T}: {found['failed']}")
            break
        rows += found
        for row in found if T < sizes[-1] else []:
            # the next T is four times as large
            if row["ms"] * 4e-3 > LIMIT_SECONDS or row["first"] > LIMIT_SECONDS:
                policies.remove(row["policy"])
                notes.append(
                    f"- {cell}: {row['policy']} stops at T={T}: its first call took "
                    f"{row['first']:.1f} s, a later one {row['ms'] / 1e3:.1f} s"
                )
        print(f"{cell}, T={T}: done", flush=True)
    return rows, notes


def targets(rows: list[dict[str, Any]]) -> list[list[object]]:
    of = {(r["cell"], r["T"], r["policy"]): r for r in rows}
    lines: list[list[object]] = []
    limits = {"sqrt": (lambda T: 3 * math.sqrt(T), 1.6), "full": (lambda T: T + 1.0, 1.5)}
    for (cell, T, policy), row in of.items():
        default = of.get((cell, T, "None"))
        if policy not in limits or default is None:
            continue
        most, slowest = limits[policy]
        cost = row["ms"] / default["ms"]
        lines.append([cell, policy, T, f"{row['saved']:.0f}", f"<= {most(T):.0f}",
                      report.verdict(row["saved"], most(T)), f"{cost:.2f}", f"<= {slowest}",
                      report.verdict(cost, slowest)])  # fmt: skip
    return lines


def markdown(rows: list[dict[str, Any]], notes: list[str]) -> list[str]:
    default = {(r["cell"], r["T"]): r for r in rows if r["policy"] == "None"}
    body = []
    for r in rows:
        base = default.get((r["cell"], r["T"]))
        over = f"{r['ms'] / base['ms']:.2f}" if base else "-"
        body.append([r["cell"], r["T"], r["policy"], f"{r['saved']:.0f}", f"{r['ms']:.1f}",
                     f"{r['low']:.1f}-{r['high']:.1f}", r["n"], over, f"{r['first']:.2f}",
                     f"{r['error']:.0e}"])  # fmt: skip
    head = ["cell", "T", "policy", "saved, carries", "ms", "quartiles", "n", "/ None", "first, s",
            "error"]  # fmt: skip
    goal = ["cell", "policy", "T", "saved, carries", "target", "", "time / None", "target", ""]
    images = []
    for key, unit in (("saved", "saved, in carries"), ("ms", "fwd+bwd, milliseconds")):
        for cell in CELLS:
            series = {
                p: [
                    (r["T"], max(r[key], 1.0))
                    for r in rows
                    if (r["cell"], r["policy"]) == (cell, p)
                ]
                for p in [*POLICIES, LOOP]
            }
            path = RESULTS / f"memory_{key}_{cell.replace(' ', '_')}.svg"
            images += [plot(path, f"{cell}: {unit}", "T", unit, series), ""]
    return [
        f"Eager, B={B} D={D} H={H}: a carry is {B * H * 4} bytes. `saved`: storages that autograd",
        "holds between forward and backward, without inputs and without the results. `error`:",
        "gradients against those of `None`. `python loop` is autograd's own.",
        "",
        "## Targets",
        "",
        *report.table(goal, targets(rows)),
        "## All policies",
        "",
        *report.table(head, body),
        *images,
        *notes,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="T up to 1024, not written")
    options = parser.parse_args()
    sizes = [64, 1024] if options.quick else [64, 256, 1024, 4096, 16384, 65536]
    start, before = time.perf_counter(), report.load()
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for cell in CELLS:  # written after each: a run that is cut off leaves what it found
        found, more = sweep(cell, sizes, 3)
        rows, notes = rows + found, notes + more
        minutes = (time.perf_counter() - start) / 60
        lines = report.header("Memory by checkpoint policy", "benchmarks.memory", before, minutes)
        text = "\n".join([*lines, *markdown(rows, notes)])
        if not options.quick:
            (RESULTS / "memory.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
