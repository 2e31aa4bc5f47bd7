"""The operator itself as a ``scan``, with one module for the body in all its calls.

``torch_scan_hop.scan`` captures a body anew where the context has changed: Dynamo guards that.
Whoever calls ``torch.ops.higher_order.scan`` hands it the same module again, and what was derived
from the module is found by a key. Only for bodies that change nothing they close over.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_scan_hop import tree


class _Step(torch.nn.Module):
    """A body on flat tensors: the carry, x, and what it closes over."""

    def __init__(self, body: types.FunctionType, init: Any, xs: Any) -> None:
        super().__init__()
        self.body, self.init, self.xs = body, init, xs
        self.cells = [cell.cell_contents for cell in body.__closure__ or ()]
        self.y: Any = None

    def closed_over(self) -> tuple[Tensor, ...]:
        return tuple(value for value in self.cells if isinstance(value, Tensor))

    def forward(self, *flat: Any) -> tuple[Any, ...]:
        n_carry, n_xs = len(tree.tensors(self.init)), len(tree.tensors(self.xs))
        n = n_carry + max(n_xs, 1)  # with no xs, an empty tensor stands for the trip count
        carry = tree.unflatten(self.init, list(flat[:n_carry]))
        x = tree.unflatten(self.xs, list(flat[n_carry : n_carry + n_xs]))
        carry, y = self._body_with(flat[n:])(carry, x)
        self.y = tree.map_leaves(lambda leaf: 0, y)
        return (*tree.tensors(carry), *tree.tensors(y))

    def _body_with(self, tensors: tuple[Any, ...]) -> Callable[..., Any]:
        given = iter(tensors)
        values = [next(given) if isinstance(v, Tensor) else v for v in self.cells]
        body = self.body
        cells = tuple(map(types.CellType, values))
        return types.FunctionType(body.__code__, body.__globals__, body.__name__, None, cells)


def operator_scan() -> Callable[..., Any]:
    """A ``scan`` that calls the operator, with the same module each time for the same body."""
    steps: dict[Any, _Step] = {}

    def scan(
        body: Any, init: Any, xs: Any = None, length: int = 0, reverse: bool = False, **_: Any
    ) -> Any:
        if body not in steps:
            steps[body] = _Step(body, init, xs)
        step = steps[body]
        leaves = tree.tensors(xs) or [torch.empty(length, 0)]
        results = torch.ops.higher_order.scan(
            step, tree.tensors(init), leaves, step.closed_over(), reverse=reverse
        )
        n = len(tree.tensors(init))
        return tree.unflatten(init, list(results[:n])), tree.unflatten(step.y, list(results[n:]))

    return scan
