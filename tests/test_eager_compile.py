"""``scan(..., compile=True)``: Inductor's loops inside an eager program."""

from __future__ import annotations

import pytest
import torch
from cells import GRU, LSTM
from oracle import Variant, assert_same, check, loop
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


@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=["lstm", "gru"])
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
