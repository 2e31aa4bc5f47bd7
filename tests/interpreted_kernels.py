"""The numbers of the Triton kernels, in Triton's interpreter: run by ``test_gpu_numbers``.

A compiled scan on the CPU takes the kernel that it would take on a GPU.
"""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("triton")

import torch
import triton_interpreter  # noqa: F401  before Inductor
from fuzz.campaign import run_here
from fuzz.modes import parse_mode
from gpu_cells import (
    CASES,
    DRAW_CASES,
    NORM_CASES,
    ROW_CASES,
    SQUARE_CASES,
    Case,
    beside_parts,
    randn,
    random_squares,
    row_case,
    square_case,
)
from graph_caches import graph_caches
from on_the_cpu import triton_kernels
from oracle import TOLERANCE, assert_same, differentiable, gradients, zeros_for_none
from torch.utils import _pytree as pytree

from torch_scan_hop.inductor import cpu, gpu
from torch_scan_hop.inductor.gpu import row_programs
from torch_scan_hop.inductor.watch import watching
from torch_scan_hop.reference import scan_loop

PARALLEL, POINTWISE, ROWS = gpu.KERNELS


@contextlib.contextmanager
def compiled_for_gpu():
    """Scans compiled within are Triton kernels; the list has the kernel of each scan."""
    chosen = []
    with (
        triton_kernels(),
        watching(lambda _, kernel, __: chosen.append(kernel and type(kernel))),
        graph_caches(False),
    ):
        yield chosen


def wanted(case, inputs, T, reverse):
    """What the loop computes in float64."""
    init, xs, parameters = inputs
    return scan_loop(lambda c, x: case.step(c, x, parameters), init, xs, T, reverse)


def as_leaves(inputs):
    def leaf(value):
        is_float = value.dtype.is_floating_point or value.dtype.is_complex
        return value.detach().requires_grad_() if is_float else value

    return pytree.tree_map_only(torch.Tensor, leaf, inputs)


def in_float64(inputs):
    def cast(value):
        value = value.detach()
        return value.double().requires_grad_() if value.dtype.is_floating_point else value

    return pytree.tree_map_only(torch.Tensor, cast, inputs)


def check(name, T, reverse=False, dtype=torch.float64, train=True, **options):
    """Values, and all gradients, equal those of the loop; the kernels of the scans."""
    case = (CASES | ROW_CASES | NORM_CASES | SQUARE_CASES)[name]
    inputs = case.drawn(T, dtype)
    exact = in_float64(inputs)
    if train:
        inputs = as_leaves(inputs)
    return compare(case, inputs, exact, T, reverse, dtype, **options)


def compare(case, inputs, exact, T, reverse, dtype=torch.float64, oracle=None, **options):
    """``exact``: the same inputs in float64. Gradients are of those inputs that require grad.
    ``oracle``: a case that computes the same, if not ``case`` itself."""
    with compiled_for_gpu() as chosen:
        run = torch.compile(lambda *a: case.run(*a, reverse=reverse), fullgraph=True, **options)
        got = run(*inputs)
        wrt, exact_wrt = differentiable(inputs), differentiable(exact)
        result = wanted(oracle or case, exact, T, reverse)
        assert_same(got, result, TOLERANCE[dtype], dtype=False)
        if wrt:
            assert_same(
                zeros_for_none(gradients(got, wrt), wrt),
                zeros_for_none(gradients(result, exact_wrt), exact_wrt),
                TOLERANCE[dtype] * 4,
                dtype=False,
            )
    return chosen


# "gated" once is test_any_trip_count
EACH_ONCE = {"counter": True, "bytes and shorts": False, "selective ssm": True}
EACH_ONCE |= {"shifted x": False, "averages in one": True}
OTHERS = [(n, r) for n in CASES for r in (False, True) if EACH_ONCE.get(n) is not r]
OTHERS = [pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS]


@pytest.mark.parametrize(("name", "reverse"), [*EACH_ONCE.items(), *OTHERS])
def test_values_and_gradients(name, reverse):
    trains = bool(differentiable(CASES[name].inputs(1)))
    assert check(name, 5, reverse) == [POINTWISE] * (1 + trains)


