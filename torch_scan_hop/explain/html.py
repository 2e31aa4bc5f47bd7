"""An explanation as a page that needs nothing else (``page.html.jinja``)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2  # which torch requires

from torch_scan_hop.explain import drawing, words
from torch_scan_hop.explain.facts import Kernel, Leaf, Memory, Operator

if TYPE_CHECKING:
    from torch_scan_hop.explain.explanation import Explanation


def page(explanation: Explanation) -> str:
    return str(_template().page(explanation)).strip() + "\n"


def fragment(explanation: Explanation) -> str:
    """Return the HTML that a notebook shows."""
    return str(_template().fragment(explanation)).strip()


@functools.cache
def _template() -> Any:
    made = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    names = ("captured", "flops", "heading", "limit", "merged", "nbytes", "steps")
    made.filters |= {name: getattr(words, name) for name in names}
    rows = (of_kernels, of_leaves, of_operators, of_residuals)
    made.filters |= {function.__name__: function for function in rows}
    made.filters |= {"cut": drawing.cut, "px": "{:.0f}".format}
    made.globals |= {"WIDTH": drawing.WIDTH, "HEIGHT": drawing.HEIGHT, "drawn": drawing.drawn}
    source = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    return made.from_string(source).module


def of_leaves(leaves: Iterable[Leaf]) -> list[Sequence[str]]:
    return [
        (leaf.role, leaf.path, leaf.type, words.nbytes(leaf.nbytes), "yes" * leaf.requires_grad)
        for leaf in leaves
    ]


def of_operators(operators: Iterable[Operator]) -> list[Sequence[str]]:
    return [
        (f"{o.name} = {o.call}", o.type, o.place, o.why, words.where(o.line), words.flops(o.flops))
        for o in operators
    ]


def of_residuals(memory: Memory) -> list[Sequence[str]]:
    return [
        (
            r.name,
            r.type,
            words.nbytes(r.nbytes),
            "kept for it" if r.kept else "there anyway",
            r.source,
            r.read_by,
            r.line if r.kept else "",
        )
        for r in memory.residuals
    ]


def of_kernels(kernels: Iterable[Kernel]) -> list[Sequence[str]]:
    return [
        (
            k.loop,
            k.kind,
            k.steps,
            "; ".join(filter(None, (k.operators, *words.launched(k)))),
            "; ".join(words.why_not_better(k)),
        )
        for k in kernels
    ]
