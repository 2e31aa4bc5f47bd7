"""How a value that a step leaves differs from what it found (torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import itertools
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.tensor import TensorVariable

from torch_scan_hop._torch.dynamo.objects import held_by_name
from torch_scan_hop._torch.dynamo.variables import example_value


def is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if not (isinstance(before, VariableTracker) and isinstance(after, VariableTracker)):
        return bool(before == after)
    if before.is_python_constant() and after.is_python_constant():
        one, other = before.as_python_constant(), after.as_python_constant()
        return type(one) is type(other) and bool(one == other)
    if before.source is not None and before.source == after.source:
        return True
    return tensor_of(before) is not None and tensor_of(before) is tensor_of(after)


def tensor_of(variable: VariableTracker) -> Any:
    """Return the example of a tensor variable as it is now; None for any other variable.

    ``module.steps += 1`` assigns what ``iadd`` returns: the tensor that was there, changed.
    """
    variable = variable.realize()
    return example_value(variable) if isinstance(variable, TensorVariable) else None


def seen(variable: VariableTracker) -> VariableTracker | None:
    """Return what ``variable`` is; None if the trace has not looked at it, which is guarded."""
    return variable.realize() if variable.is_realized() else None


def seen_tensor(item: Any) -> Any:
    """Return :func:`tensor_of` what is :func:`seen`; None for keys of a dict, too."""
    found = seen(item) if isinstance(item, VariableTracker) else None
    return None if found is None else tensor_of(found)


def reorders(before: VariableTracker, after: VariableTracker) -> bool:
    """Return True if ``after`` has the keys of a dict in another order."""
    before, after = before.realize(), after.realize()
    if isinstance(before, ConstDictVariable) and isinstance(after, ConstDictVariable):
        keys = [key for key in before.items if key in after.items]
        if keys != [key for key in after.items if key in before.items]:
            return True
        return any(reorders(before.items[key], after.items[key]) for key in keys)
    if isinstance(before, BaseListVariable) and isinstance(after, BaseListVariable):
        return any(map(reorders, before.items, after.items))
    return False


def has_other_length(before: VariableTracker, after: VariableTracker) -> bool:
    one, other = before.realize(), after.realize()
    for kind in (ListVariable, TupleVariable):
        if isinstance(one, kind) and isinstance(other, kind):
            return len(one.items) != len(other.items)
    return False


def pairs_within(before: VariableTracker, after: VariableTracker) -> list[tuple[Any, Any]]:
    """Return what two containers or objects hold at the same place."""
    held = dict(held_by_name(before))
    return [(held[name], value) for name, value in held_by_name(after) if name in held]


def resizes(before: VariableTracker | None, after: VariableTracker) -> bool:
    """Return True if a tensor has another shape, or a list another length, or what is in it."""
    if before is None:
        return False
    before, after = before.realize(), after.realize()
    if isinstance(before, BaseListVariable) and isinstance(after, BaseListVariable):
        pairs = zip(before.items, after.items, strict=False)
        return len(before.items) != len(after.items) or any(itertools.starmap(resizes, pairs))
    one, other = tensor_of(before), tensor_of(after)
    return one is not None and other is not None and one.shape != other.shape
