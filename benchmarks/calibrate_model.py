"""Fits the constants of `warpwave.model` for one card to records, judges them on others, and writes the calibration.

    python -m benchmarks.calibrate_model                    refit the H200 from the records of this repository
    python -m benchmarks.calibrate_model --check            judge the calibration that ships, write nothing
    python -m benchmarks.calibrate_model --only split_kv    fit one kernel, keep the others' constants
    python -m benchmarks.calibrate_model --rejudge          keep its constants, judge them again, write the error bars
    python -m benchmarks.calibrate_model --card b200 --fit sweep.jsonl --judge other.jsonl --ceilings roof.json

Points to fit and points to judge come from different files. Constants are fitted kernel by kernel to the logarithm of
predicted over measured time, with a loss that grows as the error and not as its square beyond 20 %, and a weak pull
towards `UNCALIBRATED`, so that what the points do not tell stays at a round number. Cross-validation leaves out whole
problems, all their configs together.

`.jsonl` files are what `warpwave bench --out` writes. `.log` files are the H200's three older formats: lines of
`head_dim batch seqlen mask 64x64w4s3:354 ...` in TFLOP/s (sweeps of flash_fwd; marked `B` where a variant that was not
kept stands beside), the tuning log of hopper/flash_fwd, ratios to cuDNN, and three_kernel's sweep of ways.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from warpwave import calibration, dispatch, model
from warpwave.bench.records import read_records
from warpwave.calibration import UNCALIBRATED, Calibration, Constants, Residuals, residuals
from warpwave.hardware import measure
from warpwave.hardware.catalog import DataSheet, data_sheet, find, gpu_of
from warpwave.hardware.gpu import Gpu
from warpwave.kernels import flash_fwd, three_kernel
from warpwave.kernels.hopper import flash_fwd as hopper_flash_fwd
from warpwave.kernels.hopper import large_head_dim as hopper_large_head_dim
from warpwave.ladder import path_of
from warpwave.problem import AttentionProblem, Causal
from warpwave.recorded_time import config_of, in_graph, is_hot

ROOT = Path(__file__).parent.parent
RECORDS, SHIPPED = ROOT / "benchmarks" / "records", ROOT / "warpwave" / "report" / "shipped"
# Fitted to is every record of the H200 there is, but for the newest grid, which judges, and for those of another kind
# (`NOT_POINTS`) or of kernels that have been rewritten since (`ANOTHER_BEFORE`, and sweeps of flash_fwd's configs).
GRID = "model-grid-4"
NOT_POINTS = ("cliff", "peers-against-gates")
LOGS = (
    "hopper-flash-fwd-tuning",
    "three-kernel-products",
    "hopper-float32-fp16",
    "hopper-large-head-dim",
    "hopper-tiles-of-192",
)


def _records(card: str = "h200") -> tuple[list[Path], list[Path]]:
    """(to fit to, to judge on), every record of a card in the repository."""
    found = sorted((*RECORDS.glob(f"*-{card}-*.jsonl"), *SHIPPED.glob(f"*-{card}-*.jsonl")))
    found = [path for path in found if not path.stem.endswith(NOT_POINTS) and _is_of_bench(path)]
    logs = [path for name in LOGS for path in sorted(RECORDS.glob(f"*-{card}-{name}.log"))]
    judging = [path for path in found if path.stem.endswith(GRID)]
    return [*(path for path in found if path not in judging), *logs], judging


def _is_of_bench(path: Path) -> bool:
    """Other programs of this folder write JSON lines too."""
    with path.open(encoding="utf-8") as lines:
        return '"schema_version"' in lines.readline()


# (kernel, dtype or "one query") -> what was measured before is of another kernel. hopper/flash_fwd multiplied float32
# as bfloat16 parts, and does as float16; of large_head_dim one query keeps twice as many blocks an SM.
ANOTHER_BEFORE = {
    ("hopper/flash_fwd", "float32"): "2026-11-21T22:00",
    ("hopper/flash_fwd", "bfloat16"): "2026-11-21T15:30",
    ("flash_fwd", "float32"): "2026-11-21T15:30",
    ("large_head_dim", "one query"): "2026-11-21T23:00",
}
# Of that loop: new over old time, by the head_dim up to which, for calls longer than `SHORT_US`; shorter ones gained
# half as much.
REWRITTEN, FASTER, SHORT_US = "2026-11-22T01:48", {64: 0.92, 128: 0.93, 512: 0.985}, 40.0
NEAR_BEST = 1.3  # configs of a sweep slower than its problem's best by more are not fitted to: nobody runs them
FOLDS = 6
POOLED = 3  # of the points of many kernels together, every third is fitted to
KNEE = 0.2  # log error beyond which a point counts by its error, no longer by its square
PULL = 0.05  # of a constant that is off `UNCALIBRATED` by a factor e, in units of a point that is off by as much


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        kernel, config, problem: what ran.
        time_us: median.
        hot: whether the same inputs were read again and again, L2 not flushed.
        name: for people.
        graph: whether a CUDA graph replayed the calls.
    """

    kernel: Any
    config: Any
    problem: AttentionProblem
    time_us: float
    hot: bool
    name: str
    graph: bool = False


