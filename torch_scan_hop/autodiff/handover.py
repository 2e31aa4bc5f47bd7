"""The values that a forward step hands to its backward, and the two bodies that result."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from torch_scan_hop.autodiff.linear_sums import LinearSums


class Source(Enum):
    """The place where the backward finds a value of a forward step."""

    CARRY_IN = "carry into the step"
    X = "x"
    ADDITIONAL = "additional input"
    Y = "stack returned by the forward"
    SIZE = "size"

    # Enum's own is Python, and each call of a scan would run it many times.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Handover:
    """A per-step value (or, for additional inputs and sizes, one value) given to backward."""

    source: Source
    index: int = -1
    size: Any = field(default=None, compare=False)

    @property
    def is_invariant(self) -> bool:
        """Return True if the value is the same in all steps."""
        return self.source in (Source.ADDITIONAL, Source.SIZE)


@dataclass(frozen=True)
class Partition:
    """A joint graph in two (``partition`` says how).

    ``forward``: (carry, x, additional) -> (carry', ys, residuals).

    Attributes:
        per_step: what the backward takes as further xs.
        invariant: what it takes as additional inputs.
        carry_stack: for a carry-in that is handed over, the index among ys of its stack, and
            whether that is of the carries *out* of the steps: they are shifted by a step.
        accumulated: the additional inputs whose gradients are summed in carries.
        x_gradients: the xs whose gradients are ys.
        linear: further gradients, of sums in carries behind those.
        cut_off: the flat inputs that want a gradient, and on which no result of a step depends.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    n_residuals: int
    per_step: tuple[Handover, ...]
    invariant: tuple[Handover, ...]
    carry_stack: dict[int, tuple[int, bool]]
    accumulated: tuple[int, ...]
    x_gradients: tuple[int, ...]
    cut_off: frozenset[int] = frozenset()
    linear: LinearSums | None = None

    @property
    def n_sums(self) -> int:
        """Carries of the backward that are only added to, behind the cotangents."""
        return len(self.accumulated) + (len(self.linear.terms) if self.linear else 0)

    def slots(self, handover: Handover) -> list[Handover]:
        """Return what is saved for it: of a carry its stack, and init if the stack is shifted."""
        if handover.source is Source.SIZE:
            return []
        if handover.source is not Source.CARRY_IN:
            return [handover]
        index, shifted = self.carry_stack[handover.index]
        return [Handover(Source.Y, index), *([handover] if shifted else [])]
