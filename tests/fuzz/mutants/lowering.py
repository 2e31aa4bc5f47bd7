"""Mends of what becomes of a body after its capture: Inductor, and work that leaves the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import torch

from .registry import mutant


@mutant("a", "inductor", "pointwise,indexing,buffers,inplace")
def bodies_written_in_place() -> Iterator[object]:
    """Inductor's re-inplacing passes run on scan bodies, too, before their buffers are hoisted."""
    from torch._inductor.fx_passes import post_grad

    from torch_scan_hop._torch import inductor_passes as ours
    from torch_scan_hop.inductor import register, rewriter

    register()
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(rewriter.ScanRewriter, "make_functional", lambda self: None)
        )
        for name, run_pass in ours._mutating_passes.items():
            stack.enter_context(mock.patch.object(post_grad, name, run_pass))
        yield None


@mutant("b", "inductor+small_blocks", "pointwise,products,complex,complex_carry,long")
def complex_scans_stay_complex() -> Iterator[object]:
    """Inductor lowers complex scans as they are, and not as pairs of reals."""
    from torch_scan_hop.inductor import rewriter

    with mock.patch.object(rewriter.ScanRewriter, "rewrite_pairs", lambda self: None):
        yield None


@mutant("h", "eager", "pointwise,products,fills")
def any_operator_is_batched() -> Iterator[object]:
    """Every operator is done for all steps at once by torch's batching rule for it."""
    from torch_scan_hop.rewrites import classify, planner

    with (
        mock.patch.object(classify, "is_batchable", lambda node, any_trip_count: True),
        mock.patch.object(planner, "is_batchable", lambda node, any_trip_count: True),
    ):
        yield None


@mutant("14", "triton+tiles", "affine,pointwise")
def compositions_are_taken_unseen() -> Iterator[object]:
    """A kernel that is parallel in time takes what steps compose to, whatever came of it."""
    from torch_scan_hop.inductor.gpu.composition import Composition

    with mock.patch.object(Composition, "agreement", lambda self: []):
        yield None


@mutant("16", "inductor", "rows,inner_cells,pointwise,products")
def carries_of_rows_begin_their_buffers() -> Iterator[object]:
    """The kernel of an inner cell reads its carry where the outer loop's whole stack begins."""
    from torch_scan_hop.inductor.cpu import row_code

    multiply = row_code.RowCode._multiply

    def from_the_beginning(code: row_code.RowCode, *args: object) -> None:
        with mock.patch.dict(code.begins, dict.fromkeys(code.begins, 0)):
            multiply(code, *args)  # type: ignore[arg-type]

    with mock.patch.object(row_code.RowCode, "_multiply", from_the_beginning):
        yield None


@mutant("17", "inductor", "pointwise,sums")
def no_dimensions_are_none() -> Iterator[object]:
    """A sum whose dimensions are not named is stacked, and summed over the steps alone."""
    from torch_scan_hop.rewrites.accumulate import SUMS, Accumulator

    reduced = Accumulator._reduced

    def over_steps(accumulator: Accumulator, stack: torch.Tensor) -> torch.Tensor:
        assert accumulator.term.target in SUMS
        named = accumulator.term.args[1:2] not in [(), ([],), (None,)]
        return reduced(accumulator, stack) if named else stack.sum(0)

    with mock.patch.object(Accumulator, "_reduced", over_steps):
        yield None


@mutant("18", "inductor", "pointwise,kernel,made")
def what_reads_nothing_is_its_expression() -> Iterator[object]:
    """A kernel reads what is computed of nothing as Inductor does, also where dims are merged."""
    from torch_scan_hop._torch import inductor

    with mock.patch.object(inductor, "_read_from_memory", lambda value: value):
        yield None
