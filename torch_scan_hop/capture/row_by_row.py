"""Say of a graph whether it computes each row of its inputs for itself.

A row is a position in the one dimension whose size depends on values (``h[mask]`` has one). What
is done row by row may be done with more rows, and each of them is what it was.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop._torch.sizes import are_all_known_equal, likely_value
from torch_scan_hop._torch.symbols import is_unknown_number, unknown_dims
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node, operator_name
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.rewrites.batchable import is_batchable_operator, is_factorisation

aten = torch.ops.aten

_REARRANGES = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.stack.default,
}  # fmt: skip
_MAKES = operators("zeros") | {
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.new_ones.default,
    aten.ones.default, aten.ones_like.default, aten.expand.default,
}  # fmt: skip
_RESHAPES = operators("reshaping") - {aten.expand.default}
_BESIDE_BATCHABLE = {
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.std.correction,
    aten.var_mean.correction, aten.floor_divide.default,
}  # fmt: skip
_DIVISIONS = {"div", "floor_divide", "remainder", "fmod", "true_divide"}
_MATRIX_PARTS = {aten.tril.default, aten.triu.default}
#: of operators that pair no row with a position of an operand that has no rows
_SHARED_OPERANDS = operators("contraction") | {
    aten.mv.default, aten.embedding.default, aten.index_select.default, aten.index.Tensor,
    aten.native_layer_norm.default, aten.expand.default, aten.lift_fresh_copy.default,
}  # fmt: skip


class NotRowByRow(Exception):
    """Raised for what makes a row of others, or may."""


def rows_of(value: Any) -> tuple[int, str] | None:
    """Return the dimension of a tensor's rows and the symbol of their number; None if none."""
    if not isinstance(value, torch.Tensor):
        return None
    dims = unknown_dims(value)
    if not dims:
        return None
    if len(dims) > 1 or dims[0][1] is None:
        raise NotRowByRow("rows in several dimensions")
    return dims[0][0], dims[0][1]


def check_rows(module: fx.GraphModule) -> bool:
    """Raise if ``module`` may make a row of several; return True if all of it is pointwise.

    It is an ATen graph that writes nothing in place.
    """
    is_pointwise = True
    for node in module.graph.nodes:
        if node.op == "output":
            if any(_rows(n) is None for n in node.all_input_nodes if is_tensor_node(n)):
                raise NotRowByRow("a result without rows")
        elif node.op != "placeholder":
            _check_node(node)
            is_pointwise = is_pointwise and _is_pointwise(node)
    return is_pointwise


def products_of_a_row(module: fx.GraphModule) -> Iterator[tuple[str, int]]:
    """Yield the symbol of the rows' number, and the multiplications for a row, of each product."""
    for node in module.graph.nodes:
        rows = _rows(node) if node.target in operators("contraction") else None
        if rows is not None:
            factor = value_of(node.all_input_nodes[-2:][0])
            made = math.prod(map(likely_value, value_of(node).shape))  # the rows count as one
            yield rows[1], made * likely_value(factor.shape[-1])


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _rows(node: Any) -> tuple[int, str] | None:
    return rows_of(value_of(node)) if isinstance(node, fx.Node) else None


def _check_node(node: fx.Node) -> None:
    read = [rows for n in node.all_input_nodes if (rows := _rows(n))]
    numbers = [n for n in node.all_input_nodes if is_unknown_number(value_of(n))]
    if node.target is operator.getitem or not (read or numbers):
        return
    if is_unknown_number(value_of(node)):
        return  # who reads it is looked at
    if not isinstance(node.target, OpOverload):
        raise NotRowByRow(str(node.target))
    made = [rows_of(v) for v in _parts(value_of(node)) if isinstance(v, torch.Tensor)]
    if None in made or len({rows[1] for rows in (*read, *made) if rows}) != 1:
        raise NotRowByRow(f"{node.target}: rows of several masks, or a result without rows")
    if numbers and node.target not in _MAKES | _RESHAPES:
        raise NotRowByRow(f"{node.target}: the number of rows")
    if node.target in _MAKES and not read:
        return
    if not _is_known(node) or is_factorisation(node):
        raise NotRowByRow(str(node.target))
    if operator_name(node) in _DIVISIONS and not _divides_floats(node):
        raise NotRowByRow("a division by integers, of which those that are left out are zero")
    _check_operands(node)
    _check_dims(node)


