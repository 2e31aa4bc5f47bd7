"""Functions of pytrees, done at once to trackers of Python's containers.

Dynamo traces them otherwise, instruction by instruction, which took a third of a first call
(checked on torch 2.9.1, 2.13.0, 2.15.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from torch_scan_hop._torch.dynamo.at_once import IsTraced
from torch_scan_hop._torch.dynamo.objects import is_namedtuple, made
from torch_scan_hop._torch.dynamo.variables import call_inlined, example_value, sequence_items


@dataclasses.dataclass(frozen=True)
class _Container:
    """A container taken apart. Two of one ``kind`` with the same ``keys`` have one structure."""

    kind: type
    keys: list[Any]
    parts: list[VariableTracker]
    rebuilt: Callable[[Any, list[VariableTracker]], VariableTracker]
    suffix: str

    def suffixes(self) -> list[str]:
        """Return what stands for each key in the path of a part."""
        return [self.suffix.format(key) for key in self.keys]

    def matching(self, other: _Container) -> Iterable[tuple[VariableTracker, VariableTracker, str]]:
        """Return each part, the part of ``other`` that has its key, and its path's suffix."""
        by_key = dict(zip(other.keys, other.parts, strict=True))
        if self.kind is not other.kind or set(self.keys) != set(by_key):
            raise IsTraced
        return zip(self.parts, (by_key[key] for key in self.keys), self.suffixes(), strict=True)


