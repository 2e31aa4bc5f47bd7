"""``rates[n]`` of a list of the program's numbers, at a number that steps make, and lists of the
numbers in a tensor (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable, TensorVariable

from torch_scan_hop._torch.dynamo.made_numbers import is_made_number
from torch_scan_hop._torch.dynamo.variables import create_node, example_value

#: by the kinds of a list's items; ints among floats are equal to floats
_DTYPES: dict[frozenset[type], torch.dtype] = {
    frozenset({float}): torch.float64,
    frozenset({int, float}): torch.float64,
    frozenset({int}): torch.int64,
    frozenset({bool}): torch.bool,
}


def item_at(
    tx: Any, args: Sequence[VariableTracker], read: Callable[[Any, Any], Any]
) -> VariableTracker | None:
    """Return the item of a list, or of an array of one dimension, at such a number, which is
    ``read`` from a tensor of the items; None if there is more in it than numbers."""
    items, index = (arg.realize() for arg in args)
    is_array = isinstance(items, NumpyNdarrayVariable)
    if not is_array and not isinstance(items, (ListVariable, TupleVariable)):
        return None
    if is_made_number(index):
        if example_value(index).dtype not in (torch.int64, torch.bool):
            return None
    elif is_array:  # NumPy would be given the symbol
        if not isinstance(getattr(index, "sym_num", None), torch.SymInt):
            return None
    else:  # Dynamo takes flags for no index
        if not _is_flag(index):
            return None
        known = [items, ConstantVariable.create(int(_number(tx, index)))]
        return BuiltinVariable(operator.getitem).call_function(tx, known, {})
    device = example_value(index).device if is_made_number(index) else torch.device("cpu")
    table = items.as_proxy() if is_array else _table(tx, items, device)
    values = example_value(table)
    if values is None or values.dim() != 1 or values.dtype not in _DTYPES.values():
        return None
    if values.device != device:
        return None  # an array, which is on the CPU
    place = index.as_proxy()
    if is_made_number(index):  # also a flag, which would be a mask
        place = create_node(tx, "call_method", "to", (place, torch.int64), {}).as_proxy()
    return read(tx, create_node(tx, "call_function", operator.getitem, (table, place), {}))


# so many items of a tensor become numbers, each of which is a few nodes of the graph
_MOST = 32


def numbers_in(
    tx: Any, method: GetAttrVariable, read: Callable[[Any, Any], Any]
) -> VariableTracker | None:
    """Return what ``tensor.item()`` or ``tensor.tolist()`` gives, of numbers that are ``read``."""
    tensor = method.obj.realize()
    if method.name == "item" or not isinstance(tensor, TensorVariable):
        return read(tx, tensor)
    sizes = example_value(tensor).shape
    is_small = all(isinstance(n, int) for n in sizes) and sizes.numel() <= _MOST
    return _listed(tx, tensor, read) if is_small else None


def _listed(tx: Any, tensor: VariableTracker, read: Callable[[Any, Any], Any]) -> Any:
    sizes = example_value(tensor).shape
    if not sizes:
        return read(tx, tensor)
    given = [(tensor.as_proxy(), k) for k in range(sizes[0])]
    parts = [create_node(tx, "call_function", operator.getitem, pair, {}) for pair in given]
    items = [_listed(tx, part, read) for part in parts]
    return None if None in items else ListVariable(items, mutation_type=ValueMutationNew())


def is_table(tx: Any, items: Any) -> bool:
    """Return True if a list holds numbers alone, which a tensor can hold."""
    return _dtype_of(_values_of(tx, items)) is not None


def _table(tx: Any, items: Any, device: torch.device) -> Any:
    values = _values_of(tx, items)
    dtype = _dtype_of(values)
    if dtype is None:
        return None
    options = {"dtype": dtype, "device": device}
    return create_node(tx, "call_function", torch.tensor, (values,), options).as_proxy()


def _values_of(tx: Any, items: Any) -> list[Any]:
    return [_number(tx, item.realize()) for item in items.items]


def _dtype_of(values: list[Any]) -> torch.dtype | None:
    dtype = _DTYPES.get(frozenset(map(type, values)))
    most = 2**63 if dtype == torch.int64 else 2**53
    if any(type(v) is int and not -most <= v < most for v in values):
        return None
    return dtype


def _is_flag(index: VariableTracker) -> bool:
    if index.is_python_constant():
        return isinstance(index.as_python_constant(), bool)
    return isinstance(getattr(index, "sym_num", None), torch.SymBool)


def _number(tx: Any, item: VariableTracker) -> Any:
    """Return the number that ``item`` is in this trace, and None for anything else."""
    if isinstance(item, SymNodeVariable):
        return item.evaluate_expr(tx.output)
    return item.as_python_constant() if item.is_python_constant() else None
