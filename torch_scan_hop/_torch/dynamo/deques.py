"""Deques with a ``maxlen``, which Dynamo forgets, and rotated ones, which torch 2.9 does not
trace (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import DequeVariable, ListVariable

from torch_scan_hop._torch.replaced import wrapped

#: a deque or a list of so many items may be filled by first steps, which are traced one by one
MOST_TO_FILL = 8


def is_filling(variable: Any, before: Any, now: Any) -> bool:
    """Return True if a deque or a list grows, and may be full after a few steps: those run on their
    own."""
    if len(before) > len(now):
        return False
    if not isinstance(variable, DequeVariable):
        return type(variable) is ListVariable and len(now) <= MOST_TO_FILL
    maxlen = variable.maxlen.as_python_constant()
    return maxlen is not None and maxlen <= MOST_TO_FILL


@contextlib.contextmanager
def deques_are_bounded(tx: Any) -> Iterator[None]:
    """Within, a deque of the program keeps its ``maxlen``, as a delay line does.

    Afterwards it has none, or Dynamo would refuse to write back what is in it.
    """
    bounded: list[tuple[DequeVariable, Any]] = []

    def bound(value: Any, variable: Any) -> None:
        if type(value) is collections.deque and isinstance(variable, DequeVariable):
            source = AttrSource(variable.source, "maxlen")  # type: ignore[arg-type]
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
            bounded.append((variable, variable.maxlen))
            variable.maxlen = ConstantVariable.create(value.maxlen)

    def wrap(wrap_value: Any, self: VariableBuilder, value: Any) -> Any:
        found = wrap_value(self, value)
        bound(value, found)
        return found

    effects = tx.output.side_effects
    for value in effects.keepalive:
        if getattr(effects.id_to_variable.get(id(value)), "source", None) is not None:
            bound(value, effects.id_to_variable[id(value)])
    try:
        with wrapped(VariableBuilder, _wrap=wrap), _deques_are_rotated():
            yield
    finally:
        for variable, before in bounded:
            variable.maxlen = before


def _deques_are_rotated() -> contextlib.AbstractContextManager[None]:
    def call_method(original: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "rotate" or not all(arg.is_python_constant() for arg in args):
            return original(self, tx, name, args, kwargs)
        tx.output.side_effects.mutation(self)
        items = collections.deque(self.items)
        items.rotate(*(arg.as_python_constant() for arg in args))
        self.items[:] = items
        return ConstantVariable.create(None)

    return wrapped(DequeVariable, call_method=call_method)
