"""Nodes of a captured body that read or write at 0-d tensors, and the views that they stand for.

Dynamo's graph of a body holds calls of :func:`~torch_scan_hop.capture.indexing.getitem` and
``setitem``. They are treated in two steps:

1. In eager PyTorch ``x[t]`` is a view, but a gather is a copy. :func:`keep_views` writes the copy
   back where the body changes it, and reads it again where the body changes what it was read
   from::

       row = getitem(K, t)              row = getitem(K, t)
       row.add_(1)                      row.add_(1)
                                   ->   setitem(K, t, row)
       K.mul_(2)                        K.mul_(2)
                                        row.copy_(getitem(K, t))
       return row.sum()                 return row.sum()

2. :func:`expand` writes each call as torch's own operators, which compilers and their caches know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.effects import Effects, Storage
from torch_scan_hop._torch.fakes import FakeTensorMode, fake_mode_of
from torch_scan_hop._torch.tracing import run_fake
from torch_scan_hop.body.step_examples import like
from torch_scan_hop.capture.indexing import (
    Place,
    TensorProxy,
    getitem,
    index_select,
    place_of,
    setitem,
)

_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.mul: operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}
_OURS = (getitem, setitem, index_select)
_SAME_NUMBER = ("long", "clone")


# --- lengths of slices ---

Form = dict[Any, int]  # a node's example -> coefficient; None -> the constant


def length_between(start: Any, stop: Any, is_fresh: Callable[[fx.Node], bool]) -> int | None:
    """Return ``stop - start`` of a slice's bounds, if it is a number in every step.

    Bounds are ints, None or nodes; ``is_fresh`` says whether a node's result and arguments are
    what they were when it ran. ``x[t : t + 4]`` and ``x[4 * b : 4 * (b + 1)]`` are 4 long.
    """
    if stop is None:
        return None
    difference = _combine(_form(stop, is_fresh), _form(start or 0, is_fresh), -1)
    constant = difference.pop(None, 0)
    return None if difference or constant < 0 else constant


def _form(value: Any, is_fresh: Callable[[fx.Node], bool]) -> Form:
    """Return a number of the graph as a sum of nodes and a constant.

    Nodes are told apart by their examples: one in an outer graph has another node in an inner one.
    """
    if isinstance(value, int):
        return {None: value}
    atom = {id(example_value(value)): 1}
    combine = _ARITHMETIC.get(value.target)
    if not is_fresh(value) or value.kwargs:
        return atom
    if value.op == "call_method" and value.target in _SAME_NUMBER and len(value.args) == 1:
        return _form(value.args[0], is_fresh)
    if combine is None or not all(isinstance(a, (int, fx.Node)) for a in value.args):
        return atom
    a, b = (_form(arg, is_fresh) for arg in value.args)
    if combine is operator.mul:
        number, other = (a, b) if set(a) <= {None} else (b, a)
        return _combine({}, other, number.get(None, 0)) if set(number) <= {None} else atom
    return _combine(a, b, 1 if combine is operator.add else -1)


def _combine(a: Form, b: Form, factor: int) -> Form:
    total = {k: a.get(k, 0) + factor * b.get(k, 0) for k in {**a, **b}}
    return {k: v for k, v in total.items() if v}


# --- copies that stand for views ---


def calls_of(graph: fx.Graph, *functions: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in functions]


def keep_views(module: fx.GraphModule, examples: Sequence[Any], mode: FakeTensorMode) -> None:
    """Let what was read at 0-d tensors change with what it was read from, and the reverse."""
    calls = calls_of(module.graph, getitem, setitem)
    if not calls:
        return
    effects = Effects(module)
    run_fake(effects.run, examples, mode)
    if any(effects.written.values()):
        reads = [n for n in calls if n.target is getitem and not _place(n).makes_copy()]
        keep_keys(calls, effects)
        Views(module.graph, reads, effects).keep()


def _place(node: fx.Node) -> Place:
    x, key, lengths = _arguments(node)
    return place_of(example_value(x).dim(), _as_proxies(key), lengths)


def _arguments(read: fx.Node) -> Any:
    """Return the arguments of a read: the source, the key, the lengths of the key's windows."""
    return read.args


def keep_keys(calls: list[fx.Node], effects: Effects) -> None:
    """Copy a counter that changes in place for the keys that are made with it."""
    changed = set().union(*effects.written.values())
    for call in calls:
        graph, copies = call.graph, {}
        for index in dict.fromkeys(_nodes_of(call.args[1])):
            if effects.storages[index] & changed:
                with graph.inserting_before(call):
                    copies[index] = graph.call_method("clone", (index,))
                copies[index].meta = dict(index.meta)
                effects.storages[copies[index]] = set()
        call.args = (call.args[0], _replaced(call.args[1], copies), *call.args[2:])


