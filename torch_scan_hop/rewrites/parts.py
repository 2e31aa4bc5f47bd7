"""Parts of a body graph as functions of their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import past_module_hooks
from torch_scan_hop._torch.transforms import over_first_dimension
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.linalg_checks import linalg_check
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node, is_view
from torch_scan_hop.rewrites.batchable import stand_in_for
from torch_scan_hop.rewrites.classify import Dependence, ancestors

aten = torch.ops.aten


def unique(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))


def computed_once(
    batched: Sequence[fx.Node], sunk: Sequence[fx.Node], dependence: dict[fx.Node, Dependence]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Let work after the loop take from work before it what that computes, too; return both."""
    before, after = ancestors(batched), ancestors(sunk)
    after_only = after - before

    def is_taken(node: fx.Node) -> bool:
        if node not in after or dependence[node] is not Dependence.XS:
            return False
        is_work = node.op == "call_function" and is_tensor_node(node) and not is_view(node)
        return node in sunk or (is_work and not after_only.isdisjoint(node.users))

    nodes = batched[0].graph.nodes if batched else ()
    taken = unique([*batched, *(n for n in nodes if n in before and is_taken(n))])
    return taken, [node for node in sunk if node not in taken]


class Part:
    """The part of a body that computes ``outputs`` from ``inputs``, without those that are unused,
    and runs what is ``impure``, such as draws, though nothing may read it."""

    def __init__(
        self,
        owner: fx.GraphModule,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        name: str,
        impure: Sequence[fx.Node] = (),
    ) -> None:
        candidates = unique(inputs)
        wanted = ancestors([*outputs, *impure], stop=set(candidates))
        self.inputs = [n for n in candidates if n in wanted]
        self.outputs = list(outputs)
        self.module = extract(owner, self.inputs, outputs, name, impure=impure)

    def __call__(self, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the outputs, by node."""
        results = past_module_hooks(self.module)(*[values[n] for n in self.inputs])
        return dict(zip(self.outputs, results, strict=True))

    def nodes(self) -> set[fx.Node]:
        """Return the nodes of the owner's graph that this part computes."""
        return ancestors(self.outputs, stop=set(self.inputs)) - set(self.inputs)

    def over_steps(
        self, stacks: dict[fx.Node, Any], values: dict[fx.Node, Any], reverse: bool
    ) -> dict[fx.Node, Any]:
        """Return the outputs of all steps, stacked; ``values`` are the same at every step.
        ``reverse``: the last step runs first, so that its error is the one to raise."""
        arguments = [stacks[n] if n in stacks else values[n] for n in self.inputs]
        stacked = [n in stacks for n in self.inputs]
        n_steps = arguments[stacked.index(True)].shape[0]
        module = self._backwards if reverse else self._forwards
        results = over_first_dimension(module.forward, arguments, stacked, n_steps)
        return dict(zip(self.outputs, results, strict=True))

    @functools.cached_property
    def _forwards(self) -> fx.GraphModule:
        return self._batchable(False)

    @functools.cached_property
    def _backwards(self) -> fx.GraphModule:
        has_check = any(node.target is linalg_check for node in self.module.graph.nodes)
        return self._batchable(True) if has_check else self._forwards

    def _batchable(self, reverse: bool) -> fx.GraphModule:
        """Return the module, with operators that have a batching rule for those that have none."""
        module = copied(self.module, name="Batchable")
        for node in module.graph.nodes:
            if node.target is linalg_check:
                node.args = (*node.args, reverse)
            stand_in = stand_in_for(node.target) if node.op == "call_function" else None
            if stand_in is not None:
                node.target = stand_in
            elif node.target is aten.sym_size.int:
                node.target = torch.Tensor.size  # of one step; the operator knows no vmap
            elif node.target in _DECIDED_BY_SCALARS:
                _convert_scalars(node)
        module.recompile()
        return module


#: vmap lets a scalar among their operands, which has dimensions when it is batched, decide the
#: dtype, or refuses it (torch 2.9.1 to 2.15.0)
_DECIDED_BY_SCALARS = {
    *(aten.where.self, aten.addcmul.default, aten.addcdiv.default, aten.lerp.Tensor),
    *(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor),
}


def _convert_scalars(node: fx.Node) -> None:
    """Give the scalars among the operands of ``node`` the dtype of its result."""
    dtype = value_of(node).dtype
    for operand in node.all_input_nodes:
        value = value_of(operand)
        if not isinstance(value, torch.Tensor) or value.dim() or value.dtype == dtype:
            continue
        if value.dtype.is_floating_point:
            with node.graph.inserting_before(node):
                converted = node.graph.call_function(torch.Tensor.to, (operand, dtype))
            node.replace_input_with(operand, converted)


def extract(
    owner: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    name: str,
    names: Sequence[str] = (),
    impure: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """Return nodes of ``owner``'s graph as a module; ``names`` are its inputs'."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node, own in zip(inputs, names or [node.name for node in inputs], strict=True):
        env[node] = graph.placeholder(own)
        env[node].meta = dict(node.meta)
    wanted = ancestors([*outputs, *impure], stop=set(inputs))
    for node in owner.graph.nodes:
        if node in wanted and node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(fx.map_arg(tuple(outputs), lambda n: env[n]))
    graph.lint()
    return fx.GraphModule(owner, graph, name)
