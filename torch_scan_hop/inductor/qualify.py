"""Questions that kernels ask of a body before lowering it, which may tune a product."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Set
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.sizes import are_all_known_equal, likely_value
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import argument, is_view, operator_name
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.errors import Refusal

_MAKE_OR_CONVERT = {
    "_to_copy", "clone", "constant_pad_nd", "convert_element_type", "copy", "empty", "fill", "full",
    "full_like", "inductor_randint", "inductor_random", "iota", "ones_like", "scalar_tensor",
    "zeros_like",
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


def is_along_rows(node: fx.Node) -> bool:
    """Return True if ``node`` joins its parts in the last dimension."""
    rank = value_of(node).dim()
    return bool(argument(node, 1, "dim", 0) % rank == rank - 1)


def is_plain(node: fx.Node) -> bool:
    """Return True for an ``addmm`` that does not scale what it adds."""
    return node.target not in PRODUCTS or not node.kwargs


def _refuse(operators: Set[str], text: str) -> None:
    if operators:
        raise Refusal(f"{text}: {', '.join(operators)}")


def check_pointwise(body: fx.GraphModule) -> None:
    """Refuse a body with operators that are not pointwise."""
    _refuse(_others(body), "not pointwise")


def check_pointwise_around_products(body: fx.GraphModule) -> None:
    """Refuse a body that is not pointwise but for products."""
    if not any(node.target in PRODUCTS for node in body.graph.nodes):
        raise Refusal("no product")
    others = _others(body, lambda node: node.target in _PUT_TOGETHER)
    _refuse(others, "neither pointwise nor a product with a weight")


def reduces_narrow_rows(node: fx.Node) -> bool:
    """Return True for rows that one thread holds with ease: they may be written out as scalars."""
    return reduces_rows(node) and likely_value(value_of(node.all_input_nodes[0]).shape[-1]) <= 8


def check_rows(body: fx.GraphModule) -> None:
    """Refuse a body that is not pointwise but for products, and reductions of rows. A pointwise one
    may have a carry of one number of each row, or of all."""
    has_rows = any(n.target in PRODUCTS or _is_of_rows(n) for n in body.graph.nodes)
    if not has_rows and not is_pointwise(body):
        raise Refusal("neither a product nor a reduction of rows")
    _refuse(operators_in_the_way(body), "neither pointwise, a product with a weight nor of a row")


def operators_in_the_way(body: fx.GraphModule) -> Set[str]:
    """Return those that no kernel of a GPU has, in order."""
    joined = {*_PUT_TOGETHER, torch.ops.aten.slice_scatter.default}
    return _others(
        body,
        lambda node: (
            node.target in joined
            or _is_of_rows(node)
            or getattr(node.target, "_opname", "") == "fma"  # which torch 2.9 has not tagged
        ),
    )


_PUT_TOGETHER = {*PRODUCTS, CAT}
_REDUCTIONS = {
    "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prepare_softmax_online",
    "prod", "sum", "var", "var_mean",
}  # fmt: skip


def reduces_rows(node: fx.Node) -> bool:
    """Return True for a reduction over the last dimension."""
    return _reduces(node, -1)


def _is_of_rows(node: fx.Node) -> bool:
    """Return True for a reduction of rows; or of square matrices over the last dimension but one,
    as in a product with a square weight: there is one result for each column."""
    if reduces_rows(node):
        return True
    if getattr(node.target, "_opname", "") in ("var", "var_mean") or not _reduces(node, -2):
        return False
    given = value_of(node.all_input_nodes[0])
    return bool(are_all_known_equal(given.shape[-1:], given.shape[-2:-1]))


def _reduces(node: fx.Node, dim: int) -> bool:
    if getattr(node.target, "_opname", "") not in _REDUCTIONS:
        return False
    given, made = value_of(node.all_input_nodes[0]), value_of(node)
    made = made[0] if isinstance(made, (tuple, list)) else made
    if given.ndim < -dim:
        return False
    kept, left_out = [*given.shape], [*given.shape]
    kept[dim] = 1
    del left_out[dim]
    return any(
        len(made.shape) == len(shape) and are_all_known_equal(made.shape, shape)
        for shape in (left_out, kept)
    )


def check_pointwise_but_for(besides: Collection[Any], body: fx.GraphModule) -> None:
    """Refuse a body with operators that are neither pointwise nor in ``besides``."""
    others = _others(body, lambda node: node.target in besides)
    _refuse(others, "neither pointwise nor of small matrices")


def is_pointwise(body: fx.GraphModule) -> bool:
    return not _others(body)


def _others(body: fx.GraphModule, besides: Callable[[fx.Node], bool] = lambda _: False) -> Set[str]:
    """Return the names of operators that are neither pointwise nor among those ``besides``."""
    others = (
        node
        for node in body.graph.nodes
        if not (
            node.op != "call_function"
            or node.target is operator.getitem
            or isinstance(node.meta.get("val"), (int, torch.SymInt))
            or besides(node)
            or is_view(node)
            or torch.Tag.pointwise in getattr(node.target, "tags", ())
            or getattr(node.target, "_opname", "") in _MAKE_OR_CONVERT
        )
    )
    return dict.fromkeys(map(operator_name, others)).keys()
