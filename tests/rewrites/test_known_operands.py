"""Operands that are known before an eager loop, which are combined there: sums, and gates."""

from unittest import mock

import pytest
import torch
from oracle import assert_same, check, loop, scalar

from torch_scan_hop import scan
from torch_scan_hop.eager import run as eager_run

T = 20


@pytest.fixture
def sources():
    """The loops that are written, in their order."""
    written = []

    class Noted(eager_run.EagerLoop):
        def __init__(self, *args):
            super().__init__(*args)
            written.append(self.source)

    with mock.patch.object(eager_run, "EagerLoop", Noted):
        yield written


def derivatives_in(source):
    calls = [line.partition(" = call_")[2] for line in source.splitlines()]
    return sum(call.startswith(("tanh_backward", "sigmoid_backward")) for call in calls)


def lstm(s, x):
    h, c = s
    i, f, g, o = (x + h.repeat(1, 4)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h, c), h


def minimal(h, x):
    z, n = torch.sigmoid(h + x), torch.tanh(h * x)
    return (1 - z) * n + z * h, z


def derivative_then_product(h, x):
    return torch.tanh(h * x.detach()) + x, h


def of_what_varies(h, x):
    """In a second derivative, factors vary with its carry."""
    return torch.tanh(h * torch.sigmoid(h + x)), h


def broadcast(h, x):
    return torch.sigmoid(h + x) * x.sum(-1, keepdim=True), h


def transposed(h, x):
    return torch.tanh(h.T * x).T * torch.sigmoid(x), h


CELLS = {
    "lstm": (lstm, 0),
    "minimal": (minimal, 1),
    "derivative then product": (derivative_then_product, 0),
    "of what varies": (of_what_varies, 1),
    "broadcast": (broadcast, 1),
    "transposed": (transposed, None),
}


def problem(name, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    h = torch.randn(3, 3, generator=make, dtype=torch.float64).to(dtype)
    if name == "lstm":
        return (h, h.sin()), torch.randn(T, 3, 12, generator=make, dtype=torch.float64).to(dtype)
    return h, torch.randn(T, 3, 3, generator=make, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_the_loops(sources, name, reverse):
    cell, left = CELLS[name]
    check(cell, *problem(name), reverse=reverse)
    if left is not None:
        assert derivatives_in(sources[-1]) == left, sources[-1]


@pytest.mark.parametrize("name", CELLS)
def test_second_derivatives(name):
    cell, _ = CELLS[name]
    init, xs = problem(name)
    xs.requires_grad_()
    found = []
    for run in (scan, loop):
        [first] = torch.autograd.grad(scalar(run(cell, init, xs)), [xs], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [xs]))
    assert_same(*found)


W, U = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
BIAS = torch.randn(4, dtype=torch.float64)
LINEAR = torch.nn.Linear(4, 4).double().requires_grad_(False)
SUMS = {
    "a bias": lambda h, x: x @ W + h @ U + BIAS,
    "two biases": lambda h, x: x @ W + BIAS + h @ U + BIAS.exp(),
    "bias first": lambda h, x: BIAS + h @ U + x,
    "a module": lambda h, x: x @ W + LINEAR(h),
    "no product": lambda h, x: h.sin() + x + BIAS,
    "broadcast": lambda h, x: h @ U + x[..., :1] + BIAS[0],
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_terms_that_are_known(sources, name, reverse):
    def cell(h, x):
        h = torch.tanh(SUMS[name](h, x))
        return h, h

    make = torch.Generator().manual_seed(0)
    h, xs = (torch.randn(*s, 3, 4, generator=make, dtype=torch.float64) for s in ((), (T,)))
    check(cell, h, xs, reverse=reverse)
    calls = [line.partition(" = call_")[2] for line in sources[0].splitlines()]
    sums = [call for call in calls if call.startswith("add")]
    assert len(sums) == 1, sources[0]


def test_a_sum_that_others_read_stays(sources):
    def cell(h, x):
        total = h.sin() + x
        return torch.tanh(total + BIAS[:3]), total

    check(cell, torch.randn(3, dtype=torch.float64), torch.randn(T, 3, dtype=torch.float64))
    assert sources[0].count("call_add(") == 2, sources[0]


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30, float("inf")])
def test_gates_that_are_saturated_beside_what_is_large(size):
    """The factor is at most as large as what the loop multiplies with."""

    def cell(h, x):
        return torch.tanh(h * 1e-3 + 30 * x) * size + torch.sigmoid(-h - 90 * x), h

    xs = torch.tensor([1.0, -1.0, 0.0]).repeat(T // 2, 1).requires_grad_()
    h = torch.zeros(3)
    grads = [torch.autograd.grad(run(cell, h, xs)[0].sum(), [xs])[0] for run in (scan, loop)]
    torch.testing.assert_close(*grads, equal_nan=True)


def test_low_precision_is_rounded_as_in_the_loop(sources):
    init, xs = problem("lstm", torch.bfloat16)
    xs.requires_grad_()
    grads = [torch.autograd.grad(scalar(run(lstm, init, xs)), [xs])[0] for run in (scan, loop)]
    assert grads[0].equal(grads[1])
    assert derivatives_in(sources[-1]) == 5
