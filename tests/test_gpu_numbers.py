"""The Triton kernels compute the loop: their tests run in a process with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


FILES = [str(HERE / "interpreted_kernels.py"), str(HERE / "interpreted_tiles.py")]


def in_the_interpreter(*arguments: str) -> str:
    """What pytest says of the tests in ``FILES``; it is to say that all have passed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q",
         *FILES, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_numbers():
    assert " passed" in in_the_interpreter()


@pytest.mark.slow
def test_more_numbers():
    assert " passed" in in_the_interpreter("-m", "slow")
