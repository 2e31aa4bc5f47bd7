"""Fakes of a GPU, on a machine that has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from torch_scan_hop._torch.absent_gpu import OLDEST, are_absent, standing_in, why_not_here
from torch_scan_hop._torch.capabilities import require


def as_if_there(values: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Let something stand in for a GPU that is not there, if some of ``values`` are fakes of one.

    Raises:
        RuntimeError: this torch cannot differentiate such fakes: its build, or a name it lacks.
    """
    if not are_absent(values):
        return contextlib.nullcontext()
    check_build()
    require("absent_gpu")
    return standing_in()


def check_build() -> None:
    """Raise RuntimeError if fakes of a GPU would end the process with this build of torch."""
    if why_not_here():
        raise RuntimeError(
            f"explain: fakes of a GPU need a build of torch {OLDEST} for CUDA (and no "
            f"driver), but torch {torch.__version__} {why_not_here()}. Install one, or pass "
            "tensors that are on the CPU."
        )
