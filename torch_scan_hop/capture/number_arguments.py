"""Operators that torch gives a number alone (``add(alpha=n)``, ``full_like(x, n)``), written so
that they take a scalar: a number that steps carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def _sum(a: Tensor, *factors: Tensor) -> Tensor:
    """Return ``a`` and the product of ``factors``, rounded once, as torch's operators do."""
    dtype = a.dtype
    for factor in factors[:-1]:
        dtype = torch.promote_types(dtype, factor.dtype)
    if factors[-1].is_floating_point() and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError("an integer tensor is added with a factor that is a float")
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    product = factors[-1].to(wide)
    for factor in factors[:-1]:
        product = product * factor.to(wide)
    return (a.to(wide) + product).to(dtype)


def _full_like(like: Tensor, number: Tensor, **options: Any) -> Tensor:
    zeros = torch.zeros_like(like, **options)
    return (zeros + number).to(zeros.dtype)


def _new_full(like: Tensor, size: Sequence[int], number: Tensor, **options: Any) -> Tensor:
    zeros = like.new_zeros(size, **options)
    return (zeros + number).to(zeros.dtype)


_WRITTEN: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b, alpha: _sum(a, b, alpha),
    "sub": lambda a, b, alpha: _sum(a, b, -alpha),
    "addcmul": lambda a, b, c, value: _sum(a, b, c, value),
    "full_like": _full_like,
    "new_full": _new_full,
}


def with_scalar(name: str, *args: Any, **options: Any) -> Tensor:
    """Return what torch's operator makes of a number; write it to the first tensor if the name
    ends so.

    >>> with_scalar("add", torch.ones(2), torch.ones(2), alpha=torch.tensor(0.5))
    tensor([1.5000, 1.5000])
    """
    made = _WRITTEN[name.rstrip("_")](*args, **options)
    return args[0].copy_(made) if name.endswith("_") else made


def name_with_scalar(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return by what name :func:`with_scalar` knows an operator that is given a proxy where torch
    takes a number; "" if it knows none."""
    name = getattr(target, "__name__", target)
    if not isinstance(name, str) or name.rstrip("_") not in _WRITTEN:
        return ""
    given = [*args[1:]] if "full" in name else [kwargs.get("alpha"), kwargs.get("value")]
    return name if any(isinstance(v, fx.Proxy) for v in given) else ""
