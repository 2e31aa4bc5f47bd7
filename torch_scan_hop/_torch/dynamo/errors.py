"""What Dynamo raises, and what it lets through to the user."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
    UserErrorType,
)
from torch._inductor.exc import InductorError

__all__ = [
    "DYNAMO_ERRORS",
    "Unsupported",
    "compilers_error",
    "is_data_dependent",
    "is_limit_hit",
    "users_error",
]

DYNAMO_ERRORS: tuple[type[BaseException], ...] = (
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    Unsupported,
    FailOnRecompileLimitHit,
)


def is_data_dependent(error: BaseException) -> bool:
    """Whether Dynamo gave up since Python wants to know the value of a tensor."""
    first_line = str(error).strip().split("\n", 1)[0].lower()
    words = r"data.dependent|dynamic shape|\.item\(\)|\.tolist\(\)"
    return re.search(words, first_line) is not None


def compilers_error(error: BaseException) -> BaseException | None:
    """What the backend or its toolchain raised, if that is why ``error`` came."""
    if isinstance(error, (BackendCompilerFailed, InductorError)):
        return getattr(error, "inner_exception", error)
    return None


@functools.cache
def _as_users_error(kind: type[Exception]) -> type[UserError]:
    bases: tuple[Any, ...] = (UserError, kind)
    made: Any = type(kind.__name__, bases, {"__module__": kind.__module__})
    return made


def users_error(kind: type[Exception], message: str) -> UserError:
    """A ``kind`` that Dynamo passes on as it is, with the user's lines below its message."""
    made = _as_users_error(kind)  # type: ignore[arg-type]
    return made(UserErrorType.INVALID_INPUT, message)


def is_limit_hit(error: BaseException) -> bool:
    """Whether Dynamo has as many captures of one function as it keeps."""
    return isinstance(error, FailOnRecompileLimitHit)
