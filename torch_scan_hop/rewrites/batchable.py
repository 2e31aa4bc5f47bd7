"""Operators that may be done for all steps at once, because ``vmap`` of them is the loop of them.

torch's batching rules are many, and not all of them are right: ``vmap`` of ``index_fill`` with a
batched value and an unbatched self keeps the last value for every row; ``as_strided`` cannot know
the strides that a batch will have; what depends on the values of a mask cannot be batched at all.
So a value leaves the loop only by operators that the table names, and each of them is compared
with the loop, for every pattern of batched and unbatched arguments, in
``tests/rewrites/test_batchable.py``. All others stay in the loop, where they are what they were.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop.body.cofactors import cofactors
from torch_scan_hop.body.linalg_checks import linalg_check, linalg_check_in_steps
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_number_node
from torch_scan_hop.body.operator_table import operators

aten = torch.ops.aten

NAMED = operators("batchable")
FOR_ONE_TRIP_COUNT = operators("one_count")
_FACTORISATIONS = {*operators("factorisation"), cofactors, linalg_check}

# pointwise operators without a rule, or with arguments that the test has no values for
NOT_POINTWISE = {"equal", "fill", "rrelu_with_noise"}


def _stand_in_for_conjugate(value: Any) -> Any:
    return torch.complex(value.real, -value.imag) if value.is_complex() else value


# with integers for indices: a mask's result has no shape that a batch could have
BY_INDEX = {aten.index.Tensor, aten.index_put.default}


def _along(value: Any, dim: int, of_position: Callable[[Any], Any]) -> Any:
    """Return ``of_position`` of each position in ``dim``, ready to broadcast to ``value``."""
    position = torch.arange(value.shape[dim], device=value.device)
    return of_position(position).reshape([-1] + [1] * (value.dim() - dim - 1))


def _stand_in_for_select_scatter(value: Any, source: Any, dim: int, index: int) -> Any:
    """Replace ``select_scatter``: Inductor 2.13 may get its rule's elementwise scatter wrong."""
    dim %= value.dim()
    here = _along(value, dim, lambda position: position == index % value.shape[dim])
    return torch.where(here, source.unsqueeze(dim), value)


def _stand_in_for_slice_scatter(
    value: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Replace ``slice_scatter``, whose rule takes no negative ``end``, and overflows for one that
    means "to the end"."""
    dim %= value.dim()
    size = value.shape[dim]
    if not all(isinstance(n, (int, type(None))) for n in (start, end, size)) or step != 1:
        if isinstance(end, int):
            end = min(end + size if end < 0 else end, size)
        return aten.slice_scatter.default(value, source, dim, start, end, step)
    start, end, _ = slice(start, end).indices(size)
    if start >= end:
        return value.clone()
    around = [0, 0] * (value.dim() - dim - 1) + [start, size - end]
    here = _along(value, dim, lambda position: (position >= start) & (position < end))
    return torch.where(here, aten.constant_pad_nd.default(source, around), value)


def greatest_and_sum(value: Any, dim: int) -> Any:
    """Return the greatest value of a row, and the sum of exponentials below it."""
    greatest = value.amax(dim, keepdim=True)
    return greatest, (value - greatest).exp().sum(dim, keepdim=True)


#: operators without a rule, or with one that is not for all arguments, as operators with one
STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.ops.prims.convert_element_type.default: torch.Tensor.to,
    aten._conj_physical.default: _stand_in_for_conjugate,
    aten.conj_physical.default: _stand_in_for_conjugate,
    aten.select_scatter.default: _stand_in_for_select_scatter,
    aten.slice_scatter.default: _stand_in_for_slice_scatter,
    cofactors: cofactors,
    linalg_check: linalg_check_in_steps,
}

#: those of Inductor, which defines them when it is imported
_OF_INDUCTOR: dict[str, Callable[..., Any]] = {
    "prims::prepare_softmax_online": greatest_and_sum,
    "prims::fma": lambda a, b, c: a * b + c,
}


def stand_in_for(target: Any) -> Callable[..., Any] | None:
    """Return what replaces this operator when it is batched."""
    if target in STAND_INS or not isinstance(target, OpOverload):
        return STAND_INS.get(target)
    return _OF_INDUCTOR.get(target._schema.name)


def is_batchable_operator(target: Any) -> bool:
    """Return True if ``vmap`` of this operator is known to be right."""
    if not isinstance(target, OpOverload):
        return False
    if stand_in_for(target) is not None or target in NAMED:
        return True
    if target.namespace != "aten" or target._schema.is_mutable:
        return False
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target._opname not in NOT_POINTWISE and not target._opname.startswith("special_")


def is_factorisation(node: fx.Node) -> bool:
    """Return True for a factorisation of a matrix, a solve, or the check that one succeeded."""
    return node.target in _FACTORISATIONS


def is_batchable(node: fx.Node, any_trip_count: bool = False) -> bool:
    """Return True if ``node`` may be done for all steps; ``any_trip_count``: for any number."""
    if any_trip_count and node.target in FOR_ONE_TRIP_COUNT:
        return False
    # an element of what was batched, and a size, which is the same at every step
    if node.op != "call_function" or node.target is operator.getitem or is_number_node(node):
        return True
    if node.target in BY_INDEX:
        indices: Any = node.args[1]
        dtypes = {value_of(index).dtype for index in indices if index is not None}
        return dtypes <= {torch.int64, torch.int32}
    if node.target is aten.index_select.default:
        return value_of(node.args[2]).dim() == 1
    # the error of a factorisation names a matrix among all that it was given
    return is_batchable_operator(node.target) and not node.kwargs.get("check_errors")
