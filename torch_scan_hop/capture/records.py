"""Dataclasses, and dicts and lists of classes of the user's, among ys: Dynamo takes what a body
returns apart by torch's pytree, which does not know them."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree

from torch_scan_hop import tree
from torch_scan_hop.capture.containers import names_in, new_container


class _Record:
    """A container, in a form that torch's pytree knows."""

    def __init__(self, kind: type, names: list[Any], parts: list[Any]) -> None:
        self.kind, self.names, self.parts = kind, names, parts


pytree.register_pytree_node(
    _Record,
    lambda record: (record.parts, (record.kind, record.names)),
    lambda parts, context: _Record(context[0], context[1], list(parts)),
    serialized_type_name=f"{__name__}._Record",
)


def with_records(value: Any) -> Any:
    """Return ``value`` with a record in place of each container that is not registered."""
    parts = None if tree.is_registered(value) else tree.child_values(value)
    if parts is None:
        return value
    others = list(map(with_records, parts))
    if type(value) in pytree.SUPPORTED_NODES or tree.is_namedtuple(value):
        return tree.rebuild(value, others)
    return _Record(type(value), names_in(value), others)


def without_records(value: Any) -> Any:
    """Return what :func:`with_records` was given, or was made of that."""
    if type(value) is _Record:
        return new_container(value.kind, value.names, list(map(without_records, value.parts)))
    parts = None if tree.is_registered(value) else tree.child_values(value)
    return value if parts is None else tree.rebuild(value, list(map(without_records, parts)))
