"""Reverse mode, from source to source: the chain rule written out as an FX graph.

    def f(a):               def f_vjp(a, d_t2):
      t1 = f1(a)              t1, s1 = f1_fwd(a)           # forward: the rules' fwd, in order
      t2 = f2(a, t1)          t2, s2 = f2_fwd(a, t1)
      return t2               d_a, d_t1 = f2_bwd(s2, d_t2) # backward: the rules' bwd, reversed;
                              d_a = d_a + f1_bwd(s1, d_t1) # a value used twice adds up cotangents
                              return t2, d_a

The forward and backward halves are written into one graph, each node marked with its half. The
split form cuts it there: what the backward half uses of the forward half are the residuals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_arg

from .joint import Joint, differentiate, nodes_in
from .rules import DEFAULT_RULES
from .table import RuleTable
from .tracing import trace


class ForwardBackward(NamedTuple):
    """`forward(*leaves) -> (outputs, residuals)`, `backward(*residuals, *cotangents) -> grads`."""

    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def residuals(self) -> tuple[fx.Node, ...]:
        """The values that forward saves, as nodes: `.name`, and `.meta["val"]` for the shape."""
        return self.forward.graph.output_node().args[0][1]  # type: ignore[index,return-value]


def vjp_graph(
    fn: Callable[..., Any], *example_args: Any, rules: RuleTable = DEFAULT_RULES
) -> fx.GraphModule:
    """The vector-Jacobian product of `fn` as a graph that a person can read.

    The graph module maps `(*args, *cotangents)` to `(outputs, grads)`:

    - `args` are the leaves of `fn`'s arguments, in pytree order;
    - `cotangents`, one for each leaf of `fn`'s outputs and of its shape, in pytree order. Those of
      outputs without a gradient (integers, None, constants) are there too, and ignored;
    - `outputs` is what `fn` returns;
    - `grads` is a tuple with one entry for each argument of `fn`, of the same structure. None
      where there is no gradient: integers, and inputs on which no output depends.

    `fn` is a function, a module, or an FX graph module at any level (torch, ATen). It is traced
    with `example_args` as shapes and dtypes only, and never run on data. Sizes enter the code only
    where a rule asks for a shape. What `fn` closes over, parameters too, counts as constant.

    >>> import torch
    >>> def f(x, y):
    ...     return torch.sin(x) * y
    >>> graph = vjp_graph(f, torch.ones(3), torch.ones(3))
    >>> print(readable(graph))
    def forward(self, x, y, d_out):
        sin = torch.sin(x)
        mul = sin * y
        d_sin = d_out * y
        d_y = d_out * sin
        cos = torch.cos(x)
        d_x = d_sin * cos
        return (mul, (d_x, d_y))
    >>> graph(torch.zeros(1), torch.ones(1), torch.ones(1))
    (tensor([0.]), (tensor([1.]), tensor([0.])))
    """
    joint = differentiate(trace(fn, example_args), rules)
    return _extract(joint, [*joint.inputs, *joint.cotangents], (joint.outputs, joint.grads), "VJP")


def forward_and_backward(
    fn: Callable[..., Any], *example_args: Any, rules: RuleTable = DEFAULT_RULES
) -> ForwardBackward:
    """`vjp_graph` in two halves, for running a backward later, as a scan does.

    `forward(*args) -> (outputs, residuals)` and `backward(*residuals, *cotangents) -> grads`, where
    `residuals` is a tuple of what the rules saved and the backward uses, each value once; tensors
    that `fn` closes over are attributes of both modules instead. Random numbers are residuals and
    never drawn again. A size that `fn` computes with may be a residual too: a plain integer.

    >>> import torch
    >>> forward, backward = forward_and_backward(torch.tanh, torch.ones(3))
    >>> print(readable(forward))
    def forward(self, arg_0):
        tanh = torch.tanh(arg_0)
        return (tanh, (tanh,))
    >>> print(readable(backward))
    def forward(self, tanh, d_out):
        mul = tanh * tanh
        sub = 1 - mul
        d_arg_0 = d_out * sub
        return (d_arg_0,)
    """
    joint = differentiate(trace(fn, example_args), rules)
    used = _needed(joint.grads, stop=joint.forward)
    saved = [n for n in joint.graph.nodes if n in used & joint.forward and n.op != "get_attr"]
    return ForwardBackward(
        _extract(joint, joint.inputs, (joint.outputs, tuple(saved)), "Forward"),
        _extract(joint, [*saved, *joint.cotangents], joint.grads, "Backward"),
    )


def readable(module: fx.GraphModule) -> str:
    """The code of a graph module without what only the garbage collector cares about."""
    code = re.sub(r"; +(?:\w+ = )+None", "", module.code)
    return code[code.index("def forward") :].rstrip()


def _needed(tree: Any, stop: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes from which `tree` is computed, back to those in `stop`."""
    needed: set[fx.Node] = set()
    todo = nodes_in(tree)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [] if node in stop else node.all_input_nodes
    return needed


def _constructed(graph: fx.Graph, tree: Any) -> Any:
    """The same structure, with named tuples made by a call: FX prints nested ones wrongly."""
    if isinstance(tree, dict):
        return {key: _constructed(graph, item) for key, item in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return tree
    items = tuple(_constructed(graph, item) for item in tree)
    if hasattr(tree, "_fields"):
        return graph.call_function(type(tree), items)
    return items if isinstance(tree, tuple) else list(items)


def _extract(joint: Joint, inputs: list[fx.Node], output: Any, name: str) -> fx.GraphModule:
    """The part of the joint graph that computes `output` from `inputs`, with good names."""
    needed = _needed(output, stop=set(inputs))
    graph = fx.Graph()
    copy = {n: graph.placeholder(joint.names[n]) for n in inputs}
    for n in joint.graph.nodes:
        if n in needed and n not in copy:
            args, kwargs = map_arg((n.args, dict(n.kwargs)), copy.__getitem__)
            copy[n] = graph.create_node(n.op, n.target, args, kwargs, joint.names.get(n))
            copy[n].stack_trace = n.stack_trace
    for n, new in copy.items():
        new.meta["val"] = n.meta["val"]
    graph.output(_constructed(graph, map_arg(output, copy.__getitem__)))
    return fx.GraphModule(joint.constants, graph, name)
