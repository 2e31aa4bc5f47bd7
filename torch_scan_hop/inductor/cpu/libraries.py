"""Measure whether MKL or oneDNN is faster for a large float32 product on this machine.

It is measured, for a few milliseconds, where a product of such sizes and layouts is first compiled
for. The result is kept in a file beside what Inductor keeps, for this processor, torch and number
of threads. No table could tell: for 256x512x2048, oneDNN takes 0.44 of MKL's time on one AMD EPYC,
and 0.83 on the next.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_scan_hop._torch.isolation import isolated, torch_functions_disabled
from torch_scan_hop._torch.onednn import compilers_folder, has_both_libraries, product
from torch_scan_hop._torch.sizes import likely_value

#: the part of MKL's time below which oneDNN is not faster by chance
FASTER = 0.95
#: operations of the largest product that is measured; a larger one is judged as its half is
MOST_FLOPS = 2.0**28
#: time of all calls of one measurement: short calls are often disturbed, so they are repeated
SECONDS = 0.008
FEWEST_ROUNDS = 5
#: slower calls tell of a busy machine, where a thread waits for one that has no core
LEAST_FLOPS_PER_SECOND = 4e9

#: A matrix of so many rows and columns, for each way in which it may lie in memory.
LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda rows, columns: _numbers(rows, columns),
    "columns": lambda rows, columns: _numbers(columns, rows).t(),
    # parts of a wider matrix
    "rows apart": lambda rows, columns: _numbers(rows, 2 * columns)[:, :columns],
    "columns apart": lambda rows, columns: _numbers(columns, 2 * rows)[:, :rows].t(),
    # parts of a complex one
    "entries apart": lambda rows, columns: _numbers(rows, columns, 2)[..., 0],
}


def _numbers(*shape: int) -> Tensor:
    return torch.full(shape, 0.5, dtype=torch.float32, device="cpu")


def layout_of(matrix: Tensor) -> str:
    """Return the name of the matrix's layout, one of ``LAYOUTS``.

    >>> layout_of(torch.ones(3, 4).t()), layout_of(torch.ones(3, 4)[:, :2])
    ('columns', 'rows apart')
    """
    rows, columns = map(likely_value, matrix.shape)
    row, column = map(likely_value, matrix.stride())
    across, along = columns == 1 or column == 1, rows == 1 or row == 1
    if across and (rows == 1 or row == columns):
        return "rows"
    if along and (columns == 1 or column == rows):
        return "columns"
    if across and row >= columns:
        return "rows apart"
    return "columns apart" if along and column >= rows else "entries apart"


def onednn_is_faster(sizes: Sequence[int], left: str = "rows", right: str = "rows") -> bool:
    """Return True if oneDNN is faster than MKL for ``sizes`` (rows, depth, columns), copies too."""
    if not has_both_libraries():
        return False
    sizes = measured_sizes(sizes)
    key = f"{'x'.join(map(str, sizes))}, {left} by {right}"
    path = _file(torch.get_num_threads(), compilers_folder())
    known = _known(path)
    if key not in known:
        seconds = _best_seconds(LAYOUTS[left](*sizes[:2]), LAYOUTS[right](*sizes[1:]))
        if _flops(sizes) / max(seconds) < LEAST_FLOPS_PER_SECOND:
            return False  # and the next one that is compiled is measured again
        known[key] = seconds[0] / seconds[1]
        _keep(path, known)
    return known[key] < FASTER


def measured_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return powers of two near ``sizes``, so that a few measurements stand for all sizes.

    >>> measured_sizes((1, 240, 520)), measured_sizes((100_000, 512, 1024))
    ((1, 256, 512), (512, 512, 512))
    """
    near = [1 << round(math.log2(max(size, 1))) for size in sizes]
    while _flops(near) > MOST_FLOPS:
        near[near.index(max(near))] //= 2
    return tuple(near)


def _flops(sizes: Sequence[int]) -> float:
    return 2.0 * math.prod(sizes)


def _best_seconds(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Return the shortest of some calls of oneDNN and of MKL, which take turns."""
    calls = (lambda: product(left, right), lambda: torch.mm(left, right))
    best = [math.inf, math.inf]
    with isolated(), torch.no_grad(), torch_functions_disabled():
        for call in calls:
            call()  # the first one finds its kernel
        end, rounds = time.perf_counter() + SECONDS, 0
        while rounds < FEWEST_ROUNDS or time.perf_counter() < end:
            best = [min(known, _seconds(call)) for known, call in zip(best, calls, strict=True)]
            rounds += 1
    return best[0], best[1]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor() -> str:
    """Return the name that this machine's processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in names)


@functools.cache
def _file(threads: int, folder: str) -> Path:
    kind = f"{processor()} {torch.__version__} {torch.__config__.show()} {threads}"
    return Path(folder) / "torch_scan_hop" / hashlib.sha256(kind.encode()).hexdigest()[:16]


@functools.cache
def _known(path: Path) -> dict[str, float]:
    """Return the measurements in the file, in a dict to which this process adds its own."""
    try:
        kept = json.loads(path.read_text())
        return {str(key): float(ratio) for key, ratio in kept.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep(path: Path, known: dict[str, float]) -> None:
    """Write the file, so that whoever reads it meanwhile finds the old one or the new one whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(known, file, indent=0)
        os.replace(written, path)
    except OSError:
        pass  # nothing is kept, and the next process measures for itself
