"""Decide when the values of a step with products are stored.

A step is made of *nests*, loops over rows and the elements of a row, and of *products*. Nests are
put in *stages*: those of stage ``j`` run before product ``j``. A carry is written once nothing
reads its old value any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch_scan_hop.inductor.cpu.places import Matrix, Place, Store, product_position
from torch_scan_hop.inductor.step import CARRY


def assign_stages(stores: Sequence[Store], operands: Sequence[Matrix]) -> None:
    """Put each store as early as what it reads allows; a carry once nothing reads its old value."""
    last_read: dict[str, int] = {}
    for store in stores:
        made = [product_position(n) for n, _ in store.reads]
        store.stage = max((j + 1 for j in made if j is not None), default=0)
        for name, _ in store.reads:
            last_read[name] = max(last_read.get(name, 0), store.stage)
    for j, operand in enumerate(operands):
        last_read[operand.name] = max(last_read.get(operand.name, 0), j + 1)
    for store in stores:
        if store.carry is not None:
            store.stage = max(store.stage, last_read.get(f"{CARRY}{store.carry}", 0))


def nests_of_stages(stores: Sequence[Store], n_stages: int) -> list[list[list[Store]]]:
    """Return the nests of each stage, in order; stores of one shape are a nest."""
    stages = []
    for stage in range(n_stages):
        nests: dict[tuple[Any, ...], list[Store]] = {}
        for store in stores:
            if store.stage == stage:
                nests.setdefault(store.shape, []).append(store)
        # what reads a carry's old value comes before what writes one
        stages.append(sorted(nests.values(), key=lambda nest: any(map(_is_carry, nest))))
    return stages


def overwritten_carry(
    carry: Sequence[Place], stages: Sequence[Sequence[Sequence[Store]]], delayed: Collection[int]
) -> int | None:
    """Return a carry, not in ``delayed``, whose old value is read after it was written, or None."""
    order = [nest for stage in stages for nest in stage]
    for k in range(len(carry)):
        if k in delayed:
            continue
        written = next(i for i, nest in enumerate(order) if any(s.carry == k for s in nest))
        for i, store in ((i, store) for i, nest in enumerate(order) for store in nest):
            for name, at in store.reads:
                same_lane = i == written and at == _own_lane(carry[k], store)
                if name == f"{CARRY}{k}" and i >= written and not same_lane:
                    return k
    return None


def _is_carry(store: Store) -> bool:
    return store.carry is not None


def _own_lane(carry: Place, store: Store) -> Any:
    if store.shape != tuple(carry.layout.size):
        return None
    # Inductor leaves the index of a dimension of size 1 out
    lanes = [0 if n == 1 else i for i, n in zip(store.lanes, store.shape, strict=True)]
    return carry.index(lanes)
