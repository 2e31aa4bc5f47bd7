"""Inductor's IR, lowerings and generated wrappers (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen import wrapper as wrapper_lines
from torch._inductor.codegen.wrapper import EnterSubgraphLine, ExitSubgraphLine, WrapperLine
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.ir import (
    ExternKernel,
    FixedLayout,
    MultiOutput,
    MultiOutputLayout,
    MutationOutput,
    NoneLayout,
    StorageBox,
    Subgraph,
    TensorBox,
)
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from torch_scan_hop._torch.inductor_values import is_unrealized
from torch_scan_hop._torch.replaced import wrapped

# torch's, under our names
__all__ = ["MultiOutputLayout"]


def register_own_lowering(op: Any, lower: Callable[..., Any]) -> None:
    register_lowering(op, type_promotion_kind=None)(lower)


def called_as_it_is(op: Any, *args: Any) -> Any:
    """Return the value of ``op``, for which Inductor has no code of its own."""
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def current_node() -> fx.Node:
    return V.graph.current_node


def fake_mode() -> Any:
    return V.fake_mode


def uses_cpp_wrapper() -> bool:
    """Return True if the wrapper at hand is C++, and not Python."""
    return bool(V.graph.cpp_wrapper)


def is_cudagraphed() -> bool:
    """Return True if what is compiled is to run as a CUDA graph, as with mode="reduce-overhead"."""
    return bool(config.triton.cudagraphs)


def draws_as_eager_mode() -> bool:
    """Return True if random operators are left to torch's generators, in their order."""
    return bool(config.fallback_random)


def register_node(node: Any) -> str:
    """Add a new IR node to the graph at hand, and return the name that it has there."""
    name: str = V.graph.register_buffer(node)
    V.graph.register_operation(node)
    return name


def keep_buffers(names: Iterable[str]) -> None:
    """Let buffers be allocated although nothing reads them later."""
    V.graph.removed_buffers.difference_update(names)


def is_tensor_ir(value: Any) -> bool:
    return isinstance(value, ir.IRNode) and not isinstance(value, ir.ShapeAsConstantBuffer)


def size_expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))


def fresh_loop_index() -> torch.SymInt:
    """Return a symbol for a loop counter, which Inductor takes as bound, without asserts."""
    shape_env = V.graph.sizevars.shape_env
    with shape_env.ignore_fresh_unbacked_symbols():
        return shape_env.create_unbacked_symint()


def boxed(value: Any) -> Any:
    """Return ``value`` as lowerings take it. A box in a box would fail when it is realized."""
    is_boxed = isinstance(value, StorageBox | ir.BaseView)
    return TensorBox(value) if is_boxed else TensorBox.create(value)


def buffers_of(value: Any) -> list[Any]:
    """Return the buffers that ``value`` is, or is computed from."""
    if is_unrealized(value):
        return [V.graph.get_buffer(name) for name in sorted(value.get_read_names())]
    return [value] if is_tensor_ir(value) else []


def with_exact_strides(value: Any, stride: Sequence[Any]) -> Any:
    """Return ``value`` as a realized buffer of these strides."""
    realized = ExternKernel.realize_input(value)
    if not isinstance(realized, TensorBox):
        realized = boxed(realized)
    exact = ExternKernel.require_exact_strides(realized, stride, allow_padding=False)
    if isinstance(exact.maybe_get_layout(), ir.FlexibleLayout):
        exact.freeze_layout()  # a scalar's strides are exact without being fixed
    return _read_from_memory(exact)


def _read_from_memory(value: Any) -> Any:
    """Return ``value``, a realized tensor, such that its loads are loads.

    Inductor reads a buffer that is computed of no other (zeros, eye) as its expression, which is
    wrong where something has written to it, and where a kernel has merged dimensions.
    """
    box = value.data
    buffer = box.data if isinstance(box, StorageBox) else None
    if isinstance(buffer, ir.ComputedBuffer) and buffer.num_reads() == 0:
        return boxed(ir.ReinterpretView(data=box, layout=value.get_layout()))
    return value


def lower_subgraph(name: str, gm: fx.GraphModule, examples: Sequence[Any]) -> Subgraph:
    """Lower ``gm`` as a subgraph of the graph at hand."""
    subgraph = Subgraph(name=name, graph_module=gm)
    subgraph.graph = V.graph.make_subgraph(gm=gm, example_inputs=list(examples), subgraph_name=name)
    with V.set_graph_handler(subgraph.graph):
        subgraph.graph.run(*examples)
    return subgraph


@contextlib.contextmanager
def indented(wrapper: Any, graph: Any = None) -> Iterator[None]:
    """Put what is written within in a block of the wrapper's code.

    ``graph``: whose block it is, if another's.
    """
    graph = V.graph if graph is None else graph
    wrapper.writeline(EnterSubgraphLine(wrapper, graph))
    yield
    wrapper.writeline(ExitSubgraphLine(wrapper))


