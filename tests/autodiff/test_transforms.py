"""functorch's transforms of a scan, alone and composed: values, and that each is a scan again."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import assert_same, loop
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
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


class Model(nn.Module):
    """``f`` of its parameters."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Parameter(W.clone()), nn.Parameter(U.clone())

    def forward(self, f, h, xs):
        return f(h, xs, self.w, self.u)


MODEL = Model()  # Dynamo makes no parameters


def of_functional_call(f, h, xs, w, u):
    return grad(lambda p: functional_call(MODEL, p, (f, h, xs)))({"w": 2 * w, "u": u})


def of_linearize(f, *args):
    value, tangent = linearize(f, *args)
    return value, tangent(*args)


def pulled_back(f, *args, **options):
    value, pullback, *aux = vjp(f, *args, **options)
    return value, pullback(torch.ones_like(value)), aux


def rows(*tensors):
    """Each as a batch, that differs in its elements."""
    return [torch.stack([t, 2 * t, t - 1]) for t in tensors]


#: Each as a function of ``f``, a scan made a scalar, and its arguments.
TRANSFORMS = {
    "grad": lambda f, *a: grad(f, (0, 1, 2, 3))(*a),
    "vjp": pulled_back,
    "jvp": lambda f, *a: jvp(f, a, ONES),
    "jvp of one input": lambda f, h, xs, w, u: jvp(lambda w: f(h, xs, w, u), (w,), (w,)),
    "linearize": of_linearize,
    "functional_call": of_functional_call,
    "jacrev": lambda f, *a: jacrev(f, 2)(*a),
    "jacfwd": lambda f, *a: jacfwd(f, 2)(*a),
    "hessian": lambda f, *a: hessian(f, 2)(*a),
    "jacrev of jacrev": lambda f, *a: jacrev(jacrev(f, 3), 3)(*a),
    "jacrev of jacfwd": lambda f, *a: jacrev(jacfwd(f, 3), 3)(*a),
    "jacfwd of jacfwd": lambda f, *a: jacfwd(jacfwd(f, 3), 3)(*a),
    "grad of grad": lambda f, h, xs, w, u: grad(lambda w: (grad(f, 2)(h, xs, w, u) ** 2).sum())(w),
    "hvp forward over reverse": lambda f, *a: jvp(grad(f, 2), a, ONES),
    "hvp reverse over forward": lambda f, *a: grad(lambda *a: jvp(f, a, ONES)[1], (0, 1, 2, 3))(*a),
    "hvp reverse over reverse": lambda f, *a: vjp(grad(f, 2), *a)[1](a[2]),
    "vmap of rows": lambda f, *a: vmap(f, PER_ROW)(*a),
    "vmap of one row": lambda f, h, xs, w, u: vmap(f, PER_ROW)(h[:1], xs[:, :1], w, u),
    "vmap of T": lambda f, h, xs, w, u: vmap(f, (None, 2, None, None))(
        h, torch.stack([(k + 1) * xs for k in range(T)], 2), w, u
    ),
    "vmap of init": lambda f, h, xs, w, u: vmap(f, (1, None, None, None))(
        torch.stack([h, h + 1], 1), xs, w, u
    ),
    "vmap of xs": lambda f, h, xs, w, u: vmap(f, (None, -1, None, None))(
        h, torch.stack([xs, xs + 1], -1), w, u
    ),
    "vmap of weights": lambda f, h, xs, w, u: vmap(f, (None, None, 0, None))(
        h, xs, torch.stack([w, 2 * w]), u
    ),
    "vmap of init and weights": lambda f, h, xs, w, u: vmap(f, (-1, None, None, 1))(
        torch.stack([h, h + 1], -1), xs, w, torch.stack([u, 2 * u], 1)
    ),
    "vmap of all": lambda f, *a: vmap(f)(*rows(*a)),
    "vmap of grad": lambda f, *a: vmap(grad(f, (2, 3)), PER_ROW)(*a),
    "vmap of grad, out_dims": lambda f, *a: vmap(grad(f, (1, 2)), PER_ROW, out_dims=(1, -1))(*a),
    "grad of vmap": lambda f, h, xs, w, u: grad(lambda w: vmap(f, PER_ROW)(h, xs, w, u).sum())(w),
    "jvp of vmap": lambda f, h, xs, w, u: jvp(lambda w: vmap(f, PER_ROW)(h, xs, w, u), (w,), (w,)),
    "vmap of jvp": lambda f, h, xs, w, u: vmap(
        lambda w: jvp(lambda xs: f(h, xs, w, u), (xs,), (xs,))
    )(torch.stack([w, u])),
    "vmap of vmap": lambda f, h, xs, w, u: vmap(vmap(f, PER_ROW), (None, None, 0, None))(
        h, xs, torch.stack([w, u]), u
    ),
}

