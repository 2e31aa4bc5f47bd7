"""functorch's transforms of a scan, alone and composed: values, and that each is a scan again."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import assert_same, loop
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop import scan

F64 = torch.float64
T, B, D = 4, 3, 2


def rnn(scan_):
    def f(h0, xs, w, u):
        def cell(h, x):
            h = torch.tanh(x @ w + h @ u)
            return h, (h, h.detach() > 0)

        h, (ys, _) = scan_(cell, h0, xs)
        return h.sum() + (ys**2).sum()

    return f


def recurrence(scan_):
    def f(h0, xs, w, u):
        def cell(h, x):
            h = torch.sigmoid(x @ w) * h + x * u.diagonal()
            return h, h

        return (scan_(cell, h0, xs, reverse=True)[1] ** 3).sum()

    return f


def stopped(scan_):
    """Gradients stop at a detach, in every order of derivative."""

    def f(h0, xs, w, u):
        def cell(h, x):
            z = torch.tanh(x @ w + h.detach() @ u)
            return z, (z * h, h.detach())

        h, (ys, ds) = scan_(cell, h0, xs)
        return (h**2).sum() + (ys**2).sum() + (ds * ys).sum()

    return f


def without_grad(scan_):
    """``no_grad`` stops reverse mode only; a detached alias may be written to."""

    def f(h0, xs, w, u):
        def cell(h, x):
            with torch.no_grad():
                scale = torch.ones_like(h)
                scale.detach()[0].mul_(2.0)
                g = torch.sin(h) * h.detach() * scale
            z = torch.tanh(x @ w + g @ u)
            return z, (z * h, g)

        h, (ys, gs) = scan_(cell, h0, xs)
        return (h**2).sum() + (ys**2).sum() + (gs * ys).sum()

    return f


def two_carries(scan_):
    def f(h0, xs, w, u):
        def cell(c, x):
            h = torch.sin(c["h"] @ w + x)
            return {"n": c["n"] + 1, "h": h, "s": c["s"] + h @ u}, c["s"] * h

        c, ys = scan_(
            cell, {"h": h0, "s": torch.zeros_like(h0), "n": torch.zeros((), dtype=torch.int64)}, xs
        )
        return (c["s"] ** 2).sum() + ys.sum()

    return f


CELLS = {
    "rnn": rnn,
    "recurrence": recurrence,
    "stopped": stopped,
    "without_grad": without_grad,
    "two_carries": two_carries,
}


def arguments():
    torch.manual_seed(0)
    return [torch.randn(s, dtype=F64) for s in ((B, D), (T, B, D), (D, D), (D, D))]


H, XS, W, U = arguments()
ALL = (H, XS, W, U)
ONES = tuple(torch.ones_like(t) for t in ALL)
PER_ROW = (0, 1, None, None)

TRANSFORMS = {
    "grad": lambda f: grad(f, (0, 1, 2, 3))(*ALL),
    "vjp": lambda f: vjp(f, *ALL)[1](torch.tensor(1.0, dtype=F64)),
    "jvp": lambda f: jvp(f, ALL, ONES),
    "jvp of one input": lambda f: jvp(lambda w: f(H, XS, w, U), (W,), (W,)),
    "jacrev": lambda f: jacrev(f, 2)(*ALL),
    "jacfwd": lambda f: jacfwd(f, 2)(*ALL),
    "hessian": lambda f: hessian(f, 2)(*ALL),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 3), 3)(*ALL),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f, 3), 3)(*ALL),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, 3), 3)(*ALL),
    "grad of grad": lambda f: grad(lambda w: (grad(f, 2)(H, XS, w, U) ** 2).sum())(W),
    "hvp": lambda f: jvp(grad(f, 2), ALL, ONES),
    "vmap of rows": lambda f: vmap(f, PER_ROW)(*ALL),
    "vmap of weights": lambda f: vmap(f, (None, None, 0, None))(H, XS, torch.stack([W, 2 * W]), U),
    "vmap of init": lambda f: vmap(f, (1, None, None, None))(torch.stack([H, H + 1], 1), XS, W, U),
    "vmap of grad": lambda f: vmap(grad(f, (2, 3)), PER_ROW)(*ALL),
    "grad of vmap": lambda f: grad(lambda w: vmap(f, PER_ROW)(H, XS, w, U).sum())(W),
    "jvp of vmap": lambda f: jvp(lambda w: vmap(f, PER_ROW)(H, XS, w, U), (W,), (W,)),
    "vmap of jvp": lambda f: vmap(lambda w: jvp(lambda x: f(H, x, w, U), (XS,), (XS,)))(
        torch.stack([W, U])
    ),
    "vmap of vmap": lambda f: vmap(vmap(f, PER_ROW), (None, None, 0, None))(
        H, XS, torch.stack([W, U]), U
    ),
}


@pytest.mark.torch_version
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_the_loop(cell, transform):
    apply, make = TRANSFORMS[transform], CELLS[cell]
    assert_same(apply(make(scan)), apply(make(loop)))


@pytest.mark.filterwarnings("ignore:torch_scan_hop")  # Dynamo of 2.15 refuses such duals
@pytest.mark.parametrize("cell", CELLS)
def test_forward_ad(cell):
    def tangent(scan_):
        with forward_ad.dual_level():
            out = CELLS[cell](scan_)(H, forward_ad.make_dual(XS, XS), W, U)
            return forward_ad.unpack_dual(out).tangent

    assert_same(tangent(scan), tangent(loop))


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "transform", ["grad", "jvp", "hessian", "vmap of rows", "vmap of grad", "grad of vmap", "hvp"]
)
def test_compiled(transform):
    apply = TRANSFORMS[transform]
    run = torch.compile(lambda: apply(rnn(scan)), backend="aot_eager", fullgraph=True)
    assert_same(run(), apply(rnn(loop)))


def test_vmap_randomness_different_draws_for_each_row():
    def draw(h):
        _, ys = scan(lambda h, x: (h, torch.rand_like(h) + 0 * x), h, torch.zeros(5, dtype=F64))
        return ys

    ys = vmap(draw, randomness="different")(torch.zeros(3, dtype=F64))
    assert ys.unique().numel() == 15
    ys = vmap(draw, randomness="same")(torch.zeros(3, dtype=F64))
    assert ys.unique().numel() == 5


def scans_of(graph_module):
    op = torch.ops.higher_order.scan
    return graph_module.graph.find_nodes(op="call_function", target=op)


@pytest.mark.parametrize(
    ("transform", "count"),
    [
        (lambda f: lambda *a: grad(f, (2, 3))(*a), 2),
        (lambda f: lambda *a: vjp(f, *a)[0], 1),
        (lambda f: lambda *a: jvp(f, a, ONES), 1),
        (lambda f: lambda *a: vmap(f, PER_ROW)(*a), 1),
        (lambda f: lambda *a: vmap(grad(f, (2, 3)), PER_ROW)(*a), 2),
        (lambda f: lambda *a: jvp(grad(f, 2), a, ONES), 2),
    ],
    ids=["grad", "vjp", "jvp", "vmap", "vmap of grad", "hvp"],
)
def test_a_transformed_scan_is_a_scan(transform, count):
    graph = make_fx(transform(rnn(scan)))(*ALL)
    graph.graph.eliminate_dead_code()
    assert len(scans_of(graph)) == count
    assert_same(graph(*ALL), transform(rnn(loop))(*ALL))
