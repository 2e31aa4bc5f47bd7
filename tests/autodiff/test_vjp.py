"""`torch_scan_hop.vjp` against autograd: values in float64, and the code it writes.

Every rule is compared with autograd, at first and at second order (the VJP of the VJP: what rules
write has to have rules too).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torch_scan_hop import scan, vjp
from torch_scan_hop.reference import scan_loop

Args = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def differentiable(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def by_autograd(fn: Callable[..., Any], args: Args, cotangents: list[Any]) -> tuple[Any, list[Any]]:
    """fn(*args), and the gradients of the leaves of args, None for those without."""
    args = pytree.tree_map(lambda t: t.detach().requires_grad_() if differentiable(t) else t, args)
    out = fn(*args)
    pairs = [
        (o, d) for o, d in zip(pytree.tree_leaves(out), cotangents, strict=True)
        if isinstance(o, torch.Tensor) and o.requires_grad
    ]  # fmt: skip
    inputs = pytree.tree_leaves(args)
    wanted = [t for t in inputs if differentiable(t)]
    outs, ds = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outs, wanted, ds, allow_unused=True))
    return out, [next(grads) if differentiable(t) else None for t in inputs]


def cotangents_of(out: Any) -> list[Any]:
    leaves = pytree.tree_leaves(out)
    return [torch.randn_like(o) if differentiable(o) else None for o in leaves]


def check(fn: Callable[..., Any], *args: Any, rules: vjp.RuleTable = vjp.DEFAULT_RULES) -> None:
    """Joint and split forms give what autograd gives."""
    ds = cotangents_of(fn(*args))
    expected_out, expected = by_autograd(fn, args, ds)
    leaves = pytree.tree_leaves(args)

    out, grads = vjp.vjp_graph(fn, *args, rules=rules)(*leaves, *ds)
    forward, backward = vjp.forward_and_backward(fn, *args, rules=rules)
    split_out, residuals = forward(*leaves)
    split_grads = backward(*residuals, *ds)

    for o, g in ((out, grads), (split_out, split_grads)):
        torch.testing.assert_close(o, pytree.tree_map(detach, expected_out))
        assert len(g) == len(args)
        for actual, wanted in zip(pytree.tree_leaves(g), expected, strict=True):
            if actual is None:  # no path: autograd says so too, or finds zeros
                assert wanted is None or not wanted.any()
            else:
                torch.testing.assert_close(actual, wanted)


def detach(t: Any) -> Any:
    return t.detach() if isinstance(t, torch.Tensor) else t


def check_twice(fn: Callable[..., Any], *args: Any) -> None:
    """Also the derivative of the gradients, with respect to arguments and cotangents."""
    check(fn, *args)
    leaves = pytree.tree_leaves(args)
    ds = cotangents_of(fn(*args))
    first = vjp.vjp_graph(fn, *args)

    def gradients(*inputs: Any) -> list[Any]:
        return [g for g in pytree.tree_leaves(first(*inputs)[1]) if g is not None]

    check(gradients, *leaves, *ds)


def snapshot(module: torch.fx.GraphModule) -> str:
    return vjp.readable(module) + "\n"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


# The examples of the original notebook.


def foo(x: torch.Tensor) -> torch.Tensor:
    return vjp.scale(torch.sin(torch.trace(x)), x)


def bar(x: torch.Tensor) -> torch.Tensor:
    return torch.transpose(x, 1, 0) @ x


@pytest.mark.parametrize(("fn", "shape"), [(foo, (3, 3)), (bar, (5, 2))])
def test_examples_agree_with_functional_vjp(fn: Any, shape: Any) -> None:
    x = randn(*shape)
    d = torch.randn_like(fn(x))
    out, (dx,) = vjp.vjp_graph(fn, x)(x, d)
    expected_out, expected_dx = torch.autograd.functional.vjp(fn, x, d)
    torch.testing.assert_close((out, dx), (expected_out, expected_dx))
    check_twice(fn, x)


def test_code_of_foo() -> None:
    assert_expected_inline(
        snapshot(vjp.vjp_graph(foo, randn(3, 3))),
        """\
def forward(self, x, d_out):
    trace = torch.trace(x)
    sin = torch.sin(trace)
    scale = torch_scan_hop_vjp_scale(sin, x)
    mul = d_out * x
    d_sin = torch.sum(mul)
    scale_1 = torch_scan_hop_vjp_scale(sin, d_out)
    cos = torch.cos(trace)
    d_trace = d_sin * cos
    expand = d_trace.expand(3)
    diag = torch.diag(expand)
    d_x = scale_1 + diag
    return (scale, (d_x,))
""",
    )


def test_code_of_bar_fits_every_size() -> None:
    graph = vjp.vjp_graph(bar, randn(5, 2))
    assert_expected_inline(
        snapshot(graph),
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
    return (matmul, (d_x,))
""",
    )
    x, d = randn(4, 7), randn(7, 7)
    torch.testing.assert_close(graph(x, d)[1][0], torch.autograd.functional.vjp(bar, x, d)[1])


