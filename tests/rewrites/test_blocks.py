"""Work before and after the loop is done block by block, and carries into steps stay in place."""

from __future__ import annotations

import inspect

import pytest
import torch
from allocator import peak_of_allocator
from cells import CELLS
from oracle import Variant, assert_same, check
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop import scan
from torch_scan_hop.body.carries_in import CarriesIn, in_graph
from torch_scan_hop.eager import run as dense
from torch_scan_hop.inductor import rewriter
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import Planner, blocks, current_options, using_options
from torch_scan_hop.signature import Signature


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of four steps; gives the lengths of those that ran or were compiled."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(blocks, "MIN_BLOCK", 4)
    lengths = []

    def recorded(function):
        parameters = inspect.signature(function)

        def call(*args, **kwargs):
            lengths.append(parameters.bind(*args, **kwargs).arguments["length"])
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(dense, "run_in_blocks", recorded(blocks.run_in_blocks))
    monkeypatch.setattr(rewriter, "scan_of_blocks", recorded(blocks.scan_of_blocks))
    return lengths


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_eager(cell, reverse, short_blocks):
    p = CELLS[cell].problem(torch.float64, T=11, B=2)
    check(p.combine_fn, p.init, p.xs, params=list(p.params.values()), reverse=reverse)
    assert set(short_blocks) == {4}


SLOW = pytest.mark.slow


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("cell", "reverse"),
    [
        ("lstm", False),
        ("linear_recurrence", True),
        pytest.param("lstm", True, marks=SLOW),
        pytest.param("linear_recurrence", False, marks=SLOW),
        pytest.param("gru", False, marks=SLOW),
    ],
)
def test_inductor(cell, reverse, short_blocks):
    p = CELLS[cell].problem(torch.float64, T=12, B=2)
    params = list(p.params.values())
    inductor = Variant("inductor")
    with using_options(sums_per_lane=False):
        check(p.combine_fn, p.init, p.xs, params=params, reverse=reverse, variant=inductor)
    assert short_blocks and set(short_blocks) == {4}


@pytest.mark.torch_version
@pytest.mark.parametrize("cell", [pytest.param("lstm", marks=SLOW), "linear_recurrence"])
def test_cpp_wrapper(cell, short_blocks):
    p = CELLS[cell].problem(torch.float64, T=12, B=2)
    cpp_wrapper = torch._inductor.config.patch(cpp_wrapper=True)
    with cpp_wrapper, using_options(sums_per_lane=False):
        check(
            p.combine_fn,
            p.init,
            p.xs,
            params=list(p.params.values()),
            variant=Variant("inductor"),
        )
    assert short_blocks


@pytest.mark.torch_version
def test_a_dynamic_batch_is_no_reason_to_compile_again(short_blocks):
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def cell(h, x):
        h = torch.tanh(x @ w + h)
        return h, h

    run = torch.compile(lambda h, xs: scan(cell, h, xs)[1], fullgraph=True)
    for batch in (4, 5, 9):
        h, xs = torch.zeros(batch, 3).double(), torch.randn(12, batch, 3, dtype=torch.float64)
        for t in (h, xs):
            torch._dynamo.mark_dynamic(t, t.ndim - 2)
        ys = run(h, xs)
        (gradient,) = torch.autograd.grad(ys.square().sum(), w)
        _, expected = scan_loop(cell, h, xs, 12, False)
        assert_same(ys, expected)
        assert_same(gradient, torch.autograd.grad(expected.square().sum(), w)[0])
    assert short_blocks == [4, 4]  # forward and backward, once


@pytest.mark.parametrize(
    ("trip_count", "length"),
    [(12, 4), (15, 5), (14, 7), (35, 5), (11, 11), (26, 2), (23, 23), (7, 7)],
)
def test_inductor_takes_a_divisor_near_a_block_or_no_blocks(trip_count, length, short_blocks):
    body, signature = adding_products()
    plan = Planner(body, signature, current_options(), pointwise_pays=False).plan()
    assert blocks.whole_block_length(plan, trip_count) == length
    with using_options(blocks=False):
        assert blocks.whole_block_length(plan, trip_count) == trip_count


