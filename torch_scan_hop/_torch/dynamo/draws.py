"""Draws from Python's ``random`` in a body (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.exc import Unsupported

from torch_scan_hop._torch.replaced import replaced


class _Refused(list[Any]):
    """The draws of the program around a body, to which the body may add none."""

    def append(self, call: Any) -> None:
        raise Unsupported(
            "the body draws from Python's `random`, and would draw once for all steps"
        )


def draws_are_refused(tx: Any) -> AbstractContextManager[None]:
    """Refuse them where they are traced: Dynamo draws before all steps, and of one step."""
    return replaced(tx.output, random_calls=_Refused(tx.output.random_calls))
