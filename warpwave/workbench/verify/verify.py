"""`warpwave verify`: checks that attention is correct on this machine, and as fast as in the shipped records.

Every kernel that runs here computes a sample of every feature that it supports. Outputs are compared with float64.
Exact probes, whose results are known without arithmetic, find errors that rounding would hide: an extra key, a lost
tile, a read outside of a tensor. If a shipped record is of this card, its cases are timed again beside torch's SDPA.
The results are written to a file that can be shared.
"""

from __future__ import annotations

import datetime
import itertools
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import warpwave
from warpwave import dispatch
from warpwave.errors import InvalidInput
from warpwave.gpu import Gpu, current_gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench import terminal
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.correctness import Sample, Verdict
from warpwave.workbench.bench.inputs import call_arguments, make_operands
from warpwave.workbench.bench.records import Measurement, RecordError, Records, RecordWriter
from warpwave.workbench.bench.timing import CaptureFailed, Ratio, Samples, ratio_if_paired, time_interleaved
from warpwave.workbench.bench.unpaired import unpaired_ratio
from warpwave.workbench.bench.workloads import case_name
from warpwave.workbench.terminal import in_columns
from warpwave.workbench.verify.selfcheck import FEATURES_OF_DTYPE, PROBES, SEED, gates, probe_problem, problem_of

ROUNDS = 6  # the smallest number that gives an interval
MOST_TIMED = 12  # cases of the shipped records, the same number of each suite
LAST_TIMED = 105.0  # seconds; no case is started later, so that the command ends within two minutes
MOST_COMPILERS = 12  # each with a CUDA context of its own, half a gigabyte of the GPU's memory
SLOWER_THAN_CARDS_DIFFER = 0.85  # cards of one kind, and one card hot and cool, differ by 10 to 15 %


@dataclass(frozen=True)
class Line:
    """One line of the verdict.

    Args:
        kernel: its name.
        what: dtype and feature, or the probe.
        passed: whether the check passed.
        detail: the error in units of the rounding model's error, or what is wrong.
    """

    kernel: str
    what: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Speed:
    """One case of the shipped record, timed again.

    Args:
        case: its name.
        now, then: our times here and in the record.
        now_over_sdpa, then_over_sdpa: how many times as fast as torch's SDPA we are and were, by paired rounds; None
            where SDPA could not run.
    """

    case: str
    now: Samples
    then: Samples
    now_over_sdpa: Ratio | None
    then_over_sdpa: Ratio | None

    @property
    def ratio(self) -> Ratio:
        """The speed here over the speed in the record; below 1 is slower."""
        return unpaired_ratio(self.then.samples_us, self.now.samples_us)

    @property
    def is_slow(self) -> bool:
        """Whether it is slower than the usual difference between cards of one model."""
        return self.ratio.high95 is not None and self.ratio.high95 < SLOWER_THAN_CARDS_DIFFER


@dataclass
class Outcome:
    """All results of the command."""

    gpu: Gpu
    lines: list[Line] = field(default_factory=list)
    refused: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)
    no_speed: str = ""
    broken: str = ""

    @property
    def wrong(self) -> list[Line]:
        return [line for line in self.lines if not line.passed]

    @property
    def passed(self) -> bool:
        """Whether every check ran and passed."""
        return bool(self.lines) and not self.wrong and not self.broken


# Everything -----------------------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    """The GPU's context is lost, so this process cannot run anything on it."""


