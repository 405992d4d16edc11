"""Times another tree of the package beside this one, in one process, and compares results and speeds.

    git worktree add FOLDER COMMIT
    PYTHONPATH=. python -m benchmarks.two_trees FOLDER RECORD [--suites forward quantized gradients]
        [--only TEXT...] [--rounds 6] [--seconds 300]

The other tree is imported from a copy in which it has another name. Both trees get the same tensors and take turns in
every round. `--suites` names suites of `bench`, "quantized" for float8 and int8 calls, and "gradients" for the backward
alone. For the suite `host`, the host's time is measured. "Speed" is the time of the other tree over the time of this
one. The record is written after each row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import warpwave
from benchmarks import gradient_calls, gradients
from benchmarks.quantized_beside_16_bits import HEAD_DIMS, SIZES, WAYS, options_of, wide_operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.inputs import call_arguments, make_operands
from warpwave.workbench.bench.timing import Samples, host_time_interleaved, paired_ratio, time_interleaved
from warpwave.workbench.bench.workloads import load_suite
from warpwave.workbench.output_files import write_whole

OTHER = "warpwave_before"
THIS_TREE, OTHER_TREE = "this tree", "other tree"
HOST, QUANTIZED, GRADIENTS = "host", "quantized", "gradients"
SUITES = ("forward", "masks", "decode", "decode_paged", "tiny", "float32", "large_head_dim", "varlen", HOST)
MOST_DIFFERENCE = 0.01  # of two results, relative to the root mean square of the other tree's
Call = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """One call.

    Attributes:
        suite, case: its name.
        make: returns the call of a tree's package. It makes the tensors, the same for both.
        hot: whether its tensors may stay in L2.
    """

    suite: str
    case: str
    make: Callable[[Any], Call]
    hot: bool = False


def copied(folder: Path, place: Path) -> None:
    """Copies the package of a tree to a place, under the name `OTHER`."""
    shutil.copytree(folder / "warpwave", place / OTHER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (place / OTHER).rglob("*.py"):
        path.write_text(re.sub(r"\bwarpwave\b", OTHER, path.read_text()))


@lru_cache(1)  # the operands of some problems fill the GPU
def tensors_of(problem: AttentionProblem) -> Any:
    """Returns the operands of a problem."""
    return make_operands(problem, "cuda")


def of_problem(problem: AttentionProblem, package: Any) -> Call:
    """Returns the call of a suite's case."""
    operands = tensors_of(problem)
    arguments = call_arguments(problem, operands)
    if problem.causal is not None:
        arguments["causal"] = package.Causal(problem.causal.alignment)
    if problem.page_size:
        o = operands
        scales = {} if o.k_descale is None else {"k_descale": o.k_descale, "v_descale": o.v_descale}
        layer = package.CacheLayer(o.k, o.v, o.page_table, o.seqused_k, **scales)
        return partial(package.attention_with_kv_cache, o.q, layer, **arguments)
    function = package.attention_varlen if problem.packed else package.attention
    return partial(function, *operands[:3], **arguments)


@lru_cache(1)
def narrow(head_dim: int, batch: int, seqlen: int, way: str, block: int) -> dict[str, Any]:
    """Returns the tensors of a quantized call, by the names of arguments."""
    return warpwave.quantize(*wide_operands(head_dim, batch, seqlen), **options_of(way, block)).arguments()


def quantized(sizes: tuple[Any, ...], causal: bool, package: Any) -> Call:
    """Returns a quantized call of a tree's package."""
    return partial(package.attention, **narrow(*sizes), causal=causal)


@lru_cache(1)
def inputs_of(row: gradient_calls.Row) -> gradients.Inputs:
    """Returns the tensors of a call with gradients."""
    return gradients.inputs(row)


def backward(row: gradient_calls.Row, package: Any) -> Call:
    """Returns the backward of a tree's package."""
    given = inputs_of(row)
    return gradients.backward(gradients.ours(row, given, package=package), given)


def rows(suites: Sequence[str], only: Sequence[str]) -> Iterator[Row]:
    """Yields the rows whose names contain one of `only`."""
    apart = {QUANTIZED: quantized_rows, GRADIENTS: gradient_rows}
    for suite in suites:
        of_suite = apart[suite]() if suite in apart else rows_of_bench(suite)
        yield from (row for row in of_suite if any(text in row.case for text in only))


def rows_of_bench(suite: str) -> Iterator[Row]:
    """Yields the cases of a suite of `bench`."""
    for case in load_suite(suite).cases:
        yield Row(suite, case.name, partial(of_problem, case.problem), case.hot is True)


