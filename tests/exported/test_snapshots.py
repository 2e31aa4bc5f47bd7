"""What a scan looks like to each consumer of graphs, pinned: a change here is seen by users.

``EXPECTTEST_ACCEPT=1 make test ARGS=tests/exported/test_snapshots.py`` writes the snapshots anew.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from graph_text import graph_text
from oracle import assert_same
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, EagerAndRecordGraphs
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version
T, B, D, H = 5, 2, 3, 4


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Parameter(torch.randn(D, H)), nn.Parameter(torch.randn(H, H))

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ self.wx + h @ self.wh)
        return h, h

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        return scan(self.step, torch.zeros(B, H), xs)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Parameter(torch.randn(D, 4 * H)), nn.Parameter(torch.randn(H, 4 * H))
        self.bias = nn.Parameter(torch.zeros(4 * H))

    def step(self, state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        i, f, g, o = (x @ self.wx + state["h"] @ self.wh + self.bias).chunk(4, -1)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return {"h": h, "c": c}, h

    def forward(self, xs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return scan(self.step, {"h": torch.zeros(B, H), "c": torch.zeros(B, H)}, xs)


def dynamo_graph(model: nn.Module) -> str:
    backend = EagerAndRecordGraphs()
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(T, B, D))
    (graph,) = backend.graphs
    return graph_text(graph)


def training_graphs(model: nn.Module) -> tuple[str, str]:
    backend = AotEagerAndRecordGraphs()
    run = torch.compile(model, backend=backend, fullgraph=True)
    run(torch.randn(T, B, D))[1].sum().backward()
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    return graph_text(forward), graph_text(backward)


def symbolic_trace(model: nn.Module) -> str:
    trace = make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph = trace(torch.randn(T, B, D))
    graph.graph.eliminate_dead_code()
    return graph_text(graph)


def exported_program(model: nn.Module) -> str:
    steps = torch.export.Dim("T", min=2, max=100)
    program = torch.export.export(
        model, (torch.randn(T, B, D),), dynamic_shapes=({0: steps},), strict=False
    )
    return graph_text(program.graph_module)


def test_dynamo_graph_of_rnn():
    assert_expected_inline(
        dynamo_graph(RNN()),
        """\
(a0: f32[5, 2, 3], a1: f32[3, 4], a2: f32[4, 4]) ->
  v0: f32[2, 4] = zeros(2, 4)
  v1: tuple = scan(body, [v0], [a0], [a1, a2])
    (a0: f32[2, 4], a1: f32[2, 3], a2: f32[3, 4], a3: f32[4, 4]) ->
      v0: f32[2, 4] = matmul(a1, a2)
      v1: f32[2, 4] = matmul(a0, a3)
      v2: f32[2, 4] = add(v0, v1)
      v3: f32[2, 4] = tanh(v2)
      return [v3, v3]
  return [v1[0], v1[1]]""",
    )


def test_training_graphs_of_rnn():
    forward, backward = training_graphs(RNN())
    assert_expected_inline(
        forward,
        """\
(a0: f32[5, 2, 3], a1: f32[3, 4], a2: f32[4, 4]) ->
  v0: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v1: tuple = scan(body, [v0], [a0], [a1, a2])
    (a0: f32[2, 4], a1: f32[2, 3], a2: f32[3, 4], a3: f32[4, 4]) ->
      v0: f32[2, 4] = mm(a1, a2)
      v1: f32[2, 4] = mm(a0, a3)
      v2: f32[2, 4] = add(v0, v1)
      v3: f32[2, 4] = tanh(v2)
      return [v3, v3]
  return [v1[0], v1[1], a0, a2, v0, v1[1]]""",
    )
    assert_expected_inline(
        backward,
        """\
