"""torch's own ``scan()`` means the same with this package imported as without it.

Each behaviour runs in two processes, one of which never imports this package, and their reports
are compared. What torch's own tests of its scan ask for is in here, in our words: dimensions,
pytrees, closures, written buffers, transforms, refusals, recorded graphs, export.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "own_scan_report.py"


def report(imports: str, group: str, folder: Path) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), imports, group, str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


#: fails without this package on some torch, and works with it: nobody is worse off
BETTER = {"loaded, compiled", "recorded, traced", "recorded, pickled"}

needs_torchs_lowering = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="Inductor of torch 2.9 cannot lower torch's own scan"
)


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "group",
    [
        "eager",
        "graphs",
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=[pytest.mark.slow, needs_torchs_lowering]),
    ],
)
def test_it_is_as_without_this_package(group, tmp_path):
    # first without: it saves the programs that the second process loads
    without = report("torch", group, tmp_path)
    assert len(without) > 8
    with_ours = report("torch_scan_hop", group, tmp_path)
    assert with_ours.keys() == without.keys()
    if torch.__version__ < "2.15":  # it refuses to export a body that writes, and saves nothing
        without.pop("loaded, buffer written", None)
    different = {
        name: (without[name], with_ours[name])
        for name in without
        if with_ours[name] != without[name]
        and not (name in BETTER and without[name].startswith("raises"))
    }
    assert not different


def test_the_reports_are_of_results():
    """Not of errors that both processes have in common."""
    found = report("torch_scan_hop", "eager", Path("/nonexistent"))
    refused = {name for name, said in found.items() if said.startswith("raises")}
    assert refused >= {"a number as carry", "fewer carries", "more carries", "carry written"}
    assert len(found) - len(refused) >= 10
    if torch.__version__ >= "2.15":
        assert "buffer written" not in refused
