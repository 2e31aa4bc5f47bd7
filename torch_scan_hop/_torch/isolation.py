"""Set aside other people's modes, levels and hooks (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import suspend_functionalization
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from torch_scan_hop._torch.transforms import put_back_on_error


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Set aside every dispatch mode, functorch level and functionalization pass."""
    with (
        temporarily_clear_interpreter_stack(),
        suspend_functionalization(),
        _disable_current_modes(),
        # a user's hooks (offloading) are for real residuals, not for a trace's fakes
        _without_saved_tensors_hooks(),
        # an engine that compiles a program's backward would compile the one of a trace, too
        _without_compiled_autograd(),
        # its checks read values, and fakes have none
        torch.autograd.set_detect_anomaly(False),
        # a body that raises leaves the functorch levels open that it opened
        put_back_on_error(),
    ):
        yield


def torch_functions_disabled() -> contextlib.AbstractContextManager[Any]:
    """Hide what is called within from the caller's modes and subclasses."""
    disabled: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return disabled


def _without_saved_tensors_hooks() -> contextlib.AbstractContextManager[Any]:
    state: Any = torch._C._autograd
    # functorch's grad forbids hooks: while there are any, and from then on
    if not state._saved_tensors_hooks_is_enabled():
        return contextlib.nullcontext()
    if state._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_unchanged, _unchanged)


def _without_compiled_autograd() -> contextlib.AbstractContextManager[Any]:
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if not getattr(compiled_autograd, "compiled_autograd_enabled", False):
        return contextlib.nullcontext()
    disabled: contextlib.AbstractContextManager[Any] = compiled_autograd._disable()
    return disabled


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