def test_jacrev_under_make_fx_agrees_but_is_specialised() -> None:
    x = randn(13)
    jacobian = make_fx(torch.func.jacrev(torch.sin))(x)
    graph = vjp.vjp_graph(torch.sin, x)
    rows = torch.stack([graph(x, d)[1][0] for d in torch.eye(13)])
    torch.testing.assert_close(rows, jacobian(x))
    assert "13" in jacobian.code and "13" not in graph.code


def test_functorch_vjp_under_make_fx() -> None:
    """The notebook's last cell, which failed: a VJP traced at the ATen level."""
    x, d = randn(3, 3), randn(3, 3)
    traced = make_fx(lambda x, d: torch.func.vjp(foo, x)[1](d))(x, d)
    torch.testing.assert_close(traced(x, d), vjp.vjp_graph(foo, x)(x, d)[1])


# Every rule.

RULES: dict[str, tuple[Callable[..., Any], Args]] = {}


def case(name: str, fn: Callable[..., Any], *shapes: Any) -> None:
    RULES[name] = fn, shapes


case("neg", lambda x: -x, (3, 4))
case("add", lambda a, b: a + b, (3, 4), (3, 4))
case("add broadcast", lambda a, b: a + b, (3, 1, 4), (2, 4))
case("add number", lambda a: 1 + a + 2, (3,))
case("add alpha", lambda a, b: torch.add(a, b, alpha=3), (3,), (3,))
case("add scalar tensor", lambda a, b: a + b, (), (2, 3))
case("sub", lambda a, b: a - b, (3, 4), (4,))
case("sub alpha", lambda a, b: torch.sub(a, b, alpha=2), (3,), (3,))
case("rsub", lambda a: 1 - a, (3,))
case("rsub method", lambda a, b: torch.rsub(a, b, alpha=2), (3,), (2, 3))
case("mul", lambda a, b: a * b, (3, 4), (4,))
case("mul number", lambda a: 2 * a * 3, (4,))
case("mul self", lambda a: a * a, (4,))
case("div", lambda a, b: a / (2 + b * b), (3, 4), (3, 1))
case("div number", lambda a: a / 2, (3,))
case("rdiv", lambda a: 1 / (2 + a * a), (3,))
case("pow 3", lambda a: a**3, (3,))
case("pow 2", lambda a: torch.pow(a, 2), (3,))
case("pow 1", lambda a: a.pow(1), (3,))
case("pow 0", lambda a, b: a**0 * b, (3,), (3,))
case("pow -1.5", lambda a: (1 + a * a) ** -1.5, (3,))
case("square", lambda a: torch.square(a), (3,))
case("sin", lambda x: x.sin(), (3,))
case("cos", lambda x: torch.cos(x), (3,))
case("exp", lambda x: torch.exp(x), (3,))
case("log", lambda x: torch.log(1 + x * x), (3,))
case("sqrt", lambda x: torch.sqrt(1 + x * x), (3,))
case("abs", lambda x: abs(x) + x.abs(), (3,))
case("tanh", lambda x: F.tanh(x), (3,))
case("sigmoid", lambda x: F.sigmoid(x) + torch.sigmoid(x), (3,))
case("relu", lambda x: F.relu(x) + torch.relu(x) + x.relu(), (5,))
case("where", lambda a, b: torch.where(a > 0, a, b), (3, 4), (4,))
case("where number", lambda a: torch.where(a > 0, a, 0.0), (3, 4))
case("where method", lambda a, b: a.where(b > 0, b), (3, 4), (3, 4))
case("scale", lambda a, x: vjp.scale(a, x), (), (3, 4))
case("sum", lambda x: torch.sum(x), (3, 4))
case("sum of a scalar", lambda x: x.sum(), ())
case("sum dim", lambda x: x.sum(1), (3, 4))
case("sum dim of a vector", lambda x: x.sum(0), (3,))
case("sum dims", lambda x: torch.sum(x, (0, -1)), (3, 4, 2))
case("sum keepdim", lambda x: torch.sum(x, dim=1, keepdim=True), (3, 4))
case("sum dtype", lambda x: torch.sum(x, dim=0, dtype=torch.float32).double(), (3, 4))
case("mean", lambda x: x.mean(), (3, 4))
case("mean dim", lambda x: torch.mean(x, dim=-1), (3, 4))
case("mean keepdim", lambda x: x.mean((0, 2), keepdim=True), (3, 4, 2))
case("matmul 1 1", lambda a, b: a @ b, (4,), (4,))
case("matmul 2 1", lambda a, b: torch.matmul(a, b), (3, 4), (4,))
case("matmul 1 2", lambda a, b: a.matmul(b), (3,), (3, 4))
case("matmul 2 2", lambda a, b: a @ b, (3, 4), (4, 2))
case("matmul 3 1", lambda a, b: a @ b, (5, 3, 4), (4,))
case("matmul 1 3", lambda a, b: a @ b, (4,), (5, 4, 3))
case("matmul 3 2", lambda a, b: a @ b, (5, 3, 4), (4, 2))
case("matmul 2 3", lambda a, b: a @ b, (3, 4), (5, 4, 2))
case("matmul 3 3", lambda a, b: a @ b, (5, 3, 4), (5, 4, 2))
case("matmul 4 3", lambda a, b: a @ b, (2, 1, 3, 4), (5, 4, 2))
case("mm", lambda a, b: torch.mm(a, b), (3, 4), (4, 2))
case("bmm", lambda a, b: torch.bmm(a, b), (5, 3, 4), (5, 4, 2))
case("mv dot", lambda a, b, c: torch.dot(torch.mv(a, b), c), (3, 4), (4,), (3,))
case("addmm", lambda c, a, b: torch.addmm(c, a, b), (2,), (3, 4), (4, 2))
case("addmm scaled", lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), (3, 2), (3, 4), (4, 2))
case("linear", lambda x, w, b: F.linear(x, w, b), (5, 3), (2, 3), (2,))
case("linear 1", lambda x, w, b: F.linear(x, w, bias=b), (3,), (2, 3), (2,))
case("linear 3", lambda x, w: F.linear(x, w), (4, 5, 3), (2, 3))
case("trace", lambda x: torch.trace(x), (3, 3))
case("trace wide", lambda x: x.trace(), (2, 4))
case("diag of a vector", lambda x: torch.diag(x, 1), (3,))
case("diag of a matrix", lambda x: torch.diag(x, -1), (4, 4))
case("diag of a wide matrix", lambda x: x.diag(1), (2, 4))
case("t", lambda x: x.t() + torch.t(x), (3, 4))
case("T", lambda x: x.T, (3, 4))
case("mT", lambda x: x.mT, (2, 3, 4))
case("transpose", lambda x: x.transpose(0, -1), (2, 3, 4))
case("permute", lambda x: x.permute(2, 0, 1), (2, 3, 4))
case("permute tuple", lambda x: torch.permute(x, (1, -1, 0)), (2, 3, 4))
case("view", lambda x: x.view(2, 6), (3, 4))
case("view tuple", lambda x: x.view((2, -1)), (3, 4))
case("reshape", lambda x: x.reshape(12), (3, 4))
case("reshape function", lambda x: torch.reshape(x, (4, 3)), (3, 4))
case("flatten", lambda x: torch.flatten(x, 1), (2, 3, 4))
case("expand", lambda x: x.expand(5, 3, 4), (3, 1))
case("expand_as", lambda x, y: x.expand_as(y), (3, 1), (2, 3, 4))
case("unsqueeze", lambda x: x.unsqueeze(1) + torch.unsqueeze(x, -2), (3, 4))
case("squeeze", lambda x: x.squeeze(), (1, 3, 1, 4))
case("squeeze dim", lambda x: x.squeeze(-2), (1, 3, 1, 4))
case("squeeze nothing", lambda x: torch.squeeze(x, 1), (1, 3))
case("squeeze dims", lambda x: torch.squeeze(x, (0, 2)), (1, 3, 1, 4))
case("select", lambda x: torch.select(x, 1, 2), (3, 4))
case("cat", lambda a, b: torch.cat([a, b], 1), (2, 3), (2, 4))
case("cat equal", lambda a, b: torch.cat((a, b, a), dim=-1), (2, 3), (2, 3))
case("cat of a split", lambda a: torch.cat(a.split(2), 1), (4, 3))
case("stack", lambda a, b: torch.stack([a, b, a], 1), (2, 3), (2, 3))
case("stack of an unbind", lambda a: torch.stack(a.unbind(1)), (4, 3))
case("chunk", lambda x: x.chunk(3, 1)[1], (2, 7))
case("chunk all", lambda x: operator.add(*x.chunk(2)), (4, 3))
case("split", lambda x: torch.split(x, 2)[-1], (5, 2))
case("split sizes", lambda x: x.split([1, 4])[1], (5, 2))
case("split slice", lambda x: torch.cat(x.split(2)[1:]), (6, 2))
case("unbind", lambda x: x.unbind(0)[1], (3, 2))
case("index", lambda x: x[1], (3, 2))
case("slice", lambda x: x[1:, ::2], (3, 4))
case("slices overlap", lambda x: x[1:] * x[:-1], (4, 2))
case("index none ellipsis", lambda x: x[..., None, 1:3], (3, 4))
case("index tensor", lambda x: x[torch.tensor([0, 2, 0])], (3, 4))
case("index mixed", lambda x: x[1:, torch.tensor([0, 2, 0])], (3, 4))
case("clone", lambda x: x.clone() + x.contiguous(), (3,))
case("to", lambda x: x.to(torch.float32).double() + x.float().to(x), (3,))
case("unindex", lambda x: vjp.unindex(x, slice(1, 3), (4, 2)), (2, 2))
case("diagonal_scatter", lambda x, d: torch.diagonal_scatter(x, d, 1), (3, 4), (3,))
case("reciprocal", lambda x: torch.reciprocal(1 + x * x), (3,))
case("diagonal", lambda x: torch.diagonal(x, 1, 0, 2), (3, 2, 4))
case("diag_embed", lambda x: torch.diag_embed(x, 1), (2, 3))
case("index_select", lambda x: torch.index_select(x, 1, torch.tensor([0, 2, 0])), (3, 4))
case("index_add", lambda x, y: x.index_add(1, torch.tensor([0, 2, 0]), y), (2, 4), (2, 3))


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    fn, shapes = RULES[name]
    check_twice(fn, *(randn(*s) for s in shapes))


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("name", RULES)
def test_rule_at_the_aten_level(name: str, remove: Any) -> None:
    fn, shapes = RULES[name]
    args = tuple(randn(*s) for s in shapes)
    check(make_fx(torch.func.functionalize(fn, remove=remove))(*args), *args)


