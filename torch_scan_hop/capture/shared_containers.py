"""State that is one list or dict under two names, and is changed: a loop's steps see the change by
both, and a scan carries each on its own. The carry is made anew at each step, in a loop, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.left import contents_of, mutable_containers_in
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import VariableTracker


class SharedContainers:
    """What a step finds at ``places``, from before it."""

    def __init__(self, places: Sequence[Place], state: Sequence[VariableTracker]) -> None:
        self.places = places
        self.found = [
            [(container, contents_of(container)) for container in mutable_containers_in(value)]
            for value in state
        ]

    def check(self, left: Sequence[VariableTracker], appended: Sequence[VariableTracker]) -> None:
        """Raise Unsupported if the step leaves a container under two names, and changes what it
        found under one. ``appended``: what it appends to lists, which is another name."""
        # a container whose items are carried, which is changed
        changed = {id(place.owner): place for place in self.places if place.is_item}
        names = Counter(changed.keys())
        for place, found, value in zip(self.places, self.found, left, strict=True):
            is_changed = any(_differs(*pair) for pair in found)
            for container in mutable_containers_in(value):
                names[id(container)] += 1
                if is_changed:
                    changed.setdefault(id(container), place)
        for value in appended:
            names.update(id(container) for container in mutable_containers_in(value))
        for key, place in changed.items():
            if names[key] > 1:
                raise _refusal(place)


def _differs(container: VariableTracker, before: Sequence[Any]) -> bool:
    now = contents_of(container)
    return len(now) != len(before) or any(
        one is not other for one, other in zip(now, before, strict=True)
    )


def _refusal(place: Place) -> Unsupported:
    return Unsupported(
        f"the body changes a list or a dict that {place}, assigned at {place.line}, shares with "
        "another name: the next step of a loop finds both changed, and a scan carries each on its "
        'own. Make a new one, as in self.state = {**self.state, "h": h}, or keep a copy'
    )
