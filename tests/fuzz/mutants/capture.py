"""Mends of how a body is captured: what it does to Python objects, and to shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from .registry import mutant


@mutant("c", "eager", "pointwise,state")
def assignments_are_lost() -> Iterator[object]:
    """A body may assign to attributes, globals and lists: Dynamo traces that, and forgets it."""
    from torch_scan_hop._torch.dynamo import speculation

    with mock.patch.object(
        speculation, "lasting_changes_are_refused", lambda tx: contextlib.nullcontext()
    ):
        yield None


@mutant("c", "eager", "pointwise,attributes")
def results_are_in_containers_of_the_program() -> Iterator[object]:
    """A body may return a list that it has written to, in which is again what was there before."""
    from torch_scan_hop.capture import stateful
    from torch_scan_hop.step import split_result

    with mock.patch.object(stateful, "in_own_containers", split_result):
        yield None


@mutant("c", "eager", "pointwise,draws")
def one_draw_for_all_steps() -> Iterator[object]:
    """A body may call random.random(): it is drawn when the body is traced, for all steps."""
    from torch_scan_hop._torch.dynamo import speculation

    refused = speculation.lasting_changes_are_refused

    @contextlib.contextmanager
    def but_draws(tx: Any) -> Iterator[None]:
        calls = tx.output.random_calls
        drawn: list[Any] = []
        n = len(calls)
        with refused(tx):
            yield
            drawn[:], calls[n:] = calls[n:], []
        calls.extend(drawn)

    with mock.patch.object(speculation, "lasting_changes_are_refused", but_draws):
        yield None


@mutant("f", "eager", "pointwise,aliases")
def shared_memory_is_copied() -> Iterator[object]:
    """What a body changes is carried as a copy, even if another tensor has the same memory."""
    from torch_scan_hop.capture import variables

    with mock.patch.object(variables, "_refuse_shared_memory", lambda *args: None):
        yield None


@mutant("i", "eager", "pointwise,masks")
def rows_left_out_pass_gradients_on() -> Iterator[object]:
    """Rows that a mask leaves out pass a gradient to what all rows share: zero times infinity."""
    from torch_scan_hop.capture.selected_rows import _AllRows

    with (
        mock.patch.object(_AllRows, "_select_before", lambda *args: None),
        mock.patch.object(_AllRows, "_select_after", lambda *args: None),
    ):
        yield None


@mutant("i", "eager", "pointwise,masks")
def every_operator_is_row_by_row() -> Iterator[object]:
    """What goes along the rows that a mask selects is done along all rows."""
    from torch_scan_hop.capture import row_by_row

    with mock.patch.object(row_by_row, "_check_dims", lambda node: None):
        yield None
