"""What a body may do to Python objects that it did not make (torch 2.9.1, 2.13.0, 2.15.0).

A body is traced once and run ``T`` times, so an assignment that lasts would be made once, or, since
Dynamo forgets what a higher-order operator's body assigned, not at all. Torch 2.9 refuses every
such assignment; torch >= 2.13 lets most of them pass, and loses them. Here those are refused
that something is left of when the step ends. A name that is pushed and popped, or a module's
parameters that ``functional_call`` swaps and puts back, are nobody's business.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker, is_side_effect_safe
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import TracingContext

from torch_scan_hop._torch.dynamo.variables import example_value

# the file of torch that swaps a module's tensors; a body's own assignments are elsewhere
_SWAPPER = "torch/nn/utils/_named_member_accessor.py"


# where torch remembers which function computes a divergence: whoever comes first fills that in
_MEMO = "torch/distributions/kl.py"


def _is_swap(effects: SideEffects) -> bool:
    """Whether the code being traced right now is ``functional_call``'s own swap."""
    output = effects.output_graph_weakref()
    if output is None:
        return False
    return output.current_tx.f_code.co_filename.replace("\\", "/").endswith(_SWAPPER)


def _contents(variable: VariableTracker) -> list[Any] | None:
    """What a list, dict, set or deque holds, as Dynamo knows it; None for other objects.

    An iterator holds items, too, and what changes is where it stands: that cannot be undone.
    """
    if not isinstance(variable, (BaseListVariable, ConstDictVariable)):
        return None
    items: Any = variable.items
    if isinstance(items, dict):
        return [part for pair in items.items() for part in pair]
    return list(items)


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if not (isinstance(before, VariableTracker) and isinstance(after, VariableTracker)):
        return bool(before == after)
    if before.is_python_constant() and after.is_python_constant():
        one, other = before.as_python_constant(), after.as_python_constant()
        return type(one) is type(other) and bool(one == other)
    if before.source is not None and before.source == after.source:
        return True
    return _tensor_of(before) is not None and _tensor_of(before) is _tensor_of(after)


def _tensor_of(variable: VariableTracker) -> Any:
    """``module.steps += 1`` assigns what ``iadd`` returns: the tensor that was there, changed."""
    variable = variable.realize()
    return example_value(variable) if isinstance(variable, TensorVariable) else None


def _users_line() -> str:
    """``file:line (code)`` of the user's line that is being traced."""
    stack = list(TracingContext.extract_stack())
    if not stack:
        return "an unknown line"
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"


def _refusal(line: str) -> Unsupported:
    return Unsupported(
        f"the body changes a Python object that it did not make, at {line}: a scan traces a step "
        "once, so that this would happen once, or not at all. Return the value in ys, or carry it"
    )


@dataclass
class _Contents:
    """A container before its first change."""

    variable: VariableTracker
    before: list[Any]
    was_modified: bool
    line: str
    items: Any

    def check(self) -> None:
        now = _contents(self.variable)
        if now is None or len(now) != len(self.before) or not all(map(_is_same, self.before, now)):
            raise _refusal(self.line)
        # what is the same may have another name: one of the body's, which the program has not got
        self.variable.items = self.items  # type: ignore[attr-defined]
        kind: Any = self.variable.mutation_type
        if hasattr(kind, "is_modified"):
            kind.is_modified = self.was_modified


@dataclass
class _Attribute:
    """An attribute before its first assignment, and now."""

    before: VariableTracker | None
    line: str
    now: VariableTracker | None = None

    def check(self) -> None:
        if self.before is None or not _is_same(self.before, self.now):
            raise _refusal(self.line)


