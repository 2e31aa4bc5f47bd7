"""A step in destination-passing style.

::

    before: (carry, x, additional) -> (carry', y)
    after:  (t, carry, xs, additional, next_carry, ys) -> ()    writes next_carry and ys[t]

``x`` and ``ys[t]`` are views at offset ``t * stride`` of the whole tensors, so that nothing is
copied or allocated for them. A scan in the body whose result is one of the step's writes ``into``
its place. Two kinds of carries are written in place, and have no ``next_carry``: one that is only
added to, as a weight's gradient is, and one of which parts are written, as a cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop.body.meta_values import placeholder, value_of
from torch_scan_hop.body.node_kinds import is_view, viewed
from torch_scan_hop.body.part_writes import PART_OF, WRITE_OF, is_large, writes_in_place
from torch_scan_hop.body.step_examples import slice_like
from torch_scan_hop.op import scan_op
from torch_scan_hop.rewrites.accumulate import added_terms
from torch_scan_hop.signature import Inputs, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class StepExamples:
    """Fake tensors for the whole inputs and outputs, storage offset 0."""

    index: Any
    inputs: Inputs[Any]
    ys: list[Any]

    def flat(self) -> list[Any]:
        return self.of_step(in_place=())

    def of_step(self, in_place: Collection[int]) -> list[Any]:
        """Return the arguments of a step in destination-passing style."""
        following = [c for k, c in enumerate(self.inputs.carry) if k not in in_place]
        return [self.index, *self.inputs.flat(), *following, *self.ys]

    def results(self) -> list[Any]:
        return [*self.inputs.carry, *self.ys]


def _placeholders(graph: fx.Graph, name: str, values: Sequence[Any]) -> list[fx.Node]:
    return [placeholder(graph, f"{name}_{k}", v) for k, v in enumerate(values)]


class _Writer:
    def __init__(self, fake_mode: Any) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode

    def call(self, target: Any, args: tuple[Any, ...], value: Any, kwargs: Any = None) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def size(self, whole: fx.Node, value: Any, target: Any, dim: int) -> Any:
        return value if isinstance(value, int) else self.call(target, (whole, dim), value)

    def at(self, whole: fx.Node, index: fx.Node) -> fx.Node:
        """Return ``whole[index]`` as a strided view."""
        full = value_of(whole)
        stride = self.size(whole, full.stride(0), aten.sym_stride.int, 0)
        offset = self.call(operator.mul, (index, stride), value_of(index) * full.stride(0))
        sizes = [
            self.size(whole, s, aten.sym_size.int, d + 1) for d, s in enumerate(full.shape[1:])
        ]
        strides = [
            self.size(whole, s, aten.sym_stride.int, d + 1) for d, s in enumerate(full.stride()[1:])
        ]
        value = slice_like(self.fake_mode, full)
        return self.call(aten.as_strided.default, (whole, sizes, strides, offset), value)

    def write(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Compute ``node`` into the place where its value lies."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])  # type: ignore[misc]
        if node.target in WRITE_OF:
            self.call(WRITE_OF[node.target], args, value_of(node), kwargs)
        else:
            value, source, *where = args
            part_of = PART_OF[node.target]
            part = self.call(part_of, (value, *where), value_of(node.args[1]), kwargs)
            self.copy(part, source)
        return args[0]  # type: ignore[return-value]

    def copy(self, destination: fx.Node, source: Any) -> None:
        self.call(aten.copy_.default, (destination, source), value_of(destination))


def added_to(
    body: fx.GraphModule, examples: StepExamples, is_product: Callable[[fx.Node], bool]
) -> list[int]:
    """Return the positions of carries ``c' = c + product`` that nothing else reads: to be added to
    in place. With other terms that costs more: Inductor fuses the addition with what makes them."""
    signature = examples.inputs.signature
    terms = added_terms(signature.inputs_of(body).carry, signature.outputs_of(body))
    return [k for k, term in terms.items() if is_product(viewed(term))]


def partly_written(body: fx.GraphModule, examples: StepExamples) -> dict[int, list[fx.Node]]:
    """Return the carries of which a step only writes parts, and those writes."""
    signature = examples.inputs.signature
    carry, after = signature.inputs_of(body).carry, signature.outputs_of(body).carry
    results = results_of(body.graph)
    writes = {
        *writes_in_place(
            body.graph, carry, (), lambda node: is_large(value_of(node)), _views(results)
        )
    }
    found: dict[int, list[fx.Node]] = {}
    for k, (before, written) in enumerate(zip(carry, after, strict=True)):
        chain: list[fx.Node] = []
        while written in writes:
            chain.append(written)
            written = written.all_input_nodes[0]
        if chain and written is before and results.count(chain[0]) == 1 and _reads_are_new(chain):
            found[k] = chain
    return found


def _views(results: Sequence[Any]) -> set[fx.Node]:
    """Return the views among ``results``, which a step with writes copies when they are made."""
    return {result for result in results if isinstance(result, fx.Node) and is_view(result)}


def _reads_are_new(writes: Sequence[fx.Node]) -> bool:
    """Return True if each read of a written value makes a new value, as a conversion to the dtype
    that the value has already does not."""
    conversion = torch.ops.prims.convert_element_type.default
    values = {value for write in writes for value in (write, *write.all_input_nodes[:1])}
    return not any(
        reader.target is conversion and reader.args[1] == value_of(value).dtype
        for value in values
        for reader in value.users
    )


def destination_passing(
    body: fx.GraphModule,
    examples: StepExamples,
    fake_mode: Any,
    in_place: Collection[int] = (),
    writes: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """Return the step; it writes over carries at ``in_place``, by ``writes`` where they lie."""
    writer = _Writer(fake_mode)
    graph, inputs = writer.graph, examples.inputs
    index = placeholder(graph, "t", examples.index)
    carry = _placeholders(graph, "carry", inputs.carry)
    xs = _placeholders(graph, "xs", inputs.xs)
    additional = _placeholders(graph, "additional", inputs.additional)
    next_carry = [
        carry[k] if k in in_place else placeholder(graph, f"next_carry_{k}", c)
        for k, c in enumerate(inputs.carry)
    ]
    ys = _placeholders(graph, "ys", examples.ys)
    roles = inputs.signature.inputs_of(body)
    env = dict(zip(roles.carry, carry, strict=True))
    env |= dict(zip(roles.additional, additional, strict=True))
    # an unused x is not sliced
    env |= {old: writer.at(new, index) for old, new in zip(roles.xs, xs, strict=True) if old.users}
    places = [writer.at(stack, index) for stack in ys]
    destinations = [*next_carry, *places]
    into = _places_of_inner_scans(body, destinations)
    old_results = results_of(body.graph)
    views = _views(old_results) if writes else set()
    places_of_views = [
        (old, place) for old, place in zip(old_results, destinations, strict=True) if old in views
    ]
    results = _copy_step(body, writer, env, into, writes, places_of_views)
    written = {place for own in into.values() for place in own}
    written |= {place for _, place in places_of_views}
    for place, value in zip(destinations, results, strict=True):
        if place not in written and place is not value:
            writer.copy(place, value)
    graph.output(())
    module = fx.GraphModule(body, graph, "ScanStep")
    return legality.checked("destination_passing", module, declared=[*next_carry, *ys])


def _places_of_inner_scans(
    body: fx.GraphModule, places: list[fx.Node]
) -> dict[fx.Node, list[fx.Node | None]]:
    """Return for each scan in the body the places of those step results that are its results."""
    found: dict[fx.Node, list[fx.Node | None]] = {}
    for value, place in zip(results_of(body.graph), places, strict=True):
        if value.target is not operator.getitem or value.args[0].target is not scan_op:
            continue
        scan, position = value.args
        own = found.setdefault(scan, [None] * len(value_of(scan)))
        if own[position] is None:
            own[position] = place
    return found


def _copy_step(
    body: fx.GraphModule,
    writer: _Writer,
    env: dict[fx.Node, fx.Node],
    into: dict[fx.Node, list[fx.Node | None]],
    writes: Collection[fx.Node],
    copies: Sequence[tuple[fx.Node, fx.Node]],
) -> Sequence[Any]:
    """Copy the step. ``copies``: values that may change later in it, and where they belong."""
    for node in body.graph.nodes:
        if node in writes:
            env[node] = writer.write(node, env)
        elif node.op not in ("placeholder", "output"):
            env[node] = writer.graph.node_copy(node, lambda n: env[n])
            if node in into:
                env[node].update_kwarg("into", tuple(into[node]))
        for value, place in copies:
            if value is node:
                writer.copy(place, env[node])
    return [env[value] for value in results_of(body.graph)]
