"""Raise errors that a person can read, also from code that Dynamo traces.

If traced code raises an exception, Dynamo cannot follow it, and shows its own text about that. So
traced code calls an operator instead, whose tracker raises at once. The error is of the same kind
as in eager mode (see ``variables.RefusalVariable``).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torch_scan_hop._torch import capabilities

if capabilities.is_there("operator"):
    from torch_scan_hop.capture.traced_operators import refusal_op

Kind = TypeVar("Kind", bound=Exception)


def refused(kind: type[Kind], message: str, leaf: str = "", grows: bool = False) -> Kind:
    """Return ``kind(message)``, to be raised; under Dynamo it is raised at once.

    ``leaf`` names the leaf of a carry that is not what it was before the step; it may be so in the
    first step if it ``grows``.

    >>> refused(ValueError, "no")
    ValueError('no')
    """
    if capabilities.captures and torch.compiler.is_dynamo_compiling():
        refusal_op(kind, message, leaf, grows)
    error = kind(message)
    note_leaf(error, leaf, grows)
    return error


def note_leaf(error: Any, leaf: str, grows: bool) -> None:
    error.leaf, error.grows = leaf, grows


def is_about_carry(error: BaseException) -> bool:
    """Return True if ``error`` says that a step made another carry than it was given."""
    return bool(getattr(error, "leaf", ""))


def changed_leaf(error: BaseException) -> str:
    """Return the carry's leaf that has grown, if ``error`` says so; else ""."""
    return getattr(error, "leaf", "") if getattr(error, "grows", False) else ""
