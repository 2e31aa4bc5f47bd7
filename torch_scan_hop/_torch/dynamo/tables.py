"""Methods by which trackers change what they stand for: in their classes, and in tables (checked on
torch 2.9.1, 2.13.0, 2.15.0: tables only there).

A table holds the functions themselves: another function in the class is not called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import base

from torch_scan_hop._torch.replaced import wrapped

_Entry: Any = getattr(base, "Method", None)


def changes_by_tables_told(tell: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Within, ``tell(tracker)`` comes before such a method changes what the tracker stands for."""
    if _Entry is None:
        return contextlib.nullcontext()

    def call(original: Any, self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        if "mutation" in self.handler.__code__.co_names:
            tell(variable)
        return original(self, variable, *args, **kwargs)

    return wrapped(_Entry, __call__=call)


@functools.cache
def methods_that_change(*containers: type) -> list[tuple[type, str]]:
    """Return the methods by which trackers of ``containers`` tell of a change."""
    found: list[Any] = [*containers]
    for cls in found:
        found += [c for c in cls.__subclasses__() if c not in found]
    return [
        (cls, name)
        for cls in found
        for name, method in vars(cls).items()
        if isinstance(method, types.FunctionType)
        # one that is wrapped for the capture at hand says so in torch's own code
        if "mutation" in inspect.unwrap(method).__code__.co_names
    ]
