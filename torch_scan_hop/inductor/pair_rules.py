"""Complex arithmetic on pairs of reals: operator -> function of pairs, tensors and numbers.

A rule raises NotImplementedError for arguments that it is not for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torch_scan_hop.body.operator_table import operators

aten = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """A complex tensor as its real and imaginary part."""

    re: Tensor
    im: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.re.dtype.to_complex()

    def whole(self) -> Tensor:
        return torch.complex(self.re.contiguous(), self.im.contiguous())

    def map(self, fn: Callable[[Tensor], Tensor]) -> Pair:
        return Pair(fn(self.re), fn(self.im))


@dataclass(frozen=True)
class Interleaved:
    """``view(dtype)`` of a complex tensor: real and imaginary numbers in turn. Where they are
    ``apart``, each number is a row of its own, as Inductor adds them."""

    pair: Pair
    apart: bool = False

    def whole(self) -> Tensor:
        parts = torch.stack([self.pair.re, self.pair.im], -1)
        return parts if self.apart else parts.flatten(-2)


def is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def split(value: Any) -> Any:
    """Return the parts of a complex tensor; any other value is itself."""
    if not is_complex(value):
        return value
    parts = torch.view_as_real(value.resolve_conj())
    return Pair(parts.select(-1, 0), parts.select(-1, 1))


def _pair(value: Any) -> Pair:
    """Return any operand as a pair; a real one has no imaginary part."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, Tensor):
        return Pair(value, torch.zeros_like(value))
    raise NotImplementedError


def _parts(value: Any) -> tuple[Any, Any]:
    """Return (real, imaginary) of a pair, a tensor or a number; None for no imaginary part."""
    if isinstance(value, Pair):
        return value.re, value.im
    if isinstance(value, complex):
        return value.real, value.imag
    return value, None


# --- rules ---


def _add(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    rows = [isinstance(value, Interleaved) for value in (left, right)]
    if all(rows) and left.apart == right.apart:
        return Interleaved(_add(left.pair, right.pair, alpha=alpha), left.apart)
    if any(rows) or isinstance(alpha, complex):
        raise NotImplementedError
    (a, b), (c, d) = _parts(left), _parts(right)
    real = torch.add(a, c, alpha=alpha)
    if b is None:
        return Pair(real, (d if alpha == 1 else d * alpha) + torch.zeros_like(real))
    if d is None:
        return Pair(real, b + torch.zeros_like(real))
    return Pair(real, torch.add(b, d, alpha=alpha))


def _sub(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    return _add(left, right, alpha=-alpha)


def _product(multiply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``(a + bi)(c + di)`` for any bilinear operator."""

    def rule(left: Any, right: Any) -> Any:
        (a, b), (c, d) = _parts(left), _parts(right)
        if b is None:
            return Pair(multiply(a, c), multiply(a, d))
        if d is None:
            return Pair(multiply(a, c), multiply(b, c))
        return Pair(multiply(a, c) - multiply(b, d), multiply(a, d) + multiply(b, c))

    return rule


_mul = _product(operator.mul)


def _div(left: Any, right: Any) -> Any:
    c, d = _parts(right)
    if d is None:
        return _pair(left).map(lambda v: v / c)
    size = c * c + d * d
    return _mul(left, Pair(c / size, -d / size) if isinstance(c, Tensor) else 1 / right)


def _added_product(multiply: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def rule(added: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if beta != 1 or alpha != 1:
            raise NotImplementedError
        return _add(_product(multiply)(left, right), added)

    return rule


def _each(target: Any) -> Callable[..., Any]:
    """Apply a linear operator with real coefficients to each part, of one value or of a list."""

    def rule(values: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = pytree.tree_map(_pair, values)
        parts = (pytree.tree_map(operator.attrgetter(part), pairs) for part in ("re", "im"))
        return pytree.tree_map(Pair, *(target(part, *args, **kwargs) for part in parts))

    return rule


def _where(mask: Tensor, left: Any, right: Any) -> Any:
    left, right = _pair(left), _pair(right)
    return Pair(torch.where(mask, left.re, right.re), torch.where(mask, left.im, right.im))


def _exp(value: Pair) -> Pair:
    size = torch.exp(value.re)
    return Pair(size * torch.cos(value.im), size * torch.sin(value.im))


def _conj(value: Any) -> Any:
    return Pair(value.re, -value.im) if isinstance(value, Pair) else value


def _view_as_complex(value: Tensor) -> Pair:
    return Pair(value.select(-1, 0), value.select(-1, 1))


def _view_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Pair) and not dtype.is_complex:
        return Interleaved(value)
    if isinstance(value, Interleaved) and dtype.is_complex and not value.apart:
        return value.pair
    if isinstance(value, Tensor) and dtype.is_complex:
        return _view_as_complex(value.unflatten(-1, (-1, 2)))
    raise NotImplementedError


def _view(value: Any, size: Any) -> Any:
    if not isinstance(value, Interleaved):
        return _each(aten.view.default)(value, size)
    rank = value.pair.re.dim() + (0 if value.apart else 1)
    if len(size) != rank or not (value.apart or (isinstance(size[-1], int) and size[-1] == 2)):
        raise NotImplementedError
    return Interleaved(value.pair, not value.apart)


def _convert(value: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or (isinstance(value, Pair) and dtype == value.dtype):
        return value
    if not dtype.is_complex:
        return value.re.to(dtype)  # the imaginary part is discarded
    return _pair(value).map(lambda v: v.to(dtype.to_real()))


def _made(target: Any) -> Callable[..., Any]:
    """Return a rule for ``zeros_like`` and its like, whose imaginary part is zero."""

    def rule(value: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            raise NotImplementedError
        return Pair(target(value.re, *args), torch.zeros_like(value.im))

    return rule


def _full(size: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    re, im = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    parts = (torch.full(size, part, dtype=dtype.to_real(), device=device) for part in (re, im))
    return Pair(*parts)


RULES: dict[Any, Callable[..., Any]] = {
    **{target: _each(target) for target in operators("apart")},
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.reciprocal.default: lambda value: _div(1.0, value),
    aten.mm.default: _product(torch.mm),
    aten.bmm.default: _product(torch.bmm),
    aten.mv.default: _product(torch.mv),
    aten.addmm.default: _added_product(torch.mm),
    aten.baddbmm.default: _added_product(torch.bmm),
    aten._conj_physical.default: _conj,
    aten._conj.default: _conj,
    aten.conj_physical.default: _conj,
    aten.abs.default: lambda value: torch.hypot(value.re, value.im),
    aten.exp.default: _exp,
    aten.where.self: _where,
    aten.cat.default: _each(torch.cat),
    aten.stack.default: _each(torch.stack),
    aten.split.Tensor: _each(torch.split),
    aten.unbind.int: _each(torch.unbind),
    aten.view_as_real.default: lambda value: torch.stack([value.re, value.im], -1),
    aten.view_as_complex.default: _view_as_complex,
    aten.complex.default: Pair,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.view.dtype: _view_dtype,
    aten._to_copy.default: _convert,
    torch.ops.prims.convert_element_type.default: _convert,
    aten.zeros_like.default: _made(torch.zeros_like),
    aten.ones_like.default: _made(torch.ones_like),
    aten.full.default: _full,
}
