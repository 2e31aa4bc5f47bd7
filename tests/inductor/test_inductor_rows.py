"""Bodies with products under Inductor: one kernel, in which rows run by themselves."""

from __future__ import annotations

import functools

import pytest
import torch
from cells import GRU
from oracle import assert_same, gradients, loop
from oracle import randn_of_shape as randn
from torch._inductor.utils import run_and_get_code, run_and_get_cpp_code
from wrappers import loops, run_and_count_loops

from torch_scan_hop import scan
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.torch_version


def weight(*shape):
    return randn(*shape) * shape[0] ** -0.5


H = 24
U, U2 = weight(H, H), weight(H, H) + 0.1
GATES, BACK = weight(H, 4 * H), weight(3 * H, H)
UP, DOWN = weight(H, 40), weight(40, H)
BIAS = randn(H)


def rnn(h, x):
    h = torch.tanh(h @ U + x)
    return h, h


def transposed(h, x):
    h = torch.tanh(torch.nn.functional.linear(h, U, BIAS) + x)
    return h, h


def lstm(carry, x):
    h, c = carry
    i, f, g, o = (h @ GATES).chunk(4, -1)
    c = torch.sigmoid(f + x) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), (h, c)


def gru(h, x):
    r, z = torch.sigmoid(h @ U + x), torch.sigmoid(h @ U2)
    n = torch.tanh((r * h) @ U + x)
    h = (1 - z) * n + z * h
    return h, (h, n)


def two_layers(h, x):
    h = h + torch.relu((h + x) @ UP) @ DOWN
    return h, h.sigmoid()


def joined(h, x):
    parts = torch.cat([torch.sin(h), x, h * x], -1)
    return torch.tanh(parts @ BACK), parts


def swapped(carry, x):
    a, b = carry
    return (torch.tanh(b @ U), torch.sin(a) + x), a * b


def halves(h, x):
    left, right = h.chunk(2, -1)
    h = torch.cat([right, left], -1) * 0.5 + torch.tanh(h @ U + x)
    return h, right


def counter(carry, x):
    n, h = carry
    h = torch.where(n[:, None] % 2 == 0, torch.tanh(h @ U + x), h)
    return (n + 1, h), n


def last_stays(carry, x):
    h, before = carry
    return (torch.tanh(h @ U + before + x), h), before


