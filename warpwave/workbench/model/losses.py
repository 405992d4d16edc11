"""Splits a measured time into named losses: measured / bound is exactly the product of their factors and a remainder.

The factors are the steps of the model, so each factor is the model's cost of that step. The remainder is what the model
did not predict: above 1 the call was slower than predicted, below 1 it was faster. A measurement is compared with two
yardsticks: the bound by the data sheet, and the same bound at the clock that the card ran at, because a card at its
power limit runs no faster. Neither share exceeds 100 %; a time below the bound is no share of it and gets a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.errors import InvalidInput
from warpwave.workbench.hardware.catalog import DataSheet
from warpwave.workbench.model.predict import Prediction
from warpwave.workbench.model.roofline import Roofline, us
from warpwave.workbench.model.steps import LOSSES, OF_THE_CARD

NOTICEABLE = 1.02  # smaller losses are not named
IMPOSSIBLE = 1.15  # a time shorter than the bound by more than this factor cannot be a time of the call


@dataclass(frozen=True)
class Loss:
    """One step from the bound to the measurement.

    Attributes:
        name: a key of `steps.LOSSES`, or `"remainder"`.
        factor: the ratio of `after_us` to `before_us`.
        before_us, after_us: the time without and with this loss; earlier losses are included in both.
        meaning: the loss in words.
    """

    name: str
    factor: float
    before_us: float
    after_us: float
    meaning: str


@dataclass(frozen=True)
class Yardstick:
    """A time that a measurement is compared with.

    Attributes:
        name: `"data sheet"`, `"power-matched"`.
        least_us: the time it allows.
        share: `least_us` over the measured time, at most 1.
        note: how the time was obtained.
    """

    name: str
    least_us: float
    share: float
    note: str


@dataclass(frozen=True)
class Losses:
    """The losses of one measurement.

    Attributes:
        measured_us, bound_us: the measured time and the bound.
        losses: every step in order, including factors of 1; the remainder is last.
        yardsticks: the data sheet's yardstick, and the power-matched one.
        warning: what may be wrong with a time that is a little shorter than the bound; else empty.
    """

    measured_us: float
    bound_us: float
    losses: tuple[Loss, ...]
    yardsticks: tuple[Yardstick, ...]
    warning: str = ""

    @property
    def ratio(self) -> float:
        """Measured time over bound, which is the product of all factors."""
        return self.measured_us / self.bound_us

    @property
    def remainder(self) -> float:
        return self.losses[-1].factor

    @property
    def noticeable(self) -> list[Loss]:
        """The losses of at least 2 %, and the remainder."""
        return [loss for loss in self.losses[:-1] if loss.factor >= NOTICEABLE] + [self.losses[-1]]

    @property
    def largest(self) -> Loss | None:
        """The largest loss that a grid, tile or loop can change; one of the card's if there is no other loss."""
        named = [loss for loss in self.losses[:-1] if loss.factor >= NOTICEABLE]
        return max(named, key=lambda loss: (loss.name not in OF_THE_CARD, loss.factor), default=None)


def split(
    measured_us: float,
    prediction: Prediction,
    sheet: DataSheet,
    bounds: Roofline | None = None,
    *,
    clock_mhz: float | None = None,
    none: str = "no implementation",
    estimated: str = "",
) -> Losses:
    """Splits a measured time into the losses of a prediction.

    Args:
        measured_us: device time of the call.
        prediction: prediction for the same call, kernel and config, with the same state of L2 as measured.
        sheet: the card's data sheet.
        bounds: bounds by the data sheet, for the power-matched yardstick.
        clock_mhz: SM clock while it ran; None if it was not read.
        none: the implementations that the bound holds for, in words.
        estimated: why the bound is an estimate (`roofline.estimated`); empty if it is exact.

    Raises:
        InvalidInput: the time is shorter than an exact bound by more than `IMPOSSIBLE`, or not a positive number.
    """
    if not 0 < measured_us < float("inf"):
        raise InvalidInput(f"the measured time is {measured_us} us; it must be above 0 and finite")
    warning = ""
    if measured_us < prediction.bound_us:
        said = f"{us(prediction.bound_us)}. Check that the time is of the whole call, of this call and in us; if its "
        said += "inputs stayed in L2, pass --hot"
        if measured_us * IMPOSSIBLE < prediction.bound_us and not estimated:
            raise InvalidInput(
                f"the measured time is {us(measured_us)}; on {sheet.name} {none} of this call takes less than {said}"
            )
        warning = f"The measured time is {1 - measured_us / prediction.bound_us:.1%} less than the bound, {said}. The "
        warning += "card may also run above its stated clock, or the kernel accumulate in less than float32."
        if estimated:
            warning += f" The bound itself is an estimate: {estimated}."
    losses = []
    before = prediction.bound_us
    for name, meaning in LOSSES.items():
        after = prediction.times_us[name]
        losses.append(Loss(name, after / before, before, after, meaning))
        before = after
    losses.append(Loss("remainder", measured_us / before, before, measured_us, "what the model did not predict"))
    yardsticks = (
        Yardstick("data sheet", prediction.bound_us, min(1.0, prediction.bound_us / measured_us), f"{none} is faster"),
        _power_matched(measured_us, prediction, sheet, bounds, clock_mhz),
    )
    return Losses(measured_us, prediction.bound_us, tuple(losses), yardsticks, warning)


