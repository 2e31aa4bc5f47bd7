"""Operators that torch has no derivative of, written as operators that have one.

They are in a body's graph because torch wrote them there: into a backward that nobody was to
differentiate, or for a write in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import decompositions
from torch_scan_hop.op import Body

aten = torch.ops.aten

# Backwards that torch takes for the last ones.
_WITHOUT_DERIVATIVE = (
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.logit_backward.default,
    aten.native_group_norm_backward.default,
)


def _by_parts(operator: Any) -> Any:
    """``operator(into, src, ...)`` on the real and on the imaginary part of what is complex."""

    def run(into: Any, src: Any, *where: Any, **keywords: Any) -> Any:
        if not into.is_complex():
            return operator(into, src, *where, **keywords)
        return torch.complex(
            operator(into.real, src.real, *where, **keywords),
            operator(into.imag, src.imag, *where, **keywords),
        )

    return run


# Writes into a slice: torch's derivatives of them are for real numbers alone.
_OF_COMPLEX = {
    operator: _by_parts(operator)
    for operator in (aten.slice_scatter.default, aten.select_scatter.default)
}


def with_differentiable_operators(body: Body) -> Body:
    """``body`` with such operators as what they are made of; the same body if it has none."""
    if not isinstance(body, fx.GraphModule):
        return body
    rewritten = {*_WITHOUT_DERIVATIVE, *_OF_COMPLEX}
    if not any(node.target in rewritten for node in body.graph.nodes):
        return body
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    known = {**decompositions(_WITHOUT_DERIVATIVE), **_OF_COMPLEX}
    for node in graph.nodes:
        node.target = known.get(node.target, node.target)
    return fx.GraphModule(body, graph)
