"""The bounds of a case on the machine that measured it: by the data sheet, and by measured ceilings.

A measured ceiling is the best rate of one run of `warpwave roof`. If a call of the report was faster, the ceiling is
raised to that call's rate, and a sentence says so. Hence no share exceeds 100 %, and none is cut off. A data sheet is
never raised: a time that beats it cannot be a time of that call on that card, and gets no share.
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

ROUNDING = 1e-6  # tolerance of a share above 1, for rounding when a rate was raised to the call's own


@dataclass(frozen=True)
class MachineRates:
    """The known rates of a machine.

    Attributes:
        rates: sets of rates, the data sheet's first; empty if none is known.
        notes: sentences about missing rates and how to get them.
        sources: the documents of the data sheet.
        passed: sentences about measured ceilings that a call exceeded, and calls that the data sheet rules out.
    """

    rates: tuple[Rates, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


def rates_of(machine: Machine) -> MachineRates:
    """Returns the rates of a record's machine."""
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
        notes.append(f"The catalog has no data sheet for {machine.name}.")
    ceilings = measured_ceilings(machine)
    if ceilings is not None:
        raised, said = _raised(roofline.measured_rates(ceilings), machine)
        rates.append(raised)
        passed += said
    else:
        notes.append('There are no measured ceilings of this machine; "warpwave roof" measures them.')
    return MachineRates(tuple(rates), tuple(notes), sources, tuple(passed))


def _timed(machine: Machine) -> list[Measurement]:
    """Returns the timed contenders with a correct result, whose rates may raise a ceiling."""
    found = [m for run in machine.runs for m in run.measurements]
    return [m for m in found if m.timing is not None and not m.is_yardstick and not m.inaccurate]


def _raised(rates: Rates, machine: Machine) -> tuple[Rates, list[str]]:
    """Returns the ceilings, raised to the rates that calls of the machine reached, and a sentence for each raise."""
    timed, measured = _timed(machine), rates
    by: dict[tuple[str, str], tuple[Measurement, Bound]] = {}
    while True:
        furthest: dict[tuple[str, str], tuple[float, Measurement]] = {}
        for m in timed:
            for line in bounds(m, machine, [rates]):
                assert line.binding is not None and m.timing is not None  # _timed and bounds ensure both
                reached = line.binding.time_us / m.timing.median_us
                key = (line.binding.resource, line.path if line.binding.unit == "FLOP" else "")
                if reached > max(1 + ROUNDING, furthest.get(key, (0.0, m))[0]):
                    furthest[key] = (reached, m)
        if not furthest:
            break
        for key, (reached, m) in furthest.items():
            rates = _with(rates, *key, reached)
            bound = bounds(m, machine, [measured])[0].of(key[0])
            assert bound is not None  # the resource bound the call
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
    # The name has the date of the set, but a raised rate was not measured on that date.
    return replace(rates, name=f"{measured.name} or here") if said else rates, said


def _of(rates: Rates) -> Callable[[str], float]:
    return lambda path: rates.product_tflops[path]


def _rate(bound: Bound) -> str:
    return duration(bound.rate) if bound.rate_unit == "us" else f"{figure(bound.rate, 4)} {bound.rate_unit}"


def _with(rates: Rates, resource: str, path: str, times: float) -> Rates:
    """Returns the rates with one of them multiplied by `times`."""
    if path:
        if resource == "products":  # on a CPU, which may convert its operands first
            path = max((p for p in (path, roofline.FLOAT32_UNITS) if p in rates.product_tflops), key=_of(rates))
        return replace(rates, product_tflops={**rates.product_tflops, path: rates.product_tflops[path] * times})
    if resource in ("launch", "call"):
        return replace(rates, launch_us=(rates.launch_us or 0.0) / times)
    if resource == "exponentials":
        return replace(rates, exponentials_gops=(rates.exponentials_gops or 0.0) * times)
    return replace(rates, memory_gbps=(rates.memory_gbps or 0.0) * times)


def _impossible(sheet: Rates, machine: Machine) -> list[str]:
    """Returns a sentence for each time that the data sheet rules out."""
    said = []
    for m in _timed(machine):
        for line in bounds(m, machine, [sheet]):
            assert line.binding is not None and m.timing is not None
            if line.time_us > m.timing.median_us * (1 + ROUNDING):
                said.append(
                    f'{m.kernel or m.contender} in "{m.case}" took {duration(m.timing.median_us)}, where the data '
                    f"sheet allows {duration(line.time_us)} at least ({line.binding.resource}): its inputs were in "
                    "a cache, or the card exceeds its data sheet. It has no share."
                )
    return said


def measured_ceilings(machine: Machine) -> Ceilings | None:
    """Returns the stored ceilings of the device: the user's, else those of the package."""
    for found in (measure.load(machine.gpu), measure.shipped(machine.gpu)):
        if found is not None and _same_processor(found, machine):
            return found
    return None


def _same_processor(ceilings: Ceilings, machine: Machine) -> bool:
    """Returns whether the stored CPU ceilings, which are this machine's, fit the record: same CPU model and threads."""
    if not machine.is_cpu:
        return True
    theirs, ours = (dict(e.get("cpu") or {}) for e in (ceilings.environment, machine.environment))
    return all(theirs.get(key) == ours.get(key) for key in ("model", "torch_threads"))


def bounds(m: Measurement, machine: Machine, rates: Sequence[Rates]) -> list[Roofline]:
    """Returns the lower bounds of a measurement, by each set of rates."""
    # Without a flush between calls, data that fits the caches stays there.
    hot = m.timing is not None and not m.timing.l2_flushed
    found = [roofline.roofline(m.problem, r, gpu=machine.gpu, hot=hot) for r in rates]
    return [one for one in found if one.binding is not None]


def telling(rooflines: Sequence[Roofline]) -> Roofline | None:
    """Returns the main set of bounds: the data sheet's, unless a resource with only a measured rate binds.

    The launch is such a resource: no data sheet states its cost, and it bounds the smallest calls.
    """
    first = next(iter(rooflines), None)
    for other in rooflines[1:]:
        if first is not None and other.binding is not None and first.of(other.binding.resource) is None:
            return other
    return first


def share(m: Measurement, bound: Bound) -> float | None:
    """Returns a measurement's speed as a share of a bound's, at most 1; None if it has no time or beats the bound."""
    if m.timing is None:
        return None
    part = bound.time_us / m.timing.median_us
    return None if part > 1 + ROUNDING else min(1.0, part)
