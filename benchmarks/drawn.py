"""What programs that draw calls from a commit's hash share: the drawing, timing beside peers, goals, and other configs.

Calls that cannot be known while the kernels are written are calls to which no rule can be fitted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.draw_model_grid import toml_line
from warpwave import CacheLayer, attention, attention_varlen, attention_with_kv_cache
from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.contenders import contenders
from warpwave.workbench.bench.goals import best_peer
from warpwave.workbench.bench.inputs import call_arguments, make_operands
from warpwave.workbench.bench.measure import Settings, measure
from warpwave.workbench.bench.peers import Peer, Prepared
from warpwave.workbench.bench.records import OURS, Measurement, RecordWriter
from warpwave.workbench.bench.timing import paired_ratio
from warpwave.workbench.bench.workloads import Case, parse_suite

SHAPES = 40
GOAL, FLOOR = 1.05, 0.97  # geometric mean and worst call, relative to the best peer
GAIN = 1.03  # what another config must gain to be worth a rule
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # makes it cache compiled code, so that processes can share it

# Drawing --------------------------------------------------------------------------------------------------------------


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


def suite_of(
    description: str, seed: str, shape: Callable[[random.Random], dict[str, Any]], shapes: int = SHAPES
) -> str:
    """Returns different results of `shape` as a suite in TOML."""
    draw = random.Random(seed)
    lines: list[str] = []
    while len(lines) < shapes:
        line = toml_line(shape(draw))
        if line not in lines:
            lines.append(line)
    return "\n".join([f'description = "{description}"', "cases = [", *lines, "]", ""])


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    """Returns a whole number from `low` to `high`, log-uniformly drawn."""
    return round(low * (high / low) ** draw.random())


# Timing ---------------------------------------------------------------------------------------------------------------


def timed(
    suite: str,
    cases: Sequence[Case],
    record: Path,
    rounds: int,
    peers: Sequence[str],
    more: Callable[[Case], Mapping[str, Peer]] = lambda case: {},
) -> list[Measurement]:
    """Times every case with `auto` and the peers, device time only.

    Args:
        suite: the suite's name in the record.
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
        found = measure(case, suite, {**mine, **contenders((), peers)}, settings)
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
        kinds = {_kind_of_code(case.problem): case for case in reversed(cases)}
        jobs = [(case, *peer) for case in kinds.values() for peer in contenders((), ("flash_attention_4",)).items()]
    jobs += [(case, *contender) for case, mine in zip(cases, ours, strict=True) for contender in mine.items()]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        for job in [pool.submit(_prepare, *job) for job in jobs]:
            job.result()


def _kind_of_code(p: AttentionProblem) -> tuple[object, ...]:
    """Returns what FlashAttention-4 compiles separate code for, as far as drawn calls differ."""
    group = p.num_heads_q // p.num_heads_kv
    has_window = p.window_size != (-1, -1)
    return p.head_dim, p.head_dim_v, p.dtype, p.causal is None, group, p.page_size, has_window, p.softcap


def _prepare(case: Case, name: str, contender: Peer) -> None:
    """Compiles for one case. Errors are ignored here, because the timing reports them."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        contender(case.problem, make_operands(case.problem, device, seed=0))
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} on {case.name}: {type(error).__name__}", file=sys.stderr)


# Results --------------------------------------------------------------------------------------------------------------


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


def goal_verdict(measured: Sequence[Measurement]) -> str:
    """Returns how `auto` compares with the best peer and with the goals, as text."""
    ratios = over_best_peer(measured)
    if not ratios:
        return "no comparison: no call has a peer"
    mean, (worst, least) = geometric_mean(ratios.values()), min(ratios.items(), key=lambda found: found[1])
    met = "met" if mean >= GOAL and least >= FLOOR else "missed"
    lines = [
        f"{mean:.3f} of the best peer in the geometric mean of {len(ratios)} calls, {least:.3f} at the worst "
        f"({worst}): goal of {GOAL} and {FLOOR} {met}"
    ]
    lines += [f"  {ratio:.3f} {name}" for name, ratio in sorted(ratios.items(), key=lambda x: x[1]) if ratio < FLOOR]
    return "\n".join(lines)


# Other configs --------------------------------------------------------------------------------------------------------


def configured(kernel: str, config: Any, problem: AttentionProblem, operands: Operands | CachedOperands) -> Prepared:
    """Prepares a kernel with a config, through the public call."""
    options = {"kernel": kernel, "config": config, **call_arguments(problem, operands)}
    if isinstance(operands, CachedOperands):
        layer = CacheLayer(
            operands.k, operands.v, operands.page_table, operands.seqused_k, k_descale=operands.k_descale,
            v_descale=operands.v_descale,
        )  # fmt: skip
        call = partial(attention_with_kv_cache, operands.q, layer, **options)
    else:
        call = partial(attention_varlen if problem.packed else attention, *operands[:3], **options)
    call()
    return Prepared(call, to_out=lambda out: out, kernel=kernel, eager=True, config=dataclasses.asdict(config))


def gains(measured: Sequence[Measurement], least: float = GAIN) -> list[str]:
    """Returns a line for every call, with its configs that are more than `least` times as fast as `auto`, best
    first."""
    lines = []
    for case in dict.fromkeys(m.case for m in measured):
        found = {m.contender: m.timing for m in measured if m.case == case and m.is_ours and m.timing is not None}
        auto = found.pop(f"{OURS}auto", None)
        if auto is None:
            continue
        ratios = {name: paired_ratio(auto, timing).median for name, timing in found.items()}
        better = sorted(((ratio, name) for name, ratio in ratios.items() if ratio > least), reverse=True)
        said = "; ".join(f"{name.removeprefix(OURS)} {ratio:.3f}" for ratio, name in better) or "no config gains 3 %"
        lines.append(f"{case}: auto {auto.median_us:.1f} us; {said}")
    return lines
