"""Formats numbers: three or four digits, rarely an exponent, the unit in the heading or after the number."""

from __future__ import annotations

from collections.abc import Sequence

from warpwave.workbench.bench.timing import Ratio

NO_FIGURE = "-"  # an empty cell
NO_BREAK = "\u00a0"
NARROW_SPACE = "\u202f"  # keeps a figure and its unit on one line


def figure(value: float | None, digits: int = 3) -> str:
    """Returns at least `digits` significant digits, with zeros and thousands separators: 0.684, 14.0, 343, 17,030."""
    if value is None:
        return NO_FIGURE
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # after rounding: 9.996 is written with two decimals
    return f"{value:,.{max(0, digits - 1 - exponent)}f}" if exponent >= -4 else f"{value:.{digits - 1}e}"


def tick(value: float) -> str:
    """Returns a round figure for an axis."""
    return f"{value:,.0f}" if value >= 1 and value % 1 == 0 else f"{value:g}"


def percent(share: float | None) -> str:
    """Returns a share in whole percent, with one more digit below ten."""
    if share is None:
        return NO_FIGURE
    if share < 0.001:
        return f"under 0.1{NARROW_SPACE}%"
    return f"{share * 100:.{0 if share >= 0.0995 else 1}f}{NARROW_SPACE}%"


def duration(us: float) -> str:
    """Returns a time with a suitable unit."""
    for limit, unit, factor in ((1e3, "µs", 1.0), (1e6, "ms", 1e3)):
        if us < limit:
            return f"{figure(us / factor)}{NARROW_SPACE}{unit}"
    return f"{figure(us / 1e6)}{NARROW_SPACE}s"


def interval(ratio: Ratio) -> str:
    """Returns the 95 % interval in brackets, or the reason why there is none."""
    if ratio.low95 is None or ratio.high95 is None:
        return "[needs 6 rounds]"
    return f"[{ratio.low95:.2f}, {ratio.high95:.2f}]"


def span(values: Sequence[float], unit: str) -> str:
    """Returns the range of several readings."""
    if not values:
        return ""
    low, high = figure(min(values)), figure(max(values))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def count(n: int, noun: str) -> str:
    """Returns a count with its noun: 1 case, 2 cases."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Returns the names as a list in a sentence: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