def check_kernel(module: Any, outcome: Outcome, device: torch.device, say: Callable[[Line], None]) -> list[Measurement]:
    """Checks one kernel on every case of the sample that it supports. Returns the verdicts as records."""
    name, gpu = module.NAME, outcome.gpu
    refused = outcome.refused.setdefault(name, {})
    measured = []

    def add(what: str, passed: bool, detail: str) -> None:
        line = Line(name, what, passed, detail)
        outcome.lines.append(line)
        say(line)

    for dtype, features in FEATURES_OF_DTYPE.items():
        for feature in features:
            problem, what = problem_of(feature, dtype), f"{dtype} {feature}"
            if reasons := module.why_not(problem, gpu):
                refused[what] = reasons
                continue
            try:
                verdict = gates(name, problem, device)
            except Exception as error:  # any exception of a kernel is a finding
                add(what, False, _said(error))
                _check_alive(device, f"{name}, {what}")
                continue
            detail = verdict.reason
            if verdict.passed and verdict.error_ratio is not None:
                detail = f"error {verdict.error_ratio:.2f} x the rounding model's"
            add(what, verdict.passed, detail)
            measured.append(_record(name, what, problem, verdict))
    for probe, (ask, probed, needs_lse) in PROBES.items():
        for feature in probed:
            problem, what = probe_problem(feature, module, gpu, needs_lse), f"{probe}, {feature}"
            if reasons := module.why_not(problem, gpu):
                refused[what] = reasons
                continue
            try:
                wrong = ask(name, problem, device)
            except Exception as error:
                wrong = _said(error)
                _check_alive(device, f"{name}, {what}")
            add(what, not wrong, wrong or "exact")
    return measured


def _record(kernel: str, what: str, problem: AttentionProblem, verdict: Verdict) -> Measurement:
    return Measurement(
        suite="verify",
        case=what,
        problem=problem,
        contender=f"warpwave {kernel}",
        kernel=kernel,
        seed=SEED,
        verdict=verdict,
        refusal="checked, not timed" if verdict.passed else f"wrong: {verdict.reason}",
    )


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _check_alive(device: torch.device, after: str) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise Broken(f"after {after} the GPU fails with: {_said(error)}") from None


def asked_of(modules: Sequence[Any], gpu: Gpu) -> list[tuple[str, AttentionProblem]]:
    """Returns (kernel, call) of every check that runs on a GPU, without duplicates."""
    jobs: dict[tuple[str, AttentionProblem], None] = {}
    for module in (module for module in modules if module.NEEDS_GPU):
        problems = [problem_of(f, dtype) for dtype, features in FEATURES_OF_DTYPE.items() for f in features]
        problems += [probe_problem(f, module, gpu, lse) for _, features, lse in PROBES.values() for f in features]
        jobs |= dict.fromkeys((module.NAME, p) for p in problems if not module.why_not(p, gpu))
    return list(jobs)


def compile_ahead(jobs: Sequence[tuple[str, AttentionProblem]], device: torch.device) -> None:
    """Compiles all calls in parallel into Triton's cache. Errors are ignored here, because the checks report them.

    It uses processes, because the first half of a compilation is Python, which threads could not run in parallel.
    """
    workers = min(MOST_COMPILERS, os.cpu_count() or 1, len(jobs))
    if not workers:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            list(pool.map(_compile_one, jobs, itertools.repeat(str(device)), chunksize=1))
        except BrokenProcessPool:  # a compiler crashed its process; the checks will report the kernel
            return


def _compile_one(job: tuple[str, AttentionProblem], device: str) -> None:
    name, problem = job
    try:
        warpwave.warmup([problem], device, kernel=name)
    except Exception:
        return


# Speed ----------------------------------------------------------------------------------------------------------------


