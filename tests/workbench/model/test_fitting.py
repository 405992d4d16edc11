"""Exponents and lines through points whose law is known."""

from __future__ import annotations

import math
import random

import pytest

from warpwave.workbench.model.fitting import line, power_law


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 3.1])
def test_an_exact_power_law(exponent: float) -> None:
    law = power_law([1, 2, 4, 8], [3 * s**exponent for s in (1, 2, 4, 8)])
    assert law.exponent == pytest.approx(exponent, abs=1e-12) and law.half < 1e-6


def test_the_interval_holds_the_truth_19_times_in_20() -> None:
    draw, inside = random.Random(0), 0
    for _ in range(400):
        times = [s**1.5 * math.exp(draw.gauss(0, 0.1)) for s in (1, 2, 4, 8, 16)]
        law = power_law([1, 2, 4, 8, 16], times)
        inside += abs(law.exponent - 1.5) <= law.half
    assert 365 <= inside <= 395


def test_two_points_have_no_interval_and_one_no_exponent() -> None:
    assert math.isinf(power_law([1, 2], [1, 4]).half) and str(power_law([1, 2], [1, 4])) == "2.00"
    for sizes, times in (([1.0], [1.0]), ([2.0, 2.0], [1.0, 2.0]), ([0.0, 1.0], [1.0, 1.0]), ([1.0, 2.0], [1.0, -1.0])):
        with pytest.raises(ValueError, match="needs"):
            power_law(sizes, times)


def test_a_line_with_a_start_and_one_through_the_origin() -> None:
    assert line([1, 2, 5], [12.0, 14.0, 20.0]) == pytest.approx((10.0, 2.0))
    start, slope = line([1, 2, 4], [1.0, 2.2, 4.6])  # would begin below 0
    assert start == 0.0 and slope == pytest.approx(1.08, abs=0.05)
    assert line([1, 2, 4], [5.0, 4.0, 3.0])[1] == 0.0
    with pytest.raises(ValueError, match="two sizes"):
        line([3, 3], [1.0, 1.0])
