"""The joint graph of one step: outputs, and the gradients of the differentiated inputs.

::

    inputs:   carry, xs, additional, cotangents of (differentiated carry', differentiated ys)
    outputs:  (carry', ys), (gradients of the differentiated inputs; None where there is none)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.impure import is_random
from torch_scan_hop._torch.operators import OpOverload, preserving_node_meta
from torch_scan_hop._torch.tracing import trace
from torch_scan_hop.autodiff.custom import gradients_of, has_custom_function
from torch_scan_hop.autodiff.differentiability import GradientFlow
from torch_scan_hop.autodiff.differentiable import with_differentiable_operators
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.body.meta_values import replace, value_of
from torch_scan_hop.body.node_kinds import all_nodes
from torch_scan_hop.body.part_writes import add_at_indices
from torch_scan_hop.body.stop_gradient import with_stops
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Inputs, Signature, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class JointGraph:
    module: fx.GraphModule
    signature: Signature
    flow: GradientFlow

    def placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    def primals(self) -> list[fx.Node]:
        return self.placeholders()[: self.signature.n_inputs]

    def cotangents(self) -> list[fx.Node]:
        return self.placeholders()[self.signature.n_inputs :]

    def outputs(self) -> list[Any]:
        return list(results_of(self.module.graph)[0])

    def gradients(self) -> list[Any]:
        """Return one gradient per input, None where it is not differentiated or not reached."""
        values = iter(results_of(self.module.graph)[1])
        return [next(values) if flag else None for flag in self.flow.inputs()]


# Their derivatives read factors that autograd takes for constants, but for one that is to be
# differentiated again: then torch writes another formula (linalg_solve_backward and its kind).
_DIFFERENTIATED_ONCE = {
    aten._linalg_solve_ex.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten.linalg_lstsq.default,
    aten._weight_norm_interface.default,
}


def _is_differentiated_once(node: fx.Node) -> bool:
    if node.target is aten._linalg_det.default:  # ours has an operator for a derivative
        return any(user.args[1] > 0 for user in node.users)  # type: ignore[operator]
    return node.target in _DIFFERENTIATED_ONCE


def _vjp_of_step(
    body: Body, signature: Signature, flow: GradientFlow, create_graph: bool = False
) -> Any:
    # node by node: tags that checkpoints left on the body's nodes reach the joint graph
    step = preserving_node_meta(body)
    if not has_custom_function(body):  # its forward is no_grad's, too
        step = with_stops(step)

    def joint(*flat: Any) -> Any:
        primals, cotangents = flat[: signature.n_inputs], flat[signature.n_inputs :]
        with torch.enable_grad():
            primals = tuple(
                aten.alias(p).requires_grad_() if flag else p
                for p, flag in zip(primals, flow.inputs(), strict=True)
            )
            outputs = tuple(step(*primals))
            differentiated = [o for o, flag in zip(outputs, flow.outputs(), strict=True) if flag]
            wanted = [p for p, flag in zip(primals, flow.inputs(), strict=True) if flag]
            gradients = gradients_of(differentiated, cotangents, wanted, create_graph=create_graph)
        with torch.no_grad():
            return tuple(map(aten.alias, outputs)), gradients

    return joint


def trace_joint(
    body: Body,
    examples: Inputs[Any],
    output_examples: list[torch.Tensor],
    flow: GradientFlow,
    mode: FakeTensorMode,
) -> JointGraph:
    """Trace the joint graph; cotangents are like ``output_examples``, fresh fakes."""
    cotangents = [o for o, flag in zip(output_examples, flow.outputs(), strict=True) if flag]
    body, signature = with_differentiable_operators(body), examples.signature
    inputs = [*examples.flat(), *cotangents]
    module = trace(_vjp_of_step(body, signature, flow), inputs, mode)
    if any(map(_is_differentiated_once, all_nodes(module))):
        module = trace(_vjp_of_step(body, signature, flow, create_graph=True), inputs, mode)
    clean_up(module)
    legality.run_passes(module, [add_at_indices, forget_random_states])
    return JointGraph(module, signature, flow)


_STATES = {"philox_seed", "philox_offset", "rng_state", "unused"}


def forget_random_states(graph: fx.Graph) -> None:
    """Let zeros stand for random states of attention that drops nothing.

    The operators of a GPU return that state in any case, as tensors that lie on the CPU or on the
    GPU, other than their fakes say. Saved for the backward they would be stacked, by a kernel of
    the GPU that cannot read the CPU's memory. The backward does not read them then.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.getitem:
            continue
        source, position = node.args
        if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
            continue
        names = dict(enumerate(result.name for result in source.target._schema.returns))
        if names.get(position) in _STATES and not is_random(source):
            value = value_of(node)
            with graph.inserting_before(node):
                zeros = graph.call_function(
                    aten.full.default,
                    (list(value.shape), 0),
                    {"dtype": value.dtype, "device": value.device},
                )
            zeros.meta = {"val": value}
            replace(node, zeros)
