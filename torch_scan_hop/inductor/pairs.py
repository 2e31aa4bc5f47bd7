"""Complex numbers as pairs of reals, before Inductor sees a scan.

Inductor has no complex arithmetic: each operator on complex values is a call of torch's kernel,
and views of complex buffers are such calls too, so that a loop which writes its results through
views of one buffer has no order that Inductor knows of. A pair of real tensors has all that a real
tensor has: fused loops, one-kernel paths, products with real matrices. So every complex carry, x,
additional input and y becomes two::

    before: (h, x, lam) -> (lam * h + x, y)
    after:  (h_re, h_im, x_re, x_im, lam_re, lam_im)
                -> (lam_re * h_re - lam_im * h_im + x_re, ..., y_re, y_im)

An operator without a rule here is called on the complex value that its pair makes, within a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop.signature import Inputs, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """A complex tensor as its real and imaginary part."""

    re: Tensor
    im: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.complex128 if self.re.dtype == torch.float64 else torch.complex64

    def whole(self) -> Tensor:
        return torch.complex(self.re.contiguous(), self.im.contiguous())

    def map(self, fn: Callable[[Tensor], Tensor]) -> Pair:
        return Pair(fn(self.re), fn(self.im))


@dataclass(frozen=True)
class Interleaved:
    """``view(dtype)`` of a complex tensor: its numbers in a row, real and imaginary in turn."""

    pair: Pair

    def whole(self) -> Tensor:
        return torch.stack([self.pair.re, self.pair.im], -1).flatten(-2)


def is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def split(value: Tensor) -> Pair:
    """A complex tensor's parts."""
    parts = torch.view_as_real(value.resolve_conj())
    return Pair(parts.select(-1, 0), parts.select(-1, 1))


def _pair(value: Any) -> Pair:
    """Any operand as a pair: a real one has no imaginary part."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, Tensor):
        return Pair(value, torch.zeros_like(value))
    raise NotImplementedError


def _parts(value: Any) -> tuple[Any, Any]:
    """(real, imaginary) of a pair, a tensor or a number; None for no imaginary part."""
    if isinstance(value, Pair):
        return value.re, value.im
    if isinstance(value, complex):
        return value.real, value.imag
    return value, None


# --- rules: operator -> function of pairs, tensors and numbers ---


def _add(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    if isinstance(left, Interleaved) and isinstance(right, Interleaved):
        return Interleaved(_add(left.pair, right.pair, alpha=alpha))
    if (
        isinstance(left, Interleaved)
        or isinstance(right, Interleaved)
        or isinstance(alpha, complex)
    ):
        raise NotImplementedError
    (a, b), (c, d) = _parts(left), _parts(right)
    real = torch.add(a, c, alpha=alpha)
    if b is None:
        return Pair(real, _scaled(d, alpha) + torch.zeros_like(real))
    if d is None:
        return Pair(real, b + torch.zeros_like(real))
    return Pair(real, torch.add(b, d, alpha=alpha))


def _scaled(value: Any, alpha: Any) -> Any:
    return value if alpha == 1 else value * alpha


def _sub(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    return _add(left, right, alpha=-alpha)


def _product(multiply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``(a + bi)(c + di)`` for any bilinear operator."""

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
    """A linear operator with real coefficients: of each part."""
    return lambda value, *args, **kwargs: _pair(value).map(lambda v: target(v, *args, **kwargs))


def _of_list(target: Any) -> Callable[..., Any]:
    def rule(values: Sequence[Any], *args: Any) -> Any:
        pairs = [_pair(v) for v in values]
        return Pair(target([p.re for p in pairs], *args), target([p.im for p in pairs], *args))

    return rule


def _several(target: Any) -> Callable[..., Any]:
    def rule(value: Pair, *args: Any) -> Any:
        parts = zip(target(value.re, *args), target(value.im, *args), strict=True)
        return [Pair(re, im) for re, im in parts]

    return rule


def _where(mask: Tensor, left: Any, right: Any) -> Any:
    left, right = _pair(left), _pair(right)
    return Pair(torch.where(mask, left.re, right.re), torch.where(mask, left.im, right.im))


def _exp(value: Pair) -> Pair:
    size = torch.exp(value.re)
    return Pair(size * torch.cos(value.im), size * torch.sin(value.im))


def _abs(value: Pair) -> Tensor:
    return torch.hypot(value.re, value.im)


def _conj(value: Any) -> Any:
    return Pair(value.re, -value.im) if isinstance(value, Pair) else value


def _view_as_real(value: Pair) -> Tensor:
    return torch.stack([value.re, value.im], -1)


def _view_as_complex(value: Tensor) -> Pair:
    return Pair(value.select(-1, 0), value.select(-1, 1))