@pytest.mark.parametrize(
    "T", [0, 33, *(pytest.param(T, marks=pytest.mark.slow) for T in (1, 2, 3, 4))]
)
def test_any_trip_count(T):
    chosen = check("gated", T, reverse=T % 2 == 1)
    # few steps have their sums in them, and what these are of is not one element's
    assert chosen[0] is POINTWISE and (T < 2 or chosen[1] is POINTWISE)


@pytest.mark.slow
def test_any_trip_count_and_width_of_one_kernel():
    case = CASES["two carries"]
    with compiled_for_gpu() as chosen, torch.no_grad():
        run = torch.compile(case.run, fullgraph=True, dynamic=True)
        for T, width in ((4, 5), (9, 64), (2, 33), (3, 1000)):
            init, xs = (torch.randn(3, width), torch.randn(3, width)), torch.randn(T, 3, width)
            assert_same(run(init, xs, None), wanted(case, (init, xs, None), T, False), 1e-5)
    assert chosen == [POINTWISE]


HALF = [torch.bfloat16, torch.float16]
TYPES = [("lru", torch.bfloat16)]
ALL_TYPES = [
    pytest.param(name, dtype, marks=pytest.mark.slow)
    for name in ("gated", "two carries", "transcendental", "selective ssm")
    for dtype in (torch.float32, *HALF)
]


@pytest.mark.parametrize(("name", "dtype"), TYPES + ALL_TYPES)
def test_types(name, dtype):
    assert check(name, 5, dtype=dtype) == [POINTWISE] * 2


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda h, x, _: (h.roll(1, 0) + x, h), id="roll"),
        pytest.param(
            lambda h, x, _: (h.cumsum(0) * x, h), id="cumulative sum", marks=pytest.mark.slow
        ),
    ],
)
def test_lanes_that_are_not_independent_are_a_counted_loop(step):
    case = Case(step, lambda T: (randn(37), randn(T, 37), None))
    init, xs, _ = case.drawn(4, torch.float64)
    with compiled_for_gpu() as chosen, torch.no_grad():
        got = torch.compile(case.run, fullgraph=True)(init, xs, None)
    assert_same(got, wanted(case, (init, xs, None), 4, False), 1e-9)
    assert chosen == [None]


