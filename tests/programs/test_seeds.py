"""Every row of the seed documents (numbered as in ``seeds.md``): the wall, and that it is gone."""

from __future__ import annotations

import importlib.util

import expecttest
import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop import scan, vjp
from torch_scan_hop.graphs import forward_and_backward

if HAS_XLA := importlib.util.find_spec("torch_xla") is not None:
    import xla_harness  # before autograd's engine starts

pytestmark = pytest.mark.torch_version


NEEDS_XLA = [
    pytest.mark.xla,
    pytest.mark.skipif(not HAS_XLA, reason="torch_xla ends at torch 2.9"),
]


def leaf(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator, dtype=torch.float32)
    return value.to(device).detach().requires_grad_()


h = leaf(4, 4, seed=7)


def layers(a, w):
    a = torch.sin(a)
    a = a @ w
    a = torch.cos(a)
    a = a @ h
    return torch.sigmoid(a)


def checkpointed_layers(a, w):
    return torch.utils.checkpoint.checkpoint(layers, a, w, use_reentrant=False)


def operators(module: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def check_against_autograd(fn, *args, captured=()):
    """The two graphs give the outputs and gradients of ``fn``."""
    graphs = forward_and_backward(fn, *args)
    flat = [v.detach() for v in [*torch.utils._pytree.tree_leaves(args), *graphs.captured]]
    results = graphs.forward(*flat)
    outputs, residuals = results[: graphs.n_outputs], results[graphs.n_outputs :]
    expected = torch.utils._pytree.tree_leaves(fn(*args))
    torch.testing.assert_close(list(outputs), [e.detach() for e in expected])
    cotangents = [
        torch.randn_like(o) for o, d in zip(outputs, graphs.differentiable, strict=True) if d
    ]
    gradients = graphs.backward(*residuals, *cotangents)
    inputs = [*torch.utils._pytree.tree_leaves(args), *captured]
    differentiated = [e for e in expected if e.requires_grad]
    wanted = [i for i in inputs if i.requires_grad]
    reference = torch.autograd.grad(differentiated, wanted, cotangents, allow_unused=True)
    found = [g for g, i in zip(gradients, inputs, strict=True) if i.requires_grad]
    torch.testing.assert_close(found, list(reference))
    return graphs


def test_row_01_signature_is_pytree_order_then_captured_by_name():
    graphs = check_against_autograd(layers, leaf(4), leaf(4, 4, seed=1), captured=(h,))
    assert graphs.inputs == ("args_0", "args_1", "h")
    assert graphs.captured[0] is h
    placeholders = [n.name for n in graphs.forward.graph.find_nodes(op="placeholder")]
    assert placeholders == ["args_0", "args_1", "h"]
    backward = [n.name for n in graphs.backward.graph.find_nodes(op="placeholder")]
    assert backward == [*graphs.residuals, "cotangent_0"]


def test_row_01_several_captured_tensors_come_by_name():
    zeta, alpha = leaf(3, seed=1), leaf(3, seed=2)

    def fn(x):
        return x * zeta + alpha

    graphs = check_against_autograd(fn, leaf(3), captured=(alpha, zeta))
    assert graphs.inputs == ("args_0", "alpha", "zeta")


def test_row_02_checkpoint_saves_inputs_only_and_recomputes():
    plain = forward_and_backward(layers, leaf(4), leaf(4, 4, seed=1))
    graphs = check_against_autograd(checkpointed_layers, leaf(4), leaf(4, 4, seed=1), captured=(h,))
    assert graphs.residuals == ("args_0", "args_1", "h")
    assert len(plain.residuals) > len(graphs.residuals)
    recomputed = [op for op in operators(graphs.backward) if op in operators(graphs.forward)]
    assert "aten.sigmoid.default" in recomputed
    assert "aten.sigmoid.default" not in operators(plain.backward)


def test_row_03_functions_with_cond_and_scan():
    def with_cond(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    graphs = check_against_autograd(with_cond, leaf(3))
    assert "cond" in operators(graphs.forward)

    def with_scan(x):
        return scan(lambda c, x: ((n := torch.tanh(c + x @ h)), n), torch.zeros(4), x)

    graphs = check_against_autograd(with_scan, leaf(5, 4), captured=(h,))
    assert operators(graphs.forward).count("scan") == 1
    assert operators(graphs.backward).count("scan") == 1


@pytest.mark.parametrize("device", [pytest.param("xla", marks=NEEDS_XLA)])
def test_row_04_graphs_of_xla_tensors(device):
    w = leaf(4, 4, seed=7, device="xla")

    def fn(a, b):
        return torch.sigmoid(torch.cos(torch.sin(a) @ b) @ w)

    a, b = leaf(3, 4, device="xla"), leaf(4, 4, seed=1, device="xla")
    with xla_harness.DeviceWork() as work:
        graphs = forward_and_backward(fn, a, b)
    assert not work.seen
    assert graphs.inputs == ("args_0", "args_1", "w")
    assert graphs.residuals == ("args_0", "args_1", "w", "sin", "mm", "cos", "sigmoid")
    out, *saved = graphs.forward(a.detach(), b.detach(), w.detach())
    gradients = graphs.backward(*saved, torch.ones_like(out))
    assert {v.device.type for v in (out, *saved, *gradients)} == {"xla"}
    torch.testing.assert_close(gradients, torch.autograd.grad(fn(a, b).sum(), (a, b, w)))


def recurrence(checkpoint, device):
    """A scan whose step is run by ``checkpoint``, and what it is differentiated by."""
    w = h.detach().to(device).requires_grad_()
    xs = leaf(6, 4, device=device)

    def step(c, x):
        return torch.sigmoid(torch.cos(torch.sin(c + x) @ w) @ w)

    def cell(c, x):
        c = checkpoint(step, c, x)
        return c, c

    def run():
        return scan(cell, torch.zeros(4, device=device), xs)[1]

    return run, [xs, w]


def plain(fn, *args):
    return fn(*args)


def checkpointed(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


def reentrant_on_xla(fn, *args):
    import torch_xla.utils.checkpoint

    return torch_xla.utils.checkpoint.checkpoint(fn, *args)


def saved_shapes(run):
    shapes = []
    run()  # traced: what is saved while tracing is no residual
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
    ):
        run()
    return sorted(shapes)


# init, w, xs and the carries: none of the four values that a step computes on the way
SAVED_BY_CHECKPOINT = [(4,), (4, 4), (6, 4), (6, 4)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=NEEDS_XLA)])
def test_rows_05_and_06_a_checkpoint_in_a_scan_body_is_honoured(device):
    (run, wrt), (expected, expected_wrt) = (recurrence(c, device) for c in (checkpointed, plain))
    assert saved_shapes(run) == SAVED_BY_CHECKPOINT
    assert len(saved_shapes(expected)) > len(SAVED_BY_CHECKPOINT)
    torch.testing.assert_close(
        torch.autograd.grad(run().sum(), wrt), torch.autograd.grad(expected().sum(), expected_wrt)
    )