#: Folding constants, ``linearize`` runs what the loop changes in place twice.
ORACLES = {**TRANSFORMS, "linearize": lambda f, *a: jvp(f, a, a)}

#: At most: two for each level of reverse mode, one for all the others.
SCANS = {
    **dict.fromkeys(TRANSFORMS, 1),
    **dict.fromkeys(
        [
            "grad", "vjp", "linearize", "functional_call", "jacrev", "hessian", "jacrev of jacfwd",
            "hvp forward over reverse", "hvp reverse over forward", "vmap of grad",
            "vmap of grad, out_dims", "grad of vmap",
        ],
        2,
    ),
    **dict.fromkeys(["jacrev of jacrev", "grad of grad", "hvp reverse over reverse"], 4),
}  # fmt: skip


def scans_of(graph_module):
    op = torch.ops.higher_order.scan
    return graph_module.graph.find_nodes(op="call_function", target=op)


def eager(run, transform):
    return run(*ALL)


def compiled(run, transform):
    if transform == "linearize":
        pytest.skip("Dynamo does not trace linearize, of a loop either")
    return torch.compile(run, backend="aot_eager", fullgraph=True)(*ALL)


def traced(run, transform):
    graph = make_fx(run)(*ALL)
    assert 1 <= len(scans_of(graph)) <= SCANS[transform]
    return graph(*ALL)


BACKENDS = {"eager": eager, "aot_eager": compiled, "make_fx": traced}


#: One of each kind for Dynamo, which traces functorch; what that does to a scan is make_fx's part.
UNDER_DYNAMO = {
    "grad", "jvp", "functional_call", "hessian", "hvp forward over reverse", "vmap of rows",
    "vmap of weights", "vmap of grad", "jvp of vmap",
}  # fmt: skip


def in_short(cell, transform, backend):
    """Whether a case runs by default: all of them take minutes."""
    if backend == "eager":
        return cell == "rnn" or transform in {"jvp", "grad of grad", "hessian", "vmap of grad"}
    if backend == "aot_eager":
        return cell == "rnn" and transform in UNDER_DYNAMO
    return cell == "recurrence"


@pytest.mark.torch_version
@pytest.mark.works("torch.func, vmap")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # linearize's own
@pytest.mark.parametrize(
    ("cell", "transform", "backend"),
    [
        pytest.param(*case, marks=() if in_short(*case) else pytest.mark.slow)
        for case in itertools.product(CELLS, TRANSFORMS, BACKENDS)
    ],
)
def test_equals_the_loop(cell, transform, backend):
    f = CELLS[cell]
    actual = BACKENDS[backend](lambda *args: TRANSFORMS[transform](f(scan), *args), transform)
    assert_same(actual, ORACLES[transform](f(loop), *ALL))


@pytest.mark.works("torch.func, vmap")
@pytest.mark.filterwarnings("ignore:torch_scan_hop")  # Dynamo of 2.15 refuses such duals
@pytest.mark.parametrize("cell", CELLS)
def test_forward_ad(cell):
    def tangent(scan_):
        with forward_ad.dual_level():
            out = CELLS[cell](scan_)(H, forward_ad.make_dual(XS, XS), W, U)
            return forward_ad.unpack_dual(out).tangent

    assert_same(tangent(scan), tangent(loop))


def test_vmap_randomness_different_draws_for_each_row():
    def draw(h):
        _, ys = scan(lambda h, x: (h, torch.rand_like(h) + 0 * x), h, torch.zeros(5, dtype=F64))
        return ys

    ys = vmap(draw, randomness="different")(torch.zeros(3, dtype=F64))
    assert ys.unique().numel() == 15
    ys = vmap(draw, randomness="same")(torch.zeros(3, dtype=F64))
    assert ys.unique().numel() == 5


def test_vmap_randomness_error_is_the_default():
    def draw(h):
        return scan(lambda h, x: (h, torch.rand_like(h) + 0 * x), h, torch.zeros(5, dtype=F64))[1]

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(draw)(torch.zeros(3, dtype=F64))


SUBSETS = [s for s in itertools.product((False, True), repeat=4) if any(s)]
OUT_DIMS = [(0, 0), (1, -1), (-1, 1), (2, 3)]