def test_every_rule_has_a_case() -> None:
    """A rule that no case uses is a rule that nobody has tried."""
    used: set[Any] = set()

    def recorded(op: Any, rule: vjp.Rule) -> vjp.Rule:
        @wraps(rule.fwd)
        def fwd(*args: Any, **kwargs: Any) -> Any:
            used.add(op)
            return rule.fwd(*args, **kwargs)

        return vjp.Rule(fwd, rule.bwd)

    rules = vjp.DEFAULT_RULES.override(
        {op: recorded(op, rule) for op, rule in vjp.DEFAULT_RULES.items()}
    )
    for fn, shapes in RULES.values():
        args = [randn(*s) for s in shapes]
        vjp.vjp_graph(fn, *args, rules=rules)
        vjp.vjp_graph(make_fx(torch.func.functionalize(fn))(*args), *args, rules=rules)
    assert not vjp.DEFAULT_RULES.keys() - used


def test_trace_of_a_tall_matrix() -> None:
    """Not by autograd, which wraps around to a third one in the last row on torch 2.9."""
    x = randn(4, 2)
    (dx,) = vjp.vjp_graph(torch.trace, x)(x, torch.tensor(2.0))[1]
    torch.testing.assert_close(dx, 2 * torch.eye(4, 2))


# Structure: what is differentiated, and how the code looks.


