"""Eager execution: Dynamo captures a call of ``scan`` once, guarded, and replays it.

Guards make the cache sound: a closure or a default argument that changes is another
capture. Each function body gets an entry of its own, so that one program's scans do not
use up each other's recompilations.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.operators import prepare_xla_if_loaded, under_users_mode
from torch_scan_hop._torch.transforms import under_transform
from torch_scan_hop.errors import hint_about

Entry = Callable[..., Any]
Kind = tuple[bool, bool]
_entries: weakref.WeakKeyDictionary[types.CodeType, dict[Kind, Entry]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


def code_of(fn: Any) -> types.CodeType:
    """The code object that tells one body from another.

    >>> code_of(functools.partial(code_of)) is code_of.__code__
    True
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    if isinstance(fn, types.FunctionType):
        return fn.__code__
    forward = getattr(type(fn), "forward", None) or type(fn).__call__
    return getattr(forward, "__code__", code_of.__code__)


def explicit(fn: Any) -> Any:
    """``fn`` with what is bound to it as arguments of a partial, where Dynamo guards it.

    A bound method is a new object at each access, and the defaults of a function made anew
    (``lambda c, x, k=k: ...``) are read without a guard.

    >>> explicit(lambda c, x, k=3: c).keywords
    {'k': 3}
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    function: Any = fn
    while isinstance(function, (functools.partial, types.MethodType)):
        if isinstance(function, types.MethodType):
            function, args = function.__func__, (function.__self__, *args)
        else:
            keywords = {**function.keywords, **keywords}
            function, args = function.func, (*function.args, *args)
    if isinstance(function, types.FunctionType):
        keywords = {**_defaults(function, n_given=len(args) + 2), **keywords}
    if not args and not keywords:
        return fn
    return functools.partial(function, *args, **keywords)


def _defaults(function: types.FunctionType, n_given: int) -> dict[str, Any]:
    """Defaults of parameters that are not among the first ``n_given``."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    values = function.__defaults__ or ()
    first = len(names) - len(values)
    found = {
        name: values[k - first]
        for k, name in enumerate(names)
        if k >= max(first, n_given, code.co_posonlyargcount)
    }
    return {**found, **(function.__kwdefaults__ or {})}


def own_copy(fn: types.FunctionType) -> types.FunctionType:
    """``fn`` with a code object of its own: Dynamo keeps its cache on the code object."""
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


class NotCaptured(Exception):
    """The call must run as a plain Python loop; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def call_captured(entry: Any, combine_fn: Any, *args: Any) -> Any:
    """``entry(combine_fn, *args)``, captured by Dynamo; raises NotCaptured where it cannot be."""
    from torch_scan_hop._torch.dynamo import (
        DYNAMO_ERRORS,
        compile_for_capture,
        is_data_dependent,
    )

    prepare_xla_if_loaded()
    code = code_of(combine_fn)
    # functorch's wrappers do not know their sizes as symbols, and XLA compiles for fixed ones
    on_xla = _on_xla(args)
    static = under_transform() or on_xla
    # under a user's mode torch 2.9 captures nothing, and never looks at that entry again
    kind = (static, under_users_mode())
    entries = _entries.setdefault(code, {})
    if kind not in entries:
        entries[kind] = compile_for_capture(own_copy(entry), False if static else None, NotCaptured)
    try:
        return entries[kind](explicit(combine_fn), *args)
    except DYNAMO_ERRORS as error:
        if "limit" in type(error).__name__.lower():
            _entries.pop(code, None)  # full of captures of other shapes or closures: start anew
        if on_xla and is_data_dependent(error):
            # as a Python loop, each step would compile and run a program of its own
            from torch_scan_hop.xla.graph import reads_data

            raise reads_data(_first_line(error)) from error
        raise NotCaptured(f"{_first_line(error)} {hint_about(error)}".strip()) from error


def _on_xla(args: tuple[Any, ...]) -> bool:
    """As ``step.device_of``: one tensor tells."""
    if "torch_xla" not in sys.modules:
        return False
    for arg in args:
        for leaf in tree.leaves(arg):
            if isinstance(leaf, torch.Tensor):
                return leaf.device.type == "xla"
    return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def warn_not_captured(combine_fn: Any, reason: str) -> None:
    """Once for each function: it ran, as a Python loop."""
    code = code_of(combine_fn)
    if code in _warned:
        return
    _warned.add(code)
    warnings.warn(
        f"torch_scan_hop: {code.co_name} ({code.co_filename}:{code.co_firstlineno}) could not be "
        f"traced, so its scan ran as a plain Python loop: {reason}",
        stacklevel=3,
    )
