"""Eager execution of a loop: its body's operators as straight-line Python.

The body graph is written out once as the source of one function that holds the whole loop.
Operators are called through torch's own fast bindings, results that are ys are written into
their place of the stack with ``out=``, others over a value that ends with them where there is one,
and no autograd graph, module call or attribute look-up stands between two operators.

>>> print(source_of_example().rstrip())
def run_loop(order, init, xs, additional, places):
    next__carry, = init
    all__x, = xs
    place__0, = places
    for step__ in order:
        carry, x = next__carry, all__x[step__]
        add_tensor = call_add(carry, x, out=place__0[step__])
        carry = x = None
        next__carry = add_tensor
    return next__carry,
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.symbols import SYMBOLS
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node, is_view
from torch_scan_hop.eager.calls import (
    ELEMENTWISE,
    WITH_OUT,
    WITH_OUT_OR_NONE,
    aten,
    call_into,
    call_of,
    calls_in_place,
    can_write_to,
    parts_read_in_place,
    renewed_values,
)
from torch_scan_hop.signature import Signature


@dataclass
class _Source:
    """Python source under construction, and the objects its names stand for."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def bind(self, name: str, value: Any) -> str:
        while name in self.names and self.names[name] is not value:
            name += "_"
        self.names[name] = value
        return name

    def literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self.literal(v)}, " for v in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self.bind(f"constant_{len(self.names)}", value)


def _unpacked(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names).rstrip()


