"""Second derivatives of cumulative products, also where a factor is zero."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, loop

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version


def products(scan_, h, xs, dim):
    def cell(h, x):
        return torch.cumprod(h, dim) / 2 + x, h.sum()

    h, ys = scan_(cell, h, xs)
    return (h**2).sum() + (ys**2).sum()


@pytest.mark.parametrize(
    ("dim", "zeros"),
    [
        (-1, 1),
        (0, 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(-1, 0), (-1, 5), (0, 0), (0, 1)]
        ),
    ],
)
def test_two_orders(dim, zeros):
    h, xs = torch.rand(2, 5).double() + 0.5, torch.rand(4, 2, 5).double()
    h[:, 2 : 2 + zeros] = 0

    def two_orders(scan_):
        leaves = [h.clone().requires_grad_(), xs.clone().requires_grad_()]
        first = torch.autograd.grad(products(scan_, *leaves, dim), leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum((g**2).sum() for g in first), leaves)

    assert_same(two_orders(scan), two_orders(loop))
    hessians = [torch.func.hessian(lambda h, s=s: products(s, h, xs, dim))(h) for s in (scan, loop)]
    assert_same(*hessians)


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h.cumprod(-1),
        lambda h: torch.cumprod(input=h, dim=-1, dtype=torch.float64),
        lambda h: torch.cumprod(h, axis=-1),
    ],
)
def test_the_ways_to_call_it(of):
    h, xs = torch.zeros(2, 5).double().requires_grad_(), torch.rand(4, 2, 5).double()

    def gradient(scan_):
        carry, _ = scan_(lambda h, x: (of(h) + x, None), h, xs)
        return torch.autograd.grad((carry**2).sum(), h)

    assert_same(gradient(scan), gradient(loop))
