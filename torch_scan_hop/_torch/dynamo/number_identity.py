"""What Dynamo says of a tensor, and Python otherwise of the number that it is to a body: its hash,
its text, and what it is identical to (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from torch_scan_hop._torch.dynamo.differences import seen
from torch_scan_hop._torch.dynamo.made_numbers import is_made_number
from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.replaced import replaced, wrapped

_Key: Any
_asks_first: Any = None
try:
    from torch._dynamo.variables.hashable import HashableTracker

    _Key = HashableTracker
except ImportError:  # torch 2.9, which asks if a key is hashable before it is looked for
    from torch._dynamo.variables import dicts

    _asks_first, _Key = dicts, vars(dicts.ConstDictVariable)["_HashableTracker"]

_KEY = (
    "the body looks for a number that steps make among the keys of a dict or a set, at {}. Index a "
    "list or a tensor with it, as torch.tensor(values)[n], or compare: (n == 2) | (n == 3)"
)
_TEXT = "the body makes a text of a number that steps make, at {}. Index a list with it"
_IDENTITY = "the body asks if a number that steps make `is` another, at {}. Write =="

#: return what a number is; None if that is not known
Known = Callable[[VariableTracker], int | None]


@contextlib.contextmanager
def numbers_are_told(known: Known) -> Iterator[None]:
    """Numbers are what is ``known`` of them where they are looked for by their hash, or a text of
    them is read; others are refused there, since the tensor alone would be found. A message that
    nobody reads (of an assertion, of a profiler) asks for none."""

    def init_of_known(init: Any, self: Any, variable: Any) -> None:
        init(self, _told(known, _KEY, variable))

    def call_function(call: Any, self: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if (self.fn in _MAKE_TEXTS or _is_text(self, args)) and any(map(_holds_number, args)):
            args = [_told(known, _TEXT, arg) for arg in args]
            if all(arg.is_python_constant() for arg in args):
                values = (arg.as_python_constant() for arg in args)
                return ConstantVariable.create(self.fn(*values))
        elif self.fn is len:
            args = [_read(known, arg) for arg in args]
        return call(self, tx, args, kwargs)

    def as_python_constant(self: StringFormatVariable) -> Any:
        text = self if sys._getframe(2).f_code.co_name == "BUILD_STRING" else _read(known, self)
        if text is self:
            raise NotImplementedError  # or is a part of another text, which is not read yet
        return text.as_python_constant()

    with (
        wrapped(_Key, __init__=init_of_known),
        wrapped(BuiltinVariable, call_function=call_function),
        replaced(StringFormatVariable, as_python_constant=as_python_constant),
        _texts_are_hashable(),
    ):
        yield


_MAKE_TEXTS = (str, repr, format)


def _is_text(function: BuiltinVariable, args: Sequence[VariableTracker]) -> bool:
    """Return True for ``"cell%d" % n``."""
    if function.fn is not operator.mod or not args[0].is_python_constant():
        return False
    return isinstance(args[0].as_python_constant(), str)


def _holds_number(variable: VariableTracker) -> bool:
    """Return True if ``variable`` is a number, not known to the trace, or has one as an item."""
    items = seen(variable)
    if isinstance(items, BaseListVariable):
        return any(map(_holds_number, items.items))
    return isinstance(items, SymNodeVariable) or is_made_number(variable)


def _told(known: Known, refusal: str, variable: VariableTracker) -> VariableTracker:
    """Return ``variable`` with its numbers, and texts of numbers, as constants."""
    if is_made_number(variable):
        is_flag = example_value(variable).dtype == torch.bool
        number = None if is_flag else known(variable.realize())
        if number is None:
            raise Unsupported(refusal.format(users_line()))
        return ConstantVariable.create(number)
    items = seen(variable)
    if isinstance(items, SymNodeVariable):
        return ConstantVariable.create(items.evaluate_expr())
    if isinstance(items, BaseListVariable) and _holds_number(items):
        return items.clone(items=[_told(known, refusal, item) for item in items.items])
    return _read(known, variable)


def _read(known: Known, variable: VariableTracker) -> VariableTracker:
    """Return the constant that a text of numbers is; other variables as they are."""
    text = seen(variable)
    if not isinstance(text, StringFormatVariable):
        return variable
    named = [*text.sym_kwargs.values()]
    if not any(map(_holds_number, (*text.sym_args, *named))):
        return variable
    args = [_told(known, _TEXT, arg).as_python_constant() for arg in text.sym_args]
    values = [_told(known, _TEXT, arg).as_python_constant() for arg in named]
    made = text.format_string.format(*args, **dict(zip(text.sym_kwargs, values, strict=True)))
    return ConstantVariable.create(made)


def _texts_are_hashable() -> contextlib.AbstractContextManager[None]:
    if _asks_first is None:
        return contextlib.nullcontext()
    is_hashable = _asks_first.is_hashable

    def is_text_or_hashable(variable: Any) -> bool:
        return isinstance(variable, StringFormatVariable) or bool(is_hashable(variable))

    return replaced(_asks_first, is_hashable=is_text_or_hashable)


def identity_is_refused() -> contextlib.AbstractContextManager[None]:
    """Refuse that a number is asked for by ``is``, which would find the tensor alone."""
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
