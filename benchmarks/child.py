"""Runs one measurement in a fresh process and hands its rows back as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARK = "@rows "


def measured(where: str, *arguments: Any, cold: bool = False, limit: float = 300) -> Any:
    """The result of ``where`` ("module:function") on ``arguments``; or why there is none.

    ``cold``: with Inductor's caches off and a cache directory that is empty.
    """
    # jax may be in a folder of its own
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "benchmarks.child", where, json.dumps(arguments)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        if cold:
            environment |= {
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
                "TORCHINDUCTOR_CACHE_DIR": empty,
            }
        # to files, and in a session of its own: Inductor's workers outlive it and hold its pipes
        output, errors = Path(empty, "stdout"), Path(empty, "stderr")
        with output.open("w") as out, errors.open("w") as err:
            child = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=out, stderr=err, start_new_session=True
            )
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                return {"failed": f"took more than {limit:.0f} s"}
            finally:
                _end_session(child)
        for line in output.read_text().splitlines():
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        last = (errors.read_text().strip().splitlines() or ["no output"])[-1]
    return {"failed": f"exit status {status}: {last[:150]}"}


def _end_session(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main() -> None:
    where, arguments = sys.argv[1:]
    module, function = where.split(":")
    found = getattr(__import__(module, fromlist=[function]), function)(*json.loads(arguments))
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
