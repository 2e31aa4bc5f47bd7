"""Reverse mode in eager: gradients, their order, and what is saved for them."""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import pytest
import torch
from cells import CELLS
from oracle import assert_same, check, gradients, loop, randn, scalar, zeros_for_none
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from torch_scan_hop import scan
from torch_scan_hop._torch import tracing
from torch_scan_hop.autodiff import joint
from torch_scan_hop.eager import run as eager_run

F64 = torch.float64


def leaves(**shapes):
    return {name: randn(*shape) for name, shape in shapes.items()}


def recurrence(values, scan_, reverse=False):
    """Two carries, of which one is read by the other only, a constant y and an int y."""

    def cell(carry, x):
        h, s = carry
        h = torch.tanh(h @ values["w"] + x)
        s = s * values["a"] + h.sum()
        return (h, s), {"h": h, "one": torch.ones_like(h), "n": (h > 0).sum(), "x": x}

    return scan_(cell, (values["h"], values["s"]), values["xs"], reverse=reverse)


NAMES = ("h", "s", "xs", "w", "a")


def _subsets():
    """Each alone, each two, and all of them; three or four of five are slow tests."""
    for n in range(1, 6):
        marks = pytest.mark.slow if n in (3, 4) else ()
        for wanted in itertools.combinations(NAMES, n):
            yield pytest.param(wanted, marks=marks, id="-".join(wanted))


@pytest.mark.parametrize("wanted", list(_subsets()))
def test_every_subset_of_inputs(wanted):
    values = leaves(h=(2, 3), s=(), xs=(4, 2, 3), w=(3, 3), a=())
    for name in wanted:
        values[name].requires_grad_()
    wrt = [values[name] for name in wanted]
    actual, expected = recurrence(values, scan), recurrence(values, loop)
    assert_same(actual, expected)
    assert_same(
        zeros_for_none(gradients(actual, wrt), wrt), zeros_for_none(gradients(expected, wrt), wrt)
    )
    flags = [t.requires_grad for t in (*actual[0], *actual[1].values())]
    assert flags == [t.requires_grad for t in (*expected[0], *expected[1].values())]


def test_init_that_needs_no_grad_passes_gradients_on():
    # torch 2.9.1's own scan: silently wrong for every RNN that starts from zeros
    w = randn(3, 3).requires_grad_()

    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, None

    check(cell, torch.zeros(2, 3, dtype=F64), randn(4, 2, 3), params=[w])
    xs, zeros = randn(4, 2, 3), torch.zeros(2, 3, dtype=F64)
    got = torch.autograd.grad(scan(cell, zeros, xs)[0].sum(), w)
    assert_same(got, torch.autograd.grad(loop(cell, zeros, xs)[0].sum(), w))


def test_constant_outputs_do_not_require_grad():
    w = randn(3).requires_grad_()

    def cell(carry, x):
        h, n = carry
        return (h * w, n + 1), (torch.ones_like(h), x, h.detach(), n, h)

    (h, n), (ones, x, detached, count, y) = scan(cell, (randn(3), torch.tensor(0)), randn(4, 3))
    assert h.requires_grad and y.requires_grad
    assert not any(t.requires_grad for t in (n, ones, x, detached, count))


def test_no_grad_records_nothing():
    w = randn(3).requires_grad_()
    with torch.no_grad():
        h, y = scan(lambda h, x: (h * w + x, h), randn(3), randn(4, 3))
    assert not h.requires_grad and not y.requires_grad


# --- orders ---


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [0, 1, 3])
def test_gradcheck(T, reverse):
    def run(h, s, xs, w, a):
        values = {"h": h, "s": s, "xs": xs, "w": w, "a": a}
        (h, s), ys = recurrence(values, scan, reverse)
        return h, s, ys["h"], ys["x"]

    inputs = [
        v.requires_grad_() for v in leaves(h=(2, 2), s=(), xs=(T, 2, 2), w=(2, 2), a=()).values()
    ]
    assert torch.autograd.gradcheck(run, inputs)
    if T != 1:
        assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.works("gradients of any order")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[pytest.mark.slow] if cell == "transformer" else [])
        for cell in CELLS
    ],
)
def test_double_backward(cell):
    p = CELLS[cell].problem(F64, T=3, B=2)
    wrt = [t.requires_grad_() for t in torch.utils._pytree.tree_leaves(p.xs)]
    wrt += list(p.params.values())

    def second(scan_):
        first = torch.autograd.grad(
            scalar(scan_(p.combine_fn, p.init, p.xs)), wrt, create_graph=True
        )
        return list(torch.autograd.grad(sum((g**2).sum() for g in first), wrt))

    assert_same(second(scan), second(loop))