(a0: f32[5, 2, 3], a1: f32[4, 4], a2: f32[2, 4], a3: f32[5, 2, 4], a4: f32[2, 4], a5: f32[5, 2, 4]) ->
  v0: f32[5, 2, 4] = carries_in(a3, a2, a4, False)
  v1: f32[3, 4] = zeros([3, 4], dtype=torch.float32, device=cpu, pin_memory=False)
  v2: f32[4, 4] = zeros([4, 4], dtype=torch.float32, device=cpu, pin_memory=False)
  v3: tuple = scan(body, [a4, v1, v2], [a5, v0, a0, a3], [a1], reverse=True)
    (a0: f32[2, 4], a1: f32[3, 4], a2: f32[4, 4], a3: f32[2, 4], a4: f32[2, 4], a5: f32[2, 3], a6: f32[2, 4], a7: f32[4, 4]) ->
      v0: f32[2, 4] = add(a0, a3)
      v1: f32[2, 4] = tanh_backward(v0, a6)
      v2: f32[4, 2] = t(a4)
      v3: f32[4, 4] = mm(v2, v1)
      v4: f32[4, 4] = t(a7)
      v5: f32[2, 4] = mm(v1, v4)
      v6: f32[3, 2] = t(a5)
      v7: f32[3, 4] = mm(v6, v1)
      v8: f32[3, 4] = add(a1, v7)
      v9: f32[4, 4] = add(a2, v3)
      return [v5, v8, v9]
  return [None, v3[1], v3[2]]""",
    )


def test_symbolic_make_fx_of_rnn():
    assert_expected_inline(
        symbolic_trace(RNN()),
        """\
(a0: f32[s0, 2, 3]) ->
  v0: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v1: tuple = scan(body, [v0], [a0], [<_param_constant0>, <_param_constant1>])
    (a0: f32[2, 4], a1: f32[2, 3], a2: f32[3, 4], a3: f32[4, 4]) ->
      v0: f32[2, 4] = mm(a1, a2)
      v1: f32[2, 4] = mm(a0, a3)
      v2: f32[2, 4] = add(v0, v1)
      v3: f32[2, 4] = tanh(v2)
      return [v3, v3]
  return [v1[0], v1[1]]""",
    )


def test_exported_program_of_rnn():
    assert_expected_inline(
        exported_program(RNN()),
        """\
(a0: f32[3, 4], a1: f32[4, 4], a2: f32[s0, 2, 3]) ->
  v0: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v1: tuple = scan(body, [v0], [a2], [a0, a1])
    (a0: f32[2, 4], a1: f32[2, 3], a2: f32[3, 4], a3: f32[4, 4]) ->
      v0: f32[2, 4] = matmul(a1, a2)
      v1: f32[2, 4] = matmul(a0, a3)
      v2: f32[2, 4] = add(v0, v1)
      v3: f32[2, 4] = tanh(v2)
      v4: f32[2, 4] = clone(v3)
      return [v3, v4]
  return [v1[0], v1[1]]""",
    )


def test_dynamo_graph_of_lstm():
    assert_expected_inline(
        dynamo_graph(LSTM()),
        """\
(a0: f32[5, 2, 3], a1: f32[3, 16], a2: f32[4, 16], a3: f32[16]) ->
  v0: f32[2, 4] = zeros(2, 4)
  v1: f32[2, 4] = zeros(2, 4)
  v2: tuple = scan(body, [v0, v1], [a0], [a1, a2, a3])
    (a0: f32[2, 4], a1: f32[2, 4], a2: f32[2, 3], a3: f32[3, 16], a4: f32[4, 16], a5: f32[16]) ->
      v0: f32[2, 16] = matmul(a2, a3)
      v1: f32[2, 16] = matmul(a0, a4)
      v2: f32[2, 16] = add(v0, v1)
      v3: f32[2, 16] = add(v2, a5)
      v4: tuple = chunk(v3, 4, -1)
      v5: f32[2, 4] = sigmoid(v4[1])
      v6: f32[2, 4] = mul(v5, a1)
      v7: f32[2, 4] = sigmoid(v4[0])
      v8: f32[2, 4] = tanh(v4[2])
      v9: f32[2, 4] = mul(v7, v8)
      v10: f32[2, 4] = add(v6, v9)
      v11: f32[2, 4] = sigmoid(v4[3])
      v12: f32[2, 4] = tanh(v10)
      v13: f32[2, 4] = mul(v11, v12)
      return [v13, v10, v13]
  return [v2[0], v2[1], v2[2]]""",
    )


def test_training_graphs_of_lstm():
    forward, backward = training_graphs(LSTM())
    assert_expected_inline(
        forward,
        """\
