"""Random bodies at sizes that matter, eager and compiled, beside the Python loop.

    python -m benchmarks.never_slower [--programs 300] [--seed 0] [--modes eager,compiled]

The bodies are those of the fuzzer (``tests/fuzz``), with sizes and a dtype drawn anew. Each
program is timed forward and in training, contestants in turns; the worst are printed with their
text. Values are compared with the loop's before.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks import child, report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from tests.fuzz.check import load, weighted_sum
from tests.fuzz.generate import DEFAULT, generate
from tests.oracle import with_signature_of_scan
from torch_scan_hop import scan, tree

CHUNK = 5  # programs of one process
SECONDS = 150  # of one program
LONGEST = 1.5  # of one call of the loop
ROUNDS = 7
WORST = 20
FEATURES = [f for f in DEFAULT if f not in ("custom", "stops", "nested")]
DTYPES = {"torch.float32, torch.complex64": 7, "torch.float64, torch.complex128": 2}
LIMIT = 1.1


def text_of(seed: int) -> str:
    """A program of the fuzzer's, with sizes that a user's may have."""
    text = generate(seed, FEATURES).text()
    rng = random.Random(seed)
    widths = [round(math.exp(rng.uniform(math.log(4), math.log(512)))) for _ in "NMK"]
    if rng.random() < 0.3:
        widths[0] = round(math.exp(rng.uniform(math.log(512), math.log(100_000))))
        widths[1:] = [min(width, 16) for width in widths[1:]]
    steps = round(math.exp(rng.uniform(math.log(16), math.log(4096))))
    while math.prod(sorted(widths)[1:]) * steps > 2e7:  # what a step may make, all steps together
        steps = max(16, steps // 2)
        widths[widths.index(max(widths))] //= 2
    sizes = ", ".join(map(str, [*widths, steps]))
    # who asks for less memory knows that steps run twice
    text = re.sub(r', checkpoint=(?:"[^"]*"|\d+|\w+\(\d+\))', "", text)
    text = re.sub(r"^N, M, K, T = .*$", f"N, M, K, T = {sizes}", text, flags=re.M)
    dtype = rng.choices(list(DTYPES), list(DTYPES.values()))[0]
    return re.sub(r"^dtype, cdtype = .*$", f"dtype, cdtype = {dtype}", text, flags=re.M)


def _steps(combine_fn: Any, init: Any, xs: Any, trip_count: int, reverse: bool) -> Any:
    """As a user would write them, for trees of any kind."""
    rows = [leaf.unbind(0) for leaf in tree.tensors(xs)]
    carry, ys = init, []
    for t in reversed(range(trip_count)) if reverse else range(trip_count):
        carry, y = combine_fn(carry, tree.unflatten(xs, [row[t] for row in rows]))
        ys.append(y)
    if reverse:
        ys.reverse()
    stacked = [torch.stack(leaves) for leaves in zip(*map(tree.tensors, ys), strict=True)]
    return carry, tree.unflatten(ys[0], stacked)


plain_loop = with_signature_of_scan(_steps)


def _compiled(*args: Any, **kwargs: Any) -> Any:
    return scan(*args, **kwargs, compile=True)


WAYS: dict[str, Callable[..., Any]] = {"eager": scan, "compiled": _compiled}


class _TooLong(Exception):
    pass


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(seeds: list[int], modes: list[str]) -> list[dict[str, Any]]:
    """For each program that runs: milliseconds by direction and way."""
    rows = []
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed, "ms": {}, "said": ""}
        try:
            with _at_most(SECONDS), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for direction in ("forward", "training"):
                    _time(text_of(seed), direction, modes, row)
                row["loops"] = any("plain Python loop" in str(w.message) for w in caught)
        except _TooLong:
            row["said"] = f"more than {SECONDS} s"
        except Exception as error:
            row["said"] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"[:150]
        torch._dynamo.reset()
        rows.append(row)
    return rows


def _time(text: str, direction: str, modes: list[str], row: dict[str, Any]) -> None:
    training = direction == "training"
    calls = {way: _call(text, WAYS.get(way, plain_loop), training) for way in ("loop", *modes)}
    start = time.perf_counter()
    expected = calls["loop"]()
    if time.perf_counter() - start > LONGEST:
        raise ValueError("a loop that takes too long")
    for way in modes:
        found = calls[way]()
        calls[way]()
        if not _is_close(found, expected):
            row["said"] += f"{way}, {direction}: other numbers; "
    row["ms"][direction] = {way: t.median for way, t in interleaved(calls, ROUNDS).items()}


def _call(text: str, run: Callable[..., Any], training: bool) -> Callable[[], list[Tensor]]:
    namespace = load(text)
    inputs = namespace["inputs"]()
    wanted = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]

    def call() -> list[Tensor]:
        torch.manual_seed(0)
        if not training:
            with torch.no_grad():
                return tree.tensors(namespace["program"](run, **inputs))
        total = weighted_sum(namespace["program"](run, **inputs))
        return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))

    return call


def _is_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Roughly: other sums of many terms in float32; what is wrong is the fuzzer's to find."""
    return len(found) == len(expected) and all(
        torch.allclose(a, b.to(a.dtype), rtol=0.05, atol=0.05 * float(b.abs().max() + 1e-3),
                       equal_nan=True)
        for a, b in zip(found, expected, strict=True)
        if a.numel() and a.is_floating_point() and bool(torch.isfinite(b).all())
    )  # fmt: skip