@pytest.mark.parametrize(
    ("per_step", "length"), [(2**11, 125), (2**14, 125), (2**17, 16), (2**18, 8), (2**22, 2)]
)
@pytest.mark.parametrize("multiplies", [False, True])
def test_a_block_of_large_steps_fits_the_cache(per_step, length, multiplies):
    """But for products, which pack their weights once for each block."""

    def step(h, x, w):
        h = torch.tanh(h + torch.sin(x) @ w if multiplies else h + torch.sin(x) * w)
        return h, h

    weight = torch.randn(3, 3) if multiplies else torch.randn(3)
    body = make_fx(step)(torch.randn(2, 3), torch.randn(2, 3), weight)
    plan = Planner(body, Signature(1, 1, 1), current_options(), pointwise_pays=True).plan()
    expected = max(length, 16) if multiplies else length
    assert blocks.block_length(plan, 1000, stacked=per_step) == expected


def test_what_blocks_add_to_is_no_larger_than_their_stacks(short_blocks):
    """A weight's gradient is read and written by each block."""
    given = torch.randn(2, 3), torch.zeros(3, 3), torch.randn(2, 3), torch.randn(3, 3)
    body = make_fx(lambda h, sums, x, w: (torch.tanh(h + x @ w), sums + h.t() @ x))(*given)
    plan = Planner(body, Signature(2, 1, 1), current_options(), pointwise_pays=False).plan()
    assert plan.accumulated_bytes == 3 * 3 * 4
    length = blocks.block_length(plan, 1000)
    plan.__dict__["accumulated_bytes"] = 70 * plan.stacked_bytes
    assert blocks.block_length(plan, 1000) == 70 > length
    assert blocks.block_length(plan, 100) == 100


def adding_products():
    """``h + x @ w``, of which the product leaves the loop."""
    tensors = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 3)
    return make_fx(lambda h, x, w: (h + x @ w, h + 1))(*tensors), Signature(1, 1, 1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_carries_in(steps, reverse):
    stack, init = torch.arange(1, steps + 1), torch.tensor(0)
    carries = CarriesIn(stack, init, reverse)
    rows = [*range(2, steps + 1), 0] if reverse else list(range(steps))
    expected = torch.tensor(rows)
    assert carries.whole().equal(expected)
    for start in range(steps):
        for stop in range(start + 1, steps + 1):
            assert carries[start:stop].equal(expected[start:stop])
    for length in (n for n in range(1, steps + 1) if steps % n == 0):
        parts = zip(stack.split(length), carries.edges(length), strict=True)
        joined = [CarriesIn(part, edge, reverse).whole() for part, edge in parts]
        assert torch.cat(joined).equal(expected)


def test_carries_in_of_no_steps():
    assert CarriesIn(torch.empty(0), torch.tensor(1.0), False).whole().shape == (0,)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_operator_of_a_backward_graph_can_be_transformed(reverse):
    stack, init = torch.randn(5, 2).double(), torch.randn(2).double()

    def operator(stack, init):
        return in_graph(CarriesIn(stack, init, reverse), stack)

    def whole(stack, init):
        return CarriesIn(stack, init, reverse).whole()

    inputs = [t.requires_grad_() for t in (stack, init)]
    assert torch.autograd.gradcheck(operator, inputs, check_forward_ad=True)
    assert operator(stack.detach(), init.detach()).equal(whole(stack, init))
    batched = torch.vmap(operator, in_dims=(1, 0))(stack, init)
    assert batched.equal(torch.vmap(whole, in_dims=(1, 0))(stack, init))


def recurrence(a):
    def cell(h, x):
        h = a * h + x
        return h, h

    return cell


def test_the_forward_of_a_compiled_step_makes_no_second_stack():
    a, xs = torch.rand(3, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    graphs = []

    def keep(gm, _):
        graphs.append({str(n.target) for n in gm.graph.nodes})
        return gm.forward

    run = torch.compile(
        lambda xs: scan(recurrence(a), torch.zeros(3), xs),
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
        fullgraph=True,
    )
    _, ys = run(xs)
    gradients = torch.autograd.grad(ys.square().sum(), [a, xs])
    _, expected = scan_loop(recurrence(a), torch.zeros(3), xs, 6, False)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), [a, xs]))
    forward, backward = graphs
    assert not any("cat" in name for name in forward)
    assert any("carries_in" in name for name in backward)


