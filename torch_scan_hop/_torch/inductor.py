"""Inductor's IR, lowerings and generated wrappers (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor import fx_utils, ir
from torch._inductor.codegen import wrapper as wrapper_lines
from torch._inductor.codegen.wrapper import EnterSubgraphLine, ExitSubgraphLine, WrapperLine
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
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
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V, ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import Max, Min

from torch_scan_hop._torch.own_scan import torchs_operator, under_its_own_name

__all__ = [
    "AllocateLine",
    "DeclaredOutput",
    "ExternKernel",
    "FixedLayout",
    "MultiOutputLayout",
    "TensorBox",
    "V",
    "buffers_of",
    "codegen_subgraph_inline",
    "current_node",
    "declare_loop_index",
    "declared_output",
    "decompose_mutating_operators",
    "fake_mode",
    "fresh_loop_index",
    "is_tensor_ir",
    "is_unrealized",
    "keep_functional",
    "layout_like",
    "let_scans_be_empty",
    "lower_subgraph",
    "register_own_lowering",
    "replace_scan_pass",
    "shifted_by_one",
    "size_expression",
    "trace_decomposed",
    "trip_count_code",
    "with_exact_strides",
    "written_output",
]


def register_own_lowering(op: Any, lower: Callable[..., Any]) -> None:
    register_lowering(op, type_promotion_kind=None)(lower)


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

    return ir.Pointwise.create(
        device=stack.get_device(),
        dtype=stack.get_dtype(),
        inner_fn=inner_fn,
        ranges=list(stack.get_size()),
    )


def replace_scan_pass(op: Any, transform: Callable[[fx.GraphModule], None]) -> None:
    """Run ``transform`` where Inductor would turn scans into while loops.

    Inductor looks that pass up as a module global, and asserts that no scan node remains.
    torch's own operator, where a graph holds it, is a while loop as ever.
    """
    into_while_loops = post_grad.decompose_scan_to_while_loop

    def run(gm: fx.GraphModule) -> None:
        transform(gm)
        if gm.graph.find_nodes(op="call_function", target=torchs_operator()):
            under_its_own_name(into_while_loops, gm)

    post_grad.decompose_scan_to_while_loop = run


# What Inductor does last to a graph, and to the graphs in it: from then on values are written
# in place. Operators that mutate (custom ones, Triton kernels) get their copies in the last two.
_REINPLACE = "reinplace_inplaceable_ops"
_DECOMPOSE = ("decompose_triton_kernel_wrapper_functional", "decompose_auto_functionalized")
# Where the first of them tells the last which tensors an operator may not write into.
_COPIED = "only_clone_these_tensors"
_mutating_passes = {name: getattr(post_grad, name) for name in (_REINPLACE, *_DECOMPOSE)}


def keep_functional(is_kept: Callable[[fx.GraphModule], bool]) -> None:
    """Leave those graphs out of the passes that make operators write in place.

    A buffer that a step makes and writes (``z = zeros(3); z[i] = h``) may be the same value at
    every step, and so leave the loop. Written in place, it would keep what earlier steps wrote.
    """
    for name, run_pass in _mutating_passes.items():
        setattr(post_grad, name, _unless_kept(run_pass, is_kept))


def _unless_kept(
    run_pass: Callable[..., Any], is_kept: Callable[[fx.GraphModule], bool]
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        module = args[-1].owning_module  # the graph comes last, behind what the pass is bound to
        return None if module is not None and is_kept(module) else run_pass(*args)

    return run


def decompose_mutating_operators(gm: fx.GraphModule) -> None:
    """What :func:`keep_functional` put off, for a graph that no rewrite will see."""
    for node in gm.graph.nodes:
        # Torch 2.9 takes a node that the re-inplacing pass has not seen for one that may write
        # into all its arguments; here none was proven to be its own.
        if node.target is torch.ops.higher_order.auto_functionalized_v2:
            node.meta[_COPIED] = list(range(len(node.kwargs["_all_bases"])))
        elif node.target is torch.ops.higher_order.auto_functionalized:
            written = [a for a in node.args[0]._schema.arguments if a.is_write]
            node.meta[_COPIED] = [argument.name for argument in written]
    for name in _DECOMPOSE:
        _mutating_passes[name](gm.graph)
    gm.recompile()


def let_scans_be_empty(op: Any) -> None:
    """Torch 2.13 takes ``xs[0]`` for an example of a slice, which an empty scan has not got.

    And ``init`` for an example of a carry, which is contiguous in a step, whatever ``init`` is.
    """
    extract = getattr(fx_utils, "_extract_subgraphs_and_args", None)
    if extract is None:
        return

    def with_slices(node: fx.Node, valid: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if node.target is not op:
            yield from extract(node, valid, *args, **kwargs)
            return
        body, init, xs, additional = args
        slices = (x.new_empty_strided(x.shape[1:], x.stride()[1:]) for x in xs)
        carry = (c.new_empty(c.shape) for c in init)
        yield body, (*carry, *slices, *additional)

    fx_utils._extract_subgraphs_and_args = with_slices  # type: ignore[attr-defined, assignment]


def current_node() -> fx.Node:
    return V.graph.current_node


def fake_mode() -> Any:
    return V.fake_mode


def is_tensor_ir(value: Any) -> bool:
    return isinstance(value, ir.IRNode) and not isinstance(value, ir.ShapeAsConstantBuffer)


def size_expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))


def fresh_loop_index() -> torch.SymInt:
    """A symbol for the loop counter that Inductor takes as bound, without runtime asserts."""
    shape_env = V.graph.sizevars.shape_env
    with shape_env.ignore_fresh_unbacked_symbols():
        return shape_env.create_unbacked_symint()


def is_unrealized(value: Any) -> bool:
    """Whether ``value`` is computed where it is read."""
    return isinstance(value, TensorBox) and isinstance(
        getattr(value.data, "data", None), ir.Pointwise
    )


def buffers_of(value: Any) -> list[Any]:
    """The buffers that ``value`` is, or is computed from."""
    if is_unrealized(value):
        return [V.graph.get_buffer(name) for name in sorted(value.get_read_names())]
    return [value] if is_tensor_ir(value) else []


def with_exact_strides(value: Any, stride: Sequence[Any]) -> Any:
    """``value`` as a realized buffer of these strides."""
    realized = ExternKernel.realize_input(value)
    if not isinstance(realized, TensorBox):
        wrap = (StorageBox, ir.ReinterpretView)
        realized = TensorBox(realized) if isinstance(realized, wrap) else TensorBox.create(realized)
    exact = ExternKernel.require_exact_strides(realized, stride, allow_padding=False)
    if isinstance(exact.maybe_get_layout(), ir.FlexibleLayout):
        exact.freeze_layout()  # a scalar's strides are exact without being fixed
    return exact


def lower_subgraph(name: str, gm: fx.GraphModule, examples: Sequence[Any]) -> Subgraph:
    """``gm`` lowered as a subgraph of the graph at hand."""
    subgraph = Subgraph(name=name, graph_module=gm)
    subgraph.graph = V.graph.make_subgraph(gm=gm, example_inputs=list(examples), subgraph_name=name)
    with V.set_graph_handler(subgraph.graph):
        subgraph.graph.run(*examples)
    return subgraph


@contextlib.contextmanager
def _indented(wrapper: Any, graph: Any) -> Iterator[None]:
    wrapper.writeline(EnterSubgraphLine(wrapper, graph))
    yield
    wrapper.writeline(ExitSubgraphLine(wrapper))


def codegen_subgraph_inline(wrapper: Any, subgraph: Subgraph, input_names: Sequence[str]) -> None:
    """The subgraph's code at this place of the wrapper, one level deeper.

    Its inputs are variables that the caller declared; they outlive the subgraph's code.
    """
    graph: Any = subgraph.graph
    parent = V.graph
    first = len(wrapper.lines)
    with _indented(wrapper, graph):
        # a name in `freed` is never deleted or reused by the memory planner
        wrapper.freed.update(input_names)
        wrapper.push_codegened_graph(graph)
        try:
            with V.set_graph_handler(graph):
                graph.codegen_subgraph(parent_graph=parent)
        finally:
            wrapper.pop_codegened_graph()
    _reuse_buffers_within(wrapper.lines[first:])
    parent.removed_buffers |= graph.removed_buffers


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


def layout_like(like: torch.Tensor) -> FixedLayout:
    return FixedLayout(
        device=like.device,
        dtype=like.dtype,
        size=[size_expression(s) for s in like.shape],
        stride=[size_expression(s) for s in like.stride()],
    )


def declared_output(node: Any, position: int, like: torch.Tensor) -> DeclaredOutput:
    return DeclaredOutput(layout_like(like), node, [(list, position)])


def written_output(node: Any, place: Any) -> MutationOutput:
    """Tells the scheduler that ``node`` writes to the buffer of ``place``, a view."""
    return MutationOutput(NoneLayout(device=place.get_device()), place, node)


def trace_decomposed(fn: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """``fn`` traced to the operators that Inductor's lowerings expect at this stage.

    ``examples`` are the fakes of the graph being compiled; symbols among them stay symbols.
    """
    mode = detect_fake_mode(examples) or V.fake_mode
    with mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="real")(
            *examples
        )
    traced.graph.eliminate_dead_code()
    return traced
