"""Run a body on entries; under a trace, that writes the body anew."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_scan_hop._torch.sizes import are_all_known_equal, likely_value
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.decompositions import MATRICES
from torch_scan_hop.inductor.scalars.arithmetic import COMPUTED, is_pointwise, pointwise
from torch_scan_hop.inductor.scalars.entries import Entries, Lanes
from torch_scan_hop.inductor.scalars.linalg import LINALG
from torch_scan_hop.inductor.scalars.moves import MOVES

RULES = MOVES | COMPUTED | LINALG

# Entries of one tensor for each lane, as in a matrix of eight rows; and operators in all, of which
# some hundreds take a second to compile.
MOST_ENTRIES = 64
MOST_OPERATORS = 2000
# With another kernel at hand that goes through the entries in loops, and takes as long, compiled
# sooner.
FEW_OPERATORS = 200
# Not half precision, of which torch keeps sums in float32.
DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.bool}


def may_be_written_out(body: fx.GraphModule, lanes: Lanes, most: int = MOST_OPERATORS) -> bool:
    """Return True if operators and sizes allow it, as far as can be told without much work."""
    work = 0
    for node in body.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function":
            if not _is_known(node):
                return False
            work += _work_of(node, lanes)
        elif node.op == "get_attr":
            return False
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.dtype not in DTYPES:
                return False
            if not 0 < lanes.entries_of(tensor) <= MOST_ENTRIES:
                return False
    return work <= most


def _is_known(node: fx.Node) -> bool:
    target = node.target
    return (
        target in RULES
        or target in MATRICES
        or target is operator.getitem
        or is_pointwise(target)
        or isinstance(node.meta.get("val"), (int, torch.SymInt))
    )


def _work_of(node: fx.Node, lanes: Lanes) -> int:
    """Return the number of operators on entries of a lane."""
    if node.target in MOVES:
        return 0
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    entries = max(map(lanes.entries_of, values), default=0)
    operands = [value_of(n) for n in node.all_input_nodes if is_tensor_node(n)]
    if not operands or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return entries
    longest = max((likely_value(v.shape[-1]) for v in operands if v.ndim), default=1)
    return max(2 * entries * longest, *map(lanes.entries_of, operands))


class ScalarInterpreter(fx.Interpreter):
    def __init__(self, body: fx.GraphModule, lanes: Lanes) -> None:
        super().__init__(body)
        self.lanes = lanes

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        like = n.meta.get("val")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        found = self._called(n.target, like, args, kwargs)
        if isinstance(like, (tuple, list)):
            return [self._as_it_was(f, v) for f, v in zip(found, like, strict=True)]
        return self._as_it_was(found, like)

    def _called(self, target: Any, like: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem:
            element = args[0][args[1]]
            if element is None:
                raise Refusal("a factor that is not written out")
            return element
        if target in RULES:
            return RULES[target](self.lanes, like, *args, **kwargs)
        if any(isinstance(v, Entries) for v in pytree.tree_leaves((args, kwargs))):
            if is_pointwise(target):
                return pointwise(target, args, kwargs)
        elif not isinstance(like, torch.Tensor):
            return target(*args, **kwargs)  # of sizes
        raise Refusal(f"no rule for {target}")

    def _as_it_was(self, value: Any, like: Any) -> Any:
        """Return ``value`` in the shape and dtype of the tensor that it stands for."""
        if not isinstance(like, torch.Tensor) or value is None:
            return value
        if not are_all_known_equal(self.lanes.shape_of(value), like.shape):
            raise Refusal(f"{self.lanes.shape_of(value)} for a tensor of shape {like.shape}")
        if any(v.dtype != like.dtype for v in value.flat):
            raise Refusal(f"{value.dtype} for a tensor of {like.dtype}")
        return value.of_rank(like.ndim)