def _program(seed: int) -> list[str]:
    return ["```python", *text_of(seed).splitlines(), "```", ""]


def _ratios(rows: list[dict[str, Any]], way: str, direction: str) -> list[tuple[float, int]]:
    found = [
        (row["ms"][direction][way] / row["ms"][direction]["loop"], row["seed"])
        for row in rows
        if direction in row["ms"] and not (way == "eager" and row.get("loops"))
    ]
    return sorted(found, reverse=True)


def lines_of(rows: list[dict[str, Any]], modes: list[str]) -> Iterator[str]:
    timed = [row for row in rows if row["ms"]]
    said = [row for row in rows if row["said"] and row["ms"]]
    loops = sum(bool(row.get("loops")) for row in rows)
    yield f"{len(timed)} of {len(rows)} programs were timed: others do not fit their new sizes, or"
    yield f"take too long; {loops} run as loops, and are not counted in eager mode."
    yield ""
    head = ["", "programs", "median", "90%", "99%", "worst", f"above {LIMIT}"]
    table = []
    for way in modes:
        for direction in ("forward", "training"):
            found = [ratio for ratio, _ in _ratios(rows, way, direction)]
            if found:
                at = [found[int(len(found) * (1 - q))] for q in (0.5, 0.9, 0.99)]
                above = sum(ratio > LIMIT for ratio in found)
                table.append([f"{way}, {direction}", len(found), *(f"{x:.2f}" for x in at),
                              f"{found[0]:.2f}", above])  # fmt: skip
    yield from report.table(head, table)
    yield from (f"- {row['seed']}: {row['said']}" for row in said)
    yield ""
    worst = sorted(
        ((ratio, seed, way, direction) for way in modes for direction in ("forward", "training")
         for ratio, seed in _ratios(rows, way, direction)), reverse=True)[:WORST]  # fmt: skip
    yield "## The worst"
    yield ""
    by_seed = {row["seed"]: row["ms"] for row in rows}
    for ratio, seed, way, direction in worst:
        if ratio > LIMIT:
            ms = by_seed[seed][direction]
            yield f"- {seed}: {way}, {direction}: {ratio:.2f} of the loop's {ms['loop']:.2f} ms"
    yield ""
    for seed in dict.fromkeys(seed for ratio, seed, *_ in worst if ratio > LIMIT):
        yield f"### {seed}"
        yield ""
        yield from _program(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", default="eager,compiled")
    options = parser.parse_args()
    modes = options.modes.split(",")
    page = Page("Never slower than the loop", "never_slower")
    rows: list[dict[str, Any]] = []
    seeds = range(options.seed, options.seed + options.programs)
    for first in range(0, len(seeds), CHUNK):
        chunk = list(seeds[first : first + CHUNK])
        found = child.measured(
            "benchmarks.never_slower:measure", chunk, modes, limit=CHUNK * SECONDS
        )
        rows += (
            [{"seed": seed, "ms": {}, "said": found["failed"]} for seed in chunk]
            if isinstance(found, dict)
            else found
        )
        page.keep(lines_of(rows, modes))  # so that a run that is ended keeps what it measured
        print(f"{len(rows)} programs", flush=True)
    page.write(lines_of(rows, modes))


if __name__ == "__main__":
    main()
