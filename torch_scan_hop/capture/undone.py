"""A step that is run only to see what it returns: what it changes is put back.

That is what its function reaches: what it closes over, attributes of modules and other objects,
classes, items of containers, nonlocal and global variables, also those of imported files, tensors,
generators of random numbers. What it prints, writes to a file or takes from an iterator stays so.
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
#: what holds nothing at all; there may be millions of them
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
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


def _draws_again(value: Any) -> _Undo | None:
    """Return how ``value``, a generator of random numbers, comes to draw the same ones again."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    kind = (type(value).__module__.partition(".")[0], type(value).__name__)
    if kind == ("numpy", "RandomState"):
        return functools.partial(value.set_state, value.get_state())
    if kind == ("numpy", "Generator"):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None


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
        waiting += [v for v in inner if type(v) not in _ATOMS]
        if undo is not None:
            yield undo


def _look_at(value: Any) -> tuple[list[Any], _Undo | None]:
    """Return what ``value`` holds, and how to let it hold that again."""
    if isinstance(value, types.FunctionType):
        names = set() if _is_of_a_library(value.__module__) else names_in(value.__code__)
        spaces = _namespaces(value, names)
        all_named = [{name: held.get(name, _NOTHING) for name in names} for held in spaces]
        held = [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        held += [v for named in all_named for v in named.values()]
        return held, functools.partial(_fill_names, spaces, all_named)
    if isinstance(value, type):
        was = {} if _is_of_a_library(value.__module__) else dict(vars(value))
        return [*was.values(), *value.__bases__], functools.partial(_fill_class, value, was)
    inner = gc.get_referents(value)
    if isinstance(getattr(value, "__dict__", None), dict):
        inner.append(vars(value))
    if isinstance(value, types.CellType):
        return inner, functools.partial(_fill_cell, value, inner[:])
    if (undo := _draws_again(value)) is not None:
        return inner, undo
    if base := next((kind for kind in _CONTAINERS if isinstance(value, kind)), None):
        copied = _CONTAINERS[base][0](value)
        return inner, functools.partial(_fill_container, value, base, copied)
    is_array = (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")
    if is_array and value.flags.writeable:
        return inner, functools.partial(value.__setitem__, ..., value.copy())
    was = {slot: getattr(value, slot, _NOTHING) for slot in _slots(type(value))}
    return inner, functools.partial(_fill_slots, value, was) if was else None


def _namespaces(function: types.FunctionType, names: set[str]) -> list[dict[str, Any]]:
    """Return the global variables of ``function``, and those of files that it imports by name."""
    found = {id(function.__globals__): function.__globals__}
    waiting = [function.__globals__]
    while waiting:
        held = waiting.pop()
        for value in (held.get(name) for name in names):
            if isinstance(value, types.ModuleType) and not _is_of_a_library(value.__name__):
                if id(vars(value)) not in found:
                    found[id(vars(value))] = vars(value)
                    waiting.append(vars(value))
    return [*found.values()]


def _is_of_a_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _slots(kind: type) -> list[str]:
    written = (cls for cls in kind.__mro__ if "__slots__" in vars(cls))  # in Python, and not in C
    known = (vars(cls) for cls in written if not _is_of_a_library(cls.__module__))
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


def _fill_names(spaces: list[dict[str, Any]], all_named: list[dict[str, Any]]) -> None:
    for held, before in zip(spaces, all_named, strict=True):
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
