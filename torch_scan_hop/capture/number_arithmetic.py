"""What Python makes of numbers alone, in a body: exact, as Python makes it.

A number that steps carry is a scalar tensor in the body's graph. Python computes ``1 - 0.9 ** n``
in double precision, and torch computes it of such scalars in the default dtype. So these nodes are
made double, and what they give is rounded where a tensor meets it. ``n += 1`` makes a new number,
and leaves other names of the old one alone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from torch_scan_hop.signature import output_node

_IN_PLACE: dict[Any, Any] = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
#: a clone stands between the steps of an unrolled body; abs is a method to torch 2.9
_ARITHMETIC = {*_IN_PLACE.values(), operator.neg, operator.pos, operator.abs, "__abs__", "clone"}
_WIDE = (torch.float64, torch.complex128)


def make_exact(
    graph: fx.Graph, n_carry: int, numbers: Collection[int], exact_inputs: Collection[int]
) -> dict[int, torch.dtype]:
    """Let ``graph`` compute with all digits what it makes of the carries ``numbers`` alone.

    ``exact_inputs`` says of which of them all digits are at hand. Returns those that are double
    from here on, with the dtypes that they had.
    """
    placeholders = graph.find_nodes(op="placeholder")[:n_carry]
    exact = _Exact(graph)
    exact.numbers.update(placeholders[k] for k in numbers)
    for k in exact_inputs:
        exact.widen(placeholders[k])
    for node in list(graph.nodes):
        exact.visit(node)
    exact.round_for_tensors()
    widened = {k: exact.narrow[p] for k, p in enumerate(placeholders) if p in exact.narrow}
    output: Any = output_node(graph)
    results = list(output.args[0])
    for k, result in enumerate(results):
        if k in widened:
            results[k] = exact.cast(result, torch.float64)
        elif result in exact.narrow:
            results[k] = exact.cast(result, exact.narrow[result])
    output.args = (tuple(results),)
    return widened


class _Exact:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.numbers: set[fx.Node] = set()
        #: nodes that are double now, with the dtypes that they had
        self.narrow: dict[fx.Node, torch.dtype] = {}
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        given = node.all_input_nodes
        if node.target in _IN_PLACE and node.args[0] in self.numbers:
            node.target = _IN_PLACE[node.target]
        if node.target in _ARITHMETIC and given and self.numbers.issuperset(given):
            self.numbers.add(node)
            if self.widen(node):
                for number in given:
                    node.replace_input_with(number, self.cast(number, torch.float64))

    def widen(self, node: fx.Node) -> bool:
        """Make the example of ``node`` double, if it has a smaller floating dtype."""
        dtype = _dtype_of(node)
        if dtype is None or not dtype.is_floating_point or dtype in _WIDE:
            return False
        self.narrow[node] = dtype
        node.meta["example_value"] = node.meta["example_value"].to(torch.float64)
        return True

    def round_for_tensors(self) -> None:
        for node, dtype in self.narrow.items():
            for user in list(node.users):
                is_cast = user in self._casts.values()
                if user.op != "output" and not is_cast and user not in self.numbers:
                    if _dtype_of(user) not in _WIDE:
                        user.replace_input_with(node, self.cast(node, dtype))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if _dtype_of(node) == dtype:
            return node
        if (node, dtype) not in self._casts:
            last = node if node.op != "placeholder" else self._last_placeholder()
            with self.graph.inserting_after(last):
                made = self.graph.call_method("to", (node, dtype))
            made.meta["example_value"] = node.meta["example_value"].to(dtype)
            self._casts[node, dtype] = made
        return self._casts[node, dtype]

    def _last_placeholder(self) -> fx.Node:
        return self.graph.find_nodes(op="placeholder")[-1]


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, torch.Tensor) else None
