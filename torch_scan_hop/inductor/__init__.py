"""Inductor: a scan becomes a counted loop in the generated wrapper, or one kernel.

``passes``  runs on the graph before it is lowered
``loop``    the lowering; the IR node of a counted loop, and its code in Python and C++
``body``    the step in destination-passing style: it writes its results in place
``kernels`` chooses the kernel of a scan; ``cpu/`` and ``gpu/`` have them. Both use
            ``qualify``, ``step``, ``lane_body`` (a pointwise step), ``product_lowering``
``node``    the common part of the IR nodes of a scan
``pairs``   complex scans as scans of real and imaginary parts; ``pair_rules``: the arithmetic
"""

from __future__ import annotations

import functools

from torch_scan_hop._torch.capabilities import attempt, is_there


def register() -> bool:
    """Teach Inductor about scan when a graph that holds one is traced, if it can be taught."""
    if not is_there("counted_loop"):
        return False
    with attempt("counted_loop"):
        _register()
        return True
    return False


@functools.cache
def _register() -> None:
    from torch_scan_hop._torch.inductor import register_own_lowering
    from torch_scan_hop._torch.inductor_passes import (
        keep_functional,
        let_scans_be_empty,
        replace_scan_pass,
    )
    from torch_scan_hop.body.carries_in import carries_in_op
    from torch_scan_hop.capture.cache_key import has_cache_key
    from torch_scan_hop.inductor.kernels import LOWERINGS
    from torch_scan_hop.inductor.loop import lower_carries_in, lower_to_loop_or_kernel
    from torch_scan_hop.inductor.pairs import joined_parts, lower_joined_parts
    from torch_scan_hop.inductor.passes import prepare_scans
    from torch_scan_hop.op import scan_op

    register_own_lowering(scan_op, lower_to_loop_or_kernel)
    register_own_lowering(carries_in_op, lower_carries_in)
    register_own_lowering(joined_parts, lower_joined_parts)
    for op, lower in LOWERINGS.items():
        register_own_lowering(op, lower)
    keep_functional(has_cache_key)
    let_scans_be_empty(scan_op)
    replace_scan_pass(scan_op, prepare_scans)
