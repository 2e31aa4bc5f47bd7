"""Raising errors that a person reads, also from code that Dynamo traces.

An exception that traced code raises is, for Dynamo, a path that it cannot follow: what is shown is
torch's text about that. So traced code says what is wrong to an operator whose tracker raises at
once, an error that is of the same kind as in eager mode (see ``variables.RefusalVariable``).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torch_scan_hop._torch.operators import FlatOperator

Kind = TypeVar("Kind", bound=Exception)


class RefusalOperator(FlatOperator):
    """Never runs: Dynamo's tracker of it raises."""

    def __call__(self, kind: type[Exception], message: str) -> Any:  # type: ignore[override]
        raise kind(message)


refusal_op = RefusalOperator("scan_refusal", cacheable=False)


def refused(kind: type[Kind], message: str) -> Kind:
    """``kind(message)``, to be raised; under Dynamo it is raised at once.

    >>> refused(ValueError, "no")
    ValueError('no')
    """
    if torch.compiler.is_dynamo_compiling():
        refusal_op(kind, message)
    return kind(message)
