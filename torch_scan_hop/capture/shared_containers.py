"""State that is one list, dict or object under two names, and is changed: a loop's steps see the
change by both, and a scan carries each on its own. The carry is made anew at each step, in a loop,
too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.facts import facts_at_hand
from torch_scan_hop._torch.dynamo.left import contents_of, mutable_containers_in
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import VariableTracker
from torch_scan_hop.capture.first_steps import FirstStepDiffers
from torch_scan_hop.capture.told import at_hand


class SharedContainers:
    """What a step finds at ``places``, from before it."""

    def __init__(
        self,
        places: Sequence[Place],
        before: Sequence[VariableTracker],
        state: Sequence[VariableTracker],
    ) -> None:
        """``before``: what was there before the scan; ``state``: what is now."""
        self.places = places
        _check_replaced(places, before)
        self.found = [
            [(container, contents_of(container)) for container in mutable_containers_in(value)]
            for value in state
        ]

    def check(self, left: Sequence[VariableTracker], appended: Sequence[VariableTracker]) -> None:
        """Raise Unsupported if the step leaves a container under two names, and changes what it
        found under one. ``appended``: what it appends to lists, which is another name."""
        self._check_identity()
        # what is in these is carried, and changed
        changed = {id(place.owner): place for place in self.places}
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

    def _check_identity(self) -> None:
        """Let the first step run on its own if the body asks if what it finds `is` an object of the
        program; raise Unsupported if it asks that of two objects that it finds."""
        carried = {
            id(container): place
            for place, found in zip(self.places, self.found, strict=True)
            for container, _ in found
        }
        for one, other, line in facts_at_hand().containers:
            places = [carried[id(v)] for v in (one, other) if id(v) in carried]
            if one is other or not places:
                continue
            text = f"the body asks if what is in {places[0]} `is` another object, at {line}"
            if len(places) == 2:
                raise Unsupported(
                    f"{text}, which steps have made, too: a scan carries each on its own. Keep a "
                    "flag, or compare what is in them"
                )
            if text not in at_hand.steady[0]:
                raise FirstStepDiffers(text)


def _check_replaced(places: Sequence[Place], before: Sequence[VariableTracker]) -> None:
    """Let the first step run on its own if it changes a container, and then replaces it: others may
    know that one. What further steps change so, they have made."""
    replaced = {id(found) for value in before for found in mutable_containers_in(value)}
    for place in places:
        text = f"what is in {place} is changed, and then replaced"
        if id(place.owner) in replaced and text not in at_hand.steady[0]:
            raise FirstStepDiffers(text)


def _differs(container: VariableTracker, before: Sequence[Any]) -> bool:
    now = contents_of(container)
    return len(now) != len(before) or any(
        one is not other for one, other in zip(now, before, strict=True)
    )


def _refusal(place: Place) -> Unsupported:
    return Unsupported(
        f"the body changes a list, a dict or an object that {place}, assigned at {place.line}, "
        "shares with another name: the next step of a loop finds both changed, and a scan carries "
        'each on its own. Make a new one, as in self.state = {**self.state, "h": h}, or keep a copy'
    )
