"""What a step makes of a weight: its gradient goes back through that once, behind the scan."""

from __future__ import annotations

import pytest
import torch
from oracle import loop

from torch_scan_hop import scan
from torch_scan_hop.autodiff import partition
from torch_scan_hop.autodiff.linear_sums import find_linear_sums

pytestmark = pytest.mark.torch_version

T, B, H = 5, 3, 4
EYE = torch.eye(H, dtype=torch.float64)


def softmax(w):
    return torch.softmax(w, -1)


def low_rank(a, b):
    return a @ b


def beside_itself(w, a, b):
    return w + a @ b


def normed(v, scale):
    return scale * v / v.norm(dim=1, keepdim=True)


def squashed(w, scale):
    return torch.tanh(w * scale)


def half_of_a_softmax(w):
    return torch.cat([torch.softmax(w, -1)[:, : H // 2], w[:, H // 2 :]], 1)


def lower_triangle(w):
    return torch.linalg.cholesky(w @ w.mT + EYE)


def solved(w, a):
    return torch.linalg.solve_triangular(w.tril() + 3 * EYE, torch.sigmoid(a), upper=False)


def diagonal(w, scale):
    return torch.diag_embed(torch.sigmoid(torch.linalg.vector_norm(w, dim=1))) * scale


WEIGHTS = {
    softmax: [(H, H)],
    low_rank: [(H, 2), (2, H)],
    beside_itself: [(H, H), (H, 2), (2, H)],
    normed: [(H, H), (H, 1)],
    squashed: [(H, H), ()],
    half_of_a_softmax: [(H, H)],
    lower_triangle: [(H, H)],
    solved: [(H, H), (H, H)],
    diagonal: [(H, H), ()],
}


def problem(make, dtype=torch.float64):
    weights = [torch.randn(shape, dtype=dtype).mul(0.5).requires_grad_() for shape in WEIGHTS[make]]
    init, xs = torch.randn(B, H, dtype=dtype), torch.randn(T, B, H, dtype=dtype)

    def step(h, x):
        h = torch.tanh(h @ make(*weights) + x)
        return h, h @ make(*weights).mT

    return step, [init.requires_grad_(), xs.requires_grad_(), *weights]


@pytest.fixture
def found(monkeypatch):
    """Return what was found, of each derivative that was made."""
    seen = []

    def find(joint):
        seen.append(find_linear_sums(joint))
        return seen[-1]

    monkeypatch.setattr(partition, "find_linear_sums", find)
    return seen


def gradients(scan_, step, leaves, order):
    carry, ys = scan_(step, *leaves[:2])
    loss = carry.sin().sum() + ys.square().sum()
    first = torch.autograd.grad(loss, leaves, create_graph=order > 1)
    if order == 1:
        return first
    return torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("make", WEIGHTS)
def test_gradients(make, order, found):
    step, leaves = problem(make)
    got = gradients(scan, step, leaves, order)
    assert any(found)
    torch.testing.assert_close(got, gradients(loop, step, leaves, order))


@pytest.mark.parametrize("make", [softmax, pytest.param(solved, marks=pytest.mark.slow)])
def test_compiled(make, found):
    step, leaves = problem(make)
    compiled = torch.compile(lambda *given: scan(step, *given), fullgraph=True)
    got = gradients(lambda _, *given: compiled(*given), step, leaves, 1)
    assert any(found)
    torch.testing.assert_close(got, gradients(loop, step, leaves, 1))


def test_forward_over_reverse(found):
    init, xs, *weights = (leaf.detach() for leaf in problem(low_rank)[1])

    def gradient_of(scan_):
        def total(a, b):
            def step(h, x):
                h = torch.tanh(h @ (a @ b) + x)
                return h, h

            carry, ys = scan_(step, init, xs)
            return (carry * ys.sum(0)).sum()

        return torch.func.grad(total, (0, 1))

    given = tuple(weights), tuple(w.cos() for w in weights)
    got = torch.func.jvp(gradient_of(scan), *given)
    assert any(found)
    torch.testing.assert_close(got, torch.func.jvp(gradient_of(loop), *given))


def test_each_step_is_spared_it(found):
    """The products that carry a gradient through a product of weights are two, not two a step."""
    step, leaves = problem(low_rank)
    for _ in range(2):  # the second time nothing is traced
        carry, _ = scan(step, *leaves[:2])
        with torch.profiler.profile() as profile:
            torch.autograd.grad(carry.sum(), leaves[2:])
    assert found[0].gradients == (0, 1)
    products = [e for e in profile.events() if e.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    # two a step, for gradients of the carry; and some for all steps
    assert len(products) < 3 * T, len(products)


@pytest.mark.parametrize("make", [softmax, normed])
def test_no_steps(make):
    step, leaves = problem(make)
    leaves[1] = leaves[1].detach()[:0]
    carry, _ = scan(step, *leaves[:2])
    got = torch.autograd.grad(carry.sum(), leaves[2:], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got, tuple(torch.zeros_like(w) for w in leaves[2:]))


def test_narrow_numbers_are_added_as_they_were(found):
    """Their sum may overflow where that of what is made of them does not."""
    step, leaves = problem(softmax, torch.bfloat16)
    gradients(scan, step, leaves, 1)
    assert not any(found)


def test_what_is_added_to_a_term_is_not_lost(found):
    """``g + c`` with what all steps share is not linear: it is added in each step."""
    w = torch.randn(H, dtype=torch.float64, requires_grad=True)

    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return torch.sigmoid(value)

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent + 1

    def step(h, x):
        h = torch.tanh(h * Shifted.apply(torch.sigmoid(w)) + x)
        return h, h

    init, xs = torch.zeros(B, H).double(), torch.randn(T, B, H).double()
    got, want = (torch.autograd.grad(s(step, init, xs)[1].sum(), w) for s in (scan, loop))
    assert found
    torch.testing.assert_close(got, want)
