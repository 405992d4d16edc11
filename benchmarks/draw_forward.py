"""Draws shapes from a commit's hash, to check whether the forward is as fast outside the rows of its table.

    python -m benchmarks.draw_forward OUT.toml                 40 shapes from the hash of HEAD
    python -m benchmarks.draw_forward OUT.toml --seed HASH     those of another commit
    python -m benchmarks.draw_forward OUT.toml --time RECORD.jsonl --beside FORWARD.jsonl

The last command times them with cuDNN and FlashAttention-4, device time only. It prints the geometric mean over the
best peer, and that of FORWARD.jsonl, a record of the suite `forward`; the two should agree within 5 %. It compiles in
many processes first, so that it ends within 100 seconds on a machine with 16 cores. `warpwave bench OUT.toml` does the
same in ten minutes, and also measures host time.

The shapes cannot be known while the kernels are written, so no rule can be fitted to them. Widths, masks and work are
those of the suite `forward`; lengths, batches and heads are arbitrary.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.draw_model_grid import toml_line
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.contenders import contenders
from warpwave.workbench.bench.goals import best_peer
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.measure import Settings, measure
from warpwave.workbench.bench.peers import Peer
from warpwave.workbench.bench.records import Measurement, RecordWriter, read_records
from warpwave.workbench.bench.table import print_table, summary_tables
from warpwave.workbench.bench.timing import paired_ratio
from warpwave.workbench.bench.workloads import Case, parse_suite

SHAPES = 40
LENGTHS = (1024, 16384)
WIDTH = (1024, 4096)  # heads * head_dim, 2048 in the suite `forward`
TOKENS = (8192, 32768)
PEERS = ("sdpa_cudnn", "flash_attention_4")
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # makes it cache compiled code, so that processes can share it


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the suite to write")
    parser.add_argument("--seed", help="a commit's hash; default: HEAD's")
    parser.add_argument("--time", type=Path, metavar="RECORD", help="time the shapes, and append them to this record")
    parser.add_argument("--beside", type=Path, metavar="FORWARD", help="a record of the suite `forward`, to compare")
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}; it must be at least 1")
    if asked.beside is not None and not asked.beside.is_file():
        parser.error(f"--beside: there is no file {asked.beside}")
    if asked.time is not None and not torch.cuda.is_available():
        parser.error("--time needs a GPU")
    cases = draw(parser, asked.out, asked.seed, suite)
    if asked.time is not None:
        measured = timed(cases, asked.time, asked.rounds)
        for table in summary_tables(measured):
            print_table(table)
        if asked.beside is not None:
            print(verdict(measured, [m for _, m in read_records(asked.beside).measurements]))
    return 0


def draw(parser: argparse.ArgumentParser, out: Path, seed: str | None, suite: Callable[[str], str]) -> tuple[Case, ...]:
    """Writes the suite of a commit, by default HEAD, to `out`, and returns its cases. Wrong arguments end the
    program."""
    if out.suffix != ".toml":
        parser.error(f"{out} must end in .toml, or bench takes it for a suite's name")
    if seed is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        if git.returncode:
            parser.error(f"this is no git checkout; give --seed. {git.stderr.strip()}")
        seed = git.stdout.strip()
    drawn = suite(seed)
    if out.exists() and out.read_text(encoding="utf-8") != drawn:
        parser.error(f"{out} already exists and is another suite; name another file")
    out.write_text(drawn, encoding="utf-8")
    return tuple(parse_suite("drawn", tomllib.loads(drawn), source=str(out)).cases)


def suite(seed: str) -> str:
    """Returns the suite as TOML."""
    return suite_of(f"{SHAPES} shapes drawn from {seed} by benchmarks/draw_forward.py", seed, _shape)


def suite_of(description: str, seed: str, shape: Callable[[random.Random], dict[str, Any]]) -> str:
    """Returns SHAPES different results of `shape` as a suite in TOML."""
    draw = random.Random(seed)
    lines: list[str] = []
    while len(lines) < SHAPES:
        line = toml_line(shape(draw))
        if line not in lines:
            lines.append(line)
    return "\n".join([f'description = "{description}"', "cases = [", *lines, "]", ""])


def _shape(draw: random.Random) -> dict[str, Any]:
    head_dim = draw.choice((64, 128, 256))
    heads = log_uniform(draw, WIDTH[0] // head_dim, WIDTH[1] // head_dim)
    seqlen = log_uniform(draw, *LENGTHS)
    if draw.random() < 0.5:
        seqlen = -(-seqlen // 64) * 64
    return {
        "head_dim": head_dim,
        "batch": max(1, round(log_uniform(draw, *TOKENS) / seqlen)),
        "seqlen_q": seqlen,
        "num_heads_q": heads,
        "dtype": draw.choice(("bfloat16", "float16")),
        "causal": draw.choice((False, True)),
    }


# Timing ---------------------------------------------------------------------------------------------------------------


def timed(
    cases: Sequence[Case],
    record: Path,
    rounds: int,
    peers: Sequence[str] = PEERS,
    more: Callable[[Case], Mapping[str, Peer]] = lambda case: {},
) -> list[Measurement]:
    """Times every case with `auto` and the peers, device time only.

    Args:
        more: returns further contenders of a case, which can be pickled.
    """
    os.environ[FA4_CACHE] = "1"
    began = time.monotonic()
    ours = [{**contenders(("auto",), ()), **more(case)} for case in cases]
    _compile(cases, ours, peers)
    print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)
    device = torch.device("cuda", torch.cuda.current_device())
    writer = RecordWriter(record, environment.describe(device))
    settings = Settings(device=device, rounds=rounds, host=False)
    measured: list[Measurement] = []
    for case, mine in zip(cases, ours, strict=True):
        found = measure(case, "drawn", {**mine, **contenders((), peers)}, settings)
        for m in found:
            writer.write(m)
        measured += found
        torch.cuda.empty_cache()
    print(f"timed after {time.monotonic() - began:.0f} s", file=sys.stderr)
    return measured


def _compile(cases: Sequence[Case], ours: Sequence[Mapping[str, Peer]], peers: Sequence[str]) -> None:
    """Compiles for all cases in parallel processes, FlashAttention-4 once for every kind of case."""
    jobs: list[tuple[Case, str, Peer]] = []
    if "flash_attention_4" in peers:
        kinds = {
            (p.head_dim, p.dtype, p.causal is None, p.num_heads_q // p.num_heads_kv, p.page_size): case
            for case, p in ((case, case.problem) for case in reversed(cases))
        }
        jobs = [(case, *peer) for case in kinds.values() for peer in contenders((), ("flash_attention_4",)).items()]
    jobs += [(case, *contender) for case, mine in zip(cases, ours, strict=True) for contender in mine.items()]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        for job in [pool.submit(_prepare, *job) for job in jobs]:
            job.result()


def _prepare(case: Case, name: str, contender: Peer) -> None:
    """Compiles for one case. Errors are ignored here, because the timing reports them."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        contender(case.problem, make_operands(case.problem, device, seed=0))
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} on {case.name}: {type(error).__name__}", file=sys.stderr)


