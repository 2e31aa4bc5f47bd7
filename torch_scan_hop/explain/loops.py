"""A loop as it runs: the operators of its step, where they are done, and what they cost."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta

from torch_scan_hop.body.node_kinds import operator_name
from torch_scan_hop.capture.user_code import users_line
from torch_scan_hop.eager.run import is_planned, plan_of
from torch_scan_hop.errors import describe, named
from torch_scan_hop.explain.costs import Cost, Limits, cost_of, work_of
from torch_scan_hop.explain.facts import LOOP, Loop, Operator, Value, Work
from torch_scan_hop.explain.places import Places
from torch_scan_hop.explain.sites import Site, nbytes_of, recorded, site_of
from torch_scan_hop.op import scan_op, scans_in
from torch_scan_hop.rewrites import ScanPlan
from torch_scan_hop.rewrites.blocks import block_length


def loop_of(site: Site, name: str, limits: Limits | None, shifted: int = 0) -> Loop:
    """Explain how ``site`` runs in eager mode; ``shifted``: bytes per step of carries read."""
    try:
        with preserve_node_meta():  # of which the lines of nodes are
            plan = plan_of(site.body, site.operands).plan
    except Exception as error:
        note = f"rewrites fail, and it runs step by step: {named(error)}"
        nothing = (), (), (), Work(0, 0, 0, 0, 0)
        return Loop(name, str(site.trip_count), site.reverse, *nothing, note=note)
    return _Describer(site, plan, name, limits).loop(shifted)


class _Describer:
    def __init__(self, site: Site, plan: ScanPlan, name: str, limits: Limits | None) -> None:
        self.site = site
        self.plan = plan
        self.name = name
        self.limits = limits
        self.planned = is_planned(site.body, site.n_steps)
        self.graph = plan.original.graph
        inputs, names = plan.roles.flat(), site.names.flat()
        self.names = dict(zip(inputs, names, strict=True))
        self.places = Places(plan, self.names)

    def loop(self, shifted: int) -> Loop:
        site, n = self.site, self.site.n_steps
        nodes = [n for n in self.graph.nodes if _is_operator(n)]
        pairs = [(self._operator(n, c := cost_of(n, self.places.single())), c) for n in nodes]
        length = block_length(self.plan, n, shifted) if self.planned else n
        return Loop(
            name=self.name,
            steps=site.steps,
            reverse=site.reverse,
            inputs=tuple(self._input(n) for n in self.plan.roles.flat()),
            results=self._results(),
            operators=tuple(op for op, _ in pairs),
            work=work_of(pairs, site, self._returned(), self.limits),
            block=length if length < n else None,
            note="" if self.planned else "no rewrites: they would cost more than so few steps",
            nested=tuple(
                loop_of(site_of(node, body, self.text_of, node.name), node.name, self.limits)
                for node, body in scans_in(self.plan.original)
            ),
        )

    def _operator(self, node: fx.Node, cost: Cost) -> Operator:
        return Operator(
            name=node.name,
            call=f"{operator_name(node)}({self._arguments(node)})",
            type=type_of(node),
            nbytes=sum(map(nbytes_of, _leaves(recorded(node)))),
            place=self.places.place_of(node) if self.planned else LOOP,
            depends_on=self.places.depends_on(node),
            why=self.places.why(node) if self.planned else "it runs step by step",
            line=line_of(node),
            inputs=tuple(dict.fromkeys(producer(n).name for n in node.all_input_nodes)),
            flops=cost.flops,
            nbytes_moved=cost.nbytes,
        )

    def _arguments(self, node: fx.Node) -> str:
        if node.target is scan_op:
            steps = recorded(node.args[2][0]).shape[0]  # type: ignore[index]
            return "1 step" if str(steps) == "1" else f"{steps} steps"
        positional = [self._text(a) for a in node.args]
        return ", ".join([*positional, *(f"{k}={self._text(v)}" for k, v in node.kwargs.items())])

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.text_of(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        return str(value).removeprefix("torch.")

    def text_of(self, node: fx.Node) -> str:
        """Return the name of a value: its path, or as :func:`value_name` says."""
        return self.names.get(node) or value_name(node)

    def _input(self, node: fx.Node) -> Value:
        return Value(self.names[node], node.name, type_of(node), self.places.depends_on(node))

    def _results(self) -> tuple[Value, ...]:
        outputs = self.plan.outputs
        names = [*(f"next {n}" for n in self.site.names.carry), *self.site.ys]
        return tuple(
            Value(name, producer(node).name, type_of(node), self.places.depends_on(node))
            for name, node in zip(names, outputs.flat(), strict=True)
        )

    def _returned(self) -> int:
        """Return how many bytes the loop returns."""
        ys = sum(nbytes_of(recorded(y)) for y in self.plan.outputs.ys)
        return sum(map(nbytes_of, self.site.operands.carry)) + self.site.n_steps * ys


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def producer(node: fx.Node) -> fx.Node:
    """Return the node that computes ``node``: for an element of a tuple, that of the tuple."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def value_name(node: fx.Node) -> str:
    """Return the name of a node; ``split[1]`` for an element of the result of ``split``."""
    if node.target is operator.getitem:
        return f"{producer(node).name}[{node.args[1]}]"
    return node.name


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def type_of(node: fx.Node) -> str:
    value = recorded(node)
    if isinstance(value, (list, tuple)):
        types = [describe(v) for v in value]
        return f"{len(types)} x {types[0]}" if len(set(types)) == 1 else ", ".join(types)
    return describe(value) if isinstance(value, torch.Tensor) else str(value)


def line_of(node: fx.Node) -> str:
    """Return the user's line, as ``file:line: code``."""
    return users_line(node.meta.get("stack_trace") or "").removeprefix(", at ")
