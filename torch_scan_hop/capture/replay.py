"""Eager execution: Dynamo captures a call of ``scan`` once, guarded, and later calls replay it.

Guards make that sound: if a closure or a default argument changes, there is another capture. Each
function body has an entry of its own, so that one program's scans do not use up each other's
recompilations.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import types
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.capabilities import find_out_whether_captures, why_off
from torch_scan_hop._torch.dynamo.loading import load_dynamo
from torch_scan_hop._torch.function_modes import floats_are_on_default_device
from torch_scan_hop._torch.operators import under_tracer, under_users_mode
from torch_scan_hop._torch.transforms import (
    StopRecomputation,
    in_plain_eager,
    put_back_on_error,
    under_nothing,
    under_transform,
)
from torch_scan_hop.body.per_object import PerObject
from torch_scan_hop.capture.reasons import NOT_CAPTURED, Reason, reason_of
from torch_scan_hop.capture.told import a_loop_may_run
from torch_scan_hop.capture.user_code import code_of
from torch_scan_hop.fallback import announce_not_compiled, may_compile, warn_of_captures
from torch_scan_hop.xla.if_loaded import prepare_xla_if_loaded

Entry = Callable[..., Any]
CaptureKind = tuple[bool, bool, bool, bool]
_entries = PerObject[dict[CaptureKind, Entry]]()  # by code object


def explicit(fn: Any) -> Any:
    """Return ``fn`` as a partial whose bound arguments Dynamo can see, and so guards.

    A bound method is a new object at each access. The defaults of a function that is made anew
    (``lambda c, x, k=k: ...``) are read without a guard. As arguments of a partial, both are
    guarded.

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
    if isinstance(function, types.FunctionType) and (
        function.__defaults__ or function.__kwdefaults__
    ):
        keywords = {**_defaults(function, n_given=len(args) + 2), **keywords}
    if not args and not keywords:
        return fn
    return functools.partial(function, *args, **keywords)


def _defaults(function: types.FunctionType, n_given: int) -> dict[str, Any]:
    """Return the defaults of parameters that are not among the first ``n_given``."""
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


