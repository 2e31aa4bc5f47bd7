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
from ..table import Rule, saving_arguments


def of_result(fn: Callable[[Any], Any], bwd: Callable[[Any, Any], Any]) -> Rule:
    """Make the rule of `y = fn(x)` with `dx = bwd(y, dy)`, which saves y."""

    def fwd(x: Any) -> tuple[Any, Any]:
        y = fn(x)
        return y, y

    return Rule(fwd, bwd)


def _times(factor: Any, d: Any) -> Any:
    """Return `factor * d`, without code for a factor of one."""
    return d if isinstance(factor, (int, float)) and factor == 1 else factor * d


def add(a: Any, b: Any, alpha: Any) -> Any:
    return a + _times(alpha, b)


def add_bwd(d: Any, a: Any, b: Any, alpha: Any = 1) -> Any:
    return unbroadcast(d, a), unbroadcast(_times(alpha, d), b)


def sub_bwd(d: Any, a: Any, b: Any, alpha: Any = 1) -> Any:
    return unbroadcast(d, a), unbroadcast(-_times(alpha, d), b)


def mul_bwd(d: Any, a: Any, b: Any) -> Any:
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


def power(x: Any, exponent: Any) -> Any:
    if not isinstance(exponent, (int, float)):
        raise NotImplementedError("pow is differentiated for an exponent that is a Python number")
    return x**exponent


def pow_bwd(d: Any, x: Any, exponent: Any) -> Any:
    if exponent == 0:
        return None  # not 0 * x**-1, which is nan at 0
    if exponent == 1:
        return d
    return exponent * d * (x if exponent == 2 else x ** (exponent - 1))


def relu_fwd(x: Any, inplace: bool = False) -> Any:
    if inplace:
        raise NotImplementedError("relu(inplace=True): use the form that is not in place")
    y = torch.relu(x)
    return y, y


def where_bwd(d: Any, condition: Any, a: Any, b: Any) -> Any:
    da = unbroadcast(torch.where(condition, d, 0), a)
    return None, da, unbroadcast(torch.where(condition, 0, d), b)


def method_where_bwd(d: Any, a: Any, condition: Any, b: Any) -> Any:
    _, da, db = where_bwd(d, condition, a, b)
    return da, None, db


POINTWISE: dict[Any, Rule] = {
    torch.neg: Rule(lambda x: (-x, None), lambda _, d: -d),
    torch.add: saving_arguments(add, add_bwd),
    torch.sub: saving_arguments(lambda a, b, alpha: a - _times(alpha, b), sub_bwd),
    torch.rsub: saving_arguments(
        lambda a, b, alpha: b - _times(alpha, a),
        lambda d, a, b, alpha=1: sub_bwd(d, b, a, alpha)[::-1],
    ),
    torch.mul: saving_arguments(operator.mul, mul_bwd),
    torch.div: Rule(div_fwd, div_bwd),
    torch.pow: saving_arguments(power, pow_bwd),
    torch.reciprocal: of_result(torch.reciprocal, lambda y, d: -d * (y * y)),
    torch.square: saving_arguments(torch.square, lambda d, x: 2 * d * x),
    torch.sin: saving_arguments(torch.sin, lambda d, x: d * torch.cos(x)),
    torch.cos: saving_arguments(torch.cos, lambda d, x: -d * torch.sin(x)),
    torch.log: saving_arguments(torch.log, lambda d, x: d / x),
    torch.abs: saving_arguments(torch.abs, lambda d, x: d * torch.sign(x)),
    torch.exp: of_result(torch.exp, operator.mul),
    torch.sqrt: of_result(torch.sqrt, lambda y, d: d / (2 * y)),
    torch.tanh: of_result(torch.tanh, lambda y, d: d * (1 - y * y)),
    torch.sigmoid: of_result(torch.sigmoid, lambda y, d: d * (y * (1 - y))),
    # not d * (y > 0), which is nan for an infinite d
    torch.relu: Rule(relu_fwd, lambda y, d: torch.where(y > 0, d, 0)),
    torch.where: saving_arguments(torch.where, where_bwd),
    torch.Tensor.where: saving_arguments(
        lambda a, condition, b: torch.where(condition, a, b), method_where_bwd
    ),
    scale: saving_arguments(scale, lambda d, factor, x: (torch.sum(d * x), scale(factor, d))),
}

# Locally constant, or not a function of the values at all.
CONSTANT: frozenset[Any] = frozenset({
    torch.detach, torch.floor, torch.ceil, torch.round, torch.trunc, torch.sign,
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like,
    torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty,
})  # fmt: skip
