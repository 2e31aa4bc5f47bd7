"""Questions that kernels ask of a body before lowering it, which may tune a product."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.node_kinds import is_view, operator_name
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.errors import Refusal

_MAKE_OR_CONVERT = {
    "_to_copy", "clone", "constant_pad_nd", "convert_element_type", "copy", "empty", "fill", "full",
    "full_like", "iota", "ones_like", "scalar_tensor", "zeros_like",
}  # fmt: skip


# A lane of one of these takes about as long as a vector of them.
_TRANSCENDENTAL = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "pow", "sigmoid",
    "sin", "sinh", "tan", "tanh",
}  # fmt: skip


def is_transcendental(node: fx.Node) -> bool:
    return getattr(node.target, "_opname", "") in _TRANSCENDENTAL


PRODUCTS = operators("weighted")
CAT = torch.ops.aten.cat.default


def is_plain(node: fx.Node) -> bool:
    """Return True for an ``addmm`` that does not scale what it adds."""
    return node.target not in PRODUCTS or not node.kwargs


def check_pointwise(body: fx.GraphModule) -> None:
    """Refuse a body with operators that are not pointwise."""
    others = _others(body)
    if others:
        raise Refusal(f"not pointwise: {others}")


def check_pointwise_around_products(body: fx.GraphModule) -> None:
    """Refuse a body that is not pointwise but for products."""
    if not any(node.target in PRODUCTS for node in body.graph.nodes):
        raise Refusal("no product")
    others = _others(body, {*PRODUCTS, CAT})
    if others:
        raise Refusal(f"neither pointwise nor a product with a weight: {others}")


def check_pointwise_but_for(besides: Collection[Any], body: fx.GraphModule) -> None:
    """Refuse a body with operators that are neither pointwise nor in ``besides``."""
    others = _others(body, besides)
    if others:
        raise Refusal(f"neither pointwise nor of small matrices: {others}")


def is_pointwise(body: fx.GraphModule) -> bool:
    return not _others(body)


def _others(body: fx.GraphModule, besides: Collection[Any] = ()) -> str:
    """Return the names of operators that are neither pointwise nor in ``besides``."""
    others = (
        node
        for node in body.graph.nodes
        if not (
            node.op != "call_function"
            or node.target is operator.getitem
            or isinstance(node.meta.get("val"), (int, torch.SymInt))
            or node.target in besides
            or is_view(node)
            or torch.Tag.pointwise in getattr(node.target, "tags", ())
            or getattr(node.target, "_opname", "") in _MAKE_OR_CONVERT
        )
    )
    return ", ".join(dict.fromkeys(map(operator_name, others)))