@pytest.mark.works("gradients of any order")
def test_third_order():
    w = randn(2).requires_grad_()

    def third(scan_):
        _, ys = scan_(lambda h, x: ((h * w + x).sin(), h), randn0, xs)
        value = ys.sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), w, create_graph=True)
        return value

    randn0, xs = randn(2), randn(3, 2)
    assert_same(third(scan), third(loop))


def test_retain_graph_twice():
    w = randn(3).requires_grad_()
    h, ys = scan(lambda h, x: (torch.tanh(h * w + x), h), randn(3), randn(4, 3))
    first = torch.autograd.grad(ys.sum(), w, retain_graph=True)
    again = torch.autograd.grad(ys.sum(), w, retain_graph=True)
    assert_same(first, again)
    torch.autograd.grad(h.sum(), w)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(ys.sum(), w)


@pytest.mark.parametrize("used", ["carry 0", "carry 1", "y", "one step of y", "x"])
def test_only_some_outputs_used(used):
    values = {
        k: v.requires_grad_()
        for k, v in leaves(h=(2, 3), s=(), xs=(4, 2, 3), w=(3, 3), a=()).items()
    }
    pick = {
        "carry 0": lambda r: r[0][0].sum(),
        "carry 1": lambda r: r[0][1].sum(),
        "y": lambda r: r[1]["h"].sum(),
        "one step of y": lambda r: r[1]["h"][1, 0].sum(),
        "x": lambda r: (r[1]["x"] ** 2).sum(),
    }[used]
    wrt = list(values.values())
    got = torch.autograd.grad(pick(recurrence(values, scan)), wrt, allow_unused=True)
    want = torch.autograd.grad(pick(recurrence(values, loop)), wrt, allow_unused=True)
    assert_same(zeros_for_none(list(got), wrt), zeros_for_none(list(want), wrt))


def test_backward_accumulates_into_grad():
    cell = nn.GRUCell(3, 4).double()
    h, xs = torch.zeros(2, 4, dtype=F64), randn(5, 2, 3)

    def step(h, x):
        h = cell(x, h)
        return h, h

    scan(step, h, xs)[1].sum().backward()
    once = [p.grad.clone() for p in cell.parameters()]
    scan(step, h, xs)[1].sum().backward()
    assert_same([p.grad for p in cell.parameters()], [2 * g for g in once])


# --- autograd's machinery ---


def test_hooks_fire():
    w = randn(3).requires_grad_()
    seen = []
    w.register_hook(lambda g: seen.append("w"))
    h, ys = scan(lambda h, x: (h * w + x, h), randn(3), randn(4, 3))
    ys.register_hook(lambda g: seen.append("ys"))
    h.register_hook(lambda g: seen.append("h"))
    w.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    (h.sum() + ys.sum()).backward()
    assert sorted(seen) == ["accumulated", "h", "w", "ys"] or set(seen) == {
        "h",
        "ys",
        "w",
        "accumulated",
    }
    assert len(seen) == 4


