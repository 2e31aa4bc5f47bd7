"""Check that the CPU kernels can work on some tensors, and how."""

from __future__ import annotations

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.qualify import is_transcendental

DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}


def check_tensors(examples: StepExamples) -> None:
    """Refuse tensors on other devices, and results that cannot be stored in vectors."""
    tensors = [v for v in examples.flat() if isinstance(v, torch.Tensor)]
    devices = {t.device.type for t in tensors} - {"cpu"}
    if devices:
        raise Refusal(f"it is for the CPU, and this is on {', '.join(sorted(devices))}")
    others = {t.dtype for t in examples.results()} - DTYPES
    if others:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in others)
        raise Refusal(f"not for carries or ys of {', '.join(names)}")


def are_tails_worth_masks(body: fx.GraphModule) -> bool:
    """Return True if lanes that fill no vector should be one masked vector, not one lane at a time.

    A mask costs some nanoseconds at each load and store. It is for float32 only, since torch 2.9
    masks no other type of those that are stored in vectors.
    """
    tensors = list(filter(is_tensor_node, body.graph.nodes))
    return all(map(_may_be_masked, tensors)) and any(map(is_transcendental, tensors))


def _may_be_masked(node: fx.Node) -> bool:
    """Return True if a masked vector can hold ``node``: a bool only where no load reads it."""
    dtype = value_of(node).dtype
    return dtype == torch.float32 or (dtype == torch.bool and node.op == "call_function")
