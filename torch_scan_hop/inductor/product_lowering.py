"""A body with products, and reductions, as values, whatever the device: a product is recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor_inline import InlineLowering
from torch_scan_hop._torch.inductor_reductions import reductions_made_by
from torch_scan_hop._torch.inductor_values import (
    Reads,
    bounds_of,
    handled_by,
    is_tensor,
    masked,
    ops,
    pointwise_like,
)
from torch_scan_hop._torch.replaced import replaced
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.step import lane_symbols, plain_symbol

aten = torch.ops.aten


class ProductLowering(InlineLowering):
    """``parts``: what was put together, as ``(value, dim, parts)``, by the id of the value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.products: list[Any] = []
        self.parts: dict[int, tuple[Any, int, list[Any]]] = {}
        self._ranges: dict[Any, Any] | None = None
        #: variables of a kernel whose sizes are known
        self.sizes: dict[Any, Any] = {}

    def lower(self, inputs: Sequence[Any]) -> list[Any]:
        with reductions_made_by(self.reduced):
            results = super().lower(inputs)
        if not all(map(is_tensor, results)):
            raise Refusal("a result that is no tensor")
        return results

    def apply(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_function(target, args, kwargs)

    @contextlib.contextmanager
    def ranges_of_indices(self, lanes: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """Collect bounds of the symbols in an index: of ``lanes`` and of those made within."""
        ranges = dict(lanes)
        with replaced(self, _ranges=ranges):
            yield ranges

    def reads_of(self, value: Any) -> Reads:
        """Return what an element of ``value`` is computed from."""
        reads = Reads()
        with handled_by(reads), self.fresh_values():
            value.make_loader()(lane_symbols(len(value.get_size())))
        return reads

    def product(self, left: Any, weight: Any) -> Any:
        """Return what stands for ``left @ weight``; NotPointwise if nothing can."""
        raise NotImplementedError

    def reduced(self, how: Mapping[str, Any]) -> Any:
        """Return what stands for a reduction of Inductor's; None for one that needs a buffer."""
        return None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.mm.default:
            return self.product(*args)
        if target is aten.addmm.default:
            added, left, weight = args
            return super().call_function(aten.add.Tensor, (added, self.product(left, weight)), {})
        if target is aten.cat.default and len({part.get_dtype() for part in args[0]}) == 1:
            return self._joined(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _joined(self, parts: Sequence[Any], dim: int = 0) -> Any:
        dim %= len(parts[0].get_size())
        sizes = [part.get_size()[dim] for part in parts]
        starts = [sympy.sympify(sum(sizes[:k])) for k in range(len(sizes))]
        loaders = [part.make_loader() for part in parts]

        def inner_fn(index: Sequence[Any]) -> Any:
            def part(k: int) -> Any:
                own = list(index)
                own[dim] = self._within(index[dim] - starts[k], sizes[k])
                return loaders[k](own)

            within = self._part_of(index[dim], starts, sizes)
            if within is not None:
                return part(within)
            at = ops.index_expr(index[dim], torch.int64)
            value = part(0) if len(parts) == 1 else None
            for k in reversed(range(len(parts))):
                begins = ops.ge(at, ops.index_expr(starts[k], torch.int64))
                ends = ops.lt(at, ops.index_expr(starts[k] + sizes[k], torch.int64))
                here = masked(ops, ops.and_(begins, ends), functools.partial(part, k), 0.0)
                value = here if value is None else ops.where(ends, here, value)
            return value

        size = list(parts[0].get_size())
        size[dim] = sum(sizes)
        joined = pointwise_like(parts[0], inner_fn, size)
        self.compute_once(joined)
        self.parts[id(joined)] = joined, dim, list(parts)
        return joined

    def _part_of(self, index: Any, starts: Sequence[Any], sizes: Sequence[Any]) -> int | None:
        """Return the part that holds all that ``index`` may be; None if that is not known."""
        if not sympy.sympify(index).free_symbols <= self.sizes.keys():
            return None
        least, most = bounds_of(index, self.sizes)
        for k, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if (start <= least) == True and (most < start + size) == True:  # noqa: E712
                return k
        return None

    def _within(self, index: Any, size: Any) -> Any:
        """Return ``index``, which a mask bounds; a symbol for it while ranges are collected."""
        if self._ranges is None:
            return index
        symbol = plain_symbol(800 + len(self._ranges))
        self._ranges[symbol] = size
        return symbol
