"""Mends taken out again, one at a time: does the fuzzer find what they mended?

Each entry of ``MUTANTS`` breaks the package as it was broken before a mend, and names the modes and
features with which the fuzzer finds that. ``python -m tests.fuzz --mutants`` runs all of them.
"""

from __future__ import annotations

from . import capture, derivatives, keys, lowering, numbers
from .registry import MUTANTS, Mutant, Search, search
from .table import record_searches

_REGISTERED = (lowering, capture, derivatives, numbers, keys)

__all__ = ["MUTANTS", "Mutant", "Search", "record_searches", "search"]
