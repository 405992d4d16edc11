"""Run a suite: for each case prepare every contender, check it, time all of them interleaved, print and record."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from warpwave import InvalidType, UnsupportedProblem, attention, explain
from warpwave.bench import environment
from warpwave.bench.correctness import Sample
from warpwave.bench.peers import PEERS, Peer, PeerUnavailable, Prepared
from warpwave.bench.records import (
    Measurement,
    RecordError,
    RecordWriter,
    environment_id,
    environment_line,
    measurement_line,
)
from warpwave.bench.table import OURS, case_table, print_table, summary_tables
from warpwave.bench.timing import CaptureFailed, Samples, host_time_interleaved, time_interleaved
from warpwave.bench.workloads import Case, SuiteError, default_scale, load_suite, make_operands
from warpwave.dispatch import KERNELS
from warpwave.kernels.triton_or_stub import INTERPRETED
from warpwave.problem import AttentionProblem, Operands

SEED = 0

Say = Callable[[str], None]


class UsageError(ValueError):
    """Something was asked for that this benchmark or this machine cannot do."""


def main(
    suite: str,
    *,
    out: Path | None,
    rounds: int = 9,
    json_output: bool = False,
    kernels: Sequence[str] = ("auto",),
    device: torch.device | str | None = None,
) -> int:
    """Measure a suite and print what came of it.

    Args:
        suite: name of a suite of the package, or path of a `.toml` file.
        out: file the records are appended to, or None.
        rounds: times every contender takes its turn; at least 6 for confidence intervals.
        json_output: print the records, one JSON object a line, in place of tables.
        kernels: our kernels to measure, as `attention(kernel=...)` takes them.
        device: where; None is the current GPU, or the CPU where there is none.

    Returns:
        The process's exit code: 0; 1 where a kernel of ours could not run a case or was wrong; 2 where the request
        makes no sense.
    """
    try:
        where = _device(device)
        _check_request(kernels, rounds)
        chosen = load_suite(suite)
        facts = environment.describe(where)
        writer = None if out is None else RecordWriter(out, facts)
    except (UsageError, SuiteError, RecordError, OSError) as error:
        print(f"warpwave: {error}", file=sys.stderr)
        return 2

    if json_output:
        print(environment_line(facts))
    contenders: dict[str, Peer] = {OURS + kernel: partial(_ours, kernel) for kernel in kernels} | PEERS
    measured: list[Measurement] = []
    for index, case in enumerate(chosen.cases, start=1):
        with _progress(f"{index}/{len(chosen.cases)} {case.name}") as say:
            results = _measure(case, chosen.name, contenders, where, rounds, say)
        measured += results
        for m in results:
            if writer is not None:
                writer.write(m)
            if json_output:
                print(measurement_line(environment_id(facts), m), flush=True)
        if not json_output:
            print_table(case_table(results))
    if not json_output:
        for table in summary_tables(measured):
            print_table(table)
    return 1 if any(m.contender.startswith(OURS) and m.timing is None for m in measured) else 0


def _device(device: torch.device | str | None) -> torch.device:
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


def _check_request(kernels: Sequence[str], rounds: int) -> None:
    if rounds < 1:
        raise UsageError(f"rounds must be at least 1, got {rounds}")
    known = {"auto": False} | {kernel.NAME: kernel.NEEDS_GPU for kernel in KERNELS}
    unknown = [name for name in kernels if name not in known]
    if unknown or not kernels:
        raise UsageError(f"unknown kernel {', '.join(unknown) or '(none given)'}; known are {', '.join(known)}")
    interpreted = [name for name in kernels if known[name] and INTERPRETED]
    if interpreted:
        raise UsageError(f"TRITON_INTERPRET is set: times of {interpreted[0]} in the interpreter would say nothing")


def _measure(
    case: Case, suite: str, contenders: dict[str, Peer], device: torch.device, rounds: int, say: Say
) -> list[Measurement]:
    """Every contender on one case, in the order given."""
    operands = make_operands(case.problem, device, seed=SEED)
    sample = Sample(case.problem, operands, seed=SEED)
    results: dict[str, Measurement] = {}
    ready: dict[str, Prepared] = {}
    for name, prepare in contenders.items():
        say(f"checking {name}")
        m = Measurement(suite=suite, case=case.name, problem=case.problem, contender=name, seed=SEED)
        try:
            prepared = prepare(case.problem, operands)
            verdict = sample.judge(prepared.to_out(prepared.call()))
        except PeerUnavailable as unavailable:
            results[name] = dataclasses.replace(m, refusal=str(unavailable))
            continue
        m = dataclasses.replace(m, kernel=prepared.kernel, config=prepared.config, verdict=verdict)
        if verdict.passed:
            ready[name] = prepared
        else:
            m = dataclasses.replace(m, refusal=f"wrong, so not timed: {verdict.reason}")
        results[name] = m

    before = environment.snapshot(device)
    timings, dropped = _time(ready, device, rounds, say)
    after = environment.snapshot(device)
    hosts: dict[str, Samples] = {}
    if device.type != "cpu":  # where the host is the device, its time is the time already taken
        say("timing the host")
        eager = {name: prepared.call for name, prepared in ready.items() if prepared.eager}
        hosts = host_time_interleaved(eager, device=device, rounds=rounds)
    for name, timing in timings.items():
        results[name] = dataclasses.replace(
            results[name], timing=timing, host=hosts.get(name), gpu_before=before, gpu_after=after
        )
    for name, reason in dropped.items():
        results[name] = dataclasses.replace(results[name], refusal=reason)
    return list(results.values())


def _time(
    ready: dict[str, Prepared], device: torch.device, rounds: int, say: Say
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Timings, and the reasons of those that had to be left out because a CUDA graph cannot hold them."""
    calls = {name: prepared.call for name, prepared in ready.items()}
    dropped: dict[str, str] = {}
    while calls:
        say("warming up")
        try:
            timings = time_interleaved(
                calls, device=device, rounds=rounds, on_round=lambda done: say(f"round {done} of {rounds}")
            )
        except CaptureFailed as failure:
            dropped[failure.name] = failure.reason
            del calls[failure.name]
        else:
            return timings, dropped
    return {}, dropped