def test_fan_out_adds_cotangents_and_nothing_to_zero() -> None:
    def fn(x: Any) -> Any:
        y = torch.exp(x)
        return y * y + y

    check_twice(fn, randn(3))
    code = snapshot(vjp.vjp_graph(fn, randn(3)))
    assert_expected_inline(
        code,
        """\
def forward(self, x, d_out):
    exp = torch.exp(x)
    mul = exp * exp
    add = mul + exp
    mul_1 = d_out * exp
    mul_2 = d_out * exp
    add_1 = d_out + mul_1
    d_exp = add_1 + mul_2
    d_x = exp * d_exp
    return (add, (d_x,))
""",
    )
    assert "0 +" not in code


def test_split_code_and_residuals() -> None:
    def body(h: Any, x: Any, w: Any) -> Any:
        h = torch.tanh(h @ w + x)
        return h, torch.sum(h)

    halves = vjp.forward_and_backward(body, randn(2, 3), randn(2, 3), randn(3, 3))
    assert_expected_inline(
        snapshot(halves.forward),
        """\
def forward(self, h, x, w):
    matmul = h @ w
    add = matmul + x
    tanh = torch.tanh(add)
    sum_1 = torch.sum(tanh)
    return ((tanh, sum_1), (h, w, tanh))
""",
    )
    assert_expected_inline(
        snapshot(halves.backward),
        """\
def forward(self, h, w, tanh, d_out_0, d_out_1):
    expand = d_out_1.expand([2, 3])
    d_tanh = d_out_0 + expand
    mul = tanh * tanh
    sub = 1 - mul
    d_x = d_tanh * sub
    t = h.t()
    d_w = t @ d_x
    t_1 = w.t()
    d_h = d_x @ t_1
    return (d_h, d_x, d_w)
""",
    )
    assert [(n.name, tuple(n.meta["val"].shape)) for n in halves.residuals] == [
        ("h", (2, 3)), ("w", (3, 3)), ("tanh", (2, 3)),
    ]  # fmt: skip


class Carry(NamedTuple):
    h: Any
    n: Any


