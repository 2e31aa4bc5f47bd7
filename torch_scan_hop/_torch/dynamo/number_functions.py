"""Functions of Python that a trace calls with a number of a body (torch 2.9.1, 2.13.0, 2.15.0).

Such a number is a scalar tensor, whose value Dynamo would read for ``math.exp(n)`` and ``int(n)``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from torch_scan_hop._torch.dynamo.variables import create_node, example_value
from torch_scan_hop._torch.replaced import replaced


@contextlib.contextmanager
def functions_take_scalars(call: Callable[..., Any], names: Mapping[Any, str]) -> Iterator[None]:
    """The graph has ``call(name, scalar)``, where a function in ``names`` is called with one."""
    with (
        replaced(BuiltinVariable, call_function=_taking(BuiltinVariable, "fn", call, names)),
        replaced(
            TorchInGraphFunctionVariable,
            call_function=_taking(TorchInGraphFunctionVariable, "value", call, names),
        ),
    ):
        yield


def _taking(kind: Any, attribute: str, call: Any, names: Mapping[Any, str]) -> Any:
    original = kind.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        name = names.get(getattr(self, attribute)) if len(args) == 1 and not kwargs else None
        if name is None or not _is_scalar(args[0].realize()):
            return original(self, tx, args, kwargs)
        return create_node(tx, "call_function", call, (name, args[0].as_proxy()), {})

    return call_function


def _is_scalar(variable: Any) -> bool:
    if not isinstance(variable, TensorVariable):
        return False
    value = example_value(variable)
    return bool(value.dim() == 0 and not value.is_complex())