def _view_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Pair) and not dtype.is_complex:
        return Interleaved(value)
    if isinstance(value, Interleaved) and dtype.is_complex:
        return value.pair
    if isinstance(value, Tensor) and dtype.is_complex:
        return _view_as_complex(value.unflatten(-1, (-1, 2)))
    raise NotImplementedError


def _convert(value: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or (isinstance(value, Pair) and dtype == value.dtype):
        return value
    real = {torch.complex128: torch.float64, torch.complex64: torch.float32}.get(dtype)
    if real is None:
        return value.re.to(dtype)  # the imaginary part is discarded
    return _pair(value).map(lambda v: v.to(real))


def _made(target: Any) -> Callable[..., Any]:
    """``zeros_like`` and its like: the imaginary part is zero."""

    def rule(value: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            raise NotImplementedError
        return Pair(target(value.re, *args), torch.zeros_like(value.im))

    return rule


def _full(size: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    real = {torch.complex128: torch.float64, torch.complex64: torch.float32}[dtype]
    re, im = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    return Pair(*(torch.full(size, part, dtype=real, device=device) for part in (re, im)))


_LINEAR = (
    aten.neg.default, aten.clone.default, aten.alias.default, aten.view.default,
    aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.t.default,
    aten.transpose.int, aten.expand.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.sum.default,
    aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.flip.default, aten.cumsum.default,
    aten.diagonal.default, aten.index.Tensor, aten.gather.default, aten.index_select.default,
    aten.constant_pad_nd.default, aten.roll.default, aten.tril.default, aten.triu.default,
    aten.repeat.default, aten.lift_fresh_copy.default,
)  # fmt: skip

RULES: dict[Any, Callable[..., Any]] = {
    **{target: _each(target) for target in _LINEAR},
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
    aten.abs.default: _abs,
    aten.exp.default: _exp,
    aten.where.self: _where,
    aten.cat.default: _of_list(torch.cat),
    aten.stack.default: _of_list(torch.stack),
    aten.split.Tensor: _several(torch.split),
    aten.unbind.int: _several(torch.unbind),
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.complex.default: Pair,
    aten.view.dtype: _view_dtype,
    aten._to_copy.default: _convert,
    torch.ops.prims.convert_element_type.default: _convert,
    aten.zeros_like.default: _made(torch.zeros_like),
    aten.ones_like.default: _made(torch.ones_like),
    aten.full.default: _full,
}


# --- running a body on pairs ---


def _is_about_pairs(node: fx.Node, args: Any) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(map(is_complex, values)) or any(
        isinstance(v, (Pair, Interleaved)) for v in torch.utils._pytree.tree_leaves(args)
    )


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, (Pair, Interleaved)) else value


def _split_results(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [split(v) if is_complex(v) else v for v in value]
    return split(value) if is_complex(value) else value


class PairInterpreter(fx.Interpreter):
    """Runs a body with a pair for each complex value; under a trace, it writes the body anew."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            result = super().run_node(n)
            return split(result) if is_complex(result) else result
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not _is_about_pairs(n, (args, kwargs)) or n.target is operator.getitem:
            return super().run_node(n)
        rule = RULES.get(n.target)
        if rule is not None:
            try:
                return rule(*args, **kwargs)
            except (NotImplementedError, TypeError, AttributeError):
                pass  # not for these arguments
        args, kwargs = torch.utils._pytree.tree_map(_whole, (args, kwargs))
        return _split_results(n.target(*args, **kwargs))  # type: ignore[operator]


# --- a scan ---


def needs_pairs(body: fx.GraphModule, operands: Inputs[Any]) -> bool:
    """Whether complex values cross the edge of the body."""
    values = [r.meta.get("val") for r in results_of(body.graph) if isinstance(r, fx.Node)]
    return any(map(is_complex, (*operands.flat(), *values)))


def expanded(values: Sequence[Any]) -> list[Any]:
    """Each complex value as two."""
    found: list[Any] = []
    for value in values:
        pair = split(value) if is_complex(value) else value
        found += [pair.re, pair.im] if isinstance(pair, Pair) else [pair]
    return found


def expanded_step(body: fx.GraphModule, is_complex_input: Sequence[bool]) -> Callable[..., Any]:
    """``body`` on inputs of which each complex one is two, with results likewise."""

    def step(*flat: Any) -> tuple[Any, ...]:
        rest = iter(flat)
        inputs = [Pair(next(rest), next(rest)) if c else next(rest) for c in is_complex_input]
        results: list[Any] = []
        for result in PairInterpreter(body).run(*inputs, enable_io_processing=False):
            if isinstance(result, Interleaved):
                result = result.whole()
            results += [result.re, result.im] if isinstance(result, Pair) else [result]
        return tuple(results)

    return step


def joined_results(results: Sequence[Any], is_complex_result: Sequence[bool]) -> list[Any]:
    """Each two of ``results`` that a complex one became, as one."""
    rest = iter(results)
    return [torch.complex(next(rest), next(rest)) if c else next(rest) for c in is_complex_result]
