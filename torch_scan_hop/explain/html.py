"""An explanation as a page that needs nothing else: each loop drawn, the rest in tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from torch_scan_hop.explain.drawing import Drawing
from torch_scan_hop.explain.facts import CARRY, INVARIANT, XS, Kernel, Loop, Memory, Scan, Work
from torch_scan_hop.explain.style import CSS, SCRIPT
from torch_scan_hop.explain.words import (
    captured,
    flops,
    heading,
    launched,
    limit,
    merged,
    nbytes,
    steps,
    where,
    why_not_better,
)

if TYPE_CHECKING:
    from torch_scan_hop.explain.explanation import Explanation

_KEYS = {
    INVARIANT: "the same at every step",
    XS: "needs xs only",
    CARRY: "known step by step",
}


def page(explanation: Explanation) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escape(explanation.title)}</title>\n"
        "<style>body { margin: 0; }</style>\n"
        f"</head>\n<body>\n{fragment(explanation)}\n</body>\n</html>\n"
    )


def fragment(explanation: Explanation) -> str:
    """Return the HTML that a notebook shows."""
    body = "\n".join(_explanation(explanation))
    return f'<style>{CSS}</style>\n<div class="tsh">\n{body}\n</div>\n<script>{SCRIPT}</script>'


def _explanation(e: Explanation) -> Iterable[str]:
    yield f"<h1>{escape(e.title)}</h1>"
    if e.options:
        yield f'<p class="soft"><code>{escape(e.options)}</code></p>'
    if not e.captured:
        yield _as_loop(e)
    if e.captures is not None and e.captured:
        yield f"<p>{captured(e.captures.count).capitalize()}.</p>"
    if e.captures is not None and e.captures.guards:
        items = "".join(f"<li><code>{escape(g)}</code></li>" for g in e.captures.guards)
        yield f"<p>Captured anew since this no longer held:</p><ul>{items}</ul>"
    if e.scans:
        keys = (f'<span class="key {k}">{escape(words)}</span>' for k, words in _KEYS.items())
        yield f"<p>{''.join(keys)}</p>"
    for scan in e.scans:
        yield from _scan(scan)
    if e.checkpoint is not None:
        c = e.checkpoint
        yield f"<h2>checkpoint={escape(c.policy)}</h2>"
        yield (
            f"<p>Saves {nbytes(c.nbytes)} instead of {nbytes(c.nbytes_without)}; "
            f"{escape(c.cost)}. While a segment is differentiated, "
            f"{nbytes(c.nbytes_of_segment)} more.</p>"
        )


def _as_loop(e: Explanation) -> str:
    rows = [("why", e.reason), ("at", e.line), ("fix", e.fix)]
    cells = "".join(
        f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows if text
    )
    return (
        f'<div class="as-loop"><strong>Runs as a plain Python loop.</strong>'
        f"<table>{cells}</table></div>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of plain text. ``numbers``: the columns that are aligned as such."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = []
    for row in rows:
        kinds = ["number" if k in numbers else "code" for k in range(len(row))]
        cells = (f'<td class="{k}">{escape(c)}</td>' for k, c in zip(kinds, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _scan(scan: Scan) -> Iterable[str]:
    yield f"<h2>{escape(heading(scan))}</h2>"
    rows = [
        (leaf.role, leaf.path, leaf.type, nbytes(leaf.nbytes), "yes" * leaf.requires_grad)
        for leaf in scan.signature
    ]
    yield _table(("role", "path", "type", "bytes", "requires grad"), rows, (3,))
    for loop in scan.loops:
        yield from _loop(loop)
    if scan.note:
        yield f"<p>{escape(scan.note)}</p>"
    if scan.memory is not None:
        yield from _memory(scan.memory, scan.steps)
    if scan.kernels:
        yield from _kernels(scan.kernels)


def _loop(loop: Loop) -> Iterable[str]:
    yield f"<h3>{escape(heading(loop))}</h3>"
    if loop.note:
        yield f"<p>{escape(loop.note)}</p>"
    yield f'<div class="drawing">{Drawing(loop).svg()}</div>'
    yield f"<p>{_work(loop.work)}</p>"
    rows = [
        (f"{o.name} = {o.call}", o.type, o.place, o.why, where(o.line), flops(o.flops))
        for o in loop.operators
    ]
    head = ("operator", "type", "place", "why", "line", "a step")
    yield (f"<details><summary>{len(rows)} operators</summary>{_table(head, rows, (5,))}</details>")
    for nested in merged(loop.nested):
        yield '<div class="loop-panel">'
        yield from _loop(nested)
        yield "</div>"


def _work(work: Work) -> str:
    found = (
        f"A step: {flops(work.flops_per_step)}, {nbytes(work.nbytes_per_step)}. "
        f"In all: {flops(work.flops)}, {nbytes(work.nbytes)} as each operator reads and writes; "
        f"{nbytes(work.least_nbytes)} if inputs and results were moved once."
    )
    at_best = limit(work)
    return escape(f"{found} {at_best}." if at_best else found)


def _memory(memory: Memory, count: str) -> Iterable[str]:
    yield "<h3>Kept for the backward</h3>"
    yield (
        f"<p>{nbytes(memory.nbytes_per_step)} a step, {nbytes(memory.nbytes)} for "
        f"{escape(steps(count))}.</p>"
    )
    rows = [
        (
            r.name,
            r.type,
            nbytes(r.nbytes),
            "kept for it" if r.kept else "there anyway",
            r.source,
            r.read_by,
            r.line if r.kept else "",
        )
        for r in memory.residuals
    ]
    yield _table(("value", "type", "bytes", "", "source", "read by", "line"), rows, (2,))


def _kernels(kernels: Sequence[Kernel]) -> Iterable[str]:
    yield "<h3>Under torch.compile, with Inductor</h3>"
    rows = [
        (
            k.loop,
            k.kind,
            k.steps,
            "; ".join(filter(None, (k.operators, *launched(k)))),
            "; ".join(why_not_better(k)),
        )
        for k in kernels
    ]
    yield _table(("loop", "kernel", "steps", "a step", "why not better"), rows)
