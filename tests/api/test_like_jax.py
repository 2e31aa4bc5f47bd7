"""jax's scan tests (tests/lax_control_flow_test.py) as behaviours of ours, against the loop.

Each row names the test that it corresponds to. What is left out: associative_scan, while_loop and
fori_loop (other operators), and tests of jax's own lowering and jaxprs.
"""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import VARIANTS, assert_same, check, differentiable, loop
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from torch_scan_hop import scan

F64 = torch.float64
torch_like = functools.partial(torch.linspace, dtype=F64)
C = torch_like(-1, 1, 4)
XS = torch_like(0, 2, 20).reshape(5, 4)
D = torch_like(0.5, 1.5, 4)


def body(c, a):
    """Of jax's implementation tests: sine, products and a reduction, over a closed-over vector."""
    c_new = 0.1 * torch.sin(c * torch.sum(torch.sin(c * a)) * D)
    return c_new, torch.cos(c_new) + a * D


#: fast in `make test`, the others in `make test-slow`
MODES = [
    pytest.param(name, marks=() if name == "eager" else pytest.mark.slow)
    for name in ("eager", "checkpoint", "unroll3", "aot_eager", "inductor")
]


def tolerance_of(mode):
    return 1e-7 if mode == "inductor" else 1e-9


ROWS = {
    "testScanImpl": lambda run: run(body, C, XS),
    "test_scan_reverse": lambda run: run(body, C, XS, reverse=True),
    "testScanRnn": lambda run: run(lambda h, x: (torch.tanh(h * D + x), h.sum()), C, XS),
    "testIssue711: structures of carry and x": lambda run: run(
        lambda c, x: ({"a": c["b"] + x[0], "b": c["a"] * x[1]["k"]}, (c["a"], [x[0]])),
        {"a": C, "b": C + 1},
        (XS, {"k": XS * 2}),
    ),
    "testScanLengthArg: no xs": lambda run: run(lambda c, _: (c * 2 + 1, c), C, length=4),
    "test_scan_xs_none": lambda run: run(lambda c, _: (c + 1, None), C, None, length=3),
    "testScanVmapTuples: tuples in and out": lambda run: run(
        lambda c, x: ((c[1], c[0] + x), (x, c[0])), (C, C * 2), XS
    ),
    "test_scan_hoisting_consts": lambda run: run(
        lambda c, x: (c + torch.outer(D, D).sum(0) + torch.ones(4, dtype=F64), x @ D), C, XS
    ),
    "test_scan_readonly_carry_optimization": lambda run: run(
        lambda c, x: ((c[0], c[1] + c[0] * x), c[0]), (C, C), XS
    ),
    "test_scan_forwarding_correctness: a y is x, a carry is a y": lambda run: run(
        lambda c, x: (x, (c, x)), C, XS
    ),
    "test_scan_input_to_output_forwarding": lambda run: run(
        lambda c, x: ((c[0], c[1] + 1), (c[0], x)), (C, D), XS
    ),
    "test_scan_constification_correctness": lambda run: run(lambda c, x: (D, (D, c * x)), C, XS),
    "test_scan_vjp_forwards_extensive_residuals": lambda run: run(
        lambda c, x: (torch.sin(torch.sin(c) * D), torch.exp(c) * x), C, XS
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", ROWS)
def test_values_and_gradients_are_the_loop_s(row, mode):
    """testScanImpl and testScanGrad: every implementation against one loop."""
    variant, tolerance = VARIANTS[mode], tolerance_of(mode)
    ROWS[row](functools.partial(check, variant=variant, tolerance=tolerance))


def scalar(result):
    return sum((leaf * leaf).sum() for leaf in differentiable(result))


def of_init(run):
    return lambda c: scalar(run(body, c, XS))


TRANSFORMS = {
    "testScanJVP": lambda run: jvp(of_init(run), (C,), (D,)),
    "testScanLinearize": lambda run: linearize(of_init(run), C)[1](D),
    "testScanGrad": lambda run: grad(of_init(run))(C),
    "testScanHigherOrderDifferentiation: forward over reverse": lambda run: hessian(of_init(run))(
        C
    ),
    "testScanHigherOrderDifferentiation: reverse over forward": lambda run: jacrev(
        jacfwd(of_init(run))
    )(C),
    "testScanHigherOrderDifferentiation: reverse over reverse": lambda run: jacrev(
        grad(of_init(run))
    )(C),
    "testScanVmap: the carry": lambda run: vmap(lambda c: run(body, c, XS))(
        torch.stack([C, D, C * D])
    ),
    "testScanVmap: xs, along another dimension": lambda run: vmap(
        lambda xs: run(body, C, xs), in_dims=1
    )(torch.stack([XS, XS + 1], 1)),
    "testScanVmap: what is closed over": lambda run: vmap(
        lambda d: run(lambda c, x: (torch.sin(c * d), c + x), C, XS)
    )(torch.stack([C, D])),
    # the second carry is batched from the second step on only
    "testScanVmapFixpoint": lambda run: vmap(
        lambda x: run(lambda c, _: ((c[0] + x, c[0], c[1]), c[2]), (C, C, C), length=4)
    )(torch.stack([C, D])),
    # and differentiable
    "test_scan_fixpoint_instantiate": lambda run: grad(
        lambda x: scalar(run(lambda c, _: ((c[0] * x, c[0], c[1]), c[2]), (C, C, C), length=4))
    )(D),
    "test_scan_vjp_forwarding_correctness": lambda run: vjp(
        lambda c, xs: run(lambda c, x: (c * x, (c, x, D)), c, xs), C, XS
    )[1]((D, (XS, XS * 2, XS * 3))),
}


@pytest.mark.parametrize("row", TRANSFORMS)
def test_transforms_of_a_scan_are_those_of_the_loop(row):
    assert_same(TRANSFORMS[row](scan), TRANSFORMS[row](loop), 1e-8)


@pytest.mark.parametrize("unroll", [1, 2, 3, 5, 7])
def test_scan_unroll(unroll):
    check(body, C, XS, unroll=unroll)


ERRORS = {
    "testScanBodyOutputError: one result": (lambda: scan(lambda c, x: c, C, XS), TypeError),
    "testScanBodyCarryPytreeMismatchErrors": (
        lambda: scan(lambda c, x: ((c, c), x), C, XS),
        TypeError,
    ),
    "testScanBodyCarryTypeMismatchErrors: dtype": (
        lambda: scan(lambda c, x: (c.to(torch.int32), x), C, XS),
        TypeError,
    ),
    "testScanBodyCarryTypeMismatchErrors: shape": (
        lambda: scan(lambda c, x: (c[:2], x), C, XS),
        (TypeError, ValueError),
    ),
    "testScanLengthError": (lambda: scan(body, C, XS, length=4), ValueError),
    "test_scan_length_concrete_error": (lambda: scan(body, C, length=2.5), TypeError),
    "testScanInvalidUnrollRaises": (lambda: scan(body, C, XS, unroll=0), ValueError),
    "test_scan_unroll_concrete_error": (lambda: scan(body, C, XS, unroll="2"), TypeError),
    "no xs and no length": (lambda: scan(body, C), ValueError),
}


@pytest.mark.parametrize("row", ERRORS)
def test_errors_are_raised_for_what_jax_refuses(row):
    call, kind = ERRORS[row]
    with pytest.raises(kind, match=r"^scan: "):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_scan_init_weak_type(dtype):
    """A Python number in init takes the dtype of what the body makes of it."""
    xs = torch.arange(4, dtype=dtype)
    carry, ys = scan(lambda c, x: (c + x, c * x), 0, xs)
    assert carry.dtype == dtype and int(carry) == 6 and ys.dtype == dtype