def codegen_subgraph_inline(wrapper: Any, subgraph: Subgraph, input_names: Sequence[str]) -> None:
    """Write the subgraph's code at this place of the wrapper, one level deeper.

    Its inputs are variables that the caller declared; they outlive the subgraph's code.
    """
    graph: Any = subgraph.graph
    parent = V.graph
    first = len(wrapper.lines)
    with indented(wrapper, graph), _declarations_end_here(wrapper):
        # a name in `freed` is never deleted or reused by the memory planner
        wrapper.freed.update(input_names)
        wrapper.push_codegened_graph(graph)
        try:
            # what is captured as a CUDA graph is the whole loop: a step is no partition of its own
            whole = config.patch(graph_partition=False)
            with V.set_graph_handler(graph), whole, _writes_stay_in_order():
                graph.codegen_subgraph(parent_graph=parent)
        finally:
            wrapper.pop_codegened_graph()
    _reuse_buffers_within(wrapper.lines[first:])
    parent.removed_buffers |= graph.removed_buffers


def _writes_stay_in_order() -> contextlib.AbstractContextManager[None]:
    """Keep the order of writes to one buffer, which torch 2.9 forgets of a node whose loops change
    to fit those of another: a scatter may come before the values that it adds to."""
    recompute_body: Any = SchedulerNode.recompute_size_and_body
    if "fake_deps" in recompute_body.__code__.co_varnames:  # torch > 2.9
        return contextlib.nullcontext()

    def recompute(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        kinds = (WeakDep, StarDep)
        orders = OrderedSet(d for d in self.read_writes.reads if isinstance(d, kinds))
        original(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(orders).rename(self.mutation_renames))

    return wrapped(SchedulerNode, recompute_size_and_body=recompute)


@contextlib.contextmanager
def _declarations_end_here(wrapper: Any) -> Iterator[None]:
    """Let the C++ wrapper declare again later what calls Python's operators.

    It declares that once, at the first call, which may be in this block.
    """
    name = "custom_op_wrapper_loaded"
    before = getattr(wrapper, name, None)
    yield
    if before is not None:
        setattr(wrapper, name, before)


def _reuse_buffers_within(lines: Sequence[Any]) -> None:
    """Let a buffer that is freed in a subgraph serve any later allocation in it.

    Inductor weighs a reuse by the peak memory between the two scheduler nodes, which it looks up
    by their positions; those of a subgraph's nodes are positions in another list, and out of its
    bounds. Neighbours are not weighed.
    """
    for line in lines:
        if isinstance(line, wrapper_lines.AllocateLine):
            line.scheduler_node_index = 0
        elif isinstance(line, wrapper_lines.FreeIfNotReusedLine):
            line.scheduler_node_index = -1


def trip_count_code(wrapper: Any, size: Any) -> str:
    return str(wrapper.codegen_sizevar(size))


def import_into(wrapper: Any, function: Callable[..., Any]) -> str:
    """Import ``function`` into a Python wrapper, and return its name there."""
    name = f"{function.__module__}.{function.__qualname__}"
    wrapper.add_import_once(f"import {function.__module__}")
    return name


def define_in_header(wrapper: Any, name: str, value: str, imports: str) -> str:
    """Let a Python wrapper make ``value`` once, like a kernel, and return its name there."""
    name = f"{name}_{wrapper.next_kernel_suffix()}"
    wrapper.define_kernel(name, value, metadata=imports, gpu=False)
    return name


def splice_into_header(wrapper: Any, source: str) -> None:
    """Let a C++ wrapper define what ``source`` does, which guards itself from being there twice."""
    wrapper.header.splice(source)


def declare_loop_index(wrapper: Any, name: str) -> None:
    declared = getattr(wrapper, "unbacked_symbol_decls", None)
    if declared is not None:
        declared.add(name)


class AllocateLine(WrapperLine):
    """An allocation, emitted in order: the C++ wrapper's own call writes at once."""

    def __init__(self, wrapper: Any, name: str, layout: Any) -> None:
        self.wrapper = wrapper
        self.name = name
        self.layout = layout

    def codegen(self, code: Any) -> None:
        layout = self.layout
        code.writeline(
            self.wrapper.make_allocation(
                self.name, layout.device, layout.dtype, tuple(layout.size), tuple(layout.stride)
            )
        )

    def codegen_fx(self, converter: Any) -> Any:
        raise NotImplementedError("torch_scan_hop: the FX wrapper backend cannot run a scan")


class DeclaredOutput(MultiOutput):
    """An output that the producer's own code has declared already."""

    def codegen(self, wrapper: Any) -> None:
        pass


def layout_like(like: torch.Tensor, dtype: torch.dtype | None = None) -> FixedLayout:
    return FixedLayout(
        device=like.device,
        dtype=dtype or like.dtype,
        size=[size_expression(s) for s in like.shape],
        stride=[size_expression(s) for s in like.stride()],
    )


def declared_output(
    node: Any, position: int, like: torch.Tensor, dtype: torch.dtype
) -> DeclaredOutput:
    return DeclaredOutput(layout_like(like, dtype), node, [(list, position)])


def written_output(node: Any, place: Any) -> MutationOutput:
    """Tell the scheduler that ``node`` writes to the buffer of ``place``, a view."""
    return MutationOutput(NoneLayout(device=place.get_device()), place, node)
