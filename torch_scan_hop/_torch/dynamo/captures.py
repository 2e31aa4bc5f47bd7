"""Captures of one function: a call replays one that fits it, or makes a new one."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.backends.debugging import make_eager_backend_with_torch_function_modes
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import guard_failures
from torch.overrides import _len_torch_function_stack

from torch_scan_hop._torch.dynamo.contexts import (
    functorch_views,
    gradients_looked_for,
    hop_capture,
    more_captures,
    no_code_is_kept,
    no_logs_of_mistakes,
    not_fx_tracing,
    parameters_of_symbolic_size,
    under_tracer_modes,
    without_export_hooks,
    without_tracer_modes,
)

# Dynamo's error if the calling thread traces with FX. Until torch 2.14 it also comes if another
# thread does, and the lock is for that.
_NESTED_TRACE = "using FX to symbolically trace"

# so many captures in a row, without a call that one of them fitted, are reported
MANY_CAPTURES = 8


class CapturedFunction:
    """``fn`` captured by Dynamo, and run as captured or compiled by ``backend``.

    Torch's own "eager" runs it as captured, and is the only one that Dynamo accepts under
    functorch transforms. ``not_traced`` is what ``fn`` raises when it runs without Dynamo.
    ``report(count, guard)`` is called when ``count`` calls in a row needed a capture each.
    Unless ``floats_vary``, each value of a float that is closed over is a capture of its own.
    Captures are made within ``capturing()``.
    ``history`` has for each capture the guard that called for it.
    """

    def __init__(
        self,
        fn: types.FunctionType,
        dynamic: bool | None,
        not_traced: type[Exception],
        report: Callable[[int, str], None],
        backend: str = "eager",
        floats_vary: bool = True,
        capturing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.history: list[str] = []
        self._fn = fn
        self._dynamic = dynamic
        self._floats_vary = floats_vary
        self._capturing = capturing
        self._not_traced = not_traced
        self._report = report
        self._captures_in_a_row = 0
        self._run_known = torch._dynamo.run(fn)  # what is captured already; else it just calls fn
        with hop_capture():  # or torch.compile would do nothing in an export, now and later
            self._compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)

    def __call__(self, *args: Any) -> Any:
        may_be_known = not under_tracer_modes()
        if may_be_known:
            try:
                result = self._run_known(*args)
            except self._not_traced:
                pass
            except RuntimeError as error:
                if _NESTED_TRACE not in str(error):
                    raise
            else:
                self._captures_in_a_row = 0
                return result
        with _holding_the_lock() as had_to_wait:
            if had_to_wait and may_be_known:
                with contextlib.suppress(self._not_traced):
                    return self._run_known(*args)  # another thread has captured it
            n_failures = len(guard_failures.get(self._fn.__code__, ()))
            result = self._capture(args)
            self._record(_guard_that_failed(self._fn, n_failures))
        self._captures_in_a_row += 1
        if self._captures_in_a_row == MANY_CAPTURES:
            self._report(MANY_CAPTURES, _last_guard_that_failed(self._fn))
        return result

    def _record(self, guard: str) -> None:
        if guard or not self.history:
            self.history.append(guard)

    def _capture(self, args: tuple[Any, ...]) -> Any:
        with (
            no_code_is_kept(),
            no_logs_of_mistakes(),
            gradients_looked_for(),
            not_fx_tracing(),
            hop_capture(),
            more_captures(self._floats_vary),
            without_export_hooks(),
            functorch_views(),
            parameters_of_symbolic_size(),
            self._capturing(),
        ):
            if _len_torch_function_stack() == 0:
                return self._compiled(*args)
            with without_tracer_modes() as modes:
                if not modes or peek_interpreter_stack() is not None:
                    return self._compiled(*args)
                with_modes = make_eager_backend_with_torch_function_modes(modes)
                again = torch.compile(
                    self._fn, backend=with_modes, fullgraph=True, dynamic=self._dynamic
                )
                return again(*args)


@contextlib.contextmanager
def _holding_the_lock() -> Iterator[bool]:
    """Hold the lock of captures, and say whether this thread had to wait for it.

    Tracers patch torch's modules while they run, and guards look at those.
    """
    had_to_wait = not compile_lock.acquire(blocking=False)
    if had_to_wait:
        compile_lock.acquire()
    try:
        yield had_to_wait
    finally:
        compile_lock.release()


def _last_guard_that_failed(fn: types.FunctionType) -> str:
    """Return the condition of that guard, without comments, the user's stack and captures' numbers.

    torch 2.9 has the conditions that failed on lines of their own, of which the last counts.
    """
    failures = guard_failures.get(fn.__code__) or ["an unknown guard"]
    lines = str(failures[-1]).strip().partition("\nUser stack trace:")[0].splitlines()
    condition = re.sub(r"^\d+/\d+: ", "", lines[-1]).partition("  # ")[0].strip()
    return re.sub(r"[GL]\['__import_\w+?'\]\.", "", condition)


def _guard_that_failed(fn: types.FunctionType, position: int) -> str:
    """Return the first guard that failed after ``position`` others: that of the last capture."""
    failures = guard_failures.get(fn.__code__, [])[position:]
    return str(failures[0]).strip() if failures else ""
