"""Values of Inductor's IR as functions of an index (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import OptimizationContext
from torch._inductor.ops_handler import WrapperHandler as OpsHandler
from torch._inductor.subgraph_lowering import SubgraphLoweringException as NotPointwise
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

# torch's, under our names
__all__ = ["NotPointwise"]


# --- what a value is ---


def is_tensor(value: Any) -> bool:
    return isinstance(value, ir.TensorBox)


def is_unrealized(value: Any) -> bool:
    """Return True if ``value`` has no buffer: it is computed where it is read."""
    return is_tensor(value) and isinstance(getattr(value.data, "data", None), ir.Pointwise)


def storage_of(value: Any) -> tuple[str, Any] | None:
    """Return the buffer that holds ``value``, and its layout there; None if no buffer does."""
    try:
        storage, layout = ir.as_storage_and_layout(value, freeze=False)
        return storage.get_name(), layout
    except NotImplementedError:
        return None


def likely_size(size: Any, fallback: int) -> int:
    sizevars: Any = V.graph.sizevars
    # "size_hint" until torch 2.9
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(hint(size, fallback=fallback))


def merged_sizes(
    index: Sequence[Any], sizes: Sequence[Any], accesses: Sequence[Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return ``sizes`` with neighbours merged where all ``accesses`` at ``index`` allow it.

    The function gives the index that stands for one of the merged sizes.
    """
    merged, index_of, _ = V.graph.sizevars._simplify_loops(index, list(sizes), accesses)
    return list(merged), index_of


def bounds_of(expression: Any, sizes: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Return the least and the greatest value of an index, if its symbols are below ``sizes``."""
    ranges = {symbol: ValueRanges(0, size - 1) for symbol, size in sizes.items()}
    bounds = bound_sympy(expression, ranges)
    return bounds.lower, bounds.upper


# --- values made ---


def named_buffer(
    name: str, device: Any, dtype: torch.dtype, sizes: Sequence[Any], strides: Sequence[Any]
) -> Any:
    """Return a buffer that stands for values of that name, whatever they are."""
    layout = ir.FixedLayout(device, dtype, list(sizes), list(strides))
    return ir.InputBuffer(name=name, layout=layout)


def tensor_of(buffer: Any) -> Any:
    return ir.TensorBox(ir.StorageBox(buffer))


def named_input(name: str, like: Any) -> Any:
    """Return a contiguous input of that name, and of the size, type and device of ``like``."""
    size = like.get_size()
    strides = ir.FlexibleLayout.contiguous_strides(size)
    return tensor_of(named_buffer(name, like.get_device(), like.get_dtype(), size, strides))


def pointwise_like(
    like: Any,
    fn: Callable[[Sequence[Any]], Any],
    sizes: Sequence[Any],
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the value that ``fn`` computes at an index, of the dtype and device of ``like``."""
    return ir.Pointwise.create(
        device=like.get_device(), dtype=dtype or like.get_dtype(), inner_fn=fn, ranges=list(sizes)
    )


def slice_at(step: Any, xs: Any) -> Any:
    """Return ``xs[step]``, without a copy."""
    if is_unrealized(xs):
        load = xs.make_loader()
        return pointwise_like(xs, lambda index: load([step, *index]), xs.get_size()[1:])
    data = xs.data if is_tensor(xs) else xs
    layout = xs.get_layout()
    first, *rest = layout.stride
    sliced = ir.FixedLayout(
        layout.device, layout.dtype, layout.size[1:], rest, layout.offset + step * first
    )
    base = data.data if isinstance(data, ir.ReinterpretView) else data
    return ir.TensorBox(ir.ReinterpretView(data=base, layout=sliced))


def shifted_by_one(stack: Any, init: Any, reverse: bool) -> Any:
    """Return ``[init, *stack[:-1]]``, or ``[*stack[1:], init]``, computed where it is read."""
    stack.realize()
    init.realize()
    load, load_init = stack.make_loader(), init.make_loader()
    first, last = sympy.Integer(0), stack.get_size()[0] - 1
    at_edge = last if reverse else first

    def inner_fn(index: Sequence[Any]) -> Any:
        step, *rest = index
        # clamped, so that no lane needs a mask
        neighbour = Min(step + 1, last) if reverse else Max(step - 1, first)
        at, edge = (ops.index_expr(i, torch.int64) for i in (step, at_edge))
        return ops.where(ops.eq(at, edge), load_init(rest), load([neighbour, *rest]))

    return pointwise_like(stack, inner_fn, stack.get_size())


# --- handlers: what a value's operators do ---


def handler_at_hand() -> Any:
    """Return the handler itself, which gives bare values; ``ops`` hides that they are vectors."""
    return V.ops


def handled_by(handler: Any) -> contextlib.AbstractContextManager[Any]:
    return V.set_ops_handler(handler)


@contextlib.contextmanager
def no_interpreter() -> Iterator[None]:
    """Let kernels find no interpreter: they ask it about the node at hand, and here is none."""
    meta = {OptimizationContext.key: OptimizationContext()}
    node = types.SimpleNamespace(target=None, meta=meta, args=(), kwargs={})
    interpreter: Any = types.SimpleNamespace(current_node=node)
    with V.set_interpreter_handler(interpreter):
        yield


def masked(inner: Any, mask: Any, body: Callable[[], Any], other: Any) -> Any:
    """Do as ``ops.masked``, where no node of a graph says which dtype the result has."""

    def typed() -> Any:
        result = body()
        result = getattr(result, "value", result)  # what "ops" wraps
        dtype = getattr(result, "dtype", None)
        if dtype is not None:  # else nothing is computed, but looked at
            V.interpreter.current_node.meta[OptimizationContext.key].dtype = dtype
        return result

    return inner.masked(mask, typed, other)


class PythonsIndices(OpsHandler):
    """Takes integers of Python's as values of indices, which Inductor's own tracing replaces."""

    def index_expr(self, index: Any, dtype: torch.dtype) -> Any:
        return self._inner.index_expr(sympy.sympify(index), dtype)


class Reads(OpsHandler):
    """(buffer, index) of everything that is read."""

    def __init__(self) -> None:
        super().__init__(V.MockHandler())
        self.found: list[tuple[str, Any]] = []
        #: every expression of an index: those of loads, and those that are values
        self.indices: list[Any] = []
        self._named = 0

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Name a long value: it is text here, which grows with every operator."""
        result = super()._default(name, args, kwargs)
        if isinstance(result, str) and len(result) > 200:
            self._named += 1
            return f"value_{self._named}"
        return result

    def load(self, name: str, index: Any) -> Any:
        self.found.append((name, index))
        self.indices.append(index)
        return self._inner.load(name, index)

    def index_expr(self, index: Any, dtype: torch.dtype) -> Any:
        self.indices.append(index)
        return self._inner.index_expr(index, dtype)
