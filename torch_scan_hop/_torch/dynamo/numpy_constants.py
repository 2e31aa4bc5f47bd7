"""Fold NumPy's functions of constants in a body to constants (checked on torch 2.9.1, 2.13.0,
2.15.0).

Dynamo traces NumPy with tensors, whose values it does not know: ``int(np.prod((2, 3)))`` would be a
number that only the device can tell, and no size.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import NumpyVariable, get_np_to_tnp_map
from torch._dynamo.variables.tensor import NumpyNdarrayVariable

from torch_scan_hop._torch.replaced import replaced

# more entries are data, not sizes and positions
MAX_ENTRIES = 1024
# NumPy scalars of other dtypes are no Python numbers: operators promote them in another way.
_AS_PYTHONS = {"int64", "float64", "bool"}
_SIZES = range(1, MAX_ENTRIES + 1)
_OPERATORS = {
    getattr(operator, name)
    for name in (
        *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"),
        *("lt", "le", "gt", "ge", "eq", "ne"),
    )
}
_READING = {"item", "tolist", "sum", "prod", "min", "max", "mean", "argmax", "argmin", "__len__"}


class _NotConstant(Exception):
    pass


class ConstantArray(NumpyNdarrayVariable):
    """An array whose entries are known; code that does not ask for them sees any other array."""

    def __init__(self, *args: Any, entries: Any = None, version: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries, self.version = entries, version

    def known_entries(self) -> Any:
        if _version_of(self) != self.version:  # written to since
            raise _NotConstant
        return self.entries

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> VariableTracker:
        def method(*values: Any, **keywords: Any) -> Any:
            return getattr(self.known_entries(), name)(*values, **keywords)

        def traced(tx: Any, args: Any, kwargs: Any) -> Any:
            return super(ConstantArray, self).call_method(tx, name, args, kwargs)

        folded: VariableTracker = _folded(
            tx, method if name in _READING else None, args, kwargs, traced
        )
        return folded

    def unpack_var_sequence(self, tx: Any, idxes: Sequence[int] | None = None) -> Any:
        with contextlib.suppress(_NotConstant):
            entries = self.known_entries()
            if entries.ndim == 1:
                places = range(len(entries)) if idxes is None else idxes
                return [_built(tx, entries[k]) for k in places]
        return super().unpack_var_sequence(tx, idxes)


@contextlib.contextmanager
def numpy_constants_are_folded() -> Iterator[None]:
    call_numpy = NumpyVariable.call_function
    insert_operator = BuiltinVariable._handle_insert_op_in_graph

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = self.value if _is_pure(self.value) else None
        return _folded(tx, function, args, kwargs, functools.partial(call_numpy, self))

    def insert(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        # Dynamo keeps what it was given for arguments of these kinds: others must be as ever
        is_known = any(isinstance(a, ConstantArray) for a in args) and self.fn in _OPERATORS
        function = self.fn if is_known else None
        return _folded(tx, function, args, kwargs, functools.partial(insert_operator, self))

    with (
        replaced(NumpyVariable, call_function=call),
        replaced(BuiltinVariable, _handle_insert_op_in_graph=insert),
    ):
        yield


def _folded(tx: Any, function: Any, args: Any, kwargs: dict[str, Any], traced: Any) -> Any:
    """Call ``function`` on constants, and return a constant if the result is one.

    If an argument is no constant, ``traced`` gives the result. So it does for an array; a small one
    remembers its entries.
    """
    try:
        found = _result_of(function, args, kwargs)
    except _NotConstant:
        return traced(tx, args, kwargs)
    if _is_constant(found):
        return _built(tx, found)
    result: Any = traced(tx, args, kwargs)
    is_small = getattr(found, "size", 0) in _SIZES and found.dtype.name in _AS_PYTHONS
    if is_small and result.__class__ is NumpyNdarrayVariable:
        known: Any = result
        known.__class__ = ConstantArray
        known.entries, known.version = found.copy(), _version_of(result)
    return result


def _result_of(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if function is None:
        raise _NotConstant
    values = [_constant_of(v) for v in args]
    keywords = {name: _constant_of(v) for name, v in kwargs.items()}
    try:
        return function(*values, **keywords)
    except Exception as error:  # the call that is traced raises what Python would
        raise _NotConstant from error


def _is_pure(function: Any) -> bool:
    stand_in = get_np_to_tnp_map().get(function)
    return stand_in is not None and ".random" not in getattr(stand_in, "__module__", ".random")


def _constant_of(variable: VariableTracker) -> Any:
    if isinstance(variable, ConstantArray):
        return variable.known_entries().copy()
    try:
        return variable.as_python_constant()
    except Exception as error:
        raise _NotConstant from error


def _is_constant(value: Any) -> bool:
    if getattr(value, "ndim", None) == 0:  # a NumPy scalar
        return value.dtype.name in _AS_PYTHONS
    return isinstance(value, (bool, int, float, list))


def _built(tx: Any, value: Any) -> VariableTracker:
    if isinstance(value, list):
        return VariableTracker.build(tx, value)
    return ConstantVariable.create(value.item() if hasattr(value, "item") else value)


def _version_of(variable: Any) -> int:
    return int(variable.as_proxy().node.meta["example_value"]._version)
