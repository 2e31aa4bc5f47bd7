"""Functions of pytrees, done at once to trackers of tuples, lists and dicts.

Dynamo traces them otherwise, instruction by instruction, which took a third of a first call
(checked on torch 2.9.1, 2.13.0, 2.15.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from torch_scan_hop._torch.dynamo.at_once import IsTraced
from torch_scan_hop._torch.dynamo.variables import call_inlined, example_value, sequence_items


class FlatResults(VariableTracker):
    """A function whose results are flat, and all of them values of the graph being traced."""

    def __init__(self, fn: VariableTracker, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fn = fn
        self.leaves: list[VariableTracker] = []
        #: the results, or how torch unflattens them
        self.structure: VariableTracker | None = None
        self.is_torchs = False

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        results = self.fn.call_function(tx, [*args], kwargs)
        try:
            self.leaves, self.structure = _leaves(results), results
        except IsTraced:
            flattened = call_inlined(tx, pytree.tree_flatten, results)
            flat, self.structure = sequence_items(tx, flattened)
            self.leaves, self.is_torchs = sequence_items(tx, flat), True
        return TupleVariable([leaf for leaf in self.leaves if _is_of_graph(leaf)])

    def unflatten(self, tx: Any, values: Sequence[VariableTracker]) -> VariableTracker:
        """Return what the function returned, with ``values`` in place of those of the graph."""
        assert self.structure is not None
        others = iter(values)
        leaves = [next(others) if _is_of_graph(leaf) else leaf for leaf in self.leaves]
        if self.is_torchs:
            return call_inlined(tx, pytree.tree_unflatten, ListVariable(leaves), self.structure)
        return _rebuilt(self.structure, iter(leaves))


def _is_of_graph(leaf: VariableTracker) -> bool:
    return isinstance(leaf.as_proxy(), fx.Proxy)


def leaves(tree: VariableTracker) -> VariableTracker:
    return _list(_leaves(tree))


def leaves_but_none(tree: VariableTracker) -> VariableTracker:
    return _list([leaf for leaf in _leaves(tree) if not _is_none(leaf)])


def children(value: VariableTracker) -> VariableTracker:
    """Return pairs of the suffix of a path and a child; None of a leaf."""
    parts = _parts(value)
    if parts is None:
        return ConstantVariable.create(None)
    pairs = zip(map(ConstantVariable.create, _suffixes(value)), parts, strict=True)
    return _list([TupleVariable(list(pair)) for pair in pairs])


def unflatten(template: VariableTracker, values: VariableTracker) -> VariableTracker:
    """Return ``template`` with ``values`` in place of its leaves, but of those that are None."""
    kept, others = _leaves(template), _parts(values) or []
    if len(others) != sum(not _is_none(leaf) for leaf in kept):
        raise IsTraced
    new = iter(others)
    return _rebuilt(template, iter([leaf if _is_none(leaf) else next(new) for leaf in kept]))


def matched(template: VariableTracker, value: VariableTracker, *_: Any, **__: Any) -> Any:
    """Return the leaves of ``value``, if it is in all as ``template``: containers and tensors."""
    return _list(list(_matched(template, value)))


def _matched(template: VariableTracker, value: VariableTracker) -> Iterator[VariableTracker]:
    parts, others = _parts(template), _parts(value)
    if type(_known(template)) is not type(_known(value)):
        raise IsTraced
    if parts is not None and others is not None and len(parts) == len(others):
        found = dict(zip(_suffixes(value), others, strict=True))
        for suffix, part in zip(_suffixes(template), parts, strict=True):
            if suffix not in found:
                raise IsTraced
            yield from _matched(part, found[suffix])
    elif parts is None and _kind(template) == _kind(value):
        yield value
    elif not (_is_none(template) and _is_none(value)):
        raise IsTraced


def _kind(leaf: VariableTracker) -> Any:
    """Return what tensors of one dtype, device and known sizes have in common."""
    tensor = example_value(leaf) if type(_known(leaf)) is TensorVariable else None
    if tensor is None or not all(type(size) is int for size in tensor.shape):
        return object()
    return tensor.dtype, tensor.device, tuple(tensor.shape)


def _rebuilt(template: VariableTracker, leaves: Iterator[VariableTracker]) -> VariableTracker:
    parts = _parts(template)
    if parts is None:
        return next(leaves)
    rebuilt: Any = [_rebuilt(part, leaves) for part in parts]
    known = _known(template)
    if type(known) is ConstDictVariable:
        rebuilt = {key.vt: part for key, part in zip(known.items, rebuilt, strict=True)}
    return type(known)(rebuilt, mutation_type=ValueMutationNew())


def _leaves(tree: VariableTracker) -> list[VariableTracker]:
    parts = _parts(tree)
    return [tree] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


def _parts(value: VariableTracker) -> list[VariableTracker] | None:
    """Return the items of a tuple, a list or a dict, and None for a tensor, a number or None."""
    known = _known(value)
    if type(known) in (TupleVariable, ListVariable):
        return list(known.items)
    if type(known) is ConstDictVariable and known.python_type() is dict:
        # guards the keys and their order
        known.call_method(InstructionTranslator.current_tx(), "values", [], {})
        return list(known.items.values())
    if isinstance(known, (TensorVariable, SymNodeVariable)) or _is_none(known):
        return None
    if isinstance(known, ConstantVariable) and isinstance(known.value, (int, float, complex)):
        return None
    raise IsTraced


def _suffixes(value: VariableTracker) -> list[str]:
    """Return the suffixes of the paths of the :func:`_parts`, of a dict those of its keys."""
    items = _known(value).items
    keys = [key.vt for key in items] if isinstance(items, dict) else range(len(items))
    names = [k.as_python_constant() if isinstance(k, ConstantVariable) else k for k in keys]
    if not all(type(name) in (str, int) for name in names):
        raise IsTraced
    return [f"[{name!r}]" for name in names]


def _known(value: VariableTracker) -> Any:
    return value.realize()  # a lazy one is guarded, and known from here on


def _is_none(value: VariableTracker) -> bool:
    value = _known(value)
    return isinstance(value, ConstantVariable) and value.value is None


def _list(items: list[VariableTracker]) -> VariableTracker:
    return ListVariable(items, mutation_type=ValueMutationNew())
