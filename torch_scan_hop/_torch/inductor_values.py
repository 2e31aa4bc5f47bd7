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
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen.common import OptimizationContext
from torch._inductor.ops_handler import WrapperHandler as OpsHandler
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.subgraph_lowering import SubgraphLoweringException as NotPointwise
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "InlineLowering",
    "NotPointwise",
    "OpsHandler",
    "Reads",
    "bounds_of",
    "handled_by",
    "handler_at_hand",
    "is_tensor",
    "is_unrealized",
    "likely_size",
    "masked",
    "merged_sizes",
    "named_buffer",
    "named_input",
    "no_interpreter",
    "ops",
    "pointwise_like",
    "shifted_by_one",
    "slice_at",
    "storage_of",
    "tensor_of",
]


# --- what a value is ---


def is_tensor(value: Any) -> bool:
    return isinstance(value, ir.TensorBox)


def is_unrealized(value: Any) -> bool:
    """Whether ``value`` is computed where it is read."""
    return is_tensor(value) and isinstance(getattr(value.data, "data", None), ir.Pointwise)


def storage_of(value: Any) -> tuple[str, Any] | None:
    """The buffer that ``value`` is in, and the layout it has there; None for what is in none."""
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
    """``sizes`` with neighbours merged where all ``accesses`` at ``index`` allow it.

    The function gives the index that stands for one of the merged sizes.
    """
    merged, index_of, _ = V.graph.sizevars._simplify_loops(index, list(sizes), accesses)
    return list(merged), index_of


def bounds_of(expression: Any, sizes: Mapping[Any, Any]) -> tuple[Any, Any]:
    """The least and the greatest value of an index, if its symbols are below ``sizes``."""
    ranges = {symbol: ValueRanges(0, size - 1) for symbol, size in sizes.items()}
    bounds = bound_sympy(expression, ranges)
    return bounds.lower, bounds.upper


# --- values made ---


def named_buffer(
    name: str, device: Any, dtype: torch.dtype, sizes: Sequence[Any], strides: Sequence[Any]
) -> Any:
    """What stands for values of that name, whatever they are."""
    layout = ir.FixedLayout(device, dtype, list(sizes), list(strides))
    return ir.InputBuffer(name=name, layout=layout)


def tensor_of(buffer: Any) -> Any:
    return ir.TensorBox(ir.StorageBox(buffer))


def named_input(name: str, like: Any) -> Any:
    """A contiguous input of that name, and of the size, type and device of ``like``."""
    size = like.get_size()
    strides = ir.FlexibleLayout.contiguous_strides(size)
    return tensor_of(named_buffer(name, like.get_device(), like.get_dtype(), size, strides))


def pointwise_like(like: Any, fn: Callable[[Sequence[Any]], Any], sizes: Sequence[Any]) -> Any:
    """What ``fn`` computes at an index, of the type and device of ``like``."""
    return ir.Pointwise.create(
        device=like.get_device(), dtype=like.get_dtype(), inner_fn=fn, ranges=list(sizes)
    )


def slice_at(step: Any, xs: Any) -> Any:
    """``xs[step]``, without a copy."""
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
    """``[init, *stack[:-1]]``, or ``[*stack[1:], init]``, computed where it is read."""
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


# --- a graph as values ---


class InlineLowering(PointwiseSubgraphLowering):
    """Values as functions of an index, without buffers; NotPointwise if one is needed.

    Within ``fresh_values``, the code of one kernel, each is computed once per place, however many
    others read it. Elsewhere nothing is kept: a value is a variable of the kernel at hand.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, root_graph_lowering=V.graph)
        self._computed: dict[Any, Any] | None = None

    def lower(self, inputs: Sequence[Any]) -> list[Any]:
        never = 10**9
        inline = config.patch(
            realize_reads_threshold=never,
            realize_opcount_threshold=never,
            realize_acc_reads_threshold=never,
        )
        # a GraphLowering in all that lowerings ask of it
        handler: Any = self
        with inline, _values_read_often_stay_inline(), V.set_graph_handler(handler):
            self.run(*inputs)
        return list(self.graph_outputs or ())

    def run_node(self, n: fx.Node) -> Any:
        size = n.meta.get("val")
        if isinstance(size, torch.SymInt) and n.op != "placeholder":
            return size.node.expr
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        for value in out if isinstance(out, (list, tuple)) else [out]:
            self.compute_once(value)
        return out

    def compute_once(self, value: Any) -> None:
        box = getattr(value, "data", None)
        data = getattr(box, "data", None)
        if isinstance(box, ir.StorageBox) and isinstance(data, ir.Pointwise):
            object.__setattr__(data, "inner_fn", self._once(data, data.inner_fn))

    def _once(self, data: Any, inner_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fn(index: Any) -> Any:
            if self._computed is None:
                return inner_fn(index)
            key = (id(data), tuple(index))
            if key not in self._computed:
                self._computed[key] = inner_fn(index)
            return self._computed[key]

        return fn

    @contextlib.contextmanager
    def fresh_values(self) -> Iterator[None]:
        """What was computed outside is not there inside, nor the other way round."""
        outside, self._computed = self._computed, {}
        try:
            yield
        finally:
            self._computed = outside

    @contextlib.contextmanager
    def scope_of_values(self) -> Iterator[None]:
        """What was computed outside is there inside, but not the other way round."""
        outside = self._computed
        self._computed = None if outside is None else dict(outside)
        try:
            yield
        finally:
            self._computed = outside


@contextlib.contextmanager
def _values_read_often_stay_inline() -> Iterator[None]:
    original = ir.StorageBox.should_realize_on_reuse
    ir.StorageBox.should_realize_on_reuse = lambda *_, **__: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        ir.StorageBox.should_realize_on_reuse = original  # type: ignore[method-assign]


# --- handlers: what a value's operators do ---


def handler_at_hand() -> Any:
    """It returns bare values: ``ops`` wraps them, which hides that they are vectors."""
    return V.ops


def handled_by(handler: Any) -> contextlib.AbstractContextManager[Any]:
    return V.set_ops_handler(handler)


@contextlib.contextmanager
def no_interpreter() -> Iterator[None]:
    """Kernels ask the interpreter that lowers nodes about the node at hand: it is no node."""
    meta = {OptimizationContext.key: OptimizationContext()}
    node = types.SimpleNamespace(target=None, meta=meta, args=(), kwargs={})
    with V.set_interpreter_handler(types.SimpleNamespace(current_node=node)):
        yield


def masked(inner: Any, mask: Any, body: Callable[[], Any], other: Any) -> Any:
    """``ops.masked`` where no node of a graph says what type the result is of."""

    def typed() -> Any:
        result = body()
        result = getattr(result, "value", result)  # what "ops" wraps
        dtype = getattr(result, "dtype", None)
        if dtype is not None:  # else nothing is computed, but looked at
            V.interpreter.current_node.meta[OptimizationContext.key].dtype = dtype
        return result

    return inner.masked(mask, typed, other)


class Reads(OpsHandler):
    """(buffer, index) of everything that is read."""

    def __init__(self) -> None:
        super().__init__(V.MockHandler())
        self.found: list[tuple[str, Any]] = []
        #: every expression of an index: those of loads, and those that are values
        self.indices: list[Any] = []

    def load(self, name: str, index: Any) -> Any:
        self.found.append((name, index))
        self.indices.append(index)
        return self._inner.load(name, index)

    def index_expr(self, index: Any, dtype: torch.dtype) -> Any:
        self.indices.append(index)
        return self._inner.index_expr(index, dtype)
