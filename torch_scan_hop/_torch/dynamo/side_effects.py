"""The changes that a body may make to Python objects of others (torch 2.9.1, 2.13.0, 2.15.0).

A body is traced once and run ``T`` times, and Dynamo forgets what it assigns in that. So what
a step leaves and the next one finds is reported (:class:`StateAssigned`) and carried, or refused. A
name that is pushed and popped, or parameters that ``functional_call`` swaps and puts back, are not.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker, is_side_effect_safe
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable

from torch_scan_hop._torch.dynamo.deques import is_filling
from torch_scan_hop._torch.dynamo.differences import is_same
from torch_scan_hop._torch.dynamo.left import GrowingList, StateAssigned, is_growing, put_back
from torch_scan_hop._torch.dynamo.objects import attribute_of
from torch_scan_hop._torch.dynamo.places import (
    AN_OBJECT,
    Place,
    SetVariable,
    refuse_within_functions,
    refused_change,
    users_line,
)
from torch_scan_hop._torch.dynamo.tables import changes_by_tables_told, methods_that_change
from torch_scan_hop._torch.replaced import ambient, replaced, wrapped

# what swaps a module's tensors; lists the weights of an nn.LSTM anew, which it does before it runs
# if they have been swapped; and begins and ends a cache of weights: a body's own is elsewhere
_SWAPPERS = {
    ("torch/nn/utils/_named_member_accessor.py", ""),
    ("torch/nn/modules/rnn.py", "_init_flat_weights"),
    ("torch/nn/utils/parametrize.py", "cached"),
}
# what fills that cache
_CACHES = {("torch/nn/utils/parametrize.py", "get_cached_parametrization")}


def _traces(effects: SideEffects, places: set[tuple[str, str]]) -> bool:
    """Return True if the code being traced right now is in one of ``places``: a file of torch, and
    a function, or any."""
    output = effects.output_graph_weakref()
    if output is None:
        return False
    tx: Any = output.current_tx
    while tx.f_code.co_name == "__setattr__" and hasattr(tx, "parent"):
        tx = tx.parent
    file, name = tx.f_code.co_filename.replace("\\", "/"), tx.f_code.co_name
    return any(file.endswith(place) and function in ("", name) for place, function in places)


def _contents(variable: VariableTracker) -> Any:
    """Return the items of a list, dict, set or deque, as Dynamo knows them; None for other objects.

    An iterator holds items as well, but what changes is its position, which cannot be undone.
    """
    if not isinstance(variable, (BaseListVariable, ConstDictVariable, SetVariable)):
        return None
    return copy.copy(variable.items)  # type: ignore[union-attr]


@dataclass
class _Contents:
    """A container before its first change."""

    variable: VariableTracker
    before: Any
    was_modified: bool
    line: str
    is_cache: bool

    def changes(self) -> list[Place | GrowingList]:
        """What has changed: items, or the list if there are more; raises Unsupported for others."""
        before, now = self.before, _contents(self.variable)
        self.put_back()
        if self.is_cache:  # that begins empty at each step
            return []
        if is_growing(self.variable, before, now):
            return [GrowingList(self.variable, self.line)]
        if isinstance(self.variable, SetVariable):
            changed = [key.vt for key in set(before) ^ set(now)]  # by the first step alone, maybe
            return [Place(self.variable, key, True, self.line, None, key) for key in changed[:1]]
        if isinstance(before, dict):
            if gone := [key.vt for key in before if key not in now]:  # by the first step, maybe
                return [Place(self.variable, gone[0], True, self.line, None, gone[0])]
            if [key for key in now if key in before] != [*before]:
                raise refused_change("a dict's keys, or their order", self.line)
            pairs = [(key.vt, before.get(key), now[key]) for key in now]
        elif len(before) == len(now) or is_filling(self.variable, before, now):
            pairs = list(zip_longest(map(ConstantVariable.create, range(len(now))), before, now))
        else:
            kind = self.variable.python_type().__name__
            raise refused_change(f"the length of a {kind} that it did not make", self.line)
        return [
            Place(self.variable, key, True, self.line, old, new).compared()
            for key, old, new in pairs
            if not is_same(old, new)
        ]

    def put_back(self) -> None:
        # what is the same may have another name: one of the body's, which the program has not got
        put_back(self.variable, self.before)
        kind: Any = self.variable.mutation_type
        if hasattr(kind, "is_modified"):
            kind.is_modified = self.was_modified


class _Watch:
    """The changes that one body makes to objects that it did not make."""

    def __init__(self) -> None:
        self.contents: dict[int, _Contents] = {}
        # with its tracker, which is kept: another one of the same id would be taken for it
        self.unchanged: dict[int, tuple[VariableTracker, Any]] = {}
        self.attributes: dict[tuple[int, str], Place] = {}
        self.assigning = False
        #: why the body is not captured, unless it leaves something for its next step
        self.refusals: list[Unsupported] = []
        self.checks: list[Callable[[_Watch], None]] = []

    def may_change(self, item: VariableTracker) -> None:
        """Remember what ``item`` holds: some of Dynamo's trackers report a change after it."""
        self.unchanged.setdefault(id(item), (item, _contents(item)))

    def changes(self, item: VariableTracker, is_cache: bool) -> None:
        """Note that ``item``, which the body did not make, is about to change."""
        _, contents = self.unchanged.get(id(item)) or (item, _contents(item))
        line = users_line()
        if self.assigning:
            return  # which is noted by ``assigns``
        if contents is None:
            raise refused_change(AN_OBJECT, line)
        if id(item) not in self.contents:
            modified = bool(getattr(item.mutation_type, "is_modified", False))
            self.contents[id(item)] = _Contents(item, contents, modified, line, is_cache)

    def assigns(
        self,
        effects: SideEffects,
        item: VariableTracker,
        name: str,
        value: VariableTracker,
        how: tuple[Any, ...],
    ) -> None:
        place = self.attributes.get((id(item), name))
        kind = type(getattr(item, "value", None))
        if isinstance(inspect.getattr_static(kind, name, None), property):
            raise Unsupported(
                f"the body assigns to the property {name!r} of a {kind.__name__}, at "
                f"{users_line()}, and Dynamo does not call its setter. Assign to what it assigns to"
            )
        if place is None:
            place = Place(item, name, False, users_line(), attribute_of(effects, item, name), value)
        self.attributes[id(item), name] = replace(place, after=value, how=how)

    def put_back(self) -> None:
        """Containers hold what they held, and nothing of a graph that is given up."""
        for contents in self.contents.values():
            contents.put_back()

    def places(self) -> list[Place | GrowingList]:
        """Return the places that the next step finds changed, and the lists that have grown."""
        found = [place for contents in self.contents.values() for place in contents.changes()]
        for place in self.attributes.values():
            if place.before is None or not is_same(place.before, place.after):
                place.check_owner()
                if not place.is_temporary():
                    found.append(place.compared())
        return found


