"""The contents of a report as plain data, in the order of the page. The HTML page and the Markdown both use it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import warpwave
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.scaling import AXES
from warpwave.workbench.bench.timing import Samples
from warpwave.workbench.bench.workloads import suite_names
from warpwave.workbench.report.bounds import MachineRates, rates_of, share
from warpwave.workbench.report.curves import Family, RooflineData, contenders, families, roofline_data
from warpwave.workbench.report.figures import NARROW_SPACE, NO_FIGURE, count, figure, interval, listed, percent, span
from warpwave.workbench.report.machines import Machine, Source, machines
from warpwave.workbench.report.verdicts import CaseResult, case_results, how_fast, is_it_right, what_bounds_it
from warpwave.workbench.report.waterfall import COLUMNS, Fall, falls, note, rows


@dataclass(frozen=True)
class Column:
    """A table's column; figures are right-aligned."""

    name: str
    is_figure: bool = True


@dataclass(frozen=True)
class Group:
    """A group of rows with a heading and a remark; the heading is empty if there is only one group."""

    heading: str
    remark: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """A table whose cells are text."""

    title: str
    note: str
    columns: Sequence[Column]
    groups: Sequence[Group]

    @property
    def rows(self) -> int:
        return sum(len(group.rows) for group in self.groups)


@dataclass(frozen=True)
class MachineSection:
    """The report's section about one machine.

    Attributes:
        name: the device's name.
        heading: the name, with the suites if another section has the same name.
        provenance: where and when the numbers were measured.
        is_shipped: whether the numbers ship with the package.
        answers: question -> sentences, on the first screen.
        cases: the cases with their verdicts.
        contenders: the contenders, in the order of colors.
        roofline, families: data of the plots.
        bounds: a table of each case's bound with its arithmetic; None if no rate is known.
        rates_notes: missing rates of the machine, and the sources of the known ones.
        tables: measurements, then host time and memory if they were measured.
        untimed: contenders without a time, with reasons and cases.
        environment: label -> value.
        reproduce: commands.
        reproduce_notes: further requirements.
        falls: the steps from the bound to the measured time, for the waterfalls.
    """

    name: str
    provenance: str
    is_shipped: bool
    answers: Sequence[tuple[str, Sequence[str]]]
    cases: Sequence[CaseResult]
    contenders: Sequence[str]
    roofline: RooflineData
    families: Sequence[Family]
    bounds: Table | None
    rates_notes: Sequence[str]
    tables: Sequence[Table]
    untimed: Table | None
    environment: Sequence[tuple[str, str]]
    reproduce: Sequence[str]
    reproduce_notes: Sequence[str]
    falls: Sequence[Fall] = ()
    suites: Sequence[str] = ()
    heading: str = ""


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    title: str
    version: str
    sections: Sequence[MachineSection]
    files: Sequence[str]


def report(sources: Sequence[Source], *, shorten: bool = False) -> Report:
    """Returns the report of all sources.

    Args:
        sources: the sources, in order.
        shorten: keep only ours and the best peer in the roofline and in the table of measurements, for a smaller page.
    """
    found = machines(sources)
    names = list(dict.fromkeys(machine.name for machine in found))
    title = f"Attention on {listed(names)}" if names else "No measurements"
    files = [name for source in sources for name in source.names]
    sections = [section(machine, shorten=shorten) for machine in found]
    return Report(title, warpwave.__version__, [_headed(s, sections) for s in sections], files)


def _headed(section: MachineSection, sections: Sequence[MachineSection]) -> MachineSection:
    """Returns the section with a heading that is unique, as far as its suites allow."""
    alone = sum(s.name == section.name for s in sections) == 1
    return replace(section, heading=section.name if alone else f"{section.name}: {listed(section.suites)}")


