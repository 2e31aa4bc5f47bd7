"""The numbers of the kernels that are parallel in time, in Triton's interpreter.

Run by ``test_gpu_numbers``. Tiles are of few rows, so that few steps are several tiles.
"""

from __future__ import annotations

import contextlib
import functools

import pytest

pytest.importorskip("triton")

import gpu_cells
import torch
import triton_interpreter  # noqa: F401  before Inductor
from affine_cells import AFFINE, assert_same_nans_too, hard, reset
from fuzz.modes import tiles_of_few_steps
from fuzz.mutants import MUTANTS, search
from gpu_cells import Case, randn
from interpreted_kernels import as_leaves, compare, compiled_for_gpu
from oracle import TOLERANCE, assert_same, differentiable, gradients
from torch.utils import _pytree as pytree

from torch_scan_hop import explain
from torch_scan_hop.inductor.gpu import ParallelKernel, parallel, serving
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is masked

ROWS = 8  # of a tile of 8 lanes


small_tiles = functools.partial(tiles_of_few_steps, ROWS)


def check(case, T, reverse=False, tiles=small_tiles):
    """In float64."""
    inputs = as_leaves(case.drawn(T, torch.float64))
    with tiles():
        return compare(case, inputs, as_leaves(case.inputs(T)), T, reverse)


# one compile each is seconds
EACH_ONCE = {"recurrence": True, "complex": False, "extremes": True}
OTHERS = [(n, r) for n in AFFINE for r in (False, True) if EACH_ONCE.get(n) is not r]
OTHERS = [pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS]


@pytest.mark.parametrize(("name", "reverse"), [*EACH_ONCE.items(), *OTHERS])
def test_values_and_gradients(name, reverse):
    chosen = check(AFFINE[name], 3 * ROWS + 7, reverse)
    assert chosen == [ParallelKernel] * (1 + bool(differentiable(AFFINE[name].inputs(1))))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_xs_of_wide_carries(dtype):
    def step(h, x, _):
        h = torch.sigmoid(x) * h + x * x
        return h, h.to(dtype)

    h, xs = randn(37).float().requires_grad_(), randn(31, 37).to(dtype).requires_grad_()
    exact, exact_xs = h.detach().double().requires_grad_(), xs.detach().double().requires_grad_()
    case = Case(step, lambda T: None)
    with compiled_for_gpu() as chosen, small_tiles():
        got = torch.compile(case.run, fullgraph=True)(h, xs, None)
        want = scan_loop(lambda c, x: step(c, x, None), exact, exact_xs, 31, False)
        ours, theirs = gradients(got, [h, xs]), gradients(want, [exact, exact_xs])
    assert_same((got, ours), (want, theirs), TOLERANCE[dtype] * 4, dtype=False)
    assert chosen == [ParallelKernel] * 2


SEVERAL = [*range(6), ROWS - 1, ROWS, ROWS + 1, 33]


@pytest.mark.slow
@pytest.mark.parametrize("T", SEVERAL)
def test_any_trip_count(T):
    chosen = check(AFFINE["triangular"], T, reverse=T % 2 == 1)
    assert chosen[:1] == [ParallelKernel] if T else chosen == []


@pytest.mark.slow
@pytest.mark.parametrize("T", [1023, 1024, 1025, 3 * 1024 + 7])
def test_tiles_as_large_as_they_are_on_a_gpu(T):
    """A lane has tiles of 1024 rows, forward, and of half of them with many buffers."""
    assert check(AFFINE["ema"], T, tiles=contextlib.nullcontext) == [ParallelKernel] * 2


@pytest.mark.parametrize("name", ["ema"])
def test_any_trip_count_of_one_kernel(name):
    case = AFFINE[name]
    with compiled_for_gpu() as chosen, small_tiles(), torch.no_grad():
        run = torch.compile(case.run, fullgraph=True, dynamic=True)
        for T in [T for T in SEVERAL if T >= 2]:
            init, xs, p = case.drawn(T, torch.float64)
            want = scan_loop(lambda c, x, p=p: case.step(c, x, p), init, xs, T, False)
            assert_same(run(init, xs, p), want, 1e-10)
    assert chosen == [ParallelKernel]


