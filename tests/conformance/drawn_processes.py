"""Checks many drawn calls in many processes: the command `python -m tests.conformance.drawn`.

Seeds follow from the commit, so each commit is tested with other calls, and a test can be repeated. A process that dies
or exceeds the time limit of a call is replaced, and its call counts as a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance.drawn import ALIKE, check, draw, repro
from tests.conformance.harness import GPU, ON_GPU

SECONDS_A_CALL = 180.0
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Tally:
    """Summarizes the calls: counts by kernel, and each failure with its seed."""

    calls: Counter[str]
    failures: list[tuple[int, str]]
    skipped: int = 0


def seed_of_commit(commit: str | None = None) -> int:
    """Returns the first seed of a commit; None is HEAD."""
    if commit is None:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
        commit = head.stdout.strip() or "0"
    return int(commit[:7], 16) * 1_000_000 if all(c in "0123456789abcdef" for c in commit) else 0


def attempt(seed: int) -> tuple[str, str | None]:
    """Returns (kernel, fault or None) of one seed; an exception is a fault."""
    try:
        drawn = draw(seed)
    except Exception:
        return "drawing", traceback.format_exc(limit=-6)
    try:
        wrong = check(drawn)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):  # others run beside us
            torch.cuda.empty_cache()
            return drawn.kernel, "skipped"
        wrong = traceback.format_exc(limit=-6)
    return drawn.kernel, None if wrong is None else f"{drawn}\n{wrong}"


def _work(first: int, step: int, stop: float, gradients: bool) -> None:
    """Runs in a worker process: writes a line of JSON before and after each call."""
    group = first
    while time.time() < stop:
        of_group = range(group * ALIKE, (group + 1) * ALIKE)
        for seed in of_group if not gradients or draw(of_group[0]).gradients else ():
            print(json.dumps({"begin": seed}), flush=True)
            faulthandler.dump_traceback_later(SECONDS_A_CALL, exit=True)
            kernel, wrong = attempt(seed)
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps({"seed": seed, "kernel": kernel, "wrong": wrong}), flush=True)
            if wrong and ("CUDA error" in wrong or "AcceleratorError" in wrong):
                os._exit(3)  # the context is lost
        group += step


def run(first_seed: int, minutes: float, processes: int, calls: int | None, gradients: bool = False) -> Tally:
    """Draws and checks calls in many processes until the time or the number of calls is reached. If a process dies, its
    current call counts as a failure, and a new process replaces it.

    Args:
        gradients: only calls whose gradients are checked too.
    """
    tally, stop = Tally(Counter(), []), time.time() + 60 * minutes
    lines: queue.Queue[Any] = queue.Queue()

    def serve(first_group: int) -> None:
        group = first_group
        while time.time() < stop:
            command = [
                sys.executable,
                "-m",
                "tests.conformance.drawn",
                "--work",
                f"{group},{processes},{stop},{int(gradients)}",
            ]
            with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=os.environ | {"OMP_NUM_THREADS": "1"}) as worker:  # fmt: skip
                workers.append(worker)
                at = None
                errors: list[str] = []
                reader = threading.Thread(target=lambda e=errors, w=worker: e.extend(w.stderr or ()), daemon=True)
                reader.start()
                for line in worker.stdout or ():
                    with contextlib.suppress(ValueError):
                        said = json.loads(line)
                        at = said.get("begin", at)
                        if "seed" in said:
                            lines.put(said)
                            at = None
                worker.wait()
                reader.join(1)
            if stopped.is_set() or (worker.returncode == 0 and at is None):
                return
            if at is not None:
                lines.put(
                    {"seed": at, "kernel": "died", "wrong": f"exit {worker.returncode}\n" + "".join(errors[-12:])}
                )
            done = at if at is not None else group * ALIKE
            group = first_group + (done // ALIKE - first_group) // processes * processes + processes

    workers: list[subprocess.Popen[str]] = []
    stopped = threading.Event()
    base = first_seed // ALIKE
    threads = [threading.Thread(target=serve, args=(base + i,)) for i in range(processes)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads) or not lines.empty():
        try:
            said = lines.get(timeout=0.5)
        except queue.Empty:
            continue
        _note(tally, said)
        if calls is not None and tally.calls.total() >= calls:
            stopped.set()
            for worker in workers:
                worker.kill()
            break
    return tally


def _note(tally: Tally, said: dict[str, Any]) -> None:
    wrong = said["wrong"]
    if wrong == "skipped":
        tally.skipped += 1
        return
    tally.calls[said["kernel"]] += 1
    if wrong:
        tally.failures.append((said["seed"], wrong))
        print(f"\nFAILED {wrong}\n{repro(said['seed'])}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if a call was wrong."""
    parser = argparse.ArgumentParser(description="Calls drawn from what kernels claim, held against float64.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--calls", type=int, help="stop after so many, whatever the time")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - (2 if ON_GPU else 0)))
    parser.add_argument("--seed", type=int, help="the first seed; from the commit if left out")
    parser.add_argument("--gradients", action="store_true", help="only calls whose gradients are checked too")
    parser.add_argument("--one", type=int, help="this seed alone, in this process")
    parser.add_argument("--out", type=Path, help="also write the tally there, as JSON")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.work:
        first, step, stop, gradients = asked.work.split(",")
        _work(int(first), int(step), float(stop), gradients == "1")
        return 0
    if asked.one is not None:
        _, wrong = attempt(asked.one)
        print(wrong or f"{draw(asked.one)}: as it should be")
        return 1 if wrong else 0
    first_seed = seed_of_commit() if asked.seed is None else asked.seed
    tally = run(first_seed, asked.minutes, asked.processes, asked.calls, asked.gradients)
    total = tally.calls.total()
    outcome = f"{len(tally.failures)} wrong, {tally.skipped} skipped"
    print(f"{total} drawn calls on {GPU.name} from seed {first_seed}: {outcome}")
    print("  " + ", ".join(f"{name} {count}" for name, count in tally.calls.most_common()))
    if asked.out:
        said = {"device": GPU.name, "seed": first_seed, "calls": dict(tally.calls), "skipped": tally.skipped,
                "torch": torch.__version__, "failures": tally.failures}  # fmt: skip
        asked.out.write_text(json.dumps(said, indent=1) + "\n")
    return 1 if tally.failures or not total else 0


def some(calls: int) -> Iterator[int]:
    """Returns seeds of the commit, for tests."""
    yield from range(seed_of_commit(), seed_of_commit() + calls)