def quantized_rows() -> Iterator[Row]:
    """Yields float8 and int8 calls, with factors of heads and of blocks."""
    for block, way, head_dim, size, causal in product((0, 128), WAYS, HEAD_DIMS, SIZES, (False, True)):
        batch, seqlen = size
        name = f"d{head_dim} {batch}x{seqlen} {way}{' causal' * causal}{' blocks' * bool(block)}"
        yield Row(QUANTIZED, name, partial(quantized, (head_dim, batch, seqlen, way, block), causal))


def gradient_rows() -> Iterator[Row]:
    """Yields the backward of rows of gradient_calls.py: the 18 rows, head sizes from 136 to 192, grouped heads,
    few blocks, masks and biases, padding, few queries or keys."""
    plain = (*gradient_calls.table(), *gradient_calls.between(), *gradient_calls.grouped(), *gradient_calls.short())
    hidden = (row for row in (*gradient_calls.features(), *gradient_calls.biases()) if row.beside)
    for row in (*plain, *hidden, *gradient_calls.padded(), *gradient_calls.few()):
        yield Row(GRADIENTS, row.name, partial(backward, row))


def flat(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns all numbers of a call's results."""
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    return torch.cat([tensor.flatten().float() for tensor in tensors])


def compile_one(row: Row) -> str:
    """Calls a row once in both trees, which leaves their code in Triton's cache. Returns what failed, or ""."""
    try:
        for package in (warpwave, importlib.import_module(OTHER)):
            row.make(package)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(found: list[Row]) -> list[str]:
    """Compiles the rows in as many processes as there are cores; returns what `compile_one` returns for each."""
    # Forked before this process has a context of the GPU. More processes would not fit its memory.
    with multiprocessing.get_context("fork").Pool(min(14, os.cpu_count() or 1)) as pool:
        return pool.map(compile_one, found, chunksize=1)


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Returns the measurement of a row."""
    calls = {
        name: row.make(package)
        for name, package in ((THIS_TREE, warpwave), (OTHER_TREE, importlib.import_module(OTHER)))
    }
    new, old = (flat(call()) for call in calls.values())
    difference = ((new - old).square().mean() / old.square().mean()).sqrt().item()
    timed: dict[str, Samples]
    if row.suite == HOST:
        timed = host_time_interleaved(calls, device="cuda", rounds=rounds)
    else:
        timed = time_interleaved(calls, device="cuda", rounds=rounds, flush_l2=not row.hot, warmup_s=0.05)
    return {
        "suite": row.suite,
        "case": row.case,
        "speed": round(paired_ratio(timed[OTHER_TREE], timed[THIS_TREE]).median, 4),
        "difference": difference,
        "method": timed[THIS_TREE].method,
        "us": {name: [round(us, 3) for us in samples.samples_us] for name, samples in timed.items()},
    }


def summary(found: list[dict[str, Any]]) -> str:
    """Returns a line for each suite: geometric mean, least and largest speed; and the results that differ."""
    lines = []
    for suite in dict.fromkeys(row["suite"] for row in found):
        of_suite = [row["speed"] for row in found if row["suite"] == suite]
        mean, least, most = geometric_mean(of_suite), min(of_suite), max(of_suite)
        lines.append(f"{suite}: speed {mean:.3f} in the mean of {len(of_suite)}, {least:.3f} to {most:.3f}")
    apart = [row for row in found if not row["difference"] <= MOST_DIFFERENCE]
    return "\n".join([*lines, *(f"DIFFERS by {row['difference']:.2e}: {row['suite']}, {row['case']}" for row in apart)])


def main() -> int:
    """Times all rows; returns 1 if results differ or a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the other tree")
    parser.add_argument("record", type=Path)
    parser.add_argument("--suites", nargs="*", default=SUITES)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        copied(args.folder, Path(place))
        sys.path.insert(0, place)
        all_rows = list(rows(args.suites, args.only))
        failures = {row: failure for row, failure in zip(all_rows, compile_all(all_rows), strict=True) if failure}
        for row, failure in failures.items():
            print(f"{row.suite}, {row.case}: {failure}")
        print(f"{len(all_rows)} rows compiled after {time.monotonic() - begin:.0f} s", flush=True)
        found: list[dict[str, Any]] = []
        for row in all_rows:
            if time.monotonic() - begin > args.seconds:
                print(f"{len(all_rows) - len(failures) - len(found)} rows were not timed: --seconds {args.seconds:g}")
                break
            if row in failures:
                continue
            found.append(measure(row, args.rounds))
            print("{suite}, {case}: {speed:.3f}".format(**found[-1]), flush=True)
            whole = {"environment": environment.describe("cuda"), "other": str(args.folder), "rows": found}
            write_whole(args.record, json.dumps(whole))
    print(text := summary(found))
    return 1 if failures or "DIFFERS" in text else 0


if __name__ == "__main__":
    sys.exit(main())
