"""Judges predictions on a record of a grid, stores the predictions, and writes verdicts to docs/notes/model.md.

    python -m benchmarks.model_verdict --predict SUITE.toml --out GRID-predicted.json    before it is measured
    python -m benchmarks.model_verdict --judge benchmarks/records/GRID.jsonl    writes GRID-judged.json beside it
    python -m benchmarks.model_verdict                                          writes the tables of docs/notes/model.md

If a record has a file of predictions (GRID-predicted.json), the verdict is on those; otherwise it is on the calibration
that ships at that time. Predictions are stored in a file and the tables are made from it, so a later calibration
changes neither. An existing verdict is not made again. A third table, the fit of the shipped calibration, is made from
the calibration.
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

from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import read_records
from warpwave.workbench.explain.backward import saving_of
from warpwave.workbench.model.calibration import Calibration, Residuals, calibrations, residuals

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "notes" / "model.md"
SUFFIX, PREDICTED = "-judged.json", "-predicted.json"
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
    """Returns the kind of a call: the first that fits, from the most special to the most general."""
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


def predictions(suite: str | Path, card: str = "h200") -> dict[str, Any]:
    """Returns every point of a suite with its predicted time, for the config that the kernel chooses.

    If the fastest kernel of a case takes less than 50 us, `bench` replays all of its kernels in a CUDA graph, and their
    inputs stay in L2. The measurement decides, so both times are predicted.
    """
    from benchmarks.calibration_points import gradient_kernels
    from warpwave import dispatch
    from warpwave.workbench.bench.workloads import load_suite
    from warpwave.workbench.hardware.catalog import resolve
    from warpwave.workbench.model.predict import predict

    gpu, found, shipped = resolve(card), load_suite(suite), calibrations()[card]
    forward = {kernel.NAME: kernel for kernel in dispatch.KERNELS}
    points: list[dict[str, Any]] = []
    for case in found.cases:
        problem, kernels = case.problem, forward
        if problem.requires_grad:  # a grid of gradients
            problem, kernels = saving_of(problem), gradient_kernels()
        able = [kernels[k] for k in case.kernels or found.kernels if not kernels[k].why_not(problem, gpu)]
        configs = {kernel.NAME: kernel.configs(problem, gpu)[0] for kernel in able}
        for graph in (True, False):
            for kernel in able:
                config, hot = configs[kernel.NAME], graph or case.hot is True
                p = predict(problem, kernel, config, gpu, hot=hot, graph=graph)
                assert p is not None
                points.append(
                    {
                        "case": case.name,
                        "kernel": kernel.NAME,
                        "config": asdict(config),
                        "graph": graph,
                        "predicted_us": float(f"{p.time_us:.5g}"),
                    }
                )
    files = _fitted_to(shipped, any(case.problem.requires_grad for case in found.cases))
    return {"suite": found.name, "card": card, "calibrated": shipped.date, "fitted_to": files, "points": points}


def _fitted_to(of: Calibration, of_gradients: bool = False) -> list[str]:
    lender = calibrations().get(of.constants_of, of)
    if of_gradients:
        return sorted(lender.sources.get("gradients", ()))
    others = ("judged", "gradients", "gradients judged")
    return sorted({file for key, files in lender.sources.items() if key not in others for file in files})


def judge(record: Path) -> dict[str, Any]:
    """Returns every point of a record with its prediction, and the calibration that predicted.

    Raises:
        NoVerdict: the record has no time of ours, or the predictions beside it lack one.
    """
    from benchmarks import calibrate_model, calibration_points
    from warpwave.workbench.hardware.catalog import find, gpu_of

    of_gradients = calibration_points.is_of_gradients(record)
    environment: dict[str, Any] = (
        calibration_points.environment_of_gradients(record)
        if of_gradients
        else next(iter(read_records(record).environments.values()), {})
    )
    name = str((environment.get("gpu") or {}).get("name", ""))
    sheet = next((known for word in name.split() if (known := find(word.lower()))), None)
    points = calibration_points.points(record)
    if calibration_points.is_of_gradients(record):
        fitted = calibrate_model.gradient_records("h200", "fit")
        points = calibrate_model.unseen(points, [p for path in fitted for p in calibration_points.points(path)])
    if sheet is None or not points:
        raise NoVerdict(f"{record.name} has no times of our kernels on a GPU of the catalog")
    gpu, shipped = gpu_of(sheet), calibrations()[sheet.key]
    calibrated, fitted_to = shipped.date, _fitted_to(shipped, of_gradients)
    before = record.with_name(record.stem + PREDICTED)
    written_before: dict[tuple[str, str, bool], dict[str, Any]] | None = None
    if before.is_file():
        data = json.loads(before.read_text(encoding="utf-8"))
        calibrated, fitted_to = data["calibrated"], data["fitted_to"]
        written_before = {(one["case"], one["kernel"], one["graph"]): one for one in data["points"]}

    def predicted_us(point: Any, case: str) -> float:
        if written_before is None:
            return float(f"{calibrate_model._ratio(point, gpu, None) * point.time_us:.5g}")
        ways = [written_before.get((case, point.kernel.NAME, graph)) for graph in (point.graph, not point.graph)]
        one = next((way for way in ways if way is not None), None)  # the third grid's have one
        if one is None or one["config"] != asdict(point.config):
            raise NoVerdict(f"{before.name} has no prediction of {case} by {point.kernel.NAME}, {point.config}")
        return float(one["predicted_us"])

    found = []
    for point in points:
        case = point.name.removesuffix(f" {point.kernel.NAME}")
        measured = float(f"{point.time_us:.5g}")
        kind = kind_of(point.problem)
        found.append(Judged(case, point.kernel.NAME, kind, predicted_us(point, case), measured))
    return {
        "record": record.name,
        "device": name,
        "measured": environment.get("date", "")[:10],
        "calibrated": calibrated,
        "fitted_to": fitted_to,
        "points": [asdict(one) for one in found],
    }


def tables(data: dict[str, Any]) -> str:
    """Returns the verdict in a sentence, by kernel and by kind, and the worst points with their remainders."""
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
    """Returns the errors on points that a loop's fit had not seen, for each loop, and those of round constants."""
    lines = [
        f"{of.gpu.upper()}, {of.date} (`warpwave/workbench/model/calibrated/{of.gpu}.json`):",
        "",
        "| left out of the fit, problem by problem | points | median error | within 20 % | nine in ten within |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(_line(_named(key) if key != "all" else "all", r) for key, r in of.cross_validated.items()),
    ]
    if of.uncalibrated is not None:
        lines.append(_line("round constants, never fitted, all points", of.uncalibrated))
    if of.kernels_left_out:
        lines += [
            "",
            "| a whole kernel left out: by constants fitted to the others | points | median error | within 20 % "
            "| nine in ten within |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(_line(f"`{key}`", r) for key, r in of.kernels_left_out.items()),
        ]
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
    """Returns the document with every verdict made from its file, or stated to be missing.

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
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=Path, metavar="RECORD", help="a record of a grid, not judged yet")
    parser.add_argument("--predict", metavar="SUITE", help="write what is predicted for a suite file to --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of --predict: named as the record will be")
    asked = parser.parse_args()
    if (asked.predict is None) != (asked.out is None):
        parser.error("--predict and --out go together")
    try:
        if asked.predict is not None:
            if asked.out.exists():
                raise NoVerdict(f"{asked.out.name} already exists; predictions are written once, before measuring")
            asked.out.write_text(json.dumps(predictions(asked.predict), indent=1) + "\n", encoding="utf-8")
            print(f"{len(json.loads(asked.out.read_text(encoding='utf-8'))['points'])} predictions in {asked.out}")
            return 0
        if asked.judge is not None:
            out = asked.judge.with_name(asked.judge.stem + SUFFIX)
            if out.exists():
                raise NoVerdict(f"{out.name} already exists; a verdict is made once")
            out.write_text(json.dumps(judge(asked.judge), indent=1) + "\n", encoding="utf-8")
            print(tables(json.loads(out.read_text(encoding="utf-8"))))
        DOC.write_text(written(DOC.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
