"""Replace attributes for a while: those of torch's classes, and what a thread keeps."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


def ambient(**at_first: Any) -> Any:
    """Return an object with these attributes, of which each thread has its own.

    >>> state = ambient(depth=0)
    >>> with replaced(state, depth=1):
    ...     state.depth
    1
    >>> state.depth
    0
    """
    return type("Ambient", (threading.local,), at_first)()


@contextlib.contextmanager
def replaced(owner: Any, **instead: Any) -> Iterator[None]:
    """Within, ``owner`` has these attributes instead of its own.

    >>> class Torchs:
    ...     method = staticmethod(lambda: "theirs")
    >>> with replaced(Torchs, method=staticmethod(lambda: "ours")):
    ...     Torchs.method()
    'ours'
    >>> Torchs.method()
    'theirs'
    """
    # as it is in the class: a static method is a function when it is read from there
    before = {name: vars(owner).get(name, getattr(owner, name)) for name in instead}
    inherited = before.keys() - vars(owner).keys()
    try:
        for name, value in instead.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if name in inherited and name in vars(owner):
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def wrapped(owner: Any, **around: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Within, a call of a method of ``owner`` is one of the function ``around`` it, which is given
    the method that was there before the arguments.

    >>> class Torchs:
    ...     def method(self, n):
    ...         return n
    >>> with wrapped(Torchs, method=lambda original, self, n: original(self, n) + 1):
    ...     Torchs().method(1)
    2
    """
    return replaced(owner, **_wrappers(owner, around))


def wrap(owner: Any, **around: Callable[..., Any]) -> None:
    """Do what :func:`wrapped` does, for good."""
    for name, wrapper in _wrappers(owner, around).items():
        setattr(owner, name, wrapper)


def _wrappers(owner: Any, around: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    return {name: _wrapper(getattr(owner, name), call) for name, call in around.items()}


def _wrapper(original: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return wrapper
