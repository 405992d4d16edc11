"""Predicted time of one call by one kernel: its bound, and what is added on the way from the bound to the clock.

The model walks from the bound of `roofline` to a time in named steps (`ladder.LOSSES`), each of which takes one
idealisation away: the clock under load, padding, hidden pairs, idle SMs, traffic, exponentials that nothing hides,
latency, filling, launching. The time after the last step is the prediction, and the ratio of two neighbouring times is
what that step costs: `losses.py` holds a measurement against the same ladder.

Everything about a kernel comes from its own `cost`; constants that no shape tells come from `calibration.py`.
`docs/model.md` has the equations, what is not modelled, and how far predictions were off. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.hardware.catalog import DataSheet, data_sheet
from warpwave.workbench.model.calibration import Machine, machine, worst_uncalibrated
from warpwave.workbench.model.steps import Ladder, Traffic


@dataclass(frozen=True)
class Prediction:
    """The time of a call by one kernel, and how it comes about.

    Attributes:
        kernel: its name.
        gpu: key of the data sheet.
        time_us: predicted, on the device, the host left out.
        low_us, high_us: nine in ten calls lay within, where the model was checked.
        times_us: loss -> the time with it and all before it; begins with `"bound"`, ends at `time_us`.
        waves: rounds of blocks over the card, the last counted by what it fills.
        blocks_per_sm: that run together.
        limit: what allows no more of them: `"shared memory"`, ..., `"launch"` where the kernel asks for no more,
            `"grid"` where there are no more.
        traffic: by level.
        validated: what the error bar rests on, in words.
        points: measurements on this very card and kernel behind it; 0 is none.
    """

    kernel: str
    gpu: str
    time_us: float
    low_us: float
    high_us: float
    times_us: Mapping[str, float]
    waves: float
    blocks_per_sm: int
    limit: str
    traffic: tuple[Traffic, ...]
    validated: str
    points: int

    @property
    def bound_us(self) -> float:
        return self.times_us["bound"]

    @property
    def factors(self) -> dict[str, float]:
        """Loss -> the ratio it costs; their product is `time_us` over the bound, exactly."""
        names = list(self.times_us)
        return {name: self.times_us[name] / self.times_us[before] for before, name in pairwise(names)}


def predict(
    problem: AttentionProblem,
    kernel: Any,
    config: Any,
    gpu: Gpu,
    *,
    hot: bool = False,
    graph: bool = False,
    sheet: DataSheet | None = None,
    registers: int | None = None,
    smem_bytes: int | None = None,
    of: Machine | None = None,
    without: str = "",
) -> Prediction | None:
    """The time of a call, or None where the card has no data sheet or the call no work.

    Args:
        problem: the call.
        kernel, config: the module that serves it and one of its configs.
        gpu: where.
        hot: the same tensors were used by the call before.
        graph: a CUDA graph replays the call, so that nobody waits for the host.
        sheet: the card's data sheet; looked up if None.
        registers, smem_bytes: of the compiled kernel, in place of what its `cost` estimates.
        of: the card with other constants, for fitting them.
        without: one of `ladder.ABLATIONS`: the time if the kernel's loop left that out.
    """
    sheet = sheet or data_sheet(gpu)
    if sheet is None or gpu.is_cpu or problem.flops == 0:
        return None
    cost = kernel.cost(problem, gpu, config)
    where = of or machine(sheet, kernel.NAME, cost.loop)
    if registers is not None or smem_bytes is not None:
        cost = replace(cost, registers=registers or cost.registers, smem_bytes=smem_bytes or cost.smem_bytes)
    walk = Ladder(problem, kernel, config, gpu, cost, where, hot, without, graph)
    times = walk.ladder()
    time_us = times["launches"]
    low, high, words, points = _bar(where, kernel.NAME, time_us, times["bound"])
    return Prediction(
        kernel.NAME,
        sheet.key,
        time_us,
        low,
        high,
        times,
        walk.waves,
        walk.resident[0],
        walk.resident[1],
        tuple(walk.traffic()),
        words,
        points,
    )


def timer(
    problem: AttentionProblem, kernel: Any, config: Any, gpu: Gpu, of: Machine, *, hot: bool, graph: bool
) -> Callable[[Machine], float]:
    """The time of a call as a function of the card's constants, for fitting them: what no constant changes is computed
    once. The arguments are those of `predict`."""
    walk = Ladder(problem, kernel, config, gpu, kernel.cost(problem, gpu, config), of, hot, "", graph)

    def time_us(where: Machine) -> float:
        walk.where = where
        return walk.time_us()

    return time_us


def _bar(where: Machine, kernel: str, time_us: float, bound_us: float) -> tuple[float, float, str, int]:
    """Error bar, and what it rests on. Nothing is faster than the bound."""
    name = where.sheet.name
    if where.calibration is not None and kernel in where.calibration.residuals:
        known = where.calibration.residuals[kernel]
        words = (
            f"{known.points} measurements of {kernel} on an {name} that it was not fitted to: median error "
            f"{known.median:.0%}, nine in ten within a factor {known.factor_90:.2f}"
        )
        factor, points = known.factor_90, known.points
    elif where.fitted and where.calibration is not None and kernel in where.calibration.cross_validated:
        known = where.calibration.cross_validated[kernel]
        words = f"{known.points} measurements of {kernel} on an {name}, each left out of the fit that predicts it"
        factor, points = known.factor_90, known.points
    else:
        rough = worst_uncalibrated()
        factor, points = (3.0 if rough is None else rough.factor_90), 0
        words = f"never validated: {kernel} was not measured on an {name}; round constants, which elsewhere "
        words += "nobody checked" if rough is None else f"were within a factor {factor:.2f} in nine of ten calls"
    return max(bound_us, time_us / factor), time_us * factor, words, points
