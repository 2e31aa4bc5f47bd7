"""Make floats that vary inputs of a compiled program's scans, as 0-d tensors.

The second value of a closed-over float is a symbol in what Dynamo captures. torch's own pass
(``tensorify_python_scalars``) replaces operators with such a symbol by operators with a tensor. For
a symbol that is left it compiles each value anew, and it does not look into bodies, so a symbol
that a body reads would be left.

So if every operator that reads it has a form with a tensor, the body gets a tensor. A number is
float64 in Python, and is converted to the dtype that the operator computes in, as in eager PyTorch.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.fakes import fake_mode_of
from torch_scan_hop.body.meta_values import call_recorded, value_of, value_of_call
from torch_scan_hop.body.node_kinds import is_number_node, is_tensor_node
from torch_scan_hop.body.step_examples import like
from torch_scan_hop.signature import Inputs

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

# Python's arithmetic of floats, and that of float64 tensors, which gives the same
_ARITHMETIC: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
}

# operators that take a number in place of a tensor, and their form for tensors
_FORM: dict[Any, Any] = {
    **{op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
    **{
        getattr(aten, name).Scalar: getattr(aten, name).Tensor
        for name in "add sub mul div remainder fmod gt lt ge le eq ne".split()
    },
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
}

# operators that multiply their second argument by a number, and what they call it
_FACTOR: dict[Any, str] = {
    aten.add.Tensor: "alpha",
    aten.sub.Tensor: "alpha",
    aten.addcmul.default: "value",
    aten.addcdiv.default: "value",
}


def floats_as_tensors(
    body: fx.GraphModule, inputs: Inputs[Any], as_tensor: Callable[[Any], torch.Tensor]
) -> Inputs[Any]:
    """Return ``inputs`` with floats as tensors where ``body``, which is changed, can read those."""
    placeholders = inputs.signature.inputs_of(body).additional
    pairs = enumerate(zip(placeholders, inputs.additional, strict=True))
    positions = {node: k for k, (node, value) in pairs if isinstance(value, torch.SymFloat)}
    if not positions:
        return inputs
    origins = _origins(body.graph, positions)
    stuck = _stuck(origins)
    additional = list(inputs.additional)
    for node in [n for n in positions if n not in stuck]:
        tensor = as_tensor(additional[positions[node]])
        additional[positions[node]] = tensor
        node.meta["val"] = like(fake_mode_of([tensor]), tensor)
    for node, known in origins.items():
        if not known & stuck:
            _read_as_tensor(node, origins)
    body.recompile()
    return dataclasses.replace(inputs, additional=additional)


def _origins(graph: fx.Graph, placeholders: Any) -> dict[fx.Node, set[fx.Node]]:
    """Return the floats that known arithmetic makes of placeholders, each with those it is of."""
    origins: dict[fx.Node, set[fx.Node]] = {node: {node} for node in placeholders}
    for node in graph.nodes:
        floats = [n for n in node.all_input_nodes if n in origins]
        others = [n for n in node.all_input_nodes if n not in origins]
        if node.target in _ARITHMETIC and floats and all(map(is_number_node, others)):
            origins[node] = set().union(*(origins[n] for n in floats))
    return origins


def _stuck(origins: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Return placeholders that an operator wants as numbers, or that are combined with such."""
    stuck: set[fx.Node] = set()
    for node, known in origins.items():
        if not all(user in origins or _has_form(user, node) for user in node.users):
            stuck |= known
    while more := {n for known in origins.values() if known & stuck for n in known} - stuck:
        stuck |= more
    return stuck


def _has_form(user: fx.Node, number: fx.Node) -> bool:
    """Return True if ``user`` can read a tensor where it reads ``number``."""
    if user.target in (aten.scalar_tensor.default, aten.full.default, aten.masked_fill.Scalar):
        return True
    if number in user.kwargs.values():
        is_factor = user.kwargs.get(_FACTOR.get(user.target, "")) is number  # type: ignore[call-overload]
        return is_factor and number not in user.args and is_tensor_node(user.args[1])
    return user.target in _FORM


def _read_as_tensor(number: fx.Node, origins: dict[fx.Node, set[fx.Node]]) -> None:
    """Change ``number``'s computation and its readers, so that it is a tensor."""
    if number.op != "placeholder":
        for size in filter(is_number_node, number.all_input_nodes):
            with number.graph.inserting_before(number):
                tensor = call_recorded(aten.scalar_tensor.default, size, dtype=torch.float64)
            number.replace_input_with(size, tensor)
        number.target = _ARITHMETIC[number.target]
        number.meta["val"] = value_of_call(number)
    for user in [n for n in number.users if n not in origins]:
        if user.target == aten.full.default:
            _multiply_after(user, number)
        elif user.target == aten.scalar_tensor.default:
            user.target, user.args = convert, (number, value_of(user).dtype)
            user.kwargs = {}
        elif number in user.kwargs.values():
            _multiply_before(user, number)
        else:
            _use_form_for_tensors(user, number)


def _use_form_for_tensors(user: fx.Node, number: fx.Node) -> None:
    expected = value_of(user)
    others = [n for n in user.all_input_nodes if n is not number]
    dtype = expected.dtype
    if dtype == torch.bool:
        dtype = torch.result_type(value_of(others[0]), 1.0)
    with user.graph.inserting_before(user):
        converted = call_recorded(convert, number, _computed_in(dtype))
    user.replace_input_with(number, converted)
    if user.target == aten.masked_fill.Scalar:
        user.target = aten.where.self
        x, mask, value = user.args
        user.args = (mask, value, x)
    else:
        user.target = _FORM[user.target]
    user.meta["val"] = value_of_call(user)
    if value_of(user).dtype != expected.dtype:
        _convert_after(user, expected)


def _multiply_before(user: fx.Node, number: fx.Node) -> None:
    """Replace ``add(a, b, alpha=number)`` by ``add(a, b * number)``."""
    factor: Any = user.args[1]
    with user.graph.inserting_before(user):
        product = user.graph.call_function(aten.mul.Tensor, (factor, number))
    product.meta["val"] = value_of(factor) * 1.0
    user.kwargs = {k: v for k, v in user.kwargs.items() if v is not number}
    user.update_arg(1, product)
    _use_form_for_tensors(product, number)


def _multiply_after(full: fx.Node, number: fx.Node) -> None:
    """Replace ``full(size, number)`` by ``full(size, 1) * number``."""
    graph, expected = full.graph, value_of(full)
    full.args = (full.args[0], 1.0)
    with graph.inserting_after(full):
        converted = call_recorded(convert, number, expected.dtype)
    with graph.inserting_after(converted):
        product = graph.call_function(aten.mul.Tensor, (full, converted))
    full.replace_all_uses_with(product, delete_user_cb=lambda n: n is not product)
    product.meta = {**full.meta, "val": expected}


def _convert_after(node: fx.Node, expected: torch.Tensor) -> None:
    with node.graph.inserting_after(node):
        converted = node.graph.call_function(convert, (node, expected.dtype))
    node.replace_all_uses_with(converted, delete_user_cb=lambda n: n is not converted)
    converted.meta = {**node.meta, "val": expected}


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which an operator with results of ``dtype`` converts a Python float."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.float32 if real in (torch.float16, torch.bfloat16) else real
