"""Runs a suite: measures its cases one by one, and prints and records each as it finishes."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from warpwave.dispatch import KERNELS
from warpwave.gpu import current_gpu
from warpwave.runtime.triton_or_stub import INTERPRETED
from warpwave.workbench.bench import environment, scaling
from warpwave.workbench.bench.contenders import contenders
from warpwave.workbench.bench.measure import DeviceLost, Settings, measure
from warpwave.workbench.bench.meters import MODES
from warpwave.workbench.bench.peers import PEERS
from warpwave.workbench.bench.progress import Progress
from warpwave.workbench.bench.record_schema import MOST_ROUNDS
from warpwave.workbench.bench.records import (
    Measurement,
    RecordError,
    RecordWriter,
    check_appendable,
    environment_id,
    environment_line,
    measurement_line,
)
from warpwave.workbench.bench.resume import STOPPING, Journal, finished_cases
from warpwave.workbench.bench.table import case_tables, print_table, summary_tables
from warpwave.workbench.bench.workloads import Case, Suite, SuiteError, load_suite, matching
from warpwave.workbench.hardware.catalog import data_sheet
from warpwave.workbench.hardware.measure import load, shipped
from warpwave.workbench.model.roofline import data_sheet_rates, measured_rates
from warpwave.workbench.terminal import complain, say

DEVICE_LOST = 3  # exit code
STOPPED = 128  # plus the signal's number: the exit code that a shell reports for a program ended by a signal
LONGEST_TIMEOUT_S = 1e6  # eleven days; timers have an upper limit


class UsageError(ValueError):
    """The request is invalid, or this machine cannot run it."""


class Stopped(BaseException):
    """A signal stopped the process. It is not an `Exception`, which a library might catch as an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True)
class _Request:
    """The checked request. A case keeps its own kernels only if the command line named none."""

    suite: Suite
    cases: tuple[Case, ...]
    kernels: tuple[str, ...]
    peers: tuple[str, ...]
    settings: Settings


