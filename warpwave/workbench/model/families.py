"""Round constants for cards without a calibration, derived from the card's data sheet and its family.

Three things differ between cards and follow from their sheets: how much power they have for a product, how far their
clock exceeds the stated one, and whether their matrix units run at a reduced rate, which loops saturate more easily. A
Hopper card takes the constants of an H200 at its own power. The constants of AMD's families are fitted to half of the
times that others published (`published.py`). Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from warpwave.workbench.hardware.catalog import DataSheet, gpu_of
from warpwave.workbench.model import published
from warpwave.workbench.model.calibration import UNCALIBRATED, Constants, calibrations, key_of, nearest

H200_WATTS = 700 / 989.4  # board power for a TFLOP/s of 16-bit products
# Energy of a product, relative to an H200, by the chip's process: 12 nm and Samsung's 8 nm three times, 7 nm twice;
# Blackwell's larger products take less. With these, the A100's and the B200's published plateaus come out.
ENERGY = {"sm_70": 3.0, "sm_75": 3.0, "sm_80": 2.2, "sm_86": 3.0, "sm_87": 3.0, "sm_100": 0.63, "sm_103": 0.63}
# 16-bit operations a clock that an SM's matrix units are built for. GeForce cards, and the H20, L40, L20 and A10G, are
# limited to less with float32 accumulation.
FULL_RATE = {"sm_75": 1024, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096, "sm_120": 1024, "sm_121": 1024}
LIKE = {"gfx908": "gfx90a", "gfx1201": "gfx1100"}  # families without points, and the nearest that has some
# Kernels that take the fitted constants: their loops are alike, although the published times are of the first.
FITTED = ("flash_fwd", "split_kv", "large_head_dim")
LIMITED = 0.97  # share of a limited rate that a loop reaches
FILL_BY_POINTERS_US = 2.0  # start and end of a tile on cards without TMA, twice an H200's
BOOST = 0.4  # share of the way from the stated to the highest clock that a loop of products runs at


def constants(sheet: DataSheet, kernel: str = "", loop: str = "") -> Constants:
    """Returns the constants of a kernel's loop on a card without a calibration.

    A Hopper card takes those of an H200, at its own power; AMD's families take what was fitted to published times. All
    others take round numbers.
    """
    if lent := _of_an_h200(sheet, kernel, loop):
        return replace(lent, power=lent.power * power_for_products(sheet))
    if is_fitted(sheet, kernel):
        fitted = published.families()[LIKE.get(sheet.arch, sheet.arch)].values
        return replace(UNCALIBRATED, power=math.inf, serial=fitted["serial"], fill_us=fitted["fill_us"])
    return round_constants(sheet)


def round_constants(sheet: DataSheet) -> Constants:
    """Returns the constants that follow from a card's data sheet, without anything that was fitted."""
    share = LIMITED if is_limited(sheet) else UNCALIBRATED.matrix["other"]
    clock = 1 + BOOST * (sheet.headroom - 1)
    return replace(
        UNCALIBRATED,
        matrix={path: (share if path == "other" else rate) * clock for path, rate in UNCALIBRATED.matrix.items()},
        power=UNCALIBRATED.power * power_for_products(sheet),
        fill_us=FILL_BY_POINTERS_US if 0 < gpu_of(sheet).capability < 90 else UNCALIBRATED.fill_us,
    )


def is_lent(sheet: DataSheet, kernel: str) -> bool:
    """Returns whether a kernel's constants on a card are those of an H200 at the card's power."""
    return _of_an_h200(sheet, kernel, "") is not None


def _of_an_h200(sheet: DataSheet, kernel: str, loop: str) -> Constants | None:
    if sheet.arch != "sm_90" or is_limited(sheet):
        return None
    known = calibrations()["h200"].kernels
    return known.get(nearest(known, key_of(kernel, loop)))


def is_fitted(sheet: DataSheet, kernel: str) -> bool:
    """Returns whether a kernel's constants on a card are those that were fitted to its family's published times."""
    return kernel in FITTED and LIKE.get(sheet.arch, sheet.arch) in published.families()


def is_limited(sheet: DataSheet) -> bool:
    """Returns whether a card's matrix units run below the rate that its chip is built for."""
    a_clock = sheet.peak_tflops["float16"] * 1e6 / (sheet.num_sms * (sheet.tensor_clock_mhz or sheet.boost_clock_mhz))
    return a_clock < 0.75 * FULL_RATE.get(sheet.arch, 0)


def power_for_products(sheet: DataSheet) -> float:
    """Returns how much power a card has for a 16-bit product, relative to an H200."""
    watts = sheet.power_w / sheet.peak_tflops["float16"]
    return watts / H200_WATTS / ENERGY.get(sheet.arch, 1.0)
