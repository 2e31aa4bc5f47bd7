"""Operators that torch gives a number alone (``add(alpha=n)``, ``full_like(x, n)``), written so
that they take a scalar: a number that steps carry."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torch_scan_hop._torch.operators import is_function_of_torch


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


def _tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Return ``torch.tensor(data)``, of numbers that steps carry in the dtypes that they have as
    tensors."""
    if isinstance(data, (list, tuple)):
        made = torch.stack([_tensor(part) for part in data])
    else:
        made = data.clone() if isinstance(data, Tensor) else torch.full((), data)
    return made.to(device=device, dtype=dtype)


def _full(size: Any, fill_value: Tensor, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.zeros(size, dtype=dtype or fill_value.dtype, device=device) + fill_value


def _new_tensor(like: Tensor, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return _tensor(data, dtype or like.dtype, device or like.device)


def _roll(x: Tensor, shifts: Tensor, dims: Any = None) -> Tensor:
    if dims is None:
        return _roll(x.flatten(), shifts, 0).view_as(x)
    (dim,) = dims if isinstance(dims, (list, tuple)) else (dims,)
    size = x.shape[dim]
    return x.index_select(dim, (torch.arange(size, device=x.device) - shifts) % size)


def _normal(mean: Any, std: Any, size: Any = None, **options: Any) -> Tensor:
    if size is None:  # torch gives what is drawn no gradient
        return torch.normal(mean, std)
    return torch.randn(size, **options) * std + mean


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: Any, **named: Any) -> Tensor:
    options: dict[str, Any] = {**named, "scale": 1.0}
    return F.scaled_dot_product_attention(q * scale, k, v, *rest, **options)


def _triangle(is_zero: Callable[[Tensor, Any], Tensor]) -> Callable[..., Tensor]:
    def triangle(x: Tensor, diagonal: Any) -> Tensor:
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        return x.masked_fill(is_zero(columns - rows[:, None], diagonal), 0)

    return triangle


def _softplus(x: Tensor, beta: Any = 1, threshold: Any = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.clamp(max=threshold).exp().log1p() / beta)


def _clamp(x: Tensor, low: Any = None, high: Any = None, **named: Any) -> Tensor:
    """Return ``x`` within bounds of which one is a tensor, and the other is none."""
    return x.clamp(min=named.get("min", low)).clamp(max=named.get("max", high))


def _dropout(x: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return ``x``, which is not in training: what is drawn for a scalar is not what torch draws
    for a number, on some processors."""
    return x


def _batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Average the statistics as ``torch.nn.BatchNorm1d`` says, ``momentum=None`` among them."""
    if not training:
        # copies: other norms may write to these, which autograd does not count
        return F.batch_norm(x, mean.clone(), var.clone(), weight, bias, False, 0.0, eps)
    batch, dims = x.detach(), [dim for dim in range(x.dim()) if dim != 1]
    for average, of_batch in ((mean, batch.mean(dims)), (var, batch.var(dims))):
        # autograd counts no writes of the operator's
        average.data.copy_(average * (1 - momentum) + of_batch * momentum)
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)


def _is_off(_: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> bool:
    return training is False


def _activation(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``fn`` with torch's ``inplace`` behind its numbers."""

    def call(x: Tensor, *numbers: Any, inplace: bool = False, **named: Any) -> Tensor:
        if numbers and isinstance(numbers[-1], bool):
            numbers, inplace = numbers[:-1], numbers[-1]
        return x.copy_(fn(x.clone(), *numbers, **named)) if inplace else fn(x, *numbers, **named)

    return call


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def add(x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return x * beta + product(a, b) * alpha

    return add


# As torch's documentation has them. What is not chosen is finite, or its gradient would be a nan.
_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "leaky_relu": lambda x, negative_slope: torch.where(x > 0, x, x * negative_slope),
    "elu": lambda x, alpha: torch.where(x > 0, x, x.clamp(max=0).expm1() * alpha),
    "celu": lambda x, alpha: torch.where(x > 0, x, (x.clamp(max=0) / alpha).expm1() * alpha),
    "softplus": _softplus,
    "threshold": lambda x, threshold, value: torch.where(x > threshold, x, value),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: torch.where(
        x <= min_val, min_val, torch.where(x >= max_val, max_val, x)
    ),
    "softshrink": lambda x, lambd: x - torch.clamp(x, -lambd, lambd),
    "hardshrink": lambda x, lambd: torch.where(x.abs() <= lambd, 0.0, x),
}

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
_BOUNDED = ("clamp", "clip")
#: functions that make a tensor of numbers alone
_MAKE_TENSORS = {"tensor", "as_tensor", "asarray", "scalar_tensor", "full"}
_WRITTEN: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b, alpha: _sum(a, b, alpha),
    "sub": lambda a, b, alpha: _sum(a, b, -alpha),
    "addcmul": lambda a, b, c, value: _sum(a, b, c, value),
    "full_like": _full_like,
    "new_full": _new_full,
    "new_tensor": _new_tensor,
    **dict.fromkeys(_MAKE_TENSORS - {"full"}, _tensor),
    "full": _full,
    "roll": _roll,
    "tril": _triangle(operator.gt),
    "triu": _triangle(operator.lt),
    "batch_norm": _batch_norm,
    **dict.fromkeys(_DROPOUTS, _dropout),
    **dict.fromkeys(_BOUNDED, _clamp),
    **{
        f"{name}_": lambda x, *bounds, **named: _clamp(x.clone(), *bounds, **named)
        for name in _BOUNDED
    },
    "uniform_": lambda x, low=0.0, high=1.0: torch.rand_like(x) * (high - low) + low,
    "normal_": lambda x, mean=0.0, std=1.0: torch.randn_like(x) * std + mean,
    "normal": _normal,
    "scaled_dot_product_attention": _attention,
    "addmm": _added(torch.mm),
    "addmv": _added(torch.mv),
    "baddbmm": _added(torch.bmm),
    **{name: _activation(fn) for name, fn in _ACTIVATIONS.items()},
}
#: of others a keyword may be the number, beside operands that are tensors
_KEYWORDS = {
    **dict.fromkeys(("add", "sub"), ("alpha",)),
    "addcmul": ("value",),
    "scaled_dot_product_attention": ("scale",),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), ("beta", "alpha")),
}


