"""Functions of pytrees, done at once to trackers of tuples and lists.

Dynamo traces them otherwise, instruction by instruction, which took a fifth of a first call
(checked on torch 2.9.1, 2.13.0, 2.15.0).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from torch_scan_hop._torch.dynamo.variables import call_inlined, sequence_items
from torch_scan_hop._torch.replaced import wrapped


class _IsTraced(Exception):
    """Dynamo is to trace the function: of a dict, an object, or what is wrong."""


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
        except _IsTraced:
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


def functions_of_trees(
    functions: dict[Callable[..., Any], Callable[..., VariableTracker]],
) -> contextlib.AbstractContextManager[None]:
    """Within, a call of one of these functions is a call of what it stands for on trackers."""

    def call_function(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        at_once = functions.get(self.fn) if type(self.fn) is FunctionType else None
        if at_once is not None and not kwargs:
            with contextlib.suppress(_IsTraced):
                return at_once(*args)
        return original(self, tx, args, kwargs)

    return wrapped(UserFunctionVariable, call_function=call_function)


def leaves(tree: VariableTracker) -> VariableTracker:
    return _list(_leaves(tree))


def leaves_but_none(tree: VariableTracker) -> VariableTracker:
    return _list([leaf for leaf in _leaves(tree) if not _is_none(leaf)])


def children(value: VariableTracker) -> VariableTracker:
    """Return pairs of the suffix of a path and a child; None of a leaf."""
    parts = _parts(value)
    if parts is None:
        return ConstantVariable.create(None)
    suffixes = [ConstantVariable.create(f"[{k}]") for k in range(len(parts))]
    return _list([TupleVariable(list(pair)) for pair in zip(suffixes, parts, strict=True)])


def unflatten(template: VariableTracker, values: VariableTracker) -> VariableTracker:
    """Return ``template`` with ``values`` in place of its leaves, but of those that are None."""
    kept, others = _leaves(template), _parts(values) or []
    if len(others) != sum(not _is_none(leaf) for leaf in kept):
        raise _IsTraced
    new = iter(others)
    return _rebuilt(template, iter([leaf if _is_none(leaf) else next(new) for leaf in kept]))


def _rebuilt(template: VariableTracker, leaves: Iterator[VariableTracker]) -> VariableTracker:
    parts = _parts(template)
    if parts is None:
        return next(leaves)
    rebuilt = [_rebuilt(part, leaves) for part in parts]
    return type(_known(template))(rebuilt, mutation_type=ValueMutationNew())


def _leaves(tree: VariableTracker) -> list[VariableTracker]:
    parts = _parts(tree)
    return [tree] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


def _parts(value: VariableTracker) -> list[VariableTracker] | None:
    """Return the items of a tuple or a list, and None for a tensor, a number or None."""
    known = _known(value)
    if type(known) in (TupleVariable, ListVariable):
        return list(known.items)
    if isinstance(known, (TensorVariable, SymNodeVariable)) or _is_none(known):
        return None
    if isinstance(known, ConstantVariable) and isinstance(known.value, (int, float, complex)):
        return None
    raise _IsTraced


def _known(value: VariableTracker) -> Any:
    return value.realize()  # a lazy one is guarded, and known from here on


def _is_none(value: VariableTracker) -> bool:
    value = _known(value)
    return isinstance(value, ConstantVariable) and value.value is None


def _list(items: list[VariableTracker]) -> VariableTracker:
    return ListVariable(items, mutation_type=ValueMutationNew())
