"""Pytrees of scan: tensors in order, and the carry matched against init by key.

They are walked by plain recursion over containers, which Dynamo can trace. ``None`` is an empty
leaf everywhere."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_scan_hop.capture.containers import (
    field_names,
    is_dataclass,
    names_in,
    new_container,
)
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import (
    ScanTypeError,
    ScanValueError,
    carry_mismatch,
    describe,
    device_mismatch,
)

NUMBERS = (bool, int, float, complex)
CARRY_FIX = "Return (carry, y), the carry first, in the structure of init."


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


# Python's own containers, which torch registers, too: dicts match by key, and paths have names
_OWN = (dict, list, tuple, OrderedDict, defaultdict)


def is_registered(value: Any) -> bool:
    """Return True if this type is registered with torch's pytree, which then knows its parts best.

    A TensorDict is a Mapping and a sequence of its batch; its leaves are what it registers.
    """
    kind = type(value)
    return kind in pytree.SUPPORTED_NODES and kind not in _OWN and not is_namedtuple(value)


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Return ``(path suffix, child)`` pairs of a container, or None for a leaf."""
    if value is None or isinstance(value, torch.Tensor):
        return None  # most leaves: spares them the slow instance checks below
    if is_registered(value):
        leaves, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return [(f".<{k}>", child) for k, child in enumerate(leaves)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in value]
    if is_namedtuple(value):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"[{k}]", child) for k, child in enumerate(value)]
    if is_dataclass(value):
        return [(f".{name}", getattr(value, name)) for name in field_names(value)]
    return None


def leaves_with_paths(value: Any, root: str) -> list[tuple[str, Any]]:
    """Return every leaf with the path that a user would write for it.

    >>> [path for path, _ in leaves_with_paths({"h": 1, "c": (2, None)}, "carry")]
    ["carry['h']", "carry['c'][0]", "carry['c'][1]"]
    """
    if isinstance(value, torch.Tensor):
        return [(root, value)]
    parts = children(value)
    if parts is None:
        return [(root, value)]
    return [pair for suffix, child in parts for pair in leaves_with_paths(child, root + suffix)]


def child_values(value: Any) -> Sequence[Any] | None:
    """Return :func:`children` without their paths, which loops do not need at every step."""
    if type(value) in (tuple, list):
        return value
    if type(value) is dict:
        return list(value.values())
    found = children(value)
    return None if found is None else [child for _, child in found]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = child_values(value)
    if parts is None:
        return [value]
    found: list[Any] = []
    for child in parts:  # most are tensors, and spared a call
        found += [child] if isinstance(child, torch.Tensor) else leaves(child)
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensor leaves, in order; None leaves are dropped."""
    return [leaf for leaf in leaves(value) if leaf is not None]


def rebuild(template: Any, parts: list[Any]) -> Any:
    if type(template) is dict:
        return dict(zip(template, parts, strict=True))
    if type(template) in (list, tuple):  # spares most the slow instance checks below
        return type(template)(parts)
    if type(template) in pytree.SUPPORTED_NODES and not is_namedtuple(template):
        node = pytree.SUPPORTED_NODES[type(template)]
        _, context = node.flatten_fn(template)
        return node.unflatten_fn(parts, context)
    if is_namedtuple(template):
        return type(template)(*parts)
    return new_container(type(template), names_in(template), parts)


def unflatten(template: Any, values: list[Any]) -> Any:
    """Return ``template`` with its tensor leaves replaced by ``values``, in order."""
    rebuilt, rest = _unflatten(template, values)
    assert not rest, "more values than leaves"
    return rebuilt


def _unflatten(template: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    if template is None:
        return None, values
    parts = child_values(template)
    if parts is None:
        return values[0], values[1:]
    rebuilt = []
    for child in parts:
        part, values = _unflatten(child, values)
        rebuilt.append(part)
    return rebuild(template, rebuilt), values


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``fn`` to the leaves that are not None."""
    return unflatten(value, [fn(leaf) for leaf in tensors(value)])


def slice_at(xs: Any, t: int) -> Any:
    """Return ``xs[t]`` of every leaf, copied, because a body may work in place on its x."""
    return map_leaves(lambda leaf: leaf[t].clone(), xs)


def _changed(
    kind: type[Exception],
    path: str,
    expected: str,
    got: str,
    fix: str = CARRY_FIX,
    grows: bool = False,
) -> Exception:
    """Return an error about the carry at ``path``, which ``grows``, as first steps do on purpose:
    None becomes a tensor, a number or a smaller tensor a larger one, a list a tuple."""
    return refused(kind, carry_mismatch(path, expected, got, fix), path, grows)


def _is_carry(value: Any) -> bool:
    return all(isinstance(leaf, (torch.Tensor, *NUMBERS)) for leaf in tensors(value))


