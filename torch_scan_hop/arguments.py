"""Check the arguments of ``scan`` before anything runs, and say what is wrong with them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from torch_scan_hop import tree
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.capture.user_code import code_of
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe
from torch_scan_hop.schedule.policy import check_policy
from torch_scan_hop.schedule.strategies import Schedule
from torch_scan_hop.settings import check_flag


class CheckedCall(NamedTuple):
    """A call whose arguments are right: xs with the scanned dimension first, and its length."""

    xs: Any
    trip_count: Any
    schedule: Schedule


def checked_call(
    combine_fn: Any, init: Any, xs: Any, length: Any, dim: Any, schedule: Schedule
) -> CheckedCall:
    """Check the arguments, and raise for those that do not fit."""
    _check_options(combine_fn, length, dim, schedule.reverse, schedule.unroll)
    check_policy(schedule.checkpoint)
    trip_count = _trip_count(xs, _checked_leaves(init, xs), length, dim)
    if dim != 0:
        xs = tree.map_leaves(lambda leaf: torch.movedim(leaf, dim, 0), xs)
    return CheckedCall(xs, trip_count, schedule)


def stacked_along(dim: int, xs: Any, ys: Any) -> Any:
    """Move ``ys`` from dimension 0 to the dimension ``dim`` that the caller scanned in ``xs``."""
    if dim == 0:
        return ys
    place = _leading_position(xs, dim)
    return tree.map_leaves(lambda y: torch.movedim(y, 0, place) if place < y.ndim else y, ys)


def _leading_position(xs: Any, dim: int) -> int:
    """Return ``dim`` counted from the front, in the first leaf of xs."""
    if dim >= 0:
        return dim
    leaves = tree.tensors(xs)
    return dim + leaves[0].ndim if leaves else 0


def _check_options(combine_fn: Any, length: Any, dim: Any, reverse: Any, unroll: Any) -> None:
    if not callable(combine_fn):
        raise refused(
            ScanTypeError,
            f"scan: combine_fn must be callable as combine_fn(carry, x), but got "
            f"{describe(combine_fn)}. The first argument is the function.",
        )
    if not torch.compiler.is_dynamo_compiling():
        _check_kind(combine_fn)
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
            raise refused(
                ScanTypeError, f"scan: length must be an int, but got {describe(length)}."
            )
        if length < 0:
            raise refused(ScanValueError, f"scan: length must not be negative, but got {length}.")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise refused(ScanTypeError, f"scan: dim must be an int, but got {describe(dim)}.")
    check_flag("scan", "reverse", reverse)
    if isinstance(unroll, bool) or not isinstance(unroll, int):
        raise refused(ScanTypeError, f"scan: unroll must be an int, but got {describe(unroll)}.")
    if unroll < 1:
        raise refused(ScanValueError, f"scan: unroll must be at least 1, but got {unroll}.")


def _check_kind(combine_fn: Any) -> None:
    if isinstance(combine_fn, type) and issubclass(combine_fn, torch.nn.Module):
        raise ScanTypeError(
            f"scan: combine_fn must be a module, but got the class {combine_fn.__name__}. Make one "
            "outside the scan."
        )
    if code_of(combine_fn).co_flags & inspect.CO_COROUTINE:
        raise ScanTypeError("scan: combine_fn must be a function, but is async. Drop async.")


def _checked_leaves(init: Any, xs: Any) -> list[Any]:
    """Return the leaves of ``xs``.

    Paths are made for messages alone: making them takes a third of what a small call costs.
    """
    for k, leaf in enumerate(tree.leaves(init)):
        if leaf is None or isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, tree.NUMBERS):
            raise refused(
                ScanTypeError,
                f"scan: {_path(init, 'init', k)} must be a tensor, a number or None, but got "
                f"{describe(leaf)}. "
                + _instead_of(leaf, "Close over other values instead of carrying them."),
            )
        if not torch.compiler.is_dynamo_compiling():
            _check_number(init, k, leaf)
    x_leaves = tree.leaves(xs)
    for k, leaf in enumerate(x_leaves):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise refused(
                ScanTypeError,
                f"scan: {_path(xs, 'xs', k)} must be a tensor or None, but got {describe(leaf)}. "
                + _instead_of(leaf, "Close over values that do not change from step to step."),
            )
    return x_leaves


def _path(value: Any, root: str, position: int) -> str:
    """Return the path of the leaf at ``position``, which a user would write for it."""
    return tree.leaves_with_paths(value, root)[position][0]


def _check_number(init: Any, position: int, leaf: Any) -> None:
    """Raise for a number that no scalar tensor is made of: a NumPy scalar is a float to Python, and
    an int may have any number of digits."""
    kind = next(kind for kind in tree.NUMBERS if isinstance(leaf, kind))
    if type(leaf) is not kind:
        raise ScanTypeError(
            f"scan: {_path(init, 'init', position)} must be a tensor, a number or None, but got "
            f"{describe(leaf)}. Write {kind.__name__}(value)."
        )
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise ScanValueError(
            f"scan: {_path(init, 'init', position)} is an int of more than 64 bits, which no "
            "tensor holds. Carry a float, or its remainder."
        )


def _instead_of(leaf: Any, otherwise: str) -> str:
    """Return advice on what to pass in place of a leaf that is no tensor."""
    kind = type(leaf).__name__
    if kind == "ndarray":
        return "Convert it with torch.from_numpy(...)."
    if kind == "range":
        return "Pass torch.arange(...), or length=... for so many steps without xs."
    if kind == "Proxy":
        return "torch.fx.symbolic_trace runs no operators: use torch.export, or make_fx."
    return otherwise


def _trip_count(xs: Any, x_leaves: list[Any], length: int | None, dim: int) -> Any:
    first: int | None = None  # position of the leaf whose size counts
    size: Any = None
    for k, leaf in enumerate(x_leaves):
        if leaf is None:
            continue
        if not -leaf.ndim <= dim < leaf.ndim:
            raise refused(
                ScanValueError,
                f"scan: dim={dim} is out of range for {_path(xs, 'xs', k)}, which is "
                f"{describe(leaf)} with {leaf.ndim} dimensions.",
            )
        if first is None:
            first, size = k, leaf.shape[dim]
        elif leaf.shape[dim] != size:
            raise refused(
                ScanValueError,
                f"scan: all xs must have one size along dim={dim}, but {_path(xs, 'xs', first)} "
                f"has {size} and {_path(xs, 'xs', k)} has {leaf.shape[dim]}.",
            )
    if first is None:
        if length is None:
            raise refused(
                ScanValueError,
                "scan: xs holds no tensor, so there is no trip count. Pass length=T.",
            )
        return length
    if length is not None and length != size:
        raise refused(
            ScanValueError,
            f"scan: length={length} disagrees with {_path(xs, 'xs', first)}, whose size along "
            f"dim={dim} is {size}. Leave length out, or slice xs.",
        )
    return size
