"""Scans of a few small steps, which run as they are written."""

import operator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cells import CELLS
from oracle import assert_same, check, gradients, loop, scalar
from torch.utils.checkpoint import checkpoint

from torch_scan_hop import explain, scan
from torch_scan_hop.dispatch import autograd
from torch_scan_hop.eager.few_steps import (
    MAX_ELEMENTS,
    MAX_STEPS,
    MAX_STEPS_FORWARD,
    MOST_CALLS,
)

pytestmark = pytest.mark.few_steps

f64 = torch.float64


@pytest.fixture
def as_written():
    with mock.patch.object(autograd, "run_as_written", wraps=autograd.run_as_written) as run:
        yield run


def rnn(w):
    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, h * 2

    return cell


def problem(T=5, n=4):
    w = torch.randn(n, n, dtype=f64, requires_grad=True)
    return w, torch.randn(2, n, dtype=f64), torch.randn(T, 2, n, dtype=f64)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, 2, 6])
@pytest.mark.parametrize("cell", CELLS)
def test_cells(as_written, cell, T, reverse):
    p = CELLS[cell].problem(f64, T, 2)
    check(p.combine_fn, p.init, p.xs, params=list(p.params.values()), reverse=reverse)
    assert as_written.called


def test_a_second_derivative(as_written):
    w, h, xs = problem()
    found = []
    for run in (scan, loop):
        [first] = torch.autograd.grad(scalar(run(rnn(w), h, xs)), [w], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [w]))
    assert as_written.called
    assert_same(*found)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


def hooked(h):
    h = h * 1
    h.register_hook(lambda g: g * 0.5)
    return h


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (lambda h, x: (torch.sin(h) + x, h), {"checkpoint": "full"}),
        (lambda h, x: (Twice.apply(h) + x, h), {}),
        (lambda h, x: (hooked(h) + x, h), {}),
        (lambda h, x: (checkpoint(torch.sin, h, use_reentrant=False) + x, h), {}),
    ],
)
def test_what_autograd_does_not_record_is_planned(as_written, cell, options):
    xs = torch.randn(4, 3, dtype=f64)
    with mock.patch("torch_scan_hop.eager.few_steps.MAX_STEPS", 0):
        check(cell, torch.randn(3, dtype=f64), xs, **options)
    planned = as_written.call_count
    check(cell, torch.randn(3, dtype=f64), xs, **options)
    assert planned == as_written.call_count == 0


def many(h, x):
    for _ in range(MOST_CALLS):
        h = torch.sin(h + x)
    return h, None


def test_more_steps_and_large_ones_are_planned(as_written):
    w, h, _ = problem()
    scan(rnn(w), h, torch.randn(MAX_STEPS, 2, 4, dtype=f64))
    assert as_written.call_count == 1
    as_written.reset_mock()
    scan(rnn(w), h, torch.randn(MAX_STEPS + 1, 2, 4, dtype=f64))
    scan(many, h.requires_grad_(), torch.randn(MAX_STEPS - 1, 2, 4, dtype=f64))
    scan(lambda h, x: (h + x, None), torch.zeros(MAX_ELEMENTS), torch.ones(3))
    with torch.autocast("cpu"):
        scan(rnn(w.float()), h.float(), torch.randn(3, 2, 4))
    with torch.no_grad():
        scan(rnn(w), h, torch.randn(MAX_STEPS_FORWARD + 1, 2, 4, dtype=f64))
    assert not as_written.called


def test_a_body_for_any_size_reads_no_sizes_that_nothing_uses(as_written):
    """Dynamo compares sizes as it traces, and each step would do so again."""
    for lanes in (3, 4):
        scan(lambda h, x: (h * x + 1, None), torch.randn(lanes), torch.randn(5, lanes))
    body = as_written.call_args.args[0]
    assert len(body.graph.find_nodes(op="placeholder")) > 2, "the lanes are no input"
    assert [node.target for node in body.graph.nodes if node.op.startswith("call")] == [
        operator.mul,
        operator.add,
    ]