def test_a_kernel_that_cannot_be_emitted_is_a_counted_loop(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("torch_scan_hop.inductor.gpu.pointwise.LaneCode", fail)
    case = CASES["gated"]
    init, xs, parameters = case.drawn(4, torch.float64)
    with compiled_for_gpu() as chosen, torch.no_grad():
        got = torch.compile(case.run, fullgraph=True)(init, xs, parameters)
    assert_same(got, wanted(case, (init, xs, parameters), 4, False), 1e-9)
    assert chosen == [cpu.KERNELS[0]]
    caplog.clear()  # what was left out is what this is about


ROWS_ONCE = {
    "gru": False,
    "lstm of 35 rows": True,
    "rnn with a head": True,
    "one row": False,
}
OTHER_ROWS = [(n, r) for n in ROW_CASES for r in (False, True) if ROWS_ONCE.get(n) is not r]
OTHER_ROWS = [pytest.param(*other, marks=pytest.mark.slow) for other in OTHER_ROWS]


@pytest.mark.parametrize(("name", "reverse"), [*ROWS_ONCE.items(), *OTHER_ROWS])
def test_rows(name, reverse):
    assert check(name, 5, reverse, torch.float32) == [ROWS] * 2


@pytest.mark.parametrize("rows", [4, 16])
def test_programs_of_several_rows(rows, monkeypatch):
    """Of a few, as where there are many rows, and of as many as a tensor core multiplies."""
    monkeypatch.setattr(row_programs, "MOST_FOR_ONE_ROW", 0)
    monkeypatch.setattr(row_programs, "MOST_FOR_FEW_ROWS", 0 if rows == 16 else 1024)
    assert check("lstm of 35 rows", 5, False, torch.float32) == [ROWS] * 2


#: and what their backwards are
BACKWARDS = dict.fromkeys(NORM_CASES, ROWS) | {"counted": POINTWISE}
NORMS_ONCE = {"norm in a cell": True, "two blocks": False, "counted": True}
OTHER_NORMS = [(n, r) for n in NORM_CASES for r in (False, True) if NORMS_ONCE.get(n) is not r]
OTHER_NORMS = [pytest.param(*other, marks=pytest.mark.slow) for other in OTHER_NORMS]


@pytest.mark.parametrize(("name", "reverse"), [*NORMS_ONCE.items(), *OTHER_NORMS])
def test_reductions_of_rows(name, reverse):
    has_products = {"u", "w"} & set(NORM_CASES[name].inputs(1)[2] or ())
    dtype = torch.float32 if has_products else torch.float64
    assert check(name, 5, reverse, dtype) == [ROWS, BACKWARDS[name]]


SQUARES_ONCE = {"chain of tags": True, "shares": False}
OTHER_SQUARES = [
    (n, r) for n in SQUARE_CASES for r in (False, True) if SQUARES_ONCE.get(n) is not r
]
OTHER_SQUARES = [pytest.param(*other, marks=pytest.mark.slow) for other in OTHER_SQUARES]


@pytest.mark.parametrize(("name", "reverse"), [*SQUARES_ONCE.items(), *OTHER_SQUARES])
def test_squares_of_rows(name, reverse):
    assert check(name, 5, reverse, torch.float32) == [ROWS, ROWS]


def test_parts_beside_squares_are_no_kernel():
    case = square_case(beside_parts, (3, 10))
    inputs = case.drawn(5, torch.float32)
    chosen = compare(case, as_leaves(inputs), in_float64(inputs), 5, False, torch.float32)
    assert ROWS not in chosen[:1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_squares(seed):
    case = random_squares(seed)
    inputs = case.drawn(4, torch.float32)
    chosen = compare(case, as_leaves(inputs), in_float64(inputs), 4, False, torch.float32)
    assert chosen[0] is ROWS


DRAWN_BY = {"sum that drops": PARALLEL, "lstm that drops": ROWS, "noisy": ROWS}


@pytest.mark.parametrize("name", DRAW_CASES)
def test_draws(name):
    """The numbers of the loop that draws the same; each element of each step has its own."""
    case, reverse = DRAW_CASES[name], name != "drops"
    kernel = DRAWN_BY.get(name, POINTWISE)
    T = 300 if kernel is PARALLEL else 9
    inputs = case.drawn(T, torch.float32)
    exact, inputs = in_float64(inputs), as_leaves(inputs)
    with compiled_for_gpu() as chosen:
        got = torch.compile(lambda *a: case.run(*a, reverse=reverse), fullgraph=True)(*inputs)
        drawn = got[1][1]
        result = case.loop_with(drawn, exact, T, reverse)
        assert_same(got, result, TOLERANCE[torch.float32], dtype=False)
        found = gradients(got, wrt := differentiable(inputs))
        oracle = zeros_for_none(gradients(result, at := differentiable(exact)), at)
        assert_same(zeros_for_none(found, wrt), oracle, 4 * TOLERANCE[torch.float32], dtype=False)
    assert chosen[0] is kernel
    numbers = drawn.double()
    expected = {"noisy": (0.0, 1.0), "chooses": (0.0, 0.82)}.get(name, (0.7, 0.46))
    assert [float(numbers.mean()), float(numbers.std())] == pytest.approx(expected, abs=0.1)
    assert len(numbers.flatten(1).unique(dim=0)) >= 8  # of three lanes there are so many


@pytest.mark.slow
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 33])
def test_any_trip_count_of_rows(T):
    assert check("gru", T, dtype=torch.float32)[0] is ROWS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru"])
def test_types_of_rows(name, dtype):
    assert check(name, 5, dtype=dtype) == [ROWS] * 2


def fused_lstm(carry, x, p):
    """What CUDA traces ``nn.LSTMCell`` as; on the CPU the operator has no kernel of its own."""
    h, c = carry
    gates = x @ p["w"], h @ p["u"]
    h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(*gates, c, p.get("b"), p.get("d"))
    return (h, c), h


def fused_gru(h, x, p):
    gates = x @ p["w"], h @ p["u"]
    h, _ = torch.ops.aten._thnn_fused_gru_cell(*gates, h, p.get("b"), p.get("d"))
    return h, h


def torchs_lstm(carry, x, p):
    h, c = torch.lstm_cell(x, carry, p["w"].t(), p["u"].t(), p.get("b"), p.get("d"))
    return (h, c), h


