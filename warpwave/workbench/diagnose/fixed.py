"""Times that do not grow: a fixed cost such as a launch, or blocks that run in parallel at no cost."""

from __future__ import annotations

from collections.abc import Sequence

from warpwave.workbench.diagnose.facts import (
    BINDS,
    Finding,
    blocks,
    peak_tflops,
    steps_of_block,
    time_us,
    varying,
    work,
)
from warpwave.workbench.diagnose.parse import Device, Row
from warpwave.workbench.model.fitting import line
from warpwave.workbench.model.roofline import us

FLAT = 1.12  # times within this factor count as equal; it is 2.8 standard deviations of two times with 3 % noise
MOST_LAUNCH_US = 40.0  # a longer time that does not grow with the blocks may be that of one block
TINY = 0.05  # a share of a rate that no bound loop has


def flat_beyond(rows: Sequence[Row], device: Device) -> int | None:
    """Returns the largest number of blocks that takes as long as the smallest, if it is at least two per SM.

    Every block of the rows must do the same work; None otherwise, or if times grow earlier.
    """
    known = [(count, time_us(row) or 0.0) for row in rows if (count := blocks(row)) and time_us(row)]
    if device.num_sms is None or len(known) < 2 or {"seqlen", "seqlen_k", "head_dim"} & set(varying(rows)):
        return None
    known.sort()
    flat = [count for count, time in known if time < FLAT * known[0][1]]
    return flat[-1] if known[0][0] < device.num_sms[0] and flat[-1] >= 2 * device.num_sms[1] else None


def _fixed_us(rows: Sequence[Row]) -> float | None:
    """Returns the fixed part of the times, from a straight-line fit of time over work; None if unknown."""
    known = sorted((work(r) or 0.0, time_us(r) or 0.0) for r in rows)
    if len(known) < 2 or known[-1][0] < 4 * known[0][0]:
        return None
    if len(known) == 2 and known[-1][1] > FLAT * known[0][1]:
        return None  # two times that differ are no line
    times = [time for _, time in known]
    if max(times) * known[0][0] > min(times) * known[-1][0]:
        return None  # times that differ more than the work have no common part
    # Least squares on relative errors, so that the largest row does not dominate.
    return line([amount for amount, _ in known], times)[0]


def fixed_cost(device: Device, rows: Sequence[Row]) -> Finding | None:
    """Returns the finding for a time that hardly changes with the work, if idle multiprocessors do not explain it."""
    known = [row for row in rows if time_us(row) and work(row)]
    fixed = _fixed_us(known)
    if fixed is None:
        return None
    row, least = max(known, key=lambda r: work(r) or 0.0), min(known, key=lambda r: work(r) or 0.0)
    time = time_us(row) or 0.0
    if fixed < BINDS * time or flat_beyond(known, device) is not None:
        return None
    counts = [blocks(r) for r in known]
    steps = [steps_of_block(r) for r in known]
    grows = None not in steps and max(s or 0 for s in steps) >= 2 * min(s or 0 for s in steps)
    if time > MOST_LAUNCH_US and not grows:
        return None  # a block takes as long, and each multiprocessor runs several at once
    fills = device.num_sms is not None and None not in counts and max(c or 0 for c in counts) > device.num_sms[1]
    # Blocks that are added to idle multiprocessors are free, so only a block that computes for much less than the time
    # shows a fixed cost.
    peak, busy = peak_tflops(row, device), 1.0
    if None not in counts and device.num_sms is not None:
        busy = min(1.0, max(c or 0 for c in counts) / device.num_sms[0])
    share = 0.0 if peak is None else (work(row) or 0.0) / (time * peak * busy * 1e6)
    if not (grows or fills) and share > TINY:
        return None
    more = (work(row) or 0) / (work(least) or 1)
    return Finding(
        "launch",
        f"{row.table}: {row.series} hardly changes with the work: {us(fixed)} of {us(time)} do not depend on it, as "
        "the cost of a launch does not",
        f"{more:.3g} x the work in {time / (time_us(least) or 1):.3g} x the time; a straight-line fit gives "
        f"{us(fixed)} at zero work",
        row.series,
        time / max(time - fixed, 0.02 * time),
        is_cause=True,
    )
