"""Both halves of a derivative in one graph: the chain rule, one node of the source at a time.

Cotangents add up where a value is used twice.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .shapes import is_complex, is_differentiable, shape, value
from .table import MissingRule, Rule, RuleTable, missing_rule, refuse_mutation, spelling, where
from .tracing import MetaTracer, Traced


def is_projection(node: fx.Node) -> bool:
    """Return True if this node takes something out of a tuple, rather than indexes a tensor."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], fx.Node) and isinstance(value(node.args[0]), (tuple, list))


class Cotangents:
    """The cotangent of each value of the source graph, as far as it has been gathered.

    The first one is stored, further ones are added to it: no code for adding to zero. For a value
    that is a tuple there is one cotangent for each item.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[fx.Node, int | None], fx.Proxy] = {}
        self.names: dict[fx.Node, str] = {}

    def add(self, node: fx.Node, d: Any, index: Any = None) -> None:
        """Add `d` to the cotangent of `node`, or to that of its item (or slice) at `index`."""
        if isinstance(index, slice):
            for i, d_i in zip(range(len(value(node)))[index], d, strict=True):
                self.add(node, d_i, i)
        elif d is not None:
            key = node, index if index is None else index % len(value(node))
            self._sums[key] = self._sums[key] + d if key in self._sums else d

    def close(self, node: fx.Node) -> Any:
        """Return the complete cotangent of `node`: a proxy, a tuple of them, or None for zero."""
        if isinstance(value(node), (tuple, list)):
            items = tuple(self._sums.get((node, i)) for i in range(len(value(node))))
            return items if any(d is not None for d in items) else None
        d = self._sums.get((node, None))
        if d is not None and (node.op == "placeholder" or d.node not in self.names):
            self.names[d.node] = f"d_{node.name}"
        return d


@dataclass(frozen=True)
class Joint:
    """Both halves in one graph. `outputs` and `grads` are structures with its nodes as leaves."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: list[fx.Node]
    cotangents: list[fx.Node]
    outputs: Any
    grads: Any
    forward: frozenset[fx.Node]
    names: dict[fx.Node, str]


def differentiate(source: Traced, rules: RuleTable) -> Joint:
    writer = _Writer(source, rules)
    for node in source.graph.nodes:
        if node.op != "placeholder":
            refuse_mutation(node)
            writer.forward(node)
    half = frozenset(writer.tracer.graph.nodes)
    named_outputs = zip(source.outputs, source.output_names, strict=True)
    seeds = [writer.seed(output, name) for output, name in named_outputs]
    for node in reversed(source.graph.nodes):
        writer.backward(node)
    outputs = [map_arg(out, lambda n: writer.env[n].node) for out in source.outputs]
    grads = [writer.grads[n] for n in source.placeholders]
    return Joint(
        graph=writer.tracer.graph,
        constants=writer.tracer.constants,
        inputs=[writer.env[n].node for n in source.placeholders],
        cotangents=seeds,
        outputs=_unflatten("an output", outputs, source.out_spec),
        grads=_unflatten("an argument", grads, source.in_spec),
        forward=half,
        # Names of the original for the forward, and new ones like d_x for the backward.
        names={**writer.cotangents.names, **{n: n.name for n in [*half, *seeds]}},
    )