def section(machine: Machine, *, shorten: bool = False) -> MachineSection:
    """Returns the section of one machine."""
    known = rates_of(machine)
    cases = case_results(machine, known.rates)
    lost = falls(cases, machine)
    bounds_answer = [*what_bounds_it(cases), *known.passed] or ["Not known here.", *known.notes]
    return MachineSection(
        name=machine.name,
        provenance=provenance(machine),
        is_shipped=machine.source.origin == "shipped",
        answers=[
            ("How fast is it?", how_fast(cases) or ["No kernel of ours was timed."]),
            ("Is it right?", is_it_right(cases)),
            ("What bounds it?", bounds_answer),
        ],
        cases=cases,
        contenders=contenders(cases),
        roofline=roofline_data(cases, shorten=shorten),
        families=families(cases),
        bounds=bounds_table(cases),
        rates_notes=_rates_notes(known),
        tables=[
            t
            for t in (
                losses_table(lost),
                measurements_table(cases, shorten=shorten),
                matrix("Host time of an eager call, in µs", HOST_NOTE, cases, _host_us),
                matrix("Peak memory of one call above its inputs, in MB", MEMORY_NOTE, cases, _peak_mb),
            )
            if t is not None
        ],
        untimed=untimed_table(cases),
        environment=environment_facts(machine),
        reproduce=commands(machine),
        reproduce_notes=reproduce_notes(machine),
        falls=lost,
        suites=list(dict.fromkeys(case.timing_group[1] for case in cases)),
    )


def provenance(machine: Machine) -> str:
    """Returns where and when the numbers were measured."""
    when = f" on {listed(machine.dates)}" if machine.dates else ""
    if machine.source.origin == "here":
        return f"This machine's own numbers, measured{when}."
    if machine.source.origin == "shipped":
        return f"Measured on an {machine.name}{when}, not on this machine: a record that ships with warpwave."
    files = f" Read from {listed(machine.source.names)}." if machine.source.names else ""
    return f"Measured{when}.{files}"


def _rates_notes(known: MachineRates) -> list[str]:
    notes = list(known.notes)
    if known.sources:
        notes.append(f"Data sheet: {'; '.join(known.sources)}.")
    return notes


# Tables --------------------------------------------------------------------------------------------------------------

HOST_NOTE = "Time until the call returns on the host; the device may still be working."
MEMORY_NOTE = "Allocated during the call, including its output. 1 MB is 10⁶ bytes."


def losses_table(found: Sequence[Fall]) -> Table | None:
    """Returns the table of losses of our cases."""
    if not found:
        return None
    words = ("case", "kernel", "lost by", "first to change")
    columns = [Column(name, name not in words) for name in COLUMNS]
    return Table("Where the time went", note(found), columns, [Group("", "", rows(found))])


def measurements_table(cases: Sequence[CaseResult], *, shorten: bool = False) -> Table | None:
    """Returns the table of all timed contenders, case by case."""
    rates = list(dict.fromkeys(line.rates.name for case in cases for line in case.rooflines))
    columns = [
        Column("contender", False),
        Column("ran", False),
        Column("µs"),
        Column("TFLOP/s"),
        Column("GB/s"),
        Column("Mtoken/s"),
        *(Column(f"share of bound, {name}") for name in rates),
        Column("error"),
        Column("ours is x as fast [95 %]"),
    ]
    groups = []
    for case in cases:
        shown = [m for m in case.timed if not shorten or m in (case.ours, case.best)]
        if shown:
            heading = Group(case.name, how_timed(case), [_row(m, case, rates) for m in shown])
            groups.append(heading)
    if not groups:
        return None
    note = (
        "Times are medians over rounds. TFLOP/s counts the two products over visible pairs, GB/s the compulsory bytes, "
        "tokens the queries. Error is the RMS distance from float64 in units of the rounding model's error: 1 is the "
        "cost of rounding alone. A contender that misses the accuracy gates is marked inaccurate and left out of the "
        "plots. The last column is the median of the paired ratios; above 1, ours is faster."
    )
    if shorten:
        note += " Shortened to ours and the best peer of each case, because the page would otherwise be too large."
    return Table("All measurements", note, columns, groups)


def _row(m: Measurement, case: CaseResult, rates: Sequence[str]) -> list[str]:
    assert m.timing is not None  # callers pass only timed measurements
    ratio = case.speed_against(m)
    against = "" if m is case.ours else NO_FIGURE if ratio is None else f"{ratio.median:.2f} {interval(ratio)}"
    shares = []
    for name in rates:
        line = next((r for r in case.rooflines if r.rates.name == name), None)
        bound = None if line is None or m.is_yardstick else line.binding
        shares.append(NO_FIGURE if bound is None else percent(share(m, bound)))
    error = None if m.verdict is None else m.verdict.error_ratio
    return [
        f"{m.contender} (inaccurate)" if m.inaccurate else m.contender,
        m.kernel or NO_FIGURE,
        figure(m.timing.median_us, 4),
        figure(m.tflops),
        figure(m.bandwidth_gbps),
        figure(None if m.tokens_per_s is None else m.tokens_per_s * 1e-6),
        *shares,
        NO_FIGURE if error is None else f"{error:.2f}",
        against,
    ]


