"""Measures one case: prepares and checks every contender, and times those that passed, interleaved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from warpwave.operands import Operands
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.contenders import EMPTY_KERNEL, TimeLimit, empty_kernel, time_limit
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands, operand_bytes, sets_for_cold_cache
from warpwave.workbench.bench.peers import Peer, PeerUnavailable, Prepared
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.timing import CaptureFailed, Samples, host_time_interleaved, time_modes
from warpwave.workbench.bench.workloads import Case
from warpwave.workbench.terminal import printable

SEED = 0

Say = Callable[[str], None]


class DeviceLost(RuntimeError):
    """A contender left the GPU unusable for the rest of this process."""


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        device: the device to measure on.
        modes: timing modes; `"streams"` implies `"graph"`, with which it is compared.
        rounds: number of timing rounds.
        peer_timeout_s: limit of a contender's preparation, including compilation; None is unlimited.
        host: whether host time is measured too; for long calls that takes most of a run.
    """

    device: torch.device
    modes: tuple[str, ...] = ("auto",)
    rounds: int = 9
    peer_timeout_s: float | None = 120.0
    host: bool = True


@dataclass(frozen=True)
class _Ready:
    """A contender that passed, with one call per set of inputs."""

    calls: tuple[Callable[[], object], ...]
    eager: bool


def measure(
    case: Case,
    suite: str,
    contenders: Mapping[str, Peer],
    settings: Settings,
    *,
    skip: Mapping[str, str] | None = None,
    about_to: Callable[[str], None] = lambda contender: None,
    say: Say = lambda detail: None,
) -> list[Measurement]:
    """Measures every contender on one case, in the given order: one measurement per mode, or one refusal.

    Args:
        skip: contender -> the reason to leave it out.
        about_to: called with each contender's name before its code runs, and with "" once all are prepared.
        say: called with the current step.

    Raises:
        DeviceLost: a contender left the GPU unusable.
    """
    untried = {
        name: Measurement(
            suite=suite,
            case=case.name,
            problem=case.problem,
            contender=name,
            seed=SEED,
            mode=settings.modes[0],
            goal=case.goal,
        )
        for name in contenders
    }
    say("making inputs")
    try:
        sets, sample = _inputs(case, settings.device)
    except CannotMake as error:
        return [dataclasses.replace(m, refusal=str(error)) for m in untried.values()]
    results: dict[str, Measurement] = {}
    ready: dict[str, _Ready] = {}
    for name, prepare in contenders.items():
        say(f"checking {name}")
        m = untried[name]
        if skip and name in skip:
            results[name] = dataclasses.replace(m, refusal=skip[name])
            continue
        about_to(name)
        results[name], calls = _check(m, prepare, sets, sample, settings)
        if calls is not None:
            ready[name] = calls
    about_to("")
    if case.goal is not None and case.goal.over_launch_us is not None:
        results[EMPTY_KERNEL], yardstick = _yardstick(case, suite, settings)
        if yardstick is not None:
            ready[EMPTY_KERNEL] = yardstick
    return _time(case, results, ready, settings, say)


class CannotMake(RuntimeError):
    """The inputs of a case do not fit the device."""


def _inputs(case: Case, device: torch.device) -> tuple[list[Operands], Sample]:
    """Returns every set of inputs of a case, and the sample that judges their results.

    Raises:
        CannotMake: the inputs do not fit the device.
    """
    count = 1
    if case.hot is False and device.type == "cuda":
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        count = sets_for_cold_cache(case.problem, l2_bytes)
    needed, room = count * operand_bytes(case.problem), _memory_bytes(device)
    if room is not None and needed > room:
        # A system that overcommits memory would kill the process instead of failing the allocation.
        raise CannotMake(f"its inputs take {needed / 1e9:,.1f} GB and {device.type} memory is {room / 1e9:,.1f} GB")
    try:
        sets = [make_operands(case.problem, device, seed=SEED + i) for i in range(count)]
        operands = type(sets[0])(*(None if t is None else t.detach() for t in sets[0]))
        return sets, Sample(case.problem, operands, seed=SEED)
    except (RuntimeError, MemoryError) as error:
        raise CannotMake(f"its inputs could not be made: {_first_line(error)}") from error


def _memory_bytes(device: torch.device) -> int | None:
    """Returns the device's memory; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, and systems without these names
        return None


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error message, shortened for a table. Libraries put any text into it."""
    return printable((str(error).strip().splitlines() or [""])[0])[:1000]


