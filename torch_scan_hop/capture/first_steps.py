"""Why the first step of a scan is traced on its own: what makes a carry another one after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.facts import Facts
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import VariableTracker
from torch_scan_hop.capture.refusals import note_leaf

#: a trace takes up to so many steps one by one: what it takes grows with the square of their number
_MOST_FIRST_STEPS = 8


class FirstStepDiffers(Unsupported):
    """The first step would be traced differently from the others: ``text`` says which leaf of the
    carry, and why."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        note_leaf(self, text, grows=True)


def check_ends(settled: Sequence[str], places: Sequence[Place]) -> None:
    """Raise Unsupported if step after step differs from the next: each is a trace of its own.

    The last one differed in what it left at ``places``.
    """
    if len(settled) <= _MOST_FIRST_STEPS:
        return
    for place in places:
        if place.is_resized():
            raise place.refusal()
    raise Unsupported(
        f"each step leaves something that the one before did not: {settled[-1]}, after "
        f"{settled[-2]}. Return the value in ys, or write to a row of a tensor"
    )


def check_facts(
    tx: Any,
    facts: Facts,
    init: Sequence[VariableTracker],
    examples: Sequence[VariableTracker],
    after: Sequence[VariableTracker],
    numbers: Collection[int],
) -> None:
    """Raise FirstStepDiffers if what the body asks of a carry is answered differently later.

    The carries at ``numbers``, of which some may be attributes, are Python numbers at first.
    """
    carry = examples[: min(len(init), len(after))]  # xs are behind
    facts.check_untagged(after[: len(carry)])
    if facts.are_one(carry, init) or facts.are_one(carry, after):
        raise Unsupported(
            "the body asks if two tensors of its state `are` one, which they are in some steps: a "
            "scan carries each on its own. Keep a flag, or compare with ==",
        )
    for k, (first, example, later) in enumerate(zip(init, examples, after, strict=False)):
        line = facts.line_of_kind(example) if k in numbers else ""
        if line:
            raise FirstStepDiffers(
                f"the body asks if leaf {k} of the carry is a number, at {line}: it is one at "
                "first, and a tensor in a scan of further steps. Ask for its value with "
                "torch.where, or keep what is asked out of the carry"
            )
        if facts.change(tx, first, example, later):
            raise FirstStepDiffers(
                f"what the body asks of leaf {k} of the carry changes after the first step"
            )