def part_again(h, x):
    z = torch.sin(h)
    parts = torch.cat([z, x, z], -1)
    return torch.tanh(parts @ BACK) + z + parts[:, H // 2 : H // 2 + H], h


def cells(batch):
    x, h, h2 = randn(6, batch, H), randn(batch, H), randn(H, batch).t()
    n = torch.arange(batch)
    return {
        "rnn": (rnn, h, x),
        "linear": (transposed, h2, x),
        "lstm": (lstm, (h, h2), x),
        "gru": (gru, h, x),
        "two layers": (two_layers, h, x),
        "joined operand": (joined, h, x),
        "swapped carries": (swapped, (h, h2), x),
        "counter": (counter, (n, h), x),
        "last carry": (last_stays, (h, h2), x),
        "part again": (part_again, h, x),
        "halves": (halves, h, x),
        "transposed x": (rnn, h, randn(batch, H, 6).permute(2, 0, 1)),
    }


CELLS = list(cells(1))


def compiled(step, init, xs, **options):
    """Results, and the loops that its wrappers have."""
    run = torch.compile(lambda init, xs: scan(step, init, xs, **options), fullgraph=True)
    got, n_loops = run_and_count_loops(run, init, xs)
    return got, sum(n_loops)


def _cells_and_batches():
    """Blocks of rows and a row more for each cell; fewer rows, or whole blocks, for some."""
    some = {("lstm", 2), ("lstm", 16), ("joined operand", 5)}
    for cell in CELLS:
        for batch in (2, 5, 16, 33, 70):
            is_slow = batch != 33 and (cell, batch) not in some
            yield pytest.param(cell, batch, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("cell", "batch"), list(_cells_and_batches()))
def test_one_kernel_computes_the_loop(cell, batch):
    step, init, xs = cells(batch)[cell]
    got, n_loops = compiled(step, init, xs)
    assert_same(got, loop(step, init, xs), 1e-4)
    assert n_loops == 0


@pytest.mark.parametrize("cell", ["lstm", "gru", "joined operand"])
def test_one_row_and_reverse(cell):
    step, init, xs = cells(1)[cell]
    got, n_loops = compiled(step, init, xs, reverse=True)
    assert_same(got, loop(step, init, xs, reverse=True), 1e-4)
    assert n_loops == 0


@pytest.mark.parametrize("width", [1, 7, 16, 100])
def test_any_width_of_a_product(width):
    up, down = weight(H, width), weight(width, H)

    def step(h, x):
        wide = torch.sigmoid(h @ up)
        return torch.tanh(wide @ down + x), wide

    h, xs = randn(9, H), randn(6, 9, H)
    got, n_loops = compiled(step, h, xs)
    assert_same(got, loop(step, h, xs), 1e-4)
    assert n_loops == 0


@pytest.mark.parametrize("cell", ["lstm", "gru", "joined operand", "halves"])
def test_gradients(cell):
    step, init, xs = cells(5)[cell]
    weights = [w.clone().requires_grad_() for w in (U, U2, GATES, BACK)]
    names = ("U", "U2", "GATES", "BACK")
    xs = xs.clone().requires_grad_()

    def train(run):
        before = [globals()[n] for n in names]
        globals().update(zip(names, weights, strict=True))
        try:
            used = [w for n, w in zip(names, weights, strict=True) if n in step.__code__.co_names]
            return gradients(run(init, xs), [xs, *used])
        finally:
            globals().update(zip(names, before, strict=True))

    run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
    got, n_loops = run_and_count_loops(train, run)
    assert_same(got, train(lambda init, xs: loop(step, init, xs)), 1e-3)
    # the gradient of a weight of two products is summed step by step
    assert n_loops == [0, 1 if cell == "gru" else 0]


def test_training_is_a_kernel_each_way():
    x = randn(6, 5, H).requires_grad_()
    u = U.clone().requires_grad_()
    init = (randn(5, H), randn(5, H))

    def cell(carry, x):
        h, c = carry
        c = torch.sigmoid(c + x) * c + torch.tanh(h @ u)
        return (c.sin(), c), c

    def train(run):
        return gradients(run(x), [x, u])

    got, codes = run_and_get_code(
        train, torch.compile(lambda x: scan(cell, init, x), fullgraph=True)
    )
    assert_same(got, train(lambda x: loop(cell, init, x)), 1e-4)
    assert loops(codes) == [0, 0]


def test_a_gradient_summed_over_rows_is_summed_after_the_loop():
    problem = GRU().problem(torch.float32, 6, 5, H, H)
    wanted = list(problem.params.values())

    def train(run):
        return gradients(run(problem.init, problem.xs), wanted)

    run = torch.compile(lambda init, xs: scan(problem.combine_fn, init, xs), fullgraph=True)
    got, codes = run_and_get_code(train, run)
    assert_same(got, train(lambda init, xs: loop(problem.combine_fn, init, xs)), 1e-4)
    assert loops(codes) == [0, 0]


def test_the_option_turns_it_off():
    step, init, xs = cells(5)["lstm"]
    with using_options(one_kernel=False):
        got, n_loops = compiled(step, init, xs)
    assert_same(got, loop(step, init, xs), 1e-4)
    assert n_loops == 1


@pytest.mark.parametrize("cell", ["lstm", pytest.param("joined operand", marks=pytest.mark.slow)])
def test_the_cpp_wrapper(cell):
    step, init, xs = cells(5)[cell]
    run = torch.compile(
        lambda init, xs: scan(step, init, xs), fullgraph=True, options={"cpp_wrapper": True}
    )
    got, n_loops = run_and_count_loops(run, init, xs)
    assert_same(got, loop(step, init, xs), 1e-4)
    assert n_loops[-1] == 0


@pytest.mark.works("AOTInductor")
@pytest.mark.parametrize(
    "is_dynamic",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["fixed T", "any T"],
)
def test_ahead_of_time(is_dynamic):
    class Net(torch.nn.Module):
        def forward(self, h, xs):
            return scan(rnn, h, xs)

    h, xs = randn(5, H), randn(6, 5, H)
    shapes = (None, {0: torch.export.Dim("T", min=2, max=100)}) if is_dynamic else None
    with torch.no_grad():
        program = torch.export.export(Net(), (h, xs), dynamic_shapes=shapes)
        package, code = run_and_get_cpp_code(torch._inductor.aoti_compile_and_package, program)
        run = torch._inductor.aoti_load_package(package)
        for T in (3, 6, 17) if is_dynamic else (6,):
            xs = randn(T, 5, H)
            assert_same(run(h, xs), loop(rnn, h, xs), 1e-4)
    assert "scan_buf_product" in code and loops([code]) == [0]


def test_any_trip_count_and_batch():
    run = torch.compile(lambda h, xs: scan(rnn, h, xs), fullgraph=True)

    def run_all():
        for steps, batch in ((4, 5), (9, 64), (2, 33)):
            h, xs = randn(batch, H), randn(steps, batch, H)
            torch._dynamo.mark_dynamic(h, 0)
            torch._dynamo.mark_dynamic(xs, (0, 1))
            assert_same(run(h, xs), loop(rnn, h, xs), 1e-4)

    _, n_loops = run_and_count_loops(run_all)
    assert n_loops == [0]


def test_a_scan_in_blocks():
    def step(h, x):
        h = torch.tanh(h @ U + x @ GATES[:, :H])
        return h, h

    h, xs = randn(16, H), randn(2048, 16, H)
    got, n_loops = compiled(step, h, xs)
    assert_same(got, loop(step, h, xs), 1e-4)
    assert n_loops == 1  # over blocks


#: Each ends the search for rows at another place, in another way. Twins of theirs are slow tests.
DEPENDENT = {
    "roll": lambda h, x: (torch.tanh(h.roll(1, 0) @ U + x), h),
    "first row again": lambda h, x: (torch.tanh(h[:1].expand(5, -1) @ U) + x, h),
    "halves of rows": lambda h, x: (torch.tanh(h.reshape(-1, H // 2)[:5] @ U[: H // 2]) + x, h),
    "first row": lambda h, x: (torch.tanh(h @ U + h[:1]) + x, h),
    "sum": lambda h, x: (torch.tanh(h @ U) - h.sum(0), h),
    "weight of the carry": lambda h, x: (torch.tanh(h @ (U + h.mean())), h),
}
TWINS = {
    "rolled y": lambda h, x: (torch.tanh(h @ U) + h.roll(1, 0), h),
    "flip": lambda h, x: (torch.tanh(h @ U) + h.flip(0), h),
    "scan": lambda h, x: (torch.tanh(h @ U) + h.cumsum(1) + x, h),
    "weight of x": lambda h, x: (torch.tanh(h @ x.t() @ x), h),
}


@pytest.mark.parametrize(
    "step",
    [
        *(pytest.param(step, id=name) for name, step in DEPENDENT.items()),
        *(pytest.param(step, id=name, marks=pytest.mark.slow) for name, step in TWINS.items()),
    ],
)
def test_rows_that_are_not_independent_are_a_counted_loop(step):
    h, xs = randn(5, H), randn(6, 5, H)
    with using_options(matrices=False):  # which takes all of it for one lane
        got, n_loops = compiled(step, h, xs)
    assert_same(got, loop(step, h, xs), 1e-4)
    assert n_loops == 1


def test_a_weight_that_does_not_fit_the_cache_is_a_counted_loop():
    u = weight(600, 600)
    h, xs = randn(5, 600), randn(6, 5, 600)

    def step(h, x):
        return torch.tanh(h @ u + x), h

    got, n_loops = compiled(step, h, xs)
    assert_same(got, loop(step, h, xs), 1e-4)
    assert n_loops == 1


def test_double_precision_is_not_for_rows():
    u = U.double()

    def step(h, x):
        return torch.tanh(h @ u + x), h

    h, xs = randn(5, H).double(), randn(6, 5, H).double()
    with using_options(matrices=False):
        got, n_loops = compiled(step, h, xs)
    assert_same(got, loop(step, h, xs), 1e-10)
    assert n_loops == 1


def test_tanh_is_accurate():
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.logspace(-30, 1, 4001)])
    limits = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([x, -x, limits])

    def step(h, x):
        return h + 1, torch.tanh(x + 0 * h)

    run = torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True)
    (_, (got, _)), codes = run_and_get_code(run, torch.zeros_like(x), torch.stack([x, x]))
    want = torch.tanh(x.double())
    ulp = torch.nextafter(want.float().abs(), torch.tensor(2.0)) - want.float().abs()
    error = (got.double() - want).abs() / ulp
    assert error[: -len(limits)].max() <= 2
    torch.testing.assert_close(got[-len(limits) :], limits.tanh(), equal_nan=True, rtol=0, atol=0)
    assert "tanh(" not in codes[-1].split("def call(")[0]


def test_a_weight_that_a_step_puts_together():
    """Its packing is several kernels, and none may name a variable of another one."""
    a, b = weight(15, 15), weight(15, 15)

    def step(h, x):
        h = torch.tanh(torch.cat([h, x], -1) @ torch.cat([a, b], 0))
        return h, h

    init, xs = randn(4, 15), randn(6, 4, 15)
    with using_options(hoist_invariant=False):
        run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
        result, found = run_and_count_loops(run, init, xs)
    assert_same(result, loop(step, init, xs), 1e-5)
    assert found == [0]


@pytest.mark.parametrize("rows", [0, 3])
def test_a_stack_of_which_nothing_is_read(rows):
    """Inductor takes a read of no elements for none: an empty batch, or a part of length zero."""
    given = [weight(H, H), weight(H, H), randn(5, rows, H), randn(rows, H)]
    given = [g.requires_grad_() for g in given]

    def program(scan, w, u, xs, init):
        def cell(h, x):
            h = torch.tanh(x @ w + h @ u)
            return h, h

        h, hs = scan(cell, init, xs)
        return h.sin(), hs[:, :0].exp() if rows else hs.sin()

    compiled = torch.compile(functools.partial(program, scan), fullgraph=True)
    got, expected = compiled(*given), program(loop, *given)
    assert_same(got, expected, 1e-5)
    assert_same(gradients(got, given), gradients(expected, given), 1e-4)
