"""Check that a step computes each row of the batch from the same row of the carry alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy

from torch_scan_hop._torch.inductor_values import bounds_of
from torch_scan_hop.inductor.cpu.places import Matrix, Product, Store, product_position
from torch_scan_hop.inductor.cpu.row_body import RowBody
from torch_scan_hop.inductor.step import STEP, carry_position


def rows_are_independent(body: RowBody) -> bool:
    return (
        all(s.shape[:1] == (body.rows,) and _is_static(s.shape[1:]) for s in body.stores)
        and all(p.left.get_size()[0] == body.rows for p in body.products)
        and all(_is_invariant(body, p.weight) for p in body.products)
        and all(
            _multiplies_own_row(body, operand, product)
            for operand, product in zip(body.operands, body.products, strict=True)
        )
        and all(_reads_own_row(body, store) for store in body.stores)
    )


def _is_invariant(body: RowBody, value: Any) -> bool:
    reads = body.reads(value)
    return all(_row_stride(body, name) is None and not at.has(STEP) for name, at in reads)


def _row_stride(body: RowBody, name: str) -> Any:
    """Return the stride of a row in a carry or a product; None for a value that no step changes."""
    carry, product = carry_position(name), product_position(name)
    if carry is not None:
        return body.carry[carry].layout.stride[0]
    return None if product is None else sympy.Integer(body.products[product].padded)


def _multiplies_own_row(body: RowBody, operand: Matrix, product: Product) -> bool:
    """Return True if a product reads each row where the carry has it.

    A view of the carry may put its rows together in another way.
    """
    stride = _row_stride(body, operand.name)
    if stride is None:
        return True
    if not _is_static([stride, operand.offset, operand.row_stride]):
        return False
    same_rows = body.rows == 1 or operand.row_stride == stride
    return bool(same_rows and operand.offset + product.sizes[0] <= stride)


def _reads_own_row(body: RowBody, store: Store) -> bool:
    row = store.lanes[0]
    sizes = {symbol: size for symbol, size in store.ranges.items() if symbol != row}
    if not _is_static(sizes.values()):
        return False
    for name, at in store.reads:
        stride = _row_stride(body, name)
        if stride is None:
            continue
        within = sympy.expand(at - (0 if body.rows == 1 else row * stride))
        if not (within.free_symbols <= set(sizes) and _is_static([stride])):
            return False
        least, greatest = bounds_of(within, sizes)
        if not (least >= 0 and greatest < stride):
            return False
    return True


def _is_static(sizes: Iterable[Any]) -> bool:
    return all(isinstance(n, (int, sympy.Integer)) for n in sizes)
