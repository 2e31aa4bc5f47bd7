"""Mark and check what Dynamo captures of torch's own ``scan()`` (torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._dynamo.variables import higher_order_ops as _hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import BaseListVariable

from torch_scan_hop._torch.dynamo.variables import call_inlined, sequence_items
from torch_scan_hop._torch.own_scan import mark_as_torchs


def mark_bodies_of(op: Any) -> None:
    """Mark the bodies that torch's tracker captures, whose node it gives the operator ``op``.

    No tracker of this package emits its node this way.
    """
    emit = _hops._call_function_and_unflatten_output

    @functools.wraps(emit)
    def emit_marked(tx: Any, fn: Any, args: Any, *rest: Any, **named: Any) -> Any:
        if fn is op:
            mark_as_torchs(tx.output.nn_modules[args[0].node.target])
        return emit(tx, fn, args, *rest, **named)

    _hops._call_function_and_unflatten_output = emit_marked  # type: ignore[assignment]


def check_step(tx: Any, carry: Sequence[VariableTracker], returned: VariableTracker) -> None:
    """Refuse what torch refuses of a step, which has ``returned`` this."""
    if not isinstance(returned, BaseListVariable) or len(returned.items) != 2:
        raise UncapturedHigherOrderOpError("scan: combine_fn must return a pair, (next_carry, y).")
    after, ys = (
        sequence_items(tx, call_inlined(tx, pytree.tree_leaves, v)) for v in returned.items
    )
    _hops.check_meta_consistency_vt(list(carry), after, "init", "carry", include_contiguity=False)
    for y in ys:
        if y.is_python_constant() and y.as_python_constant() is not None:
            raise UncapturedHigherOrderOpError(
                "scan: the leaves of y must be tensors or None, but combine_fn returned "
                f"{y.as_python_constant()!r}."
            )
