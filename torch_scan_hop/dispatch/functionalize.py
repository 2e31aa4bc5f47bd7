"""Functionalize (Python, functorch and C++): the body is functionalized, the scan passes on."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.operators import (
    CppFunctionalizeAPI,
    DispatchKey,
    current_dispatch_mode,
    from_functional,
    past_module_hooks,
    preserving_node_meta,
    to_functional,
)
from torch_scan_hop._torch.tracing import needs_no_trace, without_tokens
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs


@scan_op.functionalize_kernel
def functionalize(ctx: Any, body: Body, inputs: Inputs[Any], options: ScanOptions) -> Any:
    if isinstance(ctx, CppFunctionalizeAPI):
        # XLA tensors. Their kernel traces the body itself; the body's identity is its cache key
        plain = inputs.map(from_functional)
        with ctx.redispatch_to_next():
            if current_dispatch_mode() is None and plain.xs[0].device.type == "xla":
                # no key comes between: straight to it
                results = scan_op.run_at(DispatchKey.XLA, body, plain, options)
            else:
                results = call_scan(body, plain, options)
        return tuple(map(to_functional, results))
    unwrapped: Inputs[Any] = inputs.map(ctx.unwrap_tensors)
    with ctx.redispatch_to_next():
        if not needs_no_trace(body):
            body = ctx.functionalize(without_tokens(past_module_hooks(preserving_node_meta(body))))
        return ctx.wrap_tensors(call_scan(body, unwrapped, options))
