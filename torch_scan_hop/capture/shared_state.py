"""State that is one tensor in two places, and is written in place: a loop's steps see the write in
both, and a scan carries each on its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import (
    TensorVariable,
    VariableTracker,
    example_value,
    graph_being_traced,
)


class SharedState:
    """What a step is given, from before it: leaves of the carry, then what is at the places."""

    def __init__(
        self,
        tx: Any,
        carry: Sequence[VariableTracker],
        x: Sequence[VariableTracker],
        state: Sequence[tuple[Place, VariableTracker, VariableTracker]],
    ) -> None:
        """``state``: of each leaf the place, what was there before the scan, and what is now."""
        self.tx = tx
        self.starts = [*carry, *(now for _, _, now in state)]
        self.places: list[Place | None] = [*(None for _ in carry), *(place for place, *_ in state)]
        self.before = [None for _ in carry] + [_memory(before) for _, before, _ in state]
        self.given = [*map(_node, (*self.starts, *x))]
        self.versions = [_version(start) for start in self.starts]

    def check(self, ends: Sequence[VariableTracker]) -> None:
        """Raise Unsupported if a step writes to a tensor that is read by another name, too.

        ``ends`` are what the step leaves in the place of ``starts``.
        """
        if len(ends) != len(self.starts):
            return  # which is refused elsewhere
        after = [_memory(end) for end in ends]
        closures = [
            n
            for n in graph_being_traced(self.tx).find_nodes(op="placeholder")
            if n not in self.given
        ]
        others = {_memory(n): _version(n) for n in closures if _memory(n) is not None}
        for k, place in enumerate(self.places):
            is_written = _version(self.starts[k]) != self.versions[k]
            is_read = is_written or _is_read(self.starts[k])
            for memory in {after[k], self.before[k]} - {None}:
                if memory in others and (is_written or (is_read and others[memory])):
                    raise _refusal(place, None)
            for j in range(len(ends)) if is_written else ():
                one = after[k] is not None and after[k] == after[j]
                one = one or (self.before[k] is not None and self.before[k] == self.before[j])
                if j != k and one and (place or self.places[j]) and _is_read(self.starts[j]):
                    raise _refusal(place, self.places[j])


def twins_among(values: Sequence[VariableTracker]) -> dict[int, int]:
    """Return the positions of tensors that are there already, with the position of the first.

    >>> twins_among([])
    {}
    """
    first: dict[int, int] = {}
    found = {}
    for k, value in enumerate(values):
        example = _example(value) if isinstance(value.realize(), TensorVariable) else None
        if example is not None and first.setdefault(id(example), k) != k:
            found[k] = first[id(example)]
    return found


def _refusal(*places: Place | None) -> Unsupported:
    known: Iterable[Place] = filter(None, places)
    found = list(known)
    what, line = (str(found[0]), found[0].line) if found else ("the carry", "an unknown line")
    return Unsupported(
        f"the body writes in place to a tensor that {what} shares with another name, at {line}: "
        "the next step of a loop finds both changed, and a scan carries each on its own. Write out "
        "of place, as in self.h = self.h + x, or keep a clone"
    )


def _example(value: Any) -> torch.Tensor | None:
    if isinstance(value, VariableTracker) and value.is_python_constant():
        return None
    example = example_value(value)
    return example if isinstance(example, torch.Tensor) else None


def _memory(value: Any) -> int | None:
    example = _example(value)
    if example is None or example.layout is not torch.strided:
        return None
    return example.untyped_storage()._cdata


def _version(value: Any) -> int:
    example = _example(value)
    return 0 if example is None else example._version


def _node(value: VariableTracker) -> Any:
    return None if _example(value) is None else value.as_proxy().node


def _is_read(start: VariableTracker) -> bool:
    node = _node(start)
    return node is not None and bool(node.users)
