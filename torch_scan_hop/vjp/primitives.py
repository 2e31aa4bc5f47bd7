"""Functions that stay whole in a graph: one node, one line of printed code, one rule.

FX inlines a Python function that it traces. A primitive is called instead: when one of its
arguments is a proxy, the call becomes a node, by the `__torch_function__` protocol. Unlike
`torch.fx.wrap` this does not depend on the name under which the caller imported the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree

F = TypeVar("F", bound=Callable[..., Any])


def primitive(fn: F) -> F:
    """Make `fn` a single node of every graph that FX traces; it then wants a rule of its own.

    >>> import torch
    >>> from torch_scan_hop import vjp
    >>> @vjp.primitive
    ... def cube(x):
    ...     return x * x * x
    >>> rules = vjp.DEFAULT_RULES.override(
    ...     {cube: vjp.Rule(lambda x: (cube(x), x), lambda x, dy: 3 * x * x * dy)})
    >>> graph = vjp.vjp_graph(cube, torch.ones(2), rules=rules)
    >>> graph(torch.tensor([1.0, 2.0]), torch.ones(2))
    (tensor([1., 8.]), (tensor([ 3., 12.]),))
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxies = tuple(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Proxy))
        if proxies:
            return handle_torch_function(call, proxies, *args, **kwargs)
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


@primitive
def scale(factor: Tensor, x: Tensor) -> Tensor:
    """Return `factor * x` for a scalar tensor `factor: []` and `x: [...]`.

    The cotangents of this product need no unbroadcasting, because the roles are known.

    >>> import torch
    >>> scale(torch.tensor(3.0), torch.ones(2))
    tensor([3., 3.])
    """
    if factor.dim() != 0:
        raise ValueError(f"scale wants a scalar factor, not one of shape {list(factor.shape)}")
    return factor * x


@primitive
def unindex(values: Tensor, index: Any, shape: Sequence[int]) -> Tensor:
    """Return zeros of `shape` with `values` added at `index`: the transpose of `x[index]`.

    >>> import torch
    >>> unindex(torch.tensor([1.0, 2.0]), slice(1, 3), (4,))
    tensor([0., 1., 2., 0.])
    >>> unindex(torch.tensor([1.0, 2.0]), torch.tensor([3, 3]), (4,))
    tensor([0., 0., 0., 3.])
    """
    out = values.new_zeros(tuple(shape))
    # Positions, not values, decide what goes where: this holds for any mixture of indices.
    positions = torch.arange(out.numel(), device=out.device).reshape(out.shape)[index]
    return out.flatten().index_add(0, positions.flatten(), values.flatten()).reshape(out.shape)


# Printed code names the module, so let it be the public one.
for _public in (scale, unindex):
    _public.__module__ = "torch_scan_hop.vjp"
