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
from ..table import Rule


def _numbers(args: tuple[Any, ...]) -> Any:
    """Return the sizes in `x.view(2, 3)` or `x.view((2, 3))`."""
    return args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args


def t_fwd(x: Any) -> Any:
    return x.t(), None


def transpose_fwd(x: Any, dim0: int, dim1: int) -> Any:
    return torch.transpose(x, dim0, dim1), (dim0, dim1)


def permute_fwd(x: Any, *dims: Any) -> Any:
    dims = _numbers(dims)
    inverse = sorted(range(len(dims)), key=lambda i: dims[i] % len(dims))
    return torch.permute(x, dims), inverse


def getattr_fwd(x: Any, name: str) -> Any:
    """x.T and x.mT; attributes that are no tensors need no rule."""
    if name not in ("T", "mT"):
        raise NotImplementedError(f"no VJP rule for the attribute x.{name}")
    return getattr(x, name), name


def view_fwd(x: Any, *size: Any) -> Any:
    return x.view(*size), shape(x)


def reshape_fwd(x: Any, *size: Any) -> Any:
    return torch.reshape(x, _numbers(size)), shape(x)


def flatten_fwd(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    return torch.flatten(x, start_dim, end_dim), shape(x)


def expand_fwd(x: Any, *size: Any, implicit: bool = False) -> Any:
    return x.expand(*size), x


def unsqueeze_fwd(x: Any, dim: int) -> Any:
    return torch.unsqueeze(x, dim), dim


def squeeze_fwd(x: Any, dim: Any = None) -> Any:
    y = torch.squeeze(x) if dim is None else torch.squeeze(x, dim)
    candidates = range(ndim(x)) if dim is None else [dim] if isinstance(dim, int) else dim
    return y, sorted(i % ndim(x) for i in candidates if ndim(x) and shape(x)[i] == 1)


def squeeze_bwd(dims: Any, d: Any) -> Any:
    for i in dims:
        d = torch.unsqueeze(d, i)
    return d


def diag_fwd(x: Any, diagonal: int = 0) -> Any:
    return torch.diag(x, diagonal), (shape(x), diagonal)


def diag_bwd(saved: Any, d: Any) -> Any:
    x_shape, k = saved
    if len(x_shape) == 1 or x_shape[0] == x_shape[1]:
        return torch.diag(d, k)
    return torch.diagonal_scatter(d.new_zeros(x_shape), d, k)


def diagonal_fwd(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return torch.diagonal(x, offset, dim1, dim2), (shape(x), (offset, dim1, dim2))


def diagonal_bwd(saved: Any, d: Any) -> Any:
    x_shape, where = saved
    return torch.diagonal_scatter(d.new_zeros(x_shape), d, *where)


def diag_embed_fwd(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return torch.diag_embed(x, offset, dim1, dim2), (offset, dim1, dim2)


def diagonal_scatter_fwd(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    where = (offset, dim1, dim2)
    return torch.diagonal_scatter(x, src, *where), (src, where)


def diagonal_scatter_bwd(saved: Any, d: Any) -> Any:
    src, where = saved
    dx = torch.diagonal_scatter(d, torch.zeros_like(src), *where)
    return dx, torch.diagonal(d, *where)


def getitem_fwd(x: Any, index: Any) -> Any:
    return x[index], (index, shape(x))


def getitem_bwd(saved: Any, d: Any) -> Any:
    index, x_shape = saved
    return unindex(d, index, x_shape)


def unindex_fwd(values: Any, index: Any, shape: Any) -> Any:
    return unindex(values, index, shape), index


def select_fwd(x: Any, dim: int, index: Any) -> Any:
    where = (slice(None),) * (dim % ndim(x)) + (index,)
    return torch.select(x, dim, index), (where, shape(x))


def slice_fwd(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """aten.slice.Tensor, which has no function under torch."""
    index = (slice(None),) * (dim % ndim(x)) + (slice(start, end, step),)
    return x[index], (index, shape(x))


def aten_index_fwd(x: Any, indices: Any) -> Any:
    """aten.index.Tensor: x[:, i] has the indices [None, i]."""
    index = tuple(slice(None) if i is None else i for i in indices)
    return x[index], (index, shape(x))


def index_select_fwd(x: Any, dim: int, index: Any) -> Any:
    return torch.index_select(x, dim, index), (dim, index, shape(x))


def index_select_bwd(saved: Any, d: Any) -> Any:
    dim, index, x_shape = saved
    return torch.index_add(d.new_zeros(x_shape), dim, index, d)


def index_add_fwd(x: Any, dim: int, index: Any, source: Any) -> Any:
    return torch.index_add(x, dim, index, source), (dim, index)


def index_add_bwd(saved: Any, d: Any) -> Any:
    return d, None, None, torch.index_select(d, *saved)


def convert_fwd(x: Any, *args: Any, **kwargs: Any) -> Any:
    """x.to(...): the cotangent goes back to the dtype of x by itself, see `transform`."""
    return x.to(*args, **kwargs), None


def identity_bwd(_: Any, d: Any) -> Any:
    return d


VIEWS: dict[Any, Rule] = {
    torch.t: Rule(t_fwd, lambda _, d: d.t()),
    torch.transpose: Rule(transpose_fwd, lambda dims, d: torch.transpose(d, *dims)),
    torch.permute: Rule(permute_fwd, lambda inverse, d: torch.permute(d, inverse)),
    getattr: Rule(getattr_fwd, lambda name, d: getattr(d, name)),
    Tensor.view: Rule(view_fwd, lambda x_shape, d: d.reshape(x_shape)),
    torch.reshape: Rule(reshape_fwd, lambda x_shape, d: torch.reshape(d, x_shape)),
    torch.flatten: Rule(flatten_fwd, lambda x_shape, d: torch.reshape(d, x_shape)),
    Tensor.expand: Rule(expand_fwd, lambda x, d: unbroadcast(d, x)),
    Tensor.expand_as: Rule(
        lambda x, other: (x.expand_as(other), x), lambda x, d: unbroadcast(d, x)
    ),
    torch.unsqueeze: Rule(unsqueeze_fwd, lambda dim, d: torch.squeeze(d, dim)),
    torch.squeeze: Rule(squeeze_fwd, squeeze_bwd),
    torch.diag: Rule(diag_fwd, diag_bwd),
    torch.diagonal: Rule(diagonal_fwd, diagonal_bwd),
    torch.diag_embed: Rule(diag_embed_fwd, lambda where, d: torch.diagonal(d, *where)),
    torch.diagonal_scatter: Rule(diagonal_scatter_fwd, diagonal_scatter_bwd),
    torch.ops.aten.slice: Rule(slice_fwd, getitem_bwd),
    torch.select: Rule(select_fwd, getitem_bwd),
    torch.ops.aten.index: Rule(aten_index_fwd, getitem_bwd),
    torch.index_select: Rule(index_select_fwd, index_select_bwd),
    torch.index_add: Rule(index_add_fwd, index_add_bwd),
    unindex: Rule(unindex_fwd, lambda index, d: d[index]),
    torch.clone: Rule(lambda x, memory_format=None: (torch.clone(x), None), identity_bwd),
    Tensor.contiguous: Rule(lambda x: (x.contiguous(), None), identity_bwd),
    Tensor.to: Rule(convert_fwd, identity_bwd),
    Tensor.float: Rule(lambda x: (x.float(), None), identity_bwd),
    Tensor.double: Rule(lambda x: (x.double(), None), identity_bwd),
}
