"""Compares predictions with times that others published, card by card, and writes the page that shows them.

    python -m benchmarks.published            compares, and writes published.json, the page and its drawing
    python -m benchmarks.published --fit      first fits the constants of AMD's families to every second point
    python -m benchmarks.published --check    exit code 1 if a file is not what the points and the model give

`benchmarks/published_points.csv` has the points with their sources. Published kernels are not warpwave's, so a ratio
shows only whether a prediction is plausible. A bound has to hold for every kernel that accumulates in float32.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import published_page
from benchmarks.published_page import check
from warpwave import dispatch
from warpwave.kernels.flash_fwd import Config
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.hardware.catalog import DataSheet, find, gpu_of
from warpwave.workbench.model import published
from warpwave.workbench.model.calibration import UNCALIBRATED, Machine, machine
from warpwave.workbench.model.predict import timer
from warpwave.workbench.model.roofline import data_sheet_rates, roofline

POINTS = Path(__file__).with_name("published_points.csv")
# Class of a published kernel -> the kernel of ours that works like it. Kernels by vendors in other ways of working, and
# kernels that accumulate in float16, are compared with bounds alone.
LIKE = {"triton": "flash_fwd", "fa2": "flash_fwd", "hopper": "hopper/flash_fwd", "wide": "auto"}
FITTED = ("gfx90a", "gfx942", "gfx950", "gfx1100")
# The tiles by which published kernels on CDNA are predicted, up to head_dim 128 and above: our defaults until
# 2026-11-26. With those after it, no constants of the families give the times of an MI300X (docs/notes/other_cards.md).
ON_CDNA = (Config(64, 64, 4, 2), Config(64, 32, 8, 2))
SERIAL = tuple(i / 20 for i in range(21))
FILL_US = tuple(round(2 ** (i / 3), 2) for i in range(14))  # 1 to 20
ROBUST = 0.25  # logarithm of a ratio from which a point counts less: other people's slips, and other designs


@dataclass(frozen=True)
class Point:
    """One published time.

    Attributes:
        source: where it was published.
        sheet: the card.
        kernel: the published kernel.
        cls: its class, a key of `LIKE`, `"vendor"` or `"fp16acc"`.
        problem: the call.
        time_us: its time.
    """

    source: str
    sheet: DataSheet
    kernel: str
    cls: str
    problem: AttentionProblem
    time_us: float

    @property
    def tflops(self) -> float:
        return self.problem.flops / self.time_us * 1e-6


@dataclass(frozen=True)
class Compared:
    """One point beside its prediction.

    Attributes:
        ours: the kernel of ours that was predicted.
        ratio: predicted over published time.
    """

    point: Point
    ours: str
    ratio: float


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the families before the comparison")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    asked = parser.parse_args()
    found = points()
    if asked.fit:
        write(families(found), {})
        published._data.cache_clear()
        published.families.cache_clear()
    known = {arch: asdict(family) for arch, family in published.families().items()}
    for entry in known.values():
        entry.pop("arch")
    compared = list(compare(found))
    texts = files(found, compared, known)
    if asked.check:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
        print("\n".join(f"{path} is not what the points and the model give" for path in stale) or "up to date")
        return bool(stale)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(published_page.table(compared))
    return 0


def files(found: Sequence[Point], compared: Sequence[Compared], known: Mapping[str, Any]) -> dict[Path, str]:
    """Returns path -> text of every file that follows from the points."""
    slower, least = violations(found)
    page = published_page.page(compared, known, slower, least, pairs(compared))
    return {
        published.FILE: dumped(known, checks(compared)),
        published_page.PAGE: page,
        published_page.DRAWING: published_page.drawing(compared),
    }


def points() -> list[Point]:
    """Returns the published points, in the file's order."""
    with POINTS.open(encoding="utf-8", newline="") as file:
        return [point(row) for row in csv.DictReader(file)]


def point(row: Mapping[str, str]) -> Point:
    """Returns the point of one row.

    Raises:
        ValueError: the catalog has no such card.
    """
    sheet = find(row["gpu"])
    if sheet is None:
        raise ValueError(f"{POINTS.name}: the catalog has no {row['gpu']}")
    width = int(row["head_dim"])
    problem = AttentionProblem(
        batch=int(row["batch"]),
        seqlen_q=int(row["seqlen_q"]),
        seqlen_k=int(row["seqlen_k"]),
        num_heads_q=int(row["heads"]),
        num_heads_kv=int(row["heads_kv"]),
        head_dim=width,
        head_dim_v=width,
        dtype=row["dtype"],
        softmax_scale=width**-0.5,
        causal=Causal("bottom_right") if row["causal"] == "1" else None,
    )
    return Point(row["source"], sheet, row["kernel"], row["cls"], problem, float(row["time_us"]))


