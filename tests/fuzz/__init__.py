"""A differential fuzzer: random programs run as a scan, and as the Python loop in float64.

A program is text that a user could type (``program``); ``generate`` writes it statement by
statement with the rules of ``rules_*``; ``check`` runs it both ways in a mode and compares values
and every gradient; ``shrink`` makes a failing program small; ``campaign`` runs many of them in
child processes. ``python -m tests.fuzz --help`` is the way in.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:  # for ``oracle``, which pytest finds by itself
    sys.path.append(_TESTS)
