"""Replace attributes for a while: those of torch's classes, and what a thread keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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
