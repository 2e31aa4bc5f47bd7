"""``with torch_scan_hop.debug():`` runs scans as the Python loop, where everything can be watched.

Nothing is captured: ``print``, ``pdb`` and ``torch.autograd.detect_anomaly`` see each step, and an
error of the body says in which step it was raised. Functions that ``torch.compile`` compiled run as
the Python code that they were written in.

``set_default(detect_nonfinite=True)`` lets scans run as they are, and looks at their results.
"""

from __future__ import annotations

import contextlib
import contextvars
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_scan_hop import tree
from torch_scan_hop._torch.operators import TorchDispatchMode, assert_on_device
from torch_scan_hop._torch.transforms import under_transform
from torch_scan_hop.capture.user_code import NOT_USERS, code_of, name_of
from torch_scan_hop.errors import NonFiniteError, add_note
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.settings import check_flag
from torch_scan_hop.step import CombineFn, order_of_steps, split_result

#: whether nan and inf are looked for; None where scans run as they are
_looks_for_nonfinite: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "torch_scan_hop_debug", default=None
)


@contextlib.contextmanager
def debug(detect_nonfinite: bool = False) -> Iterator[None]:
    """Run scans as plain Python loops, in this thread, for as long as the context lasts.

    Functions and modules that were compiled by ``torch.compile`` run as they were written, and
    so do their scans. Exported programs and those of AOTInductor are not affected.

    Args:
        detect_nonfinite: raise :class:`NonFiniteError` at the first step whose carry or y holds a
            nan or an inf that was not in its inputs, and name the operator that gave it. Every
            operator's result is looked at, which makes a step several times as slow; see
            :func:`torch_scan_hop.set_default` for a check that costs next to nothing.

    Example:
        >>> from torch_scan_hop import scan
        >>> with debug(detect_nonfinite=True):
        ...     scan(lambda h, x: (torch.log(h - x), None), torch.ones(2), torch.ones(3, 2))
        Traceback (most recent call last):
        ...
        torch_scan_hop.errors.NonFiniteError: scan: carry holds -inf after step 0 of 3; aten...
    """
    check_flag("debug", "detect_nonfinite", detect_nonfinite)
    token = _looks_for_nonfinite.set(detect_nonfinite)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _looks_for_nonfinite.reset(token)


def is_debugging() -> bool:
    return _looks_for_nonfinite.get() is not None


def debugged_loop(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """Run :func:`reference.scan_loop`, watched."""
    if trip_count == 0:
        return scan_loop(combine_fn, init, xs, trip_count, reverse)
    steps = iter(order_of_steps(trip_count, reverse))

    def step(carry: Any, x: Any) -> Any:
        where = f"step {next(steps)} of {trip_count}"
        watch = _Watch() if _looks_for_nonfinite.get() else contextlib.nullcontext()
        try:
            with watch:
                result = combine_fn(carry, x)
        except Exception as error:
            add_note(error, f"scan: raised in {where} of {name_of(code_of(combine_fn))}.")
            raise
        if isinstance(watch, _Watch):
            next_carry, y = split_result(result)
            watch.check(where, {"carry": next_carry, "y": y}, (carry, x))
        return result

    return scan_loop(step, init, xs, trip_count, reverse)


def check_results(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any, reverse: bool, results: Any
) -> None:
    """Raise if a scan has made a nan or an inf, for ``set_default(detect_nonfinite=True)``."""
    leaves = [
        *tree.leaves_with_paths(results[0], "carry"),
        *tree.leaves_with_paths(results[1], "ys"),
    ]
    found = [(path, leaf) for path, leaf in leaves if _may_be_non_finite(leaf)]
    given = [leaf for leaf in tree.tensors((init, xs)) if _may_be_non_finite(leaf)]
    if torch.compiler.is_dynamo_compiling():
        were_finite = [torch.isfinite(leaf).all() for leaf in given]
        for path, leaf in found:
            is_finite = torch.isfinite(leaf).all()
            if were_finite:
                is_finite = is_finite | ~torch.stack(were_finite).all()
            assert_on_device(is_finite, _IN_PROGRAM.format(path))
        return
    if is_debugging() or under_transform() or not found:
        return
    bad = next((path for path, leaf in found if not _is_finite(leaf)), None)
    if bad is None or not all(map(_is_finite, given)):
        return
    with debug(detect_nonfinite=True):
        debugged_loop(combine_fn, init, xs, trip_count, reverse)
    raise NonFiniteError(
        f"scan: {bad} holds a nan or an inf. Run once more, step by step, it does not: the body "
        "draws random numbers, or changes what it closes over."
    )


_IN_PROGRAM = (
    "scan: {} holds a nan or an inf that was not in the inputs. Run the program under "
    "torch_scan_hop.debug(detect_nonfinite=True) to learn the step, the operator and the line."
)


def _may_be_non_finite(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _is_finite(leaf: torch.Tensor) -> bool:
    with torch.no_grad():
        # one pass without a temporary; what is finite may still have an infinite sum
        return bool(torch.isfinite(leaf.sum())) or bool(torch.isfinite(leaf).all())


class _Watch(TorchDispatchMode):
    """Remembers the first operator that makes a nan or an inf of finite numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.origin: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.origin is None and _non_finite(result) and not _non_finite((args, kwargs)):
            self.origin = f"{func} gave the first{_users_line()}"
        return result

    def check(self, where: str, results: dict[str, Any], inputs: Any) -> None:
        if _non_finite(inputs):
            return  # the caller's, or a masked value that was let pass in an earlier step
        for root, value in results.items():
            for path, leaf in tree.leaves_with_paths(value, root):
                found = _non_finite(leaf)
                if found:
                    origin = self.origin or "it came from what the body closes over"
                    raise NonFiniteError(f"scan: {path} holds {found} after {where}; {origin}.")


def _non_finite(values: Any) -> str:
    """Return the first nan or inf among them, as it is written; "" if there is none."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.is_complex():
            value = torch.view_as_real(value.detach().resolve_conj())
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            bad = value.detach()[~torch.isfinite(value.detach())]
            if bad.numel():
                return str(bad[0].item())
    return ""


def _users_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*NOT_USERS, "<")):
            return f", at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""
