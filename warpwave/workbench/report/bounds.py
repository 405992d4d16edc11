"""How fast a case could be on the machine it was measured on: by the data sheet, and by what was measured there.

A measured ceiling is the best that `warpwave roof` saw, once. Where a call of the report went faster, that call is the
better measurement of the two, and the ceiling is raised to it, with a sentence that says so: no share passes 100 %, and
none is cut off. A data sheet is not raised: what beats it is no time of that call on that card, and has no share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.hardware import catalog, measure
from warpwave.workbench.hardware.measure import Ceilings
from warpwave.workbench.model import roofline
from warpwave.workbench.model.roofline import Bound, Rates, Roofline
from warpwave.workbench.report.figures import duration, figure
from warpwave.workbench.report.machines import Machine

ROUNDING = 1e-6  # by which a share may pass 1 where a rate was raised to what it is the share of


@dataclass(frozen=True)
class MachineRates:
    """What is known about a machine's speed.

    Attributes:
        rates: the data sheet's first; empty where nothing is known.
        notes: what is missing, and how to get it; sentences.
        sources: documents the data sheet was taken from.
        passed: which measured ceilings a call went beyond, and which calls the data sheet does not allow; sentences.
    """

    rates: tuple[Rates, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


def rates_of(machine: Machine) -> MachineRates:
    """The rates of the machine a record names."""
    gpu = machine.gpu
    rates: list[Rates] = []
    notes: list[str] = []
    passed: list[str] = []
    sources: tuple[str, ...] = ()
    sheet = None if machine.is_cpu else catalog.data_sheet(gpu)
    if sheet is not None:
        rates.append(roofline.data_sheet_rates(sheet))
        sources = sheet.sources
        passed += _impossible(rates[0], machine)
    elif machine.is_cpu:
        notes.append("There is no data sheet for a CPU.")
    else:
        notes.append(f"The catalogue has no data sheet for {machine.name}.")
    ceilings = measured_ceilings(machine)
    if ceilings is not None:
        raised, said = _raised(roofline.measured_rates(ceilings), machine)
        rates.append(raised)
        passed += said
    else:
        notes.append('No measured ceilings of this machine are at hand: "warpwave roof", run on it, measures them.')
    return MachineRates(tuple(rates), tuple(notes), sources, tuple(passed))


def _timed(machine: Machine) -> list[Measurement]:
    """What a ceiling can be learnt from: contenders whose result is right, and their times."""
    found = [m for run in machine.runs for m in run.measurements]
    return [m for m in found if m.timing is not None and not m.is_yardstick and not m.inaccurate]


def _raised(rates: Rates, machine: Machine) -> tuple[Rates, list[str]]:
    """Measured ceilings, each at least what a call of the machine reached, and a sentence for each that was passed."""
    timed, measured = _timed(machine), rates
    by: dict[tuple[str, str], tuple[Measurement, Bound]] = {}
    while True:
        furthest: dict[tuple[str, str], tuple[float, Measurement]] = {}
        for m in timed:
            for line in bounds(m, machine, [rates]):
                assert line.binding is not None and m.timing is not None  # bounds and _timed leave out what has none
                reached = line.binding.time_us / m.timing.median_us
                key = (line.binding.resource, line.path if line.binding.unit == "FLOP" else "")
                if reached > max(1 + ROUNDING, furthest.get(key, (0.0, m))[0]):
                    furthest[key] = (reached, m)
        if not furthest:
            break
        for key, (reached, m) in furthest.items():
            rates = _with(rates, *key, reached)
            bound = bounds(m, machine, [measured])[0].of(key[0])
            assert bound is not None  # it bound the call
            by[key] = (m, bound)
    said = []
    for (resource, path), (m, before) in by.items():
        after = bounds(m, machine, [rates])[0].of(resource)
        assert after is not None
        what = resource if not path else f"{resource} ({path})"
        old, new = (_rate(bound) for bound in (before, after))
        who = m.contender if m.is_peer else m.kernel or m.contender
        said.append(
            f"Ceiling of {what}, {measured.name}: {old}. "
            f'{who} went beyond it in "{m.case}": {new}, which is the ceiling here.'
        )
    # A raised rate was not measured on the date that the set is named by.
    return replace(rates, name=f"{measured.name} or here") if said else rates, said


def _of(rates: Rates) -> Callable[[str], float]:
    return lambda path: rates.product_tflops[path]


def _rate(bound: Bound) -> str:
    return duration(bound.rate) if bound.rate_unit == "us" else f"{figure(bound.rate, 4)} {bound.rate_unit}"


def _with(rates: Rates, resource: str, path: str, times: float) -> Rates:
    """The rates with one of them so many times as fast."""
    if path:
        if resource == "products":  # of a CPU, which may convert its operands first
            path = max((p for p in (path, roofline.FLOAT32_UNITS) if p in rates.product_tflops), key=_of(rates))
        return replace(rates, product_tflops={**rates.product_tflops, path: rates.product_tflops[path] * times})
    if resource in ("launch", "call"):
        return replace(rates, launch_us=(rates.launch_us or 0.0) / times)
    if resource == "exponentials":
        return replace(rates, exponentials_gops=(rates.exponentials_gops or 0.0) * times)
    return replace(rates, memory_gbps=(rates.memory_gbps or 0.0) * times)


def _impossible(sheet: Rates, machine: Machine) -> list[str]:
    """A sentence about each time that the data sheet does not allow."""
    said = []
    for m in _timed(machine):
        for line in bounds(m, machine, [sheet]):
            assert line.binding is not None and m.timing is not None
            if line.time_us > m.timing.median_us * (1 + ROUNDING):
                said.append(
                    f'{m.kernel or m.contender} in "{m.case}" took {duration(m.timing.median_us)}, where the data '
                    f"sheet allows {duration(line.time_us)} at the least ({line.binding.resource}): its inputs lay in "
                    "a cache, or the card runs beyond its data sheet; it has no share."
                )
    return said


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
    """The speed of a measurement as a share of what a bound allows, at most 1; None where it cannot be one: there is no
    time, or the bound does not allow it."""
    if m.timing is None:
        return None
    part = bound.time_us / m.timing.median_us
    return None if part > 1 + ROUNDING else min(1.0, part)
