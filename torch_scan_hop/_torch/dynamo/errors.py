"""The errors that Dynamo raises, and those that it lets through to the user."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    ObservedException,
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
    UserErrorType,
)

from torch_scan_hop._torch.capabilities import is_own_failure

# torch's, under our names
__all__ = ["UncapturedHigherOrderOpError", "Unsupported", "UserError"]

DYNAMO_ERRORS: tuple[type[BaseException], ...] = (
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    Unsupported,
    FailOnRecompileLimitHit,
)


class Turned(Unsupported):
    """A step leaves a flag, a text or a member of an enum for another one."""


def causes_of(error: BaseException | None) -> list[BaseException]:
    """Return ``error`` and its causes; Dynamo raises some errors anew without naming the cause."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def is_programs_own(error: BaseException) -> bool:
    """Return True if the traced code itself raises: Python would, too."""
    return any(isinstance(e, ObservedException) for e in causes_of(error))


def is_of_arithmetic(error: BaseException) -> bool:
    """Return True if the traced code raises since Python cannot compute something of numbers."""
    names = [f"Observed{n}Error" for n in ("ZeroDivisionError", "ValueError", "OverflowError")]
    return any(type(e).__name__ in names for e in causes_of(error))


def is_overflow(error: BaseException) -> bool:
    """Return True if torch raises for an int that does not fit into a tensor."""
    is_torchs = type(error).__name__ in ("TorchRuntimeError", "FakeTensorObservedException")
    return is_torchs and any(isinstance(e, OverflowError) for e in causes_of(error))


def is_data_dependent(error: BaseException) -> bool:
    """Return True if Dynamo gave up since Python wants to know the value of a tensor."""
    first_line = str(error).strip().split("\n", 1)[0].lower()
    words = r"data.dependent|dynamic shape|\.item\(\)|\.tolist\(\)|decides by the value"
    return re.search(words, first_line) is not None


def is_branch(error: BaseException) -> bool:
    """Return True if Dynamo gave up at a branch on the value of a tensor."""
    return any("data-dependent branching" in str(e).lower() for e in causes_of(error))


def is_position(error: BaseException) -> bool:
    """Return True if Dynamo gave up at an int that it has to know, as a position in a list is, or
    a number that is looked for among keys or made a text."""
    words = r"specialized integer|guard on data-dependent|Indexing list with non-scalar"
    words += (
        r"|unsupported index\(Tensor|number that steps make (among|to)|makes a text of a number"
    )
    words += r"|repeats as often"
    return any(re.search(words, str(e)) for e in causes_of(error))


def stack_of(error: BaseException) -> str:
    """Return where in the traced program Dynamo was when it gave up."""
    stacks = [getattr(e, "real_stack", None) for e in causes_of(error)]
    return "".join(next((s.format() for s in reversed(stacks) if s), ()))


def uncaptured(error: BaseException, words: str) -> UncapturedHigherOrderOpError:
    """Return an error that ends the trace, with ``words`` above Dynamo's text of ``error``.

    It is for programs that may not be broken into parts (2.9 would break one inside of a call of
    ours).
    """
    stack = getattr(error, "real_stack", None)
    return UncapturedHigherOrderOpError(f"{words}\n\nGot graph break/error:\n\n{error}", stack)


def compilers_error(error: BaseException) -> BaseException | None:
    """Return the error of the backend or of its toolchain that caused ``error``, if one did."""
    # Inductor's errors are not loaded if it did not run
    inductors = getattr(sys.modules.get("torch._inductor.exc"), "InductorError", ())
    if isinstance(error, BackendCompilerFailed) or isinstance(error, inductors):
        return getattr(error, "inner_exception", error)
    return None


@functools.cache
def _as_users_error(kind: type[Exception]) -> type[UserError]:
    bases: tuple[Any, ...] = (UserError, kind)
    made: Any = type(kind.__name__, bases, {"__module__": kind.__module__})
    return made


def users_error(kind: type[Exception], message: str) -> UserError:
    """Return an error of ``kind`` that Dynamo passes on, with the user's lines in its message."""
    made = _as_users_error(kind)  # type: ignore[arg-type]
    return made(UserErrorType.INVALID_INPUT, message)


@contextlib.contextmanager
def own_failures_are_unsupported() -> Iterator[None]:
    """Turn our own failures on an unexpected torch into Unsupported: the scan runs as a loop.

    So does one in which Python computes with ints that no tensor holds. And if a step branches
    before it computes anything, Dynamo's own text of that graph, which is no Python, hides why.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, IndentationError) and isinstance(error.__context__, Unsupported):
            raise error.__context__ from None
        if is_overflow(error):
            raise Unsupported(
                "the body computes with an int of more than 64 bits, which a number that steps "
                "carry, a scalar tensor, is not"
            ) from error
        if isinstance(error, DYNAMO_ERRORS) or not is_own_failure(error):
            raise
        raise Unsupported(
            f"torch_scan_hop: the capture failed on torch {torch.__version__} "
            f"({type(error).__name__}: {error}). Please report it"
        ) from error


def is_limit_hit(error: BaseException) -> bool:
    """Return True if Dynamo has as many captures of one function as it keeps."""
    return isinstance(error, FailOnRecompileLimitHit)