def verdict(drawn: Sequence[Measurement], table: Sequence[Measurement]) -> str:
    """Returns whether the drawn shapes are as fast as those of the table, as a sentence."""
    means = [mean_over_best_peer(found) for found in (drawn, table)]
    if None in means:
        return "no comparison: one of the two has no case with a peer"
    ours, theirs = (m for m in means if m is not None)
    within = "within" if abs(ours / theirs - 1) <= 0.05 else "not within"
    return f"drawn {ours:.3f}, table {theirs:.3f} of the best peer in the geometric mean: {within} 5 %"


def mean_over_best_peer(measurements: Sequence[Measurement]) -> float | None:
    """Returns the geometric mean of our speed relative to the best peer over all cases."""
    ratios = over_best_peer(measurements)
    return geometric_mean(ratios.values()) if ratios else None


def over_best_peer(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Returns for each case with a peer the speed of `auto` relative to the best peer."""
    ratios = {}
    for case in dict.fromkeys(m.case for m in measurements):
        found = [m for m in measurements if m.case == case]
        mine = next((m for m in found if m.is_ours and m.timing is not None), None)
        peer = best_peer(found)
        if mine is not None and peer is not None and mine.timing is not None and peer.timing is not None:
            ratios[case] = paired_ratio(peer.timing, mine.timing).median
    return ratios


# Drawing --------------------------------------------------------------------------------------------------------------


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    """Returns a whole number from `low` to `high`, log-uniformly drawn."""
    return round(low * (high / low) ** draw.random())


if __name__ == "__main__":
    sys.exit(main())
