"""Fits exponents and straight lines to a few measured points, with intervals. It has no dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, 95 %, two-sided, by degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
NORMAL = 1.96


@dataclass(frozen=True)
class PowerLaw:
    """time = c * size ** exponent.

    Attributes:
        exponent: the fitted exponent.
        half: half the width of its 95 % interval; infinite with only two points.
    """

    exponent: float
    half: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f}" + ("" if math.isinf(self.half) else f" +- {self.half:.2f}")


def power_law(sizes: Sequence[float], times: Sequence[float]) -> PowerLaw:
    """Fits a power law by least squares on logarithms.

    Raises:
        ValueError: fewer than two different sizes, or a size or time that is not above 0.
    """
    if min((*sizes, *times), default=0.0) <= 0:
        raise ValueError("a power law needs sizes and times above 0")
    x, y = [math.log(s) for s in sizes], [math.log(t) for t in times]
    n, mx, my = len(x), sum(x) / len(x), sum(y) / len(y)
    sxx = sum((a - mx) ** 2 for a in x)
    if n < 2 or sxx == 0:
        raise ValueError("an exponent needs two sizes that differ")
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sxx
    if n == 2:
        return PowerLaw(slope, math.inf)
    rest = sum((b - my - slope * (a - mx)) ** 2 for a, b in zip(x, y, strict=True))
    student = STUDENT[n - 3] if n - 3 < len(STUDENT) else NORMAL
    return PowerLaw(slope, student * math.sqrt(rest / (n - 2) / sxx))


def line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Returns (a, b) of time = a + b * size by least squares of relative errors; neither is below 0.

    Raises:
        ValueError: fewer than two different sizes.
    """
    weights = [1 / t**2 for t in times]
    sw, sx = sum(weights), sum(w * x for w, x in zip(weights, sizes, strict=True))
    sy = sum(w * t for w, t in zip(weights, times, strict=True))
    sxx = sum(w * x * x for w, x in zip(weights, sizes, strict=True))
    sxy = sum(w * x * t for w, x, t in zip(weights, sizes, times, strict=True))
    spread = sw * sxx - sx * sx
    if len(sizes) < 2 or spread <= 1e-12 * sw * sxx:
        raise ValueError("a line needs two sizes that differ")
    slope = (sw * sxy - sx * sy) / spread
    if slope < 0:
        return sy / sw, 0.0
    start = (sy - slope * sx) / sw
    return (start, slope) if start >= 0 else (0.0, sxy / sxx)
