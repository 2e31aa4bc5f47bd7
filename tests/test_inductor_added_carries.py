"""Carries of a counted loop that steps only add to have one buffer, which steps write over."""

from __future__ import annotations

import pytest
import torch
from cells import Draw
from oracle import assert_same, gradients, loop

from torch_scan_hop import scan
from torch_scan_hop.inductor.loop import ScanLoop
from torch_scan_hop.rewrites import using_options

DRAW = Draw(torch.float32)


@pytest.fixture
def in_place(monkeypatch):
    """Of each counted loop that is compiled meanwhile, the carries with one buffer."""
    found = []
    made = ScanLoop.__init__

    def recorded(self, *args):
        made(self, *args)
        found.append(list(self.in_place))

    monkeypatch.setattr(ScanLoop, "__init__", recorded)
    return found


def cell(carry, x):
    h, right, left, read, number, wide, narrow = carry
    h = torch.tanh(h + x)
    right, left = right + h.sin(), x.cumsum(0) + left
    number, wide, narrow = number + 1, wide + h[0], narrow + (4 * h).int()
    read = read + x
    return (h, right, left, read, number, wide, narrow), read


def start():
    matrices = [DRAW.normal(3, 4) for _ in range(3)]
    return (DRAW.normal(3, 4), *matrices, torch.tensor(2), DRAW.normal(3, 4), DRAW.normal(3, 4))


@pytest.mark.torch_version
@pytest.mark.parametrize(("reverse", "cpp_wrapper"), [(False, False), (True, True)])
def test_any_trip_count(reverse, cpp_wrapper, in_place):
    def fn(run, init, xs):
        return run(cell, init, xs, reverse=reverse)

    options = {"cpp_wrapper": cpp_wrapper}
    with using_options(one_kernel=False):
        compiled = torch.compile(lambda *given: fn(scan, *given), fullgraph=True, options=options)
        for T in (5, 2, 1):
            init, xs = start(), DRAW.normal(T, 3, 4)
            kept = [c.clone() for c in init]
            assert_same(compiled(init, xs), fn(loop, init, xs), 1e-5)
            assert_same(list(init), kept)  # no loop adds to what it starts from
    # not what is a y, too, what a number is added to, what is broadcast or of another dtype
    assert in_place
    assert all(found == [1, 2] for found in in_place)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_sums_that_start_from_zeros(cpp_wrapper, in_place):
    """Of gradients, in a backward: nested, and in blocks of the outer scan's steps."""
    w = DRAW.weight(4, 4)

    def inner(h, x):
        h = torch.tanh(h @ w + x)
        return h, None

    def outer(run):
        def step(carry, x):
            h, total = carry
            h, _ = run(inner, h, x)
            return (h, total + h.cumsum(1)), h

        return lambda h, xs: run(step, (h, torch.zeros_like(h)), xs)

    h, xs = DRAW.normal(3, 4).requires_grad_(), DRAW.normal(5, 6, 3, 4).requires_grad_()
    with using_options(one_kernel=False):
        options = {"cpp_wrapper": cpp_wrapper}
        compiled = torch.compile(outer(scan), fullgraph=True, options=options)
        got, expected = compiled(h, xs), outer(loop)(h, xs)
        assert_same(got, expected, 1e-5)
        given = [h, xs, w]
        assert_same(gradients(got, given), gradients(expected, given), 1e-4)
    assert any(in_place)