def _divides_floats(node: fx.Node) -> bool:
    divisor = node.args[1]
    return _rows(divisor) is None or value_of(divisor).is_floating_point()  # type: ignore[union-attr]


def _parts(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (tuple, list)) else [value]


def _is_known(node: fx.Node) -> bool:
    if node.target is aten.index.Tensor:
        return all(_dtype_of(index) not in (torch.bool, torch.uint8) for index in _indices(node))
    return node.target in _MAKES | _BESIDE_BATCHABLE or is_batchable_operator(node.target)


def _dtype_of(node: Any) -> Any:
    return value_of(node).dtype if isinstance(node, fx.Node) else None


def _indices(node: fx.Node) -> list[Any]:
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    return list(indices)


def _check_operands(node: fx.Node) -> None:
    """Refuse an operand without rows that has a position for each row: the loop's may not fit."""
    if node.target in _SHARED_OPERANDS:
        _check_product(node)
        return
    rank = max(v.dim() for v in _parts(value_of(node)) if isinstance(v, torch.Tensor))
    rows = rows_of(next(_parts(value_of(node))))
    assert rows is not None
    from_end = rank - rows[0]
    for operand in node.all_input_nodes:
        value = value_of(operand)
        if not isinstance(value, torch.Tensor) or _rows(operand):
            continue
        if not _is_pointwise(node) and value.dim() > 0:
            raise NotRowByRow(f"{node.target}: an operand without rows")
        if value.dim() >= from_end and not are_all_known_equal([value.shape[-from_end]], [1]):
            raise NotRowByRow(f"{node.target}: an operand of a fixed size")


def _check_product(node: fx.Node) -> None:
    if node.target in (aten.bmm.default, aten.baddbmm.default):
        factors = node.args[-2:]
        batches = [(rows := _rows(n)) is not None and rows[0] == 0 for n in factors]
        if any(batches) and not all(batches):
            raise NotRowByRow("a product with one matrix for each row")
    if node.target in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default):
        rows, bias = _rows(node), node.args[0]
        assert isinstance(bias, fx.Node) and rows is not None
        value, from_end = value_of(bias), value_of(node).dim() - rows[0]
        if not _rows(bias) and value.dim() >= from_end and value.shape[-from_end] != 1:
            raise NotRowByRow("a bias for each row")
    if node.target is aten.convolution.default and (
        _rows(node.args[0]) is None or _rows(node.args[0])[0] != 0 or _rows(node.args[1])  # type: ignore[index]
    ):
        raise NotRowByRow("a convolution over rows")


def _check_dims(node: fx.Node) -> None:
    """Refuse what goes along the dimension of rows."""
    given = _arguments(node)
    if given.get("scale_grad_by_freq"):
        raise NotRowByRow("a gradient that counts the rows of an embedding")
    first = next(iter(given.values()))
    operand = first if isinstance(first, fx.Node) else next(iter(first), None)
    rows = _rows(operand)
    if rows is None or operand is None or node.target in _REARRANGES:
        return
    dim, value = rows[0], value_of(operand)
    if node.target in _RESHAPES:
        _check_shape(value, value_of(node), dim)
        return
    for name in ("dim", "dims", "dim0", "dim1", "dim2", "dimension"):
        if name not in given:
            continue
        dims = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
        if not dims or None in dims or any(d % value.dim() == dim for d in dims):
            raise NotRowByRow(f"{node.target} along rows")
    n_inner = value.dim() - dim - 1
    if node.target in _MATRIX_PARTS and n_inner < 2:
        raise NotRowByRow(f"{node.target} of rows")
    if node.target is aten.native_layer_norm.default and len(given["normalized_shape"]) > n_inner:
        raise NotRowByRow("a norm over rows")
    if node.target is aten.index.Tensor and _indices(node)[dim : dim + 1] not in ([], [None]):
        raise NotRowByRow("rows at indices")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, those that it leaves out included."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    given = dict(zip((a.name for a in schema), node.args, strict=False))
    return given | {name: v for name, v in defaults.items() if name not in given} | node.kwargs


def _check_shape(value: torch.Tensor, reshaped: torch.Tensor, dim: int) -> None:
    """Refuse a reshape in which a row has other elements than before."""
    rows = rows_of(reshaped)
    assert rows is not None
    before, after = math.prod(value.shape[:dim]), math.prod(reshaped.shape[: rows[0]])
    if not are_all_known_equal([before], [after]):
        raise NotRowByRow("a shape in which rows are others")