def main() -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="h200", help="key of the data sheet")
    parser.add_argument("--fit", nargs="+", type=Path, help="default: the repository's records of the card")
    parser.add_argument("--judge", nargs="*", type=Path, help=f"default: the record of {GRID}, where it is there")
    parser.add_argument("--ceilings", type=Path, help="what `warpwave roof --out` wrote; default: those shipped")
    parser.add_argument("--check", action="store_true", help="judge the calibration that ships; fit and write nothing")
    parser.add_argument(
        "--rejudge", action="store_true", help="keep the constants that ship; judge, and write how far off"
    )
    parser.add_argument("--only", nargs="+", default=[], help="fit these kernels or loops; the others' constants stay")
    parser.add_argument("--quick", action="store_true", help="do not predict kernels by the others' constants")
    parser.add_argument("--out", type=Path, help="default: the package's own file of this card")
    asked = parser.parse_args()
    sheet = find(asked.card)
    if sheet is None:
        parser.error(f"the catalogue has no card {asked.card!r}")
    gpu = gpu_of(sheet)
    fit_files, judge_files = _records(asked.card)
    asked.fit = fit_files if asked.fit is None else asked.fit
    asked.judge = judge_files if asked.judge is None else asked.judge
    if both := set(asked.fit) & set(asked.judge):
        parser.error(f"{', '.join(map(str, both))} cannot be fitted to and judged on")
    fitting = [point for path in asked.fit for point in near_best(points(path))]
    judged = [point for path in asked.judge for point in points(path)]
    if asked.check:
        _print_judgement("judged", judged, gpu, None)
        return 0
    out = asked.out or calibration.FOLDER / f"{sheet.key}.json"
    if asked.rejudge:
        shipped = calibration.calibrations()[sheet.key]
        sources = {**shipped.sources, "judged": tuple(path.name for path in asked.judge)}
        by_kernel = _print_judgement("judged, not fitted to", judged, gpu, shipped)
        calibration.write(replace(shipped, sources=sources, residuals=by_kernel), out)
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
    # A kernel before its other loops, whose constants are pulled towards its own, and loops before kinds of them.
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
        if unseen := _cross_validated(mine, gpu, base, kernels[name], near):
            crossed[name] = residuals(unseen)
            all_unseen += unseen
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
    bare = replace(base, kernels={})
    rough = residuals([_ratio(point, gpu, bare) for point in (*judged, *fitting)])
    print(f"round constants, never fitted, on all points: {_words(rough)}")
    base = replace(base, residuals=by_kernel, uncalibrated=rough)
    calibration.write(base, out)
    print(f"written to {out}")
    return 0


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
LENDER, BORROWERS = "flash_fwd", ("split_kv", "large_head_dim", "three_kernel")  # the same products in Triton
# The host may be too slow for their launches.
MANY_LAUNCHES = ("eager", "three_kernel library library")
HOST_US = 17.0  # a launch of torch's, by the host times of the first grid over the launches counted
LEAST_POWER = 0.7  # what a good product sustains on a capped card: below, a fit would hide a slow loop behind the limit
LIMITS = {"exposed": 0.95, "matrix": 0.97, "power": 0.97}  # a share is none above 1
# Of plain reads' rate: a fit that goes below hides waits behind bytes. Torch's own kernels wait in ways not modelled.
LEAST_L2 = 0.6
MOST_L2 = 1.5  # an SM's port to L2 is 64 bytes a clock: 16 TB/s on an H200, of which 8 were measured


def _with_borrowed(kernels: Mapping[str, Constants]) -> dict[str, Constants]:
    """Where a kernel was not measured on a path, the share of the one that multiplies by the same code."""
    lender = kernels.get(LENDER)
    if lender is None:
        return dict(kernels)
    return {
        name: replace(of, matrix={**lender.matrix, **of.matrix}) if name.split()[0] in BORROWERS else of
        for name, of in kernels.items()
    }


