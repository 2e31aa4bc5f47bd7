"""Long scans with few lanes, beside jax's.

    python -m benchmarks.thin [--quick]

An average that decays (EMA), and generalised advantage estimation (GAE, backwards in time, with
episodes that end), T = 1,000,000. Numbers of each contestant are compared with float64 in the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from torch_scan_hop import scan

T = 1_000_000
LANES = (1, 2, 8)
OURS, JAX, ASSOCIATIVE = "scan", "jax.lax.scan", "jax.lax.associative_scan"
CONTESTANTS = (OURS, JAX, ASSOCIATIVE)
TOLERANCE = 2e-4  # of the largest element


def ema(h: Any, x: Any) -> Any:
    h = 0.95 * h + 0.05 * x["x"]
    return h, h


def gae(h: Any, x: Any) -> Any:
    h = x["delta"] + x["discount"] * h
    return h, h


CASES: dict[str, tuple[Any, bool]] = {"ema": (ema, False), "gae": (gae, True)}


def inputs(case: str, lanes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(T, lanes, generator=generator)
    if case == "ema":
        return {"x": draw}
    going = torch.rand(T, lanes, generator=generator) > 0.005
    return {"delta": draw, "discount": 0.95 * going}


def coefficients(case: str, xs: dict[str, Any], ones: Any) -> tuple[Any, Any]:
    return (0.95 * ones, 0.05 * xs["x"]) if case == "ema" else (xs["discount"], xs["delta"])


def exact(case: str, xs: dict[str, Tensor], weights: Tensor) -> list[Tensor]:
    """Ys, and the gradients of xs, of a loop over rows of numpy's doubles."""
    import numpy

    double = {k: v.double().numpy() for k, v in xs.items()}
    a, b = coefficients(case, double, numpy.ones(weights.shape))
    order = range(T - 1, -1, -1) if CASES[case][1] else range(T)
    h, ys, into = numpy.zeros(weights.shape[1]), numpy.empty(a.shape), numpy.empty(a.shape)
    for t in order:
        into[t] = h
        h = ys[t] = a[t] * h + b[t]
    g, d_b, w = 0 * h, numpy.empty(a.shape), weights.double().numpy()
    for t in reversed(order):
        d_b[t] = g = g + w[t]
        g = a[t] * g
    found = [ys, *([0.05 * d_b] if case == "ema" else [d_b, d_b * into])]
    return [torch.from_numpy(v) for v in found]


def ours(case: str, xs: dict[str, Tensor], weights: Tensor, name: str) -> tuple[Any, Any]:
    """Forward, and training: ys and gradients, compiled."""
    step, reverse = CASES[case]
    init = torch.zeros(weights.shape[1])
    run = torch.compile(lambda xs: scan(step, init, xs, reverse=reverse)[1], fullgraph=True)
    leaves = {k: v.clone().requires_grad_() for k, v in xs.items()}

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [run(xs)]

    def train() -> list[Tensor]:
        ys = run(leaves)
        return [ys, *torch.autograd.grad(ys, [*leaves.values()], weights)]

    return forward, train


def of_jax(case: str, xs: dict[str, Tensor], weights: Tensor, name: str) -> tuple[Any, Any]:
    import jax

    step, reverse = CASES[case]
    init = jax.numpy.zeros(weights.shape[1])
    arrays = {k: jax.numpy.asarray(v.numpy()) for k, v in xs.items()}
    w = jax.numpy.asarray(weights.numpy())

    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def run(xs: Any) -> Any:
        if name == JAX:
            return jax.lax.scan(step, init, xs, reverse=reverse)[1]
        a, b = coefficients(case, xs, jax.numpy.ones(w.shape))
        return jax.lax.associative_scan(join, (a, b), reverse=reverse)[1]

    def both(xs: Any) -> Any:
        ys, pull = jax.vjp(run, xs)
        (found,) = pull(w)
        return [ys, *(found[k] for k in arrays)]

    jit_run, jit_both = jax.jit(run), jax.jit(both)
    return (
        lambda: [jax.block_until_ready(jit_run(arrays))],
        lambda: jax.block_until_ready(jit_both(arrays)),
    )


def measure(case: str, lanes: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each contestant, each way."""
    import numpy

    xs = inputs(case, lanes)
    weights = torch.randn(T, lanes, generator=torch.Generator().manual_seed(1))
    want = exact(case, xs, weights)
    found: dict[str, Any] = {}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "train": {}}
    for name in CONTESTANTS:
        try:
            pair = (ours if name == OURS else of_jax)(case, xs, weights, name)
        except ImportError:
            continue
        for how, call in zip(calls, pair, strict=True):
            arrays = (v.detach() if isinstance(v, Tensor) else v for v in call())
            check(f"{name}, {how}", [torch.from_numpy(numpy.array(v)) for v in arrays], want)
            call()
            calls[how][name] = call
    for how, contenders in calls.items():
        timings = interleaved(contenders, rounds)
        found[how] = {name: (t.median, t.low) for name, t in timings.items()}
    return found


def check(what: str, got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=False):
        error = float((g.double() - w).abs().max() / w.abs().max())
        if error > TOLERANCE:
            raise AssertionError(f"{what}: {error:.1e} off")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thin", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lanes, not written")
    options = parser.parse_args()
    page = Page("Long and thin", "thin")
    rows = []
    for case in CASES:
        for lanes in LANES[:1] if options.quick else LANES:
            for how, timings in page.measured("measure", case, lanes, 15, cold=True).items():
                rows.append(row_of(case, lanes, how, timings))
                print(rows[-1], flush=True)
    ratios = (f"/ {name}" for name in CONTESTANTS[1:])
    head = ["case", "lanes", "", *(f"{name}, ms" for name in CONTESTANTS), *ratios]
    about = (
        f"T = {T:,}. Medians (lower quartiles in brackets); contestants take turns in one process. "
        "Every result and gradient was within 2e-4 of float64's, of its largest element."
    )
    page.write([about, "", *report.table(head, rows)], keep=not options.quick)


def row_of(case: str, lanes: int, how: str, timings: dict[str, Any]) -> list[object]:
    cells: list[object] = [case, lanes, report.HOW[how]]
    for name in CONTESTANTS:
        median, low = timings.get(name, (float("nan"),) * 2)
        cells.append(f"{median:.2f} ({low:.2f})")
    ratios = (
        timings[OURS][0] / timings[name][0] if name in timings else float("nan")
        for name in CONTESTANTS[1:]
    )
    return [*cells, *(f"{r:.2f}" for r in ratios)]


if __name__ == "__main__":
    main()
