"""Find the counted loops that CUDA graphs may replay; their wrapper hands them to a runner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_scan_hop._torch.inductor import is_cudagraphed, is_tensor_ir, uses_cpp_wrapper
from torch_scan_hop._torch.replaced import ambient, replaced
from torch_scan_hop.cuda_graphs.capturable import why_not_captured
from torch_scan_hop.cuda_graphs.devices import is_served
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.rewrites import current_options

CUDA_GRAPH = "a CUDA graph"


_state = ambient(in_a_graph=False)


def within_a_graph(is_replayed: bool) -> AbstractContextManager[None]:
    """Enter this around the lowering of a step: what is replayed holds no graphs of its own."""
    return replaced(_state, in_a_graph=_state.in_a_graph or is_replayed)


def why_not_replayed(call: ScanCall) -> str:
    """Return why the loop is not replayed; empty if it may be."""
    if not current_options().cuda_graphs:
        return "cuda_graphs is switched off"
    if uses_cpp_wrapper():
        return "the wrapper is C++"
    if is_cudagraphed():
        return "torch makes one graph of all that is compiled with it"
    if _state.in_a_graph:
        return "it is in a step of a loop that is replayed"
    if not all(map(is_tensor_ir, call.operands.flat())):
        return "a number among its operands is not known when it is captured"
    if not all(map(_is_captured_as_it_is, call.examples.flat()[1:])):
        return "its tensors are on another device, or of sizes that are not known"
    return why_not_captured(call.body)


def _is_captured_as_it_is(value: Any) -> bool:
    """Return True if the device is served and all sizes but a stack's number of steps are known."""
    sizes = (*value.shape[1:], *value.stride())
    return is_served(value.device) and not any(isinstance(n, torch.SymInt) for n in sizes)
