"""``torch.lstm`` in the first step of a scan, which is traced with the program, on its own.

A trace of a program takes oneDNN's operator for it, which has no derivative there, and a fake that
its kernel differs from. So it is written out, as it is in a body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_scan_hop._torch.dynamo.variables import nodes_at_hand
from torch_scan_hop._torch.operators import FlatOperator
from torch_scan_hop._torch.tracing import lstm_in_parts


class LstmOperator(FlatOperator):
    """Runs ``torch.lstm``, or writes it out if a trace calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        with lstm_in_parts():
            return torch.lstm(*args, **kwargs)


_lstm = LstmOperator("lstm_in_parts", cacheable=True)


@contextlib.contextmanager
def lstms_are_written_out(tx: Any) -> Iterator[None]:
    """Dynamo's graph calls :class:`LstmOperator` where the program calls ``torch.lstm`` within."""
    known = set(nodes_at_hand(tx))
    yield
    for node in nodes_at_hand(tx):
        if node.target is torch.lstm and node not in known:
            node.target = _lstm
