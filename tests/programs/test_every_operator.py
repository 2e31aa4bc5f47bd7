"""Each operator of torch's own list of them (``op_db``) in a body, against the loop.

Values and every gradient, where the gradient of ``ys`` is expanded, as that of ``ys.sum()``, and where
its dimensions run backwards: an operator that takes one layout alone was given others. And where the
operator reads only xs, so that all steps of it are done at once.
"""

from __future__ import annotations

import types

import pytest
import torch
from oracle import assert_same, loop, sum_with_weights_backwards
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from torch_scan_hop import scan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch_version,
    # what reads data is a loop, and some of these warn of themselves
    pytest.mark.filterwarnings("ignore"),
]

F64 = torch.float64
#: parts of names: random ones, sparse ones, and those whose results are no function of their inputs
LEFT_OUT = (
    "empty", "bernoulli", "rand", "normal", "dropout", "multinomial", "uniform", "exponential",
    "cauchy", "geometric", "rrelu", "fractional", "feature_alpha", "jiterator", "lowrank", "sparse",
    "resize", "set_", "ormqr",
)  # fmt: skip
OPERATORS = [
    op
    for op in op_db
    if op.supports_autograd
    and F64 in op.supported_backward_dtypes("cpu")
    and not any(part in op.name for part in LEFT_OUT)
]
COTANGENTS = {
    "expanded": lambda y: y.sum(),
    "permuted": sum_with_weights_backwards,
}


def is_differentiable(leaf):
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def body_of(op, sample, depends_on_carry):
    """A body that applies ``op``, and the tensors of ``sample`` that it takes as x."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    positions = [k for k, leaf in enumerate(leaves) if is_differentiable(leaf)]

    def body(c, x):
        given = list(leaves)
        for k, value in zip(positions, x, strict=True):
            given[k] = value * c if depends_on_carry else value
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        out = [leaf for leaf in pytree.tree_leaves(op.op(first, *args, **kwargs))]
        return c * 1.01, [leaf for leaf in out if is_differentiable(leaf)]

    # what Dynamo remembers of a body it remembers of its code: each has its own
    code = body.__code__.replace(co_name=f"body_{id(sample)}")
    own = types.FunctionType(code, body.__globals__, code.co_name, None, body.__closure__)
    return own, [leaves[k] for k in positions]


def results(run, body, given, cotangent):
    xs = [torch.stack([g.detach()] * 2).requires_grad_(g.requires_grad) for g in given]
    c = torch.ones((), dtype=F64, requires_grad=True)
    _, ys = run(body, c, xs)
    total = sum(
        COTANGENTS[cotangent](torch.view_as_real(y) if y.is_complex() else y)
        for y in ys
        if y.requires_grad
    )
    if not isinstance(total, torch.Tensor):
        return ys, []
    wrt = [leaf for leaf in (c, *xs) if leaf.requires_grad]
    gradients = torch.autograd.grad(total, wrt, allow_unused=True, materialize_grads=True)
    return ys, list(gradients)


@pytest.mark.parametrize("depends_on_carry", [True, False], ids=["carry", "xs"])
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_as_the_loop(op, depends_on_carry):
    samples = list(op.sample_inputs("cpu", F64, requires_grad=True))
    compared = 0
    for sample in (samples[len(samples) // 2], samples[-1]) if samples else ():
        body, given = body_of(op, sample, depends_on_carry)
        if not given:
            continue
        for cotangent in COTANGENTS:
            try:
                expected = results(loop, body, given, cotangent)
            except Exception:
                continue  # the loop cannot
            assert_same(results(scan, body, given, cotangent), expected)
            compared += 1
    if not compared:
        pytest.skip("no sample that the loop runs")