def fit(
    points: Sequence[Point], gpu: Gpu, base: Calibration, begin: Constants | None = None, near: Constants = UNCALIBRATED
) -> Constants:
    """The constants with the least loss over some points, by Levenberg and Marquardt's method on their logarithms, from
    `begin`; from several places if None, for the loss has more than one valley. What the points do not tell stays with
    `near`.
    """
    host_us = HOST_US if _key(points[0], gpu).startswith(MANY_LAUNCHES) else 0.0
    begins = (
        [replace(UNCALIBRATED, exposed=e, power=p, host_us=host_us) for e, p in ((0.02, 0.87), (0.3, 0.87), (0.7, 0.7))]
        if begin is None
        else [begin]
    )
    if begin is None and near is not UNCALIBRATED:
        begins.append(replace(near, host_us=host_us))
    return min((_descend(points, gpu, base, constants, near) for constants in begins), key=lambda found: found[1])[0]


def _descend(
    points: Sequence[Point], gpu: Gpu, base: Calibration, begin: Constants, near: Constants
) -> tuple[Constants, float]:
    """(constants, loss) of the valley that `begin` lies in."""
    paths = sorted({_path(point, gpu) for point in points})
    by_torch = _key(points[0], gpu).startswith(MANY_LAUNCHES)
    fitted = (*FITTED, "host_us") if begin.host_us else FITTED
    timers, sheet = [_timer(point, gpu) for point in points], _sheet(gpu)
    measured = np.log([point.time_us for point in points])

    def logarithms(of: Constants) -> np.ndarray:
        return np.log([of.matrix.get(p, of.matrix["other"]) for p in paths] + [getattr(of, n) for n in fitted])

    start = logarithms(replace(near, host_us=HOST_US))

    def constants(x: np.ndarray) -> Constants:
        values = np.exp(x)
        matrix = {path: min(LIMITS["matrix"], float(v)) for path, v in zip(paths, values, strict=False)}
        rest = {n: float(v) for n, v in zip(fitted, values[len(paths) :], strict=True)}
        rest |= {n: min(LIMITS[n], rest[n]) for n in ("exposed", "power")}
        rest["l2"] = min(MOST_L2, max(0.0 if by_torch else LEAST_L2, rest["l2"]))
        rest["power"] = max(LEAST_POWER, rest["power"])
        return Constants(matrix={**UNCALIBRATED.matrix, **matrix}, **rest)

    def losses(x: np.ndarray) -> np.ndarray:
        where = calibration.Machine(sheet, constants(x), base, True)
        errors = np.log([time_us(where) for time_us in timers]) - measured
        flattened = np.sign(errors) * KNEE * np.sqrt(2 * (np.sqrt(1 + (errors / KNEE) ** 2) - 1))
        return np.concatenate([flattened, PULL * (x - start)])

    x, damping = logarithms(begin), 1e-2
    current = losses(x)
    for _ in range(40):
        slope = np.stack([(losses(x + h) - current) / 1e-4 for h in np.eye(len(x)) * 1e-4], 1)
        gram, towards = slope.T @ slope, slope.T @ current
        step = np.linalg.solve(gram + damping * np.diag(np.diag(gram) + 1e-9), -towards)
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
    points: Sequence[Point], gpu: Gpu, base: Calibration, begin: Constants, near: Constants
) -> list[float]:
    """Every point predicted by a fit that saw none of its problem, over measured; none where there is one problem."""
    problems = sorted({point.problem.cache_key() for point in points})
    ratios: list[float] = []
    for fold in range(min(FOLDS, len(problems))):
        left_out = set(problems[fold::FOLDS])
        seen = [p for p in points if p.problem.cache_key() not in left_out]
        unseen = [p for p in points if p.problem.cache_key() in left_out]
        if not seen:
            continue
        calibrated = replace(base, kernels={_key(points[0], gpu): fit(seen, gpu, base, begin, near)})
        ratios += [_ratio(point, gpu, calibrated) for point in unseen]
    return ratios


def _kernels_left_out(points: Sequence[Point], gpu: Gpu, base: Calibration) -> dict[str, Residuals]:
    """How well each kernel is predicted by one set of constants, fitted to all the others together: what to expect of a
    kernel that nobody measured."""
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
    """Whose constants a point tells of: its kernel's, or those of one of its loops."""
    return calibration.key_of(point.kernel.NAME, _cached(point.kernel.NAME).cost(point.problem, gpu, point.config).loop)


