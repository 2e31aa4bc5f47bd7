"""ProxyTorchDispatchMode: one ``scan`` node, with the traced body as a submodule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop import inductor, legality
from torch_scan_hop._torch.captured_regions import running_regions
from torch_scan_hop._torch.exporting import before_a_program_runs, is_making_a_program
from torch_scan_hop._torch.fakes import under_compiler
from torch_scan_hop._torch.functorch_levels import opens_levels
from torch_scan_hop._torch.impure import is_random
from torch_scan_hop._torch.inference_regions import is_in_no_grad
from torch_scan_hop._torch.operators import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    reenter_make_fx,
    track_tensor_tree,
    unique_graph_id,
)
from torch_scan_hop._torch.selective_checkpoints import save_results
from torch_scan_hop._torch.tracing import (
    is_exporting_to_onnx,
    is_tracing_a_body,
    lstm_in_parts,
    needs_no_trace,
    trace,
)
from torch_scan_hop.body.cleanup import attributes_as_inputs, drop_lazy_values, write_out_alpha
from torch_scan_hop.body.copies import copy_of
from torch_scan_hop.body.float_operands import floats_as_tensors
from torch_scan_hop.body.for_export import as_it_was, fit_for_onnx, fit_for_readers, remember_policy
from torch_scan_hop.body.linalg_checks import thread_linalg_checks
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.body.stop_gradient import drop_stops
from torch_scan_hop.body.strided import own_strided_memory
from torch_scan_hop.capture.cache_key import add_cache_key
from torch_scan_hop.eager.nested import steps_of
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs, output_node
from torch_scan_hop.step import device_of


def _zeros(shape: Any, stride: Any, like: torch.Tensor) -> torch.Tensor:
    """Return zeros of these very strides, because a body may view what it gets as it will run, and
    in a trace on real tensors index with integer values."""
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.zeros(size, dtype=like.dtype, device=like.device).as_strided(shape, stride)


def _without_unread(body: fx.GraphModule, inputs: Inputs[Any]) -> Inputs[Any]:
    """Drop from ``inputs``, and from ``body``, what that does not read, as sizes that Dynamo
    lifts."""
    placeholders = inputs.signature.inputs_of(body).additional
    unread = [placeholder for placeholder in placeholders if not placeholder.users]
    if not unread:
        return inputs
    for placeholder in unread:
        body.graph.erase_node(placeholder)
    body.recompile()
    pairs = zip(inputs.additional, placeholders, strict=True)
    read = [value for value, placeholder in pairs if placeholder not in unread]
    return dataclasses.replace(inputs, additional=read)


def _body_of_this_trace(
    mode: ProxyTorchDispatchMode, combine_fn: Body, inputs: Inputs[Any]
) -> fx.GraphModule:
    """Return a graph that belongs to this trace, so that it may drop inputs that are not read."""
    if needs_no_trace(combine_fn):
        assert isinstance(combine_fn, fx.GraphModule)
        return copy_of(combine_fn)
    if mode.pre_dispatch and opens_levels(combine_fn):
        # a trace for export writes down what opens and closes levels, and not what they do: the
        # program would compute something else. So it gets the operators that they come to.
        fake_mode, fakes = step_examples(inputs)
        combine_fn = trace(combine_fn, fakes.flat(), fake_mode)
    # never the caller's tensors: make_fx would merge arguments that are one object
    examples = [
        *(torch.zeros_like(c, memory_format=torch.contiguous_format) for c in inputs.carry),
        *(_zeros(x.shape[1:], x.stride()[1:], x) for x in inputs.xs),
        *(
            _zeros(a.shape, a.stride(), a) if isinstance(a, torch.Tensor) else a
            for a in inputs.additional
        ),
    ]
    if mode.pre_dispatch:
        combine_fn = running_regions(combine_fn)
    with lstm_in_parts():
        body = reenter_make_fx(combine_fn)(*examples)
    if not mode.pre_dispatch:
        thread_linalg_checks(body.graph)
        drop_lazy_values(body.graph)
        own_strided_memory(body.graph)
        body.recompile()
    return body


def _as_tensor(mode: ProxyTorchDispatchMode, inputs: Inputs[Any], number: Any) -> torch.Tensor:
    """Write ``number`` as a tensor, in the form that torch's later pass for floats can compute."""
    device = device_of(inputs.carry, inputs.xs)
    # others may have no float64; operators of theirs take a scalar from the CPU, too
    device = device if device.type == "cuda" else torch.device("cpu")
    with mode:
        return torch.ones((), dtype=torch.float64, device=device) * number


