"""Capabilities of this package with the torch that is here, found out when first asked.

A capability needs private names of torch: those that its shims use (``private_names.json``, which
is read from their source). If one of them is gone, or has another form, the capability is switched
off. One warning says so, and the next best thing runs: a kernel's scan is a counted loop, a
compiled program holds a scan's steps, what cannot be captured is a Python loop.

By hand, to find out where a problem comes from::

    TORCH_SCAN_HOP_WITHOUT=cpu_kernels,capture python program.py
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_scan_hop._torch.forms import NAMES, why_not
from torch_scan_hop.errors import ScanTypeError, named

_DYNAMO = "torch._dynamo"
VARIABLE = "TORCH_SCAN_HOP_WITHOUT"


@dataclass(frozen=True)
class Capability:
    does: str
    instead: str
    needs: tuple[str, ...] = ()
    #: True if asking for it imports the modules that hold its names
    imports: bool = True


_LOOP = "scans run as plain Python loops"
_STEPS = "compiled programs hold each step of a scan"

CAPABILITIES: dict[str, Capability] = {
    "operator": Capability("scan as an operator", _LOOP, imports=False),
    "capture": Capability("one graph for all steps", _LOOP, ("operator",)),
    "own_scan": Capability(
        "torch's own scan() as torch has it, and accelerate_torch()",
        "this package's operator runs it",
        ("operator",),
    ),
    "counted_loop": Capability("scans in programs that Inductor compiles", _STEPS, ("operator",)),
    "vectors_of_bools": Capability(
        "bools as vectors on the CPU", "they are slow", ("counted_loop",)
    ),
    "cpu_kernels": Capability(
        "scans as one kernel on the CPU", "they are counted loops", ("counted_loop",)
    ),
    "gpu_kernels": Capability(
        "scans as one kernel on a GPU", "they are counted loops", ("counted_loop",)
    ),
    "sharding": Capability("scans of DTensors", "they run as Python loops", ("operator",)),
    "xla": Capability("scans as one loop of XLA's", "they are refused there"),
    "explain": Capability("explain()'s look at what Inductor makes", "it says so"),
    "absent_gpu": Capability("explain() of a GPU that is not there", "it says so", ("operator",)),
    "cuda_graphs": Capability("loops as CUDA graphs", "their steps are launched one by one"),
    "huge_pages": Capability("large stacks in huge pages", "they are where the system puts them"),
}

#: names that stand for several
GROUPS = {"kernels": ("cpu_kernels", "gpu_kernels"), "inductor": ("counted_loop",)}


class CapabilityMissing(RuntimeError):
    """Raised if a call needs a capability that is switched off."""


_by_hand: set[str] = set()
_failed: dict[str, str] = {}
_told: set[str] = set()


def why_off(name: str, imports: bool = True) -> str | None:
    """Return what switched the capability off; None if it is there.

    Without ``imports``, only what is loaded already is looked at.
    """
    capability = CAPABILITIES[name]
    if name in _by_hand:
        return "by hand"
    if name in _failed:
        return _failed[name]
    for other in capability.needs:
        reason = why_off(other, imports)
        if reason is not None:
            return reason
    return _missing(name, imports and capability.imports, _DYNAMO in sys.modules)


def is_there(name: str, imports: bool = True) -> bool:
    """Return True if the capability is there; what torch's names switched off is told of once."""
    reason = why_off(name, imports)
    if reason is None:
        return True
    capability = CAPABILITIES[name]
    for other in capability.needs:
        if why_off(other, imports) is not None:
            return is_there(other, imports)
    if reason != "by hand" and name not in _told:
        _told.add(name)
        warnings.warn(
            f"torch_scan_hop: {capability.does} ({name}) is switched off: {reason}. "
            f"Instead, {capability.instead}. Look for a newer release.",
            stacklevel=3,
        )
    return False


@contextlib.contextmanager
def attempt(name: str) -> Iterator[None]:
    """Switch the capability off if something within fails, so that nobody's import or compile
    fails.

    It is for telling things to torch: its registries and passes may have changed their form.
    """
    global captures
    try:
        yield
    except Exception as error:
        if isinstance(error, Warning):  # raised, for whoever runs with warnings as errors
            raise
        _failed[name] = f"torch {torch.__version__} is not as expected ({named(error)})"
        captures = captures and name not in ("operator", "capture")
        is_there(name)


_PACKAGE = str(Path(__file__).parents[1])
#: errors of a line that uses a name which is gone, or calls it in a form that has changed
_OF_ANOTHER_TORCH = (AttributeError, TypeError, LookupError, ImportError, NameError, AssertionError)


def is_own_failure(error: BaseException) -> bool:
    """Return True if ``error`` came from a line of this package that failed, and did not refuse."""
    if not isinstance(error, _OF_ANOTHER_TORCH) or isinstance(error, ScanTypeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)


@contextlib.contextmanager
def own_failures_said(what: str, name: str) -> Iterator[None]:
    """Say in one line that ``what`` failed within, and how to do without it, by hand."""
    try:
        yield
    except Exception as error:
        if not is_own_failure(error):
            raise
        raise CapabilityMissing(
            f"torch_scan_hop: {what} failed on torch {torch.__version__} ({named(error)}). With "
            f"{VARIABLE}={name}, {CAPABILITIES[name].instead}. Please report it."
        ) from error


def require(name: str) -> None:
    """Raise CapabilityMissing if the capability, or one that it needs, is not there."""
    for other in CAPABILITIES[name].needs:
        require(other)
    reason = why_off(name)
    if reason is not None:
        raise CapabilityMissing(
            f"torch_scan_hop: {CAPABILITIES[name].does} ({name}) is switched off: {reason}."
        )


@functools.cache
def _missing(name: str, imports: bool, has_dynamo: bool) -> str | None:
    for path in NAMES.get(name, ()):
        reason = why_not(path, imports)
        if reason is not None:
            return f"torch {torch.__version__} {reason}"
    return None


# --- by hand ---


def _expanded(names: tuple[str, ...]) -> set[str]:
    expanded: set[str] = set()
    for name in names:
        members = GROUPS.get(name, (name,))
        for member in members:
            if member not in CAPABILITIES:
                known = ", ".join([*CAPABILITIES, *GROUPS])
                raise ValueError(f"torch_scan_hop: no capability is called {name!r}; {known} are.")
        expanded.update(members)
    return expanded


_by_hand.update(_expanded(tuple(os.environ.get(VARIABLE, "").replace(",", " ").split())))

#: True if scans are captured. It is a value, because Dynamo traces code that reads it.
captures = not _by_hand & {"operator", "capture"}
_is_found_out = False


def find_out_whether_captures(imports: bool = True) -> bool:
    """Return True if scans can be captured; asked when Dynamo is loaded.

    What it needs of torch is looked for once. What is switched off later sets ``captures``.
    """
    global captures, _is_found_out
    if captures and not _is_found_out:
        if why_off("capture", imports) is not None:
            captures = False
            is_there("capture", imports)
        _is_found_out = imports
    return captures


def report() -> dict[str, str]:
    """Return for each capability what switched it off; imports Dynamo and Inductor to know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it imports
        return {name: why_off(name) or "there" for name in CAPABILITIES}
