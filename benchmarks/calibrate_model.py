"""Fits the model's constants for one card to records, judges them on others, and writes the calibration.

    python -m benchmarks.calibrate_model                    refit the H200 from the records of this repository
    python -m benchmarks.calibrate_model --check            judge the calibration that ships, write nothing
    python -m benchmarks.calibrate_model --only split_kv    fit one kernel, keep the others' constants
    python -m benchmarks.calibrate_model --gradients        fit and judge kernels of gradients, keep all others
    python -m benchmarks.calibrate_model --gradients --only flash_bwd    the same for one of them
    python -m benchmarks.calibrate_model --rejudge          keep its constants, judge them again, write the error bars
    python -m benchmarks.calibrate_model --round    keep all but the error bar of cards without a calibration
    python -m benchmarks.calibrate_model --gradients --round    the same for kernels of gradients
    python -m benchmarks.calibrate_model --card h100 --constants-of h200 --judge grid.jsonl    the same chip: judge
    python -m benchmarks.calibrate_model --card b200 --fit sweep.jsonl --judge other.jsonl --ceilings roof.json

Points to fit and points to judge come from different files. Constants are fitted per kernel to the logarithm of
predicted over measured time. The loss is quadratic up to 20 % and linear beyond. Constants that the points do not
determine stay at the round numbers of `UNCALIBRATED`, by a small added loss. Cross-validation leaves out whole problems
with all their configs. `benchmarks.calibration_points` reads the files.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration_points import Point, gradient_kernels, near_best, points
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.catalog import DataSheet, data_sheet, find, gpu_of
from warpwave.workbench.model import calibration, predict
from warpwave.workbench.model.calibration import UNCALIBRATED, Calibration, Constants, Residuals, residuals
from warpwave.workbench.model.steps import path_of

ROOT = Path(__file__).parent.parent
RECORDS, SHIPPED = ROOT / "benchmarks" / "records", ROOT / "warpwave" / "workbench" / "report" / "shipped"
# The fit uses every record of the H200 except the newest grid, which judges, files of another kind (`NOT_POINTS`), and
# records of kernels that have been rewritten since (`ANOTHER_BEFORE`, and sweeps of flash_fwd's configs).
GRID = "model-grid-5"
NOT_POINTS = ("cliff", "peers-against-gates")
LOGS = (
    "hopper-flash-fwd-tuning",
    "three-kernel-products",
    "hopper-float32-fp16",
    "hopper-large-head-dim",
    "hopper-tiles-of-192",
    "latents",
    "decode-large-heads",
    "float32-masks",
)


def _records(card: str = "h200") -> tuple[list[Path], list[Path]]:
    """Returns all records of a card in the repository: (those to fit, those to judge)."""
    found = sorted((*RECORDS.glob(f"*-{card}-*.jsonl"), *SHIPPED.glob(f"*-{card}-*.jsonl")))
    found = [path for path in found if not path.stem.endswith(NOT_POINTS) and _is_of_bench(path)]
    logs = [path for name in LOGS for path in sorted(RECORDS.glob(f"*-{card}-{name}.*"))]
    judging = [path for path in found if path.stem.endswith(GRID)]
    return [*(path for path in found if path not in judging), *logs], judging


def _is_of_bench(path: Path) -> bool:
    """Returns whether `warpwave bench` wrote the file; other programs of this folder write JSON lines too."""
    with path.open(encoding="utf-8") as lines:
        return '"schema_version"' in lines.readline()


FOLDS = 6
POOLED = 3  # a fit of many kernels together uses every third point
KNEE = 0.2  # log error beyond which the loss is linear
PULL = 0.05  # weight of a constant that is off `UNCALIBRATED` by a factor e, relative to a point that is as far off


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="h200", help="key of the data sheet")
    parser.add_argument("--fit", nargs="+", type=Path, help="default: the repository's records of the card")
    parser.add_argument("--judge", nargs="*", type=Path, help=f"default: the record of {GRID}, where it is there")
    parser.add_argument("--ceilings", type=Path, help="what `warpwave roof --out` wrote; default: those shipped")
    parser.add_argument("--check", action="store_true", help="judge the calibration that ships; fit and write nothing")
    parser.add_argument(
        "--rejudge", action="store_true", help="keep the constants that ship; judge, and write how far off"
    )
    parser.add_argument("--round", action="store_true", help="only measure how far off round constants are")
    parser.add_argument("--gradients", action="store_true", help="fit and judge kernels of gradients; keep all others")
    parser.add_argument("--only", nargs="+", default=[], help="fit these kernels or loops; the others' constants stay")
    parser.add_argument("--quick", action="store_true", help="do not predict kernels by the others' constants")
    parser.add_argument("--constants-of", metavar="CARD", help="take that card's constants, its chip being the same")
    parser.add_argument("--out", type=Path, help="default: the package's own file of this card")
    asked = parser.parse_args()
    sheet = find(asked.card)
    if sheet is None:
        parser.error(f"the catalog has no card {asked.card!r}")
    gpu = gpu_of(sheet)
    if asked.gradients:
        return _calibrate_gradients(asked, sheet, gpu)
    if asked.constants_of is not None and (asked.constants_of not in calibration.calibrations() or not asked.judge):
        parser.error("--constants-of names a card with a calibration, and --judge a record to judge its constants on")
    fit_files, judge_files = _records(asked.card)
    asked.fit = fit_files if asked.fit is None else asked.fit
    asked.judge = judge_files if asked.judge is None else asked.judge
    if both := set(asked.fit) & set(asked.judge):
        parser.error(f"{', '.join(map(str, both))} cannot be fitted to and judged on")
    fitting = _of([point for path in asked.fit for point in near_best(points(path))], gradients=False)
    judged = [point for path in asked.judge for point in points(path)]
    if asked.check:
        _print_judgement("judged", judged, gpu, None)
        return 0
    out = asked.out or calibration.FOLDER / f"{sheet.key}.json"
    if asked.constants_of is not None:
        lender = calibration.calibrations()[asked.constants_of]
        sources = {"judged": tuple(path.name for path in asked.judge)}
        taken = replace(
            lender, gpu=sheet.key, sources=sources, kernels={}, cross_validated={}, kernels_left_out={},
            uncalibrated=None, constants_of=lender.gpu,
        )  # fmt: skip
        by_kernel = _print_judgement("judged, not fitted to", judged, gpu, taken)
        calibration.write(replace(taken, residuals=by_kernel), out)
        return 0
    if asked.round:
        shipped = calibration.calibrations()[sheet.key]
        rough = by_round_constants((*judged, *fitting), gpu, shipped)
        calibration.write(replace(shipped, uncalibrated=rough), out)
        return 0
    if asked.rejudge:
        shipped = calibration.calibrations()[sheet.key]
        sources = {**shipped.sources, "judged": tuple(path.name for path in asked.judge)}
        by_kernel = _print_judgement("judged, not fitted to", judged, gpu, shipped)
        calibration.write(_with_gradients(replace(shipped, sources=sources, residuals=by_kernel), shipped), out)
        return 0
    ceilings = measure.shipped(gpu) if asked.ceilings is None else measure.read(asked.ceilings)
    if ceilings is None or ceilings.launch_us is None:
        parser.error(f"no measured ceilings of {sheet.name}; `warpwave roof --out FILE` on it writes them")
    read, exponentials = ceilings.read_gbps or ceilings.copy_gbps, ceilings.exponentials_gops
    base = Calibration(
        gpu=sheet.key,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        sources={
            "fit": tuple(p.name for p in asked.fit),
            "judged": tuple(p.name for p in asked.judge),
        },
        memory=min(1.0, (read or 0.9 * sheet.bandwidth_gbps) / sheet.bandwidth_gbps),
        exponentials=min(1.0, exponentials / sheet.exponentials_gops)
        if exponentials and sheet.exponentials_gops
        else 0.95,
        l2_gbps=ceilings.l2_gbps,
        launch_us=ceilings.launch_us,
        kernels={},
        residuals={},
        cross_validated={},
    )
    kernels: dict[str, Constants] = {}
    crossed: dict[str, Residuals] = {}
    # Kernels come before their loops, which are pulled toward the kernel's constants, and loops before their variants.
    names = sorted(dict.fromkeys(_key(point, gpu) for point in fitting), key=lambda name: name.count(" "))
    before: Mapping[str, Residuals] = {}
    all_unseen: list[float] = []
    if asked.only:
        shipped = calibration.calibrations()[sheet.key] if asked.out is None else calibration.read(asked.out)
        kernels = {name: shipped.kernels[name] for name in names if name in shipped.kernels}
        crossed = dict(shipped.cross_validated)
        names = [name for name in names if name in asked.only]
        before = shipped.kernels_left_out
    for name in names:
        mine = [point for point in fitting if _key(point, gpu) == name]
        near = kernels.get(calibration.nearest([known for known in kernels if known != name], name), UNCALIBRATED)
        kernels[name] = fit(mine, gpu, base, near=near)
        print(f"{name}: {len(mine)} points\n  {kernels[name]}", flush=True)
        if away := _cross_validated(mine, gpu, base, kernels[name], near):
            crossed[name] = residuals(away)
            all_unseen += away
            print(f"  left out of the fit: {_words(crossed[name])}", flush=True)
    base = replace(base, kernels=_with_borrowed(kernels), cross_validated=crossed)
    if not asked.only:
        crossed["all"] = residuals(all_unseen)
        print(f"all, left out of the fit: {_words(crossed['all'])}")
    if not asked.quick:
        before = _kernels_left_out(fitting, gpu, base) if not asked.only else before
    base = replace(base, kernels_left_out=before)
    _print_judgement("fitted to", fitting, gpu, base, brief=True)
    by_kernel = _print_judgement("judged, not fitted to", judged, gpu, base)
    rough = by_round_constants((*judged, *fitting), gpu, base)
    base = replace(base, residuals=by_kernel, uncalibrated=rough)
    before_fit = calibration.calibrations().get(sheet.key)
    calibration.write(base if before_fit is None else _with_gradients(base, before_fit), out)
    print(f"written to {out}")
    return 0


def _calibrate_gradients(asked: argparse.Namespace, sheet: DataSheet, gpu: Gpu) -> int:
    """Fits the kernels of gradients, each near the forward kernel with the same products, and judges them on the other
    grid. The constants, the errors and the sources of forward kernels stay as they are."""
    fit_files = asked.fit or gradient_records(asked.card, "fit")
    judge_files = asked.judge if asked.judge is not None else gradient_records(asked.card, "judge")
    shipped = calibration.calibrations()[sheet.key]
    fitting = _of([point for path in fit_files for point in points(path)], gradients=True)
    judged = unseen([point for path in judge_files for point in points(path)], fitting)
    if asked.check:
        _print_judgement("judged", judged, gpu, None)
        return 0
    out = asked.out or calibration.FOLDER / f"{sheet.key}.json"
    if asked.round:
        rough = by_round_constants((*judged, *fitting), gpu, shipped)
        calibration.write(replace(shipped, uncalibrated_gradients=rough), out)
        return 0
    names = sorted(dict.fromkeys(_key(point, gpu) for point in fitting), key=lambda name: name.count(" "))
    names = [name for name in names if name in asked.only or not asked.only]
    mine = {point.kernel.NAME for point in fitting}
    replaced = tuple(names if asked.only else mine)
    kernels = {name: of for name, of in shipped.kernels.items() if not name.startswith(replaced)}
    crossed = {name: of for name, of in shipped.cross_validated.items() if not name.startswith(replaced)}
    for name in names:
        of_name = [point for point in fitting if _key(point, gpu) == name]
        near = kernels.get(calibration.nearest(kernels, name)) or kernels.get(LIKE.get(name, ""), UNCALIBRATED)
        kernels[name] = fit(of_name, gpu, shipped, near=near, begin=_start(near, name), names=FITTED_OF_GRADIENTS)
        print(f"{name}: {len(of_name)} points\n  {kernels[name]}", flush=True)
        if away := _cross_validated(of_name, gpu, shipped, _start(near, name), near, FITTED_OF_GRADIENTS):
            crossed[name] = residuals(away)
            print(f"  left out of the fit: {_words(crossed[name])}", flush=True)
    sources = {
        **shipped.sources,
        "gradients": tuple(path.name for path in fit_files),
        "gradients judged": tuple(path.name for path in judge_files),
    }
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    base = replace(shipped, date=date, kernels=kernels, cross_validated=crossed, sources=sources)
    _print_judgement("fitted to", fitting, gpu, base, brief=True)
    found = _print_judgement("judged, not fitted to", judged, gpu, base)
    rough = by_round_constants((*judged, *fitting), gpu, shipped)
    kept = {name: of for name, of in shipped.residuals.items() if name not in mine}
    by_kernel = kept | {name: of for name, of in found.items() if name != "all"}
    if "all" in found:
        by_kernel[ALL_GRADIENTS] = found["all"]
    calibration.write(replace(base, residuals=by_kernel, uncalibrated_gradients=rough), out)
    return 0


def _of(points: Sequence[Point], gradients: bool) -> list[Point]:
    """Returns the points of kernels of gradients, or of the others; some files have both."""
    names = {module.NAME for module in gradient_kernels().values()}
    return [point for point in points if (point.kernel.NAME in names) == gradients]


def by_round_constants(points: Sequence[Point], gpu: Gpu, base: Calibration) -> Residuals:
    """Returns the errors of the constants that a card without a calibration gets. Prints them."""
    ratios = []
    for point in points:
        where = calibration.machine_of_round_constants(_sheet(gpu), point.kernel.NAME, base)
        ratios.append(_timer(point, gpu)(where) / point.time_us)
    found = residuals(ratios)
    print(f"round constants, never fitted, on all points: {_words(found)}")
    return found


def unseen(judged: Sequence[Point], fitting: Sequence[Point]) -> list[Point]:
    """Returns the points of problems that nothing was fitted to: the grids of gradients have one problem in common."""
    known = {point.problem for point in fitting}
    return [point for point in judged if point.problem not in known]


def _with_gradients(of: Calibration, shipped: Calibration) -> Calibration:
    """Returns a calibration of forward kernels with what another one has of kernels of gradients."""
    names = tuple(module.NAME for module in gradient_kernels().values())

    def merged(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {**mine, **{key: value for key, value in theirs.items() if key.startswith((*names, ALL_GRADIENTS))}}

    return replace(
        of,
        kernels=merged(of.kernels, shipped.kernels),
        residuals=merged(of.residuals, shipped.residuals),
        cross_validated=merged(of.cross_validated, shipped.cross_validated),
        sources={**of.sources, **{key: value for key, value in shipped.sources.items() if "gradients" in key}},
        uncalibrated_gradients=shipped.uncalibrated_gradients,
    )


def gradient_records(card: str, part: str) -> list[Path]:
    """Returns the records of a card's gradients: `"fit"` or `"judge"`. Each is a grid and tables, of which
    the first to fit and all that judge have the joint launch of hopper/flash_bwd; the last to fit also has forwards."""
    fit = ("heads-of-a-tile", "portable", "joint-gradients", "few-gradients", "float32-masks")
    names = {"fit": fit, "judge": ("gradients-beside-peers", "parts-and-splits")}[part]
    tables = [path for name in names for path in sorted(RECORDS.glob(f"*-{card}-{name}.json"))]
    return [*sorted(RECORDS.glob(f"*-{card}-backward-grid-{part}*.jsonl")), *tables]


def _start(near: Constants, name: str) -> Constants:
    return replace(near, host_us=HOST_US if name.startswith(MANY_LAUNCHES) else 0.0)


# Fitting --------------------------------------------------------------------------------------------------------------

FITTED = (
    "power",
    "power_of_score",
    "softmax_ops",
    "exposed",
    "edge_steps",
    "step_us",
    "fill_us",
    "start_us",
    "smem_bytes_per_clock",
    "l2",
)
# Kernels of gradients differ from the forward kernels that they begin near in the rate of their products, masked tiles,
# the latency of a step, and the start and end of a tile; power, softmax and L2 are the card's.
FITTED_OF_GRADIENTS = ("edge_steps", "step_us", "fill_us", "start_us")
LIKE = {"hopper/flash_bwd": "hopper/flash_fwd", "flash_bwd": "flash_fwd", "three_kernel backward": "three_kernel"}
ALL_GRADIENTS = "all gradients"  # the errors over all kernels of gradients
LENDER, BORROWERS = "flash_fwd", ("split_kv", "large_head_dim", "three_kernel")  # the same products in Triton
# The host may be too slow for the launches of these.
MANY_LAUNCHES = ("eager", "three_kernel library library", "three_kernel backward")
HOST_US = 17.0  # per launch of torch: host times of the first grid over the number of launches
LEAST_POWER = 0.7  # a good product sustains this on a capped card; a lower fit would hide a slow loop
LIMITS = {"exposed": 0.95, "matrix": 0.97, "power": 0.97}  # shares are at most 1
# Relative to plain reads: a lower fit would hide waits. torch's own kernels wait in ways that are not modeled.
LEAST_L2 = 0.6
MOST_L2 = 1.5  # an SM's port to L2 is 64 bytes per clock: 16 TB/s on an H200, 8 measured


def _with_borrowed(kernels: Mapping[str, Constants]) -> dict[str, Constants]:
    """Adds shares for paths on which a kernel was not measured, from the kernel with the same product code."""
    lender = kernels.get(LENDER)
    if lender is None:
        return dict(kernels)
    return {
        name: replace(of, matrix={**lender.matrix, **of.matrix}) if name.split()[0] in BORROWERS else of
        for name, of in kernels.items()
    }


def fit(
    points: Sequence[Point],
    gpu: Gpu,
    base: Calibration,
    begin: Constants | None = None,
    near: Constants = UNCALIBRATED,
    names: Sequence[str] = FITTED,
) -> Constants:
    """Returns the constants with the smallest loss, by the Levenberg-Marquardt method on their logarithms. It starts at
    `begin`, or at several places if None, because the loss has several minima. Constants that the points do not
    determine stay at `near`, as do those that `names` leaves out.
    """
    host_us = HOST_US if _key(points[0], gpu).startswith(MANY_LAUNCHES) else 0.0
    begins = (
        [replace(UNCALIBRATED, exposed=e, power=p, host_us=host_us) for e, p in ((0.02, 0.87), (0.3, 0.87), (0.7, 0.7))]
        if begin is None
        else [begin]
    )
    if begin is None and near is not UNCALIBRATED:
        begins.append(replace(near, host_us=host_us))
    found = (_descend(points, gpu, base, constants, near, names) for constants in begins)
    return min(found, key=lambda one: one[1])[0]


def _descend(
    points: Sequence[Point], gpu: Gpu, base: Calibration, begin: Constants, near: Constants, names: Sequence[str]
) -> tuple[Constants, float]:
    """Returns (constants, loss) of the local minimum that `begin` leads to."""
    paths = sorted({_path(point, gpu) for point in points})
    by_torch = _key(points[0], gpu).startswith(MANY_LAUNCHES)
    fitted = (*names, "host_us") if begin.host_us else tuple(names)
    timers, sheet = [_timer(point, gpu) for point in points], _sheet(gpu)
    measured = np.log([point.time_us for point in points])

    def logarithms(of: Constants) -> np.ndarray:
        return np.log([of.matrix.get(p, of.matrix["other"]) for p in paths] + [getattr(of, n) for n in fitted])

    start = logarithms(replace(near, host_us=HOST_US))

    def constants(x: np.ndarray) -> Constants:
        values = np.exp(x)
        matrix = {path: min(LIMITS["matrix"], float(v)) for path, v in zip(paths, values, strict=False)}
        rest = {n: getattr(near, n) for n in FITTED}
        rest |= {n: float(v) for n, v in zip(fitted, values[len(paths) :], strict=True)}
        rest |= {n: min(LIMITS[n], rest[n]) for n in ("exposed", "power")}
        rest["l2"] = min(MOST_L2, max(0.0 if by_torch else LEAST_L2, rest["l2"]))
        rest["power"] = max(LEAST_POWER, rest["power"])
        others = UNCALIBRATED.matrix if names is FITTED else near.matrix
        return Constants(matrix={**others, **matrix}, **rest)

    def losses(x: np.ndarray) -> np.ndarray:
        where = calibration.Machine(sheet, constants(x), base, True)
        errors = np.log([time_us(where) for time_us in timers]) - measured
        flattened = np.sign(errors) * KNEE * np.sqrt(2 * (np.sqrt(1 + (errors / KNEE) ** 2) - 1))
        return np.concatenate([flattened, PULL * (x - start)])

    x, damping = logarithms(begin), 1e-2
    current = losses(x)
    for _ in range(40):
        slope = np.stack([(losses(x + h) - current) / 1e-4 for h in np.eye(len(x)) * 1e-4], 1)
        gram, toward = slope.T @ slope, slope.T @ current
        step = np.linalg.solve(gram + damping * np.diag(np.diag(gram) + 1e-9), -toward)
        tried = losses(x + np.clip(step, -0.5, 0.5))
        if tried @ tried < current @ current:
            done = current @ current - tried @ tried < 1e-4 * (current @ current)
            x, current, damping = x + np.clip(step, -0.5, 0.5), tried, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return constants(x), float(current @ current)


def _cross_validated(
    points: Sequence[Point],
    gpu: Gpu,
    base: Calibration,
    begin: Constants,
    near: Constants,
    names: Sequence[str] = FITTED,
) -> list[float]:
    """Returns predicted over measured for each point, by a fit without its problem; empty with a single problem."""
    problems = sorted({point.problem.cache_key() for point in points})
    ratios: list[float] = []
    for fold in range(min(FOLDS, len(problems))):
        left_out = set(problems[fold::FOLDS])
        seen = [p for p in points if p.problem.cache_key() not in left_out]
        unseen = [p for p in points if p.problem.cache_key() in left_out]
        if not seen:
            continue
        calibrated = replace(base, kernels={_key(points[0], gpu): fit(seen, gpu, base, begin, near, names)})
        ratios += [_ratio(point, gpu, calibrated) for point in unseen]
    return ratios


def _kernels_left_out(points: Sequence[Point], gpu: Gpu, base: Calibration) -> dict[str, Residuals]:
    """Returns the errors for each kernel, predicted with one set of constants fitted to all others. They are the errors
    to expect for an unmeasured kernel."""
    found = {}
    for name in dict.fromkeys(point.kernel.NAME for point in points):
        others = [point for point in points if point.kernel.NAME != name][::POOLED]
        mine = [point for point in points if point.kernel.NAME == name]
        pooled = fit(others, gpu, base, replace(UNCALIBRATED, exposed=0.3))
        found[name] = residuals([_ratio(point, gpu, replace(base, kernels={name: pooled})) for point in mine])
        print(f"{name} by constants of the other kernels: {_words(found[name])}", flush=True)
    return found


@functools.cache
def _key(point: Point, gpu: Gpu) -> str:
    """Returns the key of the constants that a point belongs to: its kernel's, or those of one of its loops."""
    return calibration.key_of(point.kernel.NAME, _cached(point.kernel.NAME).cost(point.problem, gpu, point.config).loop)