def test_a_carry_that_a_step_lays_out_anew(as_written):
    def cell(carry, x):
        h, g = carry
        return (g.T * x, h.T + x), h.T

    init = (torch.randn(3, 3, dtype=f64), torch.randn(3, 3, dtype=f64))
    check(cell, init, torch.randn(5, dtype=f64))
    assert as_written.called


@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.LSTMCell, torch.nn.RNNCell])
def test_fused_cells_without_gradients(as_written, kind):
    module = kind(3, 4).double()

    def cell(state, x):
        state = module(x, state)
        return state, state

    h, xs = torch.randn(2, 4, dtype=f64), torch.randn(40, 2, 3, dtype=f64)
    init = (h, h + 1) if kind is torch.nn.LSTMCell else h
    with torch.no_grad():
        assert_same(scan(cell, init, xs), loop(cell, init, xs))
    assert as_written.called
    as_written.reset_mock()
    check(cell, init, xs, params=list(module.parameters()))
    assert not as_written.called


@pytest.mark.parametrize("T", [1, 3])
def test_results_are_the_callers_to_write_to(as_written, T):
    """They share nothing with inputs, nor with one another, and no backward reads them."""
    w, h, xs = problem(T)

    def cell(carry, x):
        h, kept, _ = carry
        h = torch.tanh(h @ w + x)
        return (h, kept, w), (h, x, w, h.T)

    init = (h, h, w)
    before = [v.clone() for v in (w, h, xs)]
    carry, ys = scan(cell, init, xs)
    expected = loop(cell, init, xs)
    assert_same((carry, ys), expected)
    assert as_written.called
    total = scalar((carry, ys))
    with torch.no_grad():
        for leaf in (*carry, *ys):
            leaf.zero_()
    assert_same(torch.autograd.grad(total, [w]), gradients(expected, [w]))
    assert_same([w, h, xs], before)


def test_a_carry_that_is_not_contiguous(as_written):

    def cell(h, x):
        return (h.reshape(9).cumsum(0).view(3, 3) * x).T, h.sum()

    check(cell, torch.randn(3, 3, dtype=f64).T, torch.randn(4, 3, dtype=f64))
    assert as_written.called


def test_bodies_that_write_in_place(as_written):
    def cell(h, x):
        h[0] = x[0]
        x.mul_(2)
        return F.relu_(h * x), h

    h, xs = torch.randn(3, dtype=f64), torch.randn(4, 3, dtype=f64)
    before = h.clone(), xs.clone()
    got, expected = scan(cell, h, xs), loop(cell, h.clone(), xs.clone())
    assert_same(got, expected)
    assert_same((h, xs), before)
    assert as_written.called


def test_steps_draw_what_those_of_a_loop_draw(as_written):
    cell = lambda h, x: (F.dropout(h + x, 0.5), torch.rand_like(h))  # noqa: E731
    h, xs = torch.randn(3, dtype=f64), torch.randn(4, 3, dtype=f64)
    torch.manual_seed(3)
    got = scan(cell, h, xs)
    torch.manual_seed(3)
    assert_same(got, loop(cell, h, xs))
    assert as_written.called


def test_who_gets_gradients(as_written):
    """What a step makes under no_grad does not require grad, as in a loop."""
    w, h, xs = problem()

    def cell(carry, x):
        a, b = carry
        with torch.no_grad():
            b = b + x
        return (torch.tanh(a @ w + b), b), (a.detach(), b)

    init = (h, h.clone().requires_grad_())
    got, expected = scan(cell, init, xs), loop(cell, init, xs)
    flags = [[v.requires_grad for v in (*c, *ys)] for c, ys in (got, expected)]
    assert flags[0] == flags[1]
    assert_same(gradients(got, [w]), gradients(expected, [w]))


def test_explain_says_so():
    w, h, xs = problem()
    says = "run as they are written"
    assert says in str(explain(rnn(w), h, xs))
    assert says not in str(explain(rnn(w), h, torch.randn(MAX_STEPS + 1, 2, 4, dtype=f64)))
    assert says not in str(explain(rnn(w), h, xs, checkpoint="full"))
