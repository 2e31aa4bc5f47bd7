"""The numbers that steps carry, read and make, which are scalar tensors to Dynamo: their mark
(checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from torch_scan_hop._torch.dynamo.variables import create_node, example_value

#: in the meta of a number's node: which leaf of the carry it is; None for what is made of numbers
NUMBER = "torch_scan_hop.number"


def is_marked(proxy: fx.Proxy) -> bool:
    return NUMBER in proxy.node.meta


def mark(variable: VariableTracker, k: int | None = None) -> None:
    variable.as_proxy().node.meta[NUMBER] = k


def is_made_number(variable: VariableTracker) -> bool:
    """Return True for such a number. What is not realized is the program's own, and no look at it
    is guarded here."""
    if not variable.is_realized():
        return False
    variable = variable.realize()
    return isinstance(variable, TensorVariable) and is_marked(variable.as_proxy())


#: of which Python makes an int of flags; torch makes flags of flags, or nothing
_OF_INTS = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow),
    *(operator.neg, operator.pos, operator.abs, "__abs__", operator.invert),
    *(operator.lshift, operator.rshift),
}


def with_ints_for_flags(
    create_proxy: Callable[..., fx.Proxy], target: Any, args: Any, given: Sequence[fx.Proxy]
) -> Any:
    """Return the arguments of arithmetic of numbers alone: ``1 - True`` is 0, ``~True`` -2."""
    if target not in _OF_INTS or not all(map(is_marked, given)):
        return args

    def as_int(proxy: fx.Proxy) -> fx.Proxy:
        example = example_value(proxy)
        if example.dtype != torch.bool:
            return proxy
        made = create_proxy("call_method", "to", (proxy, torch.int64), {})
        made.node.meta.update({"example_value": example.to(torch.int64), NUMBER: None})
        return made

    return pytree.tree_map_only(fx.Proxy, as_int, args)


_OF_COMPLEX = {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow}


def beside_complex(
    tx: Any, function: Any, operands: Sequence[VariableTracker]
) -> Sequence[VariableTracker]:
    """Return the ``operands`` of ``omega * 1j`` with a scalar for a symbol, which takes no complex
    number."""
    if function not in _OF_COMPLEX or not any(_is_complex(v.realize()) for v in operands):
        return operands
    return [_as_scalar(tx, v.realize()) for v in operands]


def _is_complex(variable: Any) -> bool:
    return isinstance(variable, ConstantVariable) and isinstance(variable.value, complex)


def _as_scalar(tx: Any, variable: VariableTracker) -> VariableTracker:
    if not isinstance(variable, SymNodeVariable):
        return variable
    dtype = torch.int64 if variable.python_type() is int else torch.float64
    given = ((), variable.as_proxy())
    made = create_node(tx, "call_function", torch.full, given, {"dtype": dtype})
    mark(made)
    return made
