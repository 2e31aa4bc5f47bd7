"""Methods that trackers have in tables (checked on torch 2.9.1, 2.13.0, 2.15.0: only there).

A table holds the functions themselves: another function in the class is not called.
"""

from __future__ import annotations

import contextlib
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
