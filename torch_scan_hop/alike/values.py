"""Compare two attributes: plain values, containers, functions, tensors, objects."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_scan_hop._torch.modules import has_values, values_at_hand
from torch_scan_hop.errors import describe

_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum),
)
_BY_EQUALITY = (*_PLAIN, set, frozenset, type, types.ModuleType, types.CodeType)
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
    """Compares values of two layers; what refers to a part of the one must refer to its twin.

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
            return
        parts, others = _parts(mine), _parts(theirs)
        if parts is None or others is None:
            equal = _are_equal(mine, theirs)
            if equal:
                return
            # the __eq__ of a dataclass knows no more than its fields do, which say where
            _check(equal is None or dataclasses.is_dataclass(mine), where, mine, theirs)
            parts, others = _attributes(mine), _attributes(theirs)
        if parts is None or others is None:
            kind = f"is {_shown(mine)}"
            raise Difference(where, "is another, which cannot be shown to be equal", kind, _SHARE)
        keys, other_keys = ([key for key, *_ in found] for found in (parts, others))
        _check(keys == other_keys, where, mine, theirs)
        for (_, name, one), (_, _, other) in zip(parts, others, strict=True):
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


def _check(alike: bool, where: str, mine: Any, theirs: Any) -> None:
    if alike:
        return
    one, other = f"is {_shown(mine)}", f"is {_shown(theirs)}"
    if one == other:
        raise Difference(where, "is another one", one, _SHARE)
    raise Difference(where, other, one)


def _shown(value: Any) -> str:
    """Return text for a message, which does not depend on where the object is in memory."""
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
    """Return True if both are equal; to ``torch.equal`` a nan is not the nan that it was."""
    if torch.equal(mine, theirs):
        return True
    floating = mine.is_floating_point() or mine.is_complex()
    return floating and bool(torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True))


#: what a value consists of: a key that its twin has, a path, and what is compared in its turn
Parts = list[tuple[Any, str, Any]]


def _parts(value: Any) -> Parts | None:
    """Return None for an object of any other kind."""
    if isinstance(value, (float, complex)):
        return [(repr(value), "", None)]  # as text: a nan is a nan, and 0.0 is not -0.0
    if isinstance(value, _BY_EQUALITY):
        return [(value, "", None)]
    if (
        type(value).__module__ == "numpy"
        and hasattr(value, "tobytes")
        and not value.dtype.hasobject
    ):
        return [((value.dtype, value.shape, value.tobytes()), "", None)]
    if isinstance(value, (list, tuple, deque)):
        return [*((k, f"[{k}]", v) for k, v in enumerate(value)), *_of_subclass(value)]
    if isinstance(value, (dict, types.MappingProxyType)):
        # in one order, too: a loop over them may depend on it
        return [*((k, f"[{k!r}]", v) for k, v in value.items()), *_of_subclass(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        of_cells = [(name, f" ({name})", _content(cell)) for name, cell in cells]
        made_by = id(value.__code__), id(value.__globals__)
        named = _named(value, "__defaults__", "__kwdefaults__", "__dict__")
        return [(made_by, "", None), *named, *of_cells]
    if isinstance(value, types.MethodType):
        return [("", "", value.__func__), *_named(value, "__self__")]
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        return [(value if owner is None else value.__name__, ".__self__", owner)]
    if isinstance(value, functools.partial):
        return _named(value, "func", "args", "keywords", "__dict__")
    return [("", "", value())] if isinstance(value, weakref.ref) else None


def _named(value: Any, *names: str) -> Parts:
    return [(name, f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later
        return types.CellType


def _of_subclass(value: Any) -> Parts:
    """Return what else it has: a list may have attributes, if its class is the user's."""
    names = ("default_factory", "__dict__")
    return [(name, "", getattr(value, name)) for name in names if hasattr(value, name)]


def _are_equal(mine: Any, theirs: Any) -> bool | None:
    """Return what the class's ``__eq__`` says; None if there is none, or if it fails (tensors in a
    field) or answers something else than True and False."""
    if type(mine).__eq__ is object.__eq__:
        return None
    try:
        answer = mine == theirs
    except Exception:
        return None
    return answer if isinstance(answer, bool) else None


def _attributes(value: Any) -> Parts | None:
    """Return all attributes; None for what is more than those: a file, a lock, a generator."""
    declared = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    slots = [n for given in declared for n in ([given] if isinstance(given, str) else given)]
    words = (type(value).__basicsize__ - object.__basicsize__) // 8
    own = [n for n in slots if n not in ("__dict__", "__weakref__")]
    if words > len(own) + 2 or not (own or hasattr(value, "__dict__")):
        return None
    stored = getattr(value, "__dict__", {}).items()
    return [*((name, f".{name}", part) for name, part in stored), *_named(value, *own)]