class LoopWriter:
    """Writes ``run_loop(order, init, xs, additional, places)``, which may write over ``own_xs``."""

    def __init__(
        self, body: fx.GraphModule, signature: Signature, own_xs: Collection[int] = ()
    ) -> None:
        self.body = body
        self.roles = signature.inputs_of(body)
        self.own_xs = [self.roles.xs[k] for k in own_xs]
        self.outputs = signature.outputs_of(body)
        self.source = _Source()
        self.slot_of: dict[fx.Node, int] = {}
        for k, node in enumerate(self.outputs.ys):
            if node not in self.slot_of and can_write_to(node, value_of(node)):
                self.slot_of[node] = k
        #: for a y that is a carry into the step: that carry, written to its row one step ahead
        self.written_ahead: dict[int, int] = {}
        self._write_carries_ahead()
        #: the other ys, which are copied to their places where they are made
        self.copied: dict[fx.Node, list[int]] = {}
        for k, node in enumerate(self.outputs.ys):
            if self.slot_of.get(node) != k and k not in self.written_ahead:
                self.copied.setdefault(node, []).append(k)
        not_kept = self.copied.keys() - {*self.outputs.carry}
        self.in_place = calls_in_place(
            body.graph, self.roles, self.outputs, self.own_xs, self.slot_of, not_kept
        )
        self.parts = parts_read_in_place(body.graph, self.in_place, not_kept)
        #: carries that steps write to: the loop has a copy of init's, which is the caller's
        self.own_carry = [
            k for k, c in enumerate(self.roles.carry) if any(n.args[0] is c for n in self.in_place)
        ]
        #: small values that are computed where they were in the step before
        self.renewed = renewed_values(
            body.graph, self.outputs.carry, self._may_be_renewed, self._is_new
        )
        self.last_use = self._last_uses()

    def _write_carries_ahead(self) -> None:
        for k, y in enumerate(self.outputs.ys):
            if y not in self.roles.carry:
                continue
            position = self.roles.carry.index(y)
            after = self.outputs.carry[position]
            if after not in self.slot_of and can_write_to(after, value_of(y)):
                self.slot_of[after] = k
                self.written_ahead[k] = position

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Return for each node the values that nothing reads after it."""
        kept = {*self.outputs.carry, *self.slot_of, *self.roles.additional, *self._numbers()}
        kept |= {*self.renewed}
        seen: set[fx.Node] = set()
        last: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.body.graph.nodes):
            for value in node.all_input_nodes:
                if value not in seen and value not in kept and value.op != "get_attr":
                    seen.add(value)
                    last.setdefault(node, []).append(value)
        return last

    def _ends_here(self, node: fx.Node) -> fx.Node | None:
        """Return an operand that nothing else reads, whose memory ``node``'s result may take."""
        if not can_write_to(node, value_of(node)):
            return None
        operands: Sequence[Any] = node.args if node.target in ELEMENTWISE else ()
        if node.target is aten.addmm.default and node.args[0] not in node.args[1:]:
            operands = node.args[:1]
        for value in operands:
            if not is_tensor_node(value) or len(value.users) != 1:
                continue
            made_here = value.target in WITH_OUT and value not in self.slot_of
            like = value_of(value)
            same = like.shape == value_of(node).shape and like.dtype == value_of(node).dtype
            if same and (made_here or value in self.own_xs):
                return value
        return None

    def _may_be_renewed(self, node: fx.Node) -> bool:
        has_out = node.target in WITH_OUT_OR_NONE and can_write_to(node, value_of(node))
        return has_out and node not in self.slot_of and self._is_new(node)

    def _is_new(self, node: fx.Node) -> bool:
        """Return True if ``node`` is known to share no memory with its operands."""
        if node in self.slot_of:
            return True
        if node.target not in WITH_OUT or node in self.in_place:
            return False
        return self._ends_here(node) is None

    def write(self) -> str:
        src = self.source
        src.line(0, "def run_loop(order, init, xs, additional, places):")
        carries = [f"next__{n.name}" for n in self.roles.carry]
        stacks = [f"all__{n.name}" for n in self.roles.xs]
        places = [f"place__{k}" for k in range(len(self.outputs.ys))]
        for names, argument in (
            (carries, "init"),
            (stacks, "xs"),
            ([n.name for n in self.roles.additional], "additional"),
            (places, "places"),
        ):
            if names:
                src.line(1, f"{_unpacked(names)} = {argument}")
        fixed = self._numbers()
        for node in fixed:
            self._write_node(node, 1)
        for node in self.renewed:
            src.line(1, f"{node.name} = None")
        src.line(1, "for step__ in order:")
        self._write_inputs(carries, stacks)
        for node in self.body.graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in fixed:
                self._write_node(node, 2)
        self._write_results(carries)
        src.line(1, f"return {_unpacked(carries) or '()'}")
        return "\n".join(src.lines) + "\n"

    def _numbers(self) -> dict[fx.Node, None]:
        """Find arithmetic on numbers that all steps share, which is done before the loop."""
        found: dict[fx.Node, None] = {}
        for node in self.body.graph.nodes:
            known = all(a in found or a in self.roles.additional for a in node.all_input_nodes)
            if node.op == "call_function" and isinstance(node.meta.get("val"), SYMBOLS) and known:
                found[node] = None
        return found

    def _write_inputs(self, carries: list[str], stacks: list[str]) -> None:
        pairs = [(n.name, name) for n, name in zip(self.roles.carry, carries, strict=True)]
        pairs += [
            (n.name, f"{name}[step__]")
            for n, name in zip(self.roles.xs, stacks, strict=True)
            if n.users
        ]
        if pairs:
            left, right = zip(*pairs, strict=True)
            self.source.line(2, f"{', '.join(left)} = {', '.join(right)}")
        for node in self.body.graph.find_nodes(op="placeholder"):
            self._write_copies(node)

    def _write_node(self, node: fx.Node, depth: int) -> None:
        src = self.source
        if node.op == "get_attr":
            src.names[node.name] = operator.attrgetter(str(node.target))(self.body)
            self._write_copies(node)
            return
        if node.target is operator.getitem:
            source, index = node.args
            src.line(depth, f"{node.name} = {src.literal(source)}[{src.literal(index)}]")
        elif node in self.parts:
            value, indices = node.args
            assert isinstance(indices, (list, tuple))
            src.line(depth, f"{node.name} = {src.literal(value)}[{src.literal(tuple(indices))}]")
        else:
            arguments = [src.literal(a) for a in node.args]
            arguments += [f"{k}={src.literal(v)}" for k, v in node.kwargs.items()]
            name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            call = call_of(node)
            if node in self.in_place:
                name, call = f"{name}_in_place", self.in_place[node]
            elif (place := self._place_of(node)) is not None:
                call, argument = call_into(node, place)
                arguments.append(argument)
            bound = src.bind(f"call_{name}", call)
            src.line(depth, f"{node.name} = {bound}({', '.join(arguments)})")
        self._write_copies(node)
        dead = [n.name for n in self.last_use.get(node, ())]
        if dead:
            src.line(2, f"{' = '.join(dead)} = None")

    def _place_of(self, node: fx.Node) -> str | None:
        """Return the memory into which ``node`` is computed, if it is not its own."""
        if node in self.slot_of:
            return f"place__{self.slot_of[node]}[step__]"
        if node in self.renewed:
            return node.name
        ends = self._ends_here(node)
        return None if ends is None else ends.name

    def _write_copies(self, node: fx.Node) -> None:
        for k in self.copied.get(node, ()):
            self.source.line(2, f"place__{k}[step__].copy_({node.name})")

    def _write_results(self, carries: list[str]) -> None:
        src = self.source
        if not carries:
            if not self.outputs.ys:
                src.line(2, "pass")
            return
        values = [
            node.name if self._is_contiguous(node) else f"{node.name}.contiguous()"
            for node in self.outputs.carry
        ]
        src.line(2, f"{', '.join(carries)} = {', '.join(values)}")

    def _is_contiguous(self, node: fx.Node) -> bool:
        """Return True if a next carry is known to be contiguous, as bodies are traced for."""
        if node in self.slot_of or node in self.roles.carry:
            return True
        return value_of(node).is_contiguous() and not is_view(node) and node.op == "call_function"


def source_of_example() -> str:
    """Return the source for ``carry + x``, as an example."""
    graph = fx.Graph()
    carry, x = graph.placeholder("carry"), graph.placeholder("x")
    total = graph.call_function(aten.add.Tensor, (carry, x))
    for node in (carry, x, total):
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output((total, total))
    return LoopWriter(fx.GraphModule({}, graph), Signature(1, 1, 0)).write()