def how_timed(case: CaseResult) -> str:
    """Returns the problem and the timing method in one line."""
    timing = case.timed[0].timing
    assert timing is not None  # all of `timed` have a time
    return f"{case.timed[0].problem.describe()}; {method(timing)}"


def method(timing: Samples) -> str:
    """Returns the timing method in words."""
    how = {
        "graph": "inside a CUDA graph",
        "streams": "inside a CUDA graph, on two streams",
        "eager": "eager calls back to back",
        "events": "CUDA events",
    }
    sets = "" if timing.input_sets == 1 else f", {timing.input_sets} sets of inputs in turn"
    cache = ", L2 flushed" if timing.l2_flushed else ", L2 warm" if timing.method != "host clock" and not sets else ""
    rounds = len(timing.samples_us)
    return f"{how.get(timing.method, timing.method)}{sets}{cache}, {count(rounds, 'round')}"


def bounds_table(cases: Sequence[CaseResult]) -> Table | None:
    """Returns the table of each case's bound, with arithmetic that can be checked by hand."""
    columns = [
        Column("case", False),
        Column("rates", False),
        Column("bound by", False),
        Column("least µs"),
        Column("arithmetic", False),
    ]
    rows = [
        [case.name, line.rates.name, line.binding.resource, figure(line.time_us), line.binding.arithmetic]
        for case in cases
        for line in case.rooflines
        if line.binding is not None
    ]
    if not rows:
        return None
    note = "The longest of the bounds by products, exponentials, memory and launch. No implementation is faster."
    return Table("Bounds", note, columns, [Group("", "", rows)])


def matrix(
    title: str, note: str, cases: Sequence[CaseResult], value: Callable[[Measurement], float | None]
) -> Table | None:
    """Returns a table of one figure, by case and contender; None if no contender has it."""
    found: list[tuple[str, dict[str, float]]] = []
    for case in cases:
        values = {m.contender: x for m in case.timed if (x := value(m)) is not None}
        if values:
            found.append((case.name, values))
    if not found:
        return None
    names = list(dict.fromkeys(name for _, values in found for name in values))
    rows = [[case, *(figure(values.get(name)) for name in names)] for case, values in found]
    return Table(title, note, [Column("case", False), *map(Column, names)], [Group("", "", rows)])


def _host_us(m: Measurement) -> float | None:
    return None if m.host is None else m.host.median_us


def _peak_mb(m: Measurement) -> float | None:
    return None if m.peak_memory_bytes is None else m.peak_memory_bytes * 1e-6


def untimed_table(cases: Sequence[CaseResult]) -> Table | None:
    """Returns the contenders without a time and the reasons; a reason shared by many cases appears once."""
    where: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for m in case.measurements:
            if m.timing is None:
                where.setdefault((m.contender, m.refusal or "no reason is recorded"), []).append(case.name)
    if not where:
        return None
    rows = [
        [name, reason, "all cases" if 1 < len(found) == len(cases) else "; ".join(found)]
        for (name, reason), found in where.items()
    ]
    columns = [Column("contender", False), Column("why", False), Column("where", False)]
    return Table(
        "Not timed", "A contender that was wrong, unavailable or refused has no time.", columns, [Group("", "", rows)]
    )


# Environment ---------------------------------------------------------------------------------------------------------


