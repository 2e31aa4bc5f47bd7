"""Pointwise bodies under Inductor: one kernel with the loop over time inside."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, gradients, loop
from oracle import randn_of_shape as randn
from torch._inductor.utils import run_and_get_code
from wrappers import loops, run_and_count_loops

from torch_scan_hop import scan
from torch_scan_hop.inductor.cpu import sharing
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.torch_version


A, U = randn(37).sigmoid(), randn(37) * 0.1


def recurrence(h, x):
    h = A * h + x
    return h, h


def gated(h, x):
    g = torch.sigmoid(x + U * h)
    h = g * h + (1 - g) * torch.tanh(x - U * h)
    return h, (h, g)


def two_carries(c, x):
    m, v = c
    m = 0.9 * m + 0.1 * x
    v = torch.where(x > 0, v * 0.5, v + x * x)
    return (m, v), m / (v.abs().sqrt() + 1)


def counter(c, x):
    n, h = c
    h = torch.where(n % 2 == 0, h + x, h)
    return (n + 1, h), (n * 2, h.clamp(min=0))


def double(h, x):
    h = torch.erf(h) + x.exp()
    return h, h


def shared_gate(h, x):
    h = h * torch.sigmoid(x["gate"]) + x["u"]
    return h, h


def constant_result(h, x):
    return h * 2 + x, torch.full_like(h, 3.0)


def shifted_x(h, x):
    h = h * 0.5 + torch.nn.functional.pad(x[..., :-1], (1, 0))
    return h, torch.nn.functional.pad(h * 2, (0, 0)) + h * 2


def rotates(h, x):
    h = x * h + x
    return h, h.abs()


ROW = (3, 37)
CASES = {
    "recurrence": (recurrence, torch.zeros(37), randn(6, 37)),
    "rows": (recurrence, torch.zeros(ROW), randn(6, *ROW)),
    "gated": (gated, randn(*ROW), randn(6, *ROW)),
    "two carries": (two_carries, (randn(37), randn(37)), randn(6, 37)),
    "counter": (counter, (torch.zeros(37, dtype=torch.int64), randn(37)), randn(6, 37)),
    "float64": (double, randn(20).double(), randn(6, 20).double()),
    "broadcast x": (shared_gate, randn(*ROW), {"gate": randn(6, 3, 1), "u": randn(6, *ROW)}),
    "transposed x": (recurrence, randn(*ROW), randn(37, 3, 6).permute(2, 1, 0)),
    "scalar": (double, torch.tensor(0.5), randn(6) * 0.1),
    "shifted x": (shifted_x, randn(*ROW), randn(6, *ROW)),
    "constant result": (constant_result, randn(37), randn(6, 37)),
    "complex": (
        rotates,
        torch.complex(randn(37), randn(37)),
        torch.complex(randn(6, 37), randn(6, 37)) / 2,
    ),
    "one element": (double, randn(1), randn(6, 1) * 0.1),
}


#: Run backwards in time, too: several carries, and xs with strides or offsets of their own. The
#: direction is one index of xs and ys whatever the step is; with the others it is a slow test.
REVERSED = {"two carries", "counter", "transposed x", "shifted x"}


def _cases_in_both_directions():
    for case in CASES:
        for reverse in (False, True):
            is_slow = reverse and case not in REVERSED
            yield pytest.param(case, reverse, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("case", "reverse"), list(_cases_in_both_directions()))
def test_one_kernel_computes_the_loop(case, reverse):
    step, init, xs = CASES[case]

    def fn(init, xs):
        return scan(step, init, xs, reverse=reverse)

    with torch.no_grad():
        got, codes = run_and_get_code(torch.compile(fn, fullgraph=True), init, xs)
    assert_same(got, loop(step, init, xs, reverse=reverse), 1e-5)
    assert loops(codes)[-1] == 0


def test_the_option_turns_it_off():
    step, init, xs = CASES["two carries"]
    with torch.no_grad(), using_options(one_kernel=False):
        run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
        got, codes = run_and_get_code(run, init, xs)
    assert_same(got, loop(step, init, xs), 1e-5)
    assert loops(codes)[-1] == 1


@pytest.mark.parametrize(
    "case",
    ["counter", *(pytest.param(c, marks=pytest.mark.slow) for c in ("gated", "broadcast x"))],
)
def test_the_cpp_wrapper(case):
    step, init, xs = CASES[case]
    run = torch.compile(
        lambda init, xs: scan(step, init, xs), fullgraph=True, options={"cpp_wrapper": True}
    )
    got, n_loops = run_and_count_loops(run, init, xs)
    assert_same(got, loop(step, init, xs), 1e-5)
    assert n_loops[-1] == 0


def test_any_trip_count_and_width():
    run = torch.compile(lambda h, xs: scan(lambda h, x: (h * x, h + x), h, xs), dynamic=True)

    def run_all():
        for steps, width in ((4, 5), (9, 64), (2, 33)):
            h, xs = randn(width), randn(steps, width)
            assert_same(run(h, xs), loop(lambda h, x: (h * x, h + x), h, xs), 1e-5)

    _, n_loops = run_and_count_loops(run_all)
    assert set(n_loops) == {0}


@pytest.mark.parametrize(("lanes", "has_threads"), [(4, False), (20_000, True)])
def test_few_lanes_are_not_handed_to_threads(lanes, has_threads):
    """OpenMP would keep the carry of the only thread with work in memory between two steps."""

    def step(h, x):
        h = 0.5 * h + x
        return h, h

    init, xs = torch.zeros(lanes), randn(200_000 // lanes, lanes)
    with torch.no_grad(), torch._inductor.config.patch({"cpp.threads": 2}):
        run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
        got, codes = run_and_get_code(run, init, xs)
    assert loops(codes) == [0] and ("#pragma omp" in codes[0]) == has_threads
    assert_same(got, loop(step, init, xs), 1e-4)


def decays(h, x):
    h = 0.5 * h + x
    return h, h


WEIGHT = randn(16, 16) / 4
SHARED = {
    "lanes": (decays, torch.zeros(1000), lambda T: randn(T, 1000)),
    "rows": (
        lambda h, x: (torch.tanh(h @ WEIGHT + x),) * 2,
        torch.zeros(9, 16),
        lambda T: randn(T, 9, 16),
    ),
}


@pytest.mark.parametrize("kernel", SHARED)
@pytest.mark.parametrize("late", [False, True])
def test_threads_share_what_is_worth_waking_them(kernel, late, monkeypatch):
    """Of a dynamic T that is known at run time only; once they are late, one thread goes on."""
    step, init, xs_of = SHARED[kernel]
    if late:
        monkeypatch.setattr(sharing, "MARGIN_NANOSECONDS", -1)
        monkeypatch.setattr(sharing, "NANOSECONDS_PER_RESULT", 0)
    run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch({"cpp.threads": 2}):
        xs = xs_of(50)
        torch._dynamo.mark_dynamic(xs, 0)
        _, codes = run_and_get_code(run, init, xs)
        assert loops(codes) == [0]
        assert "#pragma omp parallel num_threads(2) if(sharing.shares)" in codes[0]
        for steps in (2, 200, 200, 3, 200):
            xs = xs_of(steps)
            assert_same(run(init, xs), loop(step, init, xs), 1e-4)


def test_a_small_kernel_has_no_threads():
    xs = randn(20, 64)
    with torch.no_grad(), torch._inductor.config.patch({"cpp.threads": 2}):
        run = torch.compile(lambda init, xs: scan(decays, init, xs), fullgraph=True)
        got, codes = run_and_get_code(run, torch.zeros(64), xs)
    assert loops(codes) == [0] and "#pragma omp" not in codes[0]
    assert_same(got, loop(decays, torch.zeros(64), xs), 1e-5)


def test_training_is_a_kernel_each_way():
    x = randn(6, 37).requires_grad_()

    def fn(x):
        return scan(gated, torch.zeros(37), x)

    def train(run):
        return gradients(run(x), [x])

    got, codes = run_and_get_code(train, torch.compile(fn, fullgraph=True))
    assert_same(got, gradients(loop(gated, torch.zeros(37), x), [x]), 1e-4)
    assert loops(codes) == [0, 0]


def test_a_complex_weight_of_all_rows_leaves_the_loop():
    """Its gradient is a sum over rows, and Inductor writes complex additions its own way."""
    lam = torch.complex(randn(8), randn(8)).requires_grad_()
    x = torch.complex(randn(6, 3, 8), randn(6, 3, 8)).requires_grad_()
    init = torch.zeros(3, 8, dtype=torch.complex64)

    def cell(h, x):
        h = 0.5 * lam * h + x
        return h, h

    def train(run):
        return gradients(run(init, x), [lam, x])

    got, codes = run_and_get_code(
        train, torch.compile(lambda h, xs: scan(cell, h, xs), fullgraph=True)
    )
    assert_same(got, train(lambda h, xs: loop(cell, h, xs)), 1e-4)
    assert loops(codes) == [0, 0]


def test_a_reduction_of_stacks_leaves_the_loop():
    """So that what remains is a kernel: the sums of a state space model's output, and theirs."""
    xs = {k: randn(6, 3, 8, 4).requires_grad_() for k in "abc"}

    def cell(h, x):
        h = x["a"] * h + x["b"]
        return h, (h * x["c"][:, :1]).sum(-1)

    def train(run):
        return gradients(run(torch.zeros(3, 8, 4), xs), list(xs.values()))

    got, codes = run_and_get_code(
        train, torch.compile(lambda h, xs: scan(cell, h, xs), fullgraph=True)
    )
    assert_same(got, train(lambda h, xs: loop(cell, h, xs)), 1e-4)
    assert loops(codes) == [0, 0]


@pytest.mark.parametrize(
    "step",
    [
        lambda h, x: (h.roll(1) + x, h),
        lambda h, x: (h.flip(0) * x, h),
        lambda h, x: (h.cumsum(0) * x, h.sum()),
        lambda h, x: (h * x, torch.stack([h, x])),
    ],
    ids=["roll", "flip", "reductions", "other shape"],
)
def test_lanes_that_are_not_independent_are_a_counted_loop(step):
    """Unless all of them are one lane of a small matrix (``test_matrices``)."""
    h, xs = randn(67), randn(6, 67)
    with using_options(matrices=False):
        got, codes = run_and_get_code(
            torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True), h, xs
        )
    assert_same(got, loop(step, h, xs), 1e-4)
    assert loops(codes)[-1] == 1
