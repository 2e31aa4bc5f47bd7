"""ONNX: torch's exporter makes one ``Scan`` of a scan, and onnxruntime computes what the loop does.

Run where `pip install '.[onnx]'` was.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.utils._pytree as pytree
from exportable import PROGRAMS, Program, rnn
from oracle import assert_same

from torch_scan_hop import Binomial

for _name in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_name)

pytestmark = [pytest.mark.torch_version, pytest.mark.works("ONNX")]


FIXED = pytest.param(False, marks=pytest.mark.slow)


def run_onnx(program, *inputs):
    import onnx
    import onnxruntime

    model = program.model_proto
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in session.get_inputs()]
    given = {name: t.numpy() for name, t in zip(names, inputs, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, given)]


def scans(program):
    return [node for node in program.model_proto.graph.node if node.op_type == "Scan"]


def exported(model, inputs, is_dynamic=False):
    shapes = ({}, {0: torch.export.Dim("T", min=2, max=50)}) if is_dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own
        return torch.onnx.export(model, inputs, dynamo=True, verbose=False, dynamic_shapes=shapes)


@pytest.mark.parametrize("is_dynamic", [FIXED, True], ids=["fixed T", "any T"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_onnxruntime_computes_the_loop(name, is_dynamic):
    model = Program(PROGRAMS[name]).eval()
    program = exported(model, (torch.randn(2, 3), torch.randn(5, 2, 3)), is_dynamic)
    assert len(scans(program)) == (
        2 if name == "two" or (name == "unrolled" and not is_dynamic) else 1
    )
    for T in (3, 9) if is_dynamic else (5,):
        inputs = torch.randn(2, 3), torch.randn(T, 2, 3)
        assert_same(run_onnx(program, *inputs), pytree.tree_leaves(model.with_loop(*inputs)), 1e-5)


@pytest.mark.parametrize("checkpoint", ["full", "sqrt", Binomial(2)], ids=str)
def test_a_policy_says_nothing_where_there_is_no_backward(checkpoint):
    model = Program(lambda self, scan, h, xs: rnn(self, scan, h, xs, checkpoint=checkpoint)).eval()
    inputs = torch.randn(2, 3), torch.randn(9, 2, 3)
    assert_same(run_onnx(exported(model, inputs), *inputs), list(model.with_loop(*inputs)), 1e-5)


def test_an_exported_program_is_taken_too_and_keeps_its_policy():
    model = Program(lambda self, scan, h, xs: rnn(self, scan, h, xs, checkpoint="full")).eval()
    inputs = torch.randn(2, 3), torch.randn(5, 2, 3)
    program = torch.export.export(model, inputs)
    assert_same(run_onnx(exported(program, ()), *inputs), list(model.with_loop(*inputs)), 1e-5)
    graph = program.module().graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert node.kwargs == {"checkpoint": "full"}
