"""The records of a graph's values (``meta["val"]``), made anew where a rewrite changed a value.

Rewrites decide by these records, and compilers lower by them. When a copy is dropped, its source
takes its place. The source has the same values, but its strides may differ, and then those of its
readers differ too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop._torch.fakes import FakeTensor, FakeTensorMode
from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop._torch.tracing import replaying, unwrap_functional
from torch_scan_hop.body.step_examples import like
from torch_scan_hop.signature import results_of


def value_of(argument: Any) -> Any:
    """Return the recorded value of a node; another argument is its own value."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def replace(node: fx.Node, by: Any) -> None:
    """Let all readers of ``node`` read ``by``, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def replace_by_source(node: fx.Node, source: Any) -> None:
    """Let all readers of ``node``, which has the values of ``source``, read ``source``."""
    readers = list(node.users)
    replace(node, source)
    if not same_strides(node.meta.get("val"), source.meta.get("val")):
        record_again(readers)


def same_strides(value: Any, other: Any) -> bool:
    """Return True if strides are known to be equal without a guard; a non-tensor has none."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    return are_all_known_equal(value.stride(), other.stride())


def record_again(nodes: Sequence[fx.Node]) -> None:
    """Record anew the values of ``nodes`` and of their readers, as far as strides change."""
    if not nodes:
        return
    pending = set(nodes)
    for node in nodes[0].graph.nodes:
        before = node.meta.get("val")
        if node not in pending or node.op != "call_function" or before is None:
            continue
        if any(n.op != "get_attr" and n.meta.get("val") is None for n in node.all_input_nodes):
            continue
        if node.target is operator.getitem:
            value = node.args[0].meta["val"][node.args[1]]
        elif isinstance(node.target, OpOverload):
            value = run_node(node)
        else:
            continue  # a loop's results are contiguous whatever it is given
        pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(value), strict=True)
        if not all(same_strides(a, b) for a, b in pairs):
            node.meta["val"] = value
            pending.update(node.users)


def run_node(node: fx.Node) -> Any:
    """Return the result of the operator of ``node`` for the records of its arguments."""
    args, kwargs = recorded_arguments(node)
    args, kwargs, mode = _in_one_mode(args, kwargs, node.meta.get("val"))
    with replaying(mode):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def call_recorded(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a node at the graph's point of insertion, with a record of its value."""
    node: fx.Node = args[0].graph.call_function(target, args, kwargs)
    node.meta["val"] = value_of_call(node)
    return node


def value_of_call(node: fx.Node) -> Any:
    """Return what :func:`run_node` does, where a trace is under way."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    """Insert an input at the graph's point of insertion, with a record of its value."""
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def added_input(node: fx.Node, name: str) -> fx.Node:
    """Give the graph of ``node`` one more input, which stands for ``node``."""
    last = node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(last):
        added = node.graph.placeholder(name)
    added.meta = dict(node.meta)
    return added


def recorded_arguments(node: fx.Node) -> tuple[Any, Any]:
    return fx.map_arg((node.args, node.kwargs), _record)  # type: ignore[return-value]


def _record(node: fx.Node) -> Any:
    if node.op != "get_attr":
        return node.meta["val"]
    value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return unwrap_functional(value)  # a constant of a trace under way


def _in_one_mode(args: Any, kwargs: Any, recorded: Any) -> tuple[Any, Any, FakeTensorMode]:
    """Return the arguments as fakes of one mode: a trace on real tensors has one per record."""
    leaves = pytree.tree_leaves((args, kwargs, recorded))
    modes = {v.fake_mode for v in leaves if isinstance(v, FakeTensor)}
    mode = modes.pop() if len(modes) == 1 else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return value if getattr(value, "fake_mode", None) is mode else like(mode, value)

    args, kwargs = pytree.tree_map(fake, (args, kwargs))
    return args, kwargs, mode


def check_results(graph: fx.Graph, expected: Sequence[torch.Tensor]) -> None:
    """Check that a rewrite returns results of the same form; others are a mistake of ours."""
    for k, (node, wanted) in enumerate(zip(results_of(graph), expected, strict=True)):
        if node is None:  # nothing reads it
            continue
        value = node.meta["val"]
        pairs = zip(value.shape, wanted.shape, strict=False)
        differ = any(isinstance(n, int) and isinstance(m, int) and n != m for n, m in pairs)
        if value.dtype is not wanted.dtype or value.dim() != wanted.dim() or differ:
            raise AssertionError(f"result {k} of a rewrite is {value}, which should be as {wanted}")
