"""A part of a trace that may be given up (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
)

from torch_scan_hop._torch.dynamo.side_effects import lasting_changes_are_refused


@contextlib.contextmanager
def taken_back_on_error(tx: Any) -> Iterator[None]:
    """Take back what is traced within, nodes and changes of Python objects, if it raises.

    What has become known of objects of the program's stays known, since trackers at hand refer to
    it; so do the graph's inputs.
    """
    tracer = tx.output.current_tracer
    last = next(iter(reversed(tracer.graph.nodes)), None)
    before = tx.output.side_effects.clone()
    grad_enabled = torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch._C._set_grad_enabled(grad_enabled)
        _take_back(tx, before)
        _erase_after(tx, tracer, last)
        _forget_modules(tracer)
        raise


@contextlib.contextmanager
def side_effects_stay_one_object(tx: Any) -> Iterator[None]:
    """Let ``tx.output.side_effects`` be one object, though Dynamo puts a clone in its place after
    it has traced a graph of its own, as of ``torch.cond``.

    torch 2.13 keeps the object in the trackers of attributes, which would write to the new one and
    read from the old one.
    """
    graph, name = type(tx.output), "side_effects"

    def restore(output: Any, clone: Any) -> None:
        effects = vars(output).setdefault(name, clone)
        keep_known_objects(clone, effects)
        restore_changes(effects, clone)

    if name in vars(graph):  # of a scan around this one
        yield
        return
    setattr(graph, name, property(lambda output: vars(output)[name], restore))
    try:
        yield
    finally:
        delattr(graph, name)


@contextlib.contextmanager
def changes_are_taken_back(tx: Any) -> Iterator[None]:
    """Trace a body: raise what it leaves for the next step, and take back all that it changed."""
    before = tx.output.side_effects.clone()
    try:
        with lasting_changes_are_refused():
            yield
    finally:
        _take_back(tx, before)


def _take_back(tx: Any, before: Any) -> None:
    keep_known_objects(before, tx.output.side_effects)
    restore_changes(tx.output.side_effects, before)
    # torch > 2.9: signatures that were made within, of which nothing is known any more
    getattr(tx.output, "signature_cache", {}).clear()


def _forget_modules(tracer: Any) -> None:
    """Take the graphs at hand out of the modules that Dynamo made of them to tell of an error: a
    graph that has one is checked against the attributes that it had then."""
    while tracer is not None:
        tracer.graph.owning_module = None
        tracer = tracer.parent


_CHANGES = ("id_to_variable", "store_attr_mutations", "attr_mutation_kinds", "keepalive")


def restore_changes(effects: Any, before: Any) -> None:
    """Make ``effects`` equal to its clone ``before``.

    It stays the same object, because a tracker of an object's ``__dict__`` writes to it.
    """
    for name in _CHANGES:
        if hasattr(before, name):
            setattr(effects, name, getattr(before, name))


def keep_known_objects(before: Any, after: Any, *more: type) -> None:
    """Let what has become known of the program's objects since ``before`` be known there: trackers
    at hand refer to it, and what is assigned to others would be lost. So do ``more`` kinds."""
    kinds = (AttributeMutationExisting, ValueMutationExisting, *more)
    for value in after.keepalive:
        variable = after.id_to_variable.get(id(value))
        known = id(value) in before.id_to_variable
        if not known and isinstance(getattr(variable, "mutation_type", None), kinds):
            before.id_to_variable[id(value)] = variable
            before.keepalive.append(value)


def _erase_after(tx: Any, tracer: Any, last: Any) -> None:
    """Erase nodes after ``last`` that nobody reads, except inputs, and sizes and floats that are
    noted."""
    proxies = (p for p in tracer.bound_symbols.values() if isinstance(p, fx.Proxy))
    noted = {proxy.node for proxy in proxies}
    for tensor in tx.output.unspec_variable_map.values():  # of a float that varies
        noted.update(tensor.as_proxy().node.users)
    for node in reversed(list(tracer.graph.nodes)):
        if node is last:
            return
        is_input = node.op in ("placeholder", "get_attr")
        if not (is_input or node.users or node in noted):
            tracer.remove_node(node)
