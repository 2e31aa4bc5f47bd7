"""One test for each thing that torch's and torch_xla's scans got wrong when we began.

Named by the upstream issue where there is one; the list is in the project's baselines.
"""

from __future__ import annotations

import gc

import pytest
import torch
from graph_caches import graph_caches
from oracle import VARIANTS, assert_same, check, gradients, loop, randn
from torch import nn

from torch_scan_hop import scan

F64 = torch.float64


def rnn_with(w):
    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, h

    return cell


@pytest.mark.torch_version
@pytest.mark.parametrize("activation", [torch.tanh, torch.sigmoid], ids=["tanh", "sigmoid"])
def test_195977_training_a_tanh_carry_under_inductor(activation):
    w = randn(3, 3).requires_grad_()

    def cell(h, x):
        h = activation(h @ w + x)
        return h, None

    check(cell, randn(2, 3), randn(4, 2, 3), params=[w], variant=VARIANTS["inductor"])


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_153437_a_carry_returned_as_y(variant):
    w = randn(3, 3).requires_grad_()
    check(rnn_with(w), randn(2, 3), randn(4, 2, 3), params=[w], variant=VARIANTS[variant])


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["x", "carry", "swapped", "closure"])
def test_153437_other_aliases(kind, variant):
    w = randn(3).requires_grad_()
    cell = {
        "x": lambda c, x: ((c[0] * x, c[1]), x),
        "carry": lambda c, x: ((c[0] * x, c[1]), c[0]),
        "swapped": lambda c, x: ((c[1], c[0]), None),
        "closure": lambda c, x: ((c[0] * w, c[1]), w),
    }[kind]
    check(cell, (randn(3), randn(3)), randn(4, 3), params=[w], variant=VARIANTS[variant])


