"""The numbers that steps carry, read and make, which are scalar tensors to Dynamo: their mark
(checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from torch import fx
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

#: in the meta of a number's node: which leaf of the carry it is; None for what is made of numbers
NUMBER = "torch_scan_hop.number"


def is_marked(proxy: fx.Proxy) -> bool:
    return NUMBER in proxy.node.meta


def is_made_number(variable: VariableTracker) -> bool:
    """Return True for such a number. What is not realized is the program's own, and no look at it
    is guarded here."""
    if not variable.is_realized():
        return False
    variable = variable.realize()
    return isinstance(variable, TensorVariable) and is_marked(variable.as_proxy())
