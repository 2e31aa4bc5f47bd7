"""Backwards under Inductor read the carries into their steps off the forward's own stack."""

from __future__ import annotations

import pytest
import torch
from cells import Draw
from oracle import assert_same, gradients, loop
from torch._inductor.utils import run_and_get_code
from wrappers import loops, run_and_count_loops

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version

N = 37


def lanes(h, x):
    h = torch.tanh(h) * x
    return h, h


def rows_of(dtype):
    w = Draw(dtype).normal(N, N, scale=0.1)

    def rows(carry, x):
        h, c = carry
        c = torch.sigmoid(c) * x + torch.tanh(h @ w)
        return (c.sin(), c), c.cos()

    return rows


def inputs(kind, T):
    draw = Draw(torch.float64 if kind == "counted loop" else torch.float32)
    if kind == "lanes":
        return lanes, draw.normal(N), draw.normal(T, N)
    return rows_of(draw.dtype), (draw.normal(3, N), draw.normal(3, N)), draw.normal(T, 3, N)


def trained(run, init, xs):
    given = [t.requires_grad_() for t in torch.utils._pytree.tree_leaves((init, xs))]
    return gradients(run(init, xs), given)


@pytest.mark.parametrize(
    ("reverse", "dynamic"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["lanes", "rows", "counted loop"])
def test_gradients(kind, reverse, dynamic):
    step, _, _ = inputs(kind, 1)
    run = torch.compile(
        lambda init, xs: scan(step, init, xs, reverse=reverse), fullgraph=True, dynamic=dynamic
    )

    def train_all():
        # without dynamic shapes each is compiled anew
        for T in (1, 2, 6) if dynamic else (1, 6):
            _, init, xs = inputs(kind, T)
            expected = trained(lambda init, xs: loop(step, init, xs, reverse=reverse), init, xs)
            assert_same(trained(run, init, xs), expected, 1e-4)

    _, n_loops = run_and_count_loops(train_all)
    # a weight of a size that is open is no kernel's
    is_kernel = kind == "lanes" or (kind == "rows" and not dynamic)
    assert set(n_loops) == {0 if is_kernel else 1}


@pytest.mark.parametrize("kind", ["lanes", "rows"])
def test_a_kernel_makes_no_stack_of_them(kind):
    step, init, xs = inputs(kind, 6)
    run = torch.compile(lambda init, xs: scan(step, init, xs), fullgraph=True)
    _, (_, backward) = run_and_get_code(lambda: trained(run, init, xs))
    assert loops([backward]) == [0]
    stacks = [line for line in backward.split("def call(")[1].splitlines() if "= empty" in line]
    stacks = [line for line in stacks if "((6, " in line]
    assert len(stacks) == 1  # the gradient of xs


def test_a_long_scan_whose_backward_stacks_nothing_is_in_one_piece():
    a = torch.rand(4096, requires_grad=True)

    def cell(h, x):
        h = a * h + x
        return h, h

    init, xs = torch.zeros(4096), Draw(torch.float32).normal(512, 4096)

    def train(run):
        return gradients(run(init, xs), [a])

    run = torch.compile(lambda init, xs: scan(cell, init, xs), fullgraph=True)
    got, codes = run_and_get_code(train, run)
    assert_same(got, train(lambda init, xs: loop(cell, init, xs)), 1e-3)
    assert loops(codes) == [0, 0]
