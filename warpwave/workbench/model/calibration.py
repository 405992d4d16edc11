"""A card's constants for the model of speed, fitted to measurements and stored with their date and residuals.

`benchmarks/calibrate_model.py` makes a calibration from records; it is stored beside this file, one JSON file per card.
A card without a calibration is predicted with the round constants of `families.py`. Their error was measured on the
cards that have a calibration. Imports no torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from warpwave.workbench.hardware.catalog import DataSheet

FOLDER = Path(__file__).with_name("calibrated")
SCHEMA = "warpwave calibration 1"
L2_BYTES_PER_CLOCK = 32  # per SM, if unknown: 8.4 TB/s on an H200, 8.0 measured


@dataclass(frozen=True, kw_only=True)
class Constants:
    """How a kernel's inner loop uses the units of an SM. `docs/workbench/model.md` has the equations.

    Attributes:
        matrix: path of products -> share of the data sheet's rate that a loop of products reaches. float16 has the
            share of bfloat16, tf32 in three products that of `"tf32x3"`. Other paths have the share of `"other"`.
        power: share of the data sheet's rate of 16-bit products that the power limit sustains with all SMs busy.
        power_of_score: products (FLOP) that draw as much power as the softmax of one score.
        softmax_ops: arithmetic per score apart from its exponential, in lanes x clocks.
        exposed: share of the shorter resources' time that the longest does not hide, 0 to 1.
        edge_steps: cost of masking a tile of scores that a diagonal, a window or the end of the keys crosses, in steps
            over keys.
        step_us: latency of one step over keys for one instruction stream, on top of the work.
        serial: share of a step's latency that the other blocks of an SM do not hide; 0: they hide all of it.
        fill_us: start and end of a query tile: first loads and last store.
        start_us: time of the first wave above an empty kernel, once per launch.
        smem_bytes_per_clock: largest rate at which one SM reads from L2.
        l2: rate at which all SMs together read from L2, relative to measured plain reads.
        host_us: host time of one launch. A call whose launches take longer to issue than to run waits for the host,
            unless a CUDA graph replays them. 0 if the kernel has so few launches that it never waits.
    """

    matrix: Mapping[str, float] = field(default_factory=lambda: {"other": 0.7})
    power: float = 0.85
    power_of_score: float = 100.0
    softmax_ops: float = 8.0
    exposed: float = 0.3
    edge_steps: float = 0.5
    step_us: float = 0.1
    serial: float = 0.0
    fill_us: float = 1.0
    start_us: float = 1.0
    smem_bytes_per_clock: float = 64.0
    l2: float = 1.0
    host_us: float = 0.0

    def of_path(self, path: str, products: int = 1) -> float:
        """Returns the share of the data sheet's rate on a path that needs `products` products for one of the call's."""
        key = constant_of(path, products)
        if key not in self.matrix and products > 1:  # the share does not depend on the number of products
            key = next((known for known in self.matrix if known.startswith(f"{path}x")), key)
        return self.matrix.get(key, self.matrix["other"])


def constant_of(path: str, products: int) -> str:
    """Returns the key of `Constants.matrix` for a path of `hardware.catalog.PATHS`."""
    if path == "float16" or path.startswith(("fp8", "int8")):  # no 8-bit product was measured: the share of 16 bits
        return "bfloat16"
    return f"{path}x{products}" if products > 1 else path


# Round numbers, not fitted: 80 % of a matrix unit, half of the stated rate of plain float32 units, a little less if
# operands are split in the loop, eight operations per score, a microsecond for each start or end. They hold for an
# H200; its measurements are their error bar.
UNCALIBRATED = Constants(matrix={"other": 0.8, "float32": 0.5, "tf32": 0.5, "tf32x3": 0.5, "float32_matrix": 0.5})
# Gradients in torch's operations wait for the host, whatever the card: kernel -> its time per launch.
HOST_US_OF_OPERATIONS = {"eager backward": 25.0, "three_kernel backward": 60.0}


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """The errors of predictions on measured points that the constants were not fitted to.

    Attributes:
        points: number of points.
        median: median of |predicted / measured - 1|: 0.08 is 8 %.
        within_20: share of the points within 20 %.
        factor_90: nine points in ten lay within this factor, up or down.
    """

    points: int
    median: float
    within_20: float
    factor_90: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One card's constants and their errors.

    Attributes:
        gpu: key of its data sheet.
        date: when it was fitted, ISO 8601.
        sources: the files of the fit, and those of the check.
        memory, exponentials: shares of the data sheet's rates that the measured ceilings reached.
        l2_gbps: measured rate of L2, 10^9 bytes a second.
        launch_us: time of an empty kernel in a graph.
        kernels: kernel -> constants; "kernel loop" -> those of one of its loops (`Cost.loop`), if it has several.
        residuals: kernel -> errors on points of the card's records that are not in the fit; `"all"` over all kernels.
        cross_validated: kernel -> errors on points that were left out of a fit, group by group.
        kernels_left_out: kernel -> errors on its points, by constants fitted to all other kernels.
        uncalibrated: errors of round constants on the same points: the error bar without a calibration.
        uncalibrated_gradients: the same for kernels of gradients.
        constants_of: key of a card with the same chip, whose `kernels` it uses; it then has none of its own.
    """

    gpu: str
    date: str
    sources: Mapping[str, tuple[str, ...]]
    memory: float
    exponentials: float
    l2_gbps: float | None
    launch_us: float
    kernels: Mapping[str, Constants]
    residuals: Mapping[str, Residuals]
    cross_validated: Mapping[str, Residuals]
    uncalibrated: Residuals | None = None
    uncalibrated_gradients: Residuals | None = None
    kernels_left_out: Mapping[str, Residuals] = field(default_factory=dict)
    constants_of: str = ""


