"""torch's own scan tests (test/functorch/test_control_flow.py, hop_db) as behaviours of ours.

Each row names the test that it corresponds to. Where torch's prototype refuses what the loop can do
(aliases, changes of inputs), the row says what happens here.
"""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import VARIANTS, assert_same, check, loop
from torch import nn
from torch.testing import make_tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from torch_scan_hop import fallback, scan

F64 = torch.float64
XS = torch.linspace(-1, 1, 24, dtype=F64).reshape(4, 2, 3)
H = torch.linspace(0, 1, 6, dtype=F64).reshape(2, 3)
W = torch.linspace(-1, 1, 9, dtype=F64).reshape(3, 3)

MODES = [
    pytest.param(name, marks=() if name == "eager" else pytest.mark.slow)
    for name in ("eager", "compile_eager", "aot_eager", "inductor")
]

#: torch's binary operators of these tests
OPERATORS = {
    "add": lambda h, x: (h + x, h * 1.0),
    "mul": lambda h, x: (h * x, h * x),
    "div": lambda h, x: (h / (x + 2), h),
    "s5": lambda h, x: ((h[0] * x, h[1] * x + h[0]), h[1]),
    "adds": lambda h, x: ((h[0] + x, h[1] + h[0] * x), h[0]),
}
PAIRS = {"s5", "adds"}


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(W.clone())
        self.linear = nn.Linear(3, 3, dtype=F64)

    def forward(self, h, x):
        h = torch.tanh(h @ self.w + self.linear(x))
        return h, h * 2


def nested(h, x):
    h, ys = scan(lambda h, _: (torch.tanh(h @ W + x), h.sum(0)), h, length=2)
    return h, ys


ROWS = {
    "test_scan_dim": lambda run: run(OPERATORS["add"], XS[:, :, 0] * 0 + 1, XS, dim=2),
    "test_scan_dim: negative": lambda run: run(
        lambda h, x: (h + x, x), torch.zeros(4, 3, dtype=F64), XS, dim=-2
    ),
    "test_scan_y_less_ndim_then_dim": lambda run: run(
        lambda h, x: (h + x, h.sum()), torch.zeros(4, 2, dtype=F64), XS, dim=2
    ),
    "test_scan_non_pointwise": lambda run: run(lambda h, x: (h @ W + x, h.T @ x), H, XS),
    "test_scan_tuple": lambda run: run(
        lambda h, x: ((h[0] + x[0], h[1] * x[1]), (x[1], h[0])), (H, H), (XS, XS + 2)
    ),
    "test_scan_complex_pytree": lambda run: run(
        lambda h, x: ({"i": h["i"] * x["j"], "k": ([h["k"][0][0] + 1],)}, {"o": [x["j"]]}),
        {"i": H, "k": ([H],)},
        {"j": XS},
    ),
    "test_scan_associative_scan: a cumulative sum": lambda run: run(
        lambda h, x: (h + x, h + x), H * 0, XS
    ),
    "test_scan_downstream_scan_matmul": lambda run: (run(OPERATORS["add"], H, XS)[1] @ W).sum(),
    "test_scan_downstream_scan_scan": lambda run: run(
        OPERATORS["mul"], H, run(OPERATORS["add"], H, XS)[1].detach()
    ),
    "test_scan_downstream_scan_scan: across dimensions": lambda run: run(
        lambda h, x: (h + x, x),
        torch.zeros(4, 3, dtype=F64),
        run(OPERATORS["add"], H, XS)[1].detach(),
        dim=1,
        reverse=True,
    ),
    "test_scan_closure_nested": lambda run: run(nested, H, XS),
    "test_scan_closure_combine_fn_with_no_grad_init_carries": lambda run: run(
        lambda h, x: ((h[0].detach() + x, h[1] * x), h[0]), (H, H), XS
    ),
    "test_scan_closure_combine_fn_with_no_grad_for_out": lambda run: run(
        lambda h, x: (h * x, (h * x).detach()), H, XS
    ),
    "test_scan_expand_in_carry": lambda run: run(
        lambda h, x: (h.sum(0).expand(2, 3) * 0.1, x[0].expand(2, 3)), H, XS
    ),
    "test_scan_input_carry_alias: refused by torch": lambda run: run(
        lambda h, x: ((h[1], h[0]), x), (H, H * 2), XS
    ),
    "test_scan_carry_carry_alias: refused by torch": lambda run: run(
        lambda h, x: ((h[0] * x,) * 2, h[1]), (H, H), XS
    ),
    "test_scan_input_output_alias: refused by torch": lambda run: run(
        lambda h, x: (h + x, (x, h)), H, XS
    ),
    "test_scan_carry_output_alias: refused by torch": lambda run: run(
        lambda h, x: (lambda h: (h, h))(torch.tanh(h + x)), H, XS
    ),
}
for _name, _operator in OPERATORS.items():
    ROWS[f"test_scan_compile, {_name}"] = lambda run, f=_operator, pair=_name in PAIRS: run(
        f, (H, H) if pair else H, XS + 0.5
    )
    ROWS[f"test_scan_compile, {_name}, reverse"] = lambda run, f=_operator, pair=_name in PAIRS: (
        run(f, (H, H) if pair else H, XS + 0.5, reverse=True)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", ROWS)
def test_values_and_gradients_are_the_loop_s(row, mode):
    tolerance = 1e-7 if mode == "inductor" else 1e-9
    ROWS[row](
        lambda *args, **kwargs: check(*args, variant=VARIANTS[mode], tolerance=tolerance, **kwargs)
    )


@pytest.mark.parametrize("wrt", ["init", "xs", "closure", "init and closure", "all"])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_closure_RNN_partial_autograd(wrt, reverse):
    """Gradients for some of what goes in, and none for the rest."""
    inputs = {"init": H.clone(), "xs": XS.clone(), "closure": W.clone()}
    wanted = [t for name, t in inputs.items() if name in wrt or wrt == "all"]
    for tensor in wanted:
        tensor.requires_grad_()
    w = inputs["closure"]

    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, h * 2

    results = [run(cell, inputs["init"], inputs["xs"], reverse=reverse) for run in (scan, loop)]
    assert_same(*results)
    grads = [torch.autograd.grad(h.sum() + (ys * ys).sum(), wanted) for h, ys in results]
    assert_same(*grads)


def test_scan_RNN_of_a_module():
    cell = Cell()
    check(cell, H, XS, params=list(cell.parameters()))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.int32, torch.int64, torch.complex64]
)
def test_scan_dtype(dtype):
    xs = torch.arange(8).reshape(4, 2).to(dtype)
    assert_same(scan(OPERATORS["mul"], xs[0], xs), loop(OPERATORS["mul"], xs[0], xs), 1e-3)


