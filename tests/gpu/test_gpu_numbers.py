"""The Triton kernels compute the loop: their tests run in a process with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
#: what the interpreter computes depends on Triton; one version of it is enough for `make test`
ON_OTHERS_SLOW = pytest.mark.slow if torch.__version__ < "2.15" else pytest.mark.torch_version

HERE = Path(__file__).parents[1]


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


@ON_OTHERS_SLOW
def test_numbers():
    assert " passed" in in_the_interpreter()


@pytest.mark.slow
def test_more_numbers():
    assert " passed" in in_the_interpreter("-m", "slow")
