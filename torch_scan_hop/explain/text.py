"""An explanation as plain text: aligned, and in colours where that is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch_scan_hop.explain.facts import (
    CARRY,
    INVARIANT,
    LOOP,
    PLACES,
    XS,
    Kernel,
    Loop,
    Memory,
    Scan,
    Work,
)
from torch_scan_hop.explain.words import (
    captured,
    flops,
    heading,
    launched,
    limit,
    merged,
    nbytes,
    shortened,
    steps,
    where,
    why_not_better,
)

if TYPE_CHECKING:
    from torch_scan_hop.explain.explanation import Explanation

_BOLD, _DIM = "1", "2"
_COLOURS = {INVARIANT: "32", XS: "34", CARRY: "33"}


def of(explanation: Explanation, colours: bool) -> str:
    return "\n".join(_Writer(colours).explanation(explanation))


# --- lines ---


def _columns(rows: Sequence[Sequence[str]], indent: str) -> list[str]:
    """Return rows with aligned columns, and no blanks at the end."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


class _Writer:
    def __init__(self, colours: bool) -> None:
        self.colours = colours

    def paint(self, text: str, colour: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.colours else text

    def bold(self, text: str) -> str:
        return self.paint(text, _BOLD)

    def explanation(self, e: Explanation) -> Iterable[str]:
        yield self.bold(e.title)
        if e.options:
            yield f"  {e.options}"
        yield from self.capture(e)
        for scan in e.scans:
            yield ""
            yield from self.scan(scan)
        if e.captured and not e.scans:
            yield "  it holds no scan"
        if e.checkpoint is not None:
            c = e.checkpoint
            yield ""
            yield self.bold(f"checkpoint={c.policy}")
            yield f"  saves {nbytes(c.nbytes)} instead of {nbytes(c.nbytes_without)}; {c.cost}"
            if c.nbytes_of_segment:
                yield f"  and {nbytes(c.nbytes_of_segment)} while a segment is differentiated"

    def capture(self, e: Explanation) -> Iterable[str]:
        if not e.captured:
            yield self.paint("  runs as a plain Python loop", _COLOURS[CARRY])
            yield from _columns(
                [("why", e.reason), *([("at", e.line)] if e.line else []), ("fix", e.fix)], "    "
            )
        elif e.captures is not None:
            yield f"  {captured(e.captures.count)}"
        for guard in e.captures.guards if e.captures else ():
            yield f"    captured anew since this no longer held: {guard}"

    def scan(self, scan: Scan) -> Iterable[str]:
        yield self.bold(heading(scan))
        rows = [
            (leaf.role, leaf.path, leaf.type, nbytes(leaf.nbytes), "grad" * leaf.requires_grad)
            for leaf in scan.signature
        ]
        yield from _columns(rows, "  ")
        for loop in scan.loops:
            yield ""
            yield from self.loop(loop, "")
        if scan.memory is not None:
            yield ""
            yield from self.memory(scan.memory, scan.steps)
        if scan.kernels:
            yield ""
            yield from self.kernels(scan.kernels)
        if scan.note:
            yield f"  {scan.note}"

    # --- a loop ---

    def loop(self, loop: Loop, indent: str) -> Iterable[str]:
        yield indent + self.bold(heading(loop))
        if loop.note:
            yield f"{indent}  {loop.note}"
        rows = self.operator_rows(loop)
        for place in PLACES:
            chosen = [
                row for row, op in zip(rows, loop.operators, strict=True) if op.place == place
            ]
            if chosen or place == LOOP:
                yield f"{indent}  {place}" + ("" if chosen else ": nothing")
                yield from (f"{indent}    {row}" for row in chosen)
        yield from (f"{indent}  {line}" for line in self.work(loop.work))
        for nested in merged(loop.nested):
            yield from self.loop(nested, indent + "    ")

    def operator_rows(self, loop: Loop) -> list[str]:
        """Return all operators' rows in one table, so that the places are aligned alike."""
        rows = [
            (shortened(f"{o.name} = {o.call}"), o.type, o.why, where(o.line))
            for o in loop.operators
        ]
        lines = _columns(rows, "")
        width = max((len(row[0]) for row in rows), default=0)
        return [
            self.paint(line[:width], _COLOURS[op.depends_on]) + line[width:]
            for line, op in zip(lines, loop.operators, strict=True)
        ]

    def work(self, work: Work) -> Iterable[str]:
        least = f"(at least {nbytes(work.least_nbytes)}: inputs and results once)"
        rows = [
            ("a step", flops(work.flops_per_step), nbytes(work.nbytes_per_step), ""),
            ("in all", flops(work.flops), nbytes(work.nbytes), least),
        ]
        yield from _columns(rows, "")
        if found := limit(work):
            yield found

    # --- the rest ---

    def memory(self, memory: Memory, count: str) -> Iterable[str]:
        yield self.bold(f"kept for the backward: {nbytes(memory.nbytes_per_step)} a step")
        yield f"  {nbytes(memory.nbytes)} for {steps(count)}"
        for title, kept in (("kept for it", True), ("there anyway", False)):
            rows = [
                (r.name, r.type, nbytes(r.nbytes), r.source, f"read by {r.read_by}", where(r.line))
                for r in memory.residuals
                if r.kept is kept
            ]
            if rows:
                yield f"  {title}"
                yield from _columns(rows, "    ")

    def kernels(self, kernels: Sequence[Kernel]) -> Iterable[str]:
        yield self.bold("under torch.compile, with Inductor")
        for k in kernels:
            many = f"; {steps(k.steps)}" if k.steps else ""
            yield f"  {k.loop}: {k.kind}{many}"
            if k.operators:
                yield f"    a step: {k.operators}"
            yield from (f"    {line}" for line in (*launched(k), *why_not_better(k)))