# --- where products of coefficients are not what the loop computes ---


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_of_which_no_product_may_be_taken(reverse):
    """In float32, for which the loop itself says what is right."""
    T = 45
    init, xs, _ = hard(T, 8)
    xs = {name: x.flip(0) for name, x in xs.items()} if reverse else xs
    with compiled_for_gpu() as chosen, small_tiles(), torch.no_grad():
        run = torch.compile(Case(reset, hard).run, fullgraph=True)
        got = run(init, xs, None, reverse=reverse)
    want = scan_loop(lambda c, x: reset(c, x, None), init, xs, T, reverse)
    assert_same_nans_too(got, want)
    assert chosen == [ParallelKernel]


@pytest.mark.slow
@pytest.mark.parametrize("lane", range(8))
def test_each_alone(lane):
    """Nothing but itself makes a tile smaller."""
    T = 45
    init, xs = pytree.tree_map(lambda t: t[..., lane : lane + 1], hard(T, 8)[:2])
    with compiled_for_gpu(), small_tiles(), torch.no_grad():
        got = torch.compile(Case(reset, hard).run, fullgraph=True)(init, xs, None)
    assert_same_nans_too(got, scan_loop(lambda c, x: reset(c, x, None), init, xs, T, False))


def test_the_check_is_needed():
    """Without it each of these lanes is wrong."""
    with MUTANTS["compositions_are_taken_unseen"].applied():
        for lane in (0, 1):
            with pytest.raises(AssertionError):
                test_each_alone(lane)


@pytest.mark.slow
def test_the_fuzzer_finds_a_check_that_is_not_there():
    assert search("compositions_are_taken_unseen", FOUND_BY).found is not None


# the first program that does
FOUND_BY = [24]

# --- what is not parallel in time ---

DECLINED = {
    "gated": (gpu_cells.gated, "a carry goes through sigmoid, in which it is not linear"),
    "relu": (lambda h, x, _: (torch.relu(h + x), h), "goes through relu"),
    "extreme of a multiple": (lambda h, x, _: (torch.maximum(-h, x), h), "goes through maximum"),
    "rounded": (lambda h, x, _: ((h.bfloat16() * 2).to(h.dtype), h), "goes through to_dtype"),
    "condition": (lambda h, x, _: (torch.where(h > x, -h, x), h), "goes through gt"),
    "quotient": (lambda h, x, _: (x / h, h), "goes through"),
}


def told(step, dtype=torch.float32, T=300, lanes=37):
    p = randn(lanes).to(dtype)
    with compiled_for_gpu(), torch.no_grad():
        init, xs = randn(lanes).to(dtype), randn(T, lanes).to(dtype)
        return str(explain(lambda h, x: step(h, x, p), init, xs))


KIND = "one Triton kernel, parallel in time"


@pytest.mark.parametrize("name", DECLINED)
def test_carries_that_are_not_affine_are_not(name):
    step, reason = DECLINED[name]
    text = told(step)
    assert f"not {KIND}" in text and reason in text, text


def test_the_choice():
    recurrence = gpu_cells.recurrence
    assert f"{KIND}; 300 steps" in told(recurrence)
    most = parallel.WARP * serving.MULTIPROCESSORS
    assert f"{KIND}; 256 steps" in told(recurrence, T=256, lanes=most)
    few = "255 steps are few: it is for 256 and more"
    assert f"not {KIND}: {few}" in told(recurrence, T=255)
    many = f"{most + 1} lanes are many: it is for up to {most}"
    assert f"not {KIND}: {many}" in told(recurrence, T=256, lanes=most + 1)
    half = "carry 0 is of torch.bfloat16"
    assert f"not {KIND}: {half}" in told(recurrence, dtype=torch.bfloat16)
    with using_options(parallel_in_time=False):
        assert f"not {KIND}: parallel_in_time is switched off" in told(recurrence)


def test_more_values_than_registers():
    def all_of_all(c, x, _):
        a, b, c = c
        return (a + b + x, b + c + x, a - c + x), a

    with compiled_for_gpu(), torch.no_grad():
        text = str(explain(lambda c, x: all_of_all(c, x, None), (randn(5),) * 3, randn(300, 5)))
    assert f"{KIND}; 300 steps" in text

    def four(c, x, _):
        return tuple(0.1 * sum(c[:k] + c[k + 1 :]) + x for k in range(4)), x

    with compiled_for_gpu(), torch.no_grad():
        text = str(explain(lambda c, x: four(c, x, None), (randn(5),) * 4, randn(300, 5)))
    assert "its steps compose in 20 values, over 12" in text
