"""What Dynamo says of a tensor, and Python otherwise of the number that it is to a body: its hash,
and what it is identical to (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable

from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.replaced import replaced

_Key: Any
try:
    from torch._dynamo.variables.hashable import HashableTracker

    _Key = HashableTracker
except ImportError:  # torch 2.9
    from torch._dynamo.variables.dicts import ConstDictVariable

    _Key = vars(ConstDictVariable)["_HashableTracker"]

_KEY = (
    "the body looks for a number that steps make among the keys of a dict or a set, at {}. Index a "
    "tensor with it, as torch.tensor(values)[n], or compare: (n == 2) | (n == 3)"
)
_IDENTITY = "the body asks if a number that steps make `is` another, at {}. Write =="


@contextlib.contextmanager
def equal_numbers_are_no_other(is_number: Callable[[fx.Proxy], bool]) -> Iterator[None]:
    """Refuse that a number is looked for by its hash, or by ``is``, which find the tensor alone."""
    original = _Key.__init__

    @functools.wraps(original)
    def init(self: Any, variable: Any) -> None:
        if _holds_number(variable, is_number):
            raise Unsupported(_KEY.format(users_line()))
        original(self, variable)

    with replaced(_Key, __init__=init), _identity_is_refused(is_number):
        yield


def _holds_number(variable: Any, is_number: Callable[[fx.Proxy], bool]) -> bool:
    if not variable.is_realized():  # the program's own, and it may stay so: a look at it is guarded
        return False
    variable = variable.realize()
    if isinstance(variable, BaseListVariable):
        return any(_holds_number(item, is_number) for item in variable.items)
    return isinstance(variable, TensorVariable) and is_number(variable.as_proxy())


def _identity_is_refused(
    is_number: Callable[[fx.Proxy], bool],
) -> contextlib.AbstractContextManager[None]:
    handlers = symbolic_convert.compare_op_handlers

    def refusing(handler: Any) -> Any:
        def compare(tx: Any, args: Any, kwargs: Any) -> Any:
            if _may_be_one_number(args, is_number):
                raise Unsupported(_IDENTITY.format(users_line()))
            return handler(tx, args, kwargs)

        return compare

    own = {name: refusing(handlers[name]) for name in ("is", "is not")}
    return replaced(symbolic_convert, compare_op_handlers={**handlers, **own})


def _may_be_one_number(pair: Sequence[Any], is_number: Callable[[fx.Proxy], bool]) -> bool:
    """Return True for a number that steps make, and another one or a constant that is one."""
    made = [_holds_number(variable, is_number) for variable in pair]
    if not any(made):
        return False
    others = [variable for variable, is_made in zip(pair, made, strict=True) if not is_made]
    return all(
        v.is_python_constant() and isinstance(v.as_python_constant(), (bool, int, float))
        for v in others
    )
