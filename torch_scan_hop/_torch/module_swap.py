"""Lets ``torch.func.functional_call`` run inside a higher-order operator (for torch 2.9).

Dynamo refuses a body that changes what was made outside of it. ``functional_call`` swaps the
parameters of a module and puts them back: a change that nobody sees. Newer versions know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.side_effects import SideEffects

# the file of torch that swaps a module's tensors; a body's own assignments are elsewhere
_SWAPPER = "torch/nn/utils/_named_member_accessor.py"


def _is_swap(effects: SideEffects) -> bool:
    """Whether the code being traced right now is ``functional_call``'s own swap."""
    output = effects.output_graph_weakref()
    if output is None:
        return False
    return output.current_tx.f_code.co_filename.replace("\\", "/").endswith(_SWAPPER)


@contextlib.contextmanager
def parameters_may_be_swapped() -> Iterator[None]:
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):  # type: ignore[operator]
        yield
        return
    check = SideEffects.check_allowed_side_effect

    def check_others(self: SideEffects, item: Any) -> bool:
        return _is_swap(self) or check(self, item)

    SideEffects.check_allowed_side_effect = check_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideEffects.check_allowed_side_effect = check  # type: ignore[method-assign]