def _ours(kernel: str, problem: AttentionProblem, operands: Operands) -> Prepared:
    """Our own contender: the public call, as a user writes it."""
    options: dict[str, Any] = {"kernel": kernel}
    if problem.causal is not None:
        options["causal"] = problem.causal
    if problem.softmax_scale != default_scale(problem.head_dim):
        options["softmax_scale"] = problem.softmax_scale
    if problem.precision != "default":
        options["precision"] = problem.precision
    # Without return_lse the public call returns a tensor, which its type does not say.
    call = cast(Callable[[], Tensor], partial(attention, operands.q, operands.k, operands.v, **options))
    try:
        call()
        explanation = explain(operands.q, operands.k, operands.v, **options)
    except UnsupportedProblem as error:
        raise PeerUnavailable("; ".join(error.reasons.get(kernel, [])) or str(error)) from error
    except (InvalidType, RuntimeError) as error:  # a GPU kernel for CPU tensors; out of memory, a failed compilation
        raise PeerUnavailable(f"{type(error).__name__}: {error}") from error
    return Prepared(
        call,
        to_out=lambda out: out,
        kernel=explanation.kernel or "",
        eager=True,
        config=dataclasses.asdict(explanation.config),
    )


@contextmanager
def _progress(what: str) -> Iterator[Say]:
    """Say on standard error what is under way: one line that is rewritten on a terminal, one line a case elsewhere.

    Written by hand, for rich's live displays refresh from a thread of their own, which would share the interpreter
    lock with host timings.
    """
    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
        yield lambda detail: None
        return
    clear_line = "\r\033[K"
    try:
        yield lambda detail: print(f"{clear_line}{what}: {detail}", end="", file=sys.stderr, flush=True)
    finally:
        print(clear_line, end="", file=sys.stderr, flush=True)
