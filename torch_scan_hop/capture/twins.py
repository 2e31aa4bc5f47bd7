"""One tensor, list, dict or object that a step leaves in two places: it is one after a scan, too.

A later write through one name is seen through the other then, as after a loop. So it is if a step
leaves a tensor and a view of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.differences import tensor_of
from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.left import MUTABLE, mutable_containers_in
from torch_scan_hop._torch.dynamo.objects import held_by_name, is_users_tuple
from torch_scan_hop._torch.dynamo.places import Place, is_number
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    VariableTracker,
    call_inlined,
    create_node,
    example_value,
    sequence_items,
)
from torch_scan_hop._torch.operators import storage_of
from torch_scan_hop.body.stop_gradient import VIEWS

#: of a part of what is at a place, by their positions: the part that is the same tensor
Twins = dict[tuple[int, int], tuple[int, int]]
_VIEWS = {*VIEWS, "getitem", "detach", "_get_data_attr", "getattr", "numpy_T", "mT"}
#: how to get from a value to what is in it: an item, or else an attribute, and its name
Path = tuple[tuple[bool, Any], ...]
#: the same of lists, dicts and objects
TwinContainers = dict[tuple[int, Path], tuple[int, Path]]


def twins_among(left: Sequence[Sequence[VariableTracker]]) -> Twins:
    """Return which parts of what is ``left`` at the places are a tensor that there is already.

    >>> twins_among([[]])
    {}
    """
    first: dict[int, tuple[int, int]] = {}
    found = {}
    for n, parts in enumerate(left):
        for k, part in enumerate(parts):
            tensor = None if is_number(part) else tensor_of(part)
            if tensor is not None and first.setdefault(id(tensor), (n, k)) != (n, k):
                found[n, k] = first[id(tensor)]
    return found


class View(NamedTuple):
    """A part of what a step leaves that is a view: of which part, or of which tensor that the body
    closes over; and by which nodes."""

    of: tuple[int, int] | fx.Proxy
    nodes: list[fx.Node]
    requires_grad: bool


def views_among(
    left: Sequence[Sequence[VariableTracker]], outside: Mapping[fx.Node, fx.Proxy]
) -> dict[tuple[int, int], View]:
    """Return which parts of what is ``left`` at the places are views of other parts, or of what the
    body finds ``outside``, by its placeholders."""
    parts = {(n, k): part for n, own in enumerate(left) for k, part in enumerate(own)}
    tensors = {key: tensor_of(part) for key, part in parts.items() if not is_number(part)}
    known = {id(tensor): key for key, tensor in reversed(tensors.items()) if tensor is not None}
    found = {}
    for key, tensor in tensors.items():
        if tensor is None or known[id(tensor)] != key or tensor.layout is not torch.strided:
            continue
        node: fx.Node = parts[key].as_proxy().node
        nodes: list[fx.Node] = []
        while source := _written_or_viewed(node):
            name = _name(node)
            nodes = nodes if name.endswith("_") else [node, *nodes]
            node = source
            example = example_value(node)
            if isinstance(example, torch.Tensor) and storage_of(example) != storage_of(tensor):
                break
            if id(example) in known and example is not tensor:
                found[key] = View(known[id(example)], nodes, tensor.requires_grad)
            elif node in outside and nodes:
                found[key] = View(outside[node], nodes, tensor.requires_grad)
    return found


def _written_or_viewed(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which ``node`` is a view, at a place that is known, or which it is."""
    name, source = _name(node), node.args[0] if node.args else None
    if name.endswith("_") and not name.startswith("_") and isinstance(source, fx.Node):
        return source
    is_view = name in _VIEWS and node.all_input_nodes == [source]
    return source if is_view and isinstance(source, fx.Node) else None


def _name(node: fx.Node) -> str:
    is_call = node.op in ("call_method", "call_function")
    return getattr(node.target, "__name__", str(node.target)) if is_call else ""


def view_again(tx: Any, value: Any, view: View) -> VariableTracker:
    """Return the same view of ``value``, which has the numbers that the steps' tensor has."""
    for node in view.nodes:
        value = _call_again(tx, node, value)
    made: VariableTracker = value
    return made if view.requires_grad else made.call_method(tx, "detach", [], {})


def _call_again(tx: Any, node: fx.Node, value: VariableTracker | fx.Proxy) -> VariableTracker:
    source, *others = node.args
    if not isinstance(example_value(source), torch.Tensor):  # of a ``split``, say
        (index,) = others
        return sequence_items(tx, value)[int(index)]  # type: ignore[arg-type]
    proxy: Any = value if isinstance(value, fx.Proxy) else value.as_proxy()
    args, kwargs = fx.map_arg((tuple(others), node.kwargs), lambda _: proxy)
    return create_node(tx, node.op, node.target, (proxy, *args), kwargs)


def twin_containers(places: Sequence[Place], left: Sequence[VariableTracker]) -> TwinContainers:
    """Return where a step leaves a list, dict or object that it leaves at an earlier place, too."""
    first: dict[int, tuple[int, Path]] = {}
    found = {}

    def look(n: int, path: Path, value: VariableTracker) -> Iterator[int]:
        """Find twins in ``value``; return what has been looked at."""
        value = value.realize()
        if isinstance(value, MUTABLE) and not is_users_tuple(value):
            yield id(value)
            if first.setdefault(id(value), (n, path)) != (n, path):
                found[n, path] = first[id(value)]
                yield from map(id, mutable_containers_in(value))
                return
        for step, part in held_by_name(value):
            yield from look(n, (*path, step), part)

    seen: set[int] = set()
    for n, value in enumerate(left):
        inner = {id(container) for container in mutable_containers_in(value)}
        hidden = inner - {*look(n, (), value)}
        if hidden & (seen | first.keys()):
            raise Unsupported(
                f"the body leaves a list, a dict or an object in two places, one of them within "
                f"{places[n]}, at {places[n].line}: a scan makes each of them anew. Leave it in one"
            )
        seen |= hidden
    return found


def leave_as_one(tx: Any, places: Sequence[Place], twins: TwinContainers) -> None:
    """Let lists, dicts and objects at ``places`` be one, as a step leaves them."""
    for (n, path), (m, other) in twins.items():
        one = call_inlined(tx, _at, places[m].read(tx), ConstantVariable.create(other))
        given = (places[n].read(tx), ConstantVariable.create(path), one)
        places[n].write(tx, call_inlined(tx, _with, *given))


def _at(value: Any, path: Path) -> Any:
    for is_item, name in path:
        value = value[name] if is_item else getattr(value, name)
    return value


def _with(value: Any, path: Path, one: Any) -> Any:
    """Return ``value`` with ``one`` at the end of the ``path``."""
    if not path:
        return one
    (is_item, name), rest = path[0], path[1:]
    inner = _with(_at(value, path[:1]), rest, one)
    if isinstance(value, tuple):
        items = (*value[:name], inner, *value[name + 1 :])
        return type(value)(*items) if hasattr(value, "_fields") else items
    if is_item:
        value[name] = inner
    else:
        object.__setattr__(value, name, inner)
    return value
