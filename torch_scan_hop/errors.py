"""Messages that name the argument or pytree leaf, what was expected, what came, the fix."""

from __future__ import annotations

from typing import Any

import torch

CUSTOM_FUNCTION_UNDER_TRANSFORM = (
    "the body holds a custom autograd.Function, whose derivative a transform of the whole loop "
    "would lose"
)

NUMBER_OF_TENSOR = (
    "the body reads the value of a tensor, or of a NumPy scalar, as a Python number; keep it a "
    "tensor, and of a NumPy scalar write value = float(value), or int(value), before the scan"
)

UNKNOWN_LENGTH = (
    "a slice whose bounds are tensors has one length at every step only if it reads like "
    "x[t : t + 4], or x.narrow(dim, t, 4); where its length changes, take the whole dimension and "
    "mask it: torch.where(torch.arange(n) < t, new, old)"
)

COUNTS_FAR = (
    "the body counts in {} from an int of more than 62 bits, and what a scan carries has 64. "
    "Keep a smaller number, and add the rest after the scan"
)


def is_far(number: int) -> bool:
    """Return True for an int from which a step may count past what a scalar holds.

    What steps add to others does not leave 64 bits: ``capture.number_domains`` checks the rest.
    """
    return not -(2**62) < number < 2**62


class ScanTypeError(TypeError):
    """A wrong kind of argument to :func:`torch_scan_hop.scan`."""


class ScanValueError(ValueError):
    """An argument of the right kind with a value that does not fit."""


class Refusal(Exception):
    """Raised by what decides against something; the text says why."""


class NonFiniteError(ArithmeticError):
    """A step of a scan gave nan or inf, and ``debug(detect_nonfinite=True)`` is in force."""


def describe(value: Any) -> str:
    """Return ``float32[3, 4]`` for a tensor, and the type's name for anything else.

    >>> describe(torch.zeros(3, 4))
    'float32[3, 4]'
    >>> describe("text")
    'str'
    """
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(str(s) for s in value.shape)}]"
    return "None" if value is None else type(value).__name__


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def named(error: BaseException) -> str:
    """Return the error's type, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to another library's ``error``: what it has to do with a scan."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def carry_mismatch(path: str, expected: str, got: str, fix: str) -> str:
    return (
        f"scan: {path} must keep its structure, shape and dtype from step to step: "
        f"expected {expected} (from init), but combine_fn returned {got}. {fix}"
    )


def device_mismatch(path: str, expected: torch.device, got: torch.device) -> str:
    return (
        f"scan: {path} must stay on one device from step to step: expected {expected} (from init), "
        f"but combine_fn returned a tensor on {got}. Move init with init.to('{got}'), or the "
        f"returned carry with .to('{expected}')."
    )


def hint_about(error: BaseException) -> str:
    """Return what to write instead of what Dynamo could not trace, or "" if that is not known."""
    text = str(error)
    if "torch_xla" in text and "checkpoint" in text:
        return (
            "torch_xla.utils.checkpoint is reentrant and cannot be captured; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    return ""
