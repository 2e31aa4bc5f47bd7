"""DTensors: the shards, and how they are laid out (checked on torch 2.9.1, 2.13.0, 2.15.0).

Nothing here imports ``torch.distributed.tensor`` before somebody has made a DTensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx


def _dtensor_class() -> Any:
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_dtensor(value: Any) -> bool:
    kind = _dtensor_class()
    return kind is not None and isinstance(value, kind)


def shard_of(value: Any) -> Any:
    """Return this rank's part of a DTensor, as it is in memory; other values are themselves."""
    return shards_of([value])[0]


def shards_of(values: Sequence[Any]) -> Sequence[Any]:
    """Return :func:`shard_of` each value."""
    kind = _dtensor_class()
    if kind is None:
        return values
    return [value._local_tensor if isinstance(value, kind) else value for value in values]


#: for each dimension of a mesh, ``Shard(d)``, ``Replicate()`` or ``Partial()``
Placements = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """The layout of one tensor on a mesh; ``shape`` and ``stride`` are the whole tensor's."""

    mesh: Any
    placements: Placements
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    def spec(self) -> Any:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(torch.Size(self.shape), self.stride, self.dtype)
        return DTensorSpec(self.mesh, self.placements, tensor_meta=meta)

    def join(self, shard: torch.Tensor) -> Any:
        """Return the DTensor of which ``shard`` is this rank's part."""
        return _dtensor_class()(shard, self.spec(), requires_grad=False)

    def placed(self, placements: Placements) -> MeshLayout:
        return dataclasses.replace(self, placements=placements)

    def of_slice(self) -> MeshLayout:
        """Return the layout of what a step gets of xs that have this layout."""
        placements = _shifted(self.placements, -1)
        return MeshLayout(self.mesh, placements, self.shape[1:], self.stride[1:], self.dtype)

    def whole_along_steps(self) -> MeshLayout:
        return self.placed(_shifted(_shifted(self.placements, -1), 1))

    def over_steps(self, stretches: Stretches | None) -> MeshLayout:
        """Return the layout of a stack that is split as the steps are."""
        from torch.distributed.tensor import Shard

        return self if stretches is None else self.at(stretches.mesh_dim, Shard(0))

    def at(self, mesh_dim: int | None, placement: Any) -> MeshLayout:
        """Return the layout with another placement along one dimension of the mesh; None: none."""
        if mesh_dim is None:
            return self
        placements = [*self.placements]
        placements[mesh_dim] = placement
        return self.placed(tuple(placements))

    def of_stack(self, trip_count: Any) -> MeshLayout:
        """Return the layout of a contiguous stack of what steps return, each laid out like this."""
        size: Any = 1
        stride: list[Any] = []
        for n in reversed(self.shape):
            stride.insert(0, size)
            size = size * n
        shape = (trip_count, *self.shape)
        return MeshLayout(
            self.mesh, _shifted(self.placements, 1), shape, (size, *stride), self.dtype
        )


def _shifted(placements: Placements, by: int) -> Placements:
    """Shift placements by ``by`` dimensions in front; along a dimension that is gone, replicate."""
    from torch.distributed.tensor import Replicate, Shard

    found: list[Any] = []
    for placement in placements:
        if placement.is_shard():
            dim = placement.dim + by
            placement = Shard(dim) if dim >= 0 else Replicate()
        found.append(placement)
    return tuple(found)


def replicated(mesh: Any) -> Placements:
    from torch.distributed.tensor import Replicate

    return (Replicate(),) * mesh.ndim


