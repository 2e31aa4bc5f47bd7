"""The TorchFunctionModes that are active (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from typing import Any

import torch


def function_modes() -> tuple[Any, ...]:
    """Return for each active TorchFunctionMode its default device, or else its kind.

    Torch keeps a default device as such a mode, of a kind that it imports when there is one.
    """
    if torch._C._len_torch_function_stack() == 0:
        return ()
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = _get_current_function_mode_stack()
    return tuple(m.device if isinstance(m, DeviceContext) else type(m) for m in modes)


def floats_are_on_default_device() -> bool:
    """Return True if Dynamo puts a float that varies on a default device other than the CPU.

    Torch 2.9.1 does, and then cannot read it on "meta", nor elsewhere without waiting for the
    device. 2.13.0 and 2.15.0 put it on the CPU.
    """
    devices = [mode for mode in function_modes() if isinstance(mode, torch.device)]
    if all(device.type == "cpu" for device in devices):
        return False
    return bool(torch._as_tensor_fullprec(0.0).device.type != "cpu")