@pytest.mark.parametrize(
    "batched", SUBSETS, ids=lambda s: "".join("-hxwu"[b and k + 1] for k, b in enumerate(s))
)
def test_vmap_of_any_mix(batched):
    """Of init, xs and closures, each batched at another dimension, and so are the results."""

    def run(scan_):
        def f(h, xs, w, u):
            def cell(h, x):
                h = torch.tanh(x @ w + h @ u)
                return h, h * x

            return scan_(cell, h, xs)

        return f

    k = SUBSETS.index(batched)
    batch_size = (1, 2, T)[k % 3]
    in_dims = tuple(
        (k + n) % (t.ndim + 1) if b else None
        for n, (t, b) in enumerate(zip(ALL, batched, strict=True))
    )
    args = [
        t if d is None else torch.stack([t * (n + 1) for n in range(batch_size)], d)
        for t, d in zip(ALL, in_dims, strict=True)
    ]
    out_dims = OUT_DIMS[k % len(OUT_DIMS)]
    assert_same(*(vmap(run(scan_), in_dims, out_dims)(*args) for scan_ in (scan, loop)))


def with_other_leaves(scan_):
    """An int and a bool in the carry, in xs and in ys, an int closure, and None everywhere."""

    def f(h, xs, ints, keep, offset):
        def cell(c, x):
            h = torch.where(x["keep"], torch.tanh(c["h"] + x["x"] * (x["k"] + offset)), c["h"])
            carry = {"h": h, "n": c["n"] + x["k"], "seen": c["seen"] | x["keep"], "none": c["none"]}
            return carry, {"h": h**2, "k": x["k"] * c["n"], "positive": h > 0, "none": x["none"]}

        init = {"h": h, "n": offset * 0, "seen": torch.zeros_like(keep[0]), "none": None}
        carry, ys = scan_(cell, init, {"x": xs, "k": ints, "keep": keep, "none": None})
        assert carry.pop("none") is None and ys.pop("none") is None  # torch transforms tensors
        return carry["h"].sum() + ys["h"].sum(), (carry, ys)

    return f


INTS, KEEP, OFFSET = torch.arange(T), XS > -0.5, torch.tensor(2)
WITH_OTHER_LEAVES = {
    "grad": lambda f, *a: grad(f, (0, 1), has_aux=True)(*a),
    "vjp": lambda f, *a: pulled_back(lambda *p: f(*p, *a[2:]), *a[:2], has_aux=True),
    "jvp": lambda f, *a: jvp(lambda *p: f(*p, *a[2:]), a[:2], a[:2]),
    "vmap": lambda f, *a: vmap(f)(*rows(*a[:3]), torch.stack([a[3]] * 3), torch.stack([a[4]] * 3)),
    "vmap of ints": lambda f, *a: vmap(f, (None, None, 0, None, None))(*a[:2], torch.stack([a[2]] * 2), *a[3:]),
    "vmap of bools": lambda f, *a: vmap(f, (None, None, None, 1, None))(*a[:3], torch.stack([a[3], ~a[3]], 1), a[4]),
    "vmap of grad": lambda f, *a: vmap(grad(f, has_aux=True), (None, None, 0, None, 0))(
        *a[:2], torch.stack([a[2]] * 2), a[3], torch.stack([a[4], a[4] + 1])
    ),
}  # fmt: skip


@pytest.mark.torch_version
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transform", WITH_OTHER_LEAVES)
def test_integer_bool_and_none_leaves_pass_through(transform, backend):
    args = (H, XS, INTS, KEEP, OFFSET)

    def run(*args):
        return WITH_OTHER_LEAVES[transform](with_other_leaves(scan), *args)

    expected = WITH_OTHER_LEAVES[transform](with_other_leaves(loop), *args)
    if backend == "aot_eager":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    elif backend == "make_fx":
        run = make_fx(run)(*args)
    assert_same(run(*args), expected)


def attends(h, kv):
    k, v = kv
    return torch.tanh(h + nn.functional.scaled_dot_product_attention(h, k, v)), h


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_what_cannot_be_differentiated_twice():
    """``grad`` makes a graph of each backward: attention's has no derivative, and needs none."""
    h, k, v = torch.ones(1, 2, 3, 4), torch.randn(3, 1, 2, 3, 4), torch.randn(3, 1, 2, 3, 4)

    def loss(run, h, k):
        carry, ys = run(attends, h, (k, v))
        return (carry + ys).square().sum()

    def once(run):
        f = functools.partial(loss, run)
        leaves = h.clone().requires_grad_(), k.clone().requires_grad_()
        with_graph = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
        rows = vmap(grad(f), (0, None))(torch.stack([h, 2 * h]), leaves[1])
        return *(g.detach() for g in with_graph), rows, *grad(f, (0, 1))(h, k)

    assert_same(once(scan), once(loop), 1e-4)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        leaf = h.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(scan, leaf, k), leaf, create_graph=True)
        first.sum().backward()