def test_names_of_pytrees_and_unused_inputs() -> None:
    def fn(carry: Carry, x: Any, unused: Any) -> Any:
        h = carry.h * x["a"]
        return Carry(h, carry.n + 1), {"y": h.sum(), "none": None, "one": 1, "x": x["b"]}

    args = Carry(randn(3), torch.tensor(4)), {"a": randn(3), "b": randn(2)}, randn(1)
    check(fn, *args)
    graph = vjp.vjp_graph(fn, *args)
    assert_expected_inline(
        snapshot(graph),
        """\
def forward(self, carry_h, carry_n, x_a, x_b, unused, d_out_0_h, d_out_0_n, d_out_1_y, d_out_1_none, d_out_1_one, d_out_1_x):
    mul = carry_h * x_a
    add = carry_n + 1
    sum_1 = torch.sum(mul)
    expand = d_out_1_y.expand([3])
    d_mul = d_out_0_h + expand
    d_carry_h = d_mul * x_a
    d_x_a = d_mul * carry_h
    carry = test_vjp_Carry(mul, add)
    carry_1 = test_vjp_Carry(d_carry_h, None)
    return ((carry, {'y': sum_1, 'none': None, 'one': 1, 'x': x_b}), (carry_1, {'a': d_x_a, 'b': d_out_1_x}, None))
""",
    )
    assert isinstance(graph(*pytree.tree_leaves(args), *[randn(3)] * 6)[1][0], Carry)


def test_outputs_that_depend_on_nothing() -> None:
    constant = randn(3)

    def fn(x: Any) -> Any:
        return constant, x.detach(), x > 0, torch.zeros_like(x), x

    check(fn, randn(3))


def test_captured_tensors_and_modules_are_constants() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    check(model, randn(4, 3))
    halves = vjp.forward_and_backward(model, randn(4, 3))
    assert_expected_inline(
        snapshot(halves.backward),
        """\
def forward(self, tanh, d_out):
    _0_weight = getattr(self, "0_weight")
    mul = tanh * tanh
    sub = 1 - mul
    d_linear = d_out * sub
    d_input_1 = d_linear @ _0_weight
    return (d_input_1,)
""",
    )


def test_no_gradient_through_what_is_not_needed() -> None:
    """cumsum has no rule, and needs none where no gradient flows."""

    def fn(x: Any, i: Any) -> Any:
        torch.cumsum(x, 0)  # dead
        return x * torch.cumsum(i, 0), torch.cumsum(x, 0) > 0

    check(fn, randn(3), torch.arange(3))


def test_promotion_is_undone() -> None:
    x, y = randn(3).float(), randn(3)
    check(lambda x, y: x * y + x, x, y)
    check(lambda x, i: (x + i) * torch.arange(3), x, torch.arange(3))


def test_runs_on_no_data() -> None:
    """Examples may be on the meta device; the graph fits any."""
    graph = vjp.vjp_graph(foo, torch.empty(3, 3, device="meta"))
    x, d = randn(3, 3), randn(3, 3)
    torch.testing.assert_close(graph(x, d)[1][0], torch.autograd.functional.vjp(foo, x, d)[1])


# Rules.


@pytest.mark.parametrize(("rule", "saved"), [(vjp.sin_saving_x, "x"), (vjp.sin_saving_cos, "cos")])
def test_the_rule_decides_what_is_saved(rule: vjp.Rule, saved: str) -> None:
    rules = vjp.DEFAULT_RULES.override({torch.sin: rule})
    halves = vjp.forward_and_backward(lambda x: x.sin(), randn(3), rules=rules)
    assert [n.name for n in halves.residuals] == [saved]
    check(lambda x: x.sin(), randn(3), rules=rules)


def test_code_of_sin_saving_cos() -> None:
    rules = vjp.DEFAULT_RULES.override({"sin": vjp.sin_saving_cos})
    halves = vjp.forward_and_backward(lambda x: x.sin(), randn(3), rules=rules)
    assert_expected_inline(
        snapshot(halves.forward) + snapshot(halves.backward),
        """\
def forward(self, x):
    sin = torch.sin(x)
    cos = torch.cos(x)
    return (sin, (cos,))
def forward(self, cos, d_out):
    d_x = d_out * cos
    return (d_x,)
""",
    )


def test_sum_saving_x_fits_every_size() -> None:
    rules = vjp.DEFAULT_RULES.override({torch.sum: vjp.sum_saving_x})
    check(torch.sum, randn(3), rules=rules)
    graph = vjp.vjp_graph(torch.sum, randn(3), rules=rules)
    assert graph(randn(5, 2), torch.tensor(1.0))[1][0].shape == (5, 2)


def test_user_registered_rule() -> None:
    rules = vjp.DEFAULT_RULES.override({})

    def fwd(x: Any, dim: int) -> Any:
        return torch.cumsum(x, dim), dim

    def bwd(dim: int, d: Any) -> Any:
        return torch.flip(torch.cumsum(torch.flip(d, (dim,)), dim), (dim,))

    rules.register(torch.cumsum, torch.logcumsumexp)(fwd, bwd)
    check(lambda x: torch.cumsum(x, 1), randn(2, 3), rules=rules)
    check(lambda x: x.cumsum(dim=0), randn(2, 3), rules=rules)
    assert torch.cumsum in rules and torch.cumsum not in vjp.DEFAULT_RULES