class _Writer:
    """Writes the two halves of the joint graph, a node of the source at a time."""

    def __init__(self, source: Traced, rules: RuleTable) -> None:
        self.tracer = MetaTracer()
        self.tracer.constants = dict(source.constants)
        self.rules = rules
        self.env: dict[fx.Node, Any] = {
            n: self.tracer.placeholder(n.name, n.meta["val"]) for n in source.placeholders
        }
        self.tape: dict[fx.Node, tuple[Rule, tuple[Any, ...], Any]] = {}
        self.cotangents = Cotangents()
        self.grads: dict[fx.Node, fx.Node | None] = {}
        self.active = _active(source, rules)

    def forward(self, node: fx.Node) -> None:
        """Write the operation, as its rule says where it will be differentiated."""
        self.tracer.origin = node.stack_trace or ""
        if node not in self.active or is_projection(node):
            self.env[node] = self._replay(node)
            return
        if is_complex(node):
            raise NotImplementedError(f"no VJP rules for complex numbers\n{where(node)}")
        if node.target not in self.rules:
            raise missing_rule(node)
        rule = self.rules[node.target]
        bound = _bind(rule, node)
        args, kwargs = map_arg((bound.args, bound.kwargs), lambda n: self.env[n])
        with _located(node):
            self.env[node], saved = rule.fwd(*args, **kwargs)
        self.tape[node] = rule, bound.args, saved

    def _replay(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: self.env[n])
        if is_projection(node) and isinstance(args[0], tuple):
            return args[0][cast(Any, args[1])]  # a rule may return a tuple of values
        return self.tracer.create_proxy(node.op, node.target, args, kwargs, name=node.name)

    def seed(self, output: Any, name: str) -> fx.Node:
        """Return the input for the cotangent of an output."""
        d = self.tracer.placeholder(f"d_{name}", value(output))
        if isinstance(output, fx.Node) and output in self.active:
            self.cotangents.add(output, d)
        return d.node

    def backward(self, node: fx.Node) -> None:
        """Pass the cotangent of a node on to its arguments."""
        self.tracer.origin = node.stack_trace or ""
        d = self.cotangents.close(node)
        if node.op == "placeholder":
            self.grads[node] = None if d is None else d.node
        if node.op == "placeholder" or d is None:
            return
        if is_projection(node):
            self.cotangents.add(cast(fx.Node, node.args[0]), d, node.args[1])
            return
        rule, args, saved = self.tape[node]
        with _located(node):
            d_args = rule.bwd(saved, d)
        d_args = d_args if isinstance(d_args, tuple) else (d_args,)
        if len(d_args) > len(args):
            raise ValueError(
                f"the VJP rule for {spelling(node)} returned {len(d_args)} cotangents "
                f"for {len(args)} arguments\n{where(node)}"
            )
        for arg, d_arg in zip(args, d_args, strict=False):
            self._give(node, arg, d_arg)

    def _give(self, node: fx.Node, arg: Any, d: Any) -> None:
        """Add `d`, as the rule of `node` returned it, to the cotangent of one argument."""
        if isinstance(arg, (list, tuple)):
            for a, d_a in zip(arg, d or [None] * len(arg), strict=True):
                self._give(node, a, d_a)
        elif d is None or not isinstance(arg, fx.Node) or arg not in self.active:
            return
        elif isinstance(d, (list, tuple)):
            for i, d_i in enumerate(d):
                self.cotangents.add(arg, d_i, i)
        elif shape(d) != shape(arg):
            raise ValueError(
                f"the VJP rule for {spelling(node)} returned a cotangent of shape {list(shape(d))} "
                f"for an argument of shape {list(shape(arg))}\n{where(node)}"
            )
        else:
            # A cotangent has the dtype of its value: undo promotions and conversions.
            dtype = value(arg).dtype
            self.cotangents.add(arg, d if value(d).dtype == dtype else d.to(dtype))


def _active(source: Traced, rules: RuleTable) -> set[fx.Node]:
    """Return the nodes through which a cotangent flows, from an output to an input."""
    varying: set[fx.Node] = set()
    for node in source.graph.nodes:
        if node.op == "placeholder":
            varies = is_differentiable(node)
        else:
            varies = not varying.isdisjoint(node.all_input_nodes) and is_differentiable(node)
            varies = varies and not rules.is_constant(node.target)
        if varies:
            varying.add(node)
    active = {out for out in source.outputs if isinstance(out, fx.Node)} & varying
    for node in reversed(source.graph.nodes):
        if node in active:
            active |= varying.intersection(node.all_input_nodes)
    return active


def _bind(rule: Rule, node: fx.Node) -> inspect.BoundArguments:
    """Return the arguments of a call as the parameters of its rule's `fwd`."""
    try:
        bound = inspect.signature(rule.fwd).bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise MissingRule(
            f"the VJP rule for {spelling(node)} cannot take this call: {error}\n{where(node)}"
        ) from None
    bound.apply_defaults()
    return bound


@contextmanager
def _located(node: fx.Node) -> Iterator[None]:
    """Say of a rule's complaint which line of the user's it is about."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"{error}\n{where(node)}") from error


def _unflatten(what: str, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Return the structure with nodes as leaves, if an FX graph can return it."""
    tree = pytree.tree_unflatten(leaves, spec)
    if len(nodes_in(tree)) != sum(isinstance(leaf, fx.Node) for leaf in leaves):
        raise TypeError(
            f"{what} of the function has the structure {spec}, and an FX graph can return only "
            "tuples, named tuples, lists and dicts: flatten it with pytree first"
        )
    return tree


def nodes_in(tree: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(tree, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found
