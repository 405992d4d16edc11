"""The verdict of each case: its speed against the best peer, its correctness, and its distance from the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Literal

from warpwave.workbench.bench.goals import GoalVerdict, best_peer, judge
from warpwave.workbench.bench.records import OURS, Measurement
from warpwave.workbench.bench.timing import Ratio, Samples, ratio_if_paired
from warpwave.workbench.bench.unpaired import outcome
from warpwave.workbench.model.roofline import Rates, Roofline
from warpwave.workbench.report.bounds import bounds, share, telling
from warpwave.workbench.report.figures import NO_BREAK, count, duration, figure, interval, listed, percent
from warpwave.workbench.report.machines import Machine

Word = Literal["FASTER", "SAME", "SLOWER", "UNCLEAR", "NO PEER", "NOT TIMED"]


@dataclass(frozen=True)
class CaseResult:
    """One case of one run in one mode. Its contenders were timed in turns, so their times are comparable.

    Attributes:
        name: the case's name, with the suite, mode or date if another case of the machine has the same name.
        measurements: all contenders, in the record's order.
        ours: the measurement that is judged: `auto`, else the fastest of ours; None if none is ours.
        best: the fastest peer whose result is accurate.
        ratio: speed of ours relative to `best`.
        rooflines: the bounds of the case, by each set of rates.
        timing_group: equal for cases of the same run and mode.
    """

    name: str
    measurements: Sequence[Measurement]
    ours: Measurement | None
    best: Measurement | None
    ratio: Ratio | None
    rooflines: Sequence[Roofline]
    timing_group: tuple[int, str, str] = (0, "", "")

    @property
    def timed(self) -> list[Measurement]:
        """The timed contenders."""
        return [m for m in self.measurements if m.timing is not None]

    @property
    def word(self) -> Word:
        """The verdict."""
        if self.ours is None or self.ours.timing is None:
            return "NOT TIMED"
        if self.best is None:
            return "NO PEER"
        return "UNCLEAR" if self.ratio is None else outcome(self.ratio)

    @property
    def reason(self) -> str:
        """The reason why ours has no time; empty if it has one."""
        if self.ours is None:
            return "no kernel of ours was measured"
        return "" if self.ours.timing is not None else self.ours.refusal or "no reason is recorded"

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        if self.ours is None:
            return f"No kernel of ours was measured; {_fastest(self.best)}."
        if self.ours.timing is None:
            return f"{our_name(self.ours)} has no time: {self.reason}."
        took = f"{our_name(self.ours)} takes {duration(self.ours.timing.median_us)}"
        if (reached := self.reached()) is not None:
            took += f", {reached}"
        goal = self.goal
        held = "" if goal is None else f" Goal {self.ours.goal}: {goal}."
        return f"{took}; {self._against_best()}.{held}"

    @property
    def goal(self) -> GoalVerdict | None:
        """The verdict on the suite's goal, if it sets one."""
        if self.ours is None or self.ours.goal is None or (self.best is not None and self.ratio is None):
            return None
        return judge(self.ours, self.measurements)

    def _against_best(self) -> str:
        if self.best is None:
            return "no peer was timed beside it"
        if self.ratio is None:
            return f"it cannot be compared with {self.best.contender}, because their rounds do not pair"
        which = "the best peer" if len(self.peers) > 1 else "the one peer timed"
        bracket = "" if self.ratio.low95 is None else f"{NO_BREAK}{interval(self.ratio)}"
        unsure = "" if self.ratio.low95 is not None else ", in too few rounds for an interval"
        return f"{self.ratio.median:.2f}{bracket} times as fast as {self.best.contender}, {which}{unsure}"

    @property
    def peers(self) -> list[Measurement]:
        """The accurate and timed peers, which a verdict may use."""
        return [m for m in self.timed if m.is_peer and not m.inaccurate]

    def reached(self) -> str | None:
        """Returns in words how close ours is to the bound."""
        line = telling(self.rooflines)
        if self.ours is None or line is None or line.binding is None:
            return None
        reached, resource = share(self.ours, line.binding), line.binding.resource
        if reached is None:
            return None
        return f"{percent(reached)} of the speed that {allowance(resource)}"

    def speed_against(self, m: Measurement) -> Ratio | None:
        """Returns the speed of ours relative to `m`, by paired rounds; None if their rounds do not pair."""
        return None if self.ours is None or m is self.ours else speed(self.ours, m)


