"""Holds what rewrites make against the invariants, and counts the rewrites by name."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from legality import IllegalRewrite
from legality.cuts import check_partition
from legality.layouts import check_any_layout
from legality.moves import (
    check_decisions,
    check_operands,
    check_plan,
    check_stacks,
)
from legality.results import check_results_are_own, check_results_of_run
from legality.structure import (
    check_same_kind,
    check_structure,
    outputs_of,
    value_of,
)
from legality.values import Values
from legality.writes import check_writes
from torch_scan_hop import legality as hook
from torch_scan_hop.op import scan_op
from torch_scan_hop.signature import Inputs, Signature


@dataclass(frozen=True)
class _Terms:
    """What a graph is held to.

    ``exact``: the scans in it will be lowered by the strides that their bodies record. Before that
    a body may be traced for others: a trace does not trace anew what is traced inside it.
    """

    signature: Signature | None = None
    declared: tuple[fx.Node, ...] = ()
    functional: bool = True
    exact: bool = False


class Checker:
    """Raises :class:`IllegalRewrite`, and keeps it: who calls a rewrite may survive its failure."""

    def __init__(self) -> None:
        #: how often each rewrite was checked
        self.counts: collections.Counter[str] = collections.Counter()
        self.violations: list[IllegalRewrite] = []
        self.values = Values()
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """What belongs to the traces so far."""
        self.values.known_of_traces.clear()
        self.violations.clear()

    @contextlib.contextmanager
    def _checking(self, name: str) -> Iterator[None]:
        self.counts[name] += 1
        try:
            yield
        except IllegalRewrite as violation:
            self.violations.append(violation)
            raise

    def graph(
        self,
        name: str,
        module: fx.GraphModule,
        signature: Signature | None = None,
        *,
        declared: Sequence[fx.Node] = (),
        functional: bool = True,
        any_layout: bool = False,
    ) -> None:
        """After a rewrite of ``module``, which takes and returns what a step does.

        ``declared``: inputs that are there to be written. Not ``functional``: it may write in
        place to what it makes. ``any_layout``: it will run on other strides than it was traced for.
        """
        with self._checking(name):
            self._graph(name, module, _Terms(signature, tuple(declared), functional))
            if any_layout:
                check_any_layout(name, module)

    def _graph(self, name: str, module: fx.GraphModule, terms: _Terms) -> None:
        now = (terms, _fingerprint(module))
        if self._last.get(module) != now:
            check_structure(name, module, terms.signature)
            check_writes(name, module, terms.declared, terms.functional)
            self.values.check(name, module)
            self._last[module] = now
        self._bodies(name, module, terms)

    def _bodies(self, name: str, module: fx.GraphModule, terms: _Terms) -> None:
        for node, body in scans_of(module):
            inner = f"{name}: in the body of {node}"
            own = _Terms(signature_of(node), (), terms.functional, terms.exact)
            self._graph(inner, body, own)
            check_scan(inner, node, body, terms.exact)

    def functional(self, name: str, module: fx.GraphModule) -> None:
        """Of the scans in a graph that a compiler has changed as it likes, strides included."""
        with self._checking(name):
            for node, body in scans_of(module):
                check_writes(f"{name}: in the body of {node}", body)

    def bodies(self, name: str, module: fx.GraphModule) -> None:
        """Of the scans in a graph that a compiler is about to lower, by the strides it records."""
        with self._checking(name):
            self._bodies(name, module, _Terms(exact=True))

    def replacement(self, name: str, module: fx.GraphModule) -> None:
        """A graph that is to replace a scan, and returns what it does."""
        with self._checking(name):
            self._graph(name, module, _Terms(functional=False, exact=True))
            check_results_are_own(name, module)

    def decisions(
        self, name: str, body: fx.GraphModule, signature: Signature, decisions: Any
    ) -> None:
        with self._checking(name):
            check_decisions(name, body, signature, decisions)

    def plan(self, name: str, plan: Any) -> None:
        with self._checking(name):
            check_plan(name, plan)
            for module in (
                plan.body,
                plan.invariant_part.module,
                plan.batched_part.module,
                plan.sunk_part.module,
            ):
                self._graph(name, module, _Terms())

    def partition(self, name: str, joint: Any, partition: Any) -> None:
        with self._checking(name):
            check_partition(name, joint, partition)
            self._graph(f"{name}, forward", partition.forward, _Terms(joint.signature))
            self._graph(f"{name}, backward", partition.backward, _Terms())

    def operands(self, name: str, body: fx.GraphModule, operands: Inputs[Any]) -> None:
        """What a loop is about to be given."""
        with self._checking(name):
            check_operands(name, body, operands)

    def stacks(self, name: str, stacks: Any, trip_count: Any) -> None:
        with self._checking(name):
            check_stacks(name, stacks, trip_count)

    def rows(self, name: str, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        """Tensors that are to be like the values of these nodes."""
        with self._checking(name):
            for node, value in zip(nodes, values, strict=True):
                check_same_kind(name, node, value, value_of(node), "its example")

    def results(self, name: str, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """What a scan returns, on real tensors."""
        with self._checking(name):
            check_results_of_run(name, inputs, results)


@contextlib.contextmanager
def checking(checker: Checker) -> Iterator[Checker]:
    """``checker`` is called after each rewrite inside."""
    before = hook.check_after_each
    hook.check_after_each = checker
    try:
        yield checker
    finally:
        hook.check_after_each = before


def _fingerprint(module: fx.GraphModule) -> Any:
    """Another one after any change; graphs replace what they hold, they do not change it."""
    return [
        (id(n), id(n.target), id(n.args), id(n.kwargs), id(n.meta.get("val")))
        for n in module.graph.nodes
    ]


def scans_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    for node in module.graph.find_nodes(op="call_function", target=scan_op):
        body = getattr(module, str(node.args[0].target))
        if isinstance(body, fx.GraphModule):
            yield node, body


def signature_of(node: fx.Node) -> Signature:
    given: Inputs[Any] = Inputs(*node.args[1:4])  # type: ignore[arg-type]
    return given.signature


def check_scan(where: str, node: fx.Node, body: fx.GraphModule, exact: bool) -> None:
    """What a scan in a graph is given, and what it says it gives, is what its body does."""
    groups = [[value_of(v) for v in group] for group in node.args[1:4]]  # type: ignore[union-attr]
    check_operands(where, body, Inputs(*groups), strides=exact)
    trip_count = groups[1][0].shape[0]
    results = node.meta.get("val")
    if results is None:
        return
    outputs = [o for o in outputs_of(body) if o is not None]
    if len(outputs) != len(results):
        raise IllegalRewrite(
            f"{where}: expected {len(outputs)} results of {node}, as its body has, got "
            f"{len(results)}"
        )
    n_carry = len(groups[0])
    check_stacks(where, dict(zip(outputs[n_carry:], results[n_carry:], strict=True)), trip_count)
