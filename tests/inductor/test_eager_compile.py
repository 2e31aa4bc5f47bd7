"""``scan(..., compile=True)``: Inductor's loops inside an eager program."""

from __future__ import annotations

import pytest
import torch
from cells import GRU, LSTM
from oracle import Variant, assert_same, check, gradients, loop
from torch._inductor import compile_fx

from torch_scan_hop import fallback, scan, set_default
from torch_scan_hop.settings import defaults

F64 = torch.float64
COMPILED = Variant(options={"compile": True})


@pytest.fixture
def compilations(monkeypatch):
    """One entry for each graph that Inductor was given."""
    found: list[object] = []
    original = compile_fx.compile_fx

    def counting(*args, **kwargs):
        found.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", counting)
    return found


@pytest.mark.parametrize(
    "cell",
    [pytest.param(LSTM(), id="lstm"), pytest.param(GRU(), id="gru", marks=pytest.mark.slow)],
)
def test_values_and_gradients(cell, compilations):
    p = cell.problem(F64, T=5, B=2)
    check(p.combine_fn, p.init, p.xs, variant=COMPILED, params=list(p.params.values()))
    assert len(compilations) == 1


def test_a_third_size_compiles_nothing(compilations):
    weight = torch.randn(3, dtype=F64, requires_grad=True)

    def cell(h, x):
        h = torch.tanh(h * weight + x)
        return h, h

    for k, (T, B) in enumerate([(4, 2), (5, 3), (7, 4), (9, 6), (6, 5)]):
        xs = torch.randn(T, B, 3, dtype=F64)
        check(cell, torch.zeros(B, 3, dtype=F64), xs, variant=COMPILED, params=[weight])
        assert len(compilations) == min(k, 1) + 1


DECIDED_BY_THE_EXPONENT = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="torch traces another operator for some exponents"
)


def every_operator_with_a_number(f):
    def cell(h, x):
        computed = torch.tanh((1 - f * 2) * h / f + x * -f)
        bounded = h.clamp(max=f) + h.clamp(-f, f) + h % f
        chosen = torch.where(h > f, h * 0.5, f) + (h <= f) * f
        filled = torch.full((2, 3), f, dtype=h.dtype) * h + h.masked_fill(h > 0, f)
        scaled = torch.add(h, x, alpha=f) + torch.addcmul(x, h, x, value=f)
        integers = (torch.arange(3) * f).to(h.dtype)
        ys = f - h * x, f / (h.abs() + 1), bounded, chosen, filled, scaled, integers, f
        return torch.sin(computed), ys

    return cell


def a_product_with_a_number(f):
    return lambda h, x: (torch.tanh(h * f + x), h + f)


def a_power_with_a_number(f):
    return lambda h, x: (torch.tanh((h.abs() + 1) ** f + x), h)


def a_scan_with_a_number(f):
    def inner(a, b):
        return torch.sin(a * f + b), a

    return lambda h, x: scan(inner, h, torch.stack([x, x * f]))


NUMBERS = [0.5, 0.625, 0.75, 0.875]


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("cell_with", "dtype"), [(a_scan_with_a_number, F64), (a_product_with_a_number, torch.bfloat16)]
)
def test_a_third_float_compiles_nothing(cell_with, dtype, compilations):
    h, xs = torch.rand(2, 3), torch.rand(4, 2, 3)
    for k, number in enumerate(NUMBERS):
        given = [t.to(dtype).requires_grad_() for t in (h, xs)]
        cell = cell_with(number)
        got, want = scan(cell, *given, compile=True), loop(cell, *given)
        tolerance = 6e-2 if dtype == torch.bfloat16 else 1e-12
        assert_same(got, want, tolerance)
        assert_same(gradients(got, given), gradients(want, given), tolerance)
        assert len(compilations) == min(k, 1) + 1


