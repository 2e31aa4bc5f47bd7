"""Under torch.compile: what is captured, how often, and that every backend computes the loop."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from cells import CELLS
from oracle import VARIANTS, assert_same, check, gradients, loop, randn, zeros_for_none
from torch import nn
from torch._dynamo.testing import (
    AotEagerAndRecordGraphs,
    CompileCounterWithBackend,
    EagerAndRecordGraphs,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torch_scan_hop import Binomial, scan

pytestmark = pytest.mark.torch_version
F64 = torch.float64
SCAN = torch.ops.higher_order.scan


def scans_in(graph_module):
    """Scan nodes of a graph and of its subgraphs."""
    return [
        node
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.find_nodes(op="call_function", target=SCAN)
    ]


def rnn(h, x, w):
    h = torch.tanh(h @ w + x)
    return h, h


# --- capture ---


def test_one_node_in_the_captured_graph():
    backend = EagerAndRecordGraphs()
    w = randn(3, 3).requires_grad_()
    run = torch.compile(
        lambda h, xs: scan(functools.partial(rnn, w=w), h, xs, reverse=True),
        backend=backend,
        fullgraph=True,
    )
    h, xs = randn(2, 3), randn(4, 2, 3)
    assert_same(run(h, xs), loop(functools.partial(rnn, w=w), h, xs, reverse=True))
    (graph,) = backend.graphs
    (node,) = scans_in(graph)
    body, init, sliced, additional = node.args
    assert (len(init), len(sliced), len(additional)) == (1, 1, 1)
    assert dict(node.kwargs) == {"reverse": True}
    assert body.op == "get_attr"


@pytest.mark.works("torch.compile")
@pytest.mark.parametrize("cell", CELLS)
def test_one_scan_forward_and_one_backward(cell):
    backend = AotEagerAndRecordGraphs()
    p = CELLS[cell].problem(F64, T=4, B=2)
    xs = torch.utils._pytree.tree_map(lambda t: t.detach().requires_grad_(), p.xs)
    run = torch.compile(lambda h, xs: scan(p.combine_fn, h, xs), backend=backend, fullgraph=True)
    gradients(run(p.init, xs), list(p.params.values()) + torch.utils._pytree.tree_leaves(xs))
    assert [len(scans_in(g)) for g in backend.fw_graphs] == [1]
    assert [len(scans_in(g)) for g in backend.bw_graphs] == [1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 3).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=F64))
        self.factor = 1.0

    def step(self, h, x):
        h = self.cell(x, h) * self.scale * self.factor
        return h, h

    def forward(self, h, xs, scan_=scan):
        return scan_(self.step, h, xs)


def test_modules_parameters_and_bound_methods_are_lifted():
    model = Model()
    h, xs = randn(2, 3), randn(4, 2, 3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        actual, expected = compiled(h, xs), model(h, xs, loop)
        assert_same(actual, expected)
        wrt = list(model.parameters())
        assert_same(gradients(actual, wrt), gradients(expected, wrt))
        with torch.no_grad():
            for p in wrt:
                p.mul_(1.1)
    assert counter.frame_count == 1


def test_a_python_scalar_that_changes_is_guarded():
    model = Model()
    h, xs = randn(2, 3), randn(4, 2, 3)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for factor in (1.0, 0.5, 0.25, 0.75):
        model.factor = factor
        assert_same(compiled(h, xs), model(h, xs, loop))
    assert counter.frame_count <= 4


@pytest.mark.parametrize("value", [2, 0.5, True])
def test_closed_over_scalars(value):
    other = {2: 3, 0.5: 0.25, True: False}[value]

    def run(k, h, xs, scan_=scan):
        return scan_(lambda h, x: (h * k + x, h), h, xs)

    h, xs = randn(3), randn(4, 3)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for k in (value, other, value):
        assert_same(compiled(k, h, xs), run(k, h, xs, loop))


@pytest.mark.parametrize("how", ["mark_dynamic", "dynamic=True"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_recompile_when_a_dynamic_size_changes(backend, how):
    w = randn(3, 3).requires_grad_()
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(
        lambda h, xs: scan(functools.partial(rnn, w=w), h, xs),
        backend=counter,
        fullgraph=True,
        dynamic=True if how == "dynamic=True" else None,
    )
    for T, B in ((5, 4), (7, 3), (11, 6)):
        h, xs = randn(B, 3), randn(T, B, 3)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(xs, 0)
            torch._dynamo.mark_dynamic(xs, 1)
            torch._dynamo.mark_dynamic(h, 0)
        actual, expected = run(h, xs), loop(functools.partial(rnn, w=w), h, xs)
        assert_same(actual, expected)
        assert_same(gradients(actual, [w]), gradients(expected, [w]))
    assert counter.frame_count == 1


def test_eager_captures_settle_when_sizes_vary():
    w = randn(3, 3)
    cell = functools.partial(rnn, w=w)
    for T in (3, 4, 5):
        scan(cell, randn(2, 3), randn(T, 2, 3))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for T in (6, 9, 17):
        h, xs = randn(2, 3), randn(T, 2, 3)
        assert_same(scan(cell, h, xs), loop(cell, h, xs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


# --- shapes and dtypes ---


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("T", [0, 1, 5])
def test_views_as_xs_and_chained_scans(backend, T):
    w = randn(3, 3).requires_grad_()
    x = randn(T + 1, 2, 3).requires_grad_()

    def run(x, scan_=scan):
        cell = functools.partial(rnn, w=w)
        h, ys = scan_(cell, torch.zeros(2, 3, dtype=F64), x[1:])
        return scan_(cell, h, ys, reverse=True)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    actual, expected = compiled(x), run(x, loop)
    assert_same(actual, expected)
    wrt = [x, w]
    assert_same(
        zeros_for_none(gradients(actual, wrt), wrt), zeros_for_none(gradients(expected, wrt), wrt)
    )


def integer_and_bool_carries(scan_, xs):
    def cell(carry, x):
        n, seen, h = carry
        return (n + 1, seen | (x.sum() > 0), h * x + n), (n, seen)

    return scan_(cell, (torch.tensor(0), torch.tensor(False), torch.zeros(3, dtype=F64)), xs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_integer_and_bool_carries(backend):
    xs = randn(4, 3).requires_grad_()
    compiled = torch.compile(
        lambda xs: integer_and_bool_carries(scan, xs), backend=backend, fullgraph=True
    )
    actual, expected = compiled(xs), integer_and_bool_carries(loop, xs)
    assert_same(actual, expected)
    assert_same(gradients(actual, [xs]), gradients(expected, [xs]))


@pytest.mark.works("torch.compile")
def test_inductor_with_a_dynamic_trip_count():
    w = randn(3, 3).requires_grad_()
    cell = functools.partial(rnn, w=w)
    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(
        lambda h, xs: scan(cell, h, xs), backend=counter, fullgraph=True, dynamic=True
    )
    for T in (5, 8):
        h, xs = randn(2, 3), randn(T, 2, 3)
        actual, expected = run(h, xs), loop(cell, h, xs)
        assert_same(actual, expected)
        assert_same(gradients(actual, [w]), gradients(expected, [w]))
    assert counter.frame_count == 1


# --- composition ---


def make_custom_op():
    @torch.library.custom_op("torch_scan_hop_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x):
        return torch.empty_like(x)

    twice.register_autograd(lambda ctx, g: g * 2)
    return twice


twice = make_custom_op()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def with_cond(h, x, w):
    h = torch.cond(x.sum() > 0, lambda h: torch.sin(h @ w), lambda h: h * 0.5, (h,))
    return h, h


def with_checkpoint(h, x, w):
    h = checkpoint(lambda h, x: torch.tanh(torch.sin(h @ w) + x), h, x, use_reentrant=False)
    return h, h


def with_function(h, x, w):
    h = Cube.apply(torch.tanh(h @ w + x))
    return h, h


def with_custom_op(h, x, w):
    h = torch.tanh(twice(h @ w) + x)
    return h, h


def nested(depth):
    def cell(scan_, h, x, w):
        if depth == 0:
            return rnn(h, x, w)

        def inner(h, y):
            return nested(depth - 1)(scan_, h, y, w)

        h, ys = scan_(inner, h, torch.stack([x, x * 0.5]))
        return h, ys.sum(0)

    return cell


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("cell", [with_cond, with_checkpoint, with_function, with_custom_op])
def test_body_with(cell, backend):
    w = randn(3, 3).requires_grad_()
    variant = VARIANTS["eager"] if backend is None else VARIANTS["aot_eager"]
    check(functools.partial(cell, w=w), randn(3), randn(4, 3), params=[w], variant=variant)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nested_scans(depth, backend):
    w = randn(3, 3).requires_grad_()
    h, xs = randn(3), randn(3, 3)

    def run(h, xs, scan_=scan):
        return scan_(lambda h, x: nested(depth)(scan_, h, x, w), h, xs)

    f = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    actual, expected = f(h, xs), run(h, xs, loop)
    assert_same(actual, expected)
    assert_same(gradients(actual, [w]), gradients(expected, [w]))


def test_while_loop_in_the_body():
    from torch._higher_order_ops.while_loop import while_loop

    def cell(h, x):
        _, h = while_loop(
            lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.5 + x), (torch.tensor(0), h)
        )
        return h, h

    h, xs = randn(3), randn(4, 3)

    def by_hand(h, x):
        for _ in range(3):
            h = h * 0.5 + x
        return h, h

    with torch.no_grad():
        run = torch.compile(lambda h, xs: scan(cell, h, xs), backend="aot_eager", fullgraph=True)
        assert_same(run(h, xs), loop(by_hand, h, xs))
        assert_same(scan(cell, h, xs), loop(by_hand, h, xs))


@pytest.mark.torch_version
@pytest.mark.parametrize("how", ["eager", "compiled", "dynamic"])
def test_checkpoint_around_the_scan(how):
    w = randn(3, 3).requires_grad_()

    def run(h, xs):
        return checkpoint(
            lambda h, xs: scan(functools.partial(rnn, w=w), h, xs), h, xs, use_reentrant=False
        )

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=how == "dynamic")
    for sizes in ((2, 4), (5, 6)):
        h, xs = randn(sizes[0], 3), randn(*reversed(sizes), 3)
        actual = (run if how == "eager" else compiled)(h, xs)
        expected = loop(functools.partial(rnn, w=w), h, xs)
        assert_same(actual, expected)
        assert_same(gradients(actual, [w]), gradients(expected, [w]))


def test_a_scan_in_a_branch_of_cond():
    w = randn(3, 3)

    def run(h, xs):
        cell = functools.partial(rnn, w=w)
        return torch.cond(
            h.sum() > 0, lambda h, xs: scan(cell, h, xs)[0], lambda h, xs: h * 2, (h, xs)
        )

    xs = randn(4, 3)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for h in (torch.ones(3, dtype=F64), -torch.ones(3, dtype=F64)):
        want = loop(functools.partial(rnn, w=w), h, xs)[0] if h.sum() > 0 else h * 2
        assert_same(compiled(h, xs), want)


# --- modes and tools ---


@pytest.mark.parametrize("T", [1, 6])
def test_flop_counter_counts_every_step(T):
    w = torch.randn(4, 8)
    with FlopCounterMode(display=False) as counter:
        scan(lambda h, x: (h, x @ w), torch.zeros(()), torch.randn(T, 3, 4))
    assert counter.get_total_flops() == T * 2 * 3 * 4 * 8


def test_a_users_dispatch_mode_sees_every_step():
    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    h, xs = randn(3), randn(4, 3)
    with Log() as log:
        result = scan(lambda h, x: (torch.tanh(h + x), h), h, xs)
    assert log.seen.count(torch.ops.aten.tanh.default) == 4
    assert_same(result, loop(lambda h, x: (torch.tanh(h + x), h), h, xs))


def captured():
    backend = EagerAndRecordGraphs()
    w = randn(3, 3)
    h, xs = randn(3), randn(4, 3)
    torch.compile(
        lambda h, xs: scan(functools.partial(rnn, w=w), h, xs), backend=backend, fullgraph=True
    )(h, xs)
    (graph,) = backend.graphs
    inputs = {"w": w, "h": h, "xs": xs}
    order = []
    for node in graph.graph.find_nodes(op="placeholder"):
        shape = tuple(node.meta["example_value"].shape)
        name = next(k for k, v in inputs.items() if tuple(v.shape) == shape)
        order.append(inputs[name])
    return graph, order


def test_a_graph_that_holds_a_scan_can_be_copied_and_pickled():
    graph, inputs = captured()
    want = graph(*inputs)
    assert_same(list(copy.deepcopy(graph)(*inputs)), list(want))
    for node in graph.graph.nodes:
        node.meta.clear()
    for module in graph.children():
        for node in module.graph.nodes:
            node.meta.clear()
    loaded = pickle.loads(pickle.dumps(graph))
    assert_same(list(loaded(*inputs)), list(want))
    assert copy.deepcopy(SCAN) is SCAN and pickle.loads(pickle.dumps(SCAN)) is SCAN
    buffer = io.BytesIO()
    torch.save(graph, buffer)
    buffer.seek(0)
    assert_same(list(torch.load(buffer, weights_only=False)(*inputs)), list(want))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_autocast(backend):
    w = torch.randn(4, 4, requires_grad=True)
    h, xs = torch.randn(2, 4), torch.randn(5, 2, 4)
    cell = functools.partial(rnn, w=w)

    def run(h, xs, scan_=scan):
        with torch.autocast("cpu", torch.bfloat16):
            return scan_(lambda h, x: (torch.tanh(h @ w + x), h @ w), h, xs)

    f = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    (h_last, ys), (want_h, want_ys) = f(h, xs), run(h, xs, loop)
    assert h_last.dtype == torch.float32 and ys.dtype == torch.bfloat16
    assert_same((h_last, ys), (want_h, want_ys), 2e-2)
    # casts are part of the body: a capture outside autocast is another one
    assert scan(cell, h, xs)[1].dtype == torch.float32
    got, want = (torch.autograd.grad(r.sum(), w)[0] for r in (h_last, want_h))
    assert_same(got, want, 6e-2)


def test_compiled_autograd():
    w = randn(3, 3).requires_grad_()
    h, xs = randn(3), randn(4, 3)
    cell = functools.partial(rnn, w=w)
    run = torch.compile(lambda h, xs: scan(cell, h, xs), backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        run(h, xs)[1].sum().backward()
    assert_same(w.grad, torch.autograd.grad(loop(cell, h, xs)[1].sum(), w)[0])


def of_tokens(h, x, w):
    h = torch.tanh(h + F.embedding(x["token"], w) + F.layer_norm(x["a"], (4,)))
    return h, torch.cat([h, x["a"]], -1).gather(1, x["token"][:, None])


def of_a_window(h, x, w):
    h = torch.cat([h[:, 1:], (x["a"] @ w)[:, :1]], 1)
    return h, torch.softmax(h.sum(-1, keepdim=True) * x["a"], -1) @ w


@pytest.mark.parametrize("body", [pytest.param(of_tokens, marks=pytest.mark.slow), of_a_window])
def test_any_trip_count_of_what_runs_for_all_steps_at_once(body):
    """Some batching rules ask for the number of steps: there would be a program for each."""
    counter = CompileCounterWithBackend("inductor")
    w, h = randn(4, 4).requires_grad_(), randn(3, 4)

    def fn(h, xs, scan=scan):
        return scan(functools.partial(body, w=w), h, xs)

    run = torch.compile(fn, fullgraph=True, backend=counter)
    for trip_count in (6, 7, 9):
        token = torch.arange(trip_count * 3).reshape(-1, 3) % 4
        xs = {"token": token, "a": randn(trip_count, 3, 4)}
        for x in xs.values():
            torch._dynamo.mark_dynamic(x, 0)
        assert_same(gradients(run(h, xs), [w]), gradients(fn(h, xs, loop), [w]), 1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda h, x, rate: torch.tanh(h * (rate // 0.1) + x), id="floor"),
        pytest.param(
            lambda h, x, rate: F.celu(h + x, rate**2 + 1), id="power", marks=pytest.mark.slow
        ),
    ],
)
def test_a_float_that_torch_fixes_after_the_capture(body):
    """Torch 2.13 then looks at bodies again, with its value where they were traced for a symbol."""

    def fn(rate, h, xs, scan=scan):
        return scan(lambda h, x: (body(h, x, rate),) * 2, h, xs)[1]

    run = torch.compile(fn, fullgraph=True)
    h, xs = randn(3).requires_grad_(), randn(4, 3)
    for rate in (0.55, 0.75, 0.95):
        got = gradients(run(rate, h, xs), [h])
        assert_same(got, gradients(fn(rate, h, xs, loop), [h]), 1e-5)


@pytest.mark.torch_version
@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.slow), "inductor"])
def test_numbers_that_a_body_computes_of_sizes_and_floats(backend):
    def cell_with(f):
        def cell(h, x):
            n = h.shape[0] * h.shape[1] + 1
            return torch.tanh((1 - f * 2) * h * n + x) / (n + f), h.reshape(-1)

        return cell

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def run(h, xs, f):
        return scan(cell_with(f), h, xs)

    for batch, number in ((3, 0.5), (4, 0.25), (5, 0.3)):
        given = [randn(batch, 2).requires_grad_(), randn(4, batch, 2).requires_grad_()]
        got, want = run(*given, number), loop(cell_with(number), *given)
        assert_same(got, want)
        assert_same(gradients(got, given), gradients(want, given))


def convolves(c, x):
    y = F.conv1d(c.unsqueeze(1), torch.ones(1, 1, 3, dtype=c.dtype), padding=1).squeeze(1)
    return c * 0.5 + torch.sin(y.mean()), y * x.sum()


def fills_a_diagonal(c, x):
    z = c * x
    z.fill_diagonal_(0.2)
    return torch.tanh(c * 0.5 + z.mean()), z


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "body",
    [
        convolves,
        pytest.param(
            fills_a_diagonal,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="fill_diagonal_ of torch 2.9 takes no symbols"
            ),
        ),
    ],
)
def test_a_derivation_is_no_part_of_the_program_that_is_traced(body):
    """What it asks about sizes that are symbols, and the constants that it makes."""
    backend = "aot_eager_decomp_partition"

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def run(h, xs):
        return scan(body, h, xs, unroll=3)

    given = [randn(3, 3).requires_grad_(), randn(5, 3, 3).requires_grad_()]
    got, want = run(*given), loop(body, *given)
    assert_same(got, want)
    assert_same(gradients(got, given), gradients(want, given))


@pytest.mark.torch_version
def test_two_bodies_read_one_number():
    def run(scan_, h, xs, f):
        def inner(h, x):
            return torch.sin(h * f + x), h * f

        def outer(h, x):
            h, y = scan_(inner, h, x)
            return scan_(lambda h, x: (h - x * f, h), h, y)[0], y

        h, ys = scan_(outer, h, xs)
        return scan_(inner, h, ys.sum(1), checkpoint=Binomial(2))

    compiled = torch.compile(
        functools.partial(run, scan), backend="aot_eager", fullgraph=True, dynamic=True
    )
    given = [randn(3).requires_grad_(), randn(4, 2, 3).requires_grad_()]
    for tensor in given:  # this is about the number: symbols in every shape make it four times dear
        torch._dynamo.mark_static(tensor)
    for number in (0.5, 0.25):
        got, want = compiled(*given, number), run(loop, *given, number)
        assert_same(got, want)
        assert_same(gradients(got, given), gradients(want, given))


@pytest.mark.slow
def test_torchs_caches_serve_a_second_process_and_know_our_options(tmp_path):
    program = textwrap.dedent(
        """
        import sys, torch
        from torch._dynamo.utils import counters
        from torch_scan_hop import scan
        from torch_scan_hop.rewrites import using_options

        w = torch.eye(3).requires_grad_()
        def step(h, x):
            h = torch.tanh(h @ w + x)
            return h, h
        run = torch.compile(lambda h, xs: scan(step, h, xs)[1].sum(), fullgraph=True)
        with using_options(batch_xs=sys.argv[1] == "batch"):
            run(torch.zeros(2, 3), torch.ones(4, 2, 3)).backward()
        aot, inductor = counters["aot_autograd"], counters["inductor"]
        print(aot["autograd_cache_hit"], inductor["fxgraph_cache_hit"])
        """
    )

    def hits(option):
        out = subprocess.run(
            [sys.executable, "-c", program, option],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return tuple(map(int, out.split()[-2:]))

    assert hits("batch") == (0, 0)
    assert hits("batch") == (1, 2)
    assert hits("no batch") == (0, 0)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_compile(mode):
    p = CELLS["gru"].problem(torch.float32, T=4, B=2)
    params = list(p.params.values())
    run = torch.compile(lambda xs: scan(p.combine_fn, p.init, xs), mode=mode, fullgraph=True)
    expected = loop(p.combine_fn, p.init, p.xs)
    for _ in range(3):  # a mode that records would replay
        actual = run(p.xs)
        assert_same(actual, expected, 1e-4)
        assert_same(gradients(actual, params), gradients(expected, params), 1e-3)
        expected = loop(p.combine_fn, p.init, p.xs)


def test_a_frozen_model():
    model = Model()
    h, xs = randn(2, 3), randn(4, 2, 3)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        assert_same(torch.compile(model.eval(), fullgraph=True)(h, xs), model(h, xs, loop), 1e-9)


@pytest.mark.works("torch.compile")
@pytest.mark.parametrize("cell", [pytest.param("lstm", marks=pytest.mark.slow), "selective_ssm"])
def test_the_cpp_wrapper_trains(cell):
    p = CELLS[cell].problem(torch.float32, T=5, B=2)
    params = list(p.params.values())
    run = torch.compile(
        lambda xs: scan(p.combine_fn, p.init, xs), options={"cpp_wrapper": True}, fullgraph=True
    )
    actual, expected = run(p.xs), loop(p.combine_fn, p.init, p.xs)
    assert_same(actual, expected, 1e-4)
    assert_same(gradients(actual, params), gradients(expected, params), 1e-3)


@pytest.mark.slow
def test_the_cpp_wrapper_takes_a_view_of_a_weight_for_one():
    """C++ read what makes it as the declaration of a function (torch 2.9 to 2.13)."""
    w = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def cell(h, x):
        h = w @ h @ w.mT
        return torch.linalg.solve(h @ h.mT + torch.eye(3), x), h

    h, xs = torch.eye(3).repeat(2, 1, 1), torch.eye(3).repeat(4, 2, 1, 1)
    run = torch.compile(
        lambda h, xs: scan(cell, h, xs)[0], options={"cpp_wrapper": True}, fullgraph=True
    )
    (got,) = torch.autograd.grad(run(h, xs).sum(), [w])
    (want,) = torch.autograd.grad(loop(cell, h, xs)[0].sum(), [w])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_cpp_wrapper_calls_pythons_operators_within_and_after_a_loop(nested):
    """It declared once what does so, in the braces of the loop (torch 2.9)."""

    def spectral(h, x):
        h = torch.fft.rfft(torch.tanh(torch.fft.irfft(h, n=8)) + x)
        return h, h.real

    def program(scan_, h, xs):
        step = (lambda h, x: scan_(spectral, h, x)) if nested else spectral
        h, ys = scan_(step, h, torch.stack([xs, xs]) if nested else xs)
        return torch.fft.irfft(h, n=8), ys

    h, xs = torch.fft.rfft(randn(4, 8)), randn(3, 4, 8)
    run = torch.compile(
        functools.partial(program, scan), options={"cpp_wrapper": True}, fullgraph=True
    )
    assert_same(run(h, xs), program(loop, h, xs), 1e-9)


def mean_in_a_step(h, x):
    return (h + x) * (1 / x.shape[0]), h


def rows_in_a_step(h, x):
    """In one row, which takes a product of three sizes."""
    h = torch.tanh(h + x)
    return h, h.permute(0, 2, 3, 1).reshape(-1, h.shape[1]).sum(0)


@pytest.mark.parametrize("cell, shape", [(mean_in_a_step, (5,)), (rows_in_a_step, (2, 3, 4, 5))])
def test_numbers_computed_from_open_sizes_have_gradients(cell, shape):
    """torch has no code of its own for a quotient, and a wrong one for a product of three."""
    h, xs = randn(*shape).requires_grad_(), randn(4, *shape).requires_grad_()

    def train(run):
        return gradients(run(cell, h, xs), [h, xs])

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same(train(compiled), train(loop))


@pytest.mark.slow
def test_segments_of_open_sizes_have_gradients_under_inductor():
    """Torch compares what a body was traced for with what it is given, symbol by symbol."""
    w = randn(2, 2)
    h, xs = randn(3, 2), randn(3, 2, 4)
    inputs = [t.requires_grad_() for t in (w, h, xs)]

    def train(run):
        def cell(c, x):
            n = torch.tanh(c @ w + x)
            return n, n

        return gradients(run(cell, h, xs, dim=2, checkpoint=2), inputs)

    torch._dynamo.mark_dynamic(xs, 2)
    compiled = torch.compile(scan, fullgraph=True)
    assert_same(train(compiled), train(loop))


def test_a_ring_buffer_trains():
    """Its backward adds to zeros at the pointer, and torch 2.9 wrote the zeros after that."""

    def program(scan, weight, buffer, xs):
        def cell(carry, x):
            buffer, pointer = carry
            old, buffer = buffer[pointer], buffer.index_put((pointer,), x * weight)
            return (buffer, (pointer + 1) % 4), x - old

        (buffer, _), ys = scan(cell, (buffer, torch.tensor(0)), xs)
        return buffer.sin().sum() + ys.sin().sum()

    tensors = [randn(*shape).requires_grad_() for shape in ((4,), (4, 2, 4), (5, 2, 4))]
    run = torch.compile(functools.partial(program, scan), fullgraph=True)
    expected = torch.autograd.grad(program(loop, *tensors), tensors)
    assert_same(torch.autograd.grad(run(*tensors), tensors), expected)


@pytest.mark.torch_version
@pytest.mark.parametrize("of_x", [False, True])
def test_an_empty_that_steps_fill_in_parts(of_x):
    """Inductor fills it in place. It may be the same at every step, and leave the loop."""
    w, xs = randn(3), randn(20, 3)

    def body(h, x):
        made = torch.empty_like(w)
        made[:1] = w[:1]
        made[1:] = (x[1:] if of_x else torch.ones(3, dtype=w.dtype).tanh()[1:]) * 0.5
        return torch.sigmoid(made.mean()) * h + 0.1, made * h

    got = torch.compile(lambda: scan(body, torch.zeros_like(w), xs), fullgraph=True)()
    assert_same(got, loop(body, torch.zeros_like(w), xs))
