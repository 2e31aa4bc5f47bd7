"""The function that computes a divergence of two distributions (torch 2.9.1, 2.13.0, 2.15.0).

torch looks for it by a search that Dynamo does not trace, and remembers what it has found.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torch_scan_hop._torch.dynamo.at_once import IsTraced

_divergences: Any = torch.distributions.kl


def find_divergence(_: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Have the function at hand when Dynamo traces this call of ``kl_divergence``."""
    found = getattr(_divergences, "_KL_MEMOIZE", None)
    search = getattr(_divergences, "_dispatch_kl", None)
    if found is not None and search is not None:
        kinds = tuple(value.python_type() for value in (*args, *kwargs.values()))
        if len(kinds) == 2 and kinds not in found:
            found[kinds] = search(*kinds)
    raise IsTraced
