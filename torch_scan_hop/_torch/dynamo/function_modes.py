"""The TorchFunctionModes that Dynamo traces through: a default device, a user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables import torch as torch_variables
from torch.utils._device import DeviceContext, _device_constructors

from torch_scan_hop._torch.replaced import replaced


@contextlib.contextmanager
def function_modes_set_aside(tx: Any) -> Iterator[None]:
    """Hide what is traced here from all modes, except within :func:`function_modes_in_force`.

    Dynamo keeps the modes that are active as a stack of its own, which all its frames share
    (checked on torch 2.9.1, 2.13.0, 2.15.0). It hands an operator to the innermost of them, and
    traces what that does without it: a body would never meet the mode.
    """
    state = tx.symbolic_torch_function_state
    modes, before = list(state.mode_stack), getattr(state, _SET_ASIDE, ())
    state.mode_stack.clear()
    setattr(state, _SET_ASIDE, modes)
    try:
        yield
    finally:
        setattr(state, _SET_ASIDE, before)
        state.mode_stack.clear()
        state.mode_stack.extend(modes)


@contextlib.contextmanager
def function_modes_in_force(tx: Any) -> Iterator[None]:
    """Let the modes that were set aside last see what is traced here (checked as the above).

    Of the functions that make tensors, torch 2.9 shows four to modes, and on a default device
    takes the others to be on the CPU.
    """
    state = tx.symbolic_torch_function_state
    state.mode_stack.extend(getattr(state, _SET_ASIDE))
    shown = {*torch_variables.get_overridable_functions(), *_device_constructors()}
    try:
        with replaced(torch_variables, get_overridable_functions=lambda: shown):
            yield
    finally:
        state.mode_stack.clear()


def users_function_mode(tx: Any) -> str:
    """Return the kind of an active mode that is no default device, or "" (checked as the above)."""
    modes = [mode.value for mode in tx.symbolic_torch_function_state.mode_stack]
    kinds = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    return kinds[0] if kinds else ""


_SET_ASIDE = "_torch_scan_hop_set_aside"
