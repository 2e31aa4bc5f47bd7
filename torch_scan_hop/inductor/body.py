"""A step in destination-passing style.

::

    before: (carry, x, additional) -> (carry', y)
    after:  (t, carry, xs, additional, next_carry, ys) -> ()    writes next_carry and ys[t]

``x`` and ``ys[t]`` are views at offset ``t * stride`` of the whole tensors, so that nothing
is copied or allocated for them. A scan in the body whose result is one of the step's writes
``into`` its place.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop.op import scan_op
from torch_scan_hop.signature import Inputs, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class StepExamples:
    """Fake tensors for the whole inputs and outputs, storage offset 0."""

    index: Any
    inputs: Inputs[Any]
    ys: list[Any]

    def flat(self) -> list[Any]:
        return [self.index, *self.inputs.flat(), *self.results()]

    def results(self) -> list[Any]:
        return [*self.inputs.carry, *self.ys]


def _placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _placeholders(graph: fx.Graph, name: str, values: Sequence[Any]) -> list[fx.Node]:
    return [_placeholder(graph, f"{name}_{k}", v) for k, v in enumerate(values)]


class _Writer:
    def __init__(self, fake_mode: Any) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode

    def call(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def size(self, whole: fx.Node, value: Any, target: Any, dim: int) -> Any:
        return value if isinstance(value, int) else self.call(target, (whole, dim), value)

    def at(self, whole: fx.Node, index: fx.Node) -> fx.Node:
        """``whole[index]`` as a strided view."""
        full = whole.meta["val"]
        stride = self.size(whole, full.stride(0), aten.sym_stride.int, 0)
        offset = self.call(operator.mul, (index, stride), index.meta["val"] * full.stride(0))
        sizes = [
            self.size(whole, s, aten.sym_size.int, d + 1) for d, s in enumerate(full.shape[1:])
        ]
        strides = [
            self.size(whole, s, aten.sym_stride.int, d + 1) for d, s in enumerate(full.stride()[1:])
        ]
        with self.fake_mode:
            value = torch.empty_strided(
                full.shape[1:], full.stride()[1:], dtype=full.dtype, device=full.device
            )
        return self.call(aten.as_strided.default, (whole, sizes, strides, offset), value)

    def copy(self, destination: fx.Node, source: Any) -> None:
        self.call(aten.copy_.default, (destination, source), destination.meta["val"])


def destination_passing(
    body: fx.GraphModule, examples: StepExamples, fake_mode: Any
) -> fx.GraphModule:
    writer = _Writer(fake_mode)
    graph, inputs = writer.graph, examples.inputs
    index = _placeholder(graph, "t", examples.index)
    carry = _placeholders(graph, "carry", inputs.carry)
    xs = _placeholders(graph, "xs", inputs.xs)
    additional = _placeholders(graph, "additional", inputs.additional)
    next_carry = _placeholders(graph, "next_carry", inputs.carry)
    ys = _placeholders(graph, "ys", examples.ys)
    roles = inputs.signature.inputs_of(body)
    env = dict(zip(roles.carry, carry, strict=True))
    env |= dict(zip(roles.additional, additional, strict=True))
    # an unused x is not sliced
    env |= {old: writer.at(new, index) for old, new in zip(roles.xs, xs, strict=True) if old.users}
    places = [writer.at(stack, index) for stack in ys]
    destinations = [*next_carry, *places]
    into = _places_of_inner_scans(body, destinations)
    results = _copy_step(body, graph, env, into)
    written = {place for own in into.values() for place in own}
    for place, value in zip(destinations, results, strict=True):
        if place not in written:
            writer.copy(place, value)
    graph.output(())
    module = fx.GraphModule(body, graph, "ScanStep")
    return legality.checked("destination_passing", module, declared=[*next_carry, *ys])


def _places_of_inner_scans(
    body: fx.GraphModule, places: list[fx.Node]
) -> dict[fx.Node, list[fx.Node | None]]:
    """For each scan in the body, the places of this step's results that are results of it."""
    found: dict[fx.Node, list[fx.Node | None]] = {}
    for value, place in zip(results_of(body.graph), places, strict=True):
        if value.target is not operator.getitem or value.args[0].target is not scan_op:
            continue
        scan, position = value.args
        own = found.setdefault(scan, [None] * len(scan.meta["val"]))
        if own[position] is None:
            own[position] = place
    return found


def _copy_step(
    body: fx.GraphModule,
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    into: dict[fx.Node, list[fx.Node | None]],
) -> Sequence[Any]:
    for node in body.graph.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node in into:
                env[node].update_kwarg("into", tuple(into[node]))
    return [env[value] for value in results_of(body.graph)]
