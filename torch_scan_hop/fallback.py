"""Rules for scans that run as a plain Python loop: if they may, and what is said of it.

A body that cannot be traced (it prints, branches on data, changes Python objects) means the same
as a loop, and costs what the loop costs. Whoever counts on one operator asks for an error::

    torch_scan_hop.fallback("error")            # from here on
    with torch_scan_hop.fallback("allow"):      # or for a while, silently
        ...
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch_scan_hop.body.per_object import PerObject
from torch_scan_hop.capture.reasons import callees_of, forget_refusals
from torch_scan_hop.capture.user_code import code_of, name_of, users_stack_level
from torch_scan_hop.errors import ScanValueError
from torch_scan_hop.settings import Setting

MODES = ("error", "warn", "allow")
_mode = "warn"


class NotTraceableError(RuntimeError):
    """The body cannot be traced, and ``fallback("error")`` is in force."""


class NotLoweredError(NotImplementedError):
    """The body uses operators that torch_xla cannot lower to XLA, but runs on the CPU."""


def _set_mode(mode: str) -> None:
    global _mode
    _mode = mode


class fallback(Setting):
    """Say what happens to a body that cannot be traced: a setting, or a context.

    Args:
        mode: ``"warn"`` (as it is at first) runs it as a plain Python loop and says why, once for
            each function; ``"allow"`` says nothing; ``"error"`` raises
            :class:`NotTraceableError` with the same text.

    On XLA it also decides about a body with operators that torch_xla runs on the CPU. ``"warn"``
    runs it step by step with a warning, ``"allow"`` without one, and ``"error"`` raises
    ``NotImplementedError``.

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
        super().__init__(_set_mode, _mode, mode)

    @staticmethod
    def mode() -> str:
        """Return the mode in force."""
        return _mode


def forget_reasons() -> None:
    """Try every function again."""
    forget_refusals()
    _warned.clear()
    _said_once.clear()


# --- what is said ---

# The warnings given about each function, which may have a few reasons in one program.
_warned: MutableMapping[types.CodeType, set[str]] = weakref.WeakKeyDictionary()
MAX_WARNINGS = 4


def _warn(code: types.CodeType, text: str) -> None:
    if _mode != "allow":
        warnings.warn(f"torch_scan_hop: {name_of(code)} {text}", stacklevel=users_stack_level())


def _warn_once(code: types.CodeType, about: str, text: str) -> None:
    if _mode == "allow":
        return
    said = _warned.setdefault(code, set())
    if about not in said and len(said) < MAX_WARNINGS:
        said.add(about)
        _warn(code, text)


def announce(combine_fn: Any, reason: str) -> None:
    """Say that a scan ran as a loop, once for each function and reason."""
    code = code_of(combine_fn)
    text = f"could not be traced, so its scan ran as a plain Python loop: {reason}"
    _warn_once(code, reason, text)


# Functions that Inductor could not compile: asked again, it would say the same, seconds later.
_not_compiled = PerObject[set[Any]]()


def may_compile(combine_fn: Any) -> bool:
    """Return True if no compiler has refused ``combine_fn`` so far."""
    refused = _not_compiled.get(id(code_of(combine_fn)))
    return not refused or callees_of(combine_fn) not in refused


def announce_not_compiled(combine_fn: Any, reason: str) -> None:
    """Say that ``compile=True`` had no effect, once for each function, and remember it."""
    code = code_of(combine_fn)
    _not_compiled.kept_or(code, set()).add(callees_of(combine_fn))
    _warn(code, f"could not be compiled, so its scan runs as without compile=True: {reason}")


_said_once: set[str] = set()


def _say_once(text: str) -> None:
    """Warn of what lowers a scan: it does not know the user's function, to say it once for each."""
    if _mode != "allow" and text not in _said_once:
        _said_once.add(text)
        warnings.warn(f"torch_scan_hop: {text}", stacklevel=users_stack_level())


def announce_stepwise(reason: str) -> None:
    """Warn that a scan on XLA runs step by step; once for each reason."""
    if _mode == "error":
        raise NotLoweredError(reason)
    _say_once(f"a scan on XLA runs step by step, and waits for each. {reason}")


def announce_in_turn(reason: str) -> None:
    """Say that ranks wait for one another where xs are sharded over time, once for each reason."""
    _say_once(
        "xs are sharded over time, and the steps of this scan do not compose, so that ranks run "
        f"one after another, each from the last one's carry: {reason}."
    )


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
    if guard.startswith("schedule."):
        advice = "Each value of reverse=, unroll= and checkpoint= is captured once: use a few."
    else:
        advice = "Make it a tensor, or pass it in xs, init or a closed-over tensor."
    if code is not None and code not in _warned:
        _warn_once(
            code,
            "captures",
            f"was captured anew at each of its last {count} calls, which is slow. What was "
            f"different the last time: {guard}. {advice}",
        )
