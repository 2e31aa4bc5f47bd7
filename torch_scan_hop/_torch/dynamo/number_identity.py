"""What Dynamo says of a tensor, and Python otherwise of the number that it is to a body: its hash,
and what it is identical to (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.lists import BaseListVariable

from torch_scan_hop._torch.dynamo.made_numbers import is_made_number
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
def equal_numbers_are_no_other() -> Iterator[None]:
    """Refuse that a number is looked for by its hash, or by ``is``, which find the tensor alone."""
    original = _Key.__init__

    @functools.wraps(original)
    def init(self: Any, variable: Any) -> None:
        if _holds_number(variable):
            raise Unsupported(_KEY.format(users_line()))
        original(self, variable)

    with replaced(_Key, __init__=init), _identity_is_refused():
        yield


def _holds_number(variable: Any) -> bool:
    items = variable.realize() if variable.is_realized() else None
    if isinstance(items, BaseListVariable):
        return any(map(_holds_number, items.items))
    return is_made_number(variable)


def _identity_is_refused() -> contextlib.AbstractContextManager[None]:
    handlers = symbolic_convert.compare_op_handlers

    def refusing(handler: Any) -> Any:
        def compare(tx: Any, args: Any, kwargs: Any) -> Any:
            if _may_be_one_number(args):
                raise Unsupported(_IDENTITY.format(users_line()))
            return handler(tx, args, kwargs)

        return compare

    own = {name: refusing(handlers[name]) for name in ("is", "is not")}
    return replaced(symbolic_convert, compare_op_handlers={**handlers, **own})


def _may_be_one_number(pair: Sequence[Any]) -> bool:
    """Return True for a number that steps make, and another one or a constant that is one."""
    made = list(map(is_made_number, pair))
    if not any(made):
        return False
    others = [variable for variable, is_made in zip(pair, made, strict=True) if not is_made]
    return all(
        v.is_python_constant() and isinstance(v.as_python_constant(), (bool, int, float))
        for v in others
    )
