"""Example arguments for tracing a body: metadata only, one fresh tensor per argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.tracing import FakeTensorMode, fake_mode_of, fake_tensor
from torch_scan_hop.signature import Inputs


def stride_or_none(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    # functorch and XLA tensors may refuse strides; contiguous is then as good as any
    try:
        return tuple(tensor.stride())
    except (RuntimeError, NotImplementedError):
        return None


def like(mode: FakeTensorMode, value: Any, requires_grad: bool = False) -> Any:
    """A fake with the metadata of ``value``; symbols and numbers pass through."""
    if not isinstance(value, torch.Tensor):
        return value
    return fake_tensor(
        mode, value.shape, stride_or_none(value), value.dtype, value.device, requires_grad
    )


def contiguous_like(mode: FakeTensorMode, value: torch.Tensor, requires_grad: bool = False) -> Any:
    return fake_tensor(mode, value.shape, None, value.dtype, value.device, requires_grad)


def slice_like(mode: FakeTensorMode, xs: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    stride = stride_or_none(xs)
    return fake_tensor(
        mode,
        xs.shape[1:],
        None if stride is None else stride[1:],
        xs.dtype,
        xs.device,
        requires_grad,
    )


def step_examples(
    init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]
) -> tuple[FakeTensorMode, Inputs[Any]]:
    """Fakes for one step of a scan over these inputs, in the fake mode they live in."""
    mode = fake_mode_of([*init, *xs, *additional])
    return mode, Inputs(
        [contiguous_like(mode, c) for c in init],
        [slice_like(mode, x) for x in xs],
        [like(mode, a) for a in additional],
    )
