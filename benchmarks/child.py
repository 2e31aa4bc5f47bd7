"""Runs one measurement in a fresh process and hands its rows back as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARK = "@rows "


def spin_settings() -> dict[str, str]:
    """OpenMP threads that wait for a thread which is not running spin for whole time slices.

    With other work on the machine a parallel region of microseconds then takes 15 ms. Unless
    the caller chose, waiting is bounded to about 50 us, which costs nothing on an idle machine.
    """
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    return {} if chosen else {"GOMP_SPINCOUNT": "1000"}


def measured(where: str, *arguments: Any, cold: bool = False, limit: float = 300) -> Any:
    """The result of ``where`` ("module:function") on ``arguments``; or why there is none.

    ``cold``: with Inductor's caches off and a cache directory that is empty.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **spin_settings()}
    command = [sys.executable, "-m", "benchmarks.child", where, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as empty:
        if cold:
            environment |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
                            "TORCHINDUCTOR_CACHE_DIR": empty}
        try:
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {limit:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"failed": f"exit status {done.returncode}: {last[:150]}"}


def main() -> None:
    where, arguments = sys.argv[1:]
    module, function = where.split(":")
    found = getattr(__import__(module, fromlist=[function]), function)(*json.loads(arguments))
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
