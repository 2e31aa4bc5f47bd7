"""Make indexing by a 0-d tensor a node of its own, while a body is captured.

Checked on torch 2.9.1, 2.13.0, 2.15.0. Dynamo runs every operation that it captures on fakes, and
``x[t]`` asks a fake for its value. All of ``x[t]``, ``x[t] = v``, ``x.select(0, t)`` and
``torch.narrow(x, 0, t, 2)`` become nodes in one place, ``OutputGraph.create_proxy``; there they are
written as calls of :mod:`torch_scan_hop.capture.indexing`, which ask for no value. A slice whose
bounds are tensors is refused (2.9), or asks for their values, when it is made: it keeps them here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import SliceVariable
from torch._dynamo.variables.tensor import TensorVariable

from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.replaced import ambient, replaced, wrap
from torch_scan_hop.capture.index_nodes import length_between
from torch_scan_hop.capture.indexing import (
    entries_of,
    getitem,
    index_select,
    is_position,
    is_tensor,
    is_window,
    narrow_key,
    select_key,
    setitem,
)
from torch_scan_hop.errors import UNKNOWN_LENGTH

Call = tuple[Any, tuple[Any, ...]]

_VERSIONS = "torch_scan_hop.versions"
"""In the meta of a node: of each 0-d tensor that it was made from, how often that was changed."""


_READ_AT = "torch_scan_hop.read_at"
"""In the meta of a read at 0-d tensors: how often what it is made from was changed by then."""


@contextlib.contextmanager
def indices_are_captured(tx: Any, notes_reads: bool = False) -> Iterator[None]:
    """Capture what is indexed by 0-d tensors; ``notes_reads``: for :func:`_follow_writes`.

    Only the graph that ``tx`` writes is changed: that of one capture, and of one thread.
    """
    output = tx.output
    if "create_proxy" in vars(output):  # a scan in the body of a scan
        yield
        return
    original = output.create_proxy

    def create_proxy(kind: str, target: Any, args: Any, kwargs: Any, **more: Any) -> fx.Proxy:
        call = _captured(kind, target, args, kwargs)
        if call is not None:
            kind, (target, args), kwargs = "call_function", call, {}
        proxy = original(kind, target, args, kwargs, **more)
        versions = [_version(a) for a in args] if isinstance(args, (tuple, list)) else []
        if isinstance(proxy, fx.Proxy) and any(v is not None for v in versions):
            proxy.node.meta[_VERSIONS] = versions
        if notes_reads and target is getitem:
            proxy.node.meta[_READ_AT] = _versions_read(proxy.node)
        return proxy

    _keep_bounds_of_slices()
    with replaced(output, create_proxy=create_proxy), replaced(_state, capturing=True):
        yield


@contextlib.contextmanager
def indices_are_captured_outside_bodies(tx: Any) -> Iterator[None]:
    """Capture what is indexed by 0-d tensors in the program around scans.

    There is no graph of its own in which copies follow what they were read from, as in a body, so
    that few writes to either can be followed; others are refused.
    """
    if _state.capturing:
        yield
        return
    graph = tx.output.current_tracer.graph
    others = set(graph.nodes)
    with indices_are_captured(tx, notes_reads=True):
        yield
    for node in list(graph.nodes):
        if node not in others and _READ_AT in node.meta:
            _follow_writes(node)


def _follow_writes(read: fx.Node) -> None:
    """Read again, after all writes, if nothing but a copy has been made of the ``read`` yet, at
    the positions that it was read at."""
    changed = [
        now != then for now, then in zip(_versions_read(read), read.meta[_READ_AT], strict=True)
    ]
    if not changed[0] and not example_value(read)._version:
        return
    copies = list(read.users)
    is_copied = copies in ([], [read.next]) and all(c.target == "clone" for c in copies)
    if example_value(read)._version or not is_copied:
        raise Unsupported(
            "the first step, which runs on its own, writes to what it reads at a tensor, or to the "
            "row that it reads: read a copy, as row = K[t].clone(), and write K[t] = row + 1"
        )
    graph = read.graph
    with graph.inserting_before(read):
        for position in itertools.compress(read.all_input_nodes[1:], changed[1:]):
            copied = graph.call_method("clone", (position,))
            copied.meta = dict(position.meta)
            read.replace_input_with(position, copied)
    for copy in copies:
        with graph.inserting_before(copy):
            copy.replace_input_with(read, graph.node_copy(read))
    next(iter(reversed(graph.nodes))).append(read)


def _versions_read(read: fx.Node) -> list[int]:
    values = map(example_value, read.all_input_nodes)
    return [getattr(value, "_version", 0) for value in values]  # a size has no versions


_state = ambient(capturing=False)


@functools.cache
def _keep_bounds_of_slices() -> None:
    """Let a slice hold tensors, in threads that capture a body. Done once for the process."""

    def init(original: Any, self: Any, items: Any, *args: Any, **kwargs: Any) -> None:
        if not _state.capturing:
            original(self, items, *args, **kwargs)
            return
        items = [item.realize() for item in items]
        kept = [isinstance(item, TensorVariable) for item in items]
        none = ConstantVariable.create(None)
        known = [none if is_kept else item for item, is_kept in zip(items, kept, strict=True)]
        original(self, known, *args, **kwargs)
        if any(kept):
            start_first = items if len(items) > 1 else [none, *items]  # slice(stop)
            self.items = (*start_first, none)[:3]

    wrap(SliceVariable, __init__=init)


def _version(value: Any) -> int | None:
    example = example_value(value)
    return example._version if is_position(example) else None


def _is_fresh(node: fx.Node) -> bool:
    """Return True if nobody has changed the result of ``node``, or its arguments, since it ran."""
    return _version(node) == 0 and node.meta.get(_VERSIONS) == [_version(a) for a in node.args]


def _captured(kind: str, target: Any, args: Any, kwargs: Any) -> Call | None:
    """Return the call of ours that does the same; None if no index is a 0-d tensor."""
    if kind not in ("call_function", "call_method") or not args:
        return None
    rewrite = _CALLS.get(target) if _is_hashable(target) else None
    if rewrite is None or not isinstance(example_value(args[0]), torch.Tensor):
        return None
    return rewrite(*args, **kwargs)


def _is_hashable(target: Any) -> bool:
    return getattr(target, "__hash__", None) is not None


def _is_position(value: Any) -> bool:
    return is_position(example_value(value))


def _is_window(value: Any) -> bool:
    if not isinstance(value, slice):
        return False
    return is_window(slice(example_value(value.start), example_value(value.stop)))


def _lengths(key: Any) -> tuple[int, ...] | None:
    """Return the lengths of the windows in a key; None if PyTorch itself can read the key."""
    entries = entries_of(key)
    if not any(_is_position(e) or _is_window(e) for e in entries):
        return None
    return tuple(_length(e) for e in entries if _is_window(e))


def _length(window: slice) -> int:
    start, stop = (b.node if isinstance(b, fx.Proxy) else b for b in (window.start, window.stop))
    length = length_between(start, stop, _is_fresh)
    if length is None:
        raise Unsupported(UNKNOWN_LENGTH)
    return length


def _getitem(x: Any, key: Any) -> Call | None:
    lengths = _lengths(key)
    return None if lengths is None else (getitem, (x, key, lengths))


def _setitem(x: Any, key: Any, value: Any) -> Call | None:
    lengths = _lengths(key)
    return None if lengths is None else (setitem, (x, key, value, lengths))


def _select(input: Any, dim: int, index: Any) -> Call | None:
    index = _as_position(index)
    if index is None:
        return None
    return getitem, (input, select_key(example_value(input).dim(), dim, index), ())


def _narrow(input: Any, dim: int, start: Any, length: int) -> Call | None:
    start = _as_position(start)
    if start is None or not isinstance(length, int):
        return None
    return getitem, (input, narrow_key(example_value(input).dim(), dim, start), (length,))


def _index_select(input: Any, dim: int, index: Any) -> Call | None:
    return (index_select, (input, dim, index)) if _is_position(index) else None


def _as_position(value: Any) -> Any:
    """Return ``value`` as an index of `select`, which takes uint8 like any integer."""
    example = example_value(value)
    if is_tensor(example) and example.dtype == torch.uint8 and example.dim() == 0:
        raise Unsupported("select and narrow at a uint8 tensor; write t.long()")
    return value if _is_position(value) else None


_CALLS: dict[Any, Callable[..., Call | None]] = {
    operator.getitem: _getitem,
    "__getitem__": _getitem,
    operator.setitem: _setitem,
    "__setitem__": _setitem,
    torch.select: _select,
    "select": _select,
    torch.index_select: _index_select,
    "index_select": _index_select,
    torch.narrow: _narrow,
    "narrow": _narrow,
}