class _Watch:
    """The changes that one body makes to what it did not make."""

    def __init__(self) -> None:
        self.contents: dict[int, _Contents] = {}
        self.attributes: dict[tuple[int, str], _Attribute] = {}
        self.assigning = False

    def changes(self, item: VariableTracker) -> None:
        """``item``, which the body did not make, is about to change."""
        contents = _contents(item)
        if self.assigning:
            return  # noted by ``assigns``
        if contents is not None and _MEMO in _users_line().replace("\\", "/"):
            return
        if contents is None:
            raise _refusal(_users_line())
        if id(item) not in self.contents:
            modified = bool(getattr(item.mutation_type, "is_modified", False))
            self.contents[id(item)] = _Contents(
                item,
                contents,
                modified,
                _users_line(),
                copy.copy(item.items),  # type: ignore[attr-defined]
            )

    def assigns(
        self, effects: SideEffects, item: VariableTracker, name: str, value: VariableTracker
    ) -> None:
        key = (id(item), name)
        if key not in self.attributes:
            before = _attribute_of(effects, item, name)
            self.attributes[key] = _Attribute(before, _users_line())
        self.attributes[key].now = value

    def check(self) -> None:
        for contents in self.contents.values():
            contents.check()
        for attribute in self.attributes.values():
            attribute.check()


def _attribute_of(effects: SideEffects, item: VariableTracker, name: str) -> VariableTracker | None:
    stored = effects.store_attr_mutations.get(item, {})
    if name in stored:
        return stored[name]
    output = effects.output_graph_weakref()
    read: Any = getattr(item, "tp_getattro_impl", None) or item.var_getattr  # the first since 2.15
    try:
        return read(output.current_tx, name)  # type: ignore[union-attr]
    except Exception:  # a cell, a global, something Dynamo cannot read: the change is taken to last
        return None


def _is_watched(effects: SideEffects, item: VariableTracker) -> bool:
    if isinstance(item, AutogradFunctionContextVariable) or _is_swap(effects):
        return False
    return item.mutation_type is not None and not is_side_effect_safe(item.mutation_type)


@contextlib.contextmanager
def lasting_changes_are_refused(tx: Any) -> Iterator[None]:
    """Trace a body; raise Unsupported, with the user's line, if it leaves something changed."""
    random_calls = len(tx.output.random_calls)
    watch = _Watch()
    with _changes_noted(watch), _generators_refused():
        yield
    watch.check()
    if len(tx.output.random_calls) > random_calls:
        raise Unsupported(
            "the body draws from Python's `random`, and would draw once for all steps"
        )


@contextlib.contextmanager
def _changes_noted(watch: _Watch) -> Iterator[None]:
    check, store_attr = SideEffects.check_allowed_side_effect, SideEffects.store_attr

    def watch_change(self: SideEffects, item: VariableTracker) -> bool:
        if not _is_watched(self, item):
            return _is_swap(self) or check(self, item)
        watch.changes(item)
        return True

    def watch_assignment(
        self: SideEffects,
        item: VariableTracker,
        name: str,
        value: VariableTracker,
        *more: Any,
        **options: Any,
    ) -> None:
        if _is_watched(self, item):
            watch.assigns(self, item, name, value)
        watch.assigning = True
        try:
            store_attr(self, item, name, value, *more, **options)
        finally:
            watch.assigning = False

    effects: Any = SideEffects
    effects.check_allowed_side_effect, effects.store_attr = watch_change, watch_assignment
    try:
        yield
    finally:
        effects.check_allowed_side_effect, effects.store_attr = check, store_attr


@contextlib.contextmanager
def _generators_refused() -> Iterator[None]:
    """A body that reads from a generator changes it, and no attribute tells."""
    wrap_value = VariableBuilder._wrap

    def wrap(self: VariableBuilder, value: Any) -> Any:
        if isinstance(value, types.GeneratorType):
            raise _refusal(_users_line())
        return wrap_value(self, value)

    VariableBuilder._wrap = wrap  # type: ignore[method-assign]
    try:
        yield
    finally:
        VariableBuilder._wrap = wrap_value  # type: ignore[method-assign]
