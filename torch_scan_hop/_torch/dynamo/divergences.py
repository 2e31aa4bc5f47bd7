"""The function that computes a divergence of two distributions (torch 2.9.1, 2.13.0, 2.15.0).

torch looks for it by a search that Dynamo does not trace, and remembers what it has found.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dynamo.variables.functions import UserFunctionVariable

from torch_scan_hop._torch.replaced import wrapped

_divergences: Any = torch.distributions.kl


def divergences_are_known() -> contextlib.AbstractContextManager[None]:
    """Within, torch has the function at hand whenever a trace comes to a divergence."""
    found = getattr(_divergences, "_KL_MEMOIZE", None)
    search = getattr(_divergences, "_dispatch_kl", None)
    if found is None or search is None:
        return contextlib.nullcontext()

    def call_function(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is torch.distributions.kl_divergence:
            kinds = tuple(value.python_type() for value in (*args, *kwargs.values()))
            if len(kinds) == 2 and kinds not in found:
                found[kinds] = search(*kinds)
        return original(self, tx, args, kwargs)

    return wrapped(UserFunctionVariable, call_function=call_function)