def test_user_rule_for_a_tuple_of_values() -> None:
    @vjp.primitive
    def sincos(x: Any) -> Any:
        return torch.sin(x), torch.cos(x)

    def fwd(x: Any) -> Any:
        s, c = torch.sin(x), torch.cos(x)
        return (s, c), (s, c)

    def bwd(saved: Any, d: Any) -> Any:
        (s, c), (ds, dc) = saved, d
        return (0 if ds is None else ds * c) - (0 if dc is None else dc * s)

    rules = vjp.DEFAULT_RULES.override({sincos: vjp.Rule(fwd, bwd)})
    check(lambda x: sincos(x), randn(3), rules=rules)
    check(lambda x: sincos(x)[-1], randn(3), rules=rules)


def test_missing_rule() -> None:
    def fn(x: Any) -> Any:
        return torch.sin(x).cumsum(0)  # the guilty line

    with pytest.raises(vjp.MissingRule) as info:
        vjp.vjp_graph(fn, randn(3))
    message = str(info.value)
    assert isinstance(info.value, NotImplementedError)
    for part in ("no VJP rule for torch.Tensor.cumsum", "%cumsum", "test_vjp.py", "in fn",
                 "# the guilty line", "override({torch.Tensor.cumsum: vjp.Rule("):  # fmt: skip
        assert part in message, message


def test_missing_rule_at_the_aten_level() -> None:
    x = randn(3)
    with pytest.raises(vjp.MissingRule, match=r"torch\.ops\.aten\.cumsum\.default"):
        vjp.vjp_graph(make_fx(lambda x: x.cumsum(0))(x), x)


def test_higher_order_operators_are_named() -> None:
    x = randn(3)
    graph = make_fx(
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), tracing_mode="fake"
    )(x)
    with pytest.raises(vjp.MissingRule, match=r"no VJP rule for torch\.ops\.higher_order\.cond"):
        vjp.vjp_graph(graph, x)


def test_mutation_is_refused() -> None:
    def overwritten(x: Any) -> Any:
        out = torch.zeros_like(x)
        out.add_(x)  # the result is not used: as a value, `out` would still be zero
        return out

    x = randn(1, 3)
    iadd = torch.fx.symbolic_trace(lambda x: x + 1)
    next(n for n in iadd.graph.nodes if n.target is operator.add).target = operator.iadd
    for fn in (
        overwritten,
        make_fx(overwritten)(x),
        make_fx(lambda x: x.squeeze_(0).sin())(x.clone()),  # the caller's tensor is not ours
        iadd,
    ):
        with pytest.raises(vjp.MissingRule, match=r"in place(.|\n)*functionalize"):
            vjp.vjp_graph(fn, x)
    check(make_fx(torch.func.functionalize(overwritten))(x), x)