@pytest.mark.parametrize("device", [pytest.param("xla", marks=NEEDS_XLA)])
def test_row_05_torch_xlas_reentrant_checkpoint_names_the_alternative(device):
    run, wrt = recurrence(reentrant_on_xla, device)
    alternative = r"torch.utils.checkpoint.checkpoint\(\.\.\., use_reentrant=False\)"
    with pytest.raises(RuntimeError, match=alternative):
        forward_and_backward(lambda x: reentrant_on_xla(torch.sin, x), leaf(3, device=device))
    with pytest.warns(UserWarning, match=alternative):
        ys = run()
    # it ran as a loop, which needs no capture; reentrant checkpoints allow backward() only
    ys.sum().backward()
    expected, expected_wrt = recurrence(plain, device)
    torch.testing.assert_close(
        tuple(t.grad for t in wrt), torch.autograd.grad(expected().sum(), expected_wrt)
    )


@pytest.mark.parametrize("checkpoint", [checkpointed, plain])
def test_row_06_eager_and_compiled_reach_the_same_partition(checkpoint):
    run, _ = recurrence(checkpoint, "cpu")
    forwards = []

    def keep(graph, examples):
        forwards.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, examples: graph.forward)
    torch.compile(run, backend=backend, fullgraph=True)()
    (output,) = forwards[0].graph.find_nodes(op="output")
    _ys, *residuals = output.args[0]
    assert sorted(tuple(r.meta["val"].shape) for r in residuals) == saved_shapes(run)


def test_row_07_the_function_never_runs_on_data():
    seen = []

    def fn(x):
        seen.append(type(x))
        return x.sin()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default:
                raise AssertionError("the function ran on data")
            return func(*args, **(kwargs or {}))

    with Watch():
        graphs = forward_and_backward(lambda x: x.sin(), leaf(3))
    assert "aten.sin.default" in operators(graphs.forward)


