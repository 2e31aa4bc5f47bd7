"""Tests of which tensors the CPU kernels work on, and how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.inductor.qualify import is_transcendental

DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32}


def are_on_cpu(values: Iterable[Any]) -> bool:
    return all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))


def are_stored_in_vectors(results: Iterable[torch.Tensor]) -> bool:
    return all(t.dtype in DTYPES for t in results)


def are_tails_worth_masks(body: fx.GraphModule) -> bool:
    """Return True if lanes that fill no vector should be one masked vector, not one lane at a time.

    A mask costs some nanoseconds at each load and store. It is for float32 only, since torch 2.9
    masks no other type of those that are stored in vectors.
    """
    tensors = list(filter(is_tensor_node, body.graph.nodes))
    return all(map(_may_be_masked, tensors)) and any(map(is_transcendental, tensors))


def _may_be_masked(node: fx.Node) -> bool:
    """Return True if a masked vector can hold ``node``.

    A bool is computed in registers, as a condition, and no masked load reads it.
    """
    dtype = node.meta["val"].dtype
    return dtype == torch.float32 or (dtype == torch.bool and node.op == "call_function")