def _power_matched(
    measured_us: float, prediction: Prediction, sheet: DataSheet, bounds: Roofline | None, clock_mhz: float | None
) -> Yardstick:
    """Returns the bound with products and exponentials at the clock that the power limit allowed."""
    if clock_mhz and bounds is not None:
        highest = sheet.boost_clock_mhz * sheet.headroom
        of_products = (sheet.tensor_clock_mhz or sheet.boost_clock_mhz) * sheet.headroom
        times = [prediction.bound_us]
        for bound in bounds.of_problem.bounds:
            if bound.unit == "FLOP":
                times.append(bound.time_us * max(1.0, of_products / clock_mhz))
            elif bound.unit == "exp":
                times.append(bound.time_us * max(1.0, highest / clock_mhz))
        least, note = max(times), f"the data sheet's rates at {clock_mhz:.0f} MHz, the clock read right after it ran"
    else:
        least, note = (
            prediction.times_us["clocks"],
            "what such a loop sustains on this card, by calibration",
        )
    if least > measured_us:  # the clock was higher during the run, or the loop is better than all calibrated loops
        least, note = measured_us, f"{note}; the call was at least as fast"
    return Yardstick("power-matched", least, least / measured_us, note)


REMEDIES: dict[str, str] = {
    "arithmetic": "another precision, if its error is small enough, needs fewer products (docs/guide/precision.md)",
    "bandwidth": "no grid or tile changes the bandwidth that memory reaches; fewer bytes do",
    "alignment": "a head_dim (in products by torch also a number of keys) that is a multiple of 16 avoids narrow reads",
    "recomputation": "one launch for all gradients computes each score once, if its sums fit registers",
    "head padding": "a head_dim equal to a tile's width, or narrower tiles, removes the products over padding",
    "hidden pairs": "smaller tiles at the mask's edge remove products over hidden pairs",
    "ragged tiles": "a block_m or block_n that divides the lengths, or several query heads in one tile, removes "
    "products over empty rows",
    "operands": "matrix instructions, which other precisions use, read an operand once for many products",
    "separate passes": "one fused pass lets products, softmax and score traffic overlap",
    "idle SMs": "more blocks give every SM work: a smaller block_m, keys split over blocks, or more heads or sequences "
    "in a call",
    "traffic": "tiles shared by more queries, or an order of blocks that keeps K and V in L2, reduce re-reads",
    "reductions": "more keys in a block add to the sums of dQ less often",
    "softmax": "a loop that overlaps one tile's softmax with another tile's products hides the exponentials",
    "conversions": "a cache of 16 bits needs none; beside float16 queries, float8 takes the fewest instructions",
    "latency": "more blocks or warpgroups per SM, or more tiles in flight, hide the latency",
    "fill": "larger tiles of queries, or more keys for each tile, spread its first loads and last stores",
    "launches": "more work in one launch, or a CUDA graph, reduces the cost of launches",
    "clocks": "less power per operation (fewer operands through registers, fewer rescales) raises the clock; no "
    "grid or tile changes it",
}


def recommendation(loss: Loss) -> str:
    """Returns how to reduce a loss, with the model's figures; it promises no speed-up."""
    remedy = REMEDIES.get(loss.name)
    if remedy is None:
        return ""
    name = f"{loss.name[0].upper()}{loss.name[1:]}"
    return f"{name}, {loss.factor:.2f} x, {us(loss.before_us)} to {us(loss.after_us)} by the model: {remedy}."
