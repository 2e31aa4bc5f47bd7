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
@pytest.mark.parametrize("n", [1, 2, 3, 4])
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


STEPS_OF = {
    "plain": lambda x: torch.linalg.det(x),
    "vmapped": lambda x: torch.vmap(torch.linalg.det)(x),
    "gradient": lambda x: torch.func.grad(lambda m: torch.linalg.det(m).sum())(x).sum((-2, -1)),
    "tangent": lambda x: torch.func.jvp(torch.linalg.det, (x,), (x.sin(),))[1],
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("of", STEPS_OF)
def test_matrices_of_five_rows(of, dtype, compiled):
    """Their gradient is one operator, on each way."""
    if compiled and dtype.is_complex and of == "tangent" and torch.__version__ < "2.13":
        pytest.skip("Inductor of torch 2.9 adds no complex numbers with such strides")
    xs = torch.randn(T, 2, 5, 5, dtype=dtype, requires_grad=True)
    h = torch.zeros(2, dtype=dtype)
    real = of == "gradient" and dtype.is_complex  # torch.func.grad is of real results

    def step(h, x):
        value = STEPS_OF[of](x.real if real else x + 0.1 * torch.tanh(h)[:, None, None])
        return 0.5 * h + 0.1 * value, value

    def run(scan_):
        carry, ys = scan_(step, h, xs)
        return carry, ys, (carry.sum() + ys.sum()).abs()

    got, want = (torch.compile(run, fullgraph=True) if compiled else run)(scan), run(loop)
    torch.testing.assert_close(got, want)
    got, want = (torch.autograd.grad(results[-1], xs) for results in (got, want))
    torch.testing.assert_close(got, want)


def test_no_singular_vectors_in_a_first_derivative():
    """They take longer than the rest of the step. torch's own derivative has them in a trace."""
    xs = torch.randn(T, 5, 5, requires_grad=True)
    total, _ = scan(lambda h, x: (h + torch.linalg.det(x), None), torch.zeros(()), xs)
    with torch.profiler.profile() as profile:
        total.backward()
    names = {event.name for event in profile.events()}
    assert not any("svd" in name for name in names), names
    assert any("lu_factor" in name for name in names), names


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_gradient_of_singular_matrices(compiled):
    """torch's own is zero for them: it multiplies by the determinant."""
    xs = torch.diag(torch.arange(4.0)).double().expand(T, 2, 4, 4).contiguous().requires_grad_()

    def run(scan_):
        return scan_(lambda h, x: (h + torch.linalg.det(x), None), xs.new_zeros(2), xs)[0].sum()

    total = (torch.compile(run, fullgraph=True) if compiled else run)(scan)
    (got,) = torch.autograd.grad(total, xs)
    want = torch.zeros(4, 4).double()
    want[0, 0] = 6
    torch.testing.assert_close(got, want.expand(T, 2, 4, 4))


# forward mode of a singular matrix's determinant raises in torch
@pytest.mark.parametrize("kind", ["random", "equal singular values"])
def test_forward_over_reverse(kind):
    xs = MATRICES[kind](T, 4, 4).double().contiguous()

    def gradient_of(scan_, of):
        def total(xs):
            return scan_(lambda h, x: (h + of(x) ** 2 + of(x), None), xs.new_zeros(()), xs)[0]

        return torch.func.grad(total)

    got = torch.func.jvp(gradient_of(scan, torch.linalg.det), (xs,), (xs.cos(),))
    want = torch.func.jvp(gradient_of(loop, by_permutations), (xs,), (xs.cos(),))
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
