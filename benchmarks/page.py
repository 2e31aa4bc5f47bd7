"""A page of results of a module of its own: ``python -m benchmarks.NAME`` writes ``NAME.md``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

from benchmarks import child, report


class Page:
    """Measurements, each in a fresh process, and the page that tells of them."""

    def __init__(self, title: str, name: str) -> None:
        self.title, self.name = title, name
        # who asks for help gets it: a page without options would measure, and be written over
        known = f"python -m benchmarks.{name}"
        argparse.ArgumentParser(known, description=title).parse_known_args()
        self.start, self.load_before = time.perf_counter(), report.load()

    def measured(self, function: str, *args: Any, **how: Any) -> Any:
        """What ``function`` of this page's module returns; where it fails, no page is written."""
        found = child.measured(f"benchmarks.{self.name}:{function}", *args, **how)
        if isinstance(found, dict) and "failed" in found:
            raise SystemExit(found["failed"])
        return found

    def keep(self, lines: Iterable[str]) -> str:
        """Write the page among the results, and return it."""
        text = self._text(lines)
        (child.RESULTS / f"{self.name}.md").write_text(text)
        return text

    def write(self, lines: Iterable[str], keep: bool = True) -> None:
        """Print the page, and ``keep`` it among the results."""
        print(self.keep(lines) if keep else self._text(lines))

    def _text(self, lines: Iterable[str]) -> str:
        minutes = (time.perf_counter() - self.start) / 60
        module = f"benchmarks.{self.name}"
        return "\n".join(
            [*report.header(self.title, module, self.load_before, minutes), *lines, ""]
        )
