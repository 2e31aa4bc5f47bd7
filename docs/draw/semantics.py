"""What a scan means: carry, xs and ys through time, and what leaves the loop."""

from __future__ import annotations

from itertools import pairwise

from docs.draw.svg import CARRY, DARK, GREY, XS, YS, Drawing

_STEPS, _CELL, _GAP, _LEFT = 4, 84, 52, 120


def chain(reverse: bool) -> Drawing:
    says = (
        "The carry goes from the last step to the first; each step takes its x and gives its y"
        if reverse
        else "The carry goes from step to step; each step takes its x and gives its y"
    )
    drawing = Drawing(780, 236, says)
    middle = 118
    lefts = [_LEFT + t * (_CELL + _GAP) for t in range(_STEPS)]
    for t, left in enumerate(lefts):
        drawing.box(left + 12, 26, _CELL - 24, 28, XS, f"x[{t}]")
        drawing.box(left, middle - 20, _CELL, 40, GREY, "cell")
        drawing.box(left + 12, 182, _CELL - 24, 28, YS, f"y[{t}]")
        drawing.arrow([(left + _CELL / 2, 54), (left + _CELL / 2, middle - 20)], XS)
        drawing.arrow([(left + _CELL / 2, middle + 20), (left + _CELL / 2, 182)], YS)
    drawing.text(24, 45, "xs", XS, size=15)
    drawing.text(24, 201, "ys", YS, size=15)
    drawing.text(lefts[-1] + _CELL + 14, 201, "stacked", YS)
    ends = [(24, lefts[0]), *((a + _CELL, b) for a, b in pairwise(lefts))]
    ends.append((lefts[-1] + _CELL, 740))
    for first, last in ends:
        across = (last, first) if reverse else (first, last)
        drawing.arrow([(x, middle) for x in across], CARRY)
    left, right = ("last carry", "init") if reverse else ("init", "last carry")
    drawing.text(24, middle - 10, left, CARRY)
    drawing.text(lefts[-1] + _CELL + 20, middle - 10, right, CARRY)
    return drawing


def places() -> Drawing:
    drawing = Drawing(780, 268, "What depends on xs alone runs before the loop, ys run after it")
    columns = ((16, 216, "before: all steps at once"), (252, 276, "the loop: T steps"))
    for left, width, title in (*columns, (548, 216, "after: all steps at once")):
        drawing.box(left, 40, width, 170, GREY)
        drawing.text(left + 12, 30, title, DARK)
    drawing.box(34, 70, 60, 30, XS, "xs")
    drawing.box(122, 70, 92, 30, XS, "xs @ w")
    drawing.arrow([(94, 85), (122, 85)], XS)
    drawing.box(268, 70, 66, 30, XS, "row t")
    drawing.arrow([(214, 85), (268, 85)], XS)
    drawing.box(268, 150, 66, 30, CARRY, "h @ u")
    drawing.box(362, 110, 34, 30, GREY, "+")
    drawing.box(422, 110, 60, 30, CARRY, "tanh")
    drawing.arrow([(334, 85), (379, 85), (379, 110)], XS)
    drawing.arrow([(334, 165), (379, 165), (379, 140)], CARRY)
    drawing.arrow([(396, 125), (422, 125)], CARRY)
    drawing.arrow([(452, 140), (452, 197), (301, 197), (301, 180)], CARRY)
    drawing.text(390, 192, "the carry", CARRY)
    drawing.box(566, 110, 62, 30, CARRY, "all h")
    drawing.arrow([(482, 125), (566, 125)], CARRY)
    drawing.box(656, 110, 92, 30, YS, "hs @ v")
    drawing.arrow([(628, 125), (656, 125)], YS)
    drawing.text(16, 240, "h = tanh(x @ w + h @ u);  y = h @ v", DARK)
    drawing.text(
        764, 240, "backward: gradients of w, u, v are one product over all steps", GREY, "end"
    )
    return drawing


def drawings() -> dict[str, Drawing]:
    return {"scan": chain(False), "scan_reversed": chain(True), "places": places()}
