"""DTensors: a scan of them is a scan of their shards, on every rank.

Above this key a DTensor counts as the whole tensor: it is differentiated, batched and described
like a plain one. Here each rank takes its shards out, and the body becomes one of shards (see
``sharding``). The operator is then called again with those, so that the loop, the rewrites and the
compilers see plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_scan_hop._torch.dtensors import (
    MeshLayout,
    layout_of,
    mesh_of,
    moved,
    replicated,
    shard_of,
    stretches_of,
    summed,
)
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.sharding import sharded_body
from torch_scan_hop.sharding.over_ranks import scan_over_ranks
from torch_scan_hop.signature import Inputs


def _shard(value: Any, mesh: Any, after: MeshLayout | None) -> Any:
    """Return this rank's part of ``value`` laid out as ``after``; a number is itself."""
    if after is None or not isinstance(value, Tensor):
        return value
    return moved(shard_of(value), layout_of(value, mesh), after)


def _layouts_in_a_step(given: Inputs[Any], mesh: Any, over_steps: int | None) -> Inputs[Any]:
    """Return the layouts in a step. Along the dimension of the mesh whose ranks run different steps
    at once, all but xs is the same on all ranks."""
    alone = replicated(mesh)[0]
    # in a step nothing is split along time
    whole = Inputs(given.carry, [x.whole_along_steps() for x in given.xs], given.additional)
    return whole.map(lambda layout: None if layout is None else layout.at(over_steps, alone))


@scan_op.sharded_kernel
def of_shards(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    mesh = mesh_of(inputs.flat())
    given = inputs.map(lambda v: layout_of(v, mesh) if isinstance(v, Tensor) else None)
    stretches = stretches_of(given.xs, inputs.trip_count)
    over_steps = None if stretches is None else stretches.mesh_dim
    in_a_step = _layouts_in_a_step(given, mesh, over_steps)
    of_step = sharded_body(body, inputs, in_a_step, over_steps)
    xs = [x.over_steps(stretches) for x in in_a_step.xs]
    layouts: Inputs[Any] = Inputs(of_step.carry, xs, in_a_step.additional)
    pairs = zip(inputs.flat(), layouts.flat(), strict=True)
    shards = inputs.signature.split_inputs([_shard(value, mesh, after) for value, after in pairs])
    carry, stacks = of_step.carry, [y.of_stack(inputs.trip_count) for y in of_step.ys]
    if stretches is None:
        results: Sequence[Any] = call_scan(of_step.body, shards, options)
    else:
        results, sums = scan_over_ranks(of_step.body, shards, options, stretches)
        partial = summed(mesh)[0]
        carry = [c.at(over_steps, partial) if k in sums else c for k, c in enumerate(carry)]
        stacks = [y.over_steps(stretches) for y in stacks]
    made = zip([*carry, *stacks], results, strict=True)
    return tuple(layout.join(result) for layout, result in made)
