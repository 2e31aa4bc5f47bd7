"""The result of ``explain``: plain facts, and the ways to look at them."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:  # a dozen dataclasses take their time, and are wanted where there is a scan
    from torch_scan_hop.explain.facts import Captures, Checkpoint, Scan


@dataclass(frozen=True, repr=False)
class Explanation:
    """The facts about a scan, or about the scans of a program.

    ``print`` it, ``show`` it in colours, take ``to_dict()``, or look at ``to_html()``; a notebook
    shows the page by itself.

    Attributes:
        title: what was explained.
        captured: whether the body was captured as one operator; otherwise it runs as a loop.
        reason: why it was not captured, in which line of the body, and what to write instead.
        line: that line, as ``file:line: code``.
        fix: what to write instead.
        captures: how often the body was captured so far, and by which guards anew.
        scans: one for each scan that the call is made of (``unroll`` and ``checkpoint`` make
            several), or that the program holds.
        checkpoint: what ``checkpoint=`` saves, and what would be saved without it; None where
            there is no policy, or nothing is saved.
        limits: the ``(flops_per_s, bytes_per_s)`` given.
    """

    title: str
    captured: bool
    reason: str = ""
    line: str = ""
    fix: str = ""
    captures: Captures | None = None
    options: str = ""
    scans: tuple[Scan, ...] = ()
    checkpoint: Checkpoint | None = None
    limits: tuple[float, float] | None = None

    def __str__(self) -> str:
        return self._text(colours=False)

    __repr__ = __str__

    def show(self, file: TextIO | None = None) -> None:
        """Print the text, in colours if ``file`` (standard output) is a terminal."""
        file = sys.stdout if file is None else file
        print(self._text(colours=file.isatty()), file=file)

    def _text(self, colours: bool) -> str:
        from torch_scan_hop.explain import text

        return text.of(self, colours)

    def to_dict(self) -> dict[str, Any]:
        """Return all facts, as dicts, lists, strings, numbers and None."""
        facts: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return facts

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a page that needs nothing else, with each loop drawn; write it to ``path``."""
        from torch_scan_hop.explain import html

        page = html.page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        from torch_scan_hop.explain import html

        return html.fragment(self)
