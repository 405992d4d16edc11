"""The report's figures as inline SVG: a roofline, and curves over length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from warpwave.workbench.bench.records import OURS
from warpwave.workbench.report.curves import Ceiling, Family, RooflineData
from warpwave.workbench.report.figures import figure, tick
from warpwave.workbench.report.svg import Scale, Svg, dash, line_class, linear_ticks, log_ticks, mark_class, mark_path

CHARACTER = 6.1  # width of an average character of a label, in the drawing's units; the style sheet sets 11.5


@dataclass(frozen=True)
class Frame:
    """The rectangle inside the axes."""

    left: float
    top: float
    right: float
    bottom: float


def roofline(
    data: RooflineData,
    order: Sequence[str],
    *,
    name: str,
    narrow: bool = False,
    numbers: Mapping[str, int] | None = None,
) -> str:
    """Draws points under their ceilings, both axes logarithmic.

    Args:
        data: the points and ceilings; without points the result is empty.
        order: the contenders, in the order of colors and shapes.
        name: an id that is unique on the page.
        narrow: for a phone: fewer units across, so that letters keep their size, and only figures on the lines.
        numbers: the number of each case, written beside our mark if there is room.
    """
    if not data.points:
        return ""
    numbers = numbers or {}
    width, height, margin = (380, 400, 10) if narrow else (980, 470, 225 if data.ceilings else 10)
    x_low, x_high, y_low, y_high = _ranges(data)
    y_ticks = log_ticks(y_low, y_high, most=10)
    frame = Frame(30 + CHARACTER * max(len(tick(value)) for value in y_ticks), 16, width - margin, height - 46)
    x = Scale(x_low, x_high, frame.left, frame.right, log=True)
    y = Scale(y_low, y_high, frame.bottom, frame.top, log=True)
    svg = Svg(width, height, title=_roofline_title(data), name=name, css_class="narrow" if narrow else "wide")
    for value in log_ticks(x_low, x_high, most=5 if narrow else 12):
        svg.line(x(value), frame.top, x(value), frame.bottom, "grid")
        svg.text(x(value), frame.bottom + 16, tick(value), anchor="middle")
    for value in y_ticks:
        svg.line(frame.left, y(value), frame.right, y(value), "grid")
        svg.text(frame.left - 7, y(value) + 4, tick(value), anchor="end")
    svg.line(frame.left, frame.bottom, frame.right, frame.bottom, "axis")
    svg.text((frame.left + frame.right) / 2, height - 8, "FLOP per compulsory byte", anchor="middle")
    svg.text(13, (frame.top + frame.bottom) / 2, "TFLOP/s", anchor="middle", turn=-90)
    slopes = _draw_ceilings(svg, data.ceilings, x, y, frame, narrow=narrow)
    for contender in reversed(order):  # ours last, and hollow, so that a peer's mark under ours is seen
        series, ours = order.index(contender), contender.startswith(OURS)
        for point in data.points:
            if point.contender == contender:
                told = "" if narrow else f"{contender}, {point.case}: {figure(point.tflops)} TFLOP/s"
                size = 5.2 if ours else 3.8
                svg.mark(x(point.intensity), y(point.tflops), series, size, told, hollow=ours)
    if not narrow:
        _number_points(svg, data, order, numbers, x, y, frame)
    for label in slopes:  # over the marks, so that the names stay readable
        label()
    return str(svg)


def _number_points(
    svg: Svg, data: RooflineData, order: Sequence[str], numbers: Mapping[str, int], x: Scale, y: Scale, frame: Frame
) -> None:
    """Writes the case number beside each mark of our first contender, unless it would overlap something."""
    first = next((name for name in order if name.startswith(OURS)), None)
    taken = [(x(p.intensity), y(p.tflops), 5.0, 5.0) for p in data.points]  # center, half width, half height
    for point in data.points:
        if point.contender != first or point.case not in numbers:
            continue
        label = str(numbers[point.case])
        half = len(label) * CHARACTER / 2
        for dx, dy in ((8 + half, 0), (-8 - half, 0), (0, -13), (0, 13)):
            at_x, at_y = x(point.intensity) + dx, y(point.tflops) + dy
            inside = frame.left + half < at_x < frame.right - half and frame.top + 6 < at_y < frame.bottom - 6
            if inside and not any(abs(at_x - a) < half + w and abs(at_y - b) < 6 + h for a, b, w, h in taken):
                svg.text(at_x, at_y + 4, label, "label", anchor="middle")
                taken.append((at_x, at_y, half, 6.0))
                break


def _ranges(data: RooflineData) -> tuple[float, float, float, float]:
    """Returns ranges that include all points, all flat lines, and the corners where slopes meet flat lines."""
    intensities = [p.intensity for p in data.points]
    speeds = [p.tflops for p in data.points]
    flats = [c.value for c in data.ceilings if not c.slope]
    corners = [flat / c.value * 1e3 for c in data.ceilings if c.slope for flat in flats]
    x_values = [*intensities, *corners]
    return min(x_values) / 2, max(x_values) * 2, min(speeds) / 2, max([*speeds, *flats]) * 1.6


def _roofline_title(data: RooflineData) -> str:
    speeds = [p.tflops for p in data.points]
    lines = "; ".join(f"{c.label} {c.figure} ({c.rates})" for c in data.ceilings) or "none known"
    return (
        f"Roofline of {len(data.points)} measurements from {figure(min(speeds))} to {figure(max(speeds))} TFLOP/s. "
        f"Ceilings: {lines}."
    )


def _draw_ceilings(
    svg: Svg, ceilings: Sequence[Ceiling], x: Scale, y: Scale, frame: Frame, *, narrow: bool
) -> list[Callable[[], None]]:
    """Draws the lines, and the names in the margin. Returns functions that draw the names along the slopes."""
    slopes: list[Callable[[], None]] = []
    names = list(dict.fromkeys(c.rates for c in ceilings))
    labels: list[tuple[float, Ceiling]] = []
    for c in ceilings:
        first = c.rates == names[0]
        css = "roof" if first else "roof measured"
        mine = [other for other in ceilings if other.rates == c.rates]
        if c.slope:
            highest = max([other.value for other in mine if not other.slope], default=y.high)
            start, end = max(x.low, y.low * 1e3 / c.value), min(x.high, highest * 1e3 / c.value)
            if end > start:
                ends = (x(start), y(start * c.value * 1e-3)), (x(end), y(end * c.value * 1e-3))
                svg.line(*ends[0], *ends[1], css)
                text = c.figure if narrow else f"{c.label} {c.figure}, {c.rates}"
                slopes.append(partial(_slope_label, svg, text, *ends, above=first))
        else:
            slope = min([other.value for other in mine if other.slope], default=math.inf)
            start = min(max(x.low, c.value * 1e3 / slope), x.high)
            svg.line(x(start), y(c.value), frame.right, y(c.value), css)
            labels.append((y(c.value), c))
    if narrow:
        for place, c in labels[:1]:
            svg.text(frame.right, place - 5, c.figure, "label", anchor="end")
    else:
        _margin_labels(svg, labels, frame)
    return slopes


def _margin_labels(svg: Svg, labels: Sequence[tuple[float, Ceiling]], frame: Frame) -> None:
    """Draws the labels beside their lines. Labels that would overlap are moved down and connected to their line."""
    free = -math.inf
    for place, c in sorted(labels, key=lambda label: label[0]):
        top = max(place - 2, free)
        svg.line(frame.right, place, frame.right + 8, top, "hair")
        svg.text(frame.right + 12, top + 4, f"{c.figure}, {c.rates}", "label")
        svg.text(frame.right + 12, top + 17, c.label)
        free = top + 33


def _slope_label(svg: Svg, text: str, start: tuple[float, float], end: tuple[float, float], *, above: bool) -> None:
    """Draws the label along the line if the line is long enough."""
    (x1, y1), (x2, y2) = start, end
    if math.hypot(x2 - x1, y2 - y1) < len(text) * CHARACTER + 10:
        return
    angle = math.atan2(y2 - y1, x2 - x1)
    shift = -6 if above else 15
    at = (x1 + x2) / 2 - shift * math.sin(angle), (y1 + y2) / 2 + shift * math.cos(angle)
    svg.text(*at, text, "label", anchor="middle", turn=math.degrees(angle))


def family(family: Family, order: Sequence[str], *, highest: float, name: str) -> str:
    """Draws one family's curves; `highest` is the top of the axis, shared by all panels."""
    width, height = 340, 236
    frame = Frame(46, 12, width - 14, height - 44)
    lengths = sorted({length for curve in family.curves.values() for length, _ in curve})
    ticks = linear_ticks(highest)
    x = Scale(lengths[0], lengths[-1], frame.left + 12, frame.right - 8, log=True)
    y = Scale(0, ticks[-1], frame.bottom, frame.top)
    ends = "; ".join(
        f"{contender} {figure(curve[0][1])} to {figure(curve[-1][1])}" for contender, curve in family.curves.items()
    )
    title = f"{family.unit} over seqlen {lengths[0]:,} to {lengths[-1]:,}, {family.title}, {family.held}: {ends}"
    svg = Svg(width, height, title=title, name=name)
    for value in ticks:
        svg.line(frame.left, y(value), frame.right, y(value), "axis" if value == 0 else "grid")
        svg.text(frame.left - 7, y(value) + 4, tick(value), anchor="end")
    last_right = -math.inf
    for length in lengths:
        label = f"{length:,}"
        svg.line(x(length), frame.bottom, x(length), frame.bottom + 4, "axis")
        half = len(label) * CHARACTER / 2
        if x(length) - half > last_right + 4:
            svg.text(x(length), frame.bottom + 17, label, anchor="middle")
            last_right = x(length) + half
    svg.text((frame.left + frame.right) / 2, height - 7, "seqlen_k", anchor="middle")
    svg.text(11, (frame.top + frame.bottom) / 2, family.unit, anchor="middle", turn=-90)
    for contender in reversed([name for name in order if name in family.curves]):
        series = order.index(contender)
        points = [(x(length), y(value)) for length, value in family.curves[contender]]
        svg.polyline(points, line_class(series), dash(series))
        for at, (length, value) in zip(points, family.curves[contender], strict=True):
            told = f"{contender}, {length:,}: {figure(value)} {family.unit}"
            svg.mark(*at, series, 4.2 if series == 0 else 3.4, told)
    return str(svg)


def key(series: int, hollow: bool = False) -> str:
    """Draws a contender's line and mark, for the legend."""
    dashed = f' stroke-dasharray="{dash(series)}"' if dash(series) else ""
    return (
        '<svg class="key" viewBox="0 0 34 12" aria-hidden="true">'
        f'<line class="{line_class(series)}" x1="1" y1="6" x2="33" y2="6"{dashed}/>'
        f'<path class="{mark_class(series, hollow)}" d="{mark_path(17, 6, series, 4)}"/></svg>'
    )
