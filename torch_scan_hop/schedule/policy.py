"""Check ``checkpoint=``: the policies that there are.

Policies of one step (``None``, ``"full"``, a function) say what its backward gets: see
``autodiff/policy``. The others say which steps are recomputed together, and are nested scans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError


@dataclass(frozen=True)
class Binomial:
    """Save at most ``snapshots`` carries at any time; run each step at most ``1 + sweeps`` times.

    >>> Binomial(snapshots=3, sweeps=2).leaves()
    10
    """

    snapshots: int
    sweeps: int = 2

    def leaves(self) -> int:
        """Return how many segments that schedule can reverse: ``C(snapshots + sweeps, sweeps)``."""
        return math.comb(self.snapshots + self.sweeps, self.sweeps)


def check_policy(checkpoint: Any) -> None:
    """Raise for a ``checkpoint=`` that names no policy."""
    if isinstance(checkpoint, Binomial):
        numbers = (checkpoint.snapshots, checkpoint.sweeps)
        if any(type(number) is not int for number in numbers):
            raise refused(
                ScanTypeError,
                "scan: the snapshots and sweeps of a Binomial must be ints, but checkpoint is "
                f"Binomial({numbers[0]!r}, {numbers[1]!r}).",
            )
        if checkpoint.snapshots < 1 or checkpoint.sweeps < 1:
            raise refused(
                ScanValueError,
                "scan: checkpoint must have at least 1 snapshot and 1 sweep, but got "
                f"Binomial({checkpoint.snapshots}, {checkpoint.sweeps}).",
            )
        return
    if checkpoint is None or checkpoint in ("full", "sqrt"):
        return
    if isinstance(checkpoint, bool) or not (isinstance(checkpoint, int) or callable(checkpoint)):
        raise refused(
            ScanTypeError,
            "scan: checkpoint must be None, 'full', 'sqrt', a number of segments, a Binomial or "
            f"a policy function, but got {checkpoint!r}.",
        )
    if isinstance(checkpoint, int) and checkpoint < 1:
        raise refused(
            ScanValueError, f"scan: checkpoint must be at least 1 segment, but got {checkpoint}."
        )