@pytest.fixture
def floats_vary():
    """torch_xla's Dynamo bridge turns this off for the whole process."""
    with torch._dynamo.config.patch(specialize_float=False, automatic_dynamic_shapes=True):
        yield


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "cell_with",
    [
        every_operator_with_a_number,
        pytest.param(a_power_with_a_number, marks=DECIDED_BY_THE_EXPONENT),
    ],
)
def test_operators_do_with_a_tensor_what_they_do_with_a_number(cell_with, floats_vary):
    graphs = []

    def backend(gm, examples):
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(gm, examples)

    @torch.compile(backend=backend, fullgraph=True)
    def run(h, xs, f):
        return scan(cell_with(f), h, xs)

    h, xs = (torch.rand(s, dtype=F64, requires_grad=True) for s in ((2, 3), (4, 2, 3)))
    for number in NUMBERS:
        got, want = run(h, xs, number), loop(cell_with(number), h, xs)
        assert_same(got, want)
        assert_same(gradients(got, [h, xs]), gradients(want, [h, xs]))
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float_of_a_compiled_program_compiles_nothing(dtype, compilations, floats_vary):
    """Of 0-d carries: a tensor, unlike a number, would decide the type of the result."""

    def cell_with(f):
        return lambda h, x: (torch.tanh(h * f + x), h > f)

    @torch.compile(fullgraph=True)
    def run(h, xs, f):
        return scan(cell_with(f), h, xs)

    h, xs = torch.tensor(0.3, dtype=dtype), torch.linspace(0, 1, 5).to(dtype)
    for number in (0.5, 0.1, 0.2, 0.7):
        assert_same(run(h, xs, number), loop(cell_with(number), h, xs), 1e-2)
    assert len(compilations) == 2


def test_a_buffer_is_written_to(compilations):
    def run(**options):
        total = torch.zeros(3, dtype=F64)

        def cell(h, x):
            total.add_(x)
            return h + total, h

        return scan(cell, torch.zeros(3, dtype=F64), torch.ones(4, 3, dtype=F64), **options), total

    assert_same(run(compile=True), run())
    assert len(compilations) == 1


def sine(h, x):
    h = torch.sin(h + x)
    return h, h


ZEROS, XS = torch.zeros(3, dtype=F64), torch.linspace(0, 1, 12, dtype=F64).reshape(4, 3)


def under_grad(run):
    return torch.func.grad(lambda x: run(ZEROS, x)[0].sum())(XS)


def under_vmap(run):
    return torch.vmap(lambda x: run(x, XS)[1])(torch.stack([ZEROS, ZEROS + 1]))


def with_duals(run):
    # Dynamo of torch 2.15 takes no dual tensors: there it is a loop
    with fallback("allow"), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(ZEROS, ZEROS + 1)
        return torch.autograd.forward_ad.unpack_dual(run(dual, XS)[0]).tangent


def counting_flops(run):
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        return run(ZEROS, XS)


@pytest.mark.parametrize("around", [under_grad, under_vmap, with_duals, counting_flops])
def test_what_looks_at_the_scan_sees_it(around, compilations):
    got = around(lambda init, xs: scan(sine, init, xs, compile=True))
    assert_same(got, around(lambda init, xs: loop(sine, init, xs)))
    assert not compilations


def test_inside_a_compiled_program(compilations):
    compiled = torch.compile(lambda x: scan(sine, ZEROS, x, compile=True), fullgraph=True)
    assert_same(compiled(XS), loop(sine, ZEROS, XS))
    assert len(compilations) == 1  # the caller's own


def test_it_can_be_the_default(compilations):
    with set_default(compile=True):
        assert_same(scan(sine, ZEROS, XS), loop(sine, ZEROS, XS))
        assert len(compilations) == 1
        scan(sine, ZEROS[:1], XS[:, :1], compile=False)
        assert len(compilations) == 1
    assert not defaults().compile
    try:
        set_default(compile=True)
        assert defaults().compile
    finally:
        set_default(compile=False)


@pytest.mark.filterwarnings("default:torch_scan_hop")
def test_without_a_compiler_it_runs_as_it_did(monkeypatch):
    calls = []

    def broken(*args, **kwargs):
        calls.append(args)
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compile_fx, "compile_fx", broken)
    with pytest.warns(UserWarning, match=r"sine .*could not be compiled.*no compiler here") as seen:
        for _ in range(2):
            check(sine, ZEROS, XS, variant=COMPILED)
    assert len(calls) == 1 and len(seen) == 1


def test_a_body_that_cannot_be_traced_is_a_loop(compilations):
    def branches(h, x):
        return (h + x, h) if x.sum() > 1 else (h - x, h)

    with fallback("allow"):
        check(branches, ZEROS, XS, variant=COMPILED)
    assert not compilations


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="scan: compile must be True or False, but got str"):
        scan(sine, ZEROS, XS, compile="yes")
    with pytest.raises(TypeError, match="set_default: no default is called 'unroll'"):
        set_default(unroll=2)
    with pytest.raises(TypeError, match="set_default: compile must be True or False"):
        set_default(compile=1)