def _replaced(value: Any, by: dict[fx.Node, fx.Node]) -> Any:
    return fx.map_arg(value, lambda n: by.get(n, n))


def _nodes_of(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


class Views:
    """The reads of a graph, and how their copies are kept equal to views."""

    def __init__(self, graph: fx.Graph, reads: list[fx.Node], effects: Effects) -> None:
        self.graph = graph
        self.nodes = list(effects.written)
        self.order = {n: k for k, n in enumerate(self.nodes)}
        self.effects = effects
        self.reads = reads
        self.storage = {n: min(effects.storages[n]) for n in reads}
        self.source = {n: min(effects.storages[_arguments(n)[0]]) for n in reads}

    def keep(self) -> None:
        for node in self.nodes:
            self.cursor = node
            for storage in sorted(self.effects.written[node]):
                self._written(storage, node, None)

    def _written(self, storage: Storage, node: fx.Node, by: fx.Node | None) -> None:
        """Note that ``node`` wrote ``storage``; ``by`` is the read whose copy caused that."""
        for read in self._before(node):
            if read is by:
                continue
            if self.storage[read] == storage and not self._is_written_back(read, node):
                self._insert(setitem, (read.args[0], read.args[1], read, read.args[2]))
                self._written(self.source[read], node, read)
            elif self.source[read] == storage and self._is_used_after(read, node):
                fresh = self._insert(getitem, read.args)
                fresh.meta = dict(read.meta)
                self._insert("copy_", (read, fresh))
                self._written(self.storage[read], node, read)

    def _before(self, node: fx.Node) -> list[fx.Node]:
        return [r for r in self.reads if self.order[r] < self.order[node]]

    def _insert(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_after(self.cursor):
            self.cursor = self.graph.create_node(kind, target, args)
        return self.cursor

    def _is_used_after(self, read: fx.Node, node: fx.Node) -> bool:
        """Return True if ``read``'s copy, or a view or part of it, is read after ``node``."""
        if any(True for _ in self._uses_after(node, {self.storage[read]})):
            return True
        parts = [r for r in self._before(node) if self.source[r] == self.storage[read]]
        return any(self._is_used_after(part, node) for part in parts)

    def _uses_after(self, node: fx.Node, storages: set[Storage]) -> Iterator[fx.Node]:
        for later in self.nodes[self.order[node] + 1 :]:
            if any(self.effects.storages[n] & storages for n in later.all_input_nodes):
                yield later

    def _is_written_back(self, read: fx.Node, node: fx.Node) -> bool:
        """Return True if the body itself writes the changed copy back.

        ``x[t] += v`` does: it reads, changes and writes.
        """
        either = {self.storage[read], self.source[read]}
        follower = next(self._uses_after(node, either), None)
        if follower is None or follower.target is not setitem:
            return False
        x, key, value = follower.args[:3]
        return bool(
            x is read.args[0]
            and key == read.args[1]
            and value in (read, node)
            and example_value(value).shape == example_value(read).shape
        )


# --- as operators ---


def nested_modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Yield ``module`` and the graphs that it calls: branches, checkpointed parts, inner scans."""
    found = [module]
    for node in module.graph.find_nodes(op="get_attr"):
        inner = getattr(module, node.target, None)
        if isinstance(inner, fx.GraphModule):
            found += nested_modules(inner)
    return found


def write_indices(body: fx.GraphModule) -> None:
    """Carry out both steps in ``body`` and in every graph that it calls."""
    for module in nested_modules(body):
        if not calls_of(module.graph, *_OURS):
            continue
        values = [example_value(n) for n in module.graph.find_nodes(op="placeholder")]
        mode = fake_mode_of(values)
        keep_views(module, [like(mode, v) for v in values], mode)
        expand(module.graph)
        module.recompile()


def expand(graph: fx.Graph) -> None:
    """Write each read and write of ``graph`` as operators of torch."""
    tracer = GraphAppendingTracer(graph)
    for node in calls_of(graph, *_OURS):
        with graph.inserting_before(node):
            function: Any = node.target
            result = function(*_as_proxies(node.args, tracer))
        if result is not None:
            result.node.meta = dict(node.meta)
            node.replace_all_uses_with(result.node)
        graph.erase_node(node)


def _as_proxies(value: Any, tracer: Any = None) -> Any:
    def as_proxy(node: fx.Node) -> Any:
        example = example_value(node)
        if isinstance(example, torch.Tensor):
            return TensorProxy(node, example, tracer)
        return fx.Proxy(node, tracer)

    return fx.map_arg(value, as_proxy)