@pytest.mark.parametrize("use", ["unused", "detached", "in a nested scan"])
def test_hooks_of_what_has_no_gradient_are_not_called(use):
    w, xs, h0 = torch.ones(3).double().requires_grad_(), randn(40, 3), randn(3)
    v = w * 2
    v.register_hook(lambda gradient: gradient.tanh())  # no method of None

    def body(h, x):
        unused = v * 3
        h = torch.tanh(h + w * x)
        if use == "unused":
            return h, h
        if use == "detached":
            return h, h + unused.detach()
        made = h * 2
        made.register_hook(lambda gradient: gradient.tanh())
        return scan(lambda c, y: (torch.sin(c + y), (made * y).detach()), h, xs[:20])[0], h

    _, ys = scan(body, h0, xs)
    (found,) = torch.autograd.grad(ys.sum(), w)
    h, total = h0, 0
    for x in xs:
        h = torch.tanh(h + w * x)
        total = total + h.sum()
        for y in xs[:20] if use == "in a nested scan" else ():
            h = torch.sin(h + y)
    (expected,) = torch.autograd.grad(total, w)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changed", ["w", "xs"])
def test_a_saved_tensor_changed_in_place_is_an_error(changed):
    w, xs = randn(3).requires_grad_(), randn(4, 3)
    h, _ys = scan(lambda h, x: ((h * w + x).tanh() * x, h * w), randn(3), xs)
    h2, _hs = scan(lambda h, x: (torch.tanh(h * w + x),) * 2, randn(3), xs)
    with torch.no_grad():
        {"w": w, "xs": xs}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(h.sum() + h2.sum(), w)


def test_saved_tensors_hooks_see_what_is_saved():
    packed, unpacked = [], []
    w = randn(3).requires_grad_()

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    def unpack(t):
        unpacked.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _, ys = scan(lambda h, x: (torch.tanh(h * w + x),) * 2, randn(3), randn(4, 3))
    got = torch.autograd.grad(ys.sum(), w)
    assert packed and len(packed) == len(unpacked)
    assert got[0].shape == w.shape


def test_a_scan_of_a_scan_backward():
    w = randn(2, 2).requires_grad_()

    def run(scan_):
        def inner(h, x):
            h = torch.tanh(h @ w + x)
            return h, h

        def outer(h, xs):
            h, ys = scan_(inner, h, xs)
            return h, ys.sum(0)

        return scan_(outer, h0, xs)

    h0, xs = randn(2), randn(3, 4, 2)
    actual, expected = run(scan), run(loop)
    assert_same(actual, expected)
    assert_same(gradients(actual, [w]), gradients(expected, [w]))


# --- randomness ---


def test_dropout_masks_differ_and_the_gradient_matches_the_mask():
    w = torch.ones(1000, dtype=F64, requires_grad=True)

    def cell(h, x):
        y = nn.functional.dropout(x * w, 0.5)
        return h, y

    _, ys = scan(cell, torch.zeros(()), torch.ones(4, 1000, dtype=F64))
    assert set(ys.unique().tolist()) == {0.0, 2.0}
    assert not (ys[0] == ys[1]).all()
    (g,) = torch.autograd.grad(ys.sum(), w)
    assert_same(g, ys.detach().sum(0))


def test_randomness_is_consumed_as_by_the_loop():
    w = randn(8).requires_grad_()

    def cell(h, x):
        h = nn.functional.dropout(torch.tanh(h * w + x), 0.5) + torch.rand_like(h)
        return h, h

    h, xs = randn(8), randn(5, 8)

    def run(scan_):
        torch.manual_seed(7)
        result = scan_(cell, h, xs)
        return result, gradients(result, [w]), torch.rand(3)

    assert_same(run(scan), run(loop))


@pytest.mark.parametrize("checkpoint", [None, "full"])
def test_dropout_is_not_redrawn_by_a_checkpoint(checkpoint):
    w = torch.ones(100, dtype=F64, requires_grad=True)
    cell = lambda h, x: (h + x, nn.functional.dropout(x * w, 0.5))  # noqa: E731
    _, ys = scan(
        cell, torch.zeros(100, dtype=F64), torch.ones(3, 100, dtype=F64), checkpoint=checkpoint
    )
    (g,) = torch.autograd.grad(ys.sum(), w)
    assert_same(g, ys.detach().sum(0))


# --- what is saved ---


