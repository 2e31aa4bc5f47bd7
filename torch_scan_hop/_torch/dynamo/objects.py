"""What a step makes anew for the next one: objects that are their attributes and nothing else, and
containers with flags or words in them (torch 2.9.1, 2.13.0, 2.15.0).

``self.state = State(h, c)``: the tensors in it are carried, and each step finds an object that is
made of them, without a call of its ``__init__``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dynamo.exc import Unsupported
from torch._dynamo.source import GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.misc import CellVariable, DeletedVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from torch_scan_hop._torch.dynamo.variables import (
    GETATTR,
    ConstantVariable,
    call_inlined,
    sequence_items,
)

_OWN = {list, tuple, dict}
#: what stays as it is from step to step; numbers and None may change
_FIXED = (bool, str, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Fixed:
    """A part that is not carried: a flag, a word, a dtype."""

    value: Any


@dataclass(frozen=True)
class ObjectSpec:
    """How a value that has objects, or fixed parts, is built from what is carried of it."""

    kind: type
    names: tuple[Any, ...]
    parts: tuple[ObjectSpec | Fixed | None, ...]  # None: a value that is carried as it is


def spec_of(
    value: VariableTracker | None, around: tuple[VariableTracker, ...] = ()
) -> ObjectSpec | None:
    """Return None for a value that is carried as it is; ``around`` are those that it is in."""
    held = {} if value is None else _held(value.realize())
    if value is None or not held or value.python_type() in pytree.SUPPORTED_NODES.keys() - _OWN:
        return None
    inner = (*around, value.realize())
    if any(value.realize() is other for other in around):
        raise Unsupported("the body leaves an object that holds itself")
    parts = tuple(
        Fixed(part.as_python_constant()) if _is_fixed(part) else spec_of(part, inner)
        for part in held.values()
    )
    if any(parts) or isinstance(value.realize(), UserDefinedObjectVariable):
        return ObjectSpec(value.python_type(), tuple(held), parts)
    return None


def opened(value: VariableTracker) -> VariableTracker:
    """Return ``value`` with a tuple of what is carried in place of what has a spec."""
    return _opened(value, spec_of(value))


def _opened(value: VariableTracker, spec: ObjectSpec | None) -> VariableTracker:
    if spec is None:
        return value
    held = zip(_held(value.realize()).values(), spec.parts, strict=True)
    return TupleVariable([_opened(item, p) for item, p in held if not isinstance(p, Fixed)])


def closed(tx: Any, value: VariableTracker, spec: ObjectSpec | None) -> VariableTracker:
    """Return what :func:`opened` has opened, or was made of that; ``spec`` is that of the value
    before. Objects are new ones."""
    if spec is None:
        return value
    carried = iter(sequence_items(tx, value))
    parts = [
        ConstantVariable.create(part.value)
        if isinstance(part, Fixed)
        else closed(tx, next(carried), part)
        for part in spec.parts
    ]
    if spec.kind in _OWN:
        kind: VariableTracker = VariableTracker.build(tx, spec.kind)
    else:  # under a name by which the code that Dynamo makes finds the class
        name = tx.output.install_global_by_id("scan_kind", spec.kind)
        kind = VariableTracker.build(tx, spec.kind, GlobalSource(name))
    return call_inlined(tx, made, kind, ConstantVariable.create(spec.names), TupleVariable(parts))


def made(kind: Any, names: Any, values: Any) -> Any:
    """Return a container or an object that holds ``values``; no ``__init__`` is called."""
    if issubclass(kind, tuple):
        return values if kind is tuple else kind(*values)
    if kind is list:
        return [*values]
    if kind is dict:
        return dict(zip(names, values, strict=True))
    new = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def held_by(value: VariableTracker) -> list[VariableTracker]:
    """Return the values of the attributes of an object that is nothing else; else none."""
    value = value.realize()
    is_object = isinstance(value, UserDefinedObjectVariable) and not is_users_tuple(value)
    return [*_held(value).values()] if is_object else []


def is_namedtuple(value: VariableTracker) -> bool:
    is_tuple = isinstance(value, TupleVariable) or is_users_tuple(value)
    return is_tuple and hasattr(value.python_type(), "_fields")


def items_in(value: Any) -> Any:
    """Return the items of a container; torch 2.9 keeps those of some named tuples apart."""
    return getattr(value, "_tuple_vt", value).items


def is_users_tuple(value: VariableTracker) -> bool:
    """Return True for a named tuple; torch 2.13 takes it for an object, which has its items."""
    return isinstance(value, UserDefinedObjectVariable) and issubclass(value.python_type(), tuple)


def held_by_name(value: VariableTracker) -> Iterator[tuple[tuple[bool, Any], VariableTracker]]:
    """Return what a value holds, and how to get it: if it is an item, and its name."""
    value = value.realize()
    held: dict[Any, VariableTracker] = _held(value)
    is_item = isinstance(value, (BaseListVariable, ConstDictVariable)) or is_users_tuple(value)
    if not held and is_item and not isinstance(value, ConstDictVariable):
        held = dict(enumerate(items_in(value)))  # also of a deque
    yield from (((is_item, name), part) for name, part in held.items())


def _held(value: Any) -> dict[Any, VariableTracker]:
    """Return what an object or a container holds, by name; nothing of another value."""
    if type(value) in (ListVariable, TupleVariable) or is_namedtuple(value):
        return dict(enumerate(items_in(value)))
    if type(value) is ConstDictVariable and value.python_type() is dict:
        keys = [key.vt for key in value.items]
        if all(key.is_python_constant() for key in keys):
            pairs = zip(keys, value.items.values(), strict=True)
            return {key.as_python_constant(): part for key, part in pairs}
    if not (isinstance(value, UserDefinedObjectVariable) and _is_plain(value.python_type())):
        return {}
    effects = InstructionTranslator.current_tx().output.side_effects
    given = _names_in(value.value) if value.source is not None else ()
    fields = getattr(value, "fields", {})  # of a frozen dataclass, torch 2.9
    stored = effects.store_attr_mutations.get(value, {})
    deleted = {name for name, part in stored.items() if isinstance(part, DeletedVariable)}
    names = {*given, *fields, *stored} - deleted
    found = {name: attribute_of(effects, value, name) for name in names}
    held = {name: part for name, part in sorted(found.items()) if part is not None}
    return held if len(held) == len(found) else {}  # there is one that Dynamo cannot read


def _is_fixed(value: VariableTracker) -> bool:
    return value.is_python_constant() and isinstance(value.as_python_constant(), _FIXED)


@functools.cache
def _is_plain(kind: type) -> bool:
    """Return True if objects of this class are their attributes: nothing else is kept in them, and
    to read, write or delete one is only that."""
    own: Any = kind
    is_frozen = getattr(getattr(own, "__dataclass_params__", None), "frozen", False)
    return (
        own.__new__ is object.__new__
        and own.__getattribute__ is object.__getattribute__
        and (is_frozen or own.__setattr__ is object.__setattr__)
        and not any(vars(cls).keys() & {"__getattr__", "__del__"} for cls in own.__mro__)
        and not issubclass(own, torch.nn.Module)
    )


def _names_in(value: Any) -> list[str]:
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return [name for name in names if hasattr(value, name)] + [*getattr(value, "__dict__", ())]


def attribute_of(effects: Any, item: VariableTracker, name: str) -> VariableTracker | None:
    stored = effects.store_attr_mutations.get(item, {})
    if name in stored:
        return None if isinstance(stored[name], DeletedVariable) else stored[name]
    output = effects.output_graph_weakref()
    if isinstance(item, CellVariable):
        return item.pre_existing_contents
    try:
        return getattr(item, GETATTR)(output.current_tx, name)  # type: ignore[no-any-return]
    except Exception:  # nothing is there, or what Dynamo cannot read
        return None
