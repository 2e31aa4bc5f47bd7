"""Functions that are done at once to trackers, in place of being traced (checked on torch 2.9.1,
2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._dynamo.variables.functions import UserFunctionVariable

from torch_scan_hop._torch.replaced import wrapped


class IsTraced(Exception):
    """Dynamo is to trace this call after all."""


def functions_at_once(
    functions: dict[Callable[..., Any], Callable[..., Any]],
) -> contextlib.AbstractContextManager[None]:
    """Within, a call of one of these functions is a call of what it stands for on trackers."""

    def call_function(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        at_once = functions.get(self.fn) if type(self.fn) is FunctionType else None
        if at_once is not None:
            with contextlib.suppress(IsTraced):
                return at_once(tx, *args, **kwargs)
        return original(self, tx, args, kwargs)

    return wrapped(UserFunctionVariable, call_function=call_function)
