"""Two attributes compared: plain values, containers, functions, tensors, objects."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from torch_scan_hop._torch.modules import has_values, values_at_hand
from torch_scan_hop.errors import describe

_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum),
)
_NAMED = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)
_SHARE = "Give all layers one and the same object, or its class an __eq__."
_REGISTER = "Register it as a parameter or a buffer, or give all layers one and the same tensor."


@dataclasses.dataclass(eq=False)
class Difference(Exception):
    """``where``: a path from the layer on. ``got`` is the layer's, ``expected`` the first's."""

    where: str
    got: str
    expected: str
    fix: str = ""


class Comparison:
    """Of values of two layers; what refers to a part of the one must refer to its twin.

    ``twins`` has the twin of each submodule of the first layer, and ``registered`` the parameters
    and buffers of both, which are stacked: they are nobody's to hold otherwise.
    """

    def __init__(
        self, twins: Iterable[tuple[nn.Module, nn.Module]], registered: Iterable[torch.Tensor]
    ) -> None:
        self._twins = {id(mine): theirs for mine, theirs in twins}
        self._registered = {id(tensor) for tensor in registered}
        # pairs that are being compared, or were: with the values, whose ids nobody takes meanwhile
        self._met: dict[tuple[int, int], tuple[Any, Any]] = {}

    def check(self, where: str, mine: Any, theirs: Any) -> None:
        """Raise the first :class:`Difference`."""
        if id(mine) in self._twins:
            if self._twins[id(mine)] is not theirs:
                raise Difference(where, "is another module", "is a module of that layer")
            return
        pair = id(mine), id(theirs)
        if mine is theirs or pair in self._met:
            return
        if type(mine) is not type(theirs):
            raise Difference(where, f"is {_shown(theirs)}", f"is {_shown(mine)}")
        self._met[pair] = mine, theirs
        if isinstance(mine, torch.Tensor):
            self._check_tensors(where, mine, theirs)
        elif isinstance(mine, (float, complex)):
            # as text: a nan is the nan that it was, and 0.0 is not -0.0
            _check(repr(mine) == repr(theirs), where, mine, theirs)
        elif isinstance(mine, (*_PLAIN, set, frozenset)):
            _check(mine == theirs, where, mine, theirs)
        elif (parts := _parts(mine, theirs)) is not None:
            self._check_parts(where, mine, theirs, parts)
        else:
            self._check_objects(where, mine, theirs)

    def _check_parts(self, where: str, mine: Any, theirs: Any, parts: Parts) -> None:
        _check(parts is not False, where, mine, theirs)
        for name, one, other in parts or ():
            self.check(where + name, one, other)

    def _check_tensors(self, where: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if describe(mine) != describe(theirs) or mine.device != theirs.device:
            one, other = (f"is {describe(t)} on {t.device}" for t in (mine, theirs))
            raise Difference(where, other, one)
        trained = mine.requires_grad or theirs.requires_grad
        if trained or {id(mine), id(theirs)} & self._registered:
            one = "is a tensor that is not stacked with the parameters and buffers"
            raise Difference(where, "is another tensor", one, _REGISTER)
        if mine.is_meta:
            return
        if not (has_values(mine) and has_values(theirs)):
            one = "is a tensor whose values are not known here"
            raise Difference(where, "is another tensor", one, _REGISTER)
        with values_at_hand():
            if mine.layout == theirs.layout and _same_bits(mine, theirs):
                return
            one, other = (f"is {_shown(tensor)}" for tensor in (mine, theirs))
        if one == other:
            one, other = "is a tensor", "has other values"
        raise Difference(where, other, one, _REGISTER)

    def _check_objects(self, where: str, mine: Any, theirs: Any) -> None:
        """By the ``__eq__`` of their class, or else by their attributes, if that is all of them."""
        if type(mine).__eq__ is not object.__eq__:
            alike = _asked(mine, theirs)
            if alike:
                return
            # the __eq__ of a dataclass knows no more than its fields do, which say where
            _check(alike is None or dataclasses.is_dataclass(mine), where, mine, theirs)
        state, other = _state(mine), _state(theirs)
        if state is None or other is None:
            kind = f"is {_shown(mine)}"
            raise Difference(where, "is another, which cannot be shown to be equal", kind, _SHARE)
        self._check_parts(where, mine, theirs, _of_mappings(state, other, ".{}"))


def _check(alike: bool, where: str, mine: Any, theirs: Any) -> None:
    if alike:
        return
    one, other = f"is {_shown(mine)}", f"is {_shown(theirs)}"
    if one == other:
        raise Difference(where, "is another one", one, _SHARE)
    raise Difference(where, other, one)


def _shown(value: Any) -> str:
    """For a message: text that does not depend on where the object is in memory."""
    if isinstance(value, torch.Tensor):
        known = value.numel() == 1 and not value.is_meta and has_values(value)
        return f"{describe(value)} with the value {value.item()!r}" if known else describe(value)
    if isinstance(value, (*_PLAIN, tuple, list, dict, set, frozenset)):
        text = repr(value)
        if len(text) <= 80 and " at 0x" not in text:
            return text
    name = getattr(value, "__qualname__", "")
    return f"the {type(value).__name__} {name}" if name else f"a {type(value).__name__}"


def _same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """``torch.equal``, for which a nan is not the nan that it was."""
    if torch.equal(mine, theirs):
        return True
    floating = mine.is_floating_point() or mine.is_complex()
    return floating and bool(torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True))


#: what two values consist of, side by side; False if that differs
Parts = list[tuple[str, Any, Any]] | Literal[False]


def _parts(mine: Any, theirs: Any) -> Parts | None:
    """None for other objects."""
    if isinstance(mine, (list, tuple, deque)):
        if len(mine) != len(theirs):
            return False
        items = [(f"[{k}]", *pair) for k, pair in enumerate(zip(mine, theirs, strict=True))]
        return [*items, *_of_subclass(mine, theirs)]
    if isinstance(mine, (dict, types.MappingProxyType)):
        one, other = (getattr(value, "default_factory", None) for value in (mine, theirs))
        entries = _of_mappings(mine, theirs, "[{!r}]")
        return entries is not False and [("", one, other), *entries, *_of_subclass(mine, theirs)]
    if isinstance(mine, types.FunctionType):
        return _of_functions(mine, theirs)
    if isinstance(mine, types.MethodType):
        return [("", mine.__func__, theirs.__func__), (".__self__", mine.__self__, theirs.__self__)]
    if isinstance(mine, functools.partial):
        names = ("func", "args", "keywords", "__dict__")
        return [(f".{n}", getattr(mine, n), getattr(theirs, n)) for n in names]
    if isinstance(mine, weakref.ref):
        return [("", mine(), theirs())]
    if isinstance(mine, _NAMED):
        owner = getattr(mine, "__self__", None)
        if isinstance(mine, types.BuiltinFunctionType) and owner is not None:
            same = mine.__name__ == theirs.__name__
            return same and [(".__self__", owner, theirs.__self__)]
        return [] if mine == theirs else False
    if type(mine).__module__ == "numpy" and hasattr(mine, "tobytes") and not mine.dtype.hasobject:
        same = (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        return [] if same and mine.tobytes() == theirs.tobytes() else False
    return None


def _of_functions(mine: types.FunctionType, theirs: types.FunctionType) -> Parts:
    """Made by one line of code, with the same in their closures and defaults."""
    if mine.__code__ is not theirs.__code__ or mine.__globals__ is not theirs.__globals__:
        return False
    parts = [(f".{n}", getattr(mine, n), getattr(theirs, n)) for n in _OF_A_FUNCTION]
    cells = [[_content(cell) for cell in f.__closure__ or ()] for f in (mine, theirs)]
    names = mine.__code__.co_freevars
    return parts + [(f" ({n})", *pair) for n, *pair in zip(names, *cells, strict=True)]


_OF_A_FUNCTION = ("__defaults__", "__kwdefaults__", "__dict__")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later
        return types.CellType


def _of_mappings(mine: Mapping[Any, Any], theirs: Mapping[Any, Any], name: str) -> Parts:
    """In one order, too: a loop over them may depend on it."""
    if list(mine) != list(theirs):
        return False
    return [(name.format(key), mine[key], theirs[key]) for key in mine]


def _of_subclass(mine: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """A list may have attributes, if its class is the user's."""
    one, other = (getattr(value, "__dict__", {}) for value in (mine, theirs))
    return [("", one, other)] if one or other else []


def _asked(mine: Any, theirs: Any) -> bool | None:
    """What ``==`` says; None if that is neither True nor False, or fails (tensors in a field)."""
    try:
        answer = mine == theirs
    except Exception:
        return None
    return answer if isinstance(answer, bool) else None


def _state(value: Any) -> dict[str, Any] | None:
    """All attributes of an object; None if it is more than those: a file, a lock, a generator."""
    kinds = type(value).__mro__
    declared = (vars(kind).get("__slots__", ()) for kind in kinds)
    slots = [n for given in declared for n in ([given] if isinstance(given, str) else given)]
    words = (type(value).__basicsize__ - object.__basicsize__) // 8
    own = [n for n in slots if n not in ("__dict__", "__weakref__")]
    if words > len(own) + 2 or not (own or hasattr(value, "__dict__")):
        return None
    found = dict(getattr(value, "__dict__", {}))
    return found | {n: getattr(value, n) for n in own if hasattr(value, n)}
