"""Ask what is known of sizes that may be symbols, without a guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing


def statically_known_true(condition: Any) -> bool:
    """Return True if ``condition`` holds as far as that is known; Dynamo traces this."""
    # imported here: it imports sympy, which takes longer than all of this package
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def is_fixed(size: Any) -> bool:
    """Return True if ``size`` is one number, not a symbol for many; Dynamo traces this."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return bool(has_static_value(size))


def is_exporting() -> bool:
    """Return True in an export.

    ``torch.compiler.is_exporting`` is true in all that Dynamo of torch 2.9 traces.
    """
    return bool(torch.compiler._is_exporting_flag)


def are_known_equal(size: Any, other: Any) -> bool:
    """Return True if two sizes are known to be equal; no guard is made, nothing is traced."""
    if isinstance(size, int) and isinstance(other, int):
        return size == other
    # to a trace under way a comparison of symbols is an operator
    with disable_proxy_modes_tracing():
        return statically_known_true(size == other)


def is_known_positive(size: Any) -> bool:
    """Return True if a size is known not to be zero; no guard is made, nothing is traced."""
    with disable_proxy_modes_tracing():
        return statically_known_true(size > 0)


def are_all_known_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two shapes, or the strides of two tensors, are known to be equal."""
    return len(sizes) == len(others) and all(map(are_known_equal, sizes, others))


def likely_value(size: Any) -> int:
    """Return the value that a size had in its trace, without a guard; 1 if that is not known."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def likely_bytes(value: torch.Tensor) -> int:
    """Return the bytes of ``value`` by its :func:`likely_value`; ``nbytes`` would make a guard."""
    return likely_value(value.numel()) * value.element_size()
