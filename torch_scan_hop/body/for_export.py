"""Fit an exported scan for other readers: torch's contract for ``torch.ops.higher_order.scan``.

Its node has four positional arguments and no keyword, and no result of its body shares memory with
an input or with another result. A reader may then write the carry before it stacks y, and need not
know what ``reverse`` is. For ``lambda h, x: (h * 0.5 + x, h)``, reversed::

    scan(h * 0.5 + x, h)  over xs, reverse=True
    scan(h * 0.5 + x, clone(h))  over flip(xs); flip(ys)

A carry, or what is closed over, is also copied before it is viewed, because ExecuTorch (1.5.1)
gives a view of a body's input memory of its own, to which nothing is written.

When this package runs a program, all that is undone: its operator needs none of it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import OpOverload, storage_of
from torch_scan_hop.body.copies import copy_of
from torch_scan_hop.body.meta_values import (
    call_recorded,
    replace,
    replace_by_source,
    same_strides,
    value_of,
)
from torch_scan_hop.body.node_kinds import is_identity, is_tensor_node, is_view
from torch_scan_hop.op import ScanOptions, scans_in
from torch_scan_hop.signature import Inputs, Signature, output_node, results_of

aten = torch.ops.aten

#: torch saves this key of a node's meta with a program; other readers ignore the policy
_KEPT, _POLICY = "custom", "torch_scan_hop.checkpoint"


def fit_for_readers(body: fx.GraphModule, signature: Signature) -> None:
    """Change ``body`` in place."""
    inputs = signature.inputs_of(body)
    _view_copies_of([*inputs.carry, *inputs.additional])
    _give_own_memory(body)
    body.recompile()


def _view_copies_of(inputs: Sequence[fx.Node]) -> None:
    for node in inputs:
        views = [user for user in node.users if is_view(user)]
        if not views or not is_tensor_node(node):
            continue
        with node.graph.inserting_before(views[0]):
            copy = call_recorded(aten.clone.default, node)
        if same_strides(value_of(copy), value_of(node)):
            for view in views:
                view.replace_input_with(node, copy)
        else:
            node.graph.erase_node(copy)


def _give_own_memory(body: fx.GraphModule) -> None:
    """Copy results of ``body`` that would share memory with its inputs, or with one another."""
    inputs = [n for n in body.graph.nodes if n.op in ("placeholder", "get_attr")]
    taken = {storage_of(value_of(n)) for n in inputs if is_tensor_node(n)}
    output = output_node(body.graph)
    results: list[Any] = []
    with body.graph.inserting_before(output):
        for result in results_of(body.graph):
            if is_tensor_node(result) and storage_of(value_of(result)) in taken:
                result = call_recorded(aten.clone.default, result)
            if is_tensor_node(result):
                taken.add(storage_of(value_of(result)))
            results.append(result)
    output.args = (tuple(results),)


def remember_policy(node: fx.Node, checkpoint: Any) -> None:
    """Keep the checkpoint policy with an exported scan, which this package may train."""
    if isinstance(checkpoint, str):
        node.meta[_KEPT] = {**node.meta.get(_KEPT, {}), _POLICY: checkpoint}


def as_it_was(module: fx.GraphModule) -> None:
    """Undo in ``module`` and in copies of its bodies what an export added."""
    scans = scans_in(module)
    if not scans:
        return
    for node, exported in scans:
        body = copy_of(exported)
        body.meta.update(exported.meta)
        as_it_was(body)
        _drop_copies(body)
        setattr(module, str(node.args[0].target), body)  # type: ignore[union-attr]
        _reverse_instead_of_flips(node)
        policy = node.meta.get(_KEPT, {}).get(_POLICY)
        if policy is not None:
            node.kwargs = {**node.kwargs, "checkpoint": policy}
    module.recompile()


def _drop_copies(body: fx.GraphModule) -> None:
    """Drop copies of results and inputs, which are the same values if the body writes nothing."""
    operators = (n.target for n in body.graph.nodes if isinstance(n.target, OpOverload))
    if any(operator._schema.is_mutable for operator in operators):
        return
    results = results_of(body.graph)
    for node in body.graph.find_nodes(op="call_function", target=aten.clone.default):
        is_input = isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"
        if is_identity(node) and (is_input or node in results):
            replace_by_source(node, node.args[0])
    body.recompile()


def _reverse_instead_of_flips(node: fx.Node) -> None:
    """Drop the flips and run the scan the other way, if all its xs and ys are flipped."""
    n_carry = len(node.args[1])  # type: ignore[arg-type]
    xs: Any = node.args[2]
    if any(user.target is not operator.getitem for user in node.users):
        return
    ys = [user for user in node.users if user.args[1] >= n_carry]  # type: ignore[operator]
    flips = [user for y in ys for user in y.users]
    if not all(map(_is_flip, [*xs, *flips])):
        return
    node.args = (*node.args[:2], [x.args[0] for x in xs], *node.args[3:])
    node.kwargs = {**node.kwargs, "reverse": not node.kwargs.get("reverse", False)}
    for flip in flips:
        replace(flip, flip.args[0])  # type: ignore[arg-type]
    for x in dict.fromkeys(xs):
        if not x.users:
            node.graph.erase_node(x)


def _is_flip(node: fx.Node) -> bool:
    return node.target is aten.flip.default and list(node.args[1]) == [0]  # type: ignore[arg-type]


def fit_for_onnx(body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions) -> ScanOptions:
    """Change ``body`` to what torch's exporter can make ONNX's ``Scan`` of, which takes no policy,
    and no closures among a step's results."""
    closed_over = inputs.signature.inputs_of(body).additional
    output = output_node(body.graph)
    results: Any = output.args[0]
    if not set(results).isdisjoint(closed_over):
        with body.graph.inserting_before(output):
            clone = torch.ops.aten.clone.default
            results = [call_recorded(clone, r) if r in closed_over else r for r in results]
        output.args = (tuple(results),)
        body.recompile()
    return dataclasses.replace(options, checkpoint=None)
