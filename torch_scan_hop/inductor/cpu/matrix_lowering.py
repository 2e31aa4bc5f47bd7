"""A body of small matrices as values: sums, products, and what is written by an index.

Each is written out as loops over the entries of its result.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_cpp import Min
from torch_scan_hop._torch.inductor_values import is_tensor, ops, pointwise_like
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.matrix_rules import FACTORISATIONS, FactorLowering

aten = torch.ops.aten
prims = torch.ops.prims

# A sum is written out, one term after another.
MOST_TERMS = 64
# Of a product: with more, a library is faster.
MOST_DEPTH = 32


class MatrixLowering(FactorLowering):
    """A body whose sums, products and factorisations are of few entries."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem and args[0][args[1]] is None:
            raise Refusal("a factor that is not written out")
        if target is aten.clone.default:
            return args[0]  # nothing here depends on strides
        if target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            if is_tensor(args[0]):
                return self._view(*args)
        if target is aten.as_strided.default:
            raise Refusal("a view by strides")
        if target in _RULES:
            return _RULES[target](self, *args, **kwargs)
        return super().call_function(target, args, kwargs)

    # --- sums ---

    def joined_terms(
        self,
        like: Any,
        sizes: Sequence[Any],
        terms: Any,
        term: Callable[..., Any],
        join: Any,
        dtype: torch.dtype | None = None,
    ) -> Any:
        if not isinstance(terms, (int, sympy.Integer)) or not 0 < terms <= MOST_TERMS:
            raise Refusal(f"a sum of {terms} terms")

        def inner_fn(index: Sequence[Any]) -> Any:
            return functools.reduce(join, (term(index, k) for k in range(int(terms))))

        found = pointwise_like(like, inner_fn, sizes, dtype)
        self.compute_once(found)
        return found

    def reduced(self, how: Mapping[str, Any]) -> Any:
        join, sizes, dtype = (
            _JOINS.get(how["reduction_type"]),
            how["reduction_ranges"],
            how["dst_dtype"],
        )
        if join is None:
            return None
        if dtype in (torch.float16, torch.bfloat16):
            raise Refusal(f"a reduction of {dtype}")

        def term(index: Sequence[Any], k: int) -> Any:
            own: list[Any] = []
            for size in reversed(sizes):
                k, i = divmod(k, int(size))
                own.insert(0, sympy.Integer(i))
            return how["inner_fn"](index, own)

        count = sympy.prod(sizes)
        return self.joined_terms(how["input_node"], how["ranges"], count, term, join, dtype)

    def diagonal_scatter(
        self, whole: Any, diagonal: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
    ) -> Any:
        rank = len(whole.get_size())
        dim1, dim2 = dim1 % rank, dim2 % rank
        load, load_diagonal = whole.make_loader(), diagonal.make_loader()
        last = diagonal.get_size()[-1] - 1

        def inner_fn(index: Sequence[Any]) -> Any:
            row, column = index[dim1], index[dim2]
            place = Min(column if offset < 0 else row, last)
            rest = [i for d, i in enumerate(index) if d not in (dim1, dim2)]
            i, j = (ops.index_expr(k, torch.int64) for k in (row + offset, column))
            return ops.where(ops.eq(i, j), load_diagonal([*rest, place]), load(index))

        found = pointwise_like(whole, inner_fn, whole.get_size())
        self.compute_once(found)
        return found

    # --- products ---

    def matmul(self, left: Any, right: Any) -> Any:
        """Return ``left @ right``: of matrices, or of as many on both sides."""
        stack = self.stack_of(left) if len(left.get_size()) == 2 else None
        if stack is None:
            return self._product(left, right)
        rows, columns = left.get_size()[0], right.get_size()[-1]
        return self.fold(self._product(stack, right), [rows, columns])

    def _product(self, left: Any, right: Any) -> Any:
        if left.get_dtype() not in (torch.float32, torch.float64):
            raise Refusal(f"a product of {left.get_dtype()}")
        *rows, depth = left.get_size()
        columns = right.get_size()[-1]
        batch = len(right.get_size()) - 2
        load_left, load_right = left.make_loader(), right.make_loader()

        def term(index: Sequence[Any], k: int) -> Any:
            k = sympy.Integer(k)
            own = load_left([*index[:-1], k])
            return ops.mul(own, load_right([*index[:batch], k, index[-1]]))

        if not isinstance(depth, (int, sympy.Integer)) or depth > MOST_DEPTH:
            raise Refusal(f"a product of depth {depth}")
        found = self.joined_terms(left, [*rows, columns], depth, term, ops.add)
        return self.stored(found).tensor()

    def added_product(
        self, added: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1
    ) -> Any:
        product = self.matmul(left, right)
        if alpha != 1:
            product = self.apply(aten.mul.Tensor, product, alpha)
        if beta != 1:
            added = self.apply(aten.mul.Tensor, added, beta)
        return self.apply(aten.add.Tensor, added, product)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: MatrixLowering.added_product,
    aten.baddbmm.default: MatrixLowering.added_product,
    aten.bmm.default: MatrixLowering.matmul,
    aten.mm.default: MatrixLowering.matmul,
}

_RULES = {
    **PRODUCTS,
    **FACTORISATIONS,
    aten.diagonal_scatter.default: MatrixLowering.diagonal_scatter,
}

REDUCTIONS = {
    *operators("reduction"),
    *(aten.any.default, aten.any.dim, aten.any.dims, aten.prod.dim_int),
}
#: for Inductor's kinds of them: what joins two terms
_JOINS: dict[str, Any] = {
    "any": ops.logical_or,
    "max": ops.maximum,
    "min": ops.minimum,
    "prod": ops.mul,
    "sum": ops.add,
}

#: Operators that write into a copy of a value, or turn it round, by an index.
BY_INDEX = {
    aten.diagonal_scatter.default,
    aten.flip.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    prims.rev.default,
}