def summed(mesh: Any, but: int | None = None) -> Placements:
    """Return placements with a summand on each rank, but replicated along dimension ``but``."""
    from torch.distributed.tensor import Partial, Replicate

    return tuple(Replicate() if k == but else Partial() for k in range(mesh.ndim))


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Steps that are split over the ranks along one dimension of a mesh, a stretch for each.

    Attributes:
        trip_count: of all of them.
    """

    mesh: Any
    mesh_dim: int
    trip_count: Any

    @property
    def count(self) -> int:
        return int(self.mesh.size(self.mesh_dim))

    @property
    def rank(self) -> int:
        """The number of the stretch that this process has."""
        return int(self.mesh.get_local_rank(self.mesh_dim))

    def in_order(self, reverse: bool) -> list[int]:
        """Return the ranks in the order in which their steps run."""
        ranks = range(self.count)
        return [*reversed(ranks)] if reverse else [*ranks]

    def steps_of(self, rank: int) -> Any:
        """Return the number of a rank's steps: if there are few, the last ranks have none."""
        most = -(-self.trip_count // self.count)
        return max(0, min(most, self.trip_count - rank * most))

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """Gather ``value`` of every rank, stacked."""
        from torch.distributed.tensor import Shard

        shape = (self.count, *value.shape)
        stride = torch.empty(shape, device="meta").stride()
        whole = MeshLayout(self.mesh, replicated(self.mesh), shape, stride, value.dtype)
        return moved(value.unsqueeze(0), whole.at(self.mesh_dim, Shard(0)), whole)


def stretches_of(layouts: Iterable[MeshLayout | None], trip_count: Any) -> Stretches | None:
    """Return how the steps of stacks are split, if that is along one dimension of their mesh."""
    known = [layout for layout in layouts if layout is not None]
    dims = {
        k
        for layout in known
        for k, placement in enumerate(layout.placements)
        if type(placement).__name__ == "Shard" and placement.dim == 0
    }
    if len(dims) != 1:
        return None
    return Stretches(known[0].mesh, dims.pop(), trip_count)


def layout_of(value: Any, mesh: Any = None) -> MeshLayout:
    """Return the layout of a DTensor, or of a plain tensor that every rank of ``mesh`` has."""
    if is_dtensor(value):
        mesh, placements = value.device_mesh, tuple(value.placements)
    else:
        placements = replicated(mesh)
    return MeshLayout(mesh, placements, tuple(value.shape), tuple(value.stride()), value.dtype)


def mesh_of(values: Iterable[Any]) -> Any:
    """Return the mesh of the DTensors among ``values``; None if there are none."""
    if _dtensor_class() is None:
        return None
    return next((value.device_mesh for value in values if is_dtensor(value)), None)


def moved(shard: torch.Tensor, before: MeshLayout, after: MeshLayout) -> torch.Tensor:
    """Move ``shard`` from one layout to another, by collectives if need be."""
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    if before.placements == after.placements:
        return shard
    pairs = list(zip(before.placements, after.placements, strict=True))
    if any(p.is_shard() and q.is_partial() for p, q in pairs):  # not known to torch 2.13
        alone = replicated(before.mesh)[0]
        between = before.placed(tuple(alone if q.is_partial() else p for p, q in pairs))
        return moved(moved(shard, before, between), between, after)
    found = redistribute_local_tensor(shard, before.spec(), after.spec())
    return found.wait() if hasattr(found, "wait") else found


def laid_out(value: Any, layout: MeshLayout) -> Any:
    """Return a DTensor, or a plain tensor of every rank, with the placements of ``layout``."""
    before = layout_of(value, layout.mesh)
    after = before.placed(layout.placements)
    return after.join(moved(shard_of(value), before, after))


def others_are_replicated() -> contextlib.AbstractContextManager[None]:
    """Take plain tensors among operands of DTensors as the same on every rank."""
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def without_repetitions(module: fx.GraphModule) -> None:
    """Move an operand once; DTensor moves it again for each operator that wants it moved."""
    from torch._functorch.compile_utils import fx_graph_cse

    module.graph = fx_graph_cse(module.graph)
    module.recompile()


def cost_of_collectives(module: fx.GraphModule) -> tuple[int, int]:
    """Return how often ranks wait for one another in a run of ``module``, and how often for an
    all-reduce.

    An all-reduce moves twice what a gather moves.
    """
    ops = torch.ops._c10d_functional
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    return targets.count(ops.wait_tensor.default), targets.count(ops.all_reduce.default)
