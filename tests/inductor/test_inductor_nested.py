"""A scan in a scan under Inductor: the inner one writes where the outer one wants its results."""

from __future__ import annotations

import pytest
import torch
from cells import Draw
from oracle import assert_same, gradients, loop
from torch._inductor.utils import run_and_get_code
from wrappers import run_and_count_loops

from torch_scan_hop import scan
from torch_scan_hop.inductor import watch
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.torch_version

N = 7
DRAW = Draw(torch.float32)
W = DRAW.normal(N, N, scale=0.3)


def lanes(h, x):
    h = torch.tanh(h) * x
    return h, h


def rows(h, x):
    h = torch.tanh(h @ W + x)
    return h, h


def inputs(T=3):
    return DRAW.normal(2, N), DRAW.normal(T, 2, N)


def outer(scan_, step):
    def cell(carry, x):
        a, b, c = carry
        last, ys = scan_(step, a + b, torch.stack([x, x * 0.5]))
        other, _ = scan_(step, c, torch.stack([x, -x, x]), reverse=True)
        # one result in two carries; a result that is a y, too; a carry that goes round
        return (last, last, other), (ys, other, last * 2)

    return cell


def run(scan_, step, h, xs):
    return scan_(outer(scan_, step), (h, h * 2, h * 3), xs)


@pytest.mark.parametrize(
    ("one_kernel", "cpp_wrapper"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("step", [lanes, rows])
def test_values_and_gradients(step, one_kernel, cpp_wrapper):
    h, xs = inputs()
    given = [h.requires_grad_(), xs.requires_grad_()]

    def fn(h, xs):
        return run(scan, step, h, xs)

    with using_options(one_kernel=one_kernel):
        compiled = torch.compile(fn, fullgraph=True, options={"cpp_wrapper": cpp_wrapper})
        got, forward_loops = run_and_count_loops(compiled, h, xs)
        expected = run(loop, step, h, xs)
        assert_same(got, expected, 1e-4)
        actual, backward_loops = run_and_count_loops(gradients, got, given)
        assert_same(actual, gradients(expected, given), 1e-4)
    # the outer loop, and those of the two inner scans where they are no kernels
    assert forward_loops == backward_loops == [1 if one_kernel else 3]


@pytest.mark.parametrize("step", [lanes, pytest.param(rows, marks=pytest.mark.slow)])
def test_any_trip_count(step):
    compiled = torch.compile(lambda h, xs: run(scan, step, h, xs), fullgraph=True)

    def run_all():
        for T in (4, 2, 5):
            h, xs = inputs(T)
            torch._dynamo.mark_dynamic(xs, 0)
            assert_same(compiled(h, xs), run(loop, step, h, xs), 1e-4)

    _, n_loops = run_and_count_loops(run_all)
    assert n_loops == [1]


def test_a_kernel_writes_its_last_carry_where_the_outer_loop_reads_it():
    def fn(h, xs):
        return scan(lambda h, x: (scan(lanes, h, x)[0], None), h, xs)

    h, xs = DRAW.normal(2, N), DRAW.normal(3, 4, 2, N)
    got, (code,) = run_and_get_code(torch.compile(fn, fullgraph=True), h, xs)
    assert_same(got, loop(lambda h, x: (loop(lanes, h, x)[0], None), h, xs), 1e-4)
    lines = code.split("def call(")[1].splitlines()
    assert len([line for line in lines if line.strip().startswith("cpp_")]) == 1


@pytest.mark.parametrize("one_kernel", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "read",
    [
        lambda h: h.cumsum(1),
        lambda h: h.t() @ h,
        pytest.param(lambda h: h.sort(1).values, marks=pytest.mark.slow),
    ],
)
def test_what_an_inner_scan_writes_to_its_place_can_be_read(read, one_kernel):
    """By an operator that wants memory, not a value at an index: it is the outer scan's, too."""

    def fn(run):
        def step(h, x):
            h, ys = run(rows, h, x)
            return h, (ys, read(h), read(ys[0]))

        return lambda h, xs: run(step, h, xs)

    h, xs = inputs()
    given = [h.requires_grad_(), xs.requires_grad_()]
    with using_options(one_kernel=one_kernel):
        got, expected = torch.compile(fn(scan), fullgraph=True)(h, xs), fn(loop)(h, xs)
        assert_same(got, expected, 1e-4)
        assert_same(gradients(got, given), gradients(expected, given), 1e-3)


INNER = {
    "product of the carry": lambda h, x: torch.tanh(h @ W + x),
    "carry at other lanes": lambda h, x: torch.tanh(h.flip(-1) @ W + x * h.flip(-1)),
    "two products": lambda h, x: torch.tanh(torch.tanh(h @ W) @ W + x * h),
    "lanes": lambda h, x: torch.tanh(h * 0.5 + x),
}


@pytest.mark.parametrize(
    "inner",
    [pytest.param(n, marks=pytest.mark.slow) if n == "two products" else n for n in INNER],
)
def test_the_last_carry_of_an_inner_scan_lives_within_the_outer_stack(inner, monkeypatch):
    """It is the outer scan's y: each step of that has it at another place of one buffer."""
    kernels = []
    monkeypatch.setattr(watch, "tell", lambda call, kernel, *_: kernels.append(kernel))

    def fn(run):
        def step(h, x):
            last, _ = run(lambda h, x: (INNER[inner](h, x), None), h, torch.stack([x, -x]))
            return 0.5 * last.flip(-1), last

        return lambda h, xs: run(step, h, xs)

    h, xs = inputs(5)
    given = [h.requires_grad_(), xs.requires_grad_()]
    got, expected = torch.compile(fn(scan), fullgraph=True)(h, xs), fn(loop)(h, xs)
    assert_same(got, expected, 1e-5)
    assert_same(gradients(got, given), gradients(expected, given), 1e-4)
    assert None in kernels  # the outer scan is a loop
    assert any(kernels)  # the inner one is a kernel


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_sizes_within_a_step_are_no_stacks(backend):
    """With symbolic sizes, the backward's work behind the loop reads a size of the loop."""

    def model(scan_, xs, w, u, v):
        def word(h, x):
            h = torch.tanh(x @ w + h @ u)
            return h, h

        def sentence(s, x):
            h, hs = scan_(word, s * 0.5, x)
            weights = (hs * s).sum(-1, keepdim=True).softmax(0)
            s = torch.tanh((weights * hs).sum(0) @ v + s)
            return s, (h, weights)

        return scan_(sentence, torch.zeros_like(xs[0, 0]), xs)

    draw = Draw(torch.float64)
    values = [draw.normal(*s).requires_grad_() for s in ((3, 5, 2, 4), (4, 4), (4, 4), (4, 4))]
    compiled = torch.compile(
        lambda *values: model(scan, *values), backend=backend, fullgraph=True, dynamic=True
    )
    got, expected = compiled(*values), model(loop, *values)
    assert_same(got, expected)
    assert_same(gradients(got, values), gradients(expected, values))
