"""Choose the kernel of a scan: passes ask before it is lowered, and the lowering decides.

This module also says how the products of a counted loop are made.

A kernel for another device has a folder beside ``cpu`` and ``gpu``, and its classes are in the
tuple below.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.capabilities import attempt, is_there, why_off
from torch_scan_hop._torch.inductor_values import NotPointwise
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal, first_line
from torch_scan_hop.inductor.node import KernelNode, ScanCall
from torch_scan_hop.inductor.qualify import is_pointwise
from torch_scan_hop.rewrites import current_options
from torch_scan_hop.rewrites.classify import is_contraction
from torch_scan_hop.signature import results_of

log = logging.getLogger(__name__)

#: why kernels do not take a scan
Refusals = dict[type[KernelNode], str]

#: lowerings of this package's operators that each device implements in its own way
LOWERINGS: dict[Any, Any] = {}

_large_product: Any = None
_kernels: dict[str, tuple[type[KernelNode], ...]] = {}
if is_there("gpu_kernels"):
    with attempt("gpu_kernels"):
        from torch_scan_hop.inductor import gpu
        from torch_scan_hop.inductor.gpu.serving import is_gpu

        _kernels["gpu_kernels"] = gpu.KERNELS
if is_there("cpu_kernels"):
    with attempt("cpu_kernels"):
        from torch_scan_hop.inductor import cpu
        from torch_scan_hop.inductor.cpu import large_products, panels

        _kernels["cpu_kernels"] = cpu.KERNELS
        _large_product = large_products.large_product
        LOWERINGS.update(cpu.LOWERINGS)


def kernels() -> list[type[KernelNode]]:
    """Return the kinds of kernels, in order; the first that takes a scan is its kernel."""
    return [k for name, several in _kernels.items() if why_off(name) is None for k in several]


def may_be_one_kernel(body: fx.GraphModule, on_gpu: bool) -> bool:
    """Return True if a kernel of that device may take ``body``, as far as its operators tell; but
    none of small matrices, since those may yet become numbers."""
    own = _kernels.get("gpu_kernels" if on_gpu else "cpu_kernels", ())
    found = (k for k in kernels() if k in own and not k.takes_small_matrices)
    return current_options().one_kernel and any(k.may_qualify(body) for k in found)


def may_be_small_matrices(body: fx.GraphModule) -> bool:
    """Return True if a kernel of small matrices may take ``body``."""
    return any(k.takes_small_matrices and k.may_qualify(body) for k in kernels())


def is_on_gpu(values: Iterable[Any]) -> bool:
    """Return True if these operands are on a GPU, where launching each kernel takes time."""
    if "gpu_kernels" not in _kernels:
        return any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)
    return any(isinstance(v, torch.Tensor) and is_gpu(v.device) for v in values)


def may_be_parallel_in_time(trip_count: Any, carry: Iterable[torch.Tensor]) -> bool:
    """Return True if a GPU is to go through many steps at once: there are many, and so few lanes
    that no other kernel is as quick."""
    if "gpu_kernels" not in _kernels or not current_options().parallel_in_time:
        return False
    return all(gpu.is_long_and_thin(trip_count, c) for c in carry)


def replace_large_products(gm: fx.GraphModule, theirs: Collection[fx.Node]) -> None:
    """Replace products by those that the device makes faster than Inductor."""
    if LOWERINGS and why_off("cpu_kernels") is None:
        large_products.replace_large_products(gm, theirs)


def pack_weights(plan: Any, trip_count: Any) -> bool:
    """Pack weights of the loop's products before it; return True if products changed for that."""
    if not LOWERINGS or why_off("cpu_kernels") is not None:
        return False
    return panels.pack_weights(plan, trip_count)


def may_run_lane_by_lane(body: fx.GraphModule, n_carry: int) -> bool:
    """Return True if a step is pointwise, and makes nothing that is not as large as the carry."""
    shapes = [value_of(n).shape for n in results_of(body.graph)]
    return (
        current_options().one_kernel
        and is_pointwise(body)
        and n_carry > 0
        and all(are_all_known_equal(shape, shapes[0]) for shape in shapes)
    )


def is_product(node: fx.Node) -> bool:
    """Return True if a library's call makes ``node``, and its result is a buffer."""
    return is_contraction(node) or (_large_product is not None and node.target is _large_product)


def kernel_of(call: ScanCall) -> tuple[KernelNode | None, Refusals]:
    """Return the node of the first kernel that takes this scan, and why those before it do not."""
    if not current_options().one_kernel:
        return None, dict.fromkeys(kernels(), "one_kernel is switched off")
    refusals: Refusals = {}
    for kernel in kernels():
        try:
            kernel.check(call.body)
            return kernel.lower(call), refusals
        except Refusal as refusal:
            refusals[kernel] = first_line(refusal)  # fx adds where in a graph it was
        except NotPointwise as error:
            refusals[kernel] = f"it needs a buffer within a step ({first_line(error)})"
        except Exception as error:  # the counted loop runs every body
            log.warning("no %s for a scan, which is a counted loop", kernel.__name__, exc_info=True)
            refusals[kernel] = f"it failed: {type(error).__name__}"
    return None, refusals
