"""A body with products as values: a product is recorded, and what it makes is a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_values import tensor_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.places import PRODUCT, Place, Product, Store, float_buffer
from torch_scan_hop.inductor.product_lowering import ProductLowering


class RowLowering(ProductLowering):
    """Products are recorded; what they make are buffers."""

    def product(self, left: Any, weight: Any) -> Any:
        static = all(isinstance(n, (int, sympy.Integer)) for n in weight.get_size())
        if not static or {left.get_dtype(), weight.get_dtype()} != {torch.float32}:
            raise Refusal(f"a product of {left.get_size()} and {weight.get_size()}")
        product = Product(left, weight)
        name = f"{PRODUCT}{len(self.products)}"
        self.products.append(product)
        size = [left.get_size()[0], weight.get_size()[1]]
        return tensor_of(float_buffer(name, size, product.padded))

    def stores(self, place: Place, value: Any) -> Iterator[Store]:
        """Store the parts of a value that is put together one by one."""
        if id(value) not in self.parts:
            yield Store(place, value)
            return
        _, dim, parts = self.parts[id(value)]
        start = 0
        for part in parts:
            yield from self.stores(place.part(dim, start), part)
            start = start + part.get_size()[dim]
