"""How fast a case could be on the machine it was measured on: by the data sheet, and by what was measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warpwave import roofline
from warpwave.bench.records import Measurement
from warpwave.hardware import catalog, measure
from warpwave.hardware.measure import Ceilings
from warpwave.report.machines import Machine
from warpwave.roofline import Bound, Rates, Roofline


@dataclass(frozen=True)
class MachineRates:
    """What is known about a machine's speed.

    Attributes:
        rates: the data sheet's first; empty where nothing is known.
        notes: what is missing, and how to get it; sentences.
        sources: documents the data sheet was taken from.
    """

    rates: tuple[Rates, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def rates_of(machine: Machine) -> MachineRates:
    """The rates of the machine a record names."""
    gpu = machine.gpu
    rates: list[Rates] = []
    notes: list[str] = []
    sources: tuple[str, ...] = ()
    sheet = None if machine.is_cpu else catalog.data_sheet(gpu)
    if sheet is not None:
        rates.append(roofline.data_sheet_rates(sheet))
        sources = sheet.sources
    elif machine.is_cpu:
        notes.append("There is no data sheet for a CPU.")
    else:
        notes.append(f"The catalogue has no data sheet for {machine.name}.")
    ceilings = measured_ceilings(machine)
    if ceilings is not None:
        rates.append(roofline.measured_rates(ceilings))
    else:
        notes.append('No measured ceilings of this machine are at hand: "warpwave roof", run on it, measures them.')
    return MachineRates(tuple(rates), tuple(notes), sources)


def measured_ceilings(machine: Machine) -> Ceilings | None:
    """The ceilings kept for the device, those of this user before those of the package."""
    for found in (measure.load(machine.gpu), measure.shipped(machine.gpu)):
        if found is not None and _same_processor(found, machine):
            return found
    return None


def _same_processor(ceilings: Ceilings, machine: Machine) -> bool:
    """The ceilings kept for "the CPU" are this machine's: model and threads say whether the record's CPU is alike."""
    if not machine.is_cpu:
        return True
    theirs, ours = (dict(e.get("cpu") or {}) for e in (ceilings.environment, machine.environment))
    return all(theirs.get(key) == ours.get(key) for key in ("model", "torch_threads"))


def bounds(m: Measurement, machine: Machine, rates: Sequence[Rates]) -> list[Roofline]:
    """The lower bounds of a measurement, by each set of rates."""
    # Calls that follow each other without a flush find in the caches whatever fits there.
    hot = m.timing is not None and not m.timing.l2_flushed
    found = [roofline.roofline(m.problem, r, gpu=machine.gpu, hot=hot) for r in rates]
    return [one for one in found if one.binding is not None]


def telling(rooflines: Sequence[Roofline]) -> Roofline | None:
    """The set of bounds to speak of first: the data sheet's, but for resources that only a measurement knows.

    A launch is one: what it costs is on no data sheet, and it alone bounds the smallest calls.
    """
    first = next(iter(rooflines), None)
    for other in rooflines[1:]:
        if first is not None and other.binding is not None and first.of(other.binding.resource) is None:
            return other
    return first


def share(m: Measurement, bound: Bound) -> float | None:
    """The speed of a measurement as a share of what a bound allows."""
    return None if m.timing is None else bound.time_us / m.timing.median_us