(a0: f32[5, 2, 3], a1: f32[3, 16], a2: f32[4, 16], a3: f32[16]) ->
  v0: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v1: tuple = scan(body, [v0, v0], [a0], [a1, a2, a3])
    (a0: f32[2, 4], a1: f32[2, 4], a2: f32[2, 3], a3: f32[3, 16], a4: f32[4, 16], a5: f32[16]) ->
      v0: f32[2, 16] = mm(a2, a3)
      v1: f32[2, 16] = mm(a0, a4)
      v2: f32[2, 16] = add(v0, v1)
      v3: f32[2, 16] = add(v2, a5)
      v4: tuple = split(v3, 4, -1)
      v5: f32[2, 4] = sigmoid(v4[1])
      v6: f32[2, 4] = mul(v5, a1)
      v7: f32[2, 4] = sigmoid(v4[0])
      v8: f32[2, 4] = tanh(v4[2])
      v9: f32[2, 4] = mul(v7, v8)
      v10: f32[2, 4] = add(v6, v9)
      v11: f32[2, 4] = sigmoid(v4[3])
      v12: f32[2, 4] = tanh(v10)
      v13: f32[2, 4] = mul(v11, v12)
      return [v13, v10, v13, v5, v7, v8, v11, v12, a1]
  return [v1[0], v1[1], v1[2], a0, a2, v0, v1[3], v1[4], v1[5], v1[6], v1[7], v1[8], v1[2]]""",
    )
    assert_expected_inline(
        backward,
        """\
(a0: f32[5, 2, 3], a1: f32[4, 16], a2: f32[2, 4], a3: f32[5, 2, 4], a4: f32[5, 2, 4], a5: f32[5, 2, 4], a6: f32[5, 2, 4], a7: f32[5, 2, 4], a8: f32[5, 2, 4], a9: f32[5, 2, 4], a10: f32[2, 4], a11: f32[2, 4], a12: f32[5, 2, 4]) ->
  v0: f32[5, 2, 4] = carries_in(a9, a2, a10, False)
  v1: f32[3, 16] = zeros([3, 16], dtype=torch.float32, device=cpu, pin_memory=False)
  v2: f32[4, 16] = zeros([4, 16], dtype=torch.float32, device=cpu, pin_memory=False)
  v3: f32[16] = zeros([16], dtype=torch.float32, device=cpu, pin_memory=False)
  v4: tuple = scan(body, [a10, a11, v1, v2, v3], [a12, v0, a8, a0, a3, a4, a5, a6, a7], [a1], reverse=True)
    (a0: f32[2, 4], a1: f32[2, 4], a2: f32[3, 16], a3: f32[4, 16], a4: f32[16], a5: f32[2, 4], a6: f32[2, 4], a7: f32[2, 4], a8: f32[2, 3], a9: f32[2, 4], a10: f32[2, 4], a11: f32[2, 4], a12: f32[2, 4], a13: f32[2, 4], a14: f32[4, 16]) ->
      v0: f32[2, 4] = add(a0, a5)
      v1: f32[2, 4] = mul(v0, a12)
      v2: f32[2, 4] = mul(v0, a13)
      v3: f32[2, 4] = tanh_backward(v1, a13)
      v4: f32[2, 4] = add(a1, v3)
      v5: f32[2, 4] = sigmoid_backward(v2, a12)
      v6: f32[2, 4] = mul(v4, a10)
      v7: f32[2, 4] = mul(v4, a11)
      v8: f32[2, 4] = tanh_backward(v6, a11)
      v9: f32[2, 4] = sigmoid_backward(v7, a10)
      v10: f32[2, 4] = mul(v4, a9)
      v11: f32[2, 4] = mul(v4, a7)
      v12: f32[2, 4] = sigmoid_backward(v11, a9)
      v13: f32[2, 16] = cat([v9, v12, v8, v5], 1)
      v14: f32[1, 16] = sum(v13, [0], True)
      v15: f32[16] = view(v14, [16])
      v16: f32[4, 2] = t(a6)
      v17: f32[4, 16] = mm(v16, v13)
      v18: f32[16, 4] = t(a14)
      v19: f32[2, 4] = mm(v13, v18)
      v20: f32[3, 2] = t(a8)
      v21: f32[3, 16] = mm(v20, v13)
      v22: f32[3, 16] = add(a2, v21)
      v23: f32[4, 16] = add(a3, v17)
      v24: f32[16] = add(a4, v15)
      return [v19, v10, v22, v23, v24]
  return [None, v4[2], v4[3], v4[4]]""",
    )


def test_symbolic_make_fx_of_lstm():
    assert_expected_inline(
        symbolic_trace(LSTM()),
        """\