def residuals(ratios: list[float]) -> Residuals:
    """Returns the residuals of the ratios predicted / measured. A ratio of 0.5 is as far off as one of 2."""
    if not ratios:
        raise ValueError("residuals need at least one point")
    away = sorted(max(r, 1 / r) for r in ratios)
    ninth = away[min(len(away) - 1, math.ceil(0.9 * len(away)) - 1)]
    return Residuals(
        points=len(away),
        median=round(away[len(away) // 2] - 1, 4),
        within_20=round(sum(abs(r - 1) <= 0.2 for r in ratios) / len(ratios), 4),
        factor_90=round(ninth, 4),
    )


@functools.cache
def calibrations() -> dict[str, Calibration]:
    """Returns the calibrations that ship with the package, by the key of the data sheet."""
    return {c.gpu: c for c in (read(path) for path in sorted(FOLDER.glob("*.json")))}


def read(path: Path) -> Calibration:
    """Reads a calibration from its file.

    Raises:
        ValueError: the file is not a calibration; the message names it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"schema is not {SCHEMA!r}")
        data.setdefault("kernels_left_out", {})
        data.setdefault("constants_of", "")
        for name in ("residuals", "cross_validated", "kernels_left_out"):
            data[name] = {key: Residuals(**values) for key, values in data[name].items()}
        data["kernels"] = {key: Constants(**values) for key, values in data["kernels"].items()}
        for name in ("uncalibrated", "uncalibrated_gradients"):
            data[name] = None if data.get(name) is None else Residuals(**data[name])
        data["sources"] = {key: tuple(files) for key, files in data["sources"].items()}
        return Calibration(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path.name} is no calibration: {error}") from error


def write(calibration: Calibration, path: Path) -> None:
    """Writes a calibration to a file, which `read` reads."""
    text = json.dumps({"schema": SCHEMA, **_plain(asdict(calibration))}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


def worst_uncalibrated(of_gradients: bool = False) -> Residuals | None:
    """Returns the errors of round constants on the card where they are largest; None if it was never checked."""
    known = [c.uncalibrated_gradients if of_gradients else c.uncalibrated for c in calibrations().values()]
    return max((r for r in known if r is not None), key=lambda r: r.factor_90, default=None)


@dataclass(frozen=True)
class Machine:
    """A card in the model: its peak rates, and the shares of them that are reached under load.

    Attributes:
        sheet: its data sheet.
        constants: constants of the kernel that runs.
        calibration: their origin; None if the card has none.
        fitted: whether the constants were fitted to this kernel on this card.
    """

    sheet: DataSheet
    constants: Constants
    calibration: Calibration | None
    fitted: bool

    @property
    def memory_gbps(self) -> float:
        return self.sheet.bandwidth_gbps * (0.9 if self.calibration is None else self.calibration.memory)

    @property
    def l2_gbps(self) -> float:
        if self.calibration is not None and self.calibration.l2_gbps is not None:
            return self.calibration.l2_gbps
        return self.sheet.l2_gbps or self.sheet.num_sms * L2_BYTES_PER_CLOCK * self.sheet.boost_clock_mhz * 1e-3

    @property
    def launch_us(self) -> float:
        return 0.8 if self.calibration is None else self.calibration.launch_us


def machine(sheet: DataSheet, kernel: str, loop: str = "", calibration: Calibration | None = None) -> Machine:
    """Returns the card with the constants of a kernel's loop, or of the kernel; else those of `families`.

    Args:
        loop: `Cost.loop`.
        calibration: the card's calibration; None is the one that ships with the package.
    """
    calibration = calibration or calibrations().get(sheet.key)
    known: Mapping[str, Constants] = {}
    if calibration is not None:
        lender = calibrations().get(calibration.constants_of)
        known = calibration.kernels if lender is None else lender.kernels
    key = nearest(known, key_of(kernel, loop))
    if key in known:
        return Machine(sheet, known[key], calibration, True)
    from warpwave.workbench.model import families  # it derives constants from those of this module

    return _unfitted(sheet, families.constants(sheet, kernel, loop), kernel, calibration)


def machine_of_round_constants(sheet: DataSheet, kernel: str, calibration: Calibration) -> Machine:
    """Returns a calibrated card with the round constants of a card without a calibration. Their errors on its
    measurements are `Calibration.uncalibrated`. `machine` would return constants that were fitted to an H200."""
    from warpwave.workbench.model import families

    return _unfitted(sheet, families.round_constants(sheet), kernel, calibration)


def _unfitted(sheet: DataSheet, constants: Constants, kernel: str, calibration: Calibration | None) -> Machine:
    if kernel in HOST_US_OF_OPERATIONS:
        constants = replace(constants, host_us=HOST_US_OF_OPERATIONS[kernel])
    return Machine(sheet, constants, calibration, False)


def nearest(known: Container[str], key: str) -> str:
    """Returns the longest known prefix of a key, word by word: `"split_kv few rows"` for `"split_kv few rows pages"`.
    Returns the kernel if no prefix is known."""
    while key not in known and " " in key:
        key = key.rpartition(" ")[0]
    return key


def key_of(kernel: str, loop: str) -> str:
    """Returns the key of `Calibration.kernels` for one of a kernel's loops."""
    return f"{kernel} {loop}" if loop else kernel
