"""ExecuTorch: its emitter makes a loop of a scan, and its runtime computes what ours does.

Run where `pip install '.[executorch]'` was.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.utils._pytree as pytree
from exportable import PROGRAMS, Program
from oracle import assert_same

from torch_scan_hop import scan

pytest.importorskip("executorch")

pytestmark = [pytest.mark.works("ExecuTorch")]


def run_executorch(program, *inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        from executorch.exir import to_edge
        from executorch.runtime import Runtime

        buffer = to_edge(program).to_executorch().buffer
        method = Runtime.get().load_program(buffer).load_method("forward")
        return [result.clone() for result in method.execute(inputs)]


# an unrolled scan joins the stacks of its blocks: see the test below
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "unrolled"])
def test_executorch_computes_the_loop(name):
    model = Program(PROGRAMS[name]).eval()
    inputs = torch.randn(2, 3), torch.randn(5, 2, 3)
    with torch.no_grad():
        program = torch.export.export(model, inputs, strict=False)
    assert_same(
        run_executorch(program, *inputs), pytree.tree_leaves(model.with_loop(*inputs)), 1e-5
    )


def test_a_trip_count_that_is_open():
    model = Program(PROGRAMS["reversed"]).eval()
    shapes = {}, {0: torch.export.Dim("T", min=2, max=50)}
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.randn(2, 3), torch.randn(5, 2, 3)), dynamic_shapes=shapes
        )
    for T in (3, 9):
        inputs = torch.randn(2, 3), torch.randn(T, 2, 3)
        assert_same(run_executorch(program, *inputs), list(model.with_loop(*inputs)), 1e-5)


def test_some_views_of_stacked_ys_are_an_error_there():
    """Torch's own scan gets the same one; a copy of the stack is the way round."""

    class Model(torch.nn.Module):
        def __init__(self, way_round):
            super().__init__()
            self.way_round = way_round

        def forward(self, h, xs):
            _, ys = scan(lambda h, x: (torch.tanh(h + x), h), h, xs)
            return (ys.clone() if self.way_round else ys) @ torch.ones(3, 3)

    inputs = torch.randn(2, 3), torch.randn(5, 2, 3)
    with pytest.raises(Exception, match="shape_dynamism"):
        run_executorch(torch.export.export(Model(False), inputs), *inputs)
    program = torch.export.export(Model(True), inputs)
    assert_same(run_executorch(program, *inputs), [Model(True)(*inputs)], 1e-5)
