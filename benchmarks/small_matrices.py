"""Of the bodies of ``bodies.md``, those of small matrices.

python -m benchmarks.small_matrices [--quick]
"""

from __future__ import annotations

from benchmarks.bodies import measure, tell
from benchmarks.page import Page

__all__ = ["measure"]


if __name__ == "__main__":
    tell(
        Page("Small matrices", "small_matrices"),
        [
            "solve",
            "cholesky",
            "kalman of 8",
            "rls of 16",
            "hmm",
            "smoother",
            "ekf",
            "gaussian hmm",
            "determinant",
        ],
    )
