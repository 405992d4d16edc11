"""A minimal SVG writer: text is escaped, numbers are short, and the style sheet sets the colors.

A mark has a class (`s0`, `s1`, ...) whose color is set by the theme, so one drawing serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

SERIES = 9  # classes s0 to s8 of style.css; later contenders reuse the colors with another shape
SHAPES = ("circle", "square", "triangle", "diamond", "down", "cross", "plus")
DASHES = ("", "6 3", "2 2.5", "8 3 2 3", "4 2", "1.5 3", "10 3", "5 2 1 2 1 2")


class Svg:
    """A drawing under construction.

    Args:
        width, height: extent of the coordinates; on the page it fills the available width.
        title: description for screen readers.
        name: an id that is unique on the page, for `aria-labelledby`.
        css_class: class of the element.
    """

    def __init__(self, width: float, height: float, *, title: str, name: str, css_class: str = "") -> None:
        self.width, self.height = width, height
        cls = f' class="{escape(css_class)}"' if css_class else ""
        self._parts = [
            f'<svg{cls} viewBox="0 0 {number(width)} {number(height)}" role="img" aria-labelledby="{escape(name)}">'
            f'<title id="{escape(name)}">{escape(title)}</title>'
        ]

    def line(self, x1: float, y1: float, x2: float, y2: float, css_class: str, dash: str = "") -> None:
        """Adds a straight line."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        points = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._parts.append(f'<line class="{css_class}" {points}{dashed}/>')

    def polyline(self, points: Sequence[tuple[float, float]], css_class: str, dash: str = "") -> None:
        """Adds a line through points."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{css_class}" points="{path}"{dashed}/>')

    def text(self, x: float, y: float, text: str, css_class: str = "", anchor: str = "", turn: float = 0) -> None:
        """Adds one line of text; `anchor` is `"middle"` or `"end"`, `turn` is in degrees."""
        cls = f' class="{css_class}"' if css_class else ""
        anchored = f' text-anchor="{anchor}"' if anchor else ""
        turned = f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
        self._parts.append(f'<text{cls} x="{number(x)}" y="{number(y)}"{anchored}{turned}>{escape(text)}</text>')

    def mark(self, x: float, y: float, series: int, size: float, title: str = "", hollow: bool = False) -> None:
        """Adds a contender's mark. Color and shape both identify it, for readers who see few colors."""
        told = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<path class="{mark_class(series, hollow)}" d="{mark_path(x, y, series, size)}">{told}</path>'
        )

    def __str__(self) -> str:
        return "".join(self._parts) + "</svg>"


def mark_class(series: int, hollow: bool = False) -> str:
    """Returns the classes that color a contender's mark."""
    return f"m s{series % SERIES}{' hollow' if hollow else ''}"


def line_class(series: int) -> str:
    """Returns the class that colors a contender's line."""
    return f"l s{series % SERIES}"


def dash(series: int) -> str:
    """Returns the dashes of a contender's line; the first contender's is solid."""
    return DASHES[series % len(DASHES)]


def mark_path(x: float, y: float, series: int, r: float) -> str:
    """Returns the outline of a contender's mark around a point."""
    shape = SHAPES[series % len(SHAPES)]
    if shape == "circle":
        arc = f"a{number(r)} {number(r)} 0 1 0"
        return f"M{number(x - r)} {number(y)}{arc} {number(2 * r)} 0{arc} {number(-2 * r)} 0z"
    t = 0.38 * r  # half the thickness of a cross's arms
    corners = {
        "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
        "triangle": [(0, -1.15), (1.05, 0.75), (-1.05, 0.75)],
        "down": [(0, 1.15), (1.05, -0.75), (-1.05, -0.75)],
        "diamond": [(0, -1.25), (1.05, 0), (0, 1.25), (-1.05, 0)],
    }
    plus = [(-t, -r), (t, -r), (t, -t), (r, -t), (r, t), (t, t), (t, r), (-t, r), (-t, t), (-r, t), (-r, -t), (-t, -t)]
    if shape in corners:
        points = [(r * dx, r * dy) for dx, dy in corners[shape]]
    elif shape == "plus":
        points = plus
    else:
        half = math.sqrt(0.5)
        points = [((dx - dy) * half * 1.1, (dx + dy) * half * 1.1) for dx, dy in plus]
    return "M" + "L".join(f"{number(x + dx)} {number(y + dy)}" for dx, dy in points) + "z"


def number(value: float) -> str:
    """Returns a coordinate with as many digits as are visible."""
    return f"{value:.1f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


class Scale:
    """Maps values to coordinates, linearly or logarithmically."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.low, self.high, self._start, self._end, self._log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        part = (value - low) / (high - low) if high > low else 0.5
        return self._start + part * (self._end - self._start)


def log_ticks(low: float, high: float, *, most: int = 12) -> list[float]:
    """Returns round figures between the two: the finest of 1-2-5, 1-3 and powers of ten with at most `most` ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [10.0**n * f for n in decades for f in factors if low <= 10.0**n * f <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def linear_ticks(high: float) -> list[float]:
    """Returns round figures from 0 to at least `high`."""
    if high <= 0:
        return [0.0, 1.0]
    rough = high / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    return [step * n for n in range(math.ceil(high / step * 0.999) + 1)]
