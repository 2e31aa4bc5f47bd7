"""The examples that run in seconds, as their readers run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("truncated_bptt", []),
        pytest.param("char_lm", ["--steps", "3"], marks=pytest.mark.slow),  # make demo
        # these assert the score that they reach
        pytest.param("sensors", [], marks=pytest.mark.slow),
        pytest.param("policy", [], marks=pytest.mark.slow),
    ],
)
def test_example(name, arguments, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *arguments],
        env=environment,
        cwd=tmp_path,  # where pictures are drawn
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout and "could not be traced" not in done.stderr
