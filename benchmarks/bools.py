"""Bodies that read, carry and store bools, compiled, beside the loop.

python -m benchmarks.bools
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from tests.oracle import loop
from torch_scan_hop import scan, tree

ROUNDS = 15

ABOUT = [
    "Compiled scans in parts of the loop's time (medians; contestants take turns). `before`: with",
    "Inductor's own code for bools, which takes them one by one.",
    "",
]


def resets(h: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Generalised advantages, of 4096 lanes."""
    delta, done = x
    h = delta + 0.95 * torch.where(done, 0.0, h)
    return h, h


def attention(h: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """128 tokens of width 64, a mask for each step."""
    values, mask = x
    scores = (h @ h.mT / 8).masked_fill(~mask, -1e9)
    h = torch.tanh(scores.softmax(-1) @ h + values)
    return h, h.sum()


def life(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Conway's Game of Life, 128 by 128."""
    places = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
    around = torch.stack([c.int().roll(place, (0, 1)) for place in places]).sum(0)
    c = ((around == 3) | (c & (around == 2))) ^ x
    return c, c.sum()


def parity(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """300 by 300."""
    c = c ^ x
    return c, c.any()


def _bodies() -> dict[str, tuple[Callable[..., Any], Any, Any]]:
    normal, bools = torch.randn, lambda *sizes: torch.rand(*sizes) > 0.5
    return {
        "resets": (resets, torch.zeros(4096), (normal(128, 4096), bools(128, 4096))),
        "attention": (attention, normal(128, 64), (normal(20, 128, 64), bools(20, 128, 128))),
        "life": (life, bools(128, 128), bools(64, 128, 128)),
        "parity": (parity, bools(300, 300), bools(64, 300, 300)),
    }


def measure(name: str, as_torch: bool) -> dict[str, float]:
    """Milliseconds: the loop's, and the scan's in parts of it, forward and in training."""
    torch.manual_seed(0)
    if as_torch:
        from torch_scan_hop._torch import inductor_bools

        inductor_bools.let_bools_be_vectors = lambda: None
        torch._inductor.config.force_disable_caches = True
    body, init, xs = _bodies()[name]
    found: dict[str, float] = {}
    for training in (False, True) if tree.tensors(init)[0].is_floating_point() else (False,):
        leaves = [leaf for leaf in tree.tensors((init, xs)) if leaf.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_(training)

        def call(run: Callable[..., Any], training: bool = training) -> None:
            carry, ys = run()
            if training:
                torch.autograd.grad(carry.sum() + ys.sum(), leaves)  # noqa: B023

        calls = {
            "loop": lambda: call(lambda: loop(body, init, xs)),
            "scan": lambda: call(lambda: scan(body, init, xs, compile=True)),
        }
        for each in (*calls.values(), *calls.values()):
            each()
        ms = {way: t.median for way, t in interleaved(calls, ROUNDS).items()}
        found["training" if training else "forward"] = ms["scan"] / ms["loop"]
        found["loop, training" if training else "loop"] = ms["loop"]
    return found


def main() -> None:
    page = Page("Bools", "bools")
    rows: list[list[object]] = []
    for name in _bodies():
        before, after = (page.measured("measure", name, way, limit=300) for way in (True, False))
        for kind, at in (("forward", "loop"), ("training", "loop, training")):
            if kind in after:
                times = [f"{after[at]:.2f}", f"{before[kind]:.2f}", f"{after[kind]:.2f}"]
                rows.append([name, kind, *times])
    page.write([*ABOUT, *report.table(["body", "", "loop, ms", "before", "now"], rows)])


if __name__ == "__main__":
    main()
