"""Define the operators that stand for something in this package's graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("torch_scan_hop", "DEF")


def own_operator(
    schema: str, kernels: dict[str, Callable[..., Any]], fake: Callable[..., Any] | None = None
) -> Any:
    """Return ``torch_scan_hop.name`` for a schema, with a kernel for each dispatch key, and
    ``fake`` for fakes if no kernel computes their results."""
    _library.define(schema)
    name = schema.partition("(")[0]
    for key, kernel in kernels.items():
        _library.impl(name, kernel, key)
    if fake is not None:
        torch.library.register_fake(f"torch_scan_hop::{name}", fake)
    return getattr(torch.ops.torch_scan_hop, name).default
