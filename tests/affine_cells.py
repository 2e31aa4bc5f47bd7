"""Cells that are affine in their carries, or extremes: kernels parallel in time take them."""

from __future__ import annotations

import torch
from gpu_cells import CASES, Case, lru, randn
from torch.utils import _pytree as pytree


def ema(h, x, _):
    h = 0.9 * h + 0.1 * x
    return h, h


def lerp_after_reset(h, x, _):
    h = torch.where(x["done"], torch.zeros_like(h), h)
    h = torch.lerp(h, x["u"], 0.2)
    return h, torch.sin(h) * x["u"]


def gae(g, x, _):
    g = x["delta"] + 0.9 * x["goes_on"] * g
    return g, g


def extremes(c, x, _):
    low, high, total = c
    low, high = torch.minimum(x, low), torch.maximum(torch.maximum(high, x), -x)
    return (low, high, total + x), high - low


def product(h, x, _):
    h = h * (1 + x)
    return h, h / 2


def complex_recurrence(h, x, _):
    h = x["a"] * h + x["b"]
    return h, h * x["a"]


def triangular(c, x, _):
    """The second is driven by the first, and the third by both."""
    a, b, s = c
    a, b = torch.sigmoid(x) * a - x, 0.5 * b - a / (1 + x * x)
    return (a, b, s + a * x + b), (a, b * s)


def integers(c, x, _):
    n, total = c
    return (n + 1, total * 3 - x), total


def delayed(c, x, _):
    a, b = c
    return (x, 0.5 * a + 0.1 * b), a * b


W = (3, 5)  # odd, as lanes are


def complex_randn(*shape):
    re, im = randn(*shape, 2).unbind(-1)
    return torch.complex(re, im)


def done(T, *shape):
    return randn(T, *shape) > 0.3


AFFINE: dict[str, Case] = {
    "recurrence": CASES["recurrence"],
    "broadcast x": CASES["broadcast x"],
    "transposed x": CASES["transposed x"],
    "two carries": CASES["two carries"],
    "lru": Case(  # that does not grow, however many steps there are
        lru, lambda T: ((randn(*W), randn(*W)), randn(T, *W), {"re": randn(5) / 3, "im": randn(1, 5)[0] / 3})
    ),
    "selective ssm": CASES["selective ssm"],
    "ema": Case(ema, lambda T: (randn(), randn(T), None)),
    "lerp after reset": Case(
        lerp_after_reset, lambda T: (randn(*W), {"done": done(T, *W), "u": randn(T, *W)}, None)
    ),
    "gae": Case(
        gae, lambda T: (randn(3), {"delta": randn(T, 3), "goes_on": 1.0 - done(T, 3).double()}, None)
    ),
    "extremes": Case(
        extremes, lambda T: ((randn(*W), randn(*W) - 9, randn(*W)), randn(T, *W), None)
    ),
    "product": Case(product, lambda T: (randn(*W), randn(T, *W), None)),
    "complex": Case(
        complex_recurrence,
        lambda T: (
            complex_randn(*W), {"a": complex_randn(T, *W), "b": complex_randn(T, *W)}, None
        ),
    ),
    "triangular": Case(triangular, lambda T: ((randn(*W),) * 3, randn(T, *W), None)),
    "integers": Case(
        integers,
        lambda T: (
            (torch.arange(5, dtype=torch.int32), torch.arange(5)), torch.arange(5 * T).view(T, 5), None
        ),
    ),
    "delayed": Case(delayed, lambda T: ((randn(7), randn(7)), randn(T, 7), None)),
}  # fmt: skip


def reset(h, x, _):
    h = torch.where(x["done"], x["b"], x["a"] * h + x["b"])
    return h, (h, 1 / h)


def assert_same_nans_too(got, want):
    """To a few roundings in float32, subnormal numbers as well."""
    for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-37, equal_nan=True)


def hard(T, lanes):
    """Coefficients of each lane, that one goes through without harm, step by step, or not."""
    a, b = torch.full((T, lanes), 0.5), torch.zeros(T, lanes)
    h, done = torch.ones(lanes), torch.zeros(T, lanes, dtype=torch.bool)
    # 0, whatever it is multiplied with
    h[0], a[4:15, 0], b[20, 0] = 0, 2e30, 1
    # a product that is 0, of coefficients that are not
    h[1], a[8:11, 1], a[11:13, 1] = 1e30, torch.tensor([1e-30, 1e-30, 1e20]), 1e5
    # infinities and nans that the loop has, too
    a[5:8, 2] = 1e30
    a[5:8, 3], a[9, 3] = 1e30, 0
    b[3, 4], done[22, 4] = torch.nan, True
    b[10, 5], b[17, 5] = torch.inf, -torch.inf
    # 1 in all steps, as the difference of large numbers
    a[:, 6], b[:, 6] = 1e6, 1 - 1e6
    # subnormal numbers
    a[:, 7], h[7] = 0.03, 1e-30
    return h, {"a": a, "b": b, "done": done}, None
