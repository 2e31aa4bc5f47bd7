"""The installed versions, and those that this package was checked on."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import warnings
from importlib import metadata

import torch

from torch_scan_hop._torch import capabilities

#: the newest torch that the tests have run on
NEWEST_TORCH = (2, 15)


def torch_version() -> tuple[int, int]:
    """
    >>> torch_version() >= (2, 9)
    True
    """
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def warn_of_unknown_torch() -> None:
    """Say, once a process, that torch is newer than any this package was checked on."""
    if torch_version() > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        warnings.warn(
            f"torch_scan_hop was checked on torch 2.9 to {newest}, not on {torch.__version__}: "
            "it relies on parts of torch that change without notice. Look for a newer release.",
            stacklevel=3,
        )


def versions() -> dict[str, str]:
    """Return by name what a bug report should say.

    >>> versions()["torch"] == torch.__version__
    True
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    built = importlib.util.find_spec("torch_scan_hop._C") is not None
    return {
        "torch_scan_hop": _installed("torch_scan_hop"),
        "extension (XLA)": "built" if built else "not built",
        "torch": torch.__version__,
        "torch_xla": _installed("torch_xla"),
        "triton": _installed("triton"),
        "CUDA": str(torch.version.cuda or "none"),
        "Python": sys.version.split()[0],
        "platform": platform.platform(),
        "CPU": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "C++ compiler": compiler or "none: Inductor cannot compile for the CPU",
        **{f"can: {name}": said for name, said in capabilities.report().items()},
    }


def show_versions() -> None:
    """Print :func:`versions`, for a bug report.

    >>> show_versions()  # doctest: +ELLIPSIS
    torch_scan_hop ...
    """
    found = versions()
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
