"""When a scan runs as a plain Python loop: what is said, what is remembered, what is allowed.

A body that cannot be traced (it prints, branches on data, changes Python objects) means the same
as a loop, and costs what the loop costs. Whoever counts on one operator asks for an error::

    torch_scan_hop.fallback("error")            # from here on
    with torch_scan_hop.fallback("allow"):      # or for a while, silently
        ...
"""

from __future__ import annotations

import functools
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_scan_hop.errors import ScanValueError, hint_about
from torch_scan_hop.settings import Setting

MODES = ("error", "warn", "allow")
_mode = "warn"
PACKAGE = str(Path(__file__).parent)
#: where code is that a user did not write
NOT_USERS = (PACKAGE, str(Path(torch.__file__).parent))


class NotTraceableError(RuntimeError):
    """The body cannot be traced, and ``fallback("error")`` is in force."""


def _set_mode(mode: str) -> None:
    global _mode
    _mode = mode


class fallback(Setting):
    """Say what happens to a body that cannot be traced: a setting, or a context.

    Args:
        mode: ``"warn"`` (as it is at first) runs it as a plain Python loop and says why, once for
            each function; ``"allow"`` says nothing; ``"error"`` raises
            :class:`NotTraceableError` with the same text.

    Example:
        >>> with fallback("allow"):
        ...     fallback.mode()
        'allow'
        >>> fallback.mode()
        'warn'
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ScanValueError(f"fallback: mode must be one of {MODES}, but got {mode!r}.")
        super().__init__(functools.partial(_set_mode, _mode))
        _set_mode(mode)

    @staticmethod
    def mode() -> str:
        """The mode in force."""
        return _mode


# --- which function it is ---


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


# --- what is remembered ---

_PLAIN = (bool, int, str, type(None))
# so many different settings are tried; a counter among them would be another one at each call
MAX_SETTINGS = 4


# Why a function was not traced, by the plain values that it reads.
_Reasons = dict[Any, str]
_refusals: MutableMapping[types.CodeType, _Reasons] = WeakIdKeyDictionary()


def _plain_values(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim())
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, (type, types.ModuleType)):
        return tuple((k, v) for k, v in attributes.items() if isinstance(v, _PLAIN))
    return type(value)


def _setting(fn: Any) -> Any:
    """The plain values that ``fn`` reads: a flag that turns printing off makes it another body."""
    found: list[Any] = []
    while isinstance(fn, functools.partial):
        found += map(_plain_values, (*fn.args, *fn.keywords.values()))
        fn = fn.func
    if isinstance(fn, types.MethodType):
        found.append(_plain_values(fn.__self__))
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType):
        return (*found, _plain_values(fn))
    for cell in fn.__closure__ or ():
        try:
            found.append(_plain_values(cell.cell_contents))
        except ValueError:  # not assigned yet
            found.append(None)
    names = (name for name in fn.__code__.co_names if name in fn.__globals__)
    found += [v for v in (fn.__globals__[n] for n in names) if isinstance(v, _PLAIN)]
    return (*found, *map(_plain_values, fn.__defaults__ or ()))


def remembered_reason(fn: Any) -> str | None:
    """Why ``fn``, reading what it reads now, was not traced before; None if it may be tried."""
    reasons = _refusals.get(code_of(fn))
    if reasons is None:
        return None
    if len(reasons) >= MAX_SETTINGS:
        return next(reversed(reasons.values()))
    return reasons.get(_setting(fn))


def remember_reason(fn: Any, reason: str) -> None:
    _refusals.setdefault(code_of(fn), {})[_setting(fn)] = reason


def forget_reasons() -> None:
    """Try every function again."""
    _refusals.clear()
    _warned.clear()


# --- what is said ---

_warned: weakref.WeakSet[types.CodeType] = weakref.WeakSet()

_PREAMBLE = "Got graph break/error:"
_FIXES = (
    (
        "data-dependent size|Dynamic shape operator",
        "For h[mask] = new[mask] write h = torch.where(mask, new, h).",
    ),
    (r"print|logging|builtin.*skip", "Print after the scan, from ys, or run it under fallback."),
    (
        r"data.dependent|Could not (guard|extract)|\.item\(\)|unbacked",
        "Choose with torch.where, or keep the value a tensor.",
    ),
    (r"requires_grad_|autograd\.grad", "Use torch.func.grad in the body."),
)


def reason_of(error: BaseException) -> str:
    """Why Dynamo gave up: the line that says so, where in the user's code, and what helps.

    >>> reason_of(RuntimeError("It must be captured. Got graph break/error:\\n  x is odd\\n more"))
    'x is odd'
    """
    text = str(error).rpartition(_PREAMBLE)[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    explanation = [line for line in lines if line.startswith("Explanation:")]
    if explanation and len(explanation[0]) < 200:
        reason = f"{reason} ({explanation[0].removeprefix('Explanation:').strip()})"
    if ", at " not in reason:
        reason += users_line(str(error))
    fixes = [fix for pattern, fix in _FIXES if re.search(pattern, reason, re.IGNORECASE)]
    advice = [*fixes[:1], hint_about(error)]
    return " ".join([reason.rstrip(". ") + "." if any(advice) else reason, *advice]).strip()


#: where nothing better is known
GENERAL_FIX = "Move what cannot be traced out of the body, or write it with tensor operators."


def fix_in(reason: str) -> str:
    """What :func:`reason_of` advises at the end of a reason; "" if it advises nothing."""
    return next((fix for _, fix in _FIXES if reason.endswith(fix)), "")


def users_line(text: str) -> str:
    """Where and what is the user's last line among those of a traceback, as ``, at ...``.

    >>> users_line('  File "cell.py", line 3, in <lambda>\\n    return h + x\\n')
    ', at cell.py:3: return h + x'
    """
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n(?: {4,}(.*))?', text)
    users = [f for f in frames if not f[0].startswith(NOT_USERS)]
    return "" if not users else ", at {}:{}: {}".format(*users[-1])


def users_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """``trace`` without this package's frames, where it ends in somebody else's."""
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


def _stack_level() -> int:
    """The caller's frame, seen from the function that warns."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


