"""``torch.utils.checkpoint`` around scans, under ``torch.compile``: they stay scans there."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import assert_same, gradients, loop, randn
from policies import keep_products
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version
SCAN = torch.ops.higher_order.scan


def scans_of(graph):
    return graph.graph.find_nodes(op="call_function", target=SCAN)


def cell(w, h, x):
    h = torch.tanh(x + h @ w)
    return h, h.cos()


def two_regions(region, xs, **options):
    ys = checkpoint(region, xs.sin(), use_reentrant=False, **options)
    return checkpoint(region, ys.cos(), use_reentrant=False, **options).sum()


def keeping_products():
    return create_selective_checkpoint_contexts(keep_products)


OPTIONS = {"all": {}, "products": {"context_fn": keeping_products}}


# torch_xla, once it is imported, turns this off
@torch._dynamo.config.patch(automatic_dynamic_shapes=True)
@pytest.mark.parametrize("options", OPTIONS)
def test_regions_hold_scans(options):
    """Forward and recomputation are scans, of any trip count."""
    w = randn(3, 3).requires_grad_()

    def model(xs, scan_=scan):
        def region(xs):
            return scan_(functools.partial(cell, w), torch.zeros_like(xs[0]), xs)[1]

        return two_regions(region, xs, **(OPTIONS[options] if scan_ is scan else {}))

    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for T in (4, 6, 9):
        xs = randn(T, 2, 3).requires_grad_()
        actual, expected = compiled(xs), model(xs, loop)
        assert_same(actual, expected)
        assert_same(gradients(actual, [xs, w]), gradients(expected, [xs, w]))
    assert len(backend.fw_graphs) == 2  # the second serves all trip counts
    for forward, backward in zip(backend.fw_graphs, backend.bw_graphs, strict=True):
        assert len(scans_of(forward)) == 2
        # without a policy, both forwards run once more
        assert len(scans_of(backward)) == (4 if options == "all" else 2)
        assert max(len(list(g.graph.nodes)) for g in (forward, backward)) < 70


def test_a_policy_is_asked_about_the_operators_of_a_step():
    w = randn(3, 3).requires_grad_()

    def saved(**options):
        def model(xs):
            def region(xs):
                return scan(functools.partial(cell, w), torch.zeros_like(xs[0]), xs)[1]

            return checkpoint(region, xs, use_reentrant=False, **options).sum()

        backend = AotEagerAndRecordGraphs()
        xs = randn(5, 2, 3).requires_grad_()
        torch.compile(model, backend=backend, fullgraph=True)(xs).backward()
        (forward,) = backend.fw_graphs
        (node,) = scans_of(forward)
        (body,) = node.all_input_nodes[:1]
        graph = getattr(forward, str(body.target)).graph
        (results,) = graph.output_node().args
        return [getattr(r.target, "_opname", "") for r in results]

    # carry and y; the product, and the carries into the steps
    assert saved() == ["tanh", "cos", "tanh"]
    assert saved(context_fn=keeping_products)[:3] == ["tanh", "cos", "mm"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
def test_masks_are_not_drawn_again(options, backend):
    """Silently wrong on torch 2.9, where a region's scan was recomputed, draws and all."""

    def model(xs):
        def region(xs):
            return scan(
                lambda h, x: (h, torch.nn.functional.dropout(x * 1.0, 0.5)), torch.zeros(3), xs
            )[1]

        return checkpoint(region, xs, use_reentrant=False, **OPTIONS[options])

    xs = (torch.rand(16, 4, 3) + 0.5).requires_grad_()
    ys = torch.compile(model, backend=backend, fullgraph=True)(xs)
    (gradient,) = torch.autograd.grad(ys.sum(), xs)
    assert_same(gradient, 2.0 * (ys != 0))
    assert 0 < (ys != 0).sum() < ys.numel()


def test_noise_without_gradients_is_not_drawn_again():
    w = torch.ones(3, requires_grad=True)

    def model(w):
        def region(w):
            noise = scan(lambda h, _: (h, torch.rand(3)), torch.zeros(1), length=5)[1]
            return noise, noise * w

        return checkpoint(region, w, use_reentrant=False)

    noise, ys = torch.compile(model, backend="aot_eager", fullgraph=True)(w)
    (gradient,) = torch.autograd.grad(ys.sum(), w)
    assert_same(gradient, noise.sum(0))


def test_nested_scans_in_a_region():
    w = randn(3, 3).requires_grad_()

    def model(xs, scan_=scan):
        def cell_of_scans(h, x):
            return scan_(functools.partial(cell, w), h, torch.stack([x, 2 * x]))

        def region(xs):
            return scan_(cell_of_scans, torch.zeros_like(xs[0]), xs)[1].sum(1)

        return two_regions(region, xs)

    backend = AotEagerAndRecordGraphs()
    xs = randn(5, 2, 3).requires_grad_()
    actual = torch.compile(model, backend=backend, fullgraph=True)(xs)
    expected = model(xs, loop)
    assert_same(actual, expected)
    assert_same(gradients(actual, [xs, w]), gradients(expected, [xs, w]))
    assert len(scans_of(backend.fw_graphs[0])) == 2


def test_eager_regions_with_a_policy_run_step_by_step():
    """There a policy sees each operator, as it does in the loop."""
    w, xs = randn(3, 3).requires_grad_(), randn(4, 2, 3).requires_grad_()
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        return keep_products(ctx, op, *args, **kwargs)

    def region(xs):
        return scan(functools.partial(cell, w), torch.zeros_like(xs[0]), xs)[1]

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    actual = checkpoint(region, xs, use_reentrant=False, context_fn=contexts).sum()
    expected = loop(functools.partial(cell, w), torch.zeros_like(xs[0]), xs)[1].sum()
    assert_same(gradients(actual, [xs, w]), gradients(expected, [xs, w]))
    assert seen.count(torch.ops.aten.tanh.default) >= 4
