"""The table of all mutants: after how many programs each one is found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from .registry import MUTANTS, Mutant, Search, search

SECTION = "## Mends taken out again"
TEXT = f"""\
{SECTION}

Each mend of issues 1a to 1i is taken out by a patch (`tests/fuzz/mutants`), and programs are run,
from seed 0 on, until one fails that does not fail with the mend in place: `python -m tests.fuzz
--mutants --record benchmarks/results/fuzz.md`. A mutant alone: `--until-found NAME`.
"""
COLUMNS = """
| issue | taken out | modes | features | programs until found | found as | seconds | torch |
|---|---|---|---|--:|---|--:|---|
"""


def record_searches(page: Path | None, names: Iterable[str] = ()) -> list[tuple[Mutant, Search]]:
    """Search for each mutant with its own modes and features; a row of the page for each."""
    chosen = [MUTANTS[name] for name in names] or list(MUTANTS.values())
    if page is not None:
        _begin(page)
    results = []
    for mutant in sorted(chosen, key=lambda m: m.issue):
        result = search(mutant.name)
        results.append((mutant, result))
        row = _row(mutant, result)
        print(row, end="", flush=True)
        if page is not None:
            with page.open("a") as file:
                file.write(row)
    return results


def _begin(page: Path) -> None:
    """A table of its own for each recorded run, below one heading."""
    text = page.read_text() if page.exists() else ""
    heading = "" if SECTION in text else f"\n{TEXT}"
    page.write_text(text + heading + COLUMNS)


def _row(mutant: Mutant, result: Search) -> str:
    found = result.found
    cells = [
        mutant.issue,
        f"{mutant.taken_out} (`{mutant.name}`)",
        mutant.modes.replace(",", ", "),
        ", ".join(mutant.features),
        str(result.programs) if found else f"not in {result.programs}",
        found.outcome.kind.replace("|", "/")[:70] if found else "",
        f"{result.seconds:.0f}",
        torch.__version__,
    ]
    return f"| {' | '.join(cells)} |\n"