def with_scalar(name: str, *args: Any, **options: Any) -> Tensor:
    """Return what torch's operator makes of a number; write it to the first tensor if the name
    ends so.

    >>> with_scalar("add", torch.ones(2), torch.ones(2), alpha=torch.tensor(0.5))
    tensor([1.5000, 1.5000])
    """
    written = _WRITTEN.get(name) or _WRITTEN[name.rstrip("_")]
    made = written(*args, **options)
    return args[0].copy_(made) if name.endswith("_") else made


def name_with_scalar(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return by what name :func:`with_scalar` knows an operator that is given a proxy where torch
    takes a number; "" if it knows none."""
    is_torchs = isinstance(target, str) or is_function_of_torch(target)
    name = getattr(target, "__name__", target)
    if not is_torchs or _WRITTEN.keys().isdisjoint((name, name.rstrip("_"))):
        return ""
    if name in _MAKE_TENSORS:
        return name if kwargs.keys() <= {"dtype", "device", "size", "fill_value"} else ""
    if name in _DROPOUTS and not _is_off(*args, **kwargs):
        return ""
    words = _KEYWORDS.get(name.rstrip("_"))
    others = args if name == "normal" else args[1:]
    given = pytree.tree_leaves((others, kwargs)) if words is None else [*map(kwargs.get, words)]
    of_body = [isinstance(v, fx.Proxy) for v in given]
    if name.rstrip("_") in _BOUNDED and (all(of_body) or any(v is None for v in given)):
        return ""  # torch takes that
    return name if any(of_body) else ""
