"""Sums over dimensions as one sum for each lane: the loop is one kernel, and no term is stacked."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, gradients, loop
from torch.fx.experimental.proxy_tensor import make_fx
from wrappers import run_and_count_loops

from torch_scan_hop import scan
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import lane_sums, using_options
from torch_scan_hop.rewrites.lane_sums import find_lane_sums
from torch_scan_hop.signature import Inputs, Signature

pytestmark = pytest.mark.torch_version
T, B, D = 9, 3, 5


def make(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def lane_sums_used(monkeypatch):
    """Of each scan compiled meanwhile that has any, how many it has."""
    found = []
    run = lane_sums.LaneSums.run

    def recorded(sums, *args):
        found.append(len(sums.operands))
        return run(sums, *args)

    monkeypatch.setattr(lane_sums.LaneSums, "run", recorded)
    return found


def leaky(a, h, x):
    h = (1 - a) * h + a * x
    return h, h


def gated(a, h, x):
    h = torch.tanh(torch.sigmoid(a) * h + x * torch.exp(-a)) + a
    return h, h


def scaled(a, h, x):
    """Twice in the same product."""
    h = h * a + a * x * a
    return h, h * 2


#: cells, and the shapes of their parameters
CELLS = {
    "leaky": (leaky, (D,)),
    "gated": (gated, (D,)),
    "scaled": (scaled, (D,)),
    "by a number": (scaled, ()),
    "by rows": (leaky, (B, 1)),
    "by all": (leaky, (1, 1)),
}


@pytest.mark.parametrize(
    ("cell", "dtype"),
    [(cell, torch.float64) for cell in CELLS]
    + [(cell, torch.complex128) for cell in ("leaky", "by rows")],
)
def test_the_gradient_of_a_parameter(cell, dtype, lane_sums_used):
    torch.manual_seed(0)
    cell, shape = CELLS[cell]
    a, h, xs = (torch.randn(s, dtype=dtype) * 0.5 for s in (shape, (B, D), (T, B, D)))
    given = [t.requires_grad_() for t in (a, h, xs)]
    step = lambda h, x: cell(a, h, x)  # noqa: E731
    run = torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True)
    got, n_loops = run_and_count_loops(lambda: gradients(run(h, xs), given))
    assert_same(got, gradients(loop(step, h, xs), given), 1e-9)
    assert lane_sums_used
    assert n_loops == [0, 0]


def totals(carry, x):
    """What it adds up in all ways, and no other lane is read."""
    every, column, both, h = carry
    h = torch.tanh(h + x)
    every = every + (h.sum() + x.sum(()) * 0.5 - torch.sum(h * h, None))
    column = x.sin().sum(0) / 2 + column
    both = both + (h.sum((0, 1), keepdim=True) + (h.sum(1, keepdim=True).t() @ x[:, :1]))
    return (every, column, both, h), h


@pytest.mark.parametrize("on", [False, True])
def test_sums_of_a_forward(on, caplog):
    carry = make(()), make(D), make(1, 1), make(B, D)
    xs = make(T, B, D)
    with torch.no_grad(), using_options(sums_per_lane=on):
        got = torch.compile(lambda carry, xs: scan(totals, carry, xs), fullgraph=True)(carry, xs)
    assert_same(got, loop(totals, carry, xs), 1e-9)
    assert "is left out" not in caplog.text


def lane_sums_of(step, *examples, n_carry):
    body = make_fx(step)(*examples)
    n_xs = len(examples) - n_carry
    used = [True] * len(body(*examples))
    return find_lane_sums(body, Signature(n_carry, n_xs, 0), used)


def test_a_scan_of_the_widened_body():
    """Two carries share a sum's operand; one is a sum of two of them."""

    def step(total, scaled, h, x):
        h = torch.tanh(h + x)
        return total + (h.sum(0) + x.sum(0)), scaled + h.sum() * -0.5, h, h * 2

    examples = make(D), make(()), make(B, D), make(B, D)
    sums = lane_sums_of(step, *examples, n_carry=3)
    assert sums.kept == [2]
    assert len(sums.operands) == 2
    inputs = Inputs(list(examples[:3]), [make(T, B, D)], [])

    def run(inputs):
        def body(carry, x):
            out = sums.body(*carry, x)
            return out[: len(carry)], out[len(carry) :]

        carry, ys = scan_loop(body, tuple(inputs.carry), inputs.xs[0], T, False)
        return [*carry, *ys]

    def cell(carry, x):
        *carry, y = step(*carry, x)
        return tuple(carry), y

    carry, ys = scan_loop(cell, tuple(inputs.carry), inputs.xs[0], T, False)
    assert_same(sums.run(run, inputs), [*carry, ys], 1e-9)


STAYS = {
    "of a narrow type": lambda s, h, x: (s + h.half().sum(0).double(), h + x),
    "of something smaller": lambda s, h, x: (s + h[:1].sum(0), h + x),
    "read besides": lambda s, h, x: (s + h.sum(0), h + x + s),
    "a y, too": lambda s, h, x: (s + h.sum(0), h + x, s + h.sum(0)),
    "twice itself": lambda s, h, x: (s + s, h + x),
    "not linear": lambda s, h, x: (s + h.sum(0).exp(), h + x),
    "scaled by x": lambda s, h, x: (s + h.sum(0) * x[0], h + x),
    "with a number": lambda s, h, x: (s + (h.sum(0) + 1.0), h + x),
    "of what is no carry's shape": lambda s, h, x: (s + x[:, 1:].sum(), h + x),
}


@pytest.mark.parametrize("step", STAYS.values(), ids=STAYS)
def test_what_stays_as_it_is(step):
    assert lane_sums_of(step, make(D), make(B, D), make(B, D), n_carry=2) is None


def test_without_the_switch(lane_sums_used):
    a, h, xs = make(D).requires_grad_(), make(B, D), make(T, B, D)
    step = lambda h, x: leaky(a, h, x)  # noqa: E731
    with using_options(sums_per_lane=False):
        got = torch.compile(lambda: gradients(scan(step, h, xs), [a]))()
    assert_same(got, gradients(loop(step, h, xs), [a]), 1e-9)
    assert not lane_sums_used


@pytest.mark.parametrize("dynamic", [False, True])
def test_any_batch(dynamic, lane_sums_used):
    a = make(D).requires_grad_()
    step = lambda h, x: leaky(a, h, x)  # noqa: E731
    run = torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True, dynamic=dynamic)
    for batch, steps in ((3, 5), (4, 7)):
        h, xs = make(batch, D), make(steps, batch, D)
        assert_same(gradients(run(h, xs), [a]), gradients(loop(step, h, xs), [a]), 1e-9)
    assert lane_sums_used


@pytest.mark.faults
def test_a_rewrite_that_returns_something_else_is_dropped(monkeypatch, caplog):
    """As one did that took ``sum(())`` for a sum over no dimensions."""
    run = lane_sums.LaneSums.run
    wrong = lambda *args: [v[None] for v in run(*args)]  # noqa: E731
    monkeypatch.setattr(lane_sums.LaneSums, "run", wrong)
    carry, xs = (make(()), make(B, D)), make(T, B, D)

    def step(carry, x):
        total, h = carry
        return (total + h.sum(), h + x), h

    with torch.no_grad():
        got = torch.compile(lambda carry, xs: scan(step, carry, xs), fullgraph=True)(carry, xs)
    assert_same(got, loop(step, carry, xs), 1e-9)
    assert "is left out" in caplog.text
