"""Lets ``torch.func.functional_call`` run inside a higher-order operator (for torch 2.9).

Dynamo refuses a body that changes what was made outside of it. ``functional_call`` swaps the
parameters of a module and puts them back: a change that nobody sees. Newer versions know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.side_effects import SideEffects


def _holds_parameters(item: Any) -> bool:
    source = getattr(item, "source", None)
    if source is None:
        return False
    name = source.name() if callable(source.name) else source.name
    return "_parameters" in name or "_buffers" in name


@contextlib.contextmanager
def parameters_may_be_swapped() -> Iterator[None]:
    check = SideEffects.check_allowed_side_effect

    def check_others(self: SideEffects, item: Any) -> bool:
        return _holds_parameters(item) or check(self, item)

    SideEffects.check_allowed_side_effect = check_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideEffects.check_allowed_side_effect = check  # type: ignore[method-assign]
