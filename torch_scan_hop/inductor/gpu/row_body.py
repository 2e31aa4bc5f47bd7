"""A step with products as functions of an element of a row, which is as wide as the carry.

What a product makes is read by columns: ``(h @ w)[:, a:b]`` is ``h @ w[:, a:b]``. So every value of
a step is a block of that width, and each of them stays in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_values import (
    NotPointwise,
    is_tensor,
    named_buffer,
    storage_of,
    tensor_of,
)
from torch_scan_hop.inductor.product_lowering import ProductLowering
from torch_scan_hop.inductor.step import step_inputs
from torch_scan_hop.signature import Inputs

PRODUCT = "scan_product_"

# products of float64 run on no tensor core, and weights of that size in no registers
DTYPES = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Weight:
    """A loop-invariant matrix in a buffer."""

    buffer: str
    dtype: torch.dtype
    offset: Any
    strides: tuple[Any, Any]


@dataclass(frozen=True)
class Product:
    """``left @ weight``: the blocks that ``left`` is put together from, side by side."""

    left: tuple[Any, ...]
    weight: Weight
    columns: int


class _RowLowering(ProductLowering):
    def product(self, left: Any, weight: Any) -> Any:
        found = storage_of(weight)
        sizes = [*weight.get_size(), *left.get_size()[1:]]
        static = all(isinstance(n, (int, sympy.Integer)) for n in sizes)
        dtypes = {left.get_dtype(), weight.get_dtype()}
        if found is None or not static or len(dtypes) > 1 or not dtypes <= DTYPES:
            raise NotPointwise(f"a product of {left.get_size()} and {weight.get_size()}")
        name, layout = found
        place = Weight(name, layout.dtype, layout.offset, tuple(layout.stride))
        rows, columns = left.get_size()[0], int(weight.get_size()[1])
        made = f"{PRODUCT}{len(self.products)}"
        self.products.append(Product(tuple(self.pieces(left)), place, columns))
        return tensor_of(
            named_buffer(made, left.get_device(), left.get_dtype(), [rows, columns], [columns, 1])
        )

    def pieces(self, value: Any) -> list[Any]:
        """Return the pieces that ``value`` was put together from, row by row; else itself."""
        found = self.parts.get(id(value))
        if found is None or found[1] != 1:
            return [value]
        return [piece for part in found[2] for piece in self.pieces(part)]


class RowBody:
    """Step ``index`` of a scan whose carries are ``rows`` by ``width``; NotPointwise if not.

    ``results``: final carries and ys, each as the blocks that it is put together from.
    """

    def __init__(self, gm: Any, roles: Inputs[Any], index: Any) -> None:
        self.index = index
        self.lowering = _RowLowering(gm)
        results = self.lowering.lower(step_inputs(roles, index))
        self.products = self.lowering.products
        if not all(map(is_tensor, results)):
            raise NotPointwise("a result that is no tensor")
        self.rows, self.width = self._sizes(results[0])
        self.results = [self._blocks(value) for value in results]
        if not all(len(blocks) == 1 for blocks in self.results[: len(roles.carry)]):
            raise NotPointwise("carries of several widths")
        for product in self.products:
            sizes = [tuple(block.get_size()) for block in product.left]
            if set(sizes) != {(self.rows, self.width)} or product.columns % self.width:
                raise NotPointwise(f"a product of {sizes} in steps of width {self.width}")

    def _sizes(self, value: Any) -> tuple[Any, int]:
        sizes = value.get_size()
        if len(sizes) != 2 or not isinstance(sizes[1], (int, sympy.Integer)):
            raise NotPointwise(f"a carry of {sizes}, not rows of a static width")
        return sizes[0], int(sizes[1])

    def _blocks(self, value: Any) -> Sequence[tuple[Any, int]]:
        """Return the blocks of a result: for each its value, and the column at which it begins."""
        found = []
        for piece in self.lowering.pieces(value):
            rows, width = self._sizes(piece)
            if rows != self.rows or width % self.width:
                raise NotPointwise(f"a result of {value.get_size()}, in steps of {self.width}")
            found += [(piece, column) for column in range(0, width, self.width)]
        return found