def name_of(code: types.CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _warn(code: types.CodeType, text: str) -> None:
    if _mode != "allow":
        warnings.warn(f"torch_scan_hop: {name_of(code)} {text}", stacklevel=_stack_level())


def _warn_once(code: types.CodeType, text: str) -> None:
    if _mode != "allow" and code not in _warned:
        _warned.add(code)
        _warn(code, text)


def announce(combine_fn: Any, reason: str) -> None:
    """Say that a scan ran as a loop, once for each function."""
    code = code_of(combine_fn)
    _warn_once(code, f"could not be traced, so its scan ran as a plain Python loop: {reason}")


# Functions that Inductor could not compile: asked again, it would say the same, seconds later.
_not_compiled: MutableMapping[types.CodeType, bool] = WeakIdKeyDictionary()


def may_compile(combine_fn: Any) -> bool:
    """Whether no compiler has refused ``combine_fn`` so far."""
    return code_of(combine_fn) not in _not_compiled


def announce_not_compiled(combine_fn: Any, reason: str) -> None:
    """Say that ``compile=True`` had no effect, once for each function, and remember it."""
    code = code_of(combine_fn)
    _not_compiled[code] = True
    _warn(code, f"could not be compiled, so its scan runs as without compile=True: {reason}")


def refuse_if_not_allowed(combine_fn: Any, reason: str) -> None:
    """Raise, before the loop runs, where ``fallback("error")`` is in force."""
    if _mode != "error":
        return
    raise NotTraceableError(
        f"torch_scan_hop: {name_of(code_of(combine_fn))} cannot be traced, "
        f"and fallback('error') forbids to run it as a plain Python loop: {reason}"
    )


def warn_of_captures(body: Callable[[], types.CodeType | None], count: int, guard: str) -> None:
    """Say once that a body is captured anew at each call, and by which guard."""
    code = body()
    if code is not None:
        _warn_once(
            code,
            f"was captured anew at each of its last {count} calls, which is slow. What was "
            f"different the last time: {guard}. Make it a tensor, or pass it in xs, init or a "
            "closed-over tensor.",
        )