def _check(
    m: Measurement, prepare: Peer, sets: Sequence[Operands], sample: Sample, settings: Settings
) -> tuple[Measurement, _Ready | None]:
    """Prepares a contender on every set of inputs and judges its result on the first."""
    try:
        with time_limit(settings.peer_timeout_s):
            prepared = [prepare(m.problem, operands) for operands in sets]
            verdict = sample.judge(prepared[0].to_out(prepared[0].call()).detach())
            peak = _peak_memory(prepared[0], settings.device)
    except PeerUnavailable as unavailable:
        return dataclasses.replace(m, refusal=_first_line(unavailable)), None
    except TimeLimit:
        reason = f"not ready after {settings.peer_timeout_s:g} s"
        return dataclasses.replace(m, refusal=reason), None
    except Exception as error:  # a peer's compiler may raise anything, which must not end the run
        reason = f"{type(error).__name__}: {_first_line(error)}"
        _still_usable(settings.device, m, reason)
        return dataclasses.replace(m, refusal=reason), None
    first = prepared[0]
    m = dataclasses.replace(m, kernel=first.kernel, config=first.config, verdict=verdict, peak_memory_bytes=peak)
    if not verdict.passed and not first.timed_if_wrong:
        return dataclasses.replace(m, refusal=f"wrong, so not timed: {verdict.reason}"), None
    return m, _Ready(tuple(p.call for p in prepared), first.eager)


def _peak_memory(prepared: Prepared, device: torch.device) -> int | None:
    """Returns the peak memory that one call allocates on top of the memory before it; None on a CPU.

    A workspace that a library keeps between calls exists before the call, so it is not counted.
    """
    if device.type == "cpu":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    prepared.call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - int(before)


def _still_usable(device: torch.device, m: Measurement, reason: str) -> None:
    if device.type == "cpu":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # it may have run out of memory
    except RuntimeError as error:
        raise DeviceLost(f"{m.contender} on {m.case} left the GPU unusable: {reason}") from error


def _yardstick(case: Case, suite: str, settings: Settings) -> tuple[Measurement, _Ready | None]:
    m = Measurement(suite=suite, case=case.name, problem=case.problem, contender=EMPTY_KERNEL, mode=settings.modes[0])
    try:
        call = empty_kernel(settings.device)
        call()
    except PeerUnavailable as unavailable:
        return dataclasses.replace(m, refusal=str(unavailable)), None
    return dataclasses.replace(m, kernel="an empty Triton kernel"), _Ready((call,), eager=False)


def _time(
    case: Case, results: dict[str, Measurement], ready: dict[str, _Ready], settings: Settings, say: Say
) -> list[Measurement]:
    device = settings.device
    before = environment.snapshot(device)
    timings, dropped = _time_modes(case, ready, settings, say)
    after = environment.snapshot(device)
    hosts: dict[str, Samples] = {}
    if device.type != "cpu" and settings.host:  # on a CPU the host time is the time already measured
        say("timing the host")
        eager = {name: r.calls for name, r in ready.items() if r.eager}
        if eager:
            hosts = host_time_interleaved(eager, device=device, rounds=settings.rounds)
    measured = []
    for name, m in results.items():
        timed = [
            dataclasses.replace(
                m, mode=mode, timing=times[name], host=hosts.get(name), gpu_before=before, gpu_after=after
            )
            for mode, times in timings.items()
            if name in times
        ]
        refused = [
            dataclasses.replace(m, mode=mode, refusal=reason) for (mode, n), reason in dropped.items() if n == name
        ]
        measured += (timed + refused) or [m]
    return measured


def _time_modes(
    case: Case, ready: dict[str, _Ready], settings: Settings, say: Say
) -> tuple[dict[str, dict[str, Samples]], dict[tuple[str, str], str]]:
    """Returns the timings by mode, and why some contenders are missing: those that a CUDA graph cannot capture."""
    calls = {name: r.calls for name, r in ready.items()}
    dropped: dict[tuple[str, str], str] = {}
    while len(dropped) < len(calls) * len(settings.modes):
        say("warming up")
        try:
            timings = time_modes(
                calls,
                settings.modes,
                device=settings.device,
                rounds=settings.rounds,
                flush_l2=case.hot is not True,
                on_round=lambda done: say(f"round {done} of {settings.rounds}"),
                leave_out=dropped,
            )
        except CaptureFailed as failure:
            dropped[failure.mode, failure.name] = failure.reason
        else:
            return timings, dropped
    return {}, dropped