def own_copy(
    fn: types.FunctionType, body: types.CodeType, name: str | None = None
) -> types.FunctionType:
    """Return ``fn`` with a code object of its own, because Dynamo keeps its cache on the code
    object.

    It has a name of its own, too. Dynamo remembers by name and line which sizes have varied, and
    those of one body say nothing about another.
    """
    where = f"{body.co_name}_{body.co_firstlineno}_{zlib.crc32(body.co_filename.encode()):x}"
    name = re.sub(r"\W", "_", f"{name or fn.__name__}_of_{where}")
    copy = types.FunctionType(
        fn.__code__.replace(co_name=name),
        fn.__globals__,
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


class NotCaptured(Exception):
    """Raised if the call must run as a plain Python loop; ``reason`` says why.

    ``is_lasting``: the same call would end the same way. ``is_told``: a warning about all calls was
    given.
    """

    def __init__(self, reason: str, is_lasting: bool = True, is_told: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_lasting = is_lasting and not is_told
        self.is_told = is_told


class _RanUntraced(Exception):
    """Raised if an entry begins to run as Python: no capture fits these arguments, or Dynamo is
    off.

    No call of Dynamo's replays a capture if one fits and says so if none does. Instead, an entry
    without a capture runs as it is, and raises this before it has done anything.
    """


def check_captured() -> None:
    """Raise in code that :func:`call_captured` captures, if it runs as Python."""
    if not torch.compiler.is_dynamo_compiling():
        raise _RanUntraced


def _load_dynamo() -> None:
    load_dynamo()
    if not find_out_whether_captures():
        raise NotCaptured(f"capture is switched off: {why_off('capture')}", is_told=True)


def call_captured(entry: Any, combine_fn: Any, *args: Any, compiled: bool = False) -> Any:
    """Run ``entry(combine_fn, *args)`` as Dynamo captured it; raise NotCaptured where it cannot be.

    With ``compiled``, Inductor compiles what is captured, wherever plain tensors run in plain eager
    mode. A transform, a mode or a tracer around the call must see the scan itself.

    Whatever goes wrong on the way, in Dynamo, in torch or here, the caller's program must not fail
    for it: the loop runs it, or raises the program's own error.
    """
    _load_dynamo()
    from torch_scan_hop._torch.dynamo.errors import compilers_error, is_data_dependent, is_limit_hit

    on_xla = "torch_xla" in sys.modules and _on_xla(args)
    compiled = compiled and not on_xla and in_plain_eager() and may_compile(combine_fn)

    def call() -> Any:
        with put_back_on_error():
            return _entry_of(entry, combine_fn, on_xla, compiled)(explicit(combine_fn), *args)

    try:
        try:
            return call()
        except Exception as error:
            if not is_limit_hit(error):
                raise
            # it is full of other shapes or closures: start anew
            _entries.pop(id(code_of(combine_fn)), None)
        return call()
    except _RanUntraced:
        raise NotCaptured("Dynamo is disabled", is_lasting=False) from None
    except StopRecomputation:
        raise  # no error: a checkpoint around the scan has what it wanted
    except Exception as error:
        failure = compilers_error(error)
        if compiled and failure is not None:
            announce_not_compiled(combine_fn, reason_of(failure))
            return call_captured(entry, combine_fn, *args)
        text = str(error)
        if on_xla and text.startswith("scan: ") and not text.startswith(NOT_CAPTURED):
            raise  # what XLA cannot have is said so: a loop would be a program for each step
        reason = _reason_of(error)
        if on_xla and is_data_dependent(error):
            # as a Python loop, each step would compile and run a program of its own
            from torch_scan_hop.xla.graph import reads_data

            raise reads_data(reason) from error
        raise NotCaptured(reason) from error


def _reason_of(error: Exception) -> Reason:
    from torch_scan_hop._torch.dynamo.errors import stack_of

    return reason_of(error, stack_of(error))


def look_at_call(entry: Any, combine_fn: Any, *args: Any) -> Any:
    """Return what ``capture_graph`` finds in ``entry(combine_fn, *args)``; raise NotCaptured if it
    cannot.

    Nothing is run, and what is captured for calls stays as it is: this is for ``explain``.
    """
    _load_dynamo()
    from torch_scan_hop._torch.dynamo.graph_of_call import capture_graph

    looked_at = own_copy(entry, code_of(combine_fn), "look_at")
    try:
        with put_back_on_error(), a_loop_may_run(MOST_PRODUCTS_IN_EAGER):
            return capture_graph(looked_at, (explicit(combine_fn), *args), names_of(combine_fn))
    except _RanUntraced:
        raise NotCaptured("Dynamo is disabled", is_lasting=False) from None
    except Exception as error:
        raise NotCaptured(_reason_of(error)) from error


def names_of(fn: Any) -> tuple[str, ...]:
    """Return the variables that ``fn`` closes over, in the order of its cells."""
    return getattr(code_of(fn), "co_freevars", ())


def closure_of(fn: Any) -> dict[str, Any]:
    """Return by name what ``fn`` closes over."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    cells = getattr(getattr(fn, "__func__", fn), "__closure__", None) or ()
    pairs = zip(names_of(fn), cells, strict=False)
    return {name: cell.cell_contents for name, cell in pairs if cell != types.CellType()}


def history_of(combine_fn: Any) -> list[str]:
    """Return for each capture of ``combine_fn`` the guard that called for it; "" for the first.

    >>> history_of(lambda c, x: (c, x))
    []
    """
    entries = _entries.get(id(code_of(combine_fn)), {})
    return [guard for entry in entries.values() for guard in getattr(entry, "history", ())]


def _entry_of(entry: Any, combine_fn: Any, on_xla: bool, compiled: bool) -> Entry:
    from torch_scan_hop._torch.dynamo.captures import CapturedFunction

    static, _, traced, _ = kind = _kind_of_capture(on_xla, compiled)
    code = code_of(combine_fn)
    entries = _entries.get(id(code))
    if entries is None:
        entries = _entries.keep(code, {})
    if kind not in entries:
        # an entry that held its key would keep both, and all that was captured, for ever
        report = functools.partial(warn_of_captures, weakref.ref(code))
        entries[kind] = CapturedFunction(
            own_copy(entry, code),
            False if static else None,
            _RanUntraced,
            report,
            "inductor" if compiled else "eager",
            floats_vary=not traced,
            capturing=functools.partial(a_loop_may_run, _most_products(static or traced, compiled)),
        )
    return entries[kind]


# Multiplications in a step, for rows of which a mask selects some. With more, a loop that makes
# them of those alone was faster (a GRU with 1 in 10 rows, AMD EPYC).
MOST_PRODUCTS_IN_EAGER, MOST_PRODUCTS_COMPILED = 2**17, 2**20


def _most_products(needs_capture: bool, compiled: bool) -> float:
    if needs_capture:
        return math.inf  # there is no loop that could run instead, or a slow one
    return MOST_PRODUCTS_COMPILED if compiled else MOST_PRODUCTS_IN_EAGER


def _kind_of_capture(on_xla: bool, compiled: bool) -> CaptureKind:
    if under_nothing():
        return on_xla, False, False, compiled
    # functorch's wrappers do not know their sizes as symbols, and XLA compiles for fixed ones
    static = under_transform() or on_xla
    # in a trace a number is a constant: one that varies would be a tensor of it, and a read of that
    traced = under_tracer() or floats_are_on_default_device()
    # under a user's mode torch 2.9 captures nothing, and never looks at that entry again
    return static, under_users_mode(), traced, compiled


def _on_xla(args: tuple[Any, ...]) -> bool:
    """Return True if the first tensor among ``args`` is on XLA, as ``step.device_of`` decides.

    Anyone may have imported torch_xla; a trace is prepared for its tensors.
    """
    prepare_xla_if_loaded()
    for arg in args:
        for leaf in tree.leaves(arg):
            if isinstance(leaf, torch.Tensor):
                return leaf.device.type == "xla"
    return False
