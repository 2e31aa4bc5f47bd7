"""A step that is run only to see what it returns: what it changes is put back.

That is what its function reaches: what it closes over, attributes of modules and other objects,
classes, items of containers, nonlocal and global variables, tensors, generators of random numbers.
What it prints, writes to a file or takes from an iterator stays so.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_scan_hop._torch.operators import is_plain_tensor
from torch_scan_hop._torch.writes import WritesTakenBack
from torch_scan_hop.capture.user_code import names_in

#: containers, and the methods that copy, empty and fill them
_CONTAINERS: dict[type, tuple[Any, Any, Any]] = {
    kind: (kind.copy, kind.clear, getattr(kind, "extend", None) or kind.update)  # type: ignore
    for kind in (collections.OrderedDict, dict, list, set, collections.deque)
}
#: what holds nothing of a program's, or far too much
_NOT_LOOKED_INTO = (types.ModuleType, types.CodeType, types.FrameType, types.GeneratorType)
#: whose classes and global variables are no state of a program
_LIBRARIES = {"torch", "torch_scan_hop", "numpy", *sys.stdlib_module_names} - {"__main__"}
_Undo = Callable[[], object]
_NOTHING = object()


@contextlib.contextmanager
def changes_are_put_back(fn: Any) -> Iterator[None]:
    """Put back, at the end, what calls of ``fn`` within have changed."""
    writes = WritesTakenBack()
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    undo = [*_generators(), *_reached(fn, writes)]
    try:
        with torch.random.fork_rng(devices), writes:
            yield
    finally:
        for put_back in (*undo, writes.take_back):
            put_back()


def _generators() -> Iterator[_Undo]:
    yield functools.partial(random.setstate, random.getstate())
    if numpy := sys.modules.get("numpy"):
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())


def _reached(fn: Any, writes: WritesTakenBack) -> Iterator[_Undo]:
    """Find all that ``fn`` reaches, and how to put each back."""
    seen: dict[int, Any] = {}
    waiting = [fn]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor) and is_plain_tensor(value):
            writes.keep(value)
        inner, undo = _look_at(value)
        waiting += inner
        if undo is not None:
            yield undo


def _look_at(value: Any) -> tuple[list[Any], _Undo | None]:
    """Return what ``value`` holds, and how to let it hold that again."""
    if isinstance(value, types.FunctionType):
        names = set() if _is_of_a_library(value) else names_in(value.__code__)
        was = {name: value.__globals__.get(name, _NOTHING) for name in names}
        held = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return [*held, *was.values()], functools.partial(_fill_names, value.__globals__, was)
    if isinstance(value, type):
        was = {} if _is_of_a_library(value) else dict(vars(value))
        return [*was.values(), *value.__bases__], functools.partial(_fill_class, value, was)
    inner = gc.get_referents(value)
    if isinstance(getattr(value, "__dict__", None), dict):
        inner.append(vars(value))
    if isinstance(value, types.CellType):
        return inner, functools.partial(_fill_cell, value, inner[:])
    if isinstance(value, torch.Generator):
        return inner, functools.partial(value.set_state, value.get_state())
    if base := next((kind for kind in _CONTAINERS if isinstance(value, kind)), None):
        copied = _CONTAINERS[base][0](value)
        return inner, functools.partial(_fill_container, value, base, copied)
    if (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"):
        return inner, functools.partial(value.__setitem__, ..., value.copy())
    was = {slot: getattr(value, slot, _NOTHING) for slot in _slots(type(value))}
    return inner, functools.partial(_fill_slots, value, was) if was else None


def _is_of_a_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _slots(kind: type) -> list[str]:
    known = (vars(cls) for cls in kind.__mro__ if not _is_of_a_library(cls))
    return [
        name
        for own in known
        for name, value in own.items()
        if isinstance(value, types.MemberDescriptorType)
    ]


# --- put back: what has not changed is left alone ---


def _fill_container(value: Any, base: type, before: Any) -> None:
    _, clear, fill = _CONTAINERS[base]
    if not _holds_the_same(base, value, before):
        clear(value)
        fill(value, before)


def _holds_the_same(base: Any, value: Any, before: Any) -> bool:
    if base.__len__(value) != len(before):
        return False
    if hasattr(base, "values"):
        pairs = zip(base.items(value), before.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(base.__iter__(value), before, strict=True))


def _fill_cell(cell: types.CellType, before: list[Any]) -> None:
    if before:
        cell.cell_contents = before[0]
    elif cell != types.CellType():
        del cell.cell_contents


def _fill_names(held: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _NOTHING:
            held.pop(name, None)
        elif held.get(name) is not value:
            held[name] = value


def _fill_class(kind: type, before: dict[str, Any]) -> None:
    if before:
        for name in [name for name in vars(kind) if name not in before]:
            type.__delattr__(kind, name)
        for name, value in before.items():
            if vars(kind).get(name) is not value:
                type.__setattr__(kind, name, value)


def _fill_slots(value: Any, before: dict[str, Any]) -> None:
    for name, held in before.items():
        if held is _NOTHING:
            if hasattr(value, name):
                object.__delattr__(value, name)
        elif getattr(value, name, _NOTHING) is not held:
            object.__setattr__(value, name, held)
