"""Runs a suite of `warpwave bench` whose contenders compile slowly: one process per case, timed one after another.

    python -m benchmarks.bench_apart SUITE --out RECORD [--kernel auto] [--peer NAME]... [--rounds 9] [--only TEXT]
        [--prepare 90] [--peer-timeout 60] [--seconds 300] [--resume]

All processes import, compile and check in parallel. Each then waits for its turn, so that nothing else runs on the GPU
while a case's contenders are timed in interleaved rounds, as in `warpwave bench`. Cases that are not ready after
`--prepare` seconds, or whose turn has not come after `--seconds`, are left to the same command with `--resume`. Host
time is not measured. The record has the format of `warpwave bench`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from warpwave.workbench.bench import environment
from warpwave.workbench.bench.contenders import contenders
from warpwave.workbench.bench.measure import Settings, measure
from warpwave.workbench.bench.peers import PEERS
from warpwave.workbench.bench.records import Measurement, RecordWriter
from warpwave.workbench.bench.resume import finished_cases
from warpwave.workbench.bench.table import case_tables, print_table, summary_tables
from warpwave.workbench.bench.workloads import Case, load_suite


class Turn(NamedTuple):
    """One case's process: it says when it is ready, waits for `go`, and sends its measurements."""

    case: Case
    process: Any
    ready: Any
    go: Any
    results: multiprocessing.connection.Connection


def prepare_and_time(
    case: Case, suite: str, kernels: Sequence[str], peers: Sequence[str], settings: Settings, ready: Any, go: Any,
    results: multiprocessing.connection.Connection,
) -> None:  # fmt: skip
    """Runs in a case's process: prepares, waits for its turn, and times."""

    def about_to(contender: str) -> None:
        if not contender:  # all are prepared
            ready.set()
            go.wait()

    results.send(measure(case, suite, contenders(kernels, peers), settings, about_to=about_to))
    results.close()


def start(
    cases: Sequence[Case], suite: str, kernels: Sequence[str], peers: Sequence[str], settings: Settings
) -> list[Turn]:
    """Starts a process for each case; all prepare in parallel."""
    context = multiprocessing.get_context("spawn")
    turns = []
    for case in cases:
        ready, go = context.Event(), context.Event()
        ours, theirs = context.Pipe(duplex=False)
        arguments = (case, suite, kernels, peers, settings, ready, go, theirs)
        process = context.Process(target=prepare_and_time, args=arguments, daemon=True)
        process.start()
        theirs.close()
        turns.append(Turn(case, process, ready, go, ours))
    return turns


def wait_ready(turns: Sequence[Turn], until: float) -> list[Turn]:
    """Returns the turns that are ready by `until` (of `time.monotonic`); the others are ended and reported."""
    while time.monotonic() < until and not all(t.ready.is_set() or not t.process.is_alive() for t in turns):
        time.sleep(0.1)
    ready = []
    for turn in turns:
        if turn.ready.is_set() and turn.process.is_alive():
            ready.append(turn)
            continue
        why = "not ready in time" if turn.process.is_alive() else f"ended with {turn.process.exitcode}"
        print(f"{turn.case.name}: {why}, left to --resume", file=sys.stderr, flush=True)
        turn.process.kill()
    for turn in turns:
        if turn not in ready:
            turn.process.join()
    return ready


def take_turns(turns: Sequence[Turn], writer: RecordWriter, until: float) -> list[Measurement]:
    """Times the cases in turn. Returns their measurements, which are also written one by one."""
    measured: list[Measurement] = []
    for turn in turns:
        left = until - time.monotonic()
        if left <= 0:
            print(f"{turn.case.name}: no time left, left to --resume", file=sys.stderr, flush=True)
        else:
            turn.go.set()
            try:
                found = turn.results.recv() if turn.results.poll(left) else None
            except EOFError:
                found = None
            if found is None:
                print(f"{turn.case.name}: cut off, left to --resume", file=sys.stderr, flush=True)
            else:
                for m in found:
                    writer.write(m)
                measured += found
                for table in case_tables(found):
                    print_table(table)
                turn.process.join(10)
        turn.process.kill()
        turn.process.join()
    return measured


def main(arguments: list[str] | None = None) -> int:
    """Measures the cases that the record lacks. Returns 1 if some are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", action="append", default=[])
    parser.add_argument("--peer", action="append", default=[], choices=[*PEERS, "none"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--prepare", type=float, default=90.0)
    parser.add_argument("--peer-timeout", type=float, default=60.0, help="seconds that one contender may prepare for")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args(arguments)
    begin = time.monotonic()
    suite = load_suite(a.suite)
    device = torch.device("cuda", torch.cuda.current_device()) if a.device == "cuda" else torch.device(a.device)
    facts = environment.describe(device)
    modes: tuple[str, ...] = suite.modes if device.type == "cuda" else ("auto",)
    done = finished_cases(a.out, suite, modes, facts) if a.resume else {}
    cases = [case for case in suite.cases if a.only in case.name and case.name not in done]
    print(f"{len(cases)} cases to measure, {len(done)} are in {a.out} already", file=sys.stderr, flush=True)
    if not cases:
        return 0
    peers = () if a.peer == ["none"] else tuple(a.peer or PEERS)
    settings = Settings(device, modes, a.rounds, a.peer_timeout, host=False)
    writer = RecordWriter(a.out, facts)
    turns = start(cases, suite.name, tuple(a.kernel) or suite.kernels, peers, settings)
    ready = wait_ready(turns, begin + min(a.prepare, a.seconds))
    print(f"{len(ready)} ready after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    measured = take_turns(ready, writer, begin + a.seconds)
    for table in summary_tables(measured):
        print_table(table)
    print(f"{len(measured)} measurements after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return 0 if len({m.case for m in measured}) == len(cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