def speed(ours: Measurement, other: Measurement) -> Ratio | None:
    """Returns the speed of ours relative to `other`; None if one has no time or their rounds do not pair."""
    return None if ours.timing is None or other.timing is None else ratio_if_paired(other.timing, ours.timing)


def case_results(machine: Machine, rates: Sequence[Rates]) -> list[CaseResult]:
    """Returns the cases of a machine, in the order of measurement."""
    groups: dict[tuple[int, str, str, str], list[Measurement]] = {}
    for index, run in enumerate(machine.runs):
        for m in run.measurements:
            groups.setdefault((index, m.suite, m.case, m.mode), []).append(m)
    results = []
    for key, measurements in groups.items():
        index, suite, _, mode = key
        result = case_result(_name(key, list(groups), machine), measurements, machine, rates)
        results.append(replace(result, timing_group=(index, suite, mode)))
    return results


def case_result(name: str, measurements: Sequence[Measurement], machine: Machine, rates: Sequence[Rates]) -> CaseResult:
    """Judges one case."""
    ours = [m for m in measurements if m.is_ours]
    timed = [m for m in ours if m.timing is not None]
    auto = next((m for m in ours if m.contender == f"{OURS}auto"), None)
    chosen = auto or min(timed, key=_median, default=None) or next(iter(ours), None)
    best = best_peer(measurements)
    ratio = None if chosen is None or best is None else speed(chosen, best)
    reference = chosen if chosen is not None and chosen.timing is not None else best
    rooflines = [] if reference is None else bounds(reference, machine, rates)
    return CaseResult(name, measurements, chosen, best, ratio, rooflines)


def _name(key: tuple[int, str, str, str], keys: Sequence[tuple[int, str, str, str]], machine: Machine) -> str:
    """Returns the case's name, extended until it is unique among the machine's cases."""
    run, suite, case, mode = key
    alike = [other for other in keys if other[2] == case]
    more = [suite] if len({other[1] for other in alike}) > 1 else []
    if len({other[3] for other in alike}) > 1 or mode not in ("auto", ""):
        more.append(mode)
    if len({other[0] for other in alike if other[1] == suite and other[3] == mode}) > 1:
        more.append(machine.runs[run].date[:19].replace("T", " "))
    return f"{case} ({', '.join(more)})" if more else case


# The first screen's three answers ------------------------------------------------------------------------------------


def how_fast(cases: Sequence[CaseResult]) -> list[str]:
    """Returns sentences about the speed against the best peer of every case, with losses."""
    judged = [case for case in cases if case.ratio is not None]
    sentences = []
    if judged:
        ratios = {case.name: case.ratio.median for case in judged if case.ratio is not None}
        mean = geometric_mean(ratios.values())
        over = "in its one case" if len(ratios) == 1 else f"in the geometric mean of {count(len(ratios), 'case')}"
        sentences.append(f"{mean:.2f} times as fast as the best peer {over}.")
        tally = [f"{TALLY[word]} in {n}" for word in TALLY if (n := sum(case.word == word for case in judged))]
        sentences.append(f"{listed(tally).capitalize()}.")
        suites = dict.fromkeys(case.timing_group[1] for case in judged)
        if len(suites) > 1:
            parts = [f"{suite} {_mean(judged, suite):.2f}" for suite in suites]
            sentences.append(f"By suite: {', '.join(parts)}.")
        if len(ratios) > 1:
            best, worst = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
            sentences.append(f"Best {ratios[best]:.2f} ({best}), worst {ratios[worst]:.2f} ({worst}).")
    rates = [m.tflops for case in cases if (m := case.ours) is not None and m.tflops is not None]
    if rates:
        low, high = figure(min(rates)), figure(max(rates))
        sentences.append(f"{low if low == high else f'{low} to {high}'} TFLOP/s.")
    untimed = sum(case.word == "NOT TIMED" for case in cases)
    if untimed:
        sentences.append(f"No time of ours in {count(untimed, 'case')}.")
    return sentences


def _mean(cases: Sequence[CaseResult], suite: str) -> float:
    return geometric_mean(
        case.ratio.median for case in cases if case.ratio is not None and case.timing_group[1] == suite
    )


