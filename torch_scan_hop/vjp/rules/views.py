"""Rules for operations that move values around without changing them.

Each backward is the transpose of the forward: a permutation undone, a part put back among zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..primitives import unindex
from ..shapes import ndim, shape, unbroadcast
from ..table import Rule, saving_arguments


def _numbers(args: tuple[Any, ...]) -> Any:
    """Return the sizes in `x.view(2, 3)` or `x.view((2, 3))`."""
    return args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args


def permute_bwd(d: Any, x: Any, *dims: Any) -> Any:
    dims = _numbers(dims)
    return torch.permute(d, sorted(range(len(dims)), key=lambda i: dims[i] % len(dims)))


def getattr_fwd(x: Any, name: str) -> Any:
    """x.T and x.mT; attributes that are no tensors need no rule."""
    if name not in ("T", "mT"):
        raise NotImplementedError(f"no VJP rule for the attribute x.{name}")
    return getattr(x, name), name


def squeeze_fwd(x: Any, dim: Any = None) -> Any:
    y = torch.squeeze(x) if dim is None else torch.squeeze(x, dim)
    candidates = range(ndim(x)) if dim is None else [dim] if isinstance(dim, int) else dim
    return y, sorted(i % ndim(x) for i in candidates if ndim(x) and shape(x)[i] == 1)


def squeeze_bwd(dims: Any, d: Any) -> Any:
    for i in dims:
        d = torch.unsqueeze(d, i)
    return d


def diag_bwd(d: Any, x: Any, diagonal: int = 0) -> Any:
    if ndim(x) == 1 or shape(x)[0] == shape(x)[1]:
        return torch.diag(d, diagonal)
    return torch.diagonal_scatter(d.new_zeros(shape(x)), d, diagonal)


def diagonal_bwd(d: Any, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return torch.diagonal_scatter(d.new_zeros(shape(x)), d, offset, dim1, dim2)


def diagonal_scatter_bwd(
    d: Any, x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    dx = torch.diagonal_scatter(d, torch.zeros_like(src), offset, dim1, dim2)
    return dx, torch.diagonal(d, offset, dim1, dim2)


def getitem_fwd(x: Any, index: Any) -> Any:
    return x[index], (index, shape(x))


def getitem_bwd(saved: Any, d: Any) -> Any:
    index, x_shape = saved
    return unindex(d, index, x_shape)


def select_fwd(x: Any, dim: int, index: Any) -> Any:
    where = (slice(None),) * (dim % ndim(x)) + (index,)
    return torch.select(x, dim, index), (where, shape(x))


def slice_fwd(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """aten.slice.Tensor, which has no function under torch."""
    return getitem_fwd(x, (slice(None),) * (dim % ndim(x)) + (slice(start, end, step),))


def aten_index_fwd(x: Any, indices: Any) -> Any:
    """aten.index.Tensor: x[:, i] has the indices [None, i]."""
    return getitem_fwd(x, tuple(slice(None) if i is None else i for i in indices))


VIEWS: dict[Any, Rule] = {
    torch.t: Rule(lambda x: (x.t(), None), lambda _, d: d.t()),
    torch.transpose: saving_arguments(
        torch.transpose, lambda d, x, dim0, dim1: torch.transpose(d, dim0, dim1)
    ),
    torch.permute: saving_arguments(lambda x, *dims: torch.permute(x, _numbers(dims)), permute_bwd),
    getattr: Rule(getattr_fwd, lambda name, d: getattr(d, name)),
    Tensor.view: saving_arguments(
        lambda x, *size: x.view(*size), lambda d, x, *size: d.reshape(shape(x))
    ),
    torch.reshape: saving_arguments(
        lambda x, *size: torch.reshape(x, _numbers(size)),
        lambda d, x, *size: torch.reshape(d, shape(x)),
    ),
    torch.flatten: saving_arguments(
        torch.flatten, lambda d, x, start_dim=0, end_dim=-1: torch.reshape(d, shape(x))
    ),
    Tensor.expand: saving_arguments(
        lambda x, *size, implicit: x.expand(*size),
        lambda d, x, *size, implicit=False: unbroadcast(d, x),
    ),
    Tensor.expand_as: saving_arguments(
        lambda x, other: x.expand_as(other), lambda d, x, other: unbroadcast(d, x)
    ),
    torch.unsqueeze: saving_arguments(torch.unsqueeze, lambda d, x, dim: torch.squeeze(d, dim)),
    torch.squeeze: Rule(squeeze_fwd, squeeze_bwd),
    torch.diag: saving_arguments(torch.diag, diag_bwd),
    torch.diagonal: saving_arguments(torch.diagonal, diagonal_bwd),
    torch.diag_embed: saving_arguments(
        torch.diag_embed,
        lambda d, x, offset=0, dim1=-2, dim2=-1: torch.diagonal(d, offset, dim1, dim2),
    ),
    torch.diagonal_scatter: saving_arguments(torch.diagonal_scatter, diagonal_scatter_bwd),
    torch.ops.aten.slice: Rule(slice_fwd, getitem_bwd),
    torch.select: Rule(select_fwd, getitem_bwd),
    torch.ops.aten.index: Rule(aten_index_fwd, getitem_bwd),
    torch.index_select: saving_arguments(
        torch.index_select,
        lambda d, x, dim, index: torch.index_add(d.new_zeros(shape(x)), dim, index, d),
    ),
    torch.index_add: saving_arguments(
        torch.index_add,
        lambda d, x, dim, index, source: (d, None, None, torch.index_select(d, dim, index)),
    ),
    unindex: saving_arguments(unindex, lambda d, values, index, shape: d[index]),
    torch.clone: Rule(lambda x, memory_format=None: (torch.clone(x), None), lambda _, d: d),
    Tensor.contiguous: Rule(lambda x: (x.contiguous(), None), lambda _, d: d),
    # the cotangent goes back to the dtype of x by itself, see `transform`
    Tensor.to: Rule(lambda x, *args, **kwargs: (x.to(*args, **kwargs), None), lambda _, d: d),
    Tensor.float: Rule(lambda x: (x.float(), None), lambda _, d: d),
    Tensor.double: Rule(lambda x: (x.double(), None), lambda _, d: d),
}