@pytest.mark.torch_version
@pytest.mark.parametrize("variant", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_153679_gradients_of_chained_scans(variant):
    w, u = randn(3, 3).requires_grad_(), randn(3, 3).requires_grad_()
    h, k, xs = (
        randn(2, 3).requires_grad_(),
        randn(2, 3).requires_grad_(),
        randn(4, 2, 3).requires_grad_(),
    )

    def run(h, k, xs, scan_=scan):
        h, ys = scan_(rnn_with(w), h, xs)
        k, zs = scan_(rnn_with(u), k + h, ys)
        return h, k, zs

    compiled = torch.compile(run, backend=variant, fullgraph=True)
    actual, expected = compiled(h, k, xs), run(h, k, xs, loop)
    assert_same(actual, expected)
    wrt = [w, u, h, k, xs]
    assert_same(gradients(actual, wrt), gradients(expected, wrt))


def test_weights_are_not_stacked_as_residuals():
    T, D = 32, 64
    w = torch.randn(D, D, requires_grad=True)
    largest = []

    def pack(t):
        largest.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        scan(rnn_with(w), torch.zeros(2, D), torch.randn(T, 2, D))
    assert max(largest) <= max(w.nbytes, T * 2 * D * 4)


def test_double_backward_is_neither_dropped_nor_wrong():
    w = randn(2, 2).requires_grad_()
    h, xs = randn(2), randn(3, 2)

    def penalty(scan_):
        (g,) = torch.autograd.grad(scan_(rnn_with(w), h, xs)[0].sum(), w, create_graph=True)
        assert g.requires_grad
        return torch.autograd.grad((g**2).sum(), w)[0]

    assert_same(penalty(scan), penalty(loop))


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_gradients_when_init_needs_none(variant):
    # silently wrong in torch 2.9.1, for every RNN that starts from zeros
    w, h, xs = randn(3, 3).requires_grad_(), torch.zeros(2, 3, dtype=F64), randn(4, 2, 3)
    actual, expected = VARIANTS[variant](rnn_with(w), h, xs), loop(rnn_with(w), h, xs)
    assert_same(gradients(actual, [w]), gradients(expected, [w]))


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_dropout_uses_one_mask_forward_and_backward(variant):
    w = torch.ones(256, dtype=F64, requires_grad=True)
    cell = lambda h, x: (h, nn.functional.dropout(x * w, 0.5))  # noqa: E731
    _, ys = VARIANTS[variant](cell, torch.zeros(()), torch.ones(3, 256, dtype=F64))
    assert_same(torch.autograd.grad(ys.sum(), w)[0], ys.detach().sum(0))


def test_a_default_argument_that_changes_is_another_body():
    # torch 2.9.1 reuses the first one's graph
    for k in (1.0, 2.0, 3.0):
        h, _ = scan(lambda c, x, k=k: (c + x * k, None), torch.zeros(2), torch.ones(3, 2))
        assert h.tolist() == [3 * k, 3 * k]


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_an_integer_carry_in_training(variant):
    w = randn(3).requires_grad_()

    def cell(carry, x):
        n, h = carry
        return (n + 1, h * w + x * n), n

    check(cell, (torch.tensor(0), randn(3)), randn(4, 3), params=[w], variant=VARIANTS[variant])


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
@pytest.mark.parametrize("index", ["vector", "scalar by index_select"])
def test_embedding_lookup_with_integer_xs(variant, index):
    table = randn(5, 3).requires_grad_()
    if index == "vector":
        init, xs = randn(2, 3), torch.tensor([[0, 1], [4, 4], [4, 0], [2, 3]])
        cell = lambda h, i: (torch.tanh(h + table[i]), None)  # noqa: E731
    else:
        init, xs = randn(3), torch.tensor([0, 4, 4, 2])
        cell = lambda h, i: (torch.tanh(h + table.index_select(0, i)[0]), None)  # noqa: E731
    check(cell, init, xs, params=[table], variant=VARIANTS[variant])


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_a_complex_carry(variant):
    a = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    h, xs = torch.zeros(3, dtype=torch.complex128), torch.randn(4, 3, dtype=torch.complex128)
    check(lambda h, x: (h * a + x, h.real), h, xs, params=[a], variant=VARIANTS[variant])


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_an_expanded_init(variant):
    w, row = randn(3, 3).requires_grad_(), randn(1, 3)
    xs = randn(4, 2, 3)
    actual = VARIANTS[variant](rnn_with(w), row.expand(2, 3), xs)
    expected = loop(rnn_with(w), row.expand(2, 3), xs)
    assert_same(actual, expected)
    assert_same(gradients(actual, [w]), gradients(expected, [w]))


def test_the_caller_keeps_its_requires_grad():
    h, xs, w = randn(2), randn(3, 2), randn(2, 2)
    before = [t.requires_grad for t in (h, xs, w)]
    scan(rnn_with(w.requires_grad_()), h, xs)
    assert [t.requires_grad for t in (h, xs)] == before[:2]


def test_insertion_order_of_a_dict_does_not_swap_leaves():
    init = {"a": torch.zeros(2), "b": torch.ones(2)}
    carry, _ = scan(lambda c, x: ({"b": c["b"], "a": c["a"] + x}, None), init, torch.ones(3, 2))
    assert carry["a"].tolist() == [3.0, 3.0] and carry["b"].tolist() == [1.0, 1.0]


@pytest.mark.torch_version
@pytest.mark.slow
def test_inductor_caches_graphs_that_hold_a_scan():
    from torch._dynamo.utils import counters

    def run(h, xs, w):
        return scan(rnn_with(w), h, xs)[0]

    args = (randn(2, 3), randn(4, 2, 3), randn(3, 3))
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with graph_caches(True):
            torch.compile(run, fullgraph=True)(*args)
    assert not counters["inductor"]["fxgraph_cache_bypass"]
    assert (
        counters["inductor"]["fxgraph_cache_hit"] or counters["aot_autograd"]["autograd_cache_hit"]
    )


def test_nothing_is_kept_alive_after_a_call():
    import weakref

    w = torch.randn(3, 3, requires_grad=True)
    h, ys = scan(rnn_with(w), torch.zeros(2, 3), torch.randn(4, 2, 3))
    seen = weakref.ref(ys)
    ys.sum().backward()
    del h, ys
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
def test_what_torch_xlas_scan_refuses(variant):
    w = randn(3).requires_grad_()  # closures; int carries; nesting; reverse; length

    def inner(h, x):
        return h * w + x, None

    def cell(carry, _):
        n, h = carry
        h, _ = scan(inner, h, torch.ones(2, 3, dtype=F64), reverse=True)
        return (n + 1, h), n

    init = (torch.tensor(0), randn(3))
    actual = VARIANTS[variant](cell, init, None, length=3)
    h = init[1]
    for _ in range(6):
        h = h * w + 1
    assert_same(actual, ((torch.tensor(3), h), torch.arange(3)))
    assert_same(torch.autograd.grad(actual[0][1].sum(), w), torch.autograd.grad(h.sum(), w))
