"""Rules for operations that work element by element.

The derivatives are those of any calculus book. What a rule saves is chosen to be the result where
that will do (`tanh`, `exp`, `relu`), since the result is often kept anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..primitives import scale
from ..shapes import unbroadcast
from ..table import Rule


def of_input(fn: Callable[[Any], Any], bwd: Callable[[Any, Any], Any]) -> Rule:
    """Make the rule of `y = fn(x)` with `dx = bwd(x, dy)`, which saves x."""
    return Rule(lambda x: (fn(x), x), bwd)


def of_result(fn: Callable[[Any], Any], bwd: Callable[[Any, Any], Any]) -> Rule:
    """Make the rule of `y = fn(x)` with `dx = bwd(y, dy)`, which saves y."""

    def fwd(x: Any) -> tuple[Any, Any]:
        y = fn(x)
        return y, y

    return Rule(fwd, bwd)


def _times(factor: Any, d: Any) -> Any:
    """Return `factor * d`, without code for a factor of one."""
    return d if isinstance(factor, (int, float)) and factor == 1 else factor * d


def add_fwd(a: Any, b: Any, alpha: Any = 1) -> Any:
    return a + _times(alpha, b), (a, b, alpha)


def add_bwd(saved: Any, d: Any) -> Any:
    a, b, alpha = saved
    return unbroadcast(d, a), unbroadcast(_times(alpha, d), b)


def sub_fwd(a: Any, b: Any, alpha: Any = 1) -> Any:
    return a - _times(alpha, b), (a, b, alpha)


def sub_bwd(saved: Any, d: Any) -> Any:
    a, b, alpha = saved
    return unbroadcast(d, a), unbroadcast(-_times(alpha, d), b)


def rsub_fwd(a: Any, b: Any, alpha: Any = 1) -> Any:
    return b - _times(alpha, a), (b, a, alpha)


def rsub_bwd(saved: Any, d: Any) -> Any:
    return sub_bwd(saved, d)[::-1]


def mul_fwd(a: Any, b: Any) -> Any:
    return a * b, (a, b)


def mul_bwd(saved: Any, d: Any) -> Any:
    a, b = saved
    return unbroadcast(d * b, a), unbroadcast(d * a, b)


def div_fwd(a: Any, b: Any, rounding_mode: None = None) -> Any:
    if rounding_mode is not None:
        raise NotImplementedError(f"div with rounding_mode={rounding_mode!r} is not smooth")
    y = a / b
    return y, (a, b, y)


def div_bwd(saved: Any, d: Any) -> Any:
    a, b, y = saved
    da = d / b
    return unbroadcast(da, a), unbroadcast(-da * y, b)  # d(a/b)/db = -a/b^2 = -y/b


def pow_fwd(x: Any, exponent: Any) -> Any:
    if not isinstance(exponent, (int, float)):
        raise NotImplementedError("pow is differentiated for an exponent that is a Python number")
    return x**exponent, (x, exponent)


def pow_bwd(saved: Any, d: Any) -> Any:
    x, p = saved
    if p == 0:
        return None  # not 0 * x**-1, which is nan at 0
    return d if p == 1 else p * d * (x if p == 2 else x ** (p - 1))


def relu_fwd(x: Any, inplace: bool = False) -> Any:
    if inplace:
        raise NotImplementedError("relu(inplace=True): use the form that is not in place")
    y = torch.relu(x)
    return y, y


def relu_bwd(y: Any, d: Any) -> Any:
    return torch.where(y > 0, d, 0)  # not d * (y > 0), which is nan for an infinite d


def where_fwd(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b), (condition, a, b)


def where_bwd(saved: Any, d: Any) -> Any:
    condition, a, b = saved
    da = unbroadcast(torch.where(condition, d, 0), a)
    return None, da, unbroadcast(torch.where(condition, 0, d), b)


def scale_fwd(factor: Any, x: Any) -> Any:
    return scale(factor, x), (factor, x)


def scale_bwd(saved: Any, d: Any) -> Any:
    factor, x = saved
    return torch.sum(d * x), scale(factor, d)


POINTWISE: dict[Any, Rule] = {
    torch.neg: Rule(lambda x: (-x, None), lambda _, d: -d),
    torch.add: Rule(add_fwd, add_bwd),
    torch.sub: Rule(sub_fwd, sub_bwd),
    torch.rsub: Rule(rsub_fwd, rsub_bwd),
    torch.mul: Rule(mul_fwd, mul_bwd),
    torch.div: Rule(div_fwd, div_bwd),
    torch.pow: Rule(pow_fwd, pow_bwd),
    torch.reciprocal: of_result(torch.reciprocal, lambda y, d: -d * (y * y)),
    torch.square: of_input(torch.square, lambda x, d: 2 * d * x),
    torch.sin: of_input(torch.sin, lambda x, d: d * torch.cos(x)),
    torch.cos: of_input(torch.cos, lambda x, d: -d * torch.sin(x)),
    torch.log: of_input(torch.log, lambda x, d: d / x),
    torch.abs: of_input(torch.abs, lambda x, d: d * torch.sign(x)),
    torch.exp: of_result(torch.exp, operator.mul),
    torch.sqrt: of_result(torch.sqrt, lambda y, d: d / (2 * y)),
    torch.tanh: of_result(torch.tanh, lambda y, d: d * (1 - y * y)),
    torch.sigmoid: of_result(torch.sigmoid, lambda y, d: d * (y * (1 - y))),
    torch.relu: Rule(relu_fwd, relu_bwd),
    torch.where: Rule(where_fwd, where_bwd),
    torch.Tensor.where: Rule(
        lambda a, condition, b: where_fwd(condition, a, b),
        lambda saved, d: (where_bwd(saved, d)[1], None, where_bwd(saved, d)[2]),
    ),
    scale: Rule(scale_fwd, scale_bwd),
}

# Locally constant, or not a function of the values at all.
CONSTANT: frozenset[Any] = frozenset({
    torch.detach, torch.floor, torch.ceil, torch.round, torch.trunc, torch.sign,
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like,
    torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty,
})  # fmt: skip