class FlatResults(VariableTracker):
    """A function whose results are flat, and all of them values of the graph being traced."""

    def __init__(self, fn: VariableTracker, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fn = fn
        self.leaves: list[VariableTracker] = []
        #: makes the results of leaves
        self.rebuilt: Callable[[Any, list[VariableTracker]], VariableTracker] | None = None

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        results = self.fn.call_function(tx, [*args], kwargs)
        try:
            self.leaves, self.rebuilt = _leaves_and_rebuilt(tx, results)
        except IsTraced:
            flattened = call_inlined(tx, pytree.tree_flatten, results)
            flat, structure = sequence_items(tx, flattened)
            self.leaves = sequence_items(tx, flat)
            self.rebuilt = lambda tx, leaves: call_inlined(
                tx, pytree.tree_unflatten, ListVariable(leaves), structure
            )
        return TupleVariable([leaf for leaf in self.leaves if _is_of_graph(leaf)])

    def unflatten(self, tx: Any, values: Sequence[VariableTracker]) -> VariableTracker:
        """Return what the function returned, with ``values`` in place of those of the graph."""
        assert self.rebuilt is not None
        others = iter(values)
        leaves = [next(others) if _is_of_graph(leaf) else leaf for leaf in self.leaves]
        return self.rebuilt(tx, leaves)


def _is_of_graph(leaf: VariableTracker) -> bool:
    return isinstance(leaf.as_proxy(), fx.Proxy)


def leaves(tx: Any, tree: VariableTracker) -> VariableTracker:
    return _list(_leaves_and_rebuilt(tx, tree)[0])


def leaves_but_none(tx: Any, tree: VariableTracker) -> VariableTracker:
    return _list([leaf for leaf in _leaves_and_rebuilt(tx, tree)[0] if not _is_none(leaf)])


def itself(tx: Any, tree: VariableTracker) -> VariableTracker:
    """Return a tree of Python's containers."""
    _leaves_and_rebuilt(tx, tree)
    return tree


def children(tx: Any, value: VariableTracker) -> VariableTracker:
    """Return pairs of the suffix of a path and a child; None of a leaf."""
    container = _taken_apart(tx, value)
    if container is None:
        return ConstantVariable.create(None)
    suffixes = map(ConstantVariable.create, container.suffixes())
    pairs = zip(suffixes, container.parts, strict=True)
    return _list([TupleVariable(list(pair)) for pair in pairs])


def unflatten(tx: Any, template: VariableTracker, values: VariableTracker) -> VariableTracker:
    """Return ``template`` with ``values`` in place of its leaves, but of those that are None."""
    kept, rebuilt = _leaves_and_rebuilt(tx, template)
    others = _taken_apart(tx, values)
    if others is None or len(others.parts) != sum(not _is_none(leaf) for leaf in kept):
        raise IsTraced
    new = iter(others.parts)
    return rebuilt(tx, [leaf if _is_none(leaf) else next(new) for leaf in kept])


def mapped(tx: Any, fn: VariableTracker, tree: VariableTracker) -> VariableTracker:
    """Return ``tree`` with what ``fn`` makes of its leaves, but of those that are None."""
    kept, rebuilt = _leaves_and_rebuilt(tx, tree)
    new = [leaf if _is_none(leaf) else fn.call_function(tx, [leaf], {}) for leaf in kept]
    return rebuilt(tx, new)


def matched(
    match: Callable[..., Any],
    tx: Any,
    template: VariableTracker,
    value: VariableTracker,
    device: VariableTracker,
    path: VariableTracker | None = None,
    keep_numbers: VariableTracker | None = None,
) -> VariableTracker:
    """Return the leaves of ``value``, in the order of ``template``.

    The function ``match`` is traced for leaves that are not two tensors alike, as numbers are.
    """

    def leaves_of(one: VariableTracker, other: VariableTracker, path: str) -> Any:
        container, others = _taken_apart(tx, one), _taken_apart(tx, other)
        if container is not None and others is not None:
            for part, of_other, suffix in container.matching(others):
                yield from leaves_of(part, of_other, path + suffix)
        elif container is None and _kind(one) == _kind(other):
            yield other
        elif one is template:
            raise IsTraced
        elif not (_is_none(one) and _is_none(other)):
            given = (one, other, device, ConstantVariable.create(path), numbers)
            yield from sequence_items(tx, call_inlined(tx, match, *given))

    numbers = ConstantVariable.create(False) if keep_numbers is None else keep_numbers
    start = "carry" if path is None else path.as_python_constant()
    return _list(list(leaves_of(template, value, start)))


def _kind(leaf: VariableTracker) -> Any:
    """Return what tensors of one dtype, device and known sizes have in common."""
    tensor = example_value(leaf) if type(leaf.realize()) is TensorVariable else None
    if tensor is None or not all(type(size) is int for size in tensor.shape):
        return object()
    return tensor.dtype, tensor.device, tuple(tensor.shape)


def _leaves_and_rebuilt(
    tx: Any, tree: VariableTracker
) -> tuple[list[VariableTracker], Callable[[Any, list[VariableTracker]], VariableTracker]]:
    """Return the leaves of a tree, and what makes such a tree of others."""
    container = _taken_apart(tx, tree)
    if container is None:
        return [tree], lambda tx, leaves: leaves[0]
    taken = [_leaves_and_rebuilt(tx, part) for part in container.parts]

    def rebuilt(tx: Any, leaves: list[VariableTracker]) -> VariableTracker:
        rest = iter(leaves)
        parts = [of_part(tx, [next(rest) for _ in old]) for old, of_part in taken]
        return container.rebuilt(tx, parts)

    return [leaf for of_part, _ in taken for leaf in of_part], rebuilt


def _taken_apart(tx: Any, value: VariableTracker) -> _Container | None:
    """Return a container's parts, and None for a tensor, a number or None."""
    known: Any = value.realize()  # a lazy one is guarded, and known from here on
    if type(known) in (TupleVariable, ListVariable):
        return _sequence(type(known), list(known.items))
    if isinstance(known, (TensorVariable, SymNodeVariable)) or _is_none(known):
        return None
    if isinstance(known, ConstantVariable) and isinstance(known.value, (int, float, complex)):
        return None
    if type(known) is ConstDictVariable and known.python_type() is dict:
        return _dict(tx, known)
    if isinstance(known, (TupleVariable, UserDefinedObjectVariable)):
        return _fields(tx, known)
    raise IsTraced


def _sequence(kind: Any, parts: list[VariableTracker]) -> _Container:
    def rebuilt(_: Any, parts: list[VariableTracker]) -> VariableTracker:
        return kind(parts, mutation_type=ValueMutationNew())  # type: ignore[no-any-return]

    return _Container(kind, [*range(len(parts))], parts, rebuilt, "[{}]")


def _dict(tx: Any, value: VariableTracker) -> _Container:
    names, parts = (
        sequence_items(tx, value.call_method(tx, name, [], {})) for name in ("keys", "values")
    )
    keys = [name.as_python_constant() for name in names if name.is_python_constant()]
    if len(keys) != len(names) or not all(type(key) in (str, int) for key in keys):
        raise IsTraced

    def rebuilt(_: Any, parts: list[VariableTracker]) -> VariableTracker:
        items = zip(map(ConstantVariable.create, keys), parts, strict=True)
        return ConstDictVariable(dict(items), mutation_type=ValueMutationNew())

    return _Container(dict, keys, parts, rebuilt, "[{!r}]")


def _fields(tx: Any, value: VariableTracker) -> _Container:
    """Take a named tuple or a dataclass apart."""
    kind: Any = value.python_type()
    if is_namedtuple(value):
        names = list(kind._fields)
    elif _is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        raise IsTraced
    found = call_inlined(tx, _kind_and_fields, value, _constants(names))
    of_value, parts = sequence_items(tx, found)

    def rebuilt(tx: Any, parts: list[VariableTracker]) -> VariableTracker:
        return call_inlined(tx, made, of_value, _constants(names), TupleVariable(parts))

    return _Container(kind, names, sequence_items(tx, parts), rebuilt, ".{}")


def _is_dataclass(kind: type) -> bool:
    others = (Mapping, list, tuple, torch.nn.Module)
    return dataclasses.is_dataclass(kind) and not issubclass(kind, others)


def _kind_and_fields(value: Any, names: list[str]) -> tuple[Any, list[Any]]:
    return type(value), [getattr(value, name) for name in names]


def _constants(values: Sequence[Any]) -> VariableTracker:
    return _list(list(map(ConstantVariable.create, values)))


def _is_none(value: VariableTracker) -> bool:
    known = value.realize()
    return isinstance(known, ConstantVariable) and known.value is None


def _list(items: list[VariableTracker]) -> VariableTracker:
    return ListVariable(items, mutation_type=ValueMutationNew())