def test_scan_carries_of_several_dtypes():
    """test_scan_different_dtypes: of init, xs and ys."""
    init = (torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    xs = torch.arange(8).reshape(4, 2)
    body = lambda h, x: ((h[0] + x, h[1] * 2 + x), (x > 3, h[0].double()))  # noqa: E731
    assert_same(scan(body, init, xs), loop(body, init, xs))


@pytest.mark.parametrize("length", [0, 1])
def test_scan_init_of_no_and_one_step(length):
    h, ys = scan(OPERATORS["add"], H, XS[:length])
    assert ys.shape == (length, 2, 3)
    assert_same(h, H + XS[:length].sum(0))


def test_scan_input_mutation_refused_by_torch():
    """Here a body's changes of its carry and x reach nobody, and those of a closure everybody."""
    seen, h, xs = torch.zeros(2, 3, dtype=F64), H.clone(), XS.clone()

    def body(h, x):
        seen.add_(x)
        h.add_(x)
        x.mul_(2)
        return h, x

    got = scan(body, h, xs)
    assert_same(got, (H + XS.sum(0), XS * 2))
    assert_same((h, xs, seen), (H, XS, XS.sum(0)))


def test_scan_simple_graph():
    """One operator, of ours, with the body as a submodule."""
    graphs = []
    torch.compile(
        lambda h, xs: scan(OPERATORS["add"], h, xs), backend=lambda gm, _: graphs.append(gm) or gm
    )(H, XS)
    targets = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert targets.count(torch.ops.higher_order.scan) == 1
    assert [name for name, _ in graphs[0].named_children()] == ["scan_body_0"]


ERRORS = {
    "test_scan_wrong_pytree": lambda: scan(lambda h, x: ({"a": h}, x), H, XS),
    "test_scan_one_return": lambda: scan(lambda h, x: h, H, XS),
    "test_scan_init_wrong_shape": lambda: scan(lambda h, x: (x, h), H[:1], XS),
    "test_scan_init_wrong_pytree": lambda: scan(lambda h, x: ((h[0],), x), (H, H), XS),
    "test_scan_carry_wrong_dtype": lambda: scan(lambda h, x: (h.float(), x), H, XS),
    "test_scan_xs_of_different_lengths": lambda: scan(lambda h, x: (h, x), H, (XS, XS[:2])),
    "test_scan_invalid_xs": lambda: scan(lambda h, x: (h, x), H, torch.tensor(1.0)),
    "test_scan_init_of_a_string": lambda: scan(lambda h, x: (h, x), "h", XS),
}


@pytest.mark.parametrize("row", ERRORS)
def test_errors_name_what_is_wrong(row):
    with pytest.raises((TypeError, ValueError), match=r"^scan: "):
        ERRORS[row]()


# --- torch's form of an operator's entry in hop_db ---


def sample_inputs(op_info, device, dtype, requires_grad, **kwargs):
    make = functools.partial(
        make_tensor, device=device, dtype=dtype, requires_grad=requires_grad, low=0.1, high=2
    )
    yield SampleInput(make(2, 2), make(3, 2, 2))
    yield SampleInput(make(2, 2), make(1, 2, 2))


def simple_scan(init, xs):
    return scan(lambda h, x: (h @ x + x, h), init, xs)


ENTRY = OpInfo(
    name="scan",
    variant_test_name="torch_scan_hop",
    op=simple_scan,
    sample_inputs_func=sample_inputs,
    dtypes=torch.testing._internal.common_dtype.all_types_and(torch.half),
    supports_out=False,
    supports_forward_ad=True,
    supports_fwgrad_bwgrad=True,
)


@pytest.mark.parametrize("dtype", sorted(ENTRY.dtypes, key=str), ids=str)
def test_every_dtype_of_the_entry(dtype):
    for sample in ENTRY.sample_inputs("cpu", dtype):
        got, want = (run(sample.input, *sample.args) for run in (ENTRY.op, _simple_loop))
        assert_same(got, want, 2e-2 if dtype == torch.half else 1e-4)


def _simple_loop(init, xs):
    return loop(lambda h, x: (h @ x + x, h), init, xs)


def test_gradients_of_the_entry():
    """gradcheck and gradgradcheck, forward mode and batched gradients: torch's prototype has none."""
    sample = next(iter(ENTRY.sample_inputs("cpu", F64, requires_grad=True)))
    inputs = (sample.input, *sample.args)
    with fallback("allow"):  # torch 2.15 captures no duals, so they are a loop there
        assert torch.autograd.gradcheck(
            ENTRY.op, inputs, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(ENTRY.op, inputs)
