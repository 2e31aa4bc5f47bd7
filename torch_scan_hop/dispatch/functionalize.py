"""Functionalize (Python, functorch and C++): the body is functionalized, the scan passes on."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.operators import (
    CppFunctionalizeAPI,
    DispatchKey,
    current_dispatch_mode,
    from_functional,
    preserving_node_meta,
    to_functional,
)
from torch_scan_hop._torch.tracing import needs_no_trace, without_tokens
from torch_scan_hop.op import Body, scan_op


@scan_op.py_functionalize_impl
def functionalize(
    ctx: Any,
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    **options: Any,
) -> Any:
    if isinstance(ctx, CppFunctionalizeAPI):
        # XLA tensors. Their kernel traces the body itself; the body's identity is its cache key
        groups = [list(map(from_functional, group)) for group in (init, xs, additional_inputs)]
        with ctx.redispatch_to_next():
            if current_dispatch_mode() is None and groups[1][0].device.type == "xla":
                # no key comes between: straight to it
                results = scan_op.dispatch(DispatchKey.XLA, combine_fn, *groups, **options)
            else:
                results = scan_op(combine_fn, *groups, **options)
        return tuple(map(to_functional, results))
    unwrapped = [ctx.unwrap_tensors(group) for group in (init, xs, additional_inputs)]
    with ctx.redispatch_to_next():
        body: Body = combine_fn
        if not needs_no_trace(body):
            body = ctx.functionalize(without_tokens(preserving_node_meta(combine_fn)))
        return ctx.wrap_tensors(scan_op(body, *unwrapped, **options))
