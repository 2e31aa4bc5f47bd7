"""Fakes of a GPU, on a machine that has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_scan_hop._torch.absent_gpu import (
    is_fake_on,
    standing_in,
    taken_for_those_on,
    why_not_here,
)
from torch_scan_hop._torch.capabilities import require


def as_if_there(device: str) -> contextlib.AbstractContextManager[None]:
    """Let something stand in for a GPU, if ``device`` is one and none is there.

    Raises:
        RuntimeError: this torch cannot differentiate fakes of it: its build, or a name it lacks.
    """
    if device != "cuda" or torch.cuda.is_available():
        return contextlib.nullcontext()
    if why_not_here():
        raise RuntimeError(
            "explain: nothing can stand in for a GPU that is not there with this build of torch "
            f"{torch.__version__}: {why_not_here()}. Pass tensors that are on the CPU."
        )
    require("absent_gpu")
    from torch_scan_hop.inductor.decompositions import CELLS

    return standing_in(CELLS)


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Take what is on the CPU for what is on ``device``, which need not be there."""
    with as_if_there(device), taken_for_those_on(device), torch.device(device):
        yield


def device_of_fakes(values: Iterable[Any]) -> str:
    """Return "cuda" if there are fakes of a GPU among ``values``."""
    return "cuda" if any(is_fake_on(value, "cuda") for value in values) else ""
