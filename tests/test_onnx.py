"""ONNX: torch's exporter makes one ``Scan`` of a scan, and onnxruntime computes what the loop does.

Run where `pip install '.[onnx]'` was.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.utils._pytree as pytree
from oracle import assert_same, loop
from torch import nn

from torch_scan_hop import Binomial, scan

for _name in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_name)

pytestmark = [pytest.mark.torch_version, pytest.mark.works("ONNX")]


class Program(nn.Module):
    """``body(self, scan, h, xs)``, with the scan, or with the loop in its place."""

    def __init__(self, body):
        super().__init__()
        self.body, self.scan = body, scan
        self.linear, self.lstm = nn.Linear(3, 3), nn.LSTMCell(3, 3)
        self.register_buffer("w", torch.linspace(-1, 1, 9).reshape(3, 3))

    def forward(self, h, xs):
        return self.body(self, self.scan, h, xs)

    def step(self, h, x):
        return torch.tanh(h @ self.w + self.linear(x))

    def with_loop(self, *inputs):
        self.scan = loop
        try:
            with torch.no_grad():
                return self(*inputs)
        finally:
            self.scan = scan


def rnn(self, scan, h, xs, **options):
    def cell(h, x):
        h = self.step(h, x)
        return h, h

    return scan(cell, h, xs, **options)


def trees(self, scan, h, xs):
    def cell(carry, x):
        h = self.step(carry["h"], x["a"])
        return {"h": h, "n": carry["n"] + 1}, (h.sum(-1), x["b"], carry["n"])

    return scan(cell, {"h": h, "n": torch.zeros((), dtype=torch.int64)}, {"a": xs, "b": xs * 2})


def lstm(self, scan, h, xs):
    def cell(state, x):
        state = self.lstm(x, state)
        return state, state[0]

    return scan(cell, (h, h), xs)


def statistics(self, scan, h, xs):
    total = torch.zeros(2, 3)

    def cell(h, x):
        total.add_(x)
        return h * 0.5 + total, h

    return scan(cell, h, xs), total


def nested(self, scan, h, xs):
    return scan(lambda h, x: scan(lambda a, _: (a.sin() + x, a), h, length=3), h, xs)


def two(self, scan, h, xs):
    h, hs = rnn(self, scan, h, xs)
    return rnn(self, scan, h, hs, reverse=True)


PROGRAMS = {
    "rnn": rnn,
    "reversed": lambda self, scan, h, xs: rnn(self, scan, h, xs, reverse=True),
    "another dimension": lambda self, scan, h, xs: rnn(self, scan, h, xs.movedim(0, 1), dim=1),
    "unrolled": lambda self, scan, h, xs: rnn(self, scan, h, xs, unroll=2),
    "trees": trees,
    "lstm": lstm,
    "no y": lambda self, scan, h, xs: scan(lambda h, x: (self.step(h, x), None), h, xs)[0],
    "no xs": lambda self, scan, h, xs: scan(lambda h, _: (torch.tanh(h @ self.w), h), h, length=5),
    "what came in": lambda self, scan, h, xs: scan(lambda h, x: (x, (h, x, h)), h, xs),
    "what is closed over": lambda self, scan, h, xs: scan(lambda h, x: (h + x, self.w), h, xs),
    "table": lambda self, scan, h, xs: scan(
        lambda h, t: (h + xs[t], h), h, torch.tensor([2, 0, 1])
    ),
    "statistics": statistics,
    "nested": nested,
    "two": two,
}


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
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert node.kwargs == {"checkpoint": "full"}
