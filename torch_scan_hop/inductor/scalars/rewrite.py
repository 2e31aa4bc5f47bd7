"""Rewrite a scan as one over the entries of its tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.sizes import are_known_equal
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import Entries, Index, Lanes, indices
from torch_scan_hop.inductor.scalars.interpreter import (
    MOST_OPERATORS,
    ScalarInterpreter,
    may_be_written_out,
)
from torch_scan_hop.op import ScanOptions, call_scan
from torch_scan_hop.rewrites.sizes import first_size
from torch_scan_hop.signature import Inputs, Signature


def lanes_of(body: fx.GraphModule, signature: Signature, most: int = MOST_OPERATORS) -> list[Lanes]:
    """Return the lanes that a body may have: the first dimension of all its carries, or one lane. A
    body of more than ``most`` operators on entries has none of these."""
    size = first_size(map(value_of, signature.inputs_of(body).carry))
    found = [Lanes(None)]
    if size is not None and not are_known_equal(size, 1):
        found.insert(0, Lanes(size))
    return [lanes for lanes in found if may_be_written_out(body, lanes, most)]


@dataclass(frozen=True)
class _Grid:
    """Takes a tensor of ``size``, or each slice of a stack, apart. A bool becomes an integer in
    carries and ys, since kernels of the CPU store no bools."""

    shape: Index
    lane: int | None
    size: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def entries(self, parts: Sequence[torch.Tensor]) -> Entries:
        values = [part if part.dtype == self.dtype else part != 0 for part in parts]
        return Entries(self.shape, values, self.lane).of_rank(len(self.size))

    def parts(self, value: torch.Tensor, leading: int = 0) -> list[torch.Tensor]:
        """Return the entries, behind so many leading dimensions; the next one is the lanes."""
        assert self.lane in (None, 0)
        first = leading if self.lane is None else leading + 1
        found = []
        for index in indices(self.shape if self.lane is None else self.shape[1:]):
            part = value
            for i in index:
                part = part.select(first, i)
            found.append(part.unsqueeze(-1) if self.lane is None and self.size else part)
        return found

    def joined(self, parts: Sequence[torch.Tensor], leading: int) -> torch.Tensor:
        """Put the tensor together from parts with lanes, though they may not differ by lane."""
        whole = torch.stack(list(parts), -1).to(self.dtype)
        before = list(whole.shape[:leading])
        if self.lane is None:
            return whole.select(leading, 0).reshape([*before, *self.size]).contiguous()
        whole = whole.reshape([*before, whole.shape[leading], *self.shape])
        whole = whole.movedim(leading, leading + self.lane)
        return whole.reshape([*before, *self.size]).contiguous()


class WrittenOut:
    """``body`` as a step on entries, of one of the ways to place its lanes."""

    def __init__(
        self, body: fx.GraphModule, signature: Signature, lanes: Lanes, options: ScanOptions
    ) -> None:
        self.body = body
        self.signature = signature
        self.lanes = lanes
        self.options = options
        self.roles = signature.inputs_of(body)
        self.grids = {
            node: self._grid(value_of(node))
            for node in self.roles.flat()
            if isinstance(value_of(node), torch.Tensor) and (node.users or node in self.roles.carry)
        }
        self.results: list[_Grid] = []

    def _grid(self, like: torch.Tensor) -> _Grid:
        lane = 0 if like.ndim and self.lanes.begin(like.shape[0]) else None
        return _Grid(self.lanes.grid_of(like.shape, lane), lane, tuple(like.shape), like.dtype)

    # --- the scan ---

    def run(self, inputs: Inputs[Any]) -> list[Any]:
        """Return the results of the scan of ``inputs``, by a scan of their entries."""
        carry = [self.grids[n] for n in self.roles.carry]
        reals = Inputs(
            [
                self._for_all_lanes(part).contiguous()
                for grid, value in zip(carry, inputs.carry, strict=True)
                for part in grid.parts(value)
            ],
            [
                part
                for n, x in zip(self.roles.xs, inputs.xs, strict=True)
                for part in self._slices(n, x)
            ],
            inputs.additional,
        )
        found = iter(call_scan(self._step(carry), reals, self.options))
        take = lambda grid: list(itertools.islice(found, grid.count))  # noqa: E731
        return [
            grid.joined(take(grid), 0 if k < len(carry) else 1)
            for k, grid in enumerate(self.results)
        ]

    def _slices(self, node: fx.Node, stack: torch.Tensor) -> list[torch.Tensor]:
        return self.grids[node].parts(stack, 1) if node in self.grids else [stack]

    def _for_all_lanes(self, value: torch.Tensor) -> torch.Tensor:
        """Expand to all lanes, because carries and ys of a kernel have one shape."""
        value = value.to(torch.int32) if value.dtype == torch.bool else value
        return value.expand([1 if self.lanes.size is None else self.lanes.size])

    def _step(self, carry: Sequence[_Grid]) -> Callable[..., tuple[Any, ...]]:
        def step(*flat: Any) -> tuple[Any, ...]:
            rest = iter(flat)
            given: list[Any] = [
                grid.entries([next(rest) for _ in range(grid.count)]) for grid in carry
            ]
            for node in self.roles.xs:
                grid = self.grids.get(node)
                parts = [next(rest) for _ in range(1 if grid is None else grid.count)]
                given.append(None if grid is None else grid.entries(parts))
            for node, value in zip(self.roles.additional, rest, strict=True):
                grid = self.grids.get(node)
                given.append(value if grid is None else grid.entries(grid.parts(value)))
            return self._results_of(given, carry)

        return step

    def _results_of(self, given: Sequence[Any], carry: Sequence[_Grid]) -> tuple[Any, ...]:
        interpreter = ScalarInterpreter(self.body, self.lanes)
        found = interpreter.run(*given, enable_io_processing=False)
        if not all(isinstance(f, Entries) for f in found):
            raise Refusal("a result that is no tensor")
        for grid, entries in zip(carry, found, strict=False):
            if (entries.shape, entries.lane) != (grid.shape, grid.lane):
                raise Refusal("a carry whose lanes move")
        self.results = [self._grid_of(entries) for entries in found]
        return tuple(self._for_all_lanes(v) for entries in found for v in entries.flat)

    def _grid_of(self, entries: Entries) -> _Grid:
        size = tuple(self.lanes.shape_of(entries))
        return _Grid(entries.shape, entries.lane, size, entries.dtype)