def torchs_gru(h, x, p):
    h = torch.gru_cell(x, h, p["w"].t(), p["u"].t(), p.get("b"), p.get("d"))
    return h, h


@pytest.mark.parametrize(
    ("cell", "bias", "reverse"),
    [
        ("gru", True, True),
        pytest.param("lstm", True, False, marks=pytest.mark.slow),
        pytest.param("lstm", False, True, marks=pytest.mark.slow),
        pytest.param("gru", False, False, marks=pytest.mark.slow),
    ],
)
def test_cells_that_are_one_operator_on_a_gpu(cell, bias, reverse):
    step, oracle = {"lstm": (fused_lstm, torchs_lstm), "gru": (fused_gru, torchs_gru)}[cell]
    gates, carries = (4, 2) if cell == "lstm" else (3, 1)
    case = row_case(step, "wu", gates=gates, carries=carries)
    init, xs, parameters = case.drawn(5, torch.float32)
    if bias:
        parameters |= {name: randn(gates * 24 + k)[k:].float() for k, name in enumerate("bd")}
    inputs = as_leaves((init, xs, parameters))
    exact = in_float64(inputs)
    chosen = compare(
        case, inputs, exact, 5, reverse, torch.float32, oracle=Case(oracle, case.inputs)
    )
    assert chosen == [ROWS] * 2


def step_of_another_row(h, x, p):
    return torch.tanh(h.flip(0) @ p["u"] + x), h


def step_of_halves(h, x, p):
    left, right = h.chunk(2, -1)
    return torch.cat([right, left], -1) + torch.tanh(h @ p["u"] + x), h


@pytest.mark.parametrize("step", [step_of_another_row, step_of_halves])
def test_rows_that_are_not_blocks_are_a_counted_loop(step):
    case = row_case(step, "u")
    inputs = case.drawn(4, torch.float32)
    with compiled_for_gpu() as chosen, torch.no_grad():
        got = torch.compile(case.run, fullgraph=True)(*inputs)
    assert_same(got, wanted(case, inputs, 4, False), 1e-4)
    assert ROWS not in chosen and len(chosen) == 1


def filtered(spread, seen, moves):
    spread = moves @ spread @ moves.mT + 0.1 * torch.eye(2, dtype=seen.dtype)
    gain = torch.linalg.solve(spread + torch.eye(2, dtype=seen.dtype), spread)
    return spread - spread @ gain, (seen[:, None] @ gain)[:, 0]


def test_small_matrices_are_scalars():
    def inputs(T):
        return torch.eye(2, dtype=torch.float64).repeat(3, 1, 1), randn(T, 3, 2), randn(2, 2)

    case = Case(filtered, inputs)
    chosen = compare(case, as_leaves(inputs(4)), as_leaves(inputs(4)), 4, False)
    assert chosen == [POINTWISE] * 2


def hidden_markov(alpha, symbol, p):
    alpha = torch.logsumexp(alpha[:, :, None] + p["move"], 1)
    return alpha + p["emit"][:, symbol].T, alpha


def test_what_no_kernel_has_leaves_the_loop_if_it_needs_xs_alone():
    """A look-up of what was seen; and in the backward its gradients, which are added up after it."""

    def inputs(T):
        seen = torch.arange(T * 3).reshape(T, 3) * 5 % 6
        return randn(3, 4), seen, {"move": randn(4, 4), "emit": randn(4, 6)}

    case = Case(hidden_markov, inputs)
    chosen = compare(case, as_leaves(inputs(5)), as_leaves(inputs(5)), 5, False)
    assert chosen == [POINTWISE] * 2


RANDOM = {
    "PointwiseKernel": (range(60000, 60004), ("kernel", "pointwise")),
    "RowsKernel": (range(2, 6), ("rows", "products", "cells", "pointwise")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RANDOM)
def test_random_programs(kernel):
    """More of them: ``make fuzz ARGS="--modes triton --features kernel,pointwise"``."""
    seeds, features = RANDOM[kernel]
    outcomes = [f.outcome for f in run_here(seeds, [parse_mode("triton")], features)]
    assert not [outcome for outcome in outcomes if outcome.is_failure]
    assert sum(kernel in outcome.kernels for outcome in outcomes) >= 2
