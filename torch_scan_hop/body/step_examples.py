"""Example arguments for tracing a body: metadata only, one fresh tensor per argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.fakes import FakeTensorMode, fake_mode_of, fake_tensor
from torch_scan_hop._torch.symbols import Symbols
from torch_scan_hop.signature import Inputs


def stride_or_none(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    # functorch and XLA tensors may refuse strides; contiguous is then as good as any
    try:
        return tuple(tensor.stride())
    except (RuntimeError, NotImplementedError):
        return None


def like(mode: FakeTensorMode, value: Any) -> Any:
    """Return a fake with the metadata of ``value``; symbols and numbers pass through."""
    if not isinstance(value, torch.Tensor):
        return value
    return fake_tensor(mode, value.shape, stride_or_none(value), value.dtype, value.device)


def contiguous_like(mode: FakeTensorMode, value: torch.Tensor) -> Any:
    return fake_tensor(mode, value.shape, None, value.dtype, value.device)


def slice_like(mode: FakeTensorMode, xs: torch.Tensor) -> torch.Tensor:
    stride = stride_or_none(xs)
    of_slice = None if stride is None else stride[1:]
    return fake_tensor(mode, xs.shape[1:], of_slice, xs.dtype, xs.device)


def step_examples(inputs: Inputs[Any]) -> tuple[FakeTensorMode, Inputs[Any]]:
    """Return fakes for one step of a scan over these inputs, in the fake mode they live in."""
    mode = fake_mode_of(inputs.flat())
    return mode, Inputs(
        [contiguous_like(mode, c) for c in inputs.carry],
        [slice_like(mode, x) for x in inputs.xs],
        [like(mode, a) for a in inputs.additional],
    )


def symbolic_step_examples(
    symbols: Symbols, varying: Sequence[Any], inputs: Inputs[Any]
) -> Inputs[Any]:
    """Return fakes like :func:`step_examples`, with a symbol for each number that varies, in order.

    ``varying``: for each input, the names of what varies in it (as its trace has them), or None.
    """
    names = iter(varying)

    def like(value: Any, shape: Any, stride: tuple[int, ...] | None) -> torch.Tensor:
        pairs = zip(next(names), shape, strict=True)
        sizes = [size if name is None else symbols.size(name, size) for name, size in pairs]
        stride = _stride_for(sizes, shape, stride)
        return fake_tensor(symbols.mode, sizes, stride, value.dtype, value.device)

    def like_additional(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return like(value, value.shape, value.stride())
        name = next(names)
        return value if name is None else symbols.number(name, value)

    return Inputs(
        [like(c, c.shape, None) for c in inputs.carry],
        [like(x, x.shape[1:], x.stride()[1:]) for x in inputs.xs],
        [like_additional(a) for a in inputs.additional],
    )


def _stride_for(
    sizes: Sequence[Any], shape: Sequence[int], stride: tuple[int, ...] | None
) -> tuple[Any, ...] | None:
    """Return the stride of a dense layout for other sizes, and any other stride as it is.

    >>> _stride_for([2, 30, 4], [2, 3, 4], (12, 1, 3))
    (120, 1, 30)
    """
    if stride is None:
        return None
    found, expected, step = list(stride), 1, 1
    for k in sorted(range(len(shape)), key=lambda k: (stride[k], shape[k])):
        if stride[k] == 0:
            continue
        if stride[k] != expected:
            return stride
        found[k] = step
        expected, step = expected * shape[k], step * sizes[k]
    return tuple(found)
