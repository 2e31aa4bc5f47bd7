"""The body as a functional graph of ATen operators that mean to torch_xla what they mean to torch.

The body is traced on fakes, so that its errors come before there is any XLA tensor without data:
such a placeholder that escapes in a traceback causes a segfault later on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.impure import is_check
from torch_scan_hop._torch.tracing import DATA_DEPENDENT_ERRORS, trace
from torch_scan_hop.body.cleanup import attributes_as_inputs, clean_up
from torch_scan_hop.body.meta_values import call_recorded, replace, value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.body.stop_gradient import drop_stops
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Inputs, Signature

aten = torch.ops.aten

_READS_DATA = {aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default}


@dataclass(frozen=True)
class StepGraph:
    """``module: (carry, x, additional, attributes) -> (carry', ys)``.

    ``attributes`` are the XLA tensors that the traced module holds itself. They are inputs, for
    two reasons: their data changes in place between calls (an optimizer's step), and a pending
    one would be computed anew in every step of the loop.
    """

    module: fx.GraphModule
    signature: Signature
    attributes: tuple[torch.Tensor, ...]


def trace_step(body: Body, inputs: Inputs[Any]) -> StepGraph:
    mode, examples = step_examples(inputs)
    try:
        with torch.no_grad():
            module = trace(body, examples.flat(), mode)
    except DATA_DEPENDENT_ERRORS as error:
        raise reads_data(str(error).splitlines()[0]) from None
    for node in module.graph.nodes:
        if node.target in _READS_DATA or _leaves_device(node):
            raise reads_data(str(node.target))
    for check in filter(is_check, module.graph.nodes):  # compiled programs have none
        module.graph.erase_node(check)
    clean_up(module)
    drop_stops(module)
    passes = [_spell_out_dropout, choose_by_masks, round_to_torchs_dtypes]
    legality.run_passes(module, passes)
    with_attributes = attributes_as_inputs(module, inputs, lambda v: v.device.type == "xla")
    attributes = with_attributes.additional[len(inputs.additional) :]
    signature = with_attributes.signature
    legality.checked("attributes_as_inputs", module, signature, any_layout=True)
    return StepGraph(module, signature, tuple(attributes))


def reads_data(what: str) -> RuntimeError:
    return RuntimeError(
        f"scan: combine_fn reads the value of a tensor on the XLA device ({what}), which has none "
        "while the loop is being compiled. Compute with tensors instead of .item(), int(), "
        "float(), bool(), nonzero() or a boolean index, or choose with torch.where; stay on the "
        "device instead of .cpu()."
    )


def _leaves_device(node: fx.Node) -> bool:
    """Return True if ``node`` copies to the host. Without data torch_xla aborts the process."""
    devices = [value_of(n).device.type for n in filter(is_tensor_node, node.all_input_nodes)]
    return "xla" in devices and is_tensor_node(node) and value_of(node).device.type != "xla"


# --- what torch_xla makes of operators that it has ---


def _spell_out_dropout(graph: fx.Graph) -> None:
    """Write ``native_dropout`` as a comparison and a product.

    torch_xla 2.9.0 calls the mask it returns bool, but its HLO is a float, already scaled: a
    gradient computed from it would be scaled twice.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        results = {user.args[1]: user for user in node.users}
        with graph.inserting_before(node):
            if train is False or p == 0:
                mask = call_recorded(aten.ones_like.default, x, dtype=torch.bool)
                dropped = x
            else:
                uniform = call_recorded(aten.rand_like.default, x, dtype=torch.float32)
                mask = call_recorded(aten.ge.Scalar, uniform, p)
                scale = 0.0 if p == 1 else 1 / (1 - p)
                kept = call_recorded(aten.mul.Tensor, x, mask)
                dropped = call_recorded(aten.mul.Tensor, kept, scale)
        for k, value in enumerate((dropped, mask)):
            if k in results:
                replace(results[k], value)
        graph.erase_node(node)


def choose_by_masks(graph: fx.Graph) -> None:
    """Write ``h[mask] = value`` as a choice, where one value is for all places.

    torch_xla looks for the places with ``nonzero``, which has no shape while a loop is compiled:
    the scan would run step by step.
    """
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        target, indices, value, *accumulate = node.args
        *whole, mask = indices
        is_mask = is_tensor_node(mask) and value_of(mask).dtype == torch.bool
        is_plain = not any(accumulate) and all(index is None for index in whole)
        if is_mask and is_plain and value_of(value).dim() == 0:
            with graph.inserting_before(node):
                chosen = _chosen(target, mask, value, len(whole))
            replace(node, chosen)


def _chosen(target: Any, mask: Any, value: Any, first: int) -> fx.Node:
    """Return ``value`` where ``mask`` says so, which begins at dimension ``first``."""
    shape = value_of(mask).shape
    after = value_of(target).dim() - first - len(shape)
    if after:
        mask = call_recorded(aten.reshape.default, mask, [*shape, *[1] * after])
    return call_recorded(aten.where.self, mask, value, target)


_COMPUTES_IN_ONE_DTYPE = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.div.Tensor_mode,
    aten.pow.Tensor_Tensor,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.atan2.default,
    aten.where.self,
}


def round_to_torchs_dtypes(graph: fx.Graph) -> None:
    """Where the HLO would be of a wider dtype than the result, compute in that one, and round.

    To torch a 0-d tensor has less weight than others: half plus a 0-d float64 tensor is half. In
    the HLO of torch_xla 2.9.0 the sum is float64, although the tensor calls itself half.
    """
    for node in list(graph.nodes):
        if node.target not in _COMPUTES_IN_ONE_DTYPE:
            continue
        first = 1 if node.target is aten.where.self else 0
        dtypes = [value_of(a).dtype for a in node.args[first:] if is_tensor_node(a)]
        dtype = value_of(node).dtype
        widest = functools.reduce(torch.promote_types, dtypes, dtype)
        if widest == dtype:
            continue
        with graph.inserting_before(node):
            operands = [_as(a, widest) for a in node.args[first:]]
            wide = call_recorded(node.target, *node.args[:first], *operands, **node.kwargs)
            rounded = _as(wide, dtype)
        replace(node, rounded)


def _as(value: fx.node.Argument, dtype: torch.dtype) -> fx.node.Argument:
    if not is_tensor_node(value) or value_of(value).dtype == dtype:
        return value
    return call_recorded(aten._to_copy.default, value, dtype=dtype)
