"""Values that are kept for an object as long as it lives, and found without a call of Python."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

Value = TypeVar("Value")


class PerObject(dict[int, Value]):
    """A value for each object, by its ``id``, until the object is gone.

    Objects are told apart by identity: code objects that say the same are equal, and a value would
    go with the first of them, while the second is in use (a cell of a notebook that runs again).

    >>> kept = PerObject[str]()
    >>> owner = lambda: None
    >>> kept.keep(owner, "a value"), kept.get(id(owner))
    ('a value', 'a value')
    >>> del owner
    >>> len(kept)
    0
    """

    def keep(self, owner: Any, value: Value) -> Value:
        # it is called before another object can have this id
        weakref.finalize(owner, self.pop, id(owner), None).atexit = False
        self[id(owner)] = value
        return value

    def kept_or(self, owner: Any, value: Value) -> Value:
        """Return what is kept for ``owner``; keep ``value`` if nothing is."""
        kept = self.get(id(owner))
        return self.keep(owner, value) if kept is None else kept
