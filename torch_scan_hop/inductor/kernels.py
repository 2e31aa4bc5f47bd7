"""Whether a scan is one kernel: the passes ask before it is lowered, and the lowering decides.

A kernel for another device stands beside ``cpu``, and its classes in the tuple below.
"""

from __future__ import annotations

import logging

from torch import fx

from torch_scan_hop._torch.inductor_values import NotPointwise
from torch_scan_hop.inductor import cpu, gpu
from torch_scan_hop.inductor.node import KernelNode, ScanCall
from torch_scan_hop.rewrites import current_options

log = logging.getLogger(__name__)

#: the first that takes a scan is its kernel
KERNELS: tuple[type[KernelNode], ...] = (*gpu.KERNELS, *cpu.KERNELS)


def may_be_one_kernel(body: fx.GraphModule) -> bool:
    """As far as the operators of ``body`` can tell."""
    return current_options().one_kernel and any(k.may_qualify(body) for k in KERNELS)


def kernel_of(call: ScanCall) -> KernelNode | None:
    """The node of the kernel that takes this scan; None if none does."""
    if not current_options().one_kernel:
        return None
    nodes = (_kernel_or_none(kernel, call) for kernel in KERNELS)
    return next((node for node in nodes if node is not None), None)


def _kernel_or_none(kernel: type[KernelNode], call: ScanCall) -> KernelNode | None:
    """The counted loop runs every body: whatever is wrong with a kernel, it is not an error."""
    try:
        return kernel.lower(call) if kernel.may_qualify(call.body) else None
    except NotPointwise:
        return None
    except Exception:
        log.warning("no %s for a scan, which is a counted loop", kernel.__name__, exc_info=True)
        return None
