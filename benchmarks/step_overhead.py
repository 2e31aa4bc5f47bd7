"""What a step of a counted loop costs beyond its arithmetic, for the step of an LSTM.

    python -m benchmarks.step_overhead

The step is a product of [16, 128] by [128, 512] and one fused pointwise kernel; such a loop would
be one kernel, which is switched off here. A step's time is the slope between two trip counts.

``product``: ``torch.mm(out=)``, less the same call for matrices of one element.
``pointwise``: the loop without the product on one thread, less the same loop for one element.
``overhead``: the step less both. The fork of threads is in it, and what a second thread saves:
below zero, it saves more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from torch_scan_hop import scan
from torch_scan_hop.rewrites import using_options

B, H = 16, 128
SHORT, LONG = 256, 1024


def _cell(state: Any, gates: torch.Tensor) -> Any:
    h, c = state
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h


def _scan(step: Any, batch: int, width: int, T: int, threads: int, **options: Any) -> Any:
    """A call of the compiled loop of ``step`` over gates."""
    init = torch.zeros(batch, width), torch.zeros(batch, width)
    gates = torch.randn(T, batch, 4 * width)
    run = torch.compile(
        lambda init, gates: scan(step, init, gates), fullgraph=True, dynamic=False, options=options
    )

    def call() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        with torch.no_grad():
            run(init, gates)
        torch.set_num_threads(before)

    return call


def _products(batch: int, width: int, T: int) -> Callable[[], None]:
    h, u = torch.randn(batch, width), torch.randn(width, 4 * width if width > 1 else 1)
    out = torch.empty(batch, u.shape[1])

    def call() -> None:
        with torch.no_grad():
            for _ in range(T):
                torch.mm(h, u, out=out)

    return call


def measure(rounds: int) -> dict[str, float]:
    """Microseconds per step."""
    threads, u = torch.get_num_threads(), torch.randn(H, 4 * H) * 0.05

    def step(state: Any, gates: torch.Tensor) -> Any:
        return _cell(state, gates + state[0] @ u)

    made: dict[str, Callable[[int], Callable[[], None]]] = {
        "Python wrapper": lambda T: _scan(step, B, H, T, threads, cpp_wrapper=False),
        "C++ wrapper": lambda T: _scan(step, B, H, T, threads, cpp_wrapper=True),
        # Dynamo takes equal closures with equal options for the same
        "pointwise": lambda T: _scan(_cell, B, H, T, 1, cpp_wrapper=True, debug=False),
        "one lane": lambda T: _scan(_cell, 1, 1, T, 1, cpp_wrapper=True, debug=False),
        "product": functools.partial(_products, B, H),
        "one element": functools.partial(_products, 1, 1),
    }
    calls = {(name, T): make(T) for name, make in made.items() for T in (SHORT, LONG)}
    with using_options(one_kernel=False, blocks=False):
        for call in calls.values():
            call(), call()
        names = {f"{name} {T}": call for (name, T), call in calls.items()}
        timings = interleaved(names, rounds)
    return {
        name: 1e3
        * (timings[f"{name} {LONG}"].median - timings[f"{name} {SHORT}"].median)
        / (LONG - SHORT)
        for name in made
    }


def main() -> None:
    page = Page("A counted loop's step", "step_overhead")
    found = page.measured("measure", 31, cold=False)
    product = found["product"] - found["one element"]
    pointwise = found["pointwise"] - found["one lane"]
    rows: list[list[object]] = []
    for wrapper, target in (("Python wrapper", 6), ("C++ wrapper", 3)):
        parts = [found[wrapper], product, pointwise, found[wrapper] - product - pointwise]
        rows.append([wrapper, *(f"{us:.1f}" for us in parts), f"< {target}"])
    page.write(
        [
            f"lstm forward, B={B} H={H}, gates as xs; us per step, the slope from T={SHORT} to "
            f"{LONG}; medians.",
            "",
            *report.table(["", "step", "product", "pointwise", "overhead", "target"], rows),
            "",
            "product: `torch.mm(out=)` less its dispatch; pointwise: the rest of the step, on one",
            "thread; overhead: the step less both, with the fork of threads and what a second one",
            "saves: below zero, it saves more.",
        ]
    )


if __name__ == "__main__":
    main()