def _path(point: Point, gpu: Gpu) -> str:
    path = path_of(point.problem, point.kernel, gpu, _sheet(gpu))
    return calibration.constant_of(path.name, path.products)


def _ratio(point: Point, gpu: Gpu, calibrated: Calibration | None) -> float:
    """Returns predicted over measured time."""
    loop = _key(point, gpu).removeprefix(point.kernel.NAME).strip()
    return _timer(point, gpu)(calibration.machine(_sheet(gpu), point.kernel.NAME, loop, calibrated)) / point.time_us


@functools.cache
def _sheet(gpu: Gpu) -> DataSheet:
    sheet = data_sheet(gpu)
    assert sheet is not None
    return sheet


@functools.cache
def _timer(point: Point, gpu: Gpu) -> Callable[[calibration.Machine], float]:
    kernel = _cached(point.kernel.NAME)
    begin = calibration.machine(_sheet(gpu), kernel.NAME)
    return predict.timer(point.problem, kernel, point.config, gpu, begin, hot=point.hot, graph=point.graph)


class _Cached:
    """A kernel that caches its costs, because fitting evaluates them a thousand times."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.cost: Callable[..., Any] = functools.lru_cache(None)(kernel.cost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@functools.cache
def _cached(name: str) -> _Cached:
    modules = (*dispatch.KERNELS, *gradient_kernels().values())
    return _Cached(next(module for module in modules if name == module.NAME))


# Printing -------------------------------------------------------------------------------------------------------------


def _print_judgement(
    title: str, points: Sequence[Point], gpu: Gpu, calibrated: Calibration | None, brief: bool = False
) -> dict[str, Residuals]:
    """Prints the errors per kernel and the worst ten points. Returns the residuals."""
    if not points:
        print(f"{title}: no points")
        return {}
    ratios = {id(point): _ratio(point, gpu, calibrated) for point in points}
    found: dict[str, Residuals] = {}
    for name in (*dict.fromkeys(point.kernel.NAME for point in points), "all"):
        mine = [ratios[id(point)] for point in points if name in ("all", point.kernel.NAME)]
        found[name] = residuals(mine)
        print(f"{title}, {name}: {_words(found[name])}")
    if not brief:
        worst = sorted(points, key=lambda point: -abs(np.log(ratios[id(point)])))[:10]
        print("the worst ten, predicted and measured us, and the remainder measured / predicted:")
        for point in worst:
            r = ratios[id(point)]
            print(f"  {point.name:60} {r * point.time_us:10.2f} {point.time_us:10.2f}  {1 / r:.2f}")
    return found


def _words(r: Residuals) -> str:
    return (
        f"{r.points} points, median error {r.median:.1%}, {r.within_20:.0%} within 20 %, nine in ten within a factor "
        f"{r.factor_90:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
