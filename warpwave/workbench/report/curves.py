"""Data of the plots: points under a roofline, and families of cases that differ only in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.report.figures import NARROW_SPACE, figure
from warpwave.workbench.report.verdicts import CaseResult

FEWEST_POINTS = 3  # two lengths show no curve


@dataclass(frozen=True)
class Point:
    """One timed contender: FLOP per compulsory byte, and the TFLOP/s it reached."""

    contender: str
    case: str
    intensity: float
    tflops: float


@dataclass(frozen=True)
class Ceiling:
    """One rate of a machine, drawn as a line.

    Attributes:
        resource: the resource.
        kinds: the cases it applies to, by dtype and precision or by head_dim; empty for all.
        rates: name of the set of rates.
        value: TFLOP/s; if `slope`, GB/s, to be multiplied by the intensity.
    """

    resource: str
    kinds: tuple[str, ...]
    rates: str
    value: float
    slope: bool = False

    @property
    def figure(self) -> str:
        """The rate with its unit."""
        return f"{figure(self.value)}{NARROW_SPACE}{'GB/s' if self.slope else 'TFLOP/s'}"

    @property
    def label(self) -> str:
        """Resource and kinds."""
        return f"{self.resource}, {' and '.join(self.kinds)}" if self.kinds else self.resource


@dataclass(frozen=True)
class RooflineData:
    """A machine's points and ceilings."""

    points: Sequence[Point]
    ceilings: Sequence[Ceiling]


@dataclass(frozen=True)
class Family:
    """Cases that differ only in length.

    Attributes:
        title: the common parameters.
        held: what stays constant as the length grows: the batch, or the tokens of a call.
        unit: unit of the curves: `"TFLOP/s"`; with one query per sequence, which memory binds, compulsory `"GB/s"`.
        curves: contender -> (seqlen_k, figure), by length.
    """

    title: str
    held: str
    unit: Literal["TFLOP/s", "GB/s"]
    curves: dict[str, list[tuple[int, float]]]

    def figures(self, contender: str, lengths: Sequence[int]) -> list[str]:
        """Returns one curve as text, with a dash for missing lengths."""
        known = dict(self.curves[contender])
        return [figure(known.get(length)) for length in lengths]


def roofline_data(cases: Sequence[CaseResult], *, shorten: bool = False) -> RooflineData:
    """Returns all timed contenders of all cases, or only ours and the best peer, and the ceilings of these cases."""
    points = [
        Point(m.contender, case.name, m.problem.intensity, m.tflops)
        for case in cases
        for m in plotted(case)
        if m.tflops and m.problem.compulsory_bytes and (not shorten or m in (case.ours, case.best))
    ]
    return RooflineData(points, _ceilings(cases))


def _ceilings(cases: Sequence[CaseResult]) -> list[Ceiling]:
    """Returns for each set of rates the memory, the products on the paths of these cases, and binding exponentials."""
    found: dict[tuple[str, str, float], Ceiling] = {}

    def add(resource: str, kind: str, rates: str, value: float, *, slope: bool = False) -> None:
        known = found.get((rates, resource, value))
        kinds = () if known is None else known.kinds
        kinds += (kind,) if kind and kind not in kinds else ()
        found[rates, resource, value] = Ceiling(resource, kinds, rates, value, slope)

    for case in cases:
        problem = case.measurements[0].problem
        for line in case.rooflines:
            rates, exponentials = line.rates, line.of("exponentials")
            if rates.memory_gbps is not None:
                add("memory", "", rates.name, rates.memory_gbps, slope=True)
            for resource in ("tensor cores", "float32 units", "products"):
                if (bound := line.of(resource)) is not None and bound.time_us > 0:
                    add(resource, _kind(problem), rates.name, round(problem.flops / bound.time_us * 1e-6, 6))
            if exponentials is not None and exponentials is line.binding and exponentials.time_us > 0:
                tflops = round(problem.flops / exponentials.time_us * 1e-6, 6)
                add("exponentials", f"head_dim {problem.head_dim}", rates.name, tflops)
    return list(found.values())


def _kind(problem: AttentionProblem) -> str:
    """Returns what determines the arithmetic of the products."""
    if problem.error_budget is not None:
        return f"float32 within {problem.error_budget:g}"
    precise = problem.dtype == "float32" and problem.precision != "default"
    return f"float32 by {problem.precision}" if precise else problem.dtype


def families(cases: Sequence[CaseResult]) -> list[Family]:
    """Returns the families of at least three lengths, in the order of the record."""
    groups: dict[object, list[CaseResult]] = {}
    for case in cases:
        if case.timed and not case.timed[0].problem.packed:
            groups.setdefault(_but_length(case), []).append(case)
    found = []
    for group in groups.values():
        by_batch: dict[int, list[CaseResult]] = {}
        for case in group:
            by_batch.setdefault(_problem(case).batch, []).append(case)
        same_batch = [(f"batch {batch}", part) for batch, part in by_batch.items() if _is_curve(part)]
        tokens = {_problem(case).batch * _problem(case).seqlen_k for case in group}
        if same_batch:
            found += [_family(part, held) for held, part in same_batch]
        elif len(tokens) == 1 and _is_curve(group):
            found.append(_family(group, f"{tokens.pop():,} tokens a call"))
    return found


def _but_length(case: CaseResult) -> object:
    problem = _problem(case)
    square = problem.seqlen_q == problem.seqlen_k
    common = replace(problem, batch=1, seqlen_q=1 if square else problem.seqlen_q, seqlen_k=1)
    return case.timing_group, square, common


def _problem(case: CaseResult) -> AttentionProblem:
    return case.measurements[0].problem


def _is_curve(cases: Sequence[CaseResult]) -> bool:
    return len({_problem(case).seqlen_k for case in cases}) >= FEWEST_POINTS


def _family(cases: Sequence[CaseResult], held: str) -> Family:
    problem = _problem(cases[0])
    unit: Literal["TFLOP/s", "GB/s"] = "GB/s" if problem.seqlen_q == 1 else "TFLOP/s"
    curves: dict[str, list[tuple[int, float]]] = {}
    for case in sorted(cases, key=lambda c: _problem(c).seqlen_k):
        for m in plotted(case):
            value = m.bandwidth_gbps if unit == "GB/s" else m.tflops
            if value is not None:
                curves.setdefault(m.contender, []).append((m.problem.seqlen_k, value))
    _, _, common = problem.describe().partition(", heads ")
    if problem.seqlen_q != problem.seqlen_k:
        held += f", {problem.seqlen_q:,} {'query' if problem.seqlen_q == 1 else 'queries'} a sequence"
    return Family(f"heads {common}", held, unit, curves)


def plotted(case: CaseResult) -> list[Measurement]:
    """Returns the measurements for a plot: timed and accurate attention. The tables have the others too."""
    return [m for m in case.timed if not m.is_yardstick and not m.inaccurate]


def contenders(cases: Sequence[CaseResult]) -> list[str]:
    """Returns the contenders of the plots, ours first, in the order of colors and shapes."""
    chosen = {case.ours.contender for case in cases if case.ours is not None}
    seen = [m for case in cases for m in plotted(case)]
    ranked = sorted(seen, key=lambda m: (m.contender not in chosen, not m.is_ours))  # stable: else by record
    return list(dict.fromkeys(m.contender for m in ranked))
