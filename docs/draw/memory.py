"""What is alive of 16 steps under each checkpoint policy, after the forward and in the backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from docs.draw.svg import CARRY, DARK, GREY, YS, Drawing

_T, _AT, _STEP = 16, 13, 18


@dataclass
class Alive:
    """Steps whose carry is kept, and steps of which all is kept that a derivative needs."""

    carries: set[int] = field(default_factory=set)
    residuals: set[int] = field(default_factory=set)


def under_each_policy() -> list[tuple[str, str, Alive, Alive]]:
    """Of each policy the cost, and what is alive after the forward, and at step 13 backwards."""
    every, at_13 = set(range(_T)), Alive({0, 8, 10}, {12, 13})
    return [
        ("None", "each step once", Alive(residuals=every), Alive(residuals=every)),
        ('"full"', "each step twice", Alive(carries=every), Alive(every, {_AT})),
        ('"sqrt"', "each step twice", *_in_segments(4)),
        ("2", "each step twice", *_in_segments(8)),
        # segments of two steps: the carries into steps 0 to 7 and 8 to 13, and the last two
        ("Binomial(3)", "a step up to 3 times", Alive({0, 8}, {14, 15}), at_13),
    ]


def _in_segments(length: int) -> tuple[Alive, Alive]:
    carries, first = set(range(0, _T, length)), _AT // length * length
    return Alive(carries), Alive(carries, set(range(first, first + length)))


def policies() -> Drawing:
    drawing = Drawing(780, 324, "What is kept under each policy, after the forward and backwards")
    for left, title in ((118, "after the forward"), (452, f"the backward is at step {_AT}")):
        drawing.text(left, 28, title, DARK)
    for k, (policy, cost, after, during) in enumerate(under_each_policy()):
        top = 46 + 48 * k
        drawing.text(16, top + 18, policy, DARK)
        _strip(drawing, 118, top, after)
        _strip(drawing, 452, top, during)
        drawing.text(118, top + 39, f"the forward runs {cost}", GREY, size=11)
    _legend(drawing, 306)
    return drawing


def _strip(drawing: Drawing, left: float, top: float, alive: Alive) -> None:
    for t in range(_T):
        x = left + t * _STEP
        drawing.box(x, top, _STEP - 2, 26, YS if t in alive.residuals else GREY)
        if t in alive.carries:
            drawing.dot(x + _STEP / 2 - 1, top + 13, 4, CARRY)


def _legend(drawing: Drawing, y: float) -> None:
    drawing.box(118, y - 12, 14, 16, YS)
    drawing.text(138, y, "all that the step's derivative needs")
    drawing.dot(410, y - 4, 4, CARRY)
    drawing.text(420, y, "the carry into a step")
    drawing.box(580, y - 12, 14, 16, GREY)
    drawing.text(600, y, "nothing of the step")


def drawings() -> dict[str, Drawing]:
    return {"memory": policies()}
