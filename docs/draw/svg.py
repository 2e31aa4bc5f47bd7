"""A drawing, written as an SVG by hand: a light card, to be read on a dark page, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CARRY, XS, YS, GREY, DARK = "#1f5fa8", "#2e7d32", "#c25700", "#8a8f98", "#22262e"
#: the same, to fill boxes with
PALE = {CARRY: "#dce8f6", XS: "#dff0e0", YS: "#fbe6d6", GREY: "#eceef1", DARK: "#d5d9e0"}
#: heads of arrows, one for each colour
_HEADS = "".join(
    f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    f'markerHeight="7" orient="auto"><path d="M0,0 8,4 0,8z" fill="{color}"/></marker>'
    for color in PALE
)
Point = tuple[float, float]


def number(value: float) -> str:
    """
    >>> number(3.0), number(0.25), number(-0.04)
    ('3', '0.2', '0')
    """
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0" if abs(value) < 0.05 else "-0")


def path(points: Iterable[Point]) -> str:
    return "M" + " ".join(f"{number(x)},{number(y)}" for x, y in points)


class Drawing:
    """Shapes, in the order that they are painted. Units are pixels; y grows downwards."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self.width, self.height, self.says = width, height, says
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, color: str, text: str = ""
    ) -> None:
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}" rx="4" fill="{PALE[color]}" stroke="{color}"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4.5, text, anchor="middle")

    def fill(self, shape: str, color: str, opacity: float = 1.0) -> None:
        seen = "" if opacity == 1 else f' fill-opacity="{opacity}"'
        self.parts.append(f'<path d="{shape}" fill="{color}"{seen}/>')

    def line(
        self, points: Sequence[Point], color: str, width: float = 1.5, dashes: str = ""
    ) -> None:
        self.stroke(path(points), color, width, dashes)

    def stroke(self, shape: str, color: str, width: float, dashes: str = "") -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<path d="{shape}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
        )

    def arrow(self, points: Sequence[Point], color: str) -> None:
        self.line(points, color)
        self.parts[-1] = self.parts[-1].replace("/>", f' marker-end="url(#{color[1:]})"/>')

    def dot(self, x: float, y: float, radius: float, color: str, filled: bool = True) -> None:
        inside = color if filled else "#fff"
        self.parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{inside}" '
            f'stroke="{color}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = DARK,
        anchor: str = "start",
        size: int = 13,
    ) -> None:
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        big = "" if size == 13 else f' font-size="{size}"'
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" fill="{color}"{at}{big}>{escape(text)}</text>'
        )

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">',
                f"<title>{escape(self.says)}</title>",
                f"<defs>{_HEADS}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#fcfcfd"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


class Axes:
    """Data to pixels, in a frame of a drawing."""

    def __init__(
        self, drawing: Drawing, frame: tuple[float, float, float, float], x: Point, y: Point
    ) -> None:
        """``frame``: left, top, width and height; ``x`` and ``y``: the least and the greatest."""
        self.drawing, self.frame, self.x, self.y = drawing, frame, x, y

    def at(self, x: float, y: float) -> Point:
        left, top, width, height = self.frame
        (x0, x1), (y0, y1) = self.x, self.y
        return left + (x - x0) / (x1 - x0) * width, top + (y1 - y) / (y1 - y0) * height

    def ground(self, y: float = 0.0) -> None:
        self.drawing.line([self.at(self.x[0], y), self.at(self.x[1], y)], GREY, 1)

    def curve(
        self, values: Iterable[float], color: str, width: float = 1.8, first: int = 0
    ) -> None:
        points = [self.at(t, v) for t, v in enumerate(values)]
        self.drawing.line(points, color, width)

    def band(self, low: Sequence[float], high: Sequence[float], color: str) -> None:
        above = [self.at(t, v) for t, v in enumerate(high)]
        below = [self.at(t, v) for t, v in enumerate(low)][::-1]
        self.drawing.fill(path([*above, *below]) + "z", color, 0.18)
