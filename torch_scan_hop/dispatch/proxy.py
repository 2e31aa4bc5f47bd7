"""ProxyTorchDispatchMode: one ``scan`` node, with the traced body as a submodule."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop import inductor, legality
from torch_scan_hop._torch.operators import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    reenter_make_fx,
    track_tensor_tree,
    unique_graph_id,
)
from torch_scan_hop._torch.tracing import is_tracing_a_body, needs_no_trace
from torch_scan_hop.graph_cleanup import copy_of, drop_lazy_views, own_strided_memory
from torch_scan_hop.linalg_checks import thread_linalg_checks
from torch_scan_hop.op import Body, scan_op
from torch_scan_hop.signature import Signature
from torch_scan_hop.stamp import stamp
from torch_scan_hop.stops import drop_stops


def _zeros(shape: Any, stride: Any, like: torch.Tensor) -> torch.Tensor:
    """Zeros of these very strides: a body may view what it gets only as it will run.

    Not empty: in a trace on real tensors a body may index with integer values.
    """
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.zeros(size, dtype=like.dtype, device=like.device).as_strided(shape, stride)


def _fresh(value: Any) -> Any:
    return _zeros(value.shape, value.stride(), value) if isinstance(value, torch.Tensor) else value


def _fresh_slice(xs: torch.Tensor) -> torch.Tensor:
    return _zeros(xs.shape[1:], xs.stride()[1:], xs)


def _drop_unread(body: fx.GraphModule, first: int, additional: Any) -> tuple[Any, ...]:
    """Additional inputs that the body reads; Dynamo lifts the size of every symbolic shape."""
    placeholders = body.graph.find_nodes(op="placeholder")[first:]
    unread = [placeholder for placeholder in placeholders if not placeholder.users]
    if not unread:
        return tuple(additional)
    for placeholder in unread:
        body.graph.erase_node(placeholder)
    body.recompile()
    pairs = zip(additional, placeholders, strict=True)
    return tuple(value for value, placeholder in pairs if placeholder not in unread)


@scan_op.py_impl(ProxyTorchDispatchMode)
def proxy(
    mode: ProxyTorchDispatchMode,
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    **options: Any,
) -> Any:
    inductor.register()
    with disable_proxy_modes_tracing():
        if needs_no_trace(combine_fn):
            assert isinstance(combine_fn, fx.GraphModule)
            body = copy_of(combine_fn)  # this trace's own: it may drop inputs that are not read
        else:
            # never the caller's tensors: make_fx would merge arguments that are one object
            examples = [
                *(torch.zeros_like(c, memory_format=torch.contiguous_format) for c in init),
                *map(_fresh_slice, xs),
                *map(_fresh, additional_inputs),
            ]
            body = reenter_make_fx(combine_fn)(*examples)
            if not mode.pre_dispatch:
                thread_linalg_checks(body.graph)
                drop_lazy_views(body.graph)
                own_strided_memory(body.graph)
                body.recompile()
        if not is_tracing_a_body() and not mode.pre_dispatch:
            drop_stops(body)
        additional_inputs = _drop_unread(body, len(init) + len(xs), additional_inputs)
        if not mode.pre_dispatch:
            signature = Signature(len(init), len(xs), len(additional_inputs))
            legality.checked("capture", body, signature, functional=False)
    stamp(body)
    _, name = unique_graph_id(mode, prefix="scan_body")
    tracer: Any = mode.tracer
    tracer.root.register_module(name, body)
    arguments = pytree.tree_map(
        tracer.unwrap_proxy,
        (body, init, xs, additional_inputs),
    )
    node = tracer.create_proxy("call_function", scan_op, arguments, options, name="scan")
    with disable_proxy_modes_tracing():
        results = scan_op(body, init, xs, additional_inputs, **options)
    return track_tensor_tree(results, node, constant=None, tracer=tracer)