def environment_facts(machine: Machine) -> list[tuple[str, str]]:
    """Returns the facts about the machine and the software; facts that a record lacks are left out."""
    e = machine.environment
    gpu, cpu, code = (dict(e.get(key) or {}) for key in ("gpu", "cpu", "code"))
    memory, limit = gpu.get("memory_bytes"), gpu.get("power_limit_w")
    l2 = gpu.get("l2_bytes")
    commit = code.get("commit")
    facts = [
        ("Date", ", ".join(run.date.replace("T", " ").replace("+00:00", " UTC") for run in machine.runs if run.date)),
        ("GPU", str(gpu.get("name") or "")),
        ("SMs or CUs", str(gpu.get("sm_count") or "")),
        ("Device memory", f"{figure(memory * 1e-9)}{NARROW_SPACE}GB" if memory else ""),
        ("L2", f"{l2 / 2**20:g}{NARROW_SPACE}MiB" if l2 else ""),
        ("Driver", str(gpu.get("driver") or "")),
        ("Power limit", f"{limit:g}{NARROW_SPACE}W" if limit else ""),
        *_readings(machine),
        ("CPU", str(cpu.get("model") or "")),
        ("Cores", str(cpu.get("cores") or "")),
        ("Threads of torch", str(cpu.get("torch_threads") or "")),
        ("Platform", str(e.get("platform") or "")),
        ("Python", str(e.get("python") or "")),
        ("torch", str(e.get("torch") or "")),
        ("Triton", str(e.get("triton") or "")),
        ("CUDA", str(e.get("cuda") or "")),
        ("ROCm", str(e.get("hip") or "")),
        ("cuDNN", str(e.get("cudnn") or "")),
        *((str(name), str(version)) for name, version in (e.get("peers") or {}).items()),
        ("Commit", f"{commit}{', with changes' if code.get('dirty') else ''}" if commit else ""),
        ("Sources", f"SHA-256 {code['source_sha256']}" if code.get("source_sha256") else ""),
    ]
    return [(label, value) for label, value in facts if value]


def _readings(machine: Machine) -> list[tuple[str, str]]:
    """Returns the ranges of clocks, power and temperature around the cases, and the reasons of throttling."""
    before = [m.gpu_before for run in machine.runs for m in run.measurements if m.gpu_before]
    after = [m.gpu_after for run in machine.runs for m in run.measurements if m.gpu_after]

    def values(readings: Sequence[dict[str, Any]], key: str) -> list[float]:
        return [float(r[key]) for r in readings if r.get(key) is not None]

    facts = []
    for label, key, unit in (
        ("SM clock", "sm_mhz", "MHz"),
        ("Memory clock", "memory_mhz", "MHz"),
        ("Power", "power_w", "W"),
        ("Temperature", "temperature_c", "°C"),
    ):
        pair = (span(values(before, key), unit), span(values(after, key), unit))
        if any(pair):
            facts.append((label, f"{pair[0]} before, {pair[1]} after each case's rounds"))
    if before or after:
        held = {reason for r in [*before, *after] for reason in r.get("throttle") or ()}
        facts.append(("Throttling", listed(sorted(held)) if held else "none seen"))
    return facts


# Reproduction -------------------------------------------------------------------------------------------------------


def commands(machine: Machine) -> list[str]:
    """Returns the commands that repeat the measurements."""
    if machine.source.command:
        return [machine.source.command]
    found: dict[str, None] = {}
    for run in machine.runs:
        for suite in dict.fromkeys(m.suite for m in run.measurements):
            part = [m for m in run.measurements if m.suite == suite]
            rounds = max((len(m.timing.samples_us) for m in part if m.timing is not None), default=0)
            kernels = list(dict.fromkeys(m.contender.split(" ", 1)[1] for m in part if m.is_ours))
            command = f"warpwave {_command(suite)}"
            if rounds and suite != "verify":
                command += f" --rounds {rounds}"
            if kernels != ["auto"]:
                command += "".join(f" --kernel {_argument(kernel)}" for kernel in kernels)
            if machine.is_cpu:
                command += " --device cpu"
            found[f"{command} --out RECORD.jsonl"] = None
    return [*found, "warpwave report RECORD.jsonl"]


def _command(suite: str) -> str:
    """Returns the command that measures a suite. A suite that the package does not have is a file of the user."""
    if suite == "verify":
        return "verify"
    if suite in (f"scale {axis}" for axis in AXES):
        return f"bench --{suite}"
    return f"bench {_argument(suite if suite in suite_names() else f'{suite}.toml')}"


def _argument(word: str) -> str:
    """Returns a record's text quoted for a shell, on one line."""
    return shlex.quote(" ".join(word.split()))


def reproduce_notes(machine: Machine) -> list[str]:
    """Returns the further requirements for the same figures."""
    code = machine.environment.get("code") or {}
    where = f"commit {code['commit']}" if code.get("commit") else None
    if where is None and code.get("source_sha256"):
        where = f"the sources whose SHA-256 begins {code['source_sha256']} (the record names no commit)"
    notes = [] if where is None else [f"With {where}."]
    if not machine.is_cpu:
        notes.append(
            "Cards of one model differ, and a card differs with its temperature. Ratios carry over to another card "
            "better than times."
        )
    return notes