def _is_watched(effects: SideEffects, item: VariableTracker) -> bool:
    if isinstance(item, AutogradFunctionContextVariable) or _traces(effects, _SWAPPERS):
        return False
    return item.mutation_type is not None and not is_side_effect_safe(item.mutation_type)


@contextlib.contextmanager
def lasting_changes_are_refused() -> Iterator[None]:
    """Trace a body; raise StateAssigned if it leaves something changed, or Unsupported."""
    watch = _Watch()
    at_hand = replaced(_state, watch=watch)
    try:
        with at_hand, _changes_noted(watch), _contents_noted(watch), _generators_refused():
            yield
    except BaseException:
        watch.put_back()
        raise
    for check in watch.checks:
        check(watch)
    found = watch.places()
    if found and not _state.undone:
        raise StateAssigned(found)
    for refusal in watch.refusals:
        raise refusal


#: the watch of the body at hand, and if what it assigns is forgotten
_state = ambient(watch=None, undone=False)


def check_at_the_end(check: Callable[[Any], None]) -> None:
    """Call ``check`` with what the body at hand, not a first step, has changed."""
    if _state.watch is not None:
        _state.watch.checks.append(check)


def refuse_unless_carried(refusal: Unsupported) -> None:
    """Raise ``refusal`` of what a body does to a tensor of the program's. If the body turns out to
    leave something for its next step, it is traced once more, and the tensor may be a carry."""
    if _state.watch is None:
        raise refusal
    _state.watch.refusals.append(refusal)


def changes_are_undone() -> contextlib.AbstractContextManager[None]:
    """Forget what a body assigns within, which is that of a scan of no steps."""
    return replaced(_state, undone=True)


@contextlib.contextmanager
def _changes_noted(watch: _Watch) -> Iterator[None]:
    def watch_change(check: Any, self: SideEffects, item: VariableTracker) -> bool:
        if not _is_watched(self, item):
            return _traces(self, _SWAPPERS) or bool(check(self, item))
        refuse_within_functions(self, item)
        watch.changes(item, _traces(self, _CACHES))
        return True

    def watch_assignment(
        store_attr: Any,
        self: SideEffects,
        item: VariableTracker,
        name: str,
        value: VariableTracker,
        *how: Any,
        **named: Any,
    ) -> None:
        if _is_watched(self, item):
            watch.assigns(self, item, name, value, (*how, *named.values()))
        with replaced(watch, assigning=True):
            store_attr(self, item, name, value, *how, **named)

    own: dict[str, Any] = {}
    if hasattr(SideEffects, "snapshot_attr_mutation"):  # torch > 2.9 has a check of its own
        own["snapshot_attr_mutation"] = lambda *_: False
    with (
        wrapped(SideEffects, check_allowed_side_effect=watch_change, store_attr=watch_assignment),
        replaced(SideEffects, **own),
    ):
        yield


@contextlib.contextmanager
def _contents_noted(watch: _Watch) -> Iterator[None]:
    def call(method: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.may_change(self)
        return method(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for cls, name in methods_that_change(BaseListVariable, ConstDictVariable, SetVariable):
            stack.enter_context(wrapped(cls, **{name: call}))
        stack.enter_context(changes_by_tables_told(watch.may_change))
        yield


def _generators_refused() -> contextlib.AbstractContextManager[None]:
    """A body that reads from an iterator changes it, and no attribute tells."""

    def wrap(wrap_value: Any, self: VariableBuilder, value: Any) -> Any:
        is_in_c = isinstance(getattr(type(value), "__next__", None), types.WrapperDescriptorType)
        if is_in_c and not hasattr(value, "readline"):  # a file
            raise Unsupported(f"the body reads from an iterator, at {users_line()}")
        return wrap_value(self, value)

    return wrapped(VariableBuilder, _wrap=wrap)
