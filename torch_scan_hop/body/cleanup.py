"""Small simplifications of functional ATen graphs that every later stage profits from."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.fakes import FakeTensor, is_lazy, plain_fake
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.linalg_checks import thread_linalg_checks
from torch_scan_hop.body.meta_values import (
    added_input,
    call_recorded,
    replace,
    replace_by_source,
    value_of,
)
from torch_scan_hop.body.node_kinds import is_identity
from torch_scan_hop.body.strided import (
    index_strided_reads,
    index_strided_scatters,
    own_strided_memory,
)
from torch_scan_hop.op import scans_in
from torch_scan_hop.signature import Inputs, results_of

aten = torch.ops.aten


def drop_identities(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if is_identity(node):
            replace_by_source(node, node.args[0])


_VIEWS_OF_ANY_STRIDE = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


def allow_any_stride(graph: fx.Graph) -> None:
    """Make each ``view`` a ``reshape``: a body is traced for one layout and run with others."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS_OF_ANY_STRIDE:
            node.target = _VIEWS_OF_ANY_STRIDE[node.target]


def drop_copies(graph: fx.Graph) -> None:
    """Replace ``copy(old, new)`` by ``new`` in ``old``'s shape and dtype: it has no derivative."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        old, new = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in node.args[:2])
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            continue
        # for any values of symbolic sizes
        same_shape = are_all_known_equal(old.shape, new.shape)
        known = same_shape or all(isinstance(n, int) for n in (*old.shape, *new.shape))
        if not known or old.device != new.device:
            continue
        value = node.args[1]
        with graph.inserting_before(node):
            if new.dtype != old.dtype:
                value = call_recorded(aten._to_copy.default, value, dtype=old.dtype)
            if not same_shape:
                value = call_recorded(aten.expand.default, value, list(old.shape))
        replace_by_source(node, value)


def drop_detaches(graph: fx.Graph) -> None:
    """Drop autograd's own ``detach`` nodes; a body marks stops with ``stop_gradient`` instead."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        source = node.args[0]
        if not (isinstance(source, fx.Node) and source.op == "get_attr"):
            replace(node, source)


# Lazy forms of a value: a flag on a view says that it is to be read conjugated or negated, and
# forward mode's zeros have no memory (which Inductor's kernels read). In a functional graph the
# value itself serves as well, and every operator and backend takes it.
_LAZY_VALUES = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten._efficientzerotensor.default: aten.zeros.default,
}


def drop_lazy_values(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _LAZY_VALUES:
            if isinstance(node.args[0], (int, float, complex)):
                _fold_number(graph, node)
                continue
            node.target = _LAZY_VALUES[node.target]
        value = node.meta.get("val")
        if isinstance(value, FakeTensor) and is_lazy(value):
            node.meta["val"] = plain_fake(value)


def _fold_number(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the conjugate of a number, as autograd makes it for ``c * (1 + 2j)``, by a number."""
    value: Any = node.args[0]
    folded = value.conjugate() if node.target is aten._conj.default else -value
    for user in list(node.users):
        swap = lambda n: folded if n is node else n  # noqa: E731
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), swap)
    graph.erase_node(node)


_CLEAN_UP = (
    # first: the others keep values, and not their strides
    index_strided_reads,
    index_strided_scatters,
    own_strided_memory,
    # before a copy is dropped: a view of the copy may be no view of what was copied
    allow_any_stride,
    drop_detaches,
    thread_linalg_checks,
    drop_copies,
    drop_lazy_values,
    drop_identities,
)


def clean_up(module: fx.GraphModule) -> None:
    legality.run_passes(module, _CLEAN_UP)
    erase_unread(module.graph)
    module.recompile()
    legality.checked("clean_up", module, any_layout=True)


def attributes_as_inputs(
    body: fx.GraphModule,
    inputs: Inputs[Any],
    is_lifted: Callable[[torch.Tensor], bool] = lambda value: True,
) -> Inputs[Any]:
    """Return ``inputs`` and tensors that ``body`` holds, which it takes as inputs from now on: a
    saved program has none in it, and on XLA their data change between two calls."""
    graph = body.graph
    lifted: dict[str, fx.Node] = {}
    values: list[torch.Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(body, name, None)
        if not isinstance(value, torch.Tensor) or not is_lifted(value):
            continue
        if name not in lifted:
            lifted[name] = added_input(node, name.strip("_"))
            values.append(value)
        replace(node, lifted[name])
    for name in lifted:
        delattr(body, name)
    body.recompile()
    return dataclasses.replace(inputs, additional=[*inputs.additional, *values])


def write_out_alpha(graph: fx.Graph) -> None:
    """Write ``add(a, b, alpha=k)`` as ``add(a, b * k)``.

    Inductor's own passes, which run on bodies before ours, make ``addmm`` of an addition and a
    product, and forget its ``alpha`` (torch 2.9 to 2.13; 2.15 does not).
    """
    for target in (aten.add.Tensor, aten.sub.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            alpha = node.kwargs.get("alpha", 1)
            other = node.args[1]
            if not isinstance(other, fx.Node) or isinstance(alpha, fx.Node) or alpha == 1:
                continue
            # a narrower operand would be scaled in its own dtype, and not in the result's
            if value_of(other).dtype != value_of(node).dtype:
                continue
            with graph.inserting_before(node):
                scaled = call_recorded(aten.mul.Tensor, other, alpha)
            node.args, node.kwargs = (node.args[0], scaled), {}


def trim_scans(module: fx.GraphModule) -> None:
    """Make scans in ``module`` return only the ys that something reads."""
    for node, body in scans_in(module):
        _trim_scan(module, node, body)
    erase_unread(module.graph)
    module.recompile()
    legality.checked("trim_scans", module)


def _trim_scan(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> None:
    results = results_of(body.graph)
    users = [u for u in node.users if u.target is operator.getitem]
    read = {u.args[1] for u in users if u.users}
    n_carry = len(node.args[1])  # type: ignore[arg-type]
    kept = [k for k in range(len(results)) if k < n_carry or k in read]
    if len(kept) == len(results) or len(users) != len(node.users):
        return
    name = f"{node.args[0].target}_trimmed"  # type: ignore[union-attr]
    while hasattr(module, name):
        name += "_"
    trimmed = copied(body, [results[k] for k in kept], "ScanBody")
    erase_unread(trimmed.graph)
    trimmed.recompile()
    module.add_submodule(name, trimmed)
    with module.graph.inserting_before(node):
        node.args = (module.graph.get_attr(name), *node.args[1:])
    position = {old: new for new, old in enumerate(kept)}
    for user in users:
        if user.users:
            user.args = (node, position[user.args[1]])  # type: ignore[index]
        else:
            module.graph.erase_node(user)
    node.meta["val"] = tuple(value_of(node)[k] for k in kept)
