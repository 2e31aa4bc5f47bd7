"""State that is one tensor in two places, and is written in place: a loop's steps see the write in
both, and a scan carries each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.facts import facts_at_hand
from torch_scan_hop._torch.dynamo.left import GrowingList
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import (
    VariableTracker,
    example_value_or_none,
    graph_being_traced,
)
from torch_scan_hop._torch.operators import storage_of
from torch_scan_hop.capture.first_steps import FirstStepDiffers
from torch_scan_hop.capture.told import at_hand


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
        self.before = [*(None for _ in carry), *(_memory(before) for _, before, _ in state)]
        self.given = [*map(_node, (*self.starts, *x))]
        self.versions = [_version(start) for start in self.starts]

    def check(self, ends: Sequence[VariableTracker]) -> None:
        """Raise Unsupported if a step writes to a tensor that is read by another name, too.

        ``ends`` are what the step leaves in the place of ``starts``.
        """
        if len(ends) != len(self.starts):
            return  # which is refused elsewhere
        after = [_memory(end) for end in ends]
        own = [_memory(start) for start in self.starts]
        closures = self._versions_of_closures()
        for k, place in enumerate(self.places):
            is_written = _version(self.starts[k]) != self.versions[k]
            for memory in (after[k], self.before[k]):
                if is_written and memory in closures:
                    raise _refusal(place)
                if closures.get(memory) and _is_read(self.starts[k]):  # it is written to
                    raise _refusal(place)
            if not is_written:
                continue
            if place is not None and after[k] != own[k]:
                self._check_replaced(place, is_anothers=after[k] in own)
            if any(self._is_one(j, k, after) for j in range(len(ends))):
                raise _refusal(place)

    def untouched(self, ends: Sequence[VariableTracker]) -> list[bool]:
        """Return which of ``ends`` are the tensors that the step found there, not written to."""
        found = zip(self.starts, self.versions, ends, strict=True)
        return [
            _example(start) is not None
            and _example(end) is _example(start)
            and _version(start) == version
            for start, version, end in found
        ]

    def check_kept(
        self, growing: GrowingList, part: VariableTracker, ends: Sequence[VariableTracker]
    ) -> None:
        """Raise Unsupported if further steps write to ``part``, which is appended to a list."""
        memory = _memory(part)
        written = {m for m, version in self._versions_of_closures().items() if version}
        for start, end, version in zip(self.starts, ends, self.versions, strict=True):
            if _version(start) != version:
                written |= {_memory(start), _memory(end)}
        if memory is not None and memory in written:
            raise growing.refusal()

    def _versions_of_closures(self) -> dict[int | None, int]:
        """Return of each tensor that the body closes over how often it has been written to."""
        nodes = graph_being_traced(self.tx).find_nodes(op="placeholder")
        found = {_memory(node): _version(node) for node in nodes if node not in self.given}
        found.pop(None, None)
        return found

    def _is_one(self, j: int, k: int, after: Sequence[int | None]) -> bool:
        """Return True if leaves j and k, one of them at a place, share memory, and j is read, or
        is left somewhere."""
        start = self.starts[j]
        if j == k or not (self.places[j] or self.places[k]):
            return False
        if not (_is_read(start) or _memory(start) in after):
            return False
        pairs = ((after[j], after[k]), (self.before[j], self.before[k]))
        return any(one is not None and one == other for one, other in pairs)

    def _check_replaced(self, place: Place, is_anothers: bool) -> None:
        """Let the first step run on its own: others may know what was there before the scan, which
        it writes to. What further steps write to, they have made."""
        if is_anothers:
            raise _refusal(place)
        text = f"{place} is written to, and then replaced"
        if text not in at_hand.steady[0]:
            raise FirstStepDiffers(text)


def check_leaves(parts: Sequence[VariableTracker], where: str, line: str) -> None:
    """Raise Unsupported if a step has made a leaf that requires grad, among ``parts`` of what it
    leaves: what is made of that in the step gives it a gradient, after a loop. Also for one that it
    has given an attribute."""
    facts_at_hand().check_untagged(parts)
    for part in parts:
        example = _example(part)
        if example is None or not (example.requires_grad and example.is_leaf):
            continue
        node = part.as_proxy().node
        if example._is_view() and node.op != "placeholder" and node.target != "requires_grad_":
            raise Unsupported(
                f"the body leaves in {where}, at {line}, a view that it has made under no_grad() "
                "of a tensor that requires grad, and autograd takes that for a leaf. Leave a view "
                "of tensor.detach()"
            )
        if node.op != "placeholder":
            raise Unsupported(
                f"the body leaves in {where}, at {line}, a tensor that it has made require grad: "
                "after a loop it is a leaf, and a scan returns none. Leave it detached, and call "
                "requires_grad_() after the scan"
            )


def _refusal(place: Place | None) -> Unsupported:
    what = f"{place}, assigned at {place.line}," if place else "the carry"
    return Unsupported(
        f"the body writes in place to a tensor that {what} shares with another name: the next step "
        "of a loop finds both changed, and a scan carries each on its own. Write out of place, as "
        "in self.h = self.h + x, or keep a clone"
    )


def _example(value: Any) -> torch.Tensor | None:
    example = example_value_or_none(value)
    return example if isinstance(example, torch.Tensor) else None


def _memory(value: Any) -> int | None:
    example = _example(value)
    if example is None or example.layout is not torch.strided:
        return None
    return storage_of(example)


def _version(value: Any) -> int:
    example = _example(value)
    return 0 if example is None else example._version


def _node(value: VariableTracker) -> Any:
    return None if _example(value) is None else value.as_proxy().node


def _is_read(start: VariableTracker) -> bool:
    node = _node(start)
    return node is not None and bool(node.users)
