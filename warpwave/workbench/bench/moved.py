"""Finds the model's term that changed between two measurements of one case; `compare` prints it beside the ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.hardware.catalog import find, gpu_of
from warpwave.workbench.model.losses import Losses

LEAST = 1.02  # smaller changes do not count


def moved(a: Measurement, b: Measurement, environment_a: Mapping[str, Any], environment_b: Mapping[str, Any]) -> str:
    """Returns the loss that changed most from a to b in the same direction as the time, in words; empty if a time
    cannot be split into losses.

    With the same kernel and config the model's terms are equal, so only the remainder can change: something outside the
    model changed. If the clocks changed, they are named.
    """
    losses_a, losses_b = _losses(a, environment_a), _losses(b, environment_b)
    if losses_a is None or losses_b is None:
        return ""
    factors = {
        loss.name: (loss.factor, other.factor) for loss, other in zip(losses_a.losses, losses_b.losses, strict=True)
    }
    # Only terms that changed in the direction of the time: a loss that shrank does not explain a slower call.
    way = math.copysign(1.0, losses_b.measured_us - losses_a.measured_us)
    name = max(factors, key=lambda n: way * math.log(factors[n][1] / factors[n][0]))
    before, after = factors[name]
    if way * math.log(after / before) < math.log(LEAST):
        return "no term moved"
    said = f"{name} {before:.2f} to {after:.2f}"
    if name != "remainder":
        return said
    clocks = [(m.gpu_after or {}).get("sm_mhz") for m in (a, b)]
    if None not in clocks and clocks[0] != clocks[1]:
        return f"{said}, at {clocks[0]} and {clocks[1]} MHz"
    return f"{said}: nothing the model sees"


def _losses(m: Measurement, environment: Mapping[str, Any]) -> Losses | None:
    from warpwave.workbench.explain.recorded_time import losses_of

    sheet = find(str((environment.get("gpu") or {}).get("name") or ""))
    return None if sheet is None else losses_of(m, gpu_of(sheet))