def test_row_08_aliased_outputs_are_all_there():
    def fn(a, w):
        a = a @ w
        w = a
        return a, w

    graphs = check_against_autograd(fn, leaf(4, 4), leaf(4, 4, seed=1))
    assert graphs.n_outputs == 2

    def returns_input(a, w):
        return a, a @ w, w

    assert check_against_autograd(returns_input, leaf(2, 2), leaf(2, 2, seed=1)).n_outputs == 3


def test_row_09_argument_order_of_pytrees():
    def step(carry, x):
        a = torch.sin((carry["a"] @ x["weights"]) + x["biases"])
        b = torch.cos((carry["b"] @ x["weights"]) + x["biases"])
        return {"a": a, "b": b}, torch.sigmoid(a + b)

    carry = {"a": leaf(2, 3), "b": leaf(2, 3, seed=1)}
    x = {"weights": leaf(3, 3, seed=2), "biases": leaf(2, 3, seed=3)}
    graphs = check_against_autograd(step, carry, x)
    expecttest.assert_expected_inline(
        graphs.forward.code.strip(),
        """\
def forward(self, args_0_a, args_0_b, args_1_weights, args_1_biases):
    mm = torch.ops.aten.mm.default(args_0_a, args_1_weights)
    add = torch.ops.aten.add.Tensor(mm, args_1_biases);  mm = None
    sin = torch.ops.aten.sin.default(add)
    mm_1 = torch.ops.aten.mm.default(args_0_b, args_1_weights)
    add_1 = torch.ops.aten.add.Tensor(mm_1, args_1_biases);  mm_1 = args_1_biases = None
    cos = torch.ops.aten.cos.default(add_1)
    add_2 = torch.ops.aten.add.Tensor(sin, cos)
    sigmoid = torch.ops.aten.sigmoid.default(add_2);  add_2 = None
    return (sin, cos, sigmoid, args_0_a, args_0_b, args_1_weights, add, add_1, sigmoid)""",
    )


def count_scans(module: torch.fx.GraphModule) -> int:
    return sum(
        1
        for m in module.modules()
        if isinstance(m, torch.fx.GraphModule)
        for n in m.graph.nodes
        if n.target is torch.ops.higher_order.scan
    )


def test_row_10_transforms_of_a_scan_are_scans():
    w = h.detach()

    def fn(x):
        return scan(lambda c, x: ((n := torch.tanh(c + x @ w)), n), torch.zeros(4), x)[1].sum()

    x = leaf(5, 4).detach()
    assert count_scans(make_fx(torch.func.grad(fn))(x)) == 2
    assert count_scans(make_fx(torch.vmap(fn))(torch.stack([x, x]))) == 1
    jvp = make_fx(lambda x, t: torch.func.jvp(fn, (x,), (t,))[1])(x, x)
    assert count_scans(jvp) == 1


def test_row_11_rules_may_ask_for_shapes():
    asked = []

    def trace_bwd(shape, d):
        asked.append(shape)
        return torch.diag(d.expand(shape[0]))

    rule = vjp.Rule(lambda x: (torch.trace(x), vjp.shape(x)), trace_bwd)
    rules = vjp.DEFAULT_RULES.override({torch.trace: rule})
    graph = vjp.vjp_graph(torch.trace, torch.empty(3, 3, device="meta"), rules=rules)
    assert asked == [(3, 3)]  # once, from metadata
    _, (dx,) = graph(torch.ones(3, 3), torch.tensor(2.0))
    torch.testing.assert_close(dx, 2 * torch.eye(3))


def test_row_12_source_to_source_with_fan_out():
    graph = vjp.vjp_graph(lambda x: torch.sin(x) * x, torch.ones(3))
    expecttest.assert_expected_inline(
        vjp.readable(graph),
        """\
def forward(self, x, d_out):
    sin = torch.sin(x)
    mul = sin * x
    d_sin = d_out * x
    mul_1 = d_out * sin
    cos = torch.cos(x)
    mul_2 = d_sin * cos
    d_x = mul_1 + mul_2
    return (mul, (d_x,))""",
    )
    check_vjp(lambda x: torch.sin(x) * x, torch.randn(3))


@pytest.mark.parametrize("rule, saved", [(vjp.sin_saving_x, "x"), (vjp.sin_saving_cos, "cos")])
def test_row_12_a_users_rule_decides_what_is_saved(rule, saved):
    rules = vjp.DEFAULT_RULES.override({torch.sin: rule})
    pair = vjp.forward_and_backward(lambda x: torch.sin(x), leaf(3), rules=rules)
    assert [n.name for n in pair.residuals] == [saved]


def check_vjp(fn, *args):
    out = fn(*args)
    d = torch.randn_like(out)
    _, gradients = vjp.vjp_graph(fn, *args)(*args, d)
    torch.testing.assert_close(gradients, torch.autograd.functional.vjp(fn, args, d)[1])


