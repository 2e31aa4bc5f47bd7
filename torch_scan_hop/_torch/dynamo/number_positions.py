"""Positions that steps count, in a list of what is no number, and in a range; flags of contexts
(checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, RangeVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchCtxManagerClassVariable, TorchInGraphFunctionVariable

from torch_scan_hop._torch.dynamo.differences import seen
from torch_scan_hop._torch.dynamo.made_numbers import is_made_number
from torch_scan_hop._torch.dynamo.number_items import is_table
from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.dynamo.variables import call_inlined, example_value
from torch_scan_hop._torch.replaced import wrapped


@contextlib.contextmanager
def positions_are_known(position: Callable[[TensorVariable], int | None]) -> Iterator[None]:
    """``cells[n]`` and ``operator.index(n)``, which a ModuleList asks for, take ``position(n)`` of
    a number of the body's, if that is known. A list of numbers is a table, read by the body."""

    def call_function(original: Any, self: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (operator.getitem, operator.index) and _asks_for_item(tx, args):
            known = position(args[-1].realize())
            if known is not None:
                args = [*args[:-1], ConstantVariable.create(known)]
        elif self.fn is range:
            args = [_times(position, arg) for arg in args]
        return original(self, tx, args, kwargs)

    def as_index(original: Any, self: TensorVariable, tx: Any) -> Any:
        known = position(self) if is_made_number(self) else None
        return original(self, tx) if known is None else ConstantVariable.create(known)

    with contextlib.ExitStack() as stack:
        stack.enter_context(wrapped(BuiltinVariable, call_function=call_function))
        if hasattr(TensorVariable, "nb_index_impl"):  # since torch 2.13
            stack.enter_context(wrapped(TensorVariable, nb_index_impl=as_index))
        yield


@contextlib.contextmanager
def ranges_are_compared() -> Iterator[None]:
    """``n in range(2, 5)`` compares, of a number that is not known to the trace."""

    def range_count(count_in_range: Any, self: RangeVariable, number: VariableTracker) -> Any:
        if not (isinstance(number.realize(), SymNodeVariable) or is_made_number(number)):
            return count_in_range(self, number)
        tx = InstructionTranslator.current_tx()
        return int(call_inlined(tx, _is_in, number, *self.items).as_python_constant())

    with wrapped(RangeVariable, range_count=range_count):
        yield


def _is_in(number: int, start: int, stop: int, step: int) -> bool:
    """Return it by branches, which are decided; what a comparison gives is not known."""
    if step < 0:
        start, stop, step = stop + 1 + (start - stop - 1) % -step, start + 1, -step
    if not start <= number < stop:
        return False
    if step == 1:  # of a remainder, another one is not known
        return True
    return True if (number - start) % step == 0 else False


@contextlib.contextmanager
def flags_branch() -> Iterator[None]:
    """``torch.set_grad_enabled(n > 2)`` is a branch on a flag that is not known to the trace, and
    so is a symbol among the arguments of a function or a method of torch."""

    def call_context(enter: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return enter(self, tx, *_each(_flag, tx, args, kwargs))

    def call_function(function: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return function(self, tx, *_each(_known_flag, tx, args, kwargs))

    def call_method(method: Any, self: Any, tx: Any, name: Any, args: Any, kwargs: Any) -> Any:
        return method(self, tx, name, *_each(_known_flag, tx, args, kwargs))

    with (
        _symbols_are_numbers(),
        wrapped(TorchCtxManagerClassVariable, call_function=call_context),
        wrapped(TorchInGraphFunctionVariable, call_function=call_function),
        wrapped(TensorVariable, call_method=call_method),
    ):
        yield


def _each(of: Callable[..., VariableTracker], tx: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return [of(tx, arg) for arg in args], {name: of(tx, arg) for name, arg in kwargs.items()}


def _known_flag(tx: Any, variable: VariableTracker) -> VariableTracker:
    return _flag(tx, variable) if isinstance(variable.realize(), SymNodeVariable) else variable


def _flag(tx: Any, variable: VariableTracker) -> VariableTracker:
    known = variable.realize()
    is_symbol = isinstance(known, SymNodeVariable) and known.python_type() is bool
    is_made = is_made_number(variable) and example_value(variable).dtype == torch.bool
    return call_inlined(tx, _is_true, variable) if is_symbol or is_made else variable


def _is_true(flag: bool) -> bool:
    return True if flag else False


def _symbols_are_numbers() -> contextlib.AbstractContextManager[None]:
    """``divmod`` of ints is taken apart, which Dynamo does not know; and torch 2.9 does not know
    ``h * (n > 2)`` of a symbol."""

    def call_function(original: Any, self: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(seen(arg), TensorVariable) for arg in args):
            args = [arg if seen(arg) is None else _known_flag(tx, arg) for arg in args]
        elif self.fn is divmod:
            pair = (BuiltinVariable(part) for part in (operator.floordiv, operator.mod))
            return TupleVariable([part.call_function(tx, args, kwargs) for part in pair])
        return original(self, tx, args, kwargs)

    return wrapped(BuiltinVariable, call_function=call_function)


def _times(position: Callable[[TensorVariable], int | None], arg: VariableTracker) -> Any:
    if not is_made_number(arg):
        return arg
    known = position(arg.realize())  # type: ignore[arg-type]
    if known is None:
        raise Unsupported(
            f"the body repeats as often as a number of a step says, at {users_line()}"
        )
    return ConstantVariable.create(known)


def _asks_for_item(tx: Any, args: Sequence[VariableTracker]) -> bool:
    """Return True for a number alone, and after a list that is no table."""
    if not is_made_number(args[-1]):
        return False
    if len(args) == 1:
        return True
    items = args[0].realize()
    return isinstance(items, (ListVariable, TupleVariable)) and not is_table(tx, items)
