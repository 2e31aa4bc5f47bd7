"""Write numbers and places as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch_scan_hop.explain.facts import Kernel, Loop, Resources, Scan, Work


def nbytes(count: int | None) -> str:
    """
    >>> nbytes(512), nbytes(2048), nbytes(3 * 2**20 // 2)
    ('512 B', '2.0 KiB', '1.5 MiB')
    """
    return _scaled(count or 0, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops(count: int) -> str:
    """
    >>> flops(512), flops(393216)
    ('512 FLOPs', '393.2 kFLOPs')
    """
    return _scaled(count, 1000, ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs"))


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    k = 0
    while count >= base and k < len(units) - 1:
        count, k = count / base, k + 1
    return f"{count:.{min(k, 1)}f} {units[k]}"


def seconds(time: float) -> str:
    """
    >>> seconds(0.00025)
    '250.0 us'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time >= size:
            return f"{time / size:.2f} {unit}"
    return f"{time * 1e6:.1f} us"


def program(of: Resources) -> str:
    """
    >>> program(Resources("16 rows", 4, 9216, 96, 0, 90))
    '16 rows, 4 warps, 9.0 KiB of shared memory, 96 registers a thread, none spilled (9.0)'
    >>> program(Resources("32 lanes", 1, None, None, None, 90, "not known without Triton"))
    '32 lanes, 1 warps, shared memory and registers: not known without Triton'
    """
    size = f"{of.elements}, {of.warps} warps"
    if of.registers is None:
        if of.shared is None:
            return f"{size}, shared memory and registers: {of.note}"
        return f"{size}, at least {nbytes(of.shared)} of shared memory, registers: {of.note}"
    spilled = f"{nbytes(of.spilled)} spilled" if of.spilled else "none spilled"
    code = f"{nbytes(of.shared)} of shared memory, {of.registers} registers a thread, {spilled}"
    return f"{size}, {code} ({of.capability / 10})"


def where(line: str) -> str:
    """Return ``file:line`` without the folders.

    >>> where("/home/me/cell.py:12: h = torch.tanh(h)")
    'cell.py:12'
    """
    found = re.match(r"(.*?:\d+): ", line)
    return found[1].rpartition("/")[2] if found else ""


def shortened(call: str, width: int = 60) -> str:
    return call if len(call) <= width else call[: width - 4] + "...)"


def steps(count: str) -> str:
    """
    >>> steps("5"), steps("T = 5")
    ('5 steps', 'T steps (here T = 5)')
    """
    if count.startswith("T = "):
        return f"T steps (here {count})"
    return "1 step" if count == "1" else f"{count} steps"


def heading(of: Scan | Loop) -> str:
    order = ", backwards" if of.reverse else ""
    blocks = f", in blocks of {of.block}" if isinstance(of, Loop) and of.block is not None else ""
    return f"{of.name}: {steps(of.steps)}{order}{blocks}"


def limit(work: Work) -> str:
    """Return how long it takes if every operator meets its limit; empty if that is not known."""
    if work.seconds is None or work.least_seconds is None:
        return ""
    return (
        f"{seconds(work.seconds)} if every operator meets its limit; at least "
        f"{seconds(work.least_seconds)}, bound by {work.limit} ({work.fraction_of_limit or 0:.0%})"
    )


def launched(kernel: Kernel) -> Iterable[str]:
    if kernel.launches:
        yield f"launches: {kernel.launches}"
    if kernel.program:
        yield f"a program: {program(kernel.program)}"


def why_not_better(kernel: Kernel) -> list[str]:
    return [f"not {better}: {reason}" for better, reason in kernel.why_not.items()]


def merged(loops: Sequence[Loop]) -> list[Loop]:
    """Merge loops that differ in their names only to one loop that has all names."""
    names: dict[Loop, list[str]] = {}
    for loop in loops:
        names.setdefault(replace(loop, name=""), []).append(loop.name)
    return [replace(loop, name=", ".join(found)) for loop, found in names.items()]


def captured(count: int) -> str:
    """
    >>> captured(2)
    'captured as one operator; 2 captures by calls so far'
    """
    calls = f"{count} capture{'s' if count > 1 else ''} by calls" if count else "no call"
    return f"captured as one operator; {calls} so far"
