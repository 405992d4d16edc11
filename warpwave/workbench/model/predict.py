"""Predicts the time of one call by one kernel, in named steps from the bound to the time.

The model starts at the bound of `roofline`. Each step (`steps.LOSSES`) removes one idealization: the clock under load,
padding, hidden pairs, idle SMs, traffic, exposed exponentials, latency, pipeline fill, launches. The time after the
last step is the prediction. The ratio of two neighboring times is the cost of a step; `losses.py` compares a
measurement with the same steps.

Everything about a kernel comes from its own `cost`. Constants that do not follow from shapes come from
`calibration.py`. `docs/workbench/model.md` has the equations, limits and errors of the model. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.hardware.catalog import DataSheet, data_sheet
from warpwave.workbench.model import families, published
from warpwave.workbench.model.calibration import Machine, Residuals, calibrations, machine, worst_uncalibrated
from warpwave.workbench.model.steps import Steps, Traffic, computes_gradients

QUANTIZED_FACTOR = 3.0  # of the error bar of quantized calls, which no calibration has


@dataclass(frozen=True)
class Prediction:
    """The time of a call by one kernel, and how it comes about.

    Attributes:
        kernel: its name.
        gpu: key of the data sheet.
        time_us: predicted device time.
        low_us, high_us: the interval that held nine in ten measured calls when the model was checked.
        times_us: loss -> the time with this loss and all before it; begins with `"bound"`, ends at `time_us`.
        waves: rounds of blocks over the card; the last one counts by the part of the card that it fills.
        blocks_per_sm: blocks that are resident on an SM.
        limit: what limits them: `"shared memory"`, ..., `"launch"` if the kernel asks for no more, `"grid"` if the
            grid has no more.
        traffic: bytes at each level of memory.
        validated: what the error bar is based on, in words.
        points: number of measured times of this kernel on this card, ours or published.
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
        """Loss -> the factor it costs. The product of all factors is exactly `time_us` over the bound."""
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
    """Predicts the time of a call; returns None if the card has no data sheet, or the call has no work, or dropout,
    whose random numbers the model does not count.

    Args:
        problem: the call.
        kernel, config: the module that serves it and one of its configs.
        gpu: the device.
        hot: the same tensors were used by the call before.
        graph: a CUDA graph replays the call, so the host adds no time.
        sheet: the card's data sheet; looked up if None.
        registers, smem_bytes: those of the compiled kernel, instead of the estimates of its `cost`.
        of: the card with other constants, for fitting them.
        without: one of `steps.ABLATIONS`: predicts the time of a loop without that resource.
    """
    sheet = sheet or data_sheet(gpu)
    if sheet is None or gpu.is_cpu or problem.flops == 0 or problem.dropout_p:
        return None
    cost = kernel.cost(problem, gpu, config)
    where = of or machine(sheet, kernel.NAME, cost.loop)
    if registers is not None or smem_bytes is not None:
        known = {"registers": registers or cost.registers, "smem_bytes": smem_bytes or cost.smem_bytes}
        cost = replace(cost, **known, smem_margin=0, compiled=True)
    steps = Steps(problem, kernel, config, gpu, cost, where, hot, without, graph)
    times = steps.times()
    time_us = times["launches"]
    low, high, words, points = _bar(where, kernel, time_us, times["bound"], problem.is_quantized)
    return Prediction(
        kernel.NAME,
        sheet.key,
        time_us,
        low,
        high,
        times,
        steps.waves,
        steps.resident[0],
        steps.resident[1],
        tuple(steps.traffic()),
        words,
        points,
    )


def timer(
    problem: AttentionProblem, kernel: Any, config: Any, gpu: Gpu, of: Machine, *, hot: bool, graph: bool
) -> Callable[[Machine], float]:
    """Returns the time of a call as a function of the card's constants, for fitting them.

    Whatever does not depend on the constants is computed once. The arguments are those of `predict`.
    """
    steps = Steps(problem, kernel, config, gpu, kernel.cost(problem, gpu, config), of, hot, "", graph)

    def time_us(where: Machine) -> float:
        steps.where = where
        return steps.time_us()

    return time_us


def _lent(where: Machine, kernel: str) -> tuple[str, Residuals] | None:
    """Returns the key of the card whose constants are used, and the errors there; None if they are the card's own."""
    lender = calibrations().get("" if where.calibration is None else where.calibration.constants_of)
    if lender is None:
        return None
    known = lender.residuals.get(kernel) or lender.cross_validated.get(kernel)
    return None if known is None else (lender.gpu.upper(), known)


def _bar(
    where: Machine, module: Any, time_us: float, bound_us: float, is_quantized: bool = False
) -> tuple[float, float, str, int]:
    """Returns the error bar, its basis in words, and its number of points. The bound limits it from below."""
    name, kernel = where.sheet.name, module.NAME
    if is_quantized:
        factor, points = QUANTIZED_FACTOR, 0
        words = (
            f"never validated: no calibration has quantized calls; {kernel} takes constants of 16-bit calls, with an "
        )
        words += f"error bar of a factor {factor:g}"
    elif where.calibration is not None and kernel in where.calibration.residuals:
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
    elif where.fitted and (lent := _lent(where, kernel)) is not None:
        lender, known = lent
        factor, points = known.factor_90, 0
        words = f"never validated: {kernel} was not measured on an {name}; constants of the same chip, whose "
        words += f"{known.points} measurements as an {lender} they predict within a factor {factor:.2f} in nine of ten"
    else:
        factor, words, points = _rough_bar(where, module)
    return max(bound_us, time_us / factor), time_us * factor, words, points


def _rough_bar(where: Machine, module: Any) -> tuple[float, str, int]:
    """Returns the error bar of round constants: their error on published times of the card, if there are enough."""
    name, kernel = where.sheet.name, module.NAME
    check = published.cards().get(where.sheet.key, {}).get(kernel)
    if check is not None and check.points >= published.ENOUGH:
        words = f"{_ratios(check)} on an {name}; {kernel} itself was not measured there"
        if families.is_fitted(where.sheet, kernel):
            words += "; two constants of its family were fitted to half of such times"
        else:
            words += "; the card's constants were chosen with them in view"
        return max(check.factor_90, published.LEAST_FACTOR), words, check.points
    rough = worst_uncalibrated(computes_gradients(module))
    factor = 3.0 if rough is None else rough.factor_90
    words = f"never validated: {kernel} was not measured on an {name}; "
    if families.is_lent(where.sheet, kernel):
        words += "constants of an H200 at this card's power, with the error bar of round constants, which elsewhere "
    else:
        words += "round constants, which elsewhere "
    words += "nobody checked" if rough is None else f"were within a factor {factor:.2f} in nine of ten calls"
    words += f". {_ratios(check)} there" if check is not None else ". Nobody checked them on this card"
    return factor, words, 0


def _ratios(check: published.Check) -> str:
    if check.points == 1:
        return f"Predicted over published is {check.median:.2f} for one time of a kernel like it"
    return (
        f"Predicted over published is {check.median:.2f} in the median, {check.least:.2f} to {check.most:.2f}, for "
        f"{check.points} times of kernels like it"
    )