def is_it_right(cases: Sequence[CaseResult]) -> list[str]:
    """Returns sentences about the checks of ours and of the peers against float64."""
    checked = [m for case in cases for m in case.measurements if m.verdict is not None]
    if not checked:
        return ["Nothing was checked."]
    ours, peers = [m for m in checked if m.is_ours], [m for m in checked if m.is_peer]
    wrong_ours, wrong_peers = ([m for m in some if m.verdict and not m.verdict.passed] for some in (ours, peers))
    sentences = []
    if wrong_ours:
        sentences.append(f"{count(len(wrong_ours), 'result')} of ours wrong, of {len(ours)}, and not timed.")
    elif ours:
        all_of_them = f"all {len(ours)} of our results agree" if len(ours) > 1 else "our one result agrees"
        sentences.append(f"Yes: {all_of_them} with float64.")
    # A call with an error budget is judged by the budget, not by the rounding error.
    held = [m.verdict for m in ours if m.verdict is not None and m.problem.error_budget is None]
    ratios = [r for verdict in held if (r := verdict.error_ratio) is not None]
    if ratios:
        sentences.append(f"RMS error at most {max(ratios):.2f} times what rounding alone costs.")
    if wrong_peers:
        names = listed(sorted({m.contender for m in wrong_peers}))
        sentences.append(
            f"Of the peers' {count(len(peers), 'result')}, {len(wrong_peers)} miss the gates ({names}); no verdict "
            "rests on those."
        )
    elif peers:
        sentences.append(f"The peers' {count(len(peers), 'result')} {'agree' if len(peers) > 1 else 'agrees'} too.")
    return sentences


def what_bounds_it(cases: Sequence[CaseResult]) -> list[str]:
    """Returns the binding resources, the most frequent first, and how close ours is to each set of rates."""
    binding: dict[str, int] = {}
    reached: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        line = telling(case.rooflines)
        if line is None or line.binding is None or case.ours is None or case.ours.timing is None:
            continue
        binding[line.binding.resource] = binding.get(line.binding.resource, 0) + 1
        for by_rates in case.rooflines:
            if (bound := by_rates.binding) is not None and (part := share(case.ours, bound)) is not None:
                reached.setdefault(by_rates.rates.name, {}).setdefault(bound.resource, []).append(part)
    if not binding:
        return []
    ranked = sorted(binding, key=lambda resource: -binding[resource])
    first = resource_name(ranked[0])
    others = [f"{resource_name(resource)} in {binding[resource]}" for resource in ranked[1:]]
    of = f" in {binding[ranked[0]]} of {sum(binding.values())} cases" if others else ""
    sentences = [_capital(f"{first}{of}.")]
    if others:
        sentences.append(_capital(f"{listed(others)}."))
    for name, shares in reached.items():
        parts = [f"{_range(found)} of what {allowance(resource)}" for resource, found in shares.items()]
        sentences.append(f"{_capital(_by(name))}, ours reaches {listed(parts)}.")
    return sentences


def _by(rates: str) -> str:
    return f"by the {rates}" if rates == "data sheet" else f"by ceilings {rates}"


def _range(shares: Sequence[float]) -> str:
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def allowance(resource: str) -> str:
    """Returns a resource with its verb: the tensor cores allow, memory allows."""
    return f"{resource_name(resource)} {'allow' if resource.endswith('s') else 'allows'}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


TALLY: dict[Word, str] = {"FASTER": "faster", "SAME": "the same", "SLOWER": "slower", "UNCLEAR": "unclear"}


def our_name(m: Measurement) -> str:
    """Returns the kernel that ran, or the requested one."""
    return m.kernel or m.contender


def resource_name(resource: str) -> str:
    """Returns a resource's name in a sentence."""
    return {"memory": "memory", "tensor cores": "the tensor cores", "call": "the call itself"}.get(
        resource, f"the {resource}"
    )


def _fastest(best: Measurement | None) -> str:
    if best is None or best.timing is None:
        return "no contender has a time"
    return f"the fastest is {best.contender} with {duration(best.timing.median_us)}"


def _median(m: Measurement) -> float:
    timing: Samples | None = m.timing
    assert timing is not None  # callers pass only timed measurements
    return timing.median_us
