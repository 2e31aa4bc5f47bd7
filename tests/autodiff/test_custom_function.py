"""A custom ``autograd.Function`` in the body: its own backward counts, in every derivative."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, loop
from torch.func import grad, hessian, jvp, vmap

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version
F64 = torch.float64
H, XS, W = torch.zeros(3, 2, dtype=F64), torch.randn(4, 3, 2, dtype=F64), torch.eye(2, dtype=F64)


class StraightThrough(torch.autograd.Function):
    """Rounds; torch's own derivative of that is zero."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, g):
        return g


class Transformable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.round(x * 4) / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def jvp(ctx, tangent):
        return tangent


def model(scan_, rounded=StraightThrough):
    def f(h, xs, w):
        def cell(h, x):
            h = torch.tanh(x @ w + rounded.apply(h @ w))
            return h, h * x

        h, ys = scan_(cell, h, xs)
        return (h**2).sum() + (ys**2).sum()

    return f


def first(f, w):
    return torch.autograd.grad(f(H, XS, w), w, create_graph=True)[0]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_gradient_through_a_carry_whose_init_needs_none(backend):
    w = W.clone().requires_grad_()
    f = model(scan)
    if backend:
        f = torch.compile(f, backend=backend, fullgraph=True)
    (got,) = torch.autograd.grad(f(H, XS, w), w)
    assert_same(got, first(model(loop), w).detach())


def test_a_second_derivative_goes_through_its_backward():
    w = W.clone().requires_grad_()
    got, want = ((first(model(s), w) ** 2).sum() for s in (scan, loop))
    assert_same(torch.autograd.grad(got, w), torch.autograd.grad(want, w))


@pytest.mark.filterwarnings("ignore:torch_scan_hop")  # it runs step by step, and says so
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(lambda w: vmap(f, (0, 1, None))(H, XS, w).sum())(W),
        lambda f: jvp(lambda w: f(H, XS, w), (W,), (W,)),
        lambda f: hessian(lambda w: f(H, XS, w))(W),
    ],
    ids=["grad of vmap", "jvp", "hessian"],
)
def test_transforms_use_its_own_rules(transform):
    got = transform(model(scan, Transformable))
    assert_same(got, transform(model(loop, Transformable)))


class Scaled(torch.autograd.Function):
    """A surrogate gradient: its backward reads what it was given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g / (1 + x.abs()) ** 2


def test_a_second_derivative_at_a_second_size():
    """From the second size on, the saved sizes are numbers among its inputs."""
    w = W.clone().requires_grad_()

    def twice(scan_, rows):
        def cell(h, x):
            h = torch.tanh(x @ w + Scaled.apply(h @ w))
            return h, h

        h, ys = scan_(cell, H[:1].expand(rows, 2).clone(), XS[:, :1].expand(-1, rows, -1))
        (g,) = torch.autograd.grad((h**2).sum() + (ys**2).sum(), w, create_graph=True)
        return torch.autograd.grad((g**2).sum(), w)

    for rows in (3, 2, 5):
        assert_same(twice(scan, rows), twice(loop, rows))


class ByItsResult(torch.autograd.Function):
    """Its gradients are computed of a view of what it saves: its own result, or an input."""

    @staticmethod
    def forward(ctx, w, x):
        z = torch.tanh(x @ w + x)
        ctx.save_for_backward(w, x, z)
        return z

    @staticmethod
    def backward(ctx, g):
        w, x, z = ctx.saved_tensors
        return z.T @ g + x.mT @ (g * z), g * z + (g @ w.T) * z.T.T


def test_a_second_derivative_through_views_of_what_was_saved():
    torch.manual_seed(0)
    w = torch.randn(2, 2, dtype=F64, requires_grad=True)
    h, xs = torch.randn(3, 2, dtype=F64, requires_grad=True), XS.clone().requires_grad_()

    def cell(h, x):
        h = ByItsResult.apply(w, x + 0.5 * h)
        return h, h.sum(-1)

    def derivatives(scan_):
        last, ys = scan_(cell, h, xs)
        first = torch.autograd.grad(
            (last * h).sum() + ys.square().sum(), (w, h, xs), create_graph=True
        )
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), (w, h, xs))

    assert_same(derivatives(scan), derivatives(loop))
