"""What a step leaves for the next one: in places, and in lists that it appends to and does not read
(checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable, DequeVariable, ListVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import TracingContext

from torch_scan_hop._torch.dynamo.deques import MOST_TO_FILL
from torch_scan_hop._torch.dynamo.differences import tensor_of
from torch_scan_hop._torch.dynamo.objects import held_by, is_users_tuple, items_in
from torch_scan_hop._torch.dynamo.places import Place, is_number, refused_change

#: lists, deques, dicts and objects, which may be changed in place
MUTABLE = (ListVariable, DequeVariable, ConstDictVariable, UserDefinedObjectVariable)
TENSOR, NUMBER, ARRAY = "tensor", "number", "array"


@dataclass(frozen=True)
class GrowingList:
    """A list that a step leaves longer than it found it, by what it appends."""

    owner: Any
    line: str

    def __str__(self) -> str:
        return f"a list that grows at {self.line}"

    def is_in(self, lists: Sequence[GrowingList]) -> bool:
        return any(self.owner is other.owner for other in lists)

    def refusal(self) -> Unsupported:
        return refused_change("the length of a list that it did not make", self.line)

    def has_grown(self) -> bool:
        """Return True if steps before the scan have appended to it, or made it."""
        return bool(getattr(self.owner.mutation_type, "is_modified", True))

    def has_items(self, tx: Any) -> bool:
        """Return True if the program has put items there, which a capture is guarded by."""
        effects = tx.output.side_effects
        known = (v for v in effects.keepalive if effects.id_to_variable.get(id(v)) is self.owner)
        return any(len(items) > 0 for items in known)

    def forget_items(self) -> None:
        """Let the capture serve the list with any items: no step reads them, and nothing that is
        traced after the scan.

        Dynamo returns the list from the capture, and would guard each item that it knows.
        """
        self.owner.items = []
        guards: Any = TracingContext.get().guards_context.dynamo_guards
        length, source = GuardBuilder.SEQUENCE_LENGTH, self.owner.source
        kept = [g for g in guards if (g.create_fn, g.originating_source) != (length, source)]
        guards.inner.clear()
        guards.inner.update(kept)

    def check_item(self, item: VariableTracker) -> None:
        """Raise Unsupported if there is a torch.Size in it, of which a trace makes a tuple, or an
        object, which others may have, too."""
        for container in _containers_in(item):
            if container.python_type() is torch.Size or held_by(container):
                raise self.refusal()

    def check_inputs(self, *given: VariableTracker) -> None:
        """Raise Unsupported if the list is among what the scan is ``given``, which has read it."""
        if any(container is self.owner for v in given for container in _containers_in(v)):
            raise self.refusal()

    def kind_of(self, part: VariableTracker) -> str:
        """Return what ``part`` of what is appended is; raise Unsupported if it is not stacked."""
        if is_number(part):
            return NUMBER
        if tensor_of(part) is None:
            raise self.refusal()
        return ARRAY if isinstance(part.realize(), NumpyNdarrayVariable) else TENSOR


def _containers_in(
    value: VariableTracker, around: tuple[VariableTracker, ...] = ()
) -> Iterator[VariableTracker]:
    value = value.realize()
    if any(value is other for other in around):
        return  # it holds itself
    around = (*around, value)
    if isinstance(value, (BaseListVariable, ConstDictVariable)) or is_users_tuple(value):
        yield value
        items = items_in(value)
        for item in items.values() if isinstance(items, dict) else items:
            yield from _containers_in(item, around)
    elif held := held_by(value):
        yield value
        for item in held:
            yield from _containers_in(item, around)


def mutable_containers_in(value: VariableTracker) -> list[Any]:
    """Return the lists, deques, dicts and objects in ``value``."""
    found = (c for c in _containers_in(value) if isinstance(c, MUTABLE))
    return [container for container in found if not is_users_tuple(container)]


def contents_of(container: Any) -> list[Any]:
    """Return the items of a list, the keys and the values of a dict, or what an object holds."""
    if isinstance(container, UserDefinedObjectVariable) and (held := held_by(container)):
        return held
    return items_of(copy.copy(container.items))


def items_of(items: Any) -> list[Any]:
    """Return the ``items`` of a list as Dynamo knows them, or the keys and the values of a dict."""
    return [*items, *items.values()] if isinstance(items, dict) else [*items]


class StateAssigned(Unsupported):
    """A step leaves something ``left`` for the next one, in places or in lists that grow."""

    def __init__(self, left: Sequence[Place | GrowingList]) -> None:
        super().__init__(str(left[0].refusal()))
        self.first = str(left[0])
        self.places = [place for place in left if isinstance(place, Place)]
        self.lists = [place for place in left if isinstance(place, GrowingList)]


class GrowingListRead(Unsupported):
    """A step reads the list that it appends to, or empties it, so that it may be as long as this
    from the second step on; or from a later one, as a list of the last three values is."""

    def __init__(self, growing: GrowingList, items: int) -> None:
        super().__init__(
            f"the body reads a list that it appends to, at {growing.line}: a scan traces a step "
            "once, and the list is longer at each. Carry what the next step reads"
        )
        #: another place while the list is short: as many first steps run on their own
        self.place = f"{growing}, with {items} items" if items < MOST_TO_FILL else str(growing)


def is_growing(variable: VariableTracker, before: Any, now: Any) -> bool:
    """Return True if a list has only been appended to."""
    return (
        type(variable) is ListVariable
        and len(before) < len(now)
        and all(old is new for old, new in zip(before, now, strict=False))
    )


class Appended(list[VariableTracker]):
    """What a body appends to a list, in place of its items as Dynamo knows them: how many there are
    changes from step to step, so that a body which asks is refused."""

    def __init__(self, growing: GrowingList, before: int) -> None:
        super().__init__()
        self._growing, self._before = growing, before

    def so_far(self) -> list[VariableTracker]:
        return [*list.__iter__(self)]

    def __copy__(self) -> list[VariableTracker]:
        return self.so_far()

    def __iter__(self) -> NoReturn:
        if sys._getframe(1).f_code.co_name == "as_python_constant":
            raise NotImplementedError  # it is none, as Dynamo finds out so
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise GrowingListRead(self._growing, self._before)

    def __len__(self) -> int:
        # torch > 2.9 compares the lengths before and after it extends a list
        caller = sys._getframe(1)
        if caller.f_code.co_name != "list_extend" and caller.f_locals.get("name") != "extend":
            self._refuse()
        return len(self.so_far())

    __getitem__ = __contains__ = __add__ = __mul__ = _refuse  # type: ignore
    __setitem__ = __delitem__ = __reversed__ = __eq__ = __iadd__ = __imul__ = _refuse  # type: ignore
    insert = pop = remove = clear = index = count = sort = reverse = copy = _refuse  # type: ignore


def put_back(variable: Any, before: Any) -> None:
    """Let a container hold what it held; of a scan around this one, what steps have appended."""
    if isinstance(variable.items, Appended):
        list.__setitem__(variable.items, slice(None), before)
    else:
        variable.items = before


@contextlib.contextmanager
def appended_to(tx: Any, lists: Sequence[GrowingList]) -> Iterator[list[Appended]]:
    """Give for each of ``lists`` what is appended to it within, which it does not have then."""
    befores = [growing.owner.items for growing in lists]
    appended = [Appended(*pair) for pair in zip(lists, map(list.__len__, befores), strict=True)]
    were = [growing.has_grown() for growing in lists]
    for growing, new in zip(lists, appended, strict=True):
        tx.output.side_effects.mutation(growing.owner)  # as it was: that is remembered
        growing.owner.items = new
    try:
        yield appended
    finally:
        for growing, before, was_modified in zip(lists, befores, were, strict=True):
            growing.owner.items = before
            if hasattr(growing.owner.mutation_type, "is_modified"):
                growing.owner.mutation_type.is_modified = was_modified