def shipped_cases(records: Records, gpu_name: str) -> list[tuple[Measurement, Measurement | None]]:
    """Returns (ours, torch's SDPA) for the cases of plain `auto` calls in the newest shipped run on this card."""
    same = {key: e for key, e in records.environments.items() if (e.get("gpu") or {}).get("name") == gpu_name}
    found: dict[AttentionProblem, tuple[str, Measurement, Measurement | None]] = {}
    for key, ours in records.measurements:
        if key not in same or ours.contender != "warpwave auto" or ours.timing is None or ours.problem.packed:
            continue
        if ours.mode != "auto" or ours.timing.input_sets != 1 or ours.problem.requires_grad:
            continue
        date = str(same[key].get("date", ""))
        if ours.problem in found and found[ours.problem][0] >= date:
            continue
        sdpa = next(
            (
                m
                for other, m in records.measurements
                if other == key and m.problem == ours.problem and m.contender == "sdpa_default"
                if m.timing is not None and m.mode == ours.mode and m.timing.input_sets == 1
            ),
            None,
        )
        found[ours.problem] = (date, ours, sdpa)
    of_suite: dict[str, list[tuple[Measurement, Measurement | None]]] = {}
    for _, ours, sdpa in found.values():
        of_suite.setdefault(ours.suite, []).append((ours, sdpa))
    each = max(1, MOST_TIMED // max(1, len(of_suite)))
    # An odd step, because full and causal cases alternate. Suites take turns, because time may run out.
    chosen = [cases[:: -(-len(cases) // each) | 1] for cases in of_suite.values()]
    return [case for turn in itertools.zip_longest(*chosen) for case in turn if case is not None]


def time_again(
    ours: Measurement, sdpa: Measurement | None, device: torch.device
) -> tuple[Speed | None, list[Measurement], str]:
    """Returns (the case timed again, its records, why it could not be timed)."""
    from warpwave.workbench.bench.peers import PEERS, PeerUnavailable

    problem = ours.problem
    operands = make_operands(problem, device, seed=ours.seed)
    sample = Sample(problem, operands, seed=ours.seed)

    def our_call() -> Any:
        return warpwave.attention(*operands[:3], **call_arguments(problem, operands))

    untried = Measurement(suite="verify", case=case_name(problem), problem=problem, contender="", seed=ours.seed)
    explanation = warpwave.explain(problem, gpu=current_gpu(device))
    kernel, config = explanation.kernel or "", asdict(explanation.config)
    verdict = sample.judge(our_call())
    mine = replace(untried, contender=ours.contender, kernel=kernel, config=config, verdict=verdict)
    if not verdict.passed:
        wrong = f"wrong: {verdict.reason}"
        return None, [replace(mine, refusal=wrong)], wrong
    contenders: dict[str, Callable[[], object]] = {"ours": our_call}
    theirs = None
    try:
        prepared = PEERS["sdpa_default"](problem, operands)
        theirs = replace(untried, contender="sdpa_default", kernel=prepared.kernel)
        theirs = replace(theirs, verdict=sample.judge(prepared.to_out(prepared.call())))
        if theirs.verdict is not None and theirs.verdict.passed:
            contenders["sdpa"] = prepared.call
    except PeerUnavailable:
        pass
    before = environment.snapshot(device)
    try:
        timings = time_interleaved(contenders, device=device, rounds=ROUNDS)
    except CaptureFailed as failure:
        return None, [replace(mine, refusal=failure.reason)], failure.reason
    after = environment.snapshot(device)
    measured = [replace(mine, timing=timings["ours"], gpu_before=before, gpu_after=after)]
    if theirs is not None and "sdpa" in timings:
        measured.append(replace(theirs, timing=timings["sdpa"], gpu_before=before, gpu_after=after))
    assert ours.timing is not None  # shipped_cases returns only timed cases
    then = None if sdpa is None or sdpa.timing is None else ratio_if_paired(sdpa.timing, ours.timing)
    now = ratio_if_paired(timings["sdpa"], timings["ours"]) if "sdpa" in timings else None
    return Speed(case_name(problem), timings["ours"], ours.timing, now, then), measured, ""


def describe_speed(speed: Speed) -> str:
    """Returns one line: our time and the record's, and both relative to SDPA at the same clocks."""
    text = f"{speed.case}: {speed.now.median_us:,.1f} us, record {speed.then.median_us:,.1f}"
    ratio = speed.ratio
    interval = "" if ratio.low95 is None else f" [{ratio.low95:.2f}, {ratio.high95:.2f}]"
    text += f" ({ratio.median:.2f}{interval} x as fast as the record{', SLOW' if speed.is_slow else ''})"
    if speed.now.method != speed.then.method:
        text += f" [{speed.now.method}, the record {speed.then.method}: these cannot be compared]"
    if speed.now_over_sdpa is not None:
        r = speed.now_over_sdpa
        interval = "" if r.low95 is None else f" [{r.low95:.2f}, {r.high95:.2f}]"
        then = "" if speed.then_over_sdpa is None else f", record {speed.then_over_sdpa.median:.2f}"
        text += f"; {r.median:.2f}{interval} x torch's SDPA{then}"
    return text


# The command ----------------------------------------------------------------------------------------------------------


def default_out(gpu: Gpu) -> Path:
    """Returns a file name with the card and the time."""
    card = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%SZ")
    return Path(f"warpwave-verify-{card}-{now}.jsonl")


def run(*, device_name: str | None, out: Path | None, kernels: Sequence[str], as_json: bool) -> int:
    """Runs the command. Returns the exit code: 1 if a result was wrong.

    Raises:
        InvalidInput: the request is invalid, or the record cannot be written.
    """
    started = time.monotonic()
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = current_gpu(device)
    modules = _modules(kernels, gpu)
    path = out or default_out(gpu)
    if os.path.isfile(path):
        raise InvalidInput(f"{path} already exists; name another file with --out")
    try:
        writer = RecordWriter(path, environment.describe(device))
    except RecordError as error:
        raise InvalidInput(str(error)) from None

    say: Callable[[str], None] = _quiet if as_json else terminal.say
    outcome = Outcome(gpu)
    say(f"warpwave {warpwave.__version__} on {gpu.name} ({gpu.arch}), torch {torch.__version__}")
    try:
        cases = _cases_of_record(outcome, device)
        if gpu.vendor in ("nvidia", "amd"):
            jobs = asked_of(modules, gpu) + [("auto", ours.problem) for ours, _ in cases]
            say(f"compiling {_counted(len(jobs), 'call')} ...")
            compile_ahead(jobs, device)
            say(f"compiled after {time.monotonic() - started:.0f} s")
        for module in modules:
            for measurement in check_kernel(module, outcome, device, lambda line: say(describe_line(line))):
                writer.write(measurement)
            if refused := outcome.refused[module.NAME]:
                say(describe_refusals(module.NAME, refused))
        say(f"checked after {time.monotonic() - started:.0f} s\n")
        for measurement in _compare_with_record(cases, outcome, device, say, started + LAST_TIMED):
            writer.write(measurement)
    except Broken as error:
        outcome.broken = str(error)
    except RecordError as error:
        raise InvalidInput(str(error)) from None
    seconds = time.monotonic() - started
    if as_json:
        terminal.say(json.dumps(as_data(outcome, path, seconds), indent=1))
    else:
        terminal.say(f"\n{verdict(outcome)}\nIt took {seconds:.0f} s; the record is {path}.")
    return 0 if outcome.passed else 1


def _quiet(text: str) -> None:
    pass


def _modules(kernels: Sequence[str], gpu: Gpu) -> list[Any]:
    """Returns the named kernels, or all that can run a part of the sample here."""
    by_name = {module.NAME: module for module in dispatch.KERNELS}
    for name in kernels:
        if name not in by_name:
            raise InvalidInput(f"no kernel is called {name!r}; there are {', '.join(by_name)}")
    plain = [problem_of("plain", dtype) for dtype in FEATURES_OF_DTYPE]
    chosen = []
    for name in kernels or by_name:
        reasons = [by_name[name].why_not(problem, gpu) for problem in plain]
        if not all(reasons):
            chosen.append(by_name[name])
        elif kernels:
            raise InvalidInput(f"kernel {name!r} does not run here: {'; '.join(reasons[0])}")
    return chosen


def _cases_of_record(outcome: Outcome, device: torch.device) -> list[tuple[Measurement, Measurement | None]]:
    from warpwave.workbench.report import shipped

    if device.type != "cuda":
        outcome.no_speed = "no speed was measured, because there is no GPU"
        return []
    cases = shipped_cases(shipped.records(), torch.cuda.get_device_properties(device).name)
    if not cases:
        outcome.no_speed = f"no record of {outcome.gpu.name} ships with warpwave, so its speed was not compared"
    return cases


def _compare_with_record(
    cases: Sequence[tuple[Measurement, Measurement | None]],
    outcome: Outcome,
    device: torch.device,
    say: Callable[[str], None],
    until: float,
) -> list[Measurement]:
    measured: list[Measurement] = []
    for i, (ours, sdpa) in enumerate(cases):
        if time.monotonic() > until:
            say(f"not timed  {_counted(len(cases) - i, 'more case')}: the time limit is reached")
            break
        try:
            speed, records, why = time_again(ours, sdpa, device)
        except RuntimeError as error:  # out of memory, on a shared card
            _check_alive(device, case_name(ours.problem))
            say(f"not timed  {case_name(ours.problem)}: {_said(error)}")
            continue
        measured += records
        if speed is None:
            if why.startswith("wrong"):
                outcome.lines.append(Line("auto", case_name(ours.problem), False, why))
            say(f"not timed  {case_name(ours.problem)}: {why}")
            continue
        outcome.speeds.append(speed)
        say(f"speed  {describe_speed(speed)}")
    return measured


def describe_line(line: Line) -> str:
    """Returns one line of text."""
    return in_columns(("pass" if line.passed else "FAIL", line.kernel, line.what, line.detail), _widths())


def describe_refusals(kernel: str, refused: dict[str, list[str]]) -> str:
    """Returns the reasons why a kernel refused cases of the sample, without duplicates."""
    reasons = dict.fromkeys(reason for found in refused.values() for reason in found)
    return in_columns(("", kernel, f"refuses {len(refused)} of the sample: {'; '.join(reasons)}"), _widths())


def _widths() -> tuple[int, int, int, int]:
    """Returns the widths of the columns, for all kernels and checks, because lines are printed one by one."""
    checks = [f"{dtype} {feature}" for dtype, features in FEATURES_OF_DTYPE.items() for feature in features]
    checks += [f"{probe}, {feature}" for probe, (_, features, _) in PROBES.items() for feature in features]
    names = (module.NAME for module in dispatch.KERNELS)
    return len("pass"), max(map(len, names)), max(map(len, checks), default=0), 0


def verdict(outcome: Outcome) -> str:
    """Returns the verdict in one sentence."""
    total, wrong = len(outcome.lines), outcome.wrong
    if outcome.broken:
        return (
            f"FAILED: {outcome.broken}; the remaining checks did not run. `warpwave doctor --bundle` collects a report."
        )
    if wrong:
        names = ", ".join(dict.fromkeys(line.kernel for line in wrong))
        return (
            f"FAILED: {len(wrong)} of {_counted(total, 'check')} found wrong results of {names}: do not use "
            f"{'it' if ',' not in names else 'them'} here, and please report it with `warpwave doctor --bundle FILE`."
        )
    if not outcome.lines:
        return f"FAILED: no kernel ran any check on {outcome.gpu.name}."
    where = f"on {outcome.gpu.name}"
    if outcome.gpu.vendor == "interpreter":
        where = "in Triton's interpreter, which does not check a GPU"
    right = f"All of {_counted(total, 'check')} passed {where}"
    if not outcome.speeds:
        return f"{right}; {outcome.no_speed or 'no case could be timed'}."
    comparable = [s for s in outcome.speeds if s.now.method == s.then.method]
    ratios = {s.case: s.ratio.median for s in comparable}
    if not ratios:
        return f"{right}; no time can be compared with the record."
    mean, worst = geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
    slow = sum(s.is_slow for s in comparable)
    how = "as expected of another card of this kind (they differ by 10 to 15 %)"
    if slow:
        how = f"{slow} of them slower than cards of one kind differ: see `warpwave doctor` for clocks and processes"
    return (
        f"{right}, and {_counted(len(ratios), 'case')} ran at {mean:.2f} x the shipped record's speed in the geometric "
        f"mean, {ratios[worst]:.2f} x at the least ({worst}), {how}."
    )


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def as_data(outcome: Outcome, path: Path, seconds: float) -> dict[str, Any]:
    """Returns the outcome as data for `--json`."""
    return {
        "warpwave": warpwave.__version__,
        "gpu": asdict(outcome.gpu),
        "passed": outcome.passed,
        "verdict": verdict(outcome),
        "checks": [asdict(line) for line in outcome.lines],
        "refused": outcome.refused,
        "speeds": [
            {
                "case": s.case,
                "now_us": s.now.median_us,
                "record_us": s.then.median_us,
                "ratio": asdict(s.ratio),
                "over_sdpa": None if s.now_over_sdpa is None else asdict(s.now_over_sdpa),
                "record_over_sdpa": None if s.then_over_sdpa is None else asdict(s.then_over_sdpa),
            }
            for s in outcome.speeds
        ],
        "seconds": seconds,
        "record": str(path),
    }
