"""What the wrappers that Inductor generates look like."""

from __future__ import annotations

from collections.abc import Sequence


def loops(codes: Sequence[str]) -> list[int]:
    """For each graph, the loops over steps in its Python wrapper; a kernel's are not among them."""
    return [code.split("def call(")[-1].count("for ") for code in codes]
