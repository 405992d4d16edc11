"""Judges predicted times on a record of a grid, keeps what was predicted, and writes the verdicts into docs/model.md.

    python -m benchmarks.model_verdict --judge benchmarks/records/GRID.jsonl    writes GRID-judged.json beside it
    python -m benchmarks.model_verdict                                          writes the tables of docs/model.md

A verdict is of the calibration that shipped when it was made. So predictions are kept in a file, and the tables made
from that: another calibration later changes neither. Where a record's judgement is there already it is not made again.
A third table, of how well the calibration that ships fits, is made from that.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpwave.bench.records import read_records
from warpwave.calibration import Calibration, Residuals, calibrations, residuals
from warpwave.problem import AttentionProblem

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "model.md"
SUFFIX = "-judged.json"
SECTION = re.compile(r"(<!-- judged in (?P<file>\S+) -->\n)(?P<body>.*?)(<!-- end of judged -->)", re.DOTALL)
FITTED = re.compile(r"(<!-- fit of (?P<card>\S+) -->\n)(?P<body>.*?)(<!-- end of fit -->)", re.DOTALL)
NOT_YET = "Not measured yet.\n"
GOAL_MEDIAN, GOAL_WITHIN = 0.10, 0.90
WORST = 10


class NoVerdict(ValueError):
    """A record that cannot be judged, or a document without a place for it."""


@dataclass(frozen=True)
class Judged:
    """One measurement and what was predicted for it.

    Attributes:
        case, kernel: what ran.
        kind: of call, as the tables have it.
        predicted_us, measured_us: device time; measured is the median.
    """

    case: str
    kernel: str
    kind: str
    predicted_us: float
    measured_us: float

    @property
    def ratio(self) -> float:
        return self.predicted_us / self.measured_us


def kind_of(problem: AttentionProblem) -> str:
    """The kind of a call: the first that fits, from the most special on."""
    sizes = (problem.head_dim, problem.head_dim_v)
    if problem.packed:
        return "packed"
    if problem.dtype == "float32":
        return "float32"
    if problem.seqlen_q == 1:
        return "one query"
    if max(sizes) > 256:
        return "very wide heads"
    if problem.window_size != (-1, -1):
        return "window"
    if any(size & (size - 1) for size in sizes):
        return "odd sizes"
    if problem.num_heads_kv < problem.num_heads_q:
        return "GQA"
    if problem.batch * problem.num_heads_q * problem.seqlen_q <= 4096:
        return "under-filled"
    return "causal" if problem.causal is not None else "full"


def judge(record: Path) -> dict[str, Any]:
    """Every point of a record with its prediction, and whose predictions they are.

    Raises:
        NoVerdict: the record has no time of ours.
    """
    from benchmarks import calibrate_model
    from warpwave.hardware.catalog import find, gpu_of

    environment = next(iter(read_records(record).environments.values()), {})
    name = str((environment.get("gpu") or {}).get("name", ""))
    sheet = find(name.split()[-1].lower()) if name else None
    points = calibrate_model.points(record)
    if sheet is None or not points:
        raise NoVerdict(f"{record.name} has no times of our kernels on a GPU that the catalogue knows")
    gpu, shipped = gpu_of(sheet), calibrations()[sheet.key]
    found = [
        Judged(
            point.name.removesuffix(f" {point.kernel.NAME}"),
            point.kernel.NAME,
            kind_of(point.problem),
            float(f"{calibrate_model._ratio(point, gpu, None) * point.time_us:.5g}"),
            float(f"{point.time_us:.5g}"),
        )
        for point in points
    ]
    return {
        "record": record.name,
        "device": name,
        "measured": environment.get("date", "")[:10],
        "calibrated": shipped.date,
        "fitted_to": sorted({file for files in shipped.sources.values() for file in files}),
        "points": [asdict(one) for one in found],
    }


def tables(data: dict[str, Any]) -> str:
    """The verdict in a sentence, by kernel, by kind, and the worst points with their remainder."""
    points = [Judged(**fields) for fields in data["points"]]
    of_all = residuals([point.ratio for point in points])
    median_met, within_met = of_all.median <= GOAL_MEDIAN, of_all.within_20 >= GOAL_WITHIN
    verdict = "both met" if median_met and within_met else "neither met"
    if median_met != within_met:
        verdict = f"the {'median' if median_met else 'share'} is met, the {'share' if median_met else 'median'} is not"
    seen = data["record"] in data["fitted_to"]
    lines = [
        f"{data['device']}, measured {data['measured']}, {len(points)} points, predicted by the calibration of "
        f"{data['calibrated']}{', which was fitted to them' if seen else ''}: **median error {of_all.median:.1%}, "
        f"{of_all.within_20:.0%} within 20 %** (goals: 10 % and 90 %; {verdict}).",
        "",
        "| | points | median error | within 20 % | nine in ten within |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(point.kernel for point in points):
        lines.append(_row(f"`{name}`", [p.ratio for p in points if p.kernel == name]))
    for kind in dict.fromkeys(point.kind for point in points):
        lines.append(_row(kind, [p.ratio for p in points if p.kind == kind]))
    lines += [
        _row("all", [p.ratio for p in points]),
        "",
        "The worst ten, and their remainder (measured over predicted):",
        "",
        "| case | kernel | predicted us | measured us | remainder |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for point in sorted(points, key=lambda p: -abs(math.log(p.ratio)))[:WORST]:
        lines.append(
            f"| {point.case} | `{point.kernel}` | {_us(point.predicted_us)} | {_us(point.measured_us)} "
            f"| {1 / point.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def fit_table(of: Calibration) -> str:
    """Of each loop, how well points were predicted that its fit had not seen; and how well round constants do."""
    lines = [
        f"{of.gpu.upper()}, {of.date} (`warpwave/calibrated/{of.gpu}.json`):",
        "",
        "| left out of the fit, problem by problem | points | median error | within 20 % | nine in ten within |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(_line(_named(key), r) for key, r in of.cross_validated.items()),
    ]
    if of.uncalibrated is not None:
        lines.append(_line("round constants, never fitted, all points", of.uncalibrated))
    return "\n".join(lines) + "\n"


def _named(key: str) -> str:
    kernel, _, loop = key.partition(" ")
    return f"`{kernel}`" + (f", {loop}" if loop else "")


def _row(name: str, ratios: Sequence[float]) -> str:
    return _line(name, residuals(list(ratios)))


def _line(name: str, r: Residuals) -> str:
    return f"| {name} | {r.points} | {r.median:.1%} | {r.within_20:.0%} | x {r.factor_90:.2f} |"


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}"


def written(document: str) -> str:
    """The document with every verdict made from its file; one whose file is not there yet says so.

    Raises:
        NoVerdict: the document has no place for any.
    """
    if not SECTION.search(document):
        raise NoVerdict("the document has no section between '<!-- judged in ... -->' and '<!-- end of judged -->'")

    def section(found: re.Match[str]) -> str:
        path = ROOT / found["file"]
        body = tables(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else NOT_YET
        return f"{found[1]}{body}{found[4]}"

    def fit(found: re.Match[str]) -> str:
        return f"{found[1]}{fit_table(calibrations()[found['card']])}{found[4]}"

    return FITTED.sub(fit, SECTION.sub(section, document))


def main() -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=Path, metavar="RECORD", help="a record of a grid, not judged yet")
    asked = parser.parse_args()
    try:
        if asked.judge is not None:
            out = asked.judge.with_name(asked.judge.stem + SUFFIX)
            if out.exists():
                raise NoVerdict(f"{out.name} is there: a verdict is made once")
            out.write_text(json.dumps(judge(asked.judge), indent=1) + "\n", encoding="utf-8")
            print(tables(json.loads(out.read_text(encoding="utf-8"))))
        DOC.write_text(written(DOC.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
