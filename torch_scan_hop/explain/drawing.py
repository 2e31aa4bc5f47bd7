"""A loop as a drawing: what is before it, in it and after it, and what flows between.

Each value is one rank below all that it is computed from, so every edge goes down; only the carry
goes back up, from the end of a step to its beginning. Columns are placed side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_scan_hop.explain import facts
from torch_scan_hop.explain.facts import Loop, Operator, Value
from torch_scan_hop.explain.words import flops, nbytes, steps, where

COLUMNS = {facts.ONCE: 0, facts.ALL_STEPS: 0, facts.LOOP: 1, facts.AFTER: 2, facts.CONTRACTED: 2}
_BADGES = {
    facts.ONCE: "once",
    facts.ALL_STEPS: "all at once",
    facts.AFTER: "all at once",
    facts.CONTRACTED: "one sum",
}
WIDTH, HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 168, 40, 18, 34, 26
_MAX_TEXT = 24
# boxes side by side outside of the loop, where there is room above
_SLOTS = 2


@dataclass
class Box:
    key: str
    title: str
    subtitle: str
    kind: str  # operator, input or result
    depends_on: str
    column: int
    tooltip: str
    badge: str = ""
    inputs: tuple[str, ...] = ()
    rank: int = 0
    x: float = 0.0
    y: float = 0.0


@dataclass
class Drawing:
    """Boxes in their places, and the lines between them."""

    loop: Loop
    boxes: dict[str, Box] = field(default_factory=dict)
    #: the columns' left and right ends
    spans: Sequence[tuple[float, float]] = ()

    @property
    def width(self) -> float:
        return self.spans[-1][1] + _MARGIN

    @property
    def height(self) -> float:
        return max((b.y for b in self.boxes.values()), default=0) + HEIGHT + _MARGIN

    def place(self) -> None:
        self._collect()
        self._rank()
        self.spans = self._place()

    # --- what is drawn ---

    def _collect(self) -> None:
        operators = [o for o in self.loop.operators if o.place != facts.DROPPED]
        read = {name for o in operators for name in o.inputs}
        read |= {r.node for r in self.loop.results}
        inputs = {f"next {value.name}" for value in self.loop.inputs}
        self.next_carries = inputs & {result.name for result in self.loop.results}
        for value in self.loop.inputs:
            if value.node in read:
                column = self._column_of_input(value, operators)
                self.boxes[value.node] = _value_box(value, value.node, "input", column)
        self.boxes |= {op.name: _operator_box(op) for op in operators}
        for k, value in enumerate(self.loop.results):
            key, column = f"result:{k}", self._column_of_result(value)
            self.boxes[key] = _value_box(value, key, "result", column, (value.node,))

    def _column_of_input(self, value: Value, operators: Sequence[Operator]) -> int:
        if f"next {value.name}" not in self.next_carries:
            return 0
        places = {o.place for o in operators if value.node in o.inputs}
        return 2 if places == {facts.CONTRACTED} else 1

    def _column_of_result(self, value: Value) -> int:
        producer = self.boxes.get(value.node)
        is_carry = value.name in self.next_carries
        return 1 if is_carry and (producer is None or producer.column < 2) else 2

    # --- where ---

    def _rank(self) -> None:
        for box in self.boxes.values():  # in the order of the graph
            above = [self.boxes[k].rank for k in box.inputs if k in self.boxes]
            box.rank = 1 + max(above) if above else 0
        in_step = [b for b in self.boxes.values() if b.kind == "operator" and b.column == 1]
        last = max((b.rank for b in in_step), default=0)
        for box in self.boxes.values():
            if box.kind == "result" and box.column == 1:
                box.rank = max(box.rank, last + 1)
        self._sink_towards_readers()

    def _sink_towards_readers(self) -> None:
        """Move values outside of the loop to just above their readers, if there is room."""
        readers: dict[str, list[Box]] = {}
        for box in self.boxes.values():
            for key in box.inputs:
                readers.setdefault(key, []).append(box)
        taken: Counter[tuple[int, int]] = Counter()
        for box in reversed(self.boxes.values()):
            if box.column != 1 and box.key in readers:
                latest = min(b.rank for b in readers[box.key]) - 1
                rows = range(latest, box.rank - 1, -1)
                free = [r for r in rows if taken[box.column, r] < _SLOTS]
                box.rank = free[0] if free else min((taken[box.column, r], r) for r in rows)[1]
            elif box.column == 2 and box.kind == "result":
                while taken[box.column, box.rank] >= _SLOTS:
                    box.rank += 1
            taken[box.column, box.rank] += 1

    def _place(self) -> list[tuple[float, float]]:
        """Give each box its place; the columns' left and right ends."""
        spans, left = [], float(_MARGIN)
        for column in range(3):
            rows: dict[int, list[Box]] = {}
            for box in self.boxes.values():
                if box.column == column:
                    rows.setdefault(box.rank, []).append(box)
            slots = max(map(len, rows.values()), default=1)
            width = slots * (WIDTH + _GAP_X) + _GAP_X
            for rank in sorted(rows):
                self._place_row(rows[rank], left, width)
            spans.append((left, left + width))
            left += width + 2 * _GAP_X
        return spans

    def _place_row(self, row: list[Box], left: float, width: float) -> None:
        row.sort(key=self._middle_of_inputs)
        step = width / len(row)
        for k, box in enumerate(row):
            box.x = left + (k + 0.5) * step - WIDTH / 2
            box.y = 2 * _MARGIN + box.rank * (HEIGHT + _GAP_Y)

    def _middle_of_inputs(self, box: Box) -> float:
        found = [self.boxes[k].x for k in box.inputs if k in self.boxes]
        return sum(found) / len(found) if found else 0.0

    # --- how ---

    def frames(self) -> list[tuple[str, str, float, float]]:
        """Return the class, the title and both ends of the frame of each column."""
        titles = ("before the loop", f"the loop: {steps(self.loop.steps)}", "after the loop")
        triples = zip(("before", "loop", "after"), titles, self.spans, strict=True)
        return [(name, title, left, right) for name, title, (left, right) in triples]

    def edges(self) -> list[tuple[Box, Box, str]]:
        """Return where each edge begins and ends, and its path."""
        pairs = [
            (self.boxes[key], box)
            for box in self.boxes.values()
            for key in dict.fromkeys(box.inputs)
            if key in self.boxes
        ]
        return [(source, target, _edge(source, target)) for source, target in pairs]

    def back_edges(self) -> list[str]:
        """Return paths from each next carry, around the step's left border, to the carry."""
        found: list[str] = []
        carries = {b.title: b for b in self.boxes.values() if b.kind == "input" and b.column == 1}
        for box in self.boxes.values():
            target = carries.get(box.title.removeprefix("next "))
            if box.kind != "result" or box.column != 1 or target is None:
                continue
            offset = 6 + 4 * (len(found) % 3)
            left, middle = self.spans[1][0] + offset, WIDTH / 2
            found.append(
                f"M{box.x + middle:.0f},{box.y + HEIGHT:.0f} v{offset} H{left:.0f} "
                f"V{target.y - offset:.0f} H{target.x + middle:.0f} v{offset}"
            )
        return found


def drawn(loop: Loop) -> Drawing:
    drawing = Drawing(loop)
    drawing.place()
    return drawing


def _value_box(value: Value, key: str, kind: str, column: int, inputs: tuple[str, ...] = ()) -> Box:
    name = value.name
    return Box(key, name, value.type, kind, value.depends_on, column, name, inputs=inputs)


def _operator_box(op: Operator) -> Box:
    tooltip = [op.call, f"{op.place}: {op.why}", where(op.line), nbytes(op.nbytes)]
    if op.flops:
        tooltip.append(f"{flops(op.flops)} a step")
    return Box(
        op.name,
        op.name,
        op.type,
        "operator",
        op.depends_on,
        COLUMNS[op.place],
        "\n".join(filter(None, tooltip)),
        _BADGES.get(op.place, ""),
        op.inputs,
    )


def cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _edge(source: Box, target: Box) -> str:
    x0, y0 = source.x + WIDTH / 2, source.y + HEIGHT
    x1, y1 = target.x + WIDTH / 2, target.y
    bend = max(16.0, (y1 - y0) / 2)
    return (
        f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}"
    )
