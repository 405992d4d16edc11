"""A measured time split into named losses: measured / bound = the product of their factors x a remainder, exactly.

The factors are the steps of `model`'s ladder, so each is what the model says that step costs; the remainder is what the
model did not foresee: above 1 the call was slower than predicted, below 1 faster. Shares are taken of two yardsticks:
the data sheet's bound, which nothing beats, and the same at the clock the card ran at, for a card under its power limit
runs no faster. Neither share passes 100 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.errors import InvalidInput
from warpwave.workbench.hardware.catalog import DataSheet
from warpwave.workbench.model.predict import Prediction
from warpwave.workbench.model.roofline import Roofline, us
from warpwave.workbench.model.steps import LOSSES

NOTICEABLE = 1.02  # a loss by less is not named


@dataclass(frozen=True)
class Loss:
    """One step from the bound to the measurement.

    Attributes:
        name: a key of `ladder.LOSSES`, or `"remainder"`.
        factor: what it multiplies the time by.
        before_us, after_us: the time without it and with it, all losses above it counted.
        meaning: what it is.
    """

    name: str
    factor: float
    before_us: float
    after_us: float
    meaning: str


@dataclass(frozen=True)
class Yardstick:
    """What a measurement is held against.

    Attributes:
        name: `"data sheet"`, `"power-matched"`.
        least_us: the time it allows.
        share: `least_us` over the measured time, at most 1.
        note: how it comes about.
    """

    name: str
    least_us: float
    share: float
    note: str


@dataclass(frozen=True)
class Losses:
    """Where the time of one measurement went.

    Attributes:
        measured_us, bound_us: its ends.
        losses: every step in order, those of factor 1 too; the remainder last.
        yardsticks: the data sheet's, and the power-matched one.
    """

    measured_us: float
    bound_us: float
    losses: tuple[Loss, ...]
    yardsticks: tuple[Yardstick, ...]

    @property
    def ratio(self) -> float:
        """Measured over bound: the product of all factors."""
        return self.measured_us / self.bound_us

    @property
    def remainder(self) -> float:
        return self.losses[-1].factor

    @property
    def noticeable(self) -> list[Loss]:
        """Those worth a line, the remainder always."""
        return [loss for loss in self.losses[:-1] if loss.factor >= NOTICEABLE] + [self.losses[-1]]

    @property
    def largest(self) -> Loss | None:
        """What costs most of what a grid, tile or loop can change; the clocks where nothing else costs anything."""
        named = [loss for loss in self.losses[:-1] if loss.factor >= NOTICEABLE]
        return max(named, key=lambda loss: (loss.name != "clocks", loss.factor), default=None)


def split(
    measured_us: float,
    prediction: Prediction,
    sheet: DataSheet,
    bounds: Roofline | None = None,
    *,
    clock_mhz: float | None = None,
) -> Losses:
    """The losses of a measurement of what was predicted.

    Args:
        measured_us: device time of the call.
        prediction: of the same call, kernel and config, with L2 as warm as when it was measured.
        sheet: of the card.
        bounds: by the data sheet, for the power-matched yardstick.
        clock_mhz: SM clock while it ran, where somebody read it.

    Raises:
        InvalidInput: the time is shorter than anything can take.
    """
    if not 0 < measured_us < float("inf"):
        raise InvalidInput(f"a measured time must be above 0 us and finite, got {measured_us}")
    if measured_us < prediction.bound_us:
        raise InvalidInput(
            f"{us(measured_us)} is less than the {us(prediction.bound_us)} that no implementation of this call can "
            "beat on "
            f"{sheet.name}: the time is of another call, of part of it, in another unit, or of inputs that lay in L2 "
            "(--hot)"
        )
    losses = []
    before = prediction.bound_us
    for name, meaning in LOSSES.items():
        after = prediction.times_us[name]
        losses.append(Loss(name, after / before, before, after, meaning))
        before = after
    losses.append(Loss("remainder", measured_us / before, before, measured_us, "what the model did not foresee"))
    yardsticks = (
        Yardstick("data sheet", prediction.bound_us, prediction.bound_us / measured_us, "nothing beats it"),
        _power_matched(measured_us, prediction, sheet, bounds, clock_mhz),
    )
    return Losses(measured_us, prediction.bound_us, tuple(losses), yardsticks)


def _power_matched(
    measured_us: float, prediction: Prediction, sheet: DataSheet, bounds: Roofline | None, clock_mhz: float | None
) -> Yardstick:
    """The bound with products and exponentials at the clock that power allowed."""
    if clock_mhz and bounds is not None:
        of_products = sheet.tensor_clock_mhz or sheet.boost_clock_mhz
        times = [prediction.bound_us]
        for bound in bounds.of_problem.bounds:
            if bound.unit == "FLOP":
                times.append(bound.time_us * max(1.0, of_products / clock_mhz))
            elif bound.unit == "exp":
                times.append(bound.time_us * max(1.0, sheet.boost_clock_mhz / clock_mhz))
        least, note = max(times), f"the data sheet's rates at {clock_mhz:.0f} MHz, the clock read right after it ran"
    else:
        least, note = prediction.times_us["clocks"], "what such a loop sustains on this card, by its calibration"
    if least > measured_us:  # then the clock was higher while it ran, or the loop better than any calibrated
        least, note = measured_us, f"{note}; it did as well as that or better"
    return Yardstick("power-matched", least, least / measured_us, note)


REMEDIES: dict[str, str] = {
    "head padding": "a head_dim that the tiles are made of, or tiles in smaller powers of two, removes the ceiling "
    "of the "
    "padded products",
    "hidden pairs": "smaller tiles at the mask's edge remove the ceiling of products over hidden pairs",
    "ragged tiles": "a block_m or block_n that divides the lengths, or several query heads in one tile, removes the "
    "ceiling of products over empty rows",
    "separate passes": "one fused pass removes the sum of ceilings: products, softmax and scores then overlap",
    "idle SMs": "more blocks (smaller block_m, keys split over blocks, more heads or sequences in a call) remove the "
    "ceiling "
    "of SMs without work",
    "traffic": "tiles shared by more queries, or an order of blocks whose K and V stay in L2, remove the ceiling of "
    "re-reads",
    "softmax": "a loop that computes one tile's scores while another's products run removes the ceiling of "
    "exponentials "
    "in series",
    "latency": "more blocks or warpgroups an SM, or more tiles in flight, remove the ceiling of steps that wait",
    "fill": "blocks that stay and draw several tiles, their first loads under the last tile's products, remove the "
    "ceiling "
    "of filling",
    "launches": "more work in one launch, or a CUDA graph, removes the ceiling of launching",
    "clocks": "less power an operation (fewer operands through registers, fewer rescales) raises the clock: the one "
    "ceiling here that no grid or tile moves",
}


def recommendation(loss: Loss) -> str:
    """What removes a loss, with the ceiling it stands under: figures of the model, no promised speed-up."""
    remedy = REMEDIES.get(loss.name)
    if remedy is None:
        return ""
    name = f"{loss.name[0].upper()}{loss.name[1:]}"
    return f"{name}, {loss.factor:.2f} x, {us(loss.before_us)} to {us(loss.after_us)} by the model: {remedy}."
