"""Kernels of few lanes, and of lanes that fill no vector: in registers, or with a mask."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, gradients, loop
from oracle import randn_of_shape as randn
from torch._inductor.utils import run_and_get_code
from wrappers import loops

from torch_scan_hop import scan
from torch_scan_hop._torch.inductor_cpp import FEWEST_MASKED, vector_lanes
from torch_scan_hop.inductor import spans

pytestmark = pytest.mark.torch_version

VARIABLES = "scan_buf_held_"  # of the function, that hold the carries
WIDTH = vector_lanes() or 16
STEPS = 5


def average(h, x):
    h = 0.9 * h + 0.1 * x
    return h, h


def gated(c, x):
    h, g = c
    h, g = torch.sigmoid(x + h) * g, torch.tanh(h) - x
    return (h, g), h * g


def counter(c, x):
    n, h = c
    h = torch.where(n % 2 == 0, h + x, h.exp() * 0.1)
    return (n + 1, h), (n * 2, h.clamp(min=0))


def double(h, x):
    h = torch.erf(h) + x.double().exp()
    return h, h


def init_of(step, lanes):
    return {
        average: lambda: randn(lanes),
        gated: lambda: (randn(lanes), randn(lanes)),
        counter: lambda: (torch.arange(lanes), randn(lanes)),
        double: lambda: randn(lanes).double(),
    }[step]()


def has_masked_lanes(code):
    """Whether a vector of the kernel's is loaded or stored in part."""
    return any(
        f", static_cast<int64_t>({n}L))" in line
        for n in range(1, WIDTH)
        for line in code.split("\n")
        if "loadu(" in line or ".store(" in line
    )


FEW = {1, WIDTH - 1, 2 * WIDTH + 5}
LANES = sorted({2, 4, 5, WIDTH, WIDTH + 1} | FEW)
VARIANTS = [
    pytest.param(n, reverse, marks=() if n in FEW and not reverse else pytest.mark.slow)
    for n in LANES
    for reverse in (False, True)
]


@pytest.mark.parametrize(("lanes", "reverse"), VARIANTS)
@pytest.mark.parametrize("step", [average, gated, counter, double])
def test_any_number_of_lanes(step, lanes, reverse):
    init, xs = init_of(step, lanes), randn(STEPS, lanes)
    with torch.no_grad():
        run = torch.compile(lambda init, xs: scan(step, init, xs, reverse=reverse), fullgraph=True)
        got, codes = run_and_get_code(run, init, xs)
    assert_same(got, loop(step, init, xs, reverse=reverse), 1e-5)
    assert loops(codes)[-1] == 0
    masks = step is gated and lanes % WIDTH >= FEWEST_MASKED
    assert has_masked_lanes(codes[-1]) == (masks and vector_lanes() > 0)
    assert (VARIABLES in codes[-1]) == (lanes < WIDTH and not masks)


@pytest.mark.parametrize(
    "lanes", [1, pytest.param(3, marks=pytest.mark.slow), WIDTH - 1, WIDTH + 6]
)
@pytest.mark.parametrize("step", [average, gated])
def test_gradients(step, lanes):
    init, xs = init_of(step, lanes), randn(STEPS, lanes).requires_grad_()

    def train(run):
        return gradients(run(init, xs), [xs])

    got, codes = run_and_get_code(
        train, torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
    )
    assert_same(got, train(lambda init, xs: loop(step, init, xs)), 1e-4)
    assert loops(codes) == [0, 0]


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_span_begins_where_the_one_before_has_ended(steps, monkeypatch):
    monkeypatch.setattr(spans, "WORK_PER_CALL", 3 * 4 * 2)  # two steps, or three
    init, xs = randn(2), randn(steps, 2)
    with torch.no_grad():
        run = torch.compile(lambda init, xs: scan(average, init, xs), fullgraph=True)
        got, codes = run_and_get_code(run, init, xs)
    assert_same(got, loop(average, init, xs), 1e-5)
    assert steps < 2 or VARIABLES in codes[-1]


def test_a_scalar_and_dimensions_of_one():
    for shape in ((), (1, 3), (3, 1, 1)):
        init, xs = randn(*shape), randn(STEPS, *shape)
        with torch.no_grad():
            run = torch.compile(lambda init, xs: scan(average, init, xs), fullgraph=True)
            got, codes = run_and_get_code(run, init, xs)
        assert_same(got, loop(average, init, xs), 1e-5)
        assert VARIABLES in codes[-1]


def test_rows_that_fill_no_vector():
    """A product's columns; what its kernel does with each of them is a nest of lanes, too."""
    width = WIDTH + 6
    weight = randn(width, width) / width

    def step(h, x):
        h = torch.tanh(h @ weight + x)
        return h, h

    init, xs = torch.zeros(3, width), randn(STEPS, 3, width)
    with torch.no_grad():
        run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
        got, codes = run_and_get_code(run, init, xs)
    assert_same(got, loop(step, init, xs), 1e-5)
    assert loops(codes)[-1] == 0
    assert has_masked_lanes(codes[-1]) == (vector_lanes() > 0)


def discounted(h, x):
    h = 0.9 * h + x
    return h, h * 2


def difference(h, x):
    """Zero, as the loop has it: h * x, rounded, less itself."""
    h = h * 0.5 + x
    product = h * x
    return product, product + -(h * x)


def cancels(h, x):
    product = h * x
    return h + x, product + -product


def integers(n, x):
    return 3 * n + 1, x * n


FUSED = {average: (1, 1), discounted: (1, 1), cancels: (0, 0)}


@pytest.mark.parametrize("step", FUSED)
def test_the_chain_of_a_small_step_is_one_instruction(step):
    """Forward and backward: the carry's product, and what is added to it."""
    init, xs = randn(1), randn(9, 1).requires_grad_()

    def train(run):
        _, ys = run(init, xs)
        return ys, *gradients(ys, [xs])

    got, codes = run_and_get_code(
        train, torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
    )
    assert_same(got, train(lambda init, xs: loop(step, init, xs)), 1e-5)
    assert tuple(min(1, code.count("std::fma")) for code in codes) == FUSED[step]
    assert step is not cancels or not got[0].any()


@pytest.mark.parametrize("step", [difference, integers])
def test_other_chains_stay_as_they_are(step):
    init, xs = torch.tensor([2]) if step is integers else randn(1), randn(9, 1)
    with torch.no_grad():
        run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
        got, codes = run_and_get_code(run, init, xs)
    assert_same(got, loop(step, init, xs), 1e-5)
    assert VARIABLES in codes[-1]
    if step is integers:
        assert "std::fma" not in codes[-1]
    else:
        assert not got[1].any()
