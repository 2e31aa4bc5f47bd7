"""Reverse mode without autograd's engine: a walk over the same graph (checked on torch 2.9.1,
2.13.0, 2.15.0).

The engine, in C++, asks the driver for the stream of each tensor on a GPU. Where there is no
driver that is an error, for fakes, too, which have no stream. What each node of the graph computes
is torch's; the walk decides only when a node is called, and adds up what reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import get_gradient_edge

from torch_scan_hop._torch.replaced import wrapped

_TAKES_NONE = "takes_none_for_zeros"


def noting_who_takes_none() -> AbstractContextManager[None]:
    """Within, functions of Python are asked whether they ``set_materialize_grads``: the walk needs
    to know, and torch keeps it where Python cannot read it."""

    def noted(original: Any, self: Any, value: bool) -> None:
        setattr(self, _TAKES_NONE, not value)
        original(self, value)

    return wrapped(FunctionCtx, set_materialize_grads=noted)


def gradients(
    outputs: Sequence[Any],
    cotangents: Sequence[torch.Tensor | None],
    inputs: Sequence[Any],
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return what ``torch.autograd.grad`` does with ``allow_unused``; run no hooks of tensors."""
    wanted = [_edge_of(value) for value in inputs]
    walk = _Walk({node for node, _ in wanted})
    with torch.set_grad_enabled(create_graph):
        for output, cotangent in zip(outputs, cotangents, strict=True):
            walk.receive(_edge_of(output), cotangent)
        walk.run()
    return tuple(walk.received[node][k] if node in walk.received else None for node, k in wanted)


def _edge_of(value: Any) -> tuple[Any, int]:
    edge = get_gradient_edge(value) if isinstance(value, torch.Tensor) else value
    return edge.node, edge.output_nr


class _Walk:
    """A walk over nodes in the engine's order: those that were made last come first.

    Attributes:
        received: for each node that anything has reached, the cotangent of each of its outputs.
    """

    def __init__(self, wanted: set[Any]) -> None:
        self.wanted = wanted
        self.received: dict[Any, list[Any]] = {}
        self._leads_to_wanted: dict[Any, bool] = {}

    def receive(self, edge: tuple[Any, int], cotangent: torch.Tensor | None) -> None:
        node, position = edge
        if node is None or cotangent is None:
            return
        like = node._input_metadata
        values = self.received.setdefault(node, [None] * len(like))
        cotangent = _fitted(cotangent, like[position])
        known = values[position]
        values[position] = cotangent if known is None else known + cotangent

    def run(self) -> None:
        waiting = self._needed(list(self.received))
        for node in sorted(waiting, key=lambda n: n._sequence_nr(), reverse=True):
            if node in self.received:
                for edge, value in _call(node, self.received[node]):
                    self.receive(edge, value)

    def _needed(self, roots: list[Any]) -> set[Any]:
        """Return the nodes that lead from ``roots`` to a wanted node.

        A wanted node is not called itself unless it leads on to another one.
        """
        order, seen = [], set()
        pending = [(root, False) for root in roots]
        while pending:
            node, is_left = pending.pop()
            if is_left:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                pending.append((node, True))
                pending += [(n, False) for n, _ in node.next_functions if n is not None]
        needed: set[Any] = set()
        for node in order:  # what follows a node stands before it
            if any(n in needed or n in self.wanted for n, _ in node.next_functions):
                needed.add(node)
        return needed


def _call(node: Any, cotangents: list[Any]) -> list[tuple[tuple[Any, int], Any]]:
    """Run a node; return its gradients, each with the edge to which it goes."""
    edges = node.next_functions
    likes = node._input_metadata
    if not isinstance(node, BackwardCFunction):
        found = node(*cotangents)
        found = found if isinstance(found, tuple) else (found,)
        return list(zip(edges, found, strict=True))
    if not vars(node).get(_TAKES_NONE, False):
        pairs = zip(cotangents, likes, strict=True)
        cotangents = [_zeros(like) if c is None else c for c, like in pairs]
    found = node.apply(*cotangents)
    found = found if isinstance(found, tuple) else (found,)
    # a function of Python gives something for each argument, and has edges for tensors alone
    taken = [value for value, flag in zip(found, node.needs_input_grad, strict=False) if flag]
    return list(zip([edge for edge in edges if edge[0] is not None], taken, strict=True))


def _zeros(like: Any) -> torch.Tensor:
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


def _fitted(cotangent: torch.Tensor, like: Any) -> torch.Tensor:
    """Give a cotangent the shape and dtype of its value, as the engine does."""
    if tuple(cotangent.shape) != tuple(like.shape):
        cotangent = cotangent.sum_to_size(tuple(like.shape))
    if cotangent.is_complex() and not like.dtype.is_complex:
        cotangent = torch.real(cotangent)
    return cotangent if cotangent.dtype == like.dtype else cotangent.to(like.dtype)
