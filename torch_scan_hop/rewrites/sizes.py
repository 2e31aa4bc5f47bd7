"""Read sizes of carries and xs once, outside the loop.

With dynamic shapes a body holds ``sym_size`` nodes. Sizes are loop-invariant, even if they are read
from a carry; as additional inputs they are classified so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.sizes import are_known_equal
from torch_scan_hop._torch.symbols import SYMBOLS, is_symbolic
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.meta_values import added_input, replace, value_of
from torch_scan_hop.signature import Inputs, Signature

aten = torch.ops.aten


def first_size(values: Iterable[torch.Tensor]) -> Any:
    """Return the size that all of ``values`` but scalars have first, as of a batch, or None."""
    sizes = [v.shape[0] for v in values if v.ndim]
    is_common = bool(sizes) and all(are_known_equal(n, sizes[0]) for n in sizes)
    return sizes[0] if is_common else None


@dataclass(frozen=True)
class SizeOf:
    """Dimension ``dim`` of a step's carry or x."""

    is_carry: bool
    index: int
    dim: int

    def of(self, inputs: Inputs[Any]) -> Any:
        if self.is_carry:
            return inputs.carry[self.index].shape[self.dim]
        return inputs.xs[self.index].shape[self.dim + 1]


def lift_sizes(
    body: fx.GraphModule, signature: Signature
) -> tuple[fx.GraphModule, Signature, list[SizeOf]]:
    """Return ``body`` with sizes of carries and xs as further additional inputs, in this order."""
    lifted = copied(body, name="ScanBody")
    placeholders = lifted.graph.find_nodes(op="placeholder")
    roles = signature.split_inputs(placeholders)
    owner = {n: (True, k) for k, n in enumerate(roles.carry)}
    owner |= {n: (False, k) for k, n in enumerate(roles.xs)}
    sizes: list[SizeOf] = []
    for node in lifted.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if node.args[0] not in owner:
            continue
        sizes.append(SizeOf(*owner[node.args[0]], node.args[1]))
        replace(node, added_input(node, node.name))
    return lifted, _grown("lift_sizes", lifted, signature, len(sizes)), sizes


def _grown(rewrite: str, lifted: fx.GraphModule, signature: Signature, count: int) -> Signature:
    """Return the signature of ``lifted``, which has ``count`` more inputs."""
    lifted.recompile()
    grown = Signature(signature.n_carry, signature.n_xs, signature.n_additional + count)
    legality.checked(rewrite, lifted, grown)
    return grown


def lift_integers(
    body: fx.GraphModule, signature: Signature
) -> tuple[fx.GraphModule, Signature, list[Any]]:
    """Return ``body`` with all integers that it computes as additional inputs, in this order: they
    come of sizes, and are the same at every step."""
    lifted = copied(body, name="ScanBody")
    known: dict[Any, fx.Node] = {}
    integers = [n for n in lifted.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    for node in integers:
        if node.op != "call_function":
            continue
        value = value_of(node)
        expression = value.node.expr
        if is_symbolic(value) and expression not in known:
            known[expression] = added_input(node, node.name)
        node.replace_all_uses_with(known[expression] if is_symbolic(value) else int(expression))
    erase_unread(lifted.graph)
    _check_that_nodes_hold_no_symbols(lifted.graph)
    grown = _grown("lift_integers", lifted, signature, len(known))
    return lifted, grown, [value_of(n) for n in known.values()]


def _check_that_nodes_hold_no_symbols(graph: fx.Graph) -> None:
    """Check that no argument is a symbol, which belongs to a trace: nobody would give its value."""
    for node in graph.nodes:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        if any(isinstance(leaf, SYMBOLS) for leaf in leaves):
            raise ValueError(f"{node} holds a symbol")
