"""Fake tensors, and the mode that they live in (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_scan_hop._torch.dtensors import shard_of
from torch_scan_hop._torch.isolation import isolated


def _underlying_fake(tensor: Any) -> FakeTensor | None:
    while True:
        tensor = shard_of(tensor)
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, FunctionalTensor):
            tensor = torch._from_functional_tensor(tensor.elem)
        elif isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        elif isinstance(tensor, torch.Tensor) and torch._is_functional_tensor(tensor):
            tensor = torch._from_functional_tensor(tensor)
        else:
            return None


def under_compiler() -> bool:
    """Return True if the fakes are a compiler's (Dynamo's, AOTAutograd's), not a user's mode's."""
    return TracingContext.try_get() is not None


def fake_mode_of(tensors: Sequence[Any]) -> FakeTensorMode:
    """Return the fake mode that these tensors live in, however wrapped, or a new static one.

    A caller's mode must be reused: it owns the symbols in the tensors' shapes.
    """
    for tensor in tensors:
        fake = _underlying_fake(tensor)
        if fake is not None:
            return fake.fake_mode
    active = detect_fake_mode()
    if active is not None:
        return active
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # operators with unknown results (while_loop) want somewhere to make symbols; reading a
    # value stays an error
    symbols = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[Any],
    stride: Sequence[Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a new fake tensor: never the caller's object, so that make_fx cannot merge two."""
    with isolated(), mode:
        if stride is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def is_lazy(fake: FakeTensor) -> bool:
    """Return True if ``fake`` is lazily conjugated or negated, or zeros that use no memory."""
    return fake.is_conj() or fake.is_neg() or fake._is_zerotensor()


def plain_fake(fake: FakeTensor) -> torch.Tensor:
    """Return a fake of the same metadata that is not lazy."""
    return fake_tensor(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, fake.device)


def fake_like_number(fake: FakeTensor) -> torch.Tensor:
    """Return a fake of shape ``[]`` with the dtype and device of ``fake``."""
    return fake_tensor(fake.fake_mode, (), None, fake.dtype, fake.device)