def kept_bytes(run):
    """Bytes alive after a forward: memory of its results and of what autograd saves, once each.

    By address, and without asking for it in a way that lets one write: that would make a copy.
    """
    storages = {}

    def pack(tensor):
        storages[torch._C._data_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    for leaf in torch.utils._pytree.tree_leaves(result):
        storages[torch._C._data_address(leaf)] = leaf.untyped_storage().nbytes()
    return sum(storages.values())


def natural_loop(combine_fn, carry, xs):
    """The loop as people write it: no copies."""
    ys = []
    for x in torch.utils._pytree.tree_map(lambda v: v.unbind(0), xs):
        carry, y = combine_fn(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


@pytest.mark.parametrize("cell", ["tanh_rnn", "gru", "lstm", "linear_recurrence"])
def test_residuals_are_never_more_than_the_loops(cell):
    p = CELLS[cell].problem(torch.float32, T=32, B=4, D=16, H=16)
    run = lambda: scan(p.combine_fn, p.init, p.xs)  # noqa: E731
    run()
    assert kept_bytes(run) <= kept_bytes(lambda: natural_loop(p.combine_fn, p.init, p.xs))


def test_full_checkpoint_saves_carries_only():
    p = CELLS["lstm"].problem(torch.float32, T=32, B=4, D=16, H=16)
    full = kept_bytes(lambda: scan(p.combine_fn, p.init, p.xs, checkpoint="full"))
    carries = 32 * 2 * 4 * 16 * 4
    inputs = sum(t.nbytes for t in [*p.params.values(), p.xs, *p.init])
    last_carry = 2 * 4 * 16 * 4
    assert full <= carries + inputs + last_carry
    assert full < kept_bytes(lambda: scan(p.combine_fn, p.init, p.xs))


# --- traces ---


def test_the_second_training_call_traces_nothing(monkeypatch):
    traces = []
    original = tracing.trace

    def counted(*args, **kwargs):
        traces.append(args[0])
        return original(*args, **kwargs)

    import torch_scan_hop.eager.run as dense

    for module in (tracing, joint, dense):
        if hasattr(module, "trace"):
            monkeypatch.setattr(module, "trace", counted)
    p = CELLS["lstm"].problem(F64, T=5, B=2)

    def train():
        result = scan(p.combine_fn, p.init, p.xs)
        return gradients(result, list(p.params.values()))

    first = train()
    assert traces
    traces.clear()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = train()
    assert not traces
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    assert_same(first, second)


def _trained_on_fakes(run, **options):
    xs, w, b = (torch.randn(s, requires_grad=True) for s in ((5, 2, 3), (3, 3), (3,)))

    def cell(h, x):
        h = torch.tanh(h @ w + x + b)
        return h, h * 2

    h, ys = run(cell, torch.zeros(2, 3), xs, **options)
    (h.sum() + ys.sum()).backward()
    return [h, ys, xs.grad, w.grad, b.grad]


@pytest.mark.parametrize("checkpoint", [None, "full", "sqrt", 2])
def test_backward_under_a_users_fake_mode(checkpoint):
    """What a training step would make and compute, without its numbers."""
    found = []
    for run, options in ((loop, {}), (scan, {"checkpoint": checkpoint})):
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            results = _trained_on_fakes(run, **options)
        assert all(isinstance(t, FakeTensor) for t in results)
        metadata = [(t.shape, t.dtype, t.device, t.stride()) for t in results]
        found.append((metadata, counter.get_total_flops()))
    assert found[0] == found[1]


def test_second_derivative_under_a_users_fake_mode():
    with FakeTensorMode():
        xs = torch.randn(5, 2, 3, requires_grad=True)
        _, ys = scan(lambda h, x: (torch.tanh(h + x), h), torch.zeros(2, 3), xs)
        (first,) = torch.autograd.grad(ys.sum(), xs, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), xs)
    assert isinstance(second, FakeTensor) and second.shape == xs.shape


def test_a_backward_that_reads_nothing_of_its_steps_is_planned():
    a, h = torch.rand(4, dtype=F64, requires_grad=True), torch.ones(4, dtype=F64)
    with mock.patch.object(eager_run, "loop", side_effect=AssertionError("it runs step by step")):
        check(lambda h, x: (h * 0.5 + a.exp(), None), h, length=9, params=[a])