(a0: f32[s0, 2, 3]) ->
  v0: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v1: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v2: tuple = scan(body, [v0, v1], [a0], [<_param_constant0>, <_param_constant1>, <_param_constant2>])
    (a0: f32[2, 4], a1: f32[2, 4], a2: f32[2, 3], a3: f32[3, 16], a4: f32[4, 16], a5: f32[16]) ->
      v0: f32[2, 16] = mm(a2, a3)
      v1: f32[2, 16] = mm(a0, a4)
      v2: f32[2, 16] = add(v0, v1)
      v3: f32[2, 16] = add(v2, a5)
      v4: tuple = split(v3, 4, -1)
      v5: f32[2, 4] = sigmoid(v4[1])
      v6: f32[2, 4] = mul(v5, a1)
      v7: f32[2, 4] = sigmoid(v4[0])
      v8: f32[2, 4] = tanh(v4[2])
      v9: f32[2, 4] = mul(v7, v8)
      v10: f32[2, 4] = add(v6, v9)
      v11: f32[2, 4] = sigmoid(v4[3])
      v12: f32[2, 4] = tanh(v10)
      v13: f32[2, 4] = mul(v11, v12)
      return [v13, v10, v13, v5, v7, v8, v11, v12, a1]
  return [{'h': getitem, 'c': getitem_1}, v2[2]]""",
    )


def test_exported_program_of_lstm():
    assert_expected_inline(
        exported_program(LSTM()),
        """\
(a0: f32[3, 16], a1: f32[4, 16], a2: f32[16], a3: f32[s0, 2, 3]) ->
  v0: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v1: f32[2, 4] = zeros([2, 4], device=cpu, pin_memory=False)
  v2: tuple = scan(body, [v0, v1], [a3], [a0, a1, a2])
    (a0: f32[2, 4], a1: f32[2, 4], a2: f32[2, 3], a3: f32[3, 16], a4: f32[4, 16], a5: f32[16]) ->
      v0: f32[2, 16] = matmul(a2, a3)
      v1: f32[2, 16] = matmul(a0, a4)
      v2: f32[2, 16] = add(v0, v1)
      v3: f32[2, 16] = add(v2, a5)
      v4: tuple = chunk(v3, 4, -1)
      v5: f32[2, 4] = sigmoid(v4[1])
      v6: f32[2, 4] = mul(v5, a1)
      v7: f32[2, 4] = sigmoid(v4[0])
      v8: f32[2, 4] = tanh(v4[2])
      v9: f32[2, 4] = mul(v7, v8)
      v10: f32[2, 4] = add(v6, v9)
      v11: f32[2, 4] = sigmoid(v4[3])
      v12: f32[2, 4] = tanh(v10)
      v13: f32[2, 4] = mul(v11, v12)
      v14: f32[2, 4] = clone(v13)
      return [v13, v10, v14]
  return [v2[0], v2[1], v2[2]]""",
    )


def test_symbolic_make_fx_of_parameters_as_arguments():
    model = RNN()

    def call(parameters: dict[str, Tensor], xs: Tensor) -> object:
        return torch.func.functional_call(model, parameters, (xs,))

    parameters = dict(model.named_parameters())
    graph = make_fx(call, tracing_mode="symbolic")(parameters, torch.randn(T, B, D))
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert len(node.args[3]) == 2
    xs = torch.randn(2 * T, B, D)
    assert_same(graph(parameters, xs), model(xs), 1e-6)