def compare(found: Sequence[Point]) -> Iterator[Compared]:
    """Yields the points that a kernel of ours works like, with its prediction."""
    for p in found:
        if p.cls in LIKE:
            yield Compared(p, *_predicted(p))


def _predicted(p: Point, of: Machine | None = None) -> tuple[str, float]:
    gpu = gpu_of(p.sheet)
    choice = dispatch.choose(p.problem, gpu, LIKE[p.cls], None)
    config = choice.config
    if p.sheet.arch.startswith("gfx9") and choice.kernel.NAME == "flash_fwd":
        config = ON_CDNA[p.problem.head_dim > 128]
    cost = choice.kernel.cost(p.problem, gpu, config)
    where = of or machine(p.sheet, choice.kernel.NAME, cost.loop)
    time_us = timer(p.problem, choice.kernel, config, gpu, where, hot=False, graph=False)
    return choice.kernel.NAME, time_us(where) / p.time_us


# Fitting ----------------------------------------------------------------------------------------------------------


def families(found: Sequence[Point]) -> dict[str, Any]:
    """Fits `serial` and `fill_us` of each family to its points with even numbers; those with odd numbers judge."""
    fitted = {}
    for arch in FITTED:
        of_arch = [p for p in found if p.sheet.arch == arch and LIKE.get(p.cls) == "flash_fwd"]
        best = min(
            ({"serial": serial, "fill_us": fill_us} for serial in SERIAL for fill_us in FILL_US),
            key=lambda values: _badness(_ratios(of_arch[::2], values)),
        )
        halves = [asdict(check(_ratios(half, best))) for half in (of_arch[::2], of_arch[1::2])]
        fitted[arch] = {"values": best, "fitted": halves[0], "judged": halves[1]}
    return fitted


def _ratios(of_arch: Sequence[Point], values: Mapping[str, float]) -> list[float]:
    constants = replace(UNCALIBRATED, power=math.inf, serial=values["serial"], fill_us=values["fill_us"])
    return [_predicted(p, Machine(p.sheet, constants, None, False))[1] for p in of_arch]


def _badness(ratios: Sequence[float]) -> float:
    squares = [math.log(ratio) ** 2 for ratio in ratios]
    return sum(square / (1 + square / ROBUST**2) for square in squares)


# Figures ----------------------------------------------------------------------------------------------------------


def checks(compared: Sequence[Compared]) -> dict[str, Any]:
    """Returns card -> kernel of ours -> its figures."""
    found: dict[str, dict[str, list[float]]] = {}
    for c in compared:
        found.setdefault(c.point.sheet.key, {}).setdefault(c.ours, []).append(c.ratio)
    return {
        card: {kernel: asdict(check(ratios)) for kernel, ratios in sorted(of_card.items())}
        for card, of_card in sorted(found.items())
    }


def violations(found: Sequence[Point]) -> tuple[list[tuple[Point, float]], float]:
    """Returns the points that took less time than the bound, with time over bound, and the least such ratio of points
    that accumulate in float32."""
    ratios = []
    for p in found:
        bound = roofline(p.problem, data_sheet_rates(p.sheet), gpu=gpu_of(p.sheet))
        ratios.append((p, p.time_us / bound.time_us))
    return [(p, r) for p, r in ratios if r < 1], min(r for p, r in ratios if p.cls != "fp16acc")


def pairs(compared: Sequence[Compared]) -> tuple[int, int]:
    """Returns how many pairs of cards are predicted in the order that was published, and the number of pairs.

    A pair has plateaus (the best rate over all lengths) at the same head_dim and mask, by the same kernel of ours, and
    published rates that differ by more than a tenth.
    """
    plateaus: dict[tuple[Any, ...], dict[str, Compared]] = {}
    for c in compared:
        key = (c.ours, c.point.problem.head_dim, c.point.problem.causal is not None)
        of_key = plateaus.setdefault(key, {})
        best = of_key.get(c.point.sheet.key)
        if best is None or c.point.tflops > best.point.tflops:
            of_key[c.point.sheet.key] = c
    right = total = 0
    for of_key in plateaus.values():
        for a, b in combinations(of_key.values(), 2):
            if max(a.point.tflops / b.point.tflops, b.point.tflops / a.point.tflops) > 1.1:
                total += 1
                right += (a.point.tflops > b.point.tflops) == (a.point.tflops / a.ratio > b.point.tflops / b.ratio)
    return right, total


def write(known: Mapping[str, Any], cards: Mapping[str, Any]) -> None:
    """Writes the file that the package reads."""
    published.FILE.write_text(dumped(known, cards), encoding="utf-8")


def dumped(known: Mapping[str, Any], cards: Mapping[str, Any]) -> str:
    """Returns the text of the file that the package reads."""
    return json.dumps({"schema": published.SCHEMA, "families": known, "cards": cards}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