def test_compiled_ys_that_backward_reads_must_not_be_written_over():
    """Eager ys may be, as a loop's (``test_programs``)."""
    a, xs = torch.rand(3, requires_grad=True), torch.randn(6, 3, requires_grad=True)

    def run(xs):
        return scan(recurrence(a), torch.zeros(3), xs)[1]

    ys = torch.compile(run, backend="aot_eager", fullgraph=True)(xs)
    ys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()


@pytest.mark.parametrize(
    ("cell", "compiled"),
    [
        ("lstm", False),
        ("linear_recurrence", False),
        ("linear_recurrence", True),
        pytest.param("lstm", True, marks=SLOW),
        pytest.param("gru", False, marks=SLOW),
        pytest.param("gru", True, marks=SLOW),
    ],
)
def test_training_takes_no_more_memory_than_the_loop(cell, compiled, monkeypatch):
    """What a block takes aside: here it is a sixteenth of the steps."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    p = CELLS[cell].problem(torch.float32, T=256, B=16)
    wanted = [*p.params.values(), p.xs.requires_grad_()]

    def train(run):
        _, ys = run(p.init, p.xs)
        return (ys, *torch.autograd.grad(ys, wanted, torch.ones_like(ys)))

    def ours(init, xs):
        return scan(p.combine_fn, init, xs)

    run = torch.compile(ours, fullgraph=True, dynamic=False) if compiled else ours

    def peak(run):
        train(run)  # compiles
        return peak_of_allocator(lambda: train(run))

    loop = peak(lambda init, xs: scan_loop(p.combine_fn, init, xs, 256, False))
    assert peak(run) <= 1.1 * loop


@pytest.mark.parametrize("kind", ["linear", "plain", "batched", "scaled"])
def test_eager_blocks_add_to_sums_in_place(kind, short_blocks):
    """However a weight enters; and no second backward finds what the first one added."""
    w = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)

    def combine_fn(h, x):
        if kind == "batched":
            product = torch.bmm(h.view(2, 2, 3), w).view(4, 3)
        elif kind == "linear":
            product = torch.nn.functional.linear(h, w[0])
        else:
            product = h @ (w[0] if kind == "plain" else torch.sigmoid(w[0]))
        h = torch.tanh(product + x)
        return h, h

    init, xs = torch.zeros(4, 3, dtype=torch.float64), torch.randn(11, 4, 3, dtype=torch.float64)
    _, ys = scan(combine_fn, init, xs)
    (once,) = torch.autograd.grad(ys.sum(), w, retain_graph=True)
    kept = once.clone()
    (twice,) = torch.autograd.grad(ys.sum(), w)
    assert_same([once, twice], [kept, kept])
    check(combine_fn, init, xs, params=[w])
    assert set(short_blocks) == {4}


def test_few_steps_take_little_more_memory_than_the_loop():
    """What does not grow with the steps: sums of weights' gradients, weights laid out anew."""
    p = CELLS["lstm"].problem(torch.float32, T=64, B=16, D=128, H=128)
    wanted = [*p.params.values(), p.xs.requires_grad_()]

    def peak(run):
        def train():
            _, ys = run(p.init, p.xs)
            return torch.autograd.grad(ys, wanted, torch.ones_like(ys))

        train()
        return peak_of_allocator(train)

    loop = peak(lambda init, xs: scan_loop(p.combine_fn, init, xs, 64, False))
    assert peak(lambda init, xs: scan(p.combine_fn, init, xs)) <= 1.2 * loop
