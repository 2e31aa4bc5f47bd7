"""A progress bar, moved by the loops of eager mode and of Inductor's Python wrapper.

A loop passes the range of its steps to :func:`steps`. If nobody wants a bar it gets the range back.
Otherwise it gets the range in parts, and the clock is looked at between two of them, so that a step
costs nothing. Captured graphs know nothing of bars.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.backward import backward_under_way
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, describe

# seconds from one look at the clock to the next, and of a kernel's call while there is a bar
LOOK = 0.02
# Seconds before a bar is drawn. To draw one takes half a millisecond, more than many a scan.
DELAY = 0.2


class _Bar:
    """One bar, which the outermost loops move while it is in force.

    ``total``: the number of steps, or None if it is not known; then the steps of the loops so far
    count. ``backward``: the bar is in force only within this backward. A backward that fails leaves
    its bar behind.
    """

    def __init__(self, label: str, total: int | None, backward: int | None) -> None:
        self.tqdm = _tqdm()
        self.label, self.total, self.grows = label, total or 0, total is None
        self.since, self.done = perf_counter(), 0
        self.drawn: Any = None
        self.is_moved = False
        self.backward = backward

    def follow(self, total: int, parts: Iterable[range]) -> Iterator[range]:
        """Return the parts of a loop of so many steps; one has run when the next is asked for."""
        self.is_moved = True
        if self.grows:
            self.total += total
        try:
            for part in parts:
                yield part
                self.move(len(part))
        finally:
            self.is_moved = False

    def move(self, count: int) -> None:
        self.done += count
        if self.drawn is not None:
            self.drawn.total = self.total
            self.drawn.update(count)
        elif perf_counter() - self.since >= DELAY:
            self.drawn = self.tqdm(
                total=self.total, desc=self.label, unit=" steps", initial=self.done
            )

    def close(self) -> None:
        if self.drawn is not None:
            self.drawn.refresh()
            self.drawn.close()


_bar: contextvars.ContextVar[_Bar | None] = contextvars.ContextVar(
    "torch_scan_hop_progress", default=None
)


def _bar_at_hand() -> _Bar | None:
    """Return the bar in force, unless the loop that asks is within one that moves it."""
    bar = _bar_in_force()
    return None if bar is None or bar.is_moved else bar


def _bar_in_force() -> _Bar | None:
    bar = _bar.get()
    if bar is None or bar.backward in (None, backward_under_way()):
        return bar
    return None


# --- asked by loops ---


def steps(order: range) -> Iterable[int]:
    """Return ``order``, in parts that move the bar if one is in force.

    >>> steps(range(3))
    range(0, 3)
    """
    if torch.compiler.is_dynamo_compiling() or _bar.get() is None:
        return order  # a program that holds the steps has no bar
    bar = _bar_at_hand()
    if bar is None:
        return order
    return chain.from_iterable(bar.follow(len(order), _parts(order, 1, len(order))))


def calls(trip_count: int, most: int) -> Iterable[tuple[int, int]]:
    """Yield the first step and the end of each call of a kernel that runs ``most`` steps at most.

    Between two calls Python sees signals. While there is a bar, calls are short. There is always
    one call: it copies init.

    >>> list(calls(5, 2)), list(calls(0, 2))
    ([(0, 2), (2, 4), (4, 5)], [(0, 0)])
    """
    if trip_count <= most and _bar.get() is None:
        return ((0, trip_count),)
    bar = _bar_at_hand()
    if bar is None or trip_count == 0:
        spans = range(0, max(1, trip_count), most)
        return [(first, min(trip_count, first + most)) for first in spans]
    # a call of ``most`` steps takes a fraction of a second, and most loops are shorter
    parts = _parts(range(trip_count), max(1, most // 8), most)
    return ((part.start, part.stop) for part in bar.follow(trip_count, parts))


def _parts(order: range, length: int, most: int) -> Iterator[range]:
    """Split ``order`` in parts: of ``length`` at first, then of about ``LOOK`` seconds each."""
    first = 0
    while first < len(order):
        at = perf_counter()
        yield order[first : first + length]
        first += length
        taken = perf_counter() - at
        length = min(most, 4 * length) if 4 * taken < LOOK else length
        length = max(1, length // 4) if taken > LOOK else length


# --- said by users ---


@contextlib.contextmanager
def progress(label: str = "scan") -> Iterator[None]:
    """Show a bar for the scans that run while the context lasts, in this thread.

    All of them share one bar, which counts the steps of the outermost loops, those of backwards
    included. The loops of eager mode move it, and so do those that Inductor compiles, in its Python
    wrapper. XLA and the C++ wrapper run a loop in one go, and do not move it. It is drawn once 0.2
    seconds have passed.

    Args:
        label: what stands before the bar.

    Raises:
        ImportError: tqdm is not installed.

    Example:
        >>> with progress("training"):  # doctest: +SKIP
        ...     model(batch).backward()
        training: 100%|██████████| 2000/2000 [00:03<00:00, 612.12 steps/s]
    """
    if not isinstance(label, str):
        raise refused(
            ScanTypeError,
            f"progress: label must be a string, but got {describe(label)}. It stands before the "
            "bar; leave it out for none of your own.",
        )
    with _showing(label, None):
        yield


def check_progress(wanted: Any) -> None:
    if not isinstance(wanted, (bool, str, type(None))):
        raise refused(
            ScanTypeError,
            "scan: progress must be True, False, None or a label (a string), but got "
            f"{describe(wanted)}.",
        )


def run_with_bar(
    wanted: bool | str, total: int | None, run: Callable[[], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Run ``run()``, a call of a scan, with a bar for it and one for its backward."""
    label = wanted if isinstance(wanted, str) else "scan"
    with _showing(label, total):
        results = run()
    _follow_backward(results, f"{label}, backward", total)
    return results


@contextlib.contextmanager
def _showing(label: str, total: int | None, backward: int | None = None) -> Iterator[None]:
    if _bar_in_force() is not None:
        yield  # one bar, the outermost
        return
    bar = _Bar(label, total, backward)
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)
        bar.close()


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm  # a bar of its own in a notebook
    except ImportError as error:
        raise ImportError(
            "torch_scan_hop: progress needs tqdm, which is not installed. "
            "Run pip install tqdm, or leave progress out."
        ) from error
    return tqdm


# --- the backward of a call, which runs when the call is over ---

#: nodes of autograd's graph that run a scan's backward
_BACKWARDS = ("ScanFunction", "CompiledFunction")
# results are a few views or copies away from it
_DEPTH = 6


def _follow_backward(results: Any, label: str, total: int | None) -> None:
    nodes = [leaf.grad_fn for leaf in tree.tensors(results) if leaf.grad_fn is not None]
    for node in _nodes_of_scans(nodes):
        shown: list[contextlib.ExitStack] = []

        def begin(_: Any, shown: Any = shown) -> None:
            stack = contextlib.ExitStack()
            stack.enter_context(_showing(label, total, backward_under_way()))
            shown.append(stack)

        def end(*_: Any, shown: Any = shown) -> None:
            while shown:
                shown.pop().close()

        node.register_prehook(begin)
        node.register_hook(end)


def _nodes_of_scans(nodes: Sequence[Any]) -> list[Any]:
    for _ in range(_DEPTH):
        found = [n for n in nodes if n.name().startswith(_BACKWARDS)]
        if found or not nodes:
            return list(dict.fromkeys(found))
        nodes = [n for node in nodes for n, _ in node.next_functions if n is not None]
    return []
