"""What a model of speed has to be told about a card: constants fitted to measurements, kept with date and residuals.

A calibration is made by `benchmarks/calibrate_model.py` from records and lies beside this file, one JSON file a card.
A card without one is predicted with `UNCALIBRATED`, round numbers that were never fitted: how far they are off was
measured too, on the cards that have a calibration, and is the error bar of such a prediction. Imports no torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from warpwave.workbench.hardware.catalog import DataSheet

FOLDER = Path(__file__).with_name("calibrated")
SCHEMA = "warpwave calibration 1"
L2_BYTES_PER_CLOCK = 32  # of an SM, where nobody states or measured L2: 8.4 of the 8.0 TB/s measured on an H200


@dataclass(frozen=True, kw_only=True)
class Constants:
    """How a kernel's inner loop uses the units of an SM. `docs/workbench/model.md` has the equations they stand in.

    Attributes:
        matrix: path of products -> share of the data sheet's rate that a loop with nothing else in it reaches; float16
            goes by bfloat16, tf32 in three products by `"tf32x3"`. A path that is not here has the share of `"other"`.
        power: share of the data sheet's rate of 16-bit products that the power limit sustains with every SM at work.
        power_of_score: the products (FLOP) that draw as much as the softmax of one score.
        softmax_ops: arithmetic of a score beside its exponential, in lanes x clocks.
        exposed: share of the shorter resources' time that the longest does not hide, 0 to 1.
        edge_steps: what the mask costs a tile of scores that a diagonal, a window or the end of the keys goes through,
            in steps over keys.
        step_us: latency of one step over keys for one stream of instructions, beside the work itself.
        fill_us: the beginning and end of a tile of queries: first loads, last store.
        start_us: the first wave, once a launch, above an empty kernel.
        smem_bytes_per_clock: what one SM draws from L2 at most.
        l2: what all SMs together draw from L2, over what plain reads were measured to.
        host_us: of the host for one launch: a call whose launches take longer to issue than to run waits for it, unless
            a CUDA graph replays them. 0: so few launches that nobody waits.
    """

    matrix: Mapping[str, float] = field(default_factory=lambda: {"other": 0.7})
    power: float = 0.85
    power_of_score: float = 100.0
    softmax_ops: float = 8.0
    exposed: float = 0.3
    edge_steps: float = 0.5
    step_us: float = 0.1
    fill_us: float = 1.0
    start_us: float = 1.0
    smem_bytes_per_clock: float = 64.0
    l2: float = 1.0
    host_us: float = 0.0

    def of_path(self, path: str, products: int = 1) -> float:
        """The share of the data sheet's rate on one path, of which `products` make one of the call's."""
        key = constant_of(path, products)
        if key not in self.matrix and products > 1:  # parts multiply alike, however many there are
            key = next((known for known in self.matrix if known.startswith(f"{path}x")), key)
        return self.matrix.get(key, self.matrix["other"])


def constant_of(path: str, products: int) -> str:
    """The key of `Constants.matrix` for a path of `hardware.catalog.PATHS`."""
    if path == "float16":
        return "bfloat16"
    return f"{path}x{products}" if products > 1 else path


# Round numbers, fitted to nothing: 80 % of a matrix unit, half of what plain float32 units state, a little less where
# operands are split on the way, eight operations a score, a microsecond for what begins or ends.
UNCALIBRATED = Constants(matrix={"other": 0.8, "float32": 0.5, "tf32": 0.5, "tf32x3": 0.5, "float32_matrix": 0.5})


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """How far predictions were from measurements, over points that the constants were not fitted to.

    Attributes:
        points: how many.
        median: of |predicted / measured - 1|, or the like: 0.08 is 8 %.
        within_20: share of the points within 20 %.
        factor_90: nine points in ten lay within this factor, up or down: 1.2.
    """

    points: int
    median: float
    within_20: float
    factor_90: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One card's constants and how good they are.

    Attributes:
        gpu: key of its data sheet.
        date: when it was fitted, ISO 8601.
        sources: files it was fitted to, and those it was judged on.
        memory, exponentials: share of the data sheet's rates that measured ceilings reached.
        l2_gbps: measured, 10^9 bytes a second.
        launch_us: an empty kernel in a graph.
        kernels: kernel -> constants; "kernel loop" -> those of one of its loops (`Cost.loop`), where it has several.
        residuals: kernel -> on points the constants were not fitted to, as in the card's records; `"all"` over all.
        cross_validated: kernel -> on points left out of a fit, group by group.
        kernels_left_out: kernel -> on its points, by constants fitted to all other kernels together.
        uncalibrated: how far `UNCALIBRATED` is from the same points: the error bar where there is no calibration.
        constants_of: key of the card whose `kernels` it takes, the chip being the same; it has none of its own then.
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
    kernels_left_out: Mapping[str, Residuals] = field(default_factory=dict)
    constants_of: str = ""


def residuals(ratios: list[float]) -> Residuals:
    """Of predicted / measured. A ratio of 0.5 is as far off as one of 2."""
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
    """Every calibration that comes with the package, by the key of the data sheet."""
    return {c.gpu: c for c in (read(path) for path in sorted(FOLDER.glob("*.json")))}


def read(path: Path) -> Calibration:
    """A calibration from its file.

    Raises:
        ValueError: it is not one; the message names the file.
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
        if data["uncalibrated"] is not None:
            data["uncalibrated"] = Residuals(**data["uncalibrated"])
        data["sources"] = {key: tuple(files) for key, files in data["sources"].items()}
        return Calibration(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path.name} is no calibration: {error}") from error


def write(calibration: Calibration, path: Path) -> None:
    """The inverse of `read`."""
    text = json.dumps({"schema": SCHEMA, **_plain(asdict(calibration))}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


def worst_uncalibrated() -> Residuals | None:
    """How far `UNCALIBRATED` was off where it was checked, the worst card; None where it never was."""
    known = [c.uncalibrated for c in calibrations().values() if c.uncalibrated is not None]
    return max(known, key=lambda r: r.factor_90, default=None)


@dataclass(frozen=True)
class Machine:
    """A card as the model sees it: rates at their best, and the share of them that is had under load.

    Attributes:
        sheet: its data sheet.
        constants: of the kernel that runs.
        calibration: where they come from; None where the card has none.
        fitted: whether the constants are this kernel's own on this card.
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
    """The card with the constants of a kernel's loop, or of the kernel; round numbers where it has none.

    Args:
        loop: `Cost.loop`.
        calibration: of the card; the one that comes with the package if None.
    """
    calibration = calibration or calibrations().get(sheet.key)
    known: Mapping[str, Constants] = {}
    if calibration is not None:
        lender = calibrations().get(calibration.constants_of)
        known = calibration.kernels if lender is None else lender.kernels
    key = nearest(known, key_of(kernel, loop))
    return Machine(sheet, known.get(key, UNCALIBRATED), calibration, key in known)


def nearest(known: Container[str], key: str) -> str:
    """The key itself where it is known, or that of the loop, and at last the kernel, that it is a kind of:
    `"split_kv few rows"` for `"split_kv few rows pages"`. The kernel where none is."""
    while key not in known and " " in key:
        key = key.rpartition(" ")[0]
    return key


def key_of(kernel: str, loop: str) -> str:
    """The key of `Calibration.kernels` for one of a kernel's loops."""
    return f"{kernel} {loop}" if loop else kernel
