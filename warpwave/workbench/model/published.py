"""How far predictions were from times that others published, by card; and the constants fitted to half of them.

The times are in `benchmarks/published_points.csv`; `benchmarks/published.py` compares them and writes
`published.json`, which this module reads. Published kernels are not warpwave's, so a ratio tests whether a prediction
is plausible, and not whether it is exact. Imports no torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published.json")
SCHEMA = "warpwave published 1"
ENOUGH = 5  # points of a card from which its own error is its error bar
LEAST_FACTOR = 1.3  # of that error bar: kernels of one kind by several authors differ by as much on one card


@dataclass(frozen=True)
class Check:
    """Ratios of predicted over published times.

    Attributes:
        points: number of points.
        median, least, most: of the ratios.
        within_30: share of the points within 30 %.
        factor_90: nine in ten lay within this factor, up or down.
    """

    points: int
    median: float
    least: float
    most: float
    within_30: float
    factor_90: float


@dataclass(frozen=True)
class Family:
    """Constants of one architecture, fitted to every second of its points and judged by the others.

    Attributes:
        arch: the architecture.
        values: constant -> value, fields of `Constants`.
        fitted, judged: the ratios on either half.
    """

    arch: str
    values: Mapping[str, float]
    fitted: Check
    judged: Check


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"{FILE.name}: schema is {data['schema']!r}; it must be {SCHEMA!r}")
    return data


@functools.cache
def families() -> dict[str, Family]:
    """Returns the fitted families by architecture."""
    return {
        arch: Family(arch, entry["values"], Check(**entry["fitted"]), Check(**entry["judged"]))
        for arch, entry in _data()["families"].items()
    }


@functools.cache
def cards() -> dict[str, dict[str, Check]]:
    """Returns the ratios of each card with comparable points: key of its data sheet -> kernel of ours -> ratios."""
    found = _data()["cards"].items()
    return {key: {kernel: Check(**entry) for kernel, entry in kernels.items()} for key, kernels in found}