def test_custom_op_with_a_rule() -> None:
    """The rule of an opaque op says what is saved: here, two scalars and not x."""

    @torch.library.custom_op("torch_scan_hop_test::normalize", mutates_args=())
    def normalize(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm()

    normalize.register_fake(lambda x: torch.empty_like(x))
    op = torch.ops.torch_scan_hop_test.normalize

    def fwd(x: Any) -> Any:
        y = op(x)
        return y, (y, torch.sum(x * y))

    def bwd(saved: Any, d: Any) -> Any:
        y, norm = saved
        return (d - y * torch.sum(d * y)) / norm

    rules = vjp.DEFAULT_RULES.override({op: vjp.Rule(fwd, bwd)})
    x, d = randn(4), randn(4)
    expected = torch.autograd.functional.vjp(lambda x: x / x.norm(), x, d)
    for fn in (op, op.default, make_fx(op.default)(x)):
        out, (dx,) = vjp.vjp_graph(fn, x, rules=rules)(x, d)
        torch.testing.assert_close((out, dx), expected)
        halves = vjp.forward_and_backward(fn, x, rules=rules)
        assert [tuple(n.meta["val"].shape) for n in halves.residuals] == [(4,), ()]
        with pytest.raises(vjp.MissingRule, match=r"torch_scan_hop_test\.normalize"):
            vjp.vjp_graph(fn, x)


def test_random_numbers_are_drawn_once() -> None:
    def dropout(x: Any) -> Any:
        return x * (torch.rand_like(x) > 0.5)

    x = randn(100)
    forward, backward = vjp.forward_and_backward(dropout, x)
    out, residuals = forward(x)
    (dx,) = backward(*residuals, torch.ones_like(x))
    assert "rand" not in backward.code
    torch.testing.assert_close(dx * x, out)


def test_sizes_of_inputs_stay_symbols() -> None:
    graph = vjp.vjp_graph(lambda x: x / x.shape[0], randn(3))
    torch.testing.assert_close(graph(randn(5), torch.ones(5))[1][0], torch.full((5,), 0.2))


def test_arguments_that_a_rule_does_not_know() -> None:
    with pytest.raises(vjp.MissingRule, match=r"torch\.diag cannot take this call"):
        vjp.vjp_graph(lambda x: torch.diag(x, out=None), randn(3))
    with pytest.raises(NotImplementedError, match=r"exponent(.|\n)*test_vjp\.py"):
        vjp.vjp_graph(lambda x: x**x, randn(3))
    with pytest.raises(NotImplementedError, match="complex"):
        vjp.vjp_graph(torch.sin, torch.randn(3, dtype=torch.complex128))


def test_strict_rules_check_shapes() -> None:
    rules = vjp.DEFAULT_RULES.override({operator.add: vjp.strict_add, "mul": vjp.strict_mul})
    check(lambda x, y: x * y + x, randn(2, 3), randn(2, 3), rules=rules)
    for fn in (torch.add, torch.mul, lambda x, y: x + y):
        with pytest.raises(ValueError, match=r"\[2, 3\] and \[3\](.|\n)*does not broadcast"):
            vjp.vjp_graph(fn, randn(2, 3), randn(3), rules=rules)


def test_wrong_rules_are_caught() -> None:
    wrong_shape = vjp.Rule(lambda x: (torch.sin(x), x), lambda x, d: d.sum())
    with pytest.raises(ValueError, match=r"shape \[\] for an argument of shape \[3\]"):
        vjp.vjp_graph(torch.sin, randn(3), rules=vjp.DEFAULT_RULES.override({"sin": wrong_shape}))
    too_many = vjp.Rule(lambda x: (torch.sin(x), x), lambda x, d: (d, d))
    with pytest.raises(ValueError, match="2 cotangents for 1 arguments"):
        vjp.vjp_graph(torch.sin, randn(3), rules=vjp.DEFAULT_RULES.override({"sin": too_many}))


def test_structures_that_a_graph_cannot_return() -> None:
    class Box:
        def __init__(self, x: Any) -> None:
            self.x = x

    pytree.register_pytree_node(Box, lambda b: ([b.x], None), lambda xs, _: Box(*xs))
    with pytest.raises(TypeError, match="an output of the function"):
        vjp.vjp_graph(lambda x: Box(x.sin()), randn(3))


# Bodies of recurrent networks.

B, D, H = 2, 3, 4


def rnn(h: Any, x: Any, wi: Any, wh: Any, b: Any) -> Any:
    h = torch.tanh(F.linear(x, wi, b) + F.linear(h, wh))
    return h, h


def lstm(carry: Any, x: Any, wi: Any, wh: Any, b: Any) -> Any:
    h, c = carry
    i, f, g, o = (F.linear(x, wi, b) + F.linear(h, wh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * torch.tanh(c)
    return (h, c), h


def gru(h: Any, x: Any, wi: Any, wh: Any, b: Any) -> Any:
    xr, xz, xn = F.linear(x, wi, b).split(h.shape[-1], -1)
    hr, hz, hn = torch.chunk(h @ wh.T, 3, dim=1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    h = (1 - z) * torch.tanh(xn + r * hn) + z * h
    return h, h


def selective_ssm(h: Any, x: Any, log_a: Any, dt_w: Any) -> Any:
    """As in ``cells.py``, its softplus by rules that the table has."""
    dt = torch.log(1 + torch.exp(x["u"] * dt_w))[..., None]
    h = torch.exp(-dt * torch.exp(log_a)) * h + dt * x["b"][:, None, :] * x["u"][..., None]
    return h, torch.sum(h * x["c"][:, None, :], -1)


CELLS = {"rnn": (rnn, 1, False), "lstm": (lstm, 4, True), "gru": (gru, 3, False)}


def cell(name: str) -> tuple[Callable[..., Any], Any, Args]:
    """A body, its carry and its weights."""
    fn, gates, has_c = CELLS[name]
    carry = (randn(B, H), randn(B, H)) if has_c else randn(B, H)
    return fn, carry, (randn(gates * H, D), randn(gates * H, H), randn(gates * H))


@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str) -> None:
    fn, carry, weights = cell(name)
    check_twice(fn, carry, randn(B, D), *weights)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
@pytest.mark.parametrize("name", CELLS)
def test_cell_at_the_aten_level(name: str, tracing_mode: str) -> None:
    fn, carry, weights = cell(name)
    args = (carry, randn(B, D), *weights)
    leaves, spec = pytree.tree_flatten(args)
    graph = make_fx(
        lambda *leaves: fn(*pytree.tree_unflatten(leaves, spec)), tracing_mode=tracing_mode
    )(*leaves)
    check(graph, *leaves)


def test_code_of_the_rnn_backward() -> None:
    fn, carry, weights = cell("rnn")
    backward = vjp.forward_and_backward(fn, carry, randn(B, D), *weights).backward
    assert_expected_inline(
        snapshot(backward),
        """\
def forward(self, h, x, wi, wh, tanh, d_out_0, d_out_1):
    d_tanh = d_out_0 + d_out_1
    mul = tanh * tanh
    sub = 1 - mul
    d_add = d_tanh * sub
    t = d_add.t()
    d_wh = t @ h
    d_h = d_add @ wh
    t_1 = d_add.t()
    d_wi = t_1 @ x
    d_x = d_add @ wi
    d_b = torch.sum(d_add, [0])
    return (d_h, d_x, d_wi, d_wh, d_b)
""",
    )


def recurrence(name: str) -> tuple[Callable[..., Any], Any, Any, Args]:
    """A body, init, xs and weights."""
    if name == "selective_ssm":
        xs = {"u": randn(5, B, D), "b": randn(5, B, H), "c": randn(5, B, H)}
        return selective_ssm, randn(B, D, H), xs, (randn(D, H), randn(D))
    fn, init, weights = cell(name)
    return fn, init, randn(5, B, D), weights


def slices(xs: Any) -> list[Any]:
    leaves, spec = pytree.tree_flatten(xs)
    return [pytree.tree_unflatten(x, spec) for x in zip(*leaves, strict=True)]


def by_hand(fn: Callable[..., Any], init: Any, xs: Any, weights: Args, ds: list[Any]) -> Any:
    """Results and gradients of a scan without autograd: the forward stacks what the rules save,
    the backward walks it from the end."""
    steps = slices(xs)
    forward, backward = vjp.forward_and_backward(fn, init, steps[0], *weights)
    carry, ys, residuals = init, [], []
    for x in steps:
        (carry, y), saved = forward(*pytree.tree_leaves((carry, x)), *weights)
        ys.append(y)
        residuals.append(saved)

    *d_carry, d_ys = ds
    d_xs, d_weights = [], [torch.zeros_like(w) for w in weights]
    for t in reversed(range(len(steps))):
        d_in, d_x, *d_w = backward(*residuals[t], *d_carry, d_ys[t])
        d_carry = pytree.tree_leaves(d_in)
        d_xs.insert(0, pytree.tree_leaves(d_x))
        d_weights = [total + d for total, d in zip(d_weights, d_w, strict=True)]
    stacked = [torch.stack(group) for group in zip(*d_xs, strict=True)]
    return (carry, torch.stack(ys)), [*d_carry, *stacked, *d_weights]


RECURRENCES = ["rnn", "lstm", "gru", "selective_ssm"]


@pytest.mark.parametrize("implementation", ["loop", "scan", "checkpointed scan", "compiled scan"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_gradients_of_a_recurrence_by_hand(name: str, implementation: str) -> None:
    fn, init, xs, weights = recurrence(name)

    def run(init: Any, xs: Any, *weights: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return fn(carry, x, *weights)

        if implementation == "loop":
            return scan_loop(body, init, xs, 5, False)
        return scan(body, init, xs, checkpoint="full" if "checkpointed" in implementation else None)

    if implementation == "compiled scan":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    ds = cotangents_of(run(init, xs, *weights))
    torch.testing.assert_close(
        by_hand(fn, init, xs, weights, ds), by_autograd(run, (init, xs, *weights), ds)
    )


@pytest.mark.parametrize(
    ("rule", "saved"), [(vjp.sin_saving_x, "add"), (vjp.sin_saving_cos, "cos")]
)
def test_a_users_rule_decides_what_a_scan_saves_per_step(rule: vjp.Rule, saved: str) -> None:
    """The two halves of a step as bodies of two scans: what the rules save is stacked, no more."""

    def step(h: Any, x: Any) -> Any:
        return torch.sin(h + x), None

    init, xs, d = randn(3), randn(6, 3), randn(3)
    rules = vjp.DEFAULT_RULES.override({torch.sin: rule})
    forward, backward = vjp.forward_and_backward(step, init, xs[0], rules=rules)

    def save(h: Any, x: Any) -> Any:
        (h, _), residuals = forward(h, x)
        return h, residuals

    def pull_back(d_h: Any, residuals: Any) -> Any:
        return backward(*residuals, d_h, None)

    carry, (stack,) = scan(save, init, xs)
    d_init, d_xs = scan(pull_back, d, (stack,), reverse=True)

    carries = torch.stack([init, *scan(lambda h, x: (step(h, x)[0],) * 2, init, xs)[1][:-1]])
    values = {"add": carries + xs, "cos": torch.cos(carries + xs)}
    torch.testing.assert_close(stack, values[saved])
    expected = by_autograd(lambda *a: scan_loop(step, *a, 6, False)[0], (init, xs), [d])
    torch.testing.assert_close((carry, [d_init, d_xs]), expected)