def main(
    suite: str | None,
    *,
    out: Path | None,
    rounds: int = 9,
    json_output: bool = False,
    kernels: Sequence[str] = (),
    peers: Sequence[str] = (),
    modes: Sequence[str] = (),
    only: str = "",
    resume: bool = False,
    peer_timeout_s: float | None = 120.0,
    device: torch.device | str | None = None,
    scale: str | None = None,
) -> int:
    """Measures a suite and prints the results.

    Args:
        suite: name of a suite of the package, or path of a `.toml` file; None if `scale` is given.
        out: file the records are appended to, or None.
        rounds: rounds of timing; at least 6 for confidence intervals, 9 for a goal's verdict.
        json_output: print the records, one JSON object per line, instead of tables.
        kernels: our kernels to measure, by their names in `attention(kernel=...)`; empty for the suite's.
        peers: names of the peers to measure; empty for all, `"none"` for no peer.
        modes: timing modes; empty for the suite's.
        only: measure only cases whose names contain this text.
        resume: skip the cases that `out` already holds.
        peer_timeout_s: seconds that a contender may take to prepare a case; None means no limit.
        device: the device; None is the current GPU, or the CPU without one.
        scale: one of `scaling.AXES`: run that experiment instead of a suite, and interpret its exponents.

    Returns:
        The exit code: 0 if every kernel of ours has a time on every case, including the cases that `out` held before; 1
        if one could not run a case or was wrong; 2 if the request is invalid; 3 if a contender left the GPU unusable;
        128 plus the number of the signal that stopped it, 130 for Ctrl-C. Finished measurements are always written.
    """
    try:
        chosen = _experiment(suite, scale, device)
        request = _check_request(chosen, rounds, kernels, peers, modes, only, resume, out, peer_timeout_s, device)
        if out is not None:
            check_appendable(out)
        facts = environment.describe(request.settings.device)
        held = finished_cases(out, request.suite, request.settings.modes, facts) if resume and out else {}
        done = {case.name: held[case.name] for case in request.cases if case.name in held}
        journal = Journal(out, resume=resume)
        cases = [case for case in request.cases if case.name not in done]
        writer = RecordWriter(out, facts) if out is not None and cases else None
    except (UsageError, SuiteError, RecordError) as error:
        complain(error)
        return 2

    if done:
        say(f"{len(done)} of {len(request.cases)} cases are in {out} already", to=sys.stderr)
    if json_output:
        say(environment_line(facts))
    measured: list[Measurement] = []
    progress = Progress(len(cases))
    finished, code = 0, 0
    try:
        with _stoppable() as check_stopped, journal.noting_signals(), progress.logging_apart():
            for case in cases:

                def about_to(contender: str, case: str = case.name) -> None:
                    check_stopped()
                    journal.about_to(case, contender)

                progress.begin(case.name)
                results = measure(
                    case,
                    request.suite.name,
                    contenders(case.kernels or request.kernels, request.peers),
                    request.settings,
                    skip=journal.skip(case.name),
                    about_to=about_to,
                    say=progress.say,
                )
                for m in results:
                    if writer is not None:
                        writer.write(m)
                    if json_output:
                        say(measurement_line(environment_id(facts), m), flush=True)
                measured += results
                finished += 1
                progress.finish()
                if not json_output:
                    for table in case_tables(results):
                        print_table(table)
                _free(request.settings.device)
            journal.close()
    except (KeyboardInterrupt, Stopped) as stop:
        progress.clear()
        journal.stop()
        complain(_cut_off(str(stop) or "interrupted", finished, len(cases), out))
        code = STOPPED + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    except DeviceLost as lost:  # the journal is kept: it names the contender
        progress.clear()
        complain(_cut_off(str(lost), finished, len(cases), out))
        code = DEVICE_LOST
    except RecordError as error:  # for example, the disk is full; the results are still printed
        progress.clear()
        complain(_cut_off(str(error), finished, len(cases), out))
        code = 2
    if not json_output:
        for table in summary_tables(measured):
            print_table(table)
    if scale is not None and code == 0:
        _say_scaling(scale, measured, request.settings.device, json_output)
    of_ours = [m for m in (*(m for found in done.values() for m in found), *measured) if m.is_ours]
    return code or (1 if any(m.timing is None for m in of_ours) or not of_ours else 0)


@contextlib.contextmanager
def _stoppable() -> Iterator[Any]:
    """Makes a stopping signal raise `Stopped` inside the block, once. The next one ends the process.

    Yields a function that raises it again if a library swallowed it.
    """
    seen: list[int] = []
    before: dict[int, Any] = {}

    def stop(number: int, _: Any) -> NoReturn:
        signal.signal(number, before[number])
        seen.append(number)
        raise Stopped(number)

    def check_stopped() -> None:
        if seen:
            raise Stopped(seen[0])

    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            # Ctrl-C already raises KeyboardInterrupt, and a signal that the caller ignores (nohup) stays ignored.
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield check_stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cut_off(what: str, finished: int, total: int, out: Path | None) -> str:
    kept = f"{finished} of {total} cases are done"
    if out is None:
        return f"{what}; {kept}"
    return f"{what}; {kept} and in {out}; the same command with --resume continues there"


def _experiment(suite: str | None, scale: str | None, device: torch.device | str | None) -> str | Suite:
    """Returns the suite's name, or the suite of a scaling experiment for the device."""
    if (suite is None) == (scale is None):
        raise UsageError("name a suite, or give --scale instead")
    if suite is not None:
        return suite
    if scale not in scaling.AXES:
        raise UsageError(f"--scale is {scale!r}; use {', '.join(scaling.AXES)}")
    where = device_of(device)
    gpu = current_gpu(where)
    return scaling.suite(scale, on_cpu=where.type == "cpu", num_sms=gpu.num_sms)


def _say_scaling(axis: str, measured: Sequence[Measurement], device: torch.device, json_output: bool) -> None:
    gpu = current_gpu(device)
    sheet, ceilings = data_sheet(gpu), load(gpu) or shipped(gpu)
    # Shares are of the data sheet's rates; a CPU has only measured ones.
    rates = data_sheet_rates(sheet) if sheet is not None else None if ceilings is None else measured_rates(ceilings)
    found = scaling.judged(axis, measured, gpu, rates)
    if json_output:
        for one in found:
            say(json.dumps({"kind": "scaling", **asdict(one), "sentence": one.sentence}))
    elif found:
        print_table(scaling.table(found))
    else:
        complain("too few sizes were timed to fit an exponent")


