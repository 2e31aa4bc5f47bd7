"""Find the user's function behind a callable, and the lines and frames that are the user's own."""

from __future__ import annotations

import functools
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

PACKAGE = str(Path(__file__).parent.parent)
#: where code is that a user did not write
NOT_USERS = (PACKAGE, str(Path(torch.__file__).parent), "<eval_with_key>")


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
