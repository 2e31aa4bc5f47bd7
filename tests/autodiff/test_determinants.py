"""Derivatives of determinants, of first and second order, also where torch's own is nan in a trace."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from oracle import loop

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version

T = 4


def by_permutations(matrix):
    """Leibniz's formula: a polynomial, whose derivatives autograd knows."""
    n = matrix.shape[-1]
    total = 0
    for order in itertools.permutations(range(n)):
        sign = (-1) ** sum(a > b for a, b in itertools.combinations(order, 2))
        total = total + sign * math.prod(matrix[..., i, j] for i, j in enumerate(order))
    return total


MATRICES = {
    "random": lambda *shape: torch.randn(*shape),
    "equal singular values": lambda *shape: torch.eye(shape[-1]).expand(shape),
    "singular": lambda *shape: torch.diag(torch.arange(shape[-1])).expand(shape),
    "of rank 1": lambda *shape: torch.ones(shape),
}


@pytest.mark.parametrize(
    "det",
    [
        torch.linalg.det,
        pytest.param(torch.det, marks=pytest.mark.slow),
        pytest.param(lambda a: a.det(), marks=pytest.mark.slow, id="method"),
    ],
)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_two_orders(n, kind, det):
    xs = MATRICES[kind](T, 2, n, n).double().contiguous().requires_grad_()
    h, weights = torch.zeros(2).double(), torch.randn(T, 2, n, n).double()

    def two_orders(scan_, of):
        def step(h, x):
            value = of(x + 0 * h[:, None, None])
            return h + value, value * value

        carry, ys = scan_(step, h, xs)
        (first,) = torch.autograd.grad(carry.sum() + ys.sum(), xs, create_graph=True)
        second = torch.autograd.grad((first * weights).sum(), xs, allow_unused=True)
        return carry, ys, first, *second

    got, want = two_orders(scan, det), two_orders(loop, by_permutations)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def test_an_argument_of_that_name():
    """And four rows, of which torch's own derivative is taken."""

    def step(det, x):
        return det + torch.linalg.det(x), None

    xs = torch.randn(T, 4, 4).double().requires_grad_()
    total, _ = scan(step, torch.zeros(()).double(), xs)
    got = torch.autograd.grad(total, xs)
    torch.testing.assert_close(total, by_permutations(xs).sum())
    torch.testing.assert_close(got, torch.autograd.grad(by_permutations(xs).sum(), xs))
