"""What a scan returns: contiguous tensors that share their memory with nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from legality import IllegalRewrite
from legality.structure import outputs_of, value_of
from torch_scan_hop._torch.operators import is_plain_tensor, storage_of
from torch_scan_hop.body.node_kinds import viewed


def check_results_are_own(where: str, module: fx.GraphModule) -> None:
    """What a scan returns shares its memory with nothing, and is contiguous."""
    owners: dict[fx.Node, fx.Node] = {}
    for result in outputs_of(module):
        if not isinstance(result, fx.Node):
            continue  # nothing reads this one
        owner = viewed(result)
        if owner.op in ("placeholder", "get_attr"):
            raise IllegalRewrite(f"{where}: {result}: expected memory of its own, got {owner}'s")
        if owner in owners:
            raise IllegalRewrite(
                f"{where}: {result}: expected memory of its own, got that of another result, "
                f"{owners[owner]}"
            )
        owners[owner] = result
        value = value_of(result)
        if not value.is_contiguous():
            raise IllegalRewrite(
                f"{where}: {result}: expected a contiguous result, got strides {value.stride()}"
            )


def check_results_of_run(where: str, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """The same, of tensors."""
    owners = {storage_of(v): f"input {k}" for k, v in enumerate(inputs) if _has_memory(v)}
    for k, result in enumerate(results):
        if not _has_memory(result):
            continue
        storage = storage_of(result)
        if storage in owners:
            raise IllegalRewrite(
                f"{where}: result {k}: expected memory of its own, got that of {owners[storage]}"
            )
        owners[storage] = f"result {k}"
        if not result.is_contiguous():
            raise IllegalRewrite(
                f"{where}: result {k}: expected a contiguous tensor, got strides {result.stride()}"
            )


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_plain_tensor(value) and value.numel() > 0