def _path(point: Point, gpu: Gpu) -> str:
    path = path_of(point.problem, point.kernel, gpu, _sheet(gpu))
    return calibration.constant_of(path.name, path.products)


def _ratio(point: Point, gpu: Gpu, calibrated: Calibration | None) -> float:
    """Predicted over measured."""
    name, _, loop = _key(point, gpu).partition(" ")
    return _timer(point, gpu)(calibration.machine(_sheet(gpu), name, loop, calibrated)) / point.time_us


@functools.cache
def _sheet(gpu: Gpu) -> DataSheet:
    sheet = data_sheet(gpu)
    assert sheet is not None
    return sheet


@functools.cache
def _timer(point: Point, gpu: Gpu) -> Callable[[calibration.Machine], float]:
    kernel = _cached(point.kernel.NAME)
    begin = calibration.machine(_sheet(gpu), kernel.NAME)
    return model.timer(point.problem, kernel, point.config, gpu, begin, hot=point.hot, graph=point.graph)


class _Cached:
    """A kernel whose costs are counted once: fitting asks for them a thousand times."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.cost: Callable[..., Any] = functools.lru_cache(None)(kernel.cost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@functools.cache
def _cached(name: str) -> _Cached:
    return _Cached(next(kernel for kernel in dispatch.KERNELS if name == kernel.NAME))


# Printing -------------------------------------------------------------------------------------------------------------


def _print_judgement(
    title: str, points: Sequence[Point], gpu: Gpu, calibrated: Calibration | None, brief: bool = False
) -> dict[str, Residuals]:
    """Kernel by kernel, and the worst ten with their remainder; returns the residuals."""
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


# Reading points -------------------------------------------------------------------------------------------------------


def points(path: Path) -> list[Point]:
    """Every measurement of ours in a file, of any of its formats."""
    if path.suffix == ".jsonl":
        return list(_of_records(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    if "three-kernel" in path.name:
        return list(_of_three_kernel(lines))
    if "hopper-large" in path.name:
        return list(_of_hopper_large(lines))
    if "float32-fp16" in path.name:
        return list(_of_float32(lines))
    if "tiles-of-192" in path.name:
        return list(_of_tiles(lines))
    return list(_of_tuning(lines) if "hopper" in path.name else _of_sweep(lines, path.name))


def near_best(points: Sequence[Point]) -> list[Point]:
    """Without the configs that nobody would run."""
    best: dict[tuple[str, str], float] = {}
    for point in points:
        key = (point.kernel.NAME, point.problem.cache_key())
        best[key] = min(best.get(key, point.time_us), point.time_us)
    return [p for p in points if p.time_us <= NEAR_BEST * best[p.kernel.NAME, p.problem.cache_key()]]


def _of_records(path: Path) -> Iterator[Point]:
    kernels, records = {kernel.NAME: kernel for kernel in dispatch.KERNELS}, read_records(path)
    for environment, m in records.measurements:
        if not m.is_ours or m.timing is None or m.kernel not in kernels or m.config is None or m.mode == "eager":
            continue
        kernel, date = kernels[m.kernel], str(records.environments[environment].get("date", ""))
        what = "one query" if m.problem.seqlen_q == 1 else m.problem.dtype
        if date < ANOTHER_BEFORE.get((kernel.NAME, what), ""):
            continue
        config, name = config_of(kernel, m.config), f"{m.case} {m.kernel}"
        us = m.timing.median_us * _since(m.kernel, m.problem, date, m.timing.median_us)
        yield Point(kernel, config, m.problem, us, is_hot(m), name, in_graph(m))


def _since(kernel: str, problem: AttentionProblem, date: str, us: float) -> float:
    """What has become of a time since: hopper/flash_fwd's overlapping loop was rewritten, and old and new stood beside
    each other in one process (records/2026-11-22-h200-hopper-softmax-of-threads.log)."""
    if kernel != "hopper/flash_fwd" or problem.dtype == "float32" or date > REWRITTEN or problem.head_dim > 256:
        return 1.0
    ratio = next(ratio for width, ratio in FASTER.items() if max(problem.head_dim, problem.head_dim_v) <= width)
    return ratio if us > SHORT_US else (1 + ratio) / 2


def _of_sweep(lines: Sequence[str], name: str) -> Iterator[Point]:
    """TFLOP/s of each config, inputs that do not fit L2 twice; sweep 1's 16-bit lines are of an older loop."""
    for line in lines:
        if found := re.match(r"fp32 (\d+) (\[.*\])$", line):
            head_dim = int(found[1])
            for row in ast.literal_eval(found[2]):
                if row[0] in ("ieee", "tf32x3", "tf32") and len(row) == 6:
                    problem = _problem(head_dim, 4, 2048, 16, "float32", None, row[0])
                    config = flash_fwd.Config(*row[1:5])
                    us = problem.flops / row[5] * 1e-6
                    yield Point(flash_fwd, config, problem, us, False, f"{row[0]} d{head_dim} {row[1:5]}")
        if "sweep-1" in name or not (found := re.match(r"(\d+) (\d+) (\d+) (full|causal) (.*)$", line)):
            continue
        head_dim, batch, seqlen, causal = int(found[1]), int(found[2]), int(found[3]), found[4] == "causal"
        problem = _problem(head_dim, batch, seqlen, 2048 // head_dim, "bfloat16", Causal() if causal else None)
        counted = 4 * batch * seqlen * seqlen * 2048 * (0.5 if causal else 1.0)  # how the sweep counted
        for tile in found[5].split():
            if m := re.match(r"B(\d+)x(\d+)w(\d)s(\d):(\d+)$", tile):
                block_m, block_n, num_warps, num_stages = (int(m[i]) for i in range(1, 5))
                config = flash_fwd.Config(block_m, block_n, num_warps, num_stages)
                us = counted / int(m[5]) * 1e-6
                yield Point(flash_fwd, config, problem, us, False, f"d{head_dim} {batch}x{seqlen} {found[4]} {tile}")


def _of_three_kernel(lines: Sequence[str]) -> Iterator[Point]:
    """The default way of whole calls: 16 heads, one workspace for the call."""
    for line in lines:
        if found := re.match(r"new d(\d+) (\d+) (full|causal): hopper ([\d.]+) us", line):
            causal = Causal() if found[3] == "causal" else None
            problem = _problem(int(found[1]), 1, int(found[2]), 16, "bfloat16", causal)
            config = three_kernel.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
            name = f"d{found[1]} {found[2]} {found[3]} three_kernel"
            yield Point(three_kernel, config, problem, float(found[4]), False, name)


def _of_hopper_large(lines: Sequence[str]) -> Iterator[Point]:
    """Of hopper/large_head_dim as it is now, the last section: scores ahead of the products, and behind."""
    last = max(i for i, line in enumerate(lines) if line.startswith("#"))
    for line in lines[last:]:
        if found := re.match(r"time (\d+)x(\d+) (full|causal) +1(a?): (\d+) TFLOP/s", line):
            causal = Causal() if found[3] == "causal" else None
            problem = _problem(int(found[2]), 1, int(found[1]), 16, "bfloat16", causal)
            config = hopper_large_head_dim.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
            config = replace(config, scores_ahead=bool(found[4]))
            us = problem.flops / int(found[5]) * 1e-6
            name = f"d{found[2]} 1x{found[1]} {found[3]} hopper/large_head_dim"
            yield Point(hopper_large_head_dim, config, problem, us, False, name)


def _of_float32(lines: Sequence[str]) -> Iterator[Point]:
    """Arithmetics and configs of hopper/flash_fwd in float32: long calls, and short ones that a graph replayed. The
    host is in the times of those between, which stay out."""
    made: tuple[int, int, int, int, Causal | None] | None = None
    for line in lines:
        if found := re.match(r"== ieee d(\d+) (\d+)x(\d+) h(\d+), ", line):  # flash_fwd's multiply-adds
            head_dim, batch, seqlen, heads = (int(found[i]) for i in range(1, 5))
            problem = _problem(head_dim, batch, seqlen, heads, "float32", None, "ieee")
            for m, n, warps, stages, us in re.findall(r"(\d+)x(\d+)x(\d)x(\d) (\d+)", line):
                plain = flash_fwd.Config(int(m), int(n), int(warps), int(stages))
                said = f"d{head_dim} {batch}x{seqlen} h{heads} ieee flash_fwd"
                yield Point(flash_fwd, plain, problem, float(us), False, said)
        graph = line.startswith("== graph")
        if found := re.match(r"== (?:graph )?d(\d+) (\d+)x(\d+) h(\d+)(?: (full|causal):| us:)", line):
            head_dim, batch, seqlen, heads = (int(found[i]) for i in range(1, 5))
            made = (head_dim, batch, seqlen, heads, Causal() if found[5] == "causal" else None)
        elif line.startswith("=="):
            made = None
        if made is None or (not graph and made[1] * made[2] < 4096):
            continue
        for name, *tile, us in re.findall(r"(fp16x1|fp16x3|bf16x6) (\d+)x(\d+)x(\d)x(\d)\*?\s+([\d.]+)", line):
            head_dim, batch, seqlen, heads, causal = made
            problem = _problem(head_dim, batch, seqlen, heads, "float32", causal, name)
            config = hopper_flash_fwd.Config(*map(int, tile))
            said = f"d{head_dim} {batch}x{seqlen} h{heads} {name} hopper/flash_fwd"
            yield Point(hopper_flash_fwd, config, problem, float(us), graph, said, graph)


def _of_tiles(lines: Sequence[str]) -> Iterator[Point]:
    """us of configs beside each other, at head_dim 65 to 128; masks and windows left out."""
    for line in lines:
        found = re.match(r"d(\d+) (\d+)x(\d+)x(\d+) (full|causal)( fp16)?  rows", line)
        if not found or not 64 < int(found[1]) <= 128:
            continue
        head_dim, batch, seqlen, heads = (int(found[i]) for i in range(1, 5))
        causal = Causal() if found[5] == "causal" else None
        problem = _problem(head_dim, batch, seqlen, heads, "float16" if found[6] else "bfloat16", causal)
        for m, n, stages, us in re.findall(r"(\d+)x(\d+)s(\d) (\d+)us", line):
            config = hopper_flash_fwd.Config(int(m), int(n), int(stages), 1)
            said = f"d{head_dim} {batch}x{seqlen} h{heads} {found[5]} {m}x{n}"
            yield Point(hopper_flash_fwd, config, problem, float(us), False, said)


def _of_tuning(lines: Sequence[str]) -> Iterator[Point]:
    """Until the part that tells of an earlier version: cuDNN's TFLOP/s times the ratio; and tiny calls in us."""
    named = {"192": (192, 128, 3, 1), "64x3": (64, 64, 3, 3), "64x2": (64, 128, 2, 2)}
    for line in lines:
        if line.startswith("# earlier"):
            return
        if found := re.match(r"tiny (\d+) (\d+) (\d+) (\d+) (\{.*\})$", line):
            batch, seqlen, heads, head_dim = (int(found[i]) for i in range(1, 5))
            problem = _problem(head_dim, batch, seqlen, heads, "float16", None)
            for key, kernel in (("hopper", hopper_flash_fwd), ("portable", flash_fwd)):
                gpu = Gpu.for_arch("sm_90")
                config = kernel.configs(problem, replace(gpu, num_sms=132))[0]
                us = float(ast.literal_eval(found[5])[key])
                yield Point(kernel, config, problem, us, True, f"tiny {batch}x{seqlen} h{heads} d{head_dim} {key}")
            continue
        found = re.match(r"\s*(\d+)\s+(\d+)x(\d+)\s+(full|causal)\s+cudnn (\d+) \| (.*)$", line)
        if not found:
            continue
        head_dim, batch, seqlen, causal = int(found[1]), int(found[2]), int(found[3]), found[4] == "causal"
        problem = _problem(head_dim, batch, seqlen, 2048 // head_dim, "bfloat16", Causal() if causal else None)
        counted = 4 * batch * seqlen * seqlen * 2048 * (0.5 if causal else 1.0)
        for label, ratio in re.findall(r"(\w+) ([\d.]+)", found[6]):
            if label == "auto":  # the default of that time
                config = hopper_flash_fwd.Config(128, 128, 2, 1)
                if head_dim != 128:
                    config = hopper_flash_fwd.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
            elif label in named and head_dim == 64:
                config = hopper_flash_fwd.Config(*named[label])
            else:  # tiles of 128 queries: the log does not say how many keys
                continue
            us = counted / (int(found[5]) * float(ratio)) * 1e-6
            us *= _since("hopper/flash_fwd", problem, "2026-11-21", us)
            yield Point(
                hopper_flash_fwd, config, problem, us, False, f"d{head_dim} {batch}x{seqlen} {found[4]} {label}"
            )


def _problem(
    head_dim: int, batch: int, seqlen: int, heads: int, dtype: str, causal: Causal | None, precision: str = "default"
) -> AttentionProblem:
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=heads,
        num_heads_kv=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        softmax_scale=head_dim**-0.5,
        causal=causal,
        precision=precision,
    )


if __name__ == "__main__":
    sys.exit(main())
