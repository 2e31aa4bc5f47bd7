"""Bodies that transform functions themselves: ``torch.func.grad`` in a step, ``vmap``, ``jvp``.

Checked on torch 2.9.1, 2.13.0, 2.15.0. Dynamo writes such a body down with the number of each
functorch level as a constant, counted from the bottom of the stack when it traced. The body is
traced again elsewhere: below a ``vmap`` of the scan, above it, with no other level at all. So the
numbers become what the nodes that open the levels return, and a forward-mode level, of which torch
has only one, is opened unless it is open::

    before: _grad_increment_nesting();         _wrap_for_grad(x, 2)
    after:  level = open_level(increment);     _wrap_for_grad(x, level)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._C._functorch import get_interpreter_stack

_SIZES = {
    torch.ops.aten.sym_size.int: "size",
    torch.ops.aten.sym_stride.int: "stride",
    torch.ops.aten.sym_storage_offset.default: "storage_offset",
}
_OPENERS = {
    "_grad_increment_nesting",
    "_jvp_increment_nesting",
    "_vmap_increment_nesting",
}
_CLOSERS = {"_grad_decrement_nesting", "_jvp_decrement_nesting", "_vmap_decrement_nesting"}
#: for each function, by name, the position of the level among its arguments
_LEVEL_ARGUMENT = {
    "_wrap_for_grad": 1,
    "_unwrap_for_grad": 1,
    "_add_batch_dim": 2,
    "_remove_batch_dim": 1,
}


def open_levels() -> int:
    """Return how many functorch levels are open."""
    return len(get_interpreter_stack() or ())


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return True if a functorch transform (``vmap``, ``grad``) has wrapped ``tensor``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that functorch transforms have wrapped."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def ask_tensors_for_sizes(body: Any) -> None:
    """Let ``body`` read sizes by methods, since torch has no batching rule for the operator.

    Dynamo puts that operator into bodies whose sizes are symbols.
    """
    if not isinstance(body, fx.GraphModule):
        return
    found = [n for op in _SIZES for n in body.graph.find_nodes(op="call_function", target=op)]
    for node in found:
        node.op, node.target = "call_method", _SIZES[node.target]
    if found:
        body.recompile()


def opens_levels(body: Any) -> bool:
    """Return True if ``body`` is a graph in which Dynamo wrote down transforms of functions."""
    if not isinstance(body, fx.GraphModule):
        return False
    names = (getattr(node.target, "__name__", "") for node in body.graph.nodes)
    return any(name in _OPENERS or name == "enter_dual_level" for name in names)


def enter_dual_level() -> bool:
    """Open torch's only forward-mode level; return False if it is open already, and shared."""
    try:
        torch._C._enter_dual_level()
    except RuntimeError:
        return False
    return True


def exit_dual_level(entered: bool) -> None:
    if entered:
        torch._C._exit_dual_level(level=0)


def enable_grad() -> bool:
    """Switch gradients on; return whether they were on before."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    return before


def restore_grad(before: bool) -> None:
    torch._C._set_grad_enabled(before)


def make_levels_relative(graph: fx.Graph, outside: int) -> None:
    """Let ``graph``, traced with ``outside`` levels open, run with any number of them."""
    levels: list[fx.Node] = []
    dual_levels: list[fx.Node] = []
    grad_modes: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = getattr(node.target, "__name__", "")
        if name in _OPENERS:
            levels.append(node)
            if name == "_grad_increment_nesting":
                # ``grad`` means this also where gradients are off; Dynamo left it out, as they
                # were on when it traced
                with graph.inserting_after(node):
                    grad_modes.append(graph.call_function(enable_grad))
        elif name in _CLOSERS:
            levels.pop()
            if name == "_grad_decrement_nesting":
                with graph.inserting_before(node):
                    graph.call_function(restore_grad, (grad_modes.pop(),))
        elif name in _LEVEL_ARGUMENT:
            _use_level(node, _LEVEL_ARGUMENT[name], levels, outside)
        elif name == "_enter_dual_level":
            node.target, node.args, node.kwargs = enter_dual_level, (), {}
            dual_levels.append(node)
        elif name == "_exit_dual_level":
            node.target, node.args, node.kwargs = exit_dual_level, (dual_levels.pop(),), {}


def _use_level(node: fx.Node, position: int, levels: list[fx.Node], outside: int) -> None:
    arguments: list[Any] = list(node.args)
    level = arguments[position]
    if isinstance(level, int) and 0 < level - outside <= len(levels):
        arguments[position] = levels[level - outside - 1]
        node.args = tuple(arguments)
