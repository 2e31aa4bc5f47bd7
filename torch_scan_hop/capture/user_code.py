"""Find the user's function behind a callable, and the lines and frames that are the user's own."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

PACKAGE = str(Path(__file__).parent.parent)
#: where code is that a user did not write
NOT_USERS = (
    PACKAGE,
    str(Path(torch.__file__).parent),
    "<eval_with_key>",
    functools.__file__,
    contextlib.__file__,
    copy.__file__,
)


def code_of(fn: Any) -> types.CodeType:
    """Return the code object that tells one body from another.

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


#: names by which Python tells a tensor from its copy
_OF_IDENTITY = {"is_leaf", "grad", "grad_fn", "retains_grad", "isinstance", "type", "id"}


def asks_for_identity(fn: Any, depth: int = 4) -> bool:
    """Return True if ``fn``, or a function that it names, may tell a tensor from its copy.

    >>> h0 = torch.zeros(2)
    >>> asks_for_identity(lambda h, x: (h * 2 if h is h0 else h, x))
    True
    >>> asks_for_identity(lambda h, x: (x if h is None else h + x, x))
    False
    """
    return depth > 0 and any(
        _asks(function.__code__)
        or any(asks_for_identity(v, depth - 1) for v in _named_in(function))
        for function in _functions_of(fn)
    )


def _functions_of(fn: Any) -> list[types.FunctionType]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.FunctionType):
        return [fn]
    kind = type(fn.__self__ if isinstance(fn, types.MethodType) else fn)
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return []
    return [v for v in vars(kind).values() if isinstance(v, types.FunctionType)]


def _named_in(function: types.FunctionType) -> list[Any]:
    code, cells = function.__code__, function.__closure__ or ()
    filled = (c.cell_contents for c in cells if c != types.CellType())
    named = (function.__globals__.get(name) for name in names_in(code))
    not_code = (type, types.ModuleType, torch.Tensor)
    return [v for v in itertools.chain(filled, named) if not isinstance(v, not_code)]


@functools.lru_cache(maxsize=1000)
def names_in(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *itertools.chain(*map(names_in, inner))}


@functools.lru_cache(maxsize=1000)
def _asks(code: types.CodeType) -> bool:
    if not _OF_IDENTITY.isdisjoint(code.co_names):
        return True
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before != "None":
            return True
        before = instruction.argrepr
    return any(_asks(c) for c in code.co_consts if isinstance(c, types.CodeType))


def users_line(text: str) -> str:
    """Return the last line of a traceback that is the user's, as ``, at file:line: code``.

    >>> users_line('  File "cell.py", line 3, in <lambda>\\n    return h + x\\n')
    ', at cell.py:3: return h + x'
    """
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n(?: {4,}(.*))?', text)
    users = [f for f in frames if not f[0].startswith(NOT_USERS)]
    return "" if not users else ", at {}:{}: {}".format(*users[-1])


def users_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return ``trace`` without this package's frames, if it ends in somebody else's."""
    frames: list[types.TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = [f for f in frames if not f.tb_frame.f_code.co_filename.startswith(PACKAGE)]
    if not frames or not kept or kept[-1] is not frames[-1]:
        return frames[0] if frames else None
    for frame in reversed(kept):
        trace = types.TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace


def users_stack_level() -> int:
    """Return the frame of the user's call, counted as ``warnings.warn`` does."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


def name_of(code: types.CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