@pytest.mark.parametrize(
    "fn, shapes",
    [
        (torch.neg, [(3,)]),
        (torch.add, [(3, 4), (4,)]),
        (torch.mul, [(3, 4), (3, 1)]),
        (torch.matmul, [(3, 4), (4, 2)]),
        (torch.sin, [(3,)]),
        (torch.relu, [(3,)]),
        (torch.sum, [(3, 4)]),
        (lambda x: torch.transpose(x, 0, 1), [(3, 4)]),
        (torch.diag, [(3,)]),
        (torch.trace, [(3, 3)]),
        (vjp.scale, [(), (3, 4)]),
    ],
    ids=[
        "neg",
        "add",
        "mul",
        "matmul",
        "sin",
        "relu",
        "sum",
        "transpose",
        "diag",
        "trace",
        "scale",
    ],
)
def test_row_13_rules(fn, shapes):
    check_vjp(fn, *(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("op, rule", [("add", vjp.strict_add), ("mul", vjp.strict_mul)])
def test_row_13_shape_checks(op, rule):
    rules = vjp.DEFAULT_RULES.override({op: rule})
    with pytest.raises(ValueError, match=r"\[3, 4\] and \[4\]"):
        vjp.vjp_graph(getattr(torch, op), torch.ones(3, 4), torch.ones(4), rules=rules)


def test_row_14_the_examples_and_their_code():
    def foo(x):
        return vjp.scale(torch.sin(torch.trace(x)), x)

    def bar(x):
        return torch.transpose(x, 1, 0) @ x

    check_vjp(foo, torch.randn(3, 3))
    check_vjp(bar, torch.randn(5, 2))
    expecttest.assert_expected_inline(
        vjp.readable(vjp.vjp_graph(bar, torch.ones(5, 2))),
        """\
def forward(self, x, d_out):
    transpose = torch.transpose(x, 1, 0)
    matmul = transpose @ x
    t = transpose.t()
    matmul_1 = t @ d_out
    t_1 = x.t()
    d_transpose = d_out @ t_1
    transpose_1 = torch.transpose(d_transpose, 1, 0)
    d_x = matmul_1 + transpose_1
    return (matmul, (d_x,))""",
    )


def test_row_15_jacrev_and_vjp_of_a_scan_trace_under_make_fx():
    w = h.detach()

    def fn(x):
        return scan(lambda c, x: ((n := torch.sin(c + x * w[0])), n), torch.zeros(4), x)[0]

    x = leaf(3, 4).detach()
    jacobian = make_fx(torch.func.jacrev(fn))(x)
    torch.testing.assert_close(jacobian(x), torch.func.jacrev(fn)(x))
    _, pullback = torch.func.vjp(fn, x)
    traced = make_fx(lambda x, d: torch.func.vjp(fn, x)[1](d))(x, torch.ones(4))
    torch.testing.assert_close(traced(x, torch.ones(4)), pullback(torch.ones(4)))
    assert count_scans(jacobian) == 2


class CompiledAutograd:
    """Counts the backward graphs captured, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.compiler = torch.compile(backend=self.backend, fullgraph=True, dynamic=True)

    def backend(self, module, examples):
        self.graphs.append(module)
        return module.forward

    def backward(self, loss):
        with torch._dynamo.compiled_autograd._enable(self.compiler):
            loss.backward()


@pytest.mark.parametrize("backend", ["plain", "aot_eager"])
def test_row_16_compiled_autograd(backend):
    import torch._dynamo.compiled_autograd

    torch._dynamo.reset()
    weight = leaf(4, 4, seed=3)

    def fn(x):
        return scan(lambda c, x: ((n := torch.tanh(c @ weight + x)), n), torch.zeros(2, 4), x)[1]

    run = (
        fn
        if backend == "plain"
        else torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
    )
    handle = weight.register_hook(lambda g: g * 2)
    compiled = CompiledAutograd()
    for steps in (5, 6, 7, 9, 11):
        x = leaf(steps, 2, 4, seed=steps)
        expected = torch.autograd.grad(fn(x).sin().sum(), [weight, x])
        weight.grad = None
        compiled.backward(run(x).sin().sum())
        torch.testing.assert_close([weight.grad, x.grad], list(expected))
    handle.remove()
    for graph in compiled.graphs:
        scans = [n for n in graph.graph.nodes if n.target is torch.ops.higher_order.scan]
        assert len(scans) == 1
    # the first trip count, then one capture for them all
    assert len(compiled.graphs) <= 2