def _grows(shape: Any, to: Any) -> bool:
    """Return True if ``shape`` may grow ``to`` a shape: by broadcasting, or because it is empty
    (some libraries begin with an empty tensor)."""
    if any(size == 0 for size in shape):
        return True
    missing = len(to) - len(shape)
    pairs = zip(shape, to[missing:], strict=True) if missing >= 0 else ()
    return missing >= 0 and all(one == other or one == 1 for one, other in pairs)


def match_carry(
    template: Any,
    value: Any,
    device: torch.device,
    path: str = "carry",
    keep_numbers: bool = False,
) -> list[Any]:
    """Return the tensor leaves of ``value`` in the order of ``template``; dicts match by key.

    A number where ``template`` has one becomes a tensor, unless ``keep_numbers``.

    Raises ScanTypeError, naming the path, where the structures differ.
    """
    if template is None:
        if value is not None:
            grows = _is_carry(value)
            raise _changed(ScanTypeError, path, "None", describe(value), grows=grows)
        return []
    parts = children(template)
    if parts is None:
        if keep_numbers and isinstance(template, NUMBERS) and isinstance(value, NUMBERS):
            return [value]
        return [_match_leaf(template, value, device, path)]
    _check_container(template, value, path)
    if isinstance(template, Mapping) and not is_registered(template):
        pairs = [(f"{path}[{key!r}]", template[key], value[key]) for key in template]
    else:
        others = children(value)
        assert others is not None
        pairs = [
            (path + suffix, child, other)
            for (suffix, child), (_, other) in zip(parts, others, strict=True)
        ]
    return [
        leaf
        for where, child, other in pairs
        for leaf in match_carry(child, other, device, where, keep_numbers)
    ]


def _check_container(template: Any, value: Any, path: str) -> None:
    if isinstance(template, Mapping) and not is_registered(template):
        if not isinstance(value, Mapping):
            a_dict = f"a dict with keys {list(template)}"
            raise _changed(ScanTypeError, path, a_dict, describe(value))
        if set(template) != set(value):
            keys = f"the keys {list(template)}"
            grows = set(template) < set(value) and _is_carry(value)
            raise _changed(ScanTypeError, path, keys, f"the keys {list(value)}", grows=grows)
        return
    kind = type(template)
    if type(value) is not kind:
        sequences = (list, tuple)
        grows = isinstance(template, sequences) and isinstance(value, sequences)
        grows = grows and len(template) == len(value) and _is_carry(value)
        raise _changed(ScanTypeError, path, f"a {kind.__name__}", describe(value), grows=grows)
    expected, got = children(template), children(value)
    assert expected is not None and got is not None
    if len(expected) != len(got):
        wanted = f"a {kind.__name__} of length {len(expected)}"
        grows = len(expected) == 0 and _is_carry(value)
        raise _changed(ScanTypeError, path, wanted, f"length {len(got)}", grows=grows)


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def number_tensor(
    value: Any, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a scalar of torch's default dtype for such a number, or of ``dtype``."""
    return torch.full((), value, device=device, dtype=dtype)


def exact_tensor(value: Any, device: torch.device) -> torch.Tensor:
    """Return a scalar that holds all digits of a Python number."""
    return torch.full((), value, device=device, dtype=_WIDEST[type(value)])


def kind_of(dtype: torch.dtype) -> int:
    """Return the position in ``NUMBERS`` of a dtype's kind: a number of no later kind fits it."""
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


def _expected(template: Any) -> str:
    return "a scalar tensor" if isinstance(template, NUMBERS) else describe(template)


def _match_leaf(template: Any, value: Any, device: torch.device, path: str) -> torch.Tensor:
    is_number = isinstance(template, NUMBERS)  # a scalar whose dtype the step decides
    if isinstance(value, NUMBERS):
        fits = not is_number and NUMBERS.index(type(value)) <= kind_of(template.dtype)
        place = device if is_number else template.device
        value = number_tensor(value, place, template.dtype if fits else None)
    if not isinstance(value, torch.Tensor):
        raise _changed(ScanTypeError, path, _expected(template), describe(value))
    if value.shape != (() if is_number else template.shape):
        fix = (
            "Give init the shape of the carry that combine_fn returns, or reshape what it returns."
        )
        grows = is_number or _grows(template.shape, value.shape)
        raise _changed(ScanValueError, path, _expected(template), describe(value), fix, grows)
    if is_number:
        return value
    if value.device != template.device:
        raise refused(ScanValueError, device_mismatch(path, template.device, value.device))
    if value.dtype == template.dtype:
        return value
    both_float = template.dtype.is_floating_point and value.dtype.is_floating_point
    if both_float and torch.is_autocast_enabled(template.device.type):
        return value.to(template.dtype)  # autocast changed the dtype, not the user
    fix = (
        f"Convert init with init.to({value.dtype}), or the returned carry with "
        f".to({template.dtype})."
    )
    raise _changed(ScanTypeError, path, _expected(template), describe(value), fix)