def _flipped(
    mode: ProxyTorchDispatchMode, combine_fn: Body, inputs: Inputs[Any], options: ScanOptions
) -> Any:
    """Write a reversed scan as one over flipped xs, for readers that do not know ``reverse``."""
    n_carry = len(inputs.carry)
    with mode:
        flipped = dataclasses.replace(inputs, xs=[torch.flip(x, [0]) for x in inputs.xs])
        forward = dataclasses.replace(options, reverse=False)
        results = call_scan(combine_fn, flipped, forward)
        return (*results[:n_carry], *(torch.flip(ys, [0]) for ys in results[n_carry:]))


before_a_program_runs(as_it_was)


@scan_op.kernel(ProxyTorchDispatchMode)
def proxy(
    mode: ProxyTorchDispatchMode, combine_fn: Body, inputs: Inputs[Any], options: ScanOptions
) -> Any:
    if not inductor.register() and under_compiler():  # one that cannot lower a scan
        with disable_proxy_modes_tracing():
            body = _body_of_this_trace(mode, combine_fn, inputs)
        with mode:
            return steps_of(body, inputs, options)
    is_exported = is_making_a_program() and not is_tracing_a_body()
    if is_exported and options.reverse:
        return _flipped(mode, combine_fn, inputs, options)
    with disable_proxy_modes_tracing():
        body = _body_of_this_trace(mode, combine_fn, inputs)
        if not is_tracing_a_body() and not mode.pre_dispatch:
            drop_stops(body)
        inputs = _without_unread(body, inputs)
        if mode.pre_dispatch:
            inputs = attributes_as_inputs(body, inputs)
        else:
            write_out_alpha(body.graph)
            inputs = floats_as_tensors(body, inputs, functools.partial(_as_tensor, mode, inputs))
            legality.checked("capture", body, inputs.signature, functional=False)
        if is_exporting_to_onnx():
            options = fit_for_onnx(body, inputs, options)
        if is_exported:
            if not output_node(body.graph).args[0]:
                return ()  # torch.export.load finds no values in a node that has no results
            fit_for_readers(body, inputs.signature)
    return _written(mode, body, inputs, options, is_exported)


def _written(
    mode: ProxyTorchDispatchMode,
    body: fx.GraphModule,
    inputs: Inputs[Any],
    options: ScanOptions,
    is_exported: bool,
) -> Any:
    add_cache_key(body)
    _, name = unique_graph_id(mode, prefix="scan_body")
    tracer: Any = mode.tracer
    tracer.root.register_module(name, body)
    arguments = pytree.tree_map(
        tracer.unwrap_proxy, (body, inputs.carry, inputs.xs, tuple(inputs.additional))
    )
    keywords = {} if is_exported else options.non_defaults()
    node = tracer.create_proxy("call_function", scan_op, arguments, keywords, name="scan")
    if is_exported:
        remember_policy(node.node, options.checkpoint)
    with disable_proxy_modes_tracing():
        results = call_scan(body, inputs, options)
    tracked = track_tensor_tree(results, node, constant=None, tracer=tracer)
    if any(map(is_random, body.graph.nodes)):  # a checkpoint around it must not draw again
        save_results(node.node)
    if mode.pre_dispatch and is_in_no_grad(tracer.graph):
        # torch.export drops a region that has a graph in it: its pass looks for the node that sets
        # the grad mode at the head of the region, and finds the body. (Checked on torch 2.9.1 and
        # 2.15.0, which so differentiate torch.cond, too.)
        with mode:
            return tuple(result.detach() for result in tracked)
    return tracked