def _check_request(
    suite: str | Suite,
    rounds: int,
    kernels: Sequence[str],
    peers: Sequence[str],
    modes: Sequence[str],
    only: str,
    resume: bool,
    out: Path | None,
    peer_timeout_s: float | None,
    device: torch.device | str | None,
) -> _Request:
    where = device_of(device)
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}; it must be at least 1")
    if rounds > MOST_ROUNDS:
        raise UsageError(f"rounds is {rounds}; it must be at most {MOST_ROUNDS:,}")
    if resume and out is None:
        raise UsageError("--resume continues a record file; name it with --out")
    if peer_timeout_s is not None and not 0 <= peer_timeout_s <= LONGEST_TIMEOUT_S:  # False for NaN
        raise UsageError(
            f"--peer-timeout is {peer_timeout_s:g}; it is a number of seconds up to {LONGEST_TIMEOUT_S:,.0f}, and 0 is "
            "no limit"
        )
    chosen = load_suite(suite, only) if isinstance(suite, str) else suite
    cases = tuple(
        replace(case, kernels=() if kernels else _kernels(case.kernels))
        for case in matching(chosen.cases, only, chosen.name)
    )
    return _Request(
        suite=chosen,
        cases=cases,
        kernels=_kernels(tuple(kernels) or chosen.kernels),
        peers=_peers(tuple(peers)),
        settings=Settings(where, _modes(tuple(modes), chosen.modes, where), rounds, peer_timeout_s),
    )


def device_of(device: torch.device | str | None) -> torch.device:
    """Returns the device that was asked for; the current GPU, or the CPU without one, if None.

    Raises:
        UsageError: it is no device of this machine on which the benchmark runs.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"{device!r} is no device: {str(error).splitlines()[0]}") from error
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"the benchmark runs on cpu and cuda devices, not on {where.type}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {where} was asked for, and torch sees {torch.cuda.device_count()} GPUs")
    return where


def _kernels(names: tuple[str, ...]) -> tuple[str, ...]:
    known = {"auto": False} | {kernel.NAME: kernel.NEEDS_GPU for kernel in KERNELS}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown kernel {', '.join(unknown)}; known are {', '.join(known)}")
    interpreted = [name for name in names if known[name] and INTERPRETED]
    if interpreted:
        raise UsageError(f"TRITON_INTERPRET is set: times of {interpreted[0]} in the interpreter would say nothing")
    return tuple(dict.fromkeys(names))


def _peers(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        return tuple(PEERS)
    if set(names) == {"none"}:
        return ()
    if "none" in names:
        others = dict.fromkeys(name for name in names if name != "none")
        raise UsageError(f"--peer none excludes every peer; give it alone, or only {', '.join(others)}")
    if unknown := [name for name in names if name not in PEERS]:
        raise UsageError(f"unknown peer {', '.join(unknown)}; known are {', '.join(PEERS)}, or none")
    return tuple(dict.fromkeys(names))


def _modes(asked: tuple[str, ...], of_suite: tuple[str, ...], device: torch.device) -> tuple[str, ...]:
    if unknown := [mode for mode in asked if mode not in MODES]:
        raise UsageError(f"unknown mode {', '.join(unknown)}; known are {', '.join(MODES)}")
    if device.type == "cpu":
        if on_gpu := [mode for mode in asked if mode in ("graph", "streams")]:
            raise UsageError(f"mode {on_gpu[0]} needs a GPU; on a CPU there are auto and eager")
        return tuple(dict.fromkeys(asked)) or ("auto",)
    modes = asked or of_suite
    with_graph = ("graph", *modes) if "streams" in modes and "graph" not in modes else modes
    return tuple(dict.fromkeys(with_graph))


def _free(device: torch.device) -> None:
    """Frees the memory that graphs and the caching allocator kept, so that every case starts with the same memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
