"""From a function to an FX graph whose every node knows its shape and dtype.

Shapes are propagated while the graph is written: each new node is evaluated on the `meta` device,
where a tensor has a shape, a dtype and strides, but no data. The function is never run on real
data, and a rule can ask for the shape of anything: an argument, a saved value, a cotangent.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from .table import missing_rule, refuse_mutation

# Frames of torch and of this module say nothing about where the user wrote an operation.
_NOT_THE_USER = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


class TupleProxy(fx.Proxy):
    """A proxy of a tuple has a length and items, where FX refuses in general to know."""

    def __len__(self) -> int:
        return len(self.node.meta["val"])

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))  # type: ignore[attr-defined]


class MetaTracer(GraphAppendingTracer):
    """Appends nodes to a graph, with `node.meta["val"]` evaluated on the meta device.

    New nodes have the stack trace `origin` and are called `name`; None means to look for the user's
    frame, and to name them after their operation.
    """

    def __init__(self) -> None:
        super().__init__(fx.Graph())
        self.constants: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.origin: str | None = None
        self.name: str | None = None

    def placeholder(self, name: str, value: Any) -> fx.Proxy:
        """A new input that stands for `value`."""
        node = self.graph.placeholder(re.sub(r"\W+", "_", name))
        node.meta["val"] = to_meta(value)
        return fx.Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return self._constant(a) if isinstance(a, Tensor) else super().create_arg(a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any,  # type: ignore[override]
                    name: str | None = None, type_expr: Any = None) -> fx.Node:  # fmt: skip
        node = super().create_node(kind, target, args, kwargs, name or self.name, type_expr)
        node.stack_trace = _user_frame() if self.origin is None else self.origin
        constant = self.constants.get(target) if kind == "get_attr" else None
        node.meta["val"] = _evaluate(node) if constant is None else to_meta(constant)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return (TupleProxy if isinstance(node.meta["val"], (tuple, list)) else fx.Proxy)(node, self)

    def _constant(self, tensor: Tensor) -> fx.Node:
        """A node for a tensor that is not an input: closed over, or a parameter."""
        name = next((n for n, t in self.constants.items() if t is tensor), None)
        if name is None:
            name = self.names.get(id(tensor), f"constant_{len(self.constants)}")
            self.constants[name] = tensor
        return self.create_node("get_attr", name, (), {})


def to_meta(value: Any) -> Any:
    """A tensor's shape, strides and dtype without its data; everything else as it is."""
    if not isinstance(value, Tensor):
        return value
    sizes, strides = map(int, value.shape), map(int, value.stride())
    return torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device="meta")


def _evaluate(node: fx.Node) -> Any:
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    args, kwargs = map_aggregate((args, kwargs), _no_device)
    with torch.no_grad():
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        assert node.op == "call_method", node.op
        return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]


def _no_device(arg: Any) -> Any:
    return torch.device("meta") if isinstance(arg, torch.device) else arg


def _user_frame() -> str:
    """The innermost frame outside of torch and of this module, in the form of a traceback."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USER) and not name.startswith("<eval_with_key>"):
            summary = traceback.FrameSummary(name, frame.f_lineno, frame.f_code.co_name)
            return "".join(traceback.format_list([summary]))
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# torch's matmul of a vector leaves these in ATen graphs, also in functionalized ones.
_SQUEEZES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
}


class _Replay(fx.Interpreter):
    """Runs a graph on proxies, so that new nodes keep the names and stack traces of the old."""

    def __init__(self, module: fx.GraphModule, tracer: MetaTracer) -> None:
        super().__init__(module)
        self.tracer = tracer

    def run_node(self, n: fx.Node) -> Any:
        self.tracer.origin, self.tracer.name = n.stack_trace or "", n.name
        functional = _SQUEEZES.get(n.target)
        # Reshaping in place is reshaping, if nobody else looks at the tensor.
        if functional and all(a.op == "call_function" and len(a.users) == 1 for a in n.args[:1]):  # type: ignore[union-attr]
            return functional(*map_arg(n.args, self.env.__getitem__))
        if n.op.startswith("call_") and n.op != "call_module":
            refuse_mutation(n)  # on proxies, operator.iadd would become an addition
            if any(isinstance(self.env[a], torch.nn.Module) for a in n.all_input_nodes):
                raise missing_rule(n)  # a higher-order operator: take the VJP of its body
        return super().run_node(n)


@dataclass(frozen=True)
class Traced:
    """A function as a graph: `placeholders` are the leaves of `args`, `outputs` those of its value.

    An output is a node, or a constant of Python (a number, None).
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    placeholders: list[fx.Node]
    in_spec: pytree.TreeSpec
    outputs: list[Any]
    output_names: list[str]
    out_spec: pytree.TreeSpec


def trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """Trace `fn(*args)`; `args` are pytrees of tensors, used for their shapes and dtypes only.

    `fn` is a function, a module or an FX graph module, at any level (torch or ATen). Tensors that
    it closes over, parameters of modules among them, are constants of the graph.
    """
    tracer = MetaTracer()
    if isinstance(fn, torch.nn.Module):
        named = [*fn.named_parameters(), *fn.named_buffers()]
        tracer.names = {id(t): name.replace(".", "_") for name, t in named}
    leaves, in_spec = pytree.tree_flatten(args)
    names = _leaf_names(_argument_names(fn, len(args)), args)
    proxies = [tracer.placeholder(*pair) for pair in zip(names, leaves, strict=True)]
    arguments = pytree.tree_unflatten(proxies, in_spec)
    if isinstance(fn, fx.GraphModule):
        value = _Replay(fn, tracer).run(*arguments)
    else:
        value = fn(*arguments)
    value = pytree.tree_map(_unpack, value)
    outputs, out_spec = pytree.tree_flatten(value)
    return Traced(
        tracer.graph,
        tracer.constants,
        [p.node for p in proxies],
        in_spec,
        [tracer.create_arg(out) for out in outputs],
        _leaf_names(["out"], (value,)),
        out_spec,
    )


def _unpack(x: Any) -> Any:
    """A proxy of a tuple as a tuple of proxies."""
    return tuple(map(_unpack, x)) if isinstance(x, TupleProxy) else x


def _argument_names(fn: Callable[..., Any], n: int) -> list[str]:
    """`n` names from the signature of `fn`, as far as it has one."""
    try:
        call = fn.forward if isinstance(fn, torch.nn.Module) else fn
        params = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        params = []
    named = [p.name for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in params if p.kind is p.VAR_POSITIONAL), "arg")
    return (named + [f"{rest}_{i}" for i in range(n)])[:n]


def _leaf_names(names: list[str], values: tuple[Any, ...]) -> list[str]:
    """`carry_h` for the leaf `carry["h"]`, `x` for an `x` that is a tensor."""
    leaf_names: list[str] = []
    for name, value in zip(names, values, strict=True):
        try:
            paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
        except ValueError:  # a user's container that does not name its children
            paths = [f"_{i}" for i in range(len(pytree.tree_leaves(value)))]
        leaf_names += [re.sub(r"\W+", "_", name + path).rstrip("_") for path in paths]
    return leaf_names
