"""Any pytree, any shapes and dtypes, any trip count: the scan is the loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_same, differentiable, gradients, loop, require_grad, zeros_for_none

from torch_scan_hop import scan, tree

DTYPES = [torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128]
SHAPES = [(), (1,), (3,), (2, 3), (0, 2)]

shapes, dtypes = st.sampled_from(SHAPES), st.sampled_from(DTYPES)


def trees(leaf):
    return st.recursive(
        leaf,
        lambda children: st.one_of(
            st.lists(children, max_size=2),
            st.tuples(children, children),
            st.dictionaries(st.sampled_from("abc"), children, max_size=2),
        ),
        max_leaves=3,
    )


leaf_kinds = st.one_of(st.none(), st.tuples(shapes, dtypes))


def make(kind, generator, lead=()):
    shape, dtype = kind
    values = torch.randn(lead + shape, dtype=torch.float64, generator=generator)
    if dtype == torch.bool:
        return values > 0
    return (values * 3).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def is_kind(value):
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)


def build(kinds, generator, lead=()):
    if kinds is None:
        return None
    if is_kind(kinds):
        return make(kinds, generator, lead)
    if isinstance(kinds, dict):
        return {k: build(v, generator, lead) for k, v in kinds.items()}
    return type(kinds)(build(v, generator, lead) for v in kinds)


def summary(value):
    """A number that depends on every leaf."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tree.tensors(value):
        leaf = leaf.abs() if leaf.dtype.is_complex else leaf
        total = total + leaf.to(torch.float64).sum()
    return total


def cell(carry, x):
    s = torch.sin(summary(carry) + summary(x))

    def step(leaf):
        if leaf.dtype == torch.bool:
            return leaf ^ (s > 0)
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            return leaf + 1
        return leaf * 0.5 + s.to(leaf.dtype)

    return tree.map_leaves(step, carry), {"carry": carry, "x": x, "s": s}


@pytest.mark.filterwarnings("ignore:.*captured anew")  # each example is another structure
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    carry=trees(leaf_kinds),
    xs=trees(leaf_kinds),
    T=st.integers(0, 5),
    reverse=st.booleans(),
    unroll=st.sampled_from([1, 1, 2]),
)
def test_a_scan_is_the_loop(carry, xs, T, reverse, unroll):
    generator = torch.Generator().manual_seed(0)
    init = require_grad(build(carry, generator))
    inputs = require_grad(build(xs, generator, (T,)))
    length = None if tree.tensors(inputs) else T
    actual = scan(cell, init, inputs, length, reverse=reverse, unroll=unroll)
    expected = loop(cell, init, inputs, length, reverse=reverse)
    assert_same(actual, expected, 1e-5)
    wrt = [*differentiable(init), *differentiable(inputs)]
    if wrt:
        assert_same(
            zeros_for_none(gradients(actual, wrt), wrt),
            zeros_for_none(gradients(expected, wrt), wrt),
            1e-5,
        )
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*captured anew")
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    where=st.integers(-3, 2),
    reverse=st.booleans(),
)
def test_any_dimension(shape, where, reverse):
    if not -len(shape) <= where < len(shape):
        where = 0
    xs = torch.randn(shape, dtype=torch.float64)
    rest = list(shape)
    rest.pop(where)

    def running(h, x):
        h = h * 0.5 + x
        return h, (h, h.sum())

    init = torch.zeros(rest, dtype=torch.float64)
    actual = scan(running, init, xs, dim=where, reverse=reverse)
    assert_same(actual, loop(running, init, xs, dim=where, reverse=reverse))
