"""Bytes kept for the backward: ``python benchmarks/residual_bytes.py`` (CPU, counted, exact).

Counts the storages alive after a forward because of it: those that autograd saved and those of
the results, each once; parameters and inputs are listed apart, since every row keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cells import CELLS, Problem

T, B, D, H = 128, 8, 256, 256
CELLS_SHOWN = ("tanh_rnn", "gru", "lstm", "linear_recurrence")


def kept_bytes(run: Callable[[], Any], given: list[torch.Tensor]) -> int:
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = run()
    for leaf in pytree.tree_leaves(result):
        keep(leaf)
    for tensor in given:
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(s.nbytes() for s in storages.values())


def python_loop(p: Problem) -> Any:
    carry, ys = p.init, []
    for x in p.xs.unbind(0):
        carry, y = p.combine_fn(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def ours(p: Problem, checkpoint: Any = None) -> Any:
    from torch_scan_hop import scan

    return scan(p.combine_fn, p.init, p.xs, checkpoint=checkpoint)


WAYS: dict[str, Callable[[Problem], Any]] = {
    "Python loop": python_loop,
    "scan": ours,
    'scan, checkpoint="sqrt"': lambda p: ours(p, "sqrt"),
    'scan, checkpoint="full"': lambda p: ours(p, "full"),
}


def measure(run: Callable[[Problem], Any], name: str) -> str:
    p = CELLS[name].problem(torch.float32, T, B, D, H)
    given = [*p.params.values(), p.xs, *pytree.tree_leaves(p.init)]
    return f"{kept_bytes(lambda: run(p), given) / 2**20:.2f}"


def main() -> None:
    print(f"MiB kept after the forward, T={T} B={B} D=H={H}, float32, torch {torch.__version__}")
    print("(saved tensors and results; inputs and parameters not counted)\n")
    print("| | " + " | ".join(WAYS) + " |")
    print("|---|" + "---:|" * len(WAYS))
    for name in CELLS_SHOWN:
        print(f"| {name} | " + " | ".join(measure(run, name) for run in WAYS.values()) + " |")


if __name__ == "__main__":
    main()
