"""Draws calls of few queries on long caches from a commit's hash, and times them beside the best peer.

    python -m benchmarks.draw_decode OUT.toml                 40 calls from the hash of HEAD
    python -m benchmarks.draw_decode OUT.toml --seed HASH     those of another commit
    python -m benchmarks.draw_decode OUT.toml --named         named calls instead
    python -m benchmarks.draw_decode OUT.toml --time RECORD.jsonl [--rounds 9] [--others]

The calls have 1 to 16 queries, 1 to 128 sequences of 1,024 to 131,072 keys, groups of 1, 4 and 8 query heads,
contiguous keys and pages of 16 to 256. The last command times `auto`, SDPA's backends and FlashAttention-4, device time
only, and prints the geometric mean over the best peer, the worst call, and every call below 0.97. SDPA has no causal
mask aligned to the last key and no pages, so FlashAttention-4 is the only peer of those calls.

`--peers` names the peers: PyTorch's `sdpa_flash` and `sdpa_efficient` have the same instructions as our code for other
NVIDIA cards (`benchmarks.card_code`).

`--others` then times other configs of `split_kv` (`others`) on the calls that have no peer, or where `auto` is less
than 1.05 times as fast as the best one, and prints those that are more than 3 % faster than `auto`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.draw_model_grid import toml_line
from benchmarks.drawn import GOAL, configured, draw, gains, goal_verdict, log_uniform, over_best_peer, suite_of, timed
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import split_kv
from warpwave.kernels.split_kv import splits
from warpwave.kernels.split_kv.config import Config, may_map
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.peers import Peer
from warpwave.workbench.bench.records import OURS
from warpwave.workbench.bench.table import print_table, summary_tables
from warpwave.workbench.bench.workloads import Case

BATCHES, KEYS, QUERIES = (1, 128), (1024, 131_072), (1, 16)
MOST_BYTES = 2 << 30  # of K and V: calls are compiled in as many processes as the host has cores, each with its inputs
PEERS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flash_attention_4")
# Batch, queries, keys, query and kv heads, keys of a page: calls that were slower than a peer, or bound by latency.
NAMED = (
    (24, 4, 5001, 64, 8, 0), (24, 4, 5001, 32, 4, 0), (200, 1, 777, 32, 8, 0), (4, 1, 4096, 32, 8, 0),
    (4, 1, 4096, 32, 8, 16), (1, 1, 8192, 32, 8, 16), (128, 2, 2048, 32, 8, 16), (128, 2, 2048, 32, 8, 0),
    (1, 16, 131_072, 32, 8, 0), (16, 8, 16_384, 32, 8, 0), (16, 8, 16_384, 32, 8, 16), (16, 16, 16_384, 64, 8, 0),
    (128, 16, 2048, 32, 8, 64), (8, 8, 4096, 64, 8, 16),
)  # fmt: skip
# Other head sizes, a chunk of a prompt, and caches of 8 bits.
MORE_NAMED: tuple[dict[str, Any], ...] = tuple(
    {"num_heads_q": 32, "num_heads_kv": 8, "dtype": "bfloat16"} | fields
    for fields in (
        {"batch": 16, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 64},
        {"batch": 16, "seqlen_q": 8, "seqlen_k": 8192, "head_dim": 64},
        {"batch": 16, "seqlen_q": 16, "seqlen_k": 8192, "head_dim": 64, "page_size": 64},
        {"batch": 16, "seqlen_q": 1, "seqlen_k": 4096, "head_dim": 256},
        {"batch": 16, "seqlen_q": 8, "seqlen_k": 4096, "head_dim": 256},
        {"batch": 16, "seqlen_q": 16, "seqlen_k": 4096, "head_dim": 256, "page_size": 64},
        {"batch": 1, "seqlen_q": 512, "seqlen_k": 8192, "head_dim": 128, "page_size": 64, "causal": True},
        {"batch": 16, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 128, "page_size": 64, "cache": "int8:token"},
        {"batch": 16, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 128, "page_size": 64, "cache": "float8_e4m3fn:head"},
        {"batch": 16, "seqlen_q": 8, "seqlen_k": 8192, "head_dim": 128, "page_size": 64, "cache": "int8:head"},
        {"batch": 16, "seqlen_q": 16, "seqlen_k": 8192, "head_dim": 128, "page_size": 64, "cache": "int8:head"},
    )
)


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the suite to write")
    parser.add_argument("--seed", help="a commit's hash; default: HEAD's")
    parser.add_argument("--named", action="store_true", help="the calls of NAMED and MORE_NAMED instead of drawn ones")
    parser.add_argument("--time", type=Path, metavar="RECORD", help="time the calls, and append them to this record")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", nargs="*", default=PEERS, help=f"default: {' '.join(PEERS)}")
    parser.add_argument("--others", action="store_true", help="also time other configs where `auto` is not well ahead")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}; it must be at least 1")
    if asked.others and asked.time is None:
        parser.error("--others needs --time")
    if asked.time is not None and not torch.cuda.is_available():
        parser.error("--time needs a GPU")
    cases = draw(parser, asked.out, asked.seed, named if asked.named else suite)
    if asked.time is None:
        return 0
    name = "named decode" if asked.named else "drawn decode"
    measured = timed(name, cases, asked.time, asked.rounds, asked.peers)
    for table in summary_tables(measured):
        print_table(table)
    print(goal_verdict(measured))
    if asked.others:
        behind = [case for case in cases if over_best_peer(measured).get(case.name, 0.0) < GOAL]
        for line in gains(timed(f"{name}, others", behind, asked.time, asked.rounds, (), contenders_of_others)):
            print(line)
    return 0


def suite(seed: str) -> str:
    """Returns the suite as TOML."""
    return suite_of(f"40 calls of few queries drawn from {seed} by benchmarks/draw_decode.py", seed, _shape)


def named(_: str) -> str:
    """Returns the calls of NAMED and MORE_NAMED as a suite in TOML."""
    fields = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "page_size")
    calls = [dict(zip(fields, call, strict=True)) for call in NAMED]
    lines = [toml_line({n: x for n, x in call.items() if x} | {"head_dim": 128, "dtype": "bfloat16"}) for call in calls]
    lines += [toml_line(call) for call in MORE_NAMED]
    return "\n".join(['description = "named calls of few queries"', "cases = [", *lines, "]", ""])


def _shape(draw: random.Random) -> dict[str, Any]:
    heads_kv, group, head_dim = draw.choice((4, 8)), draw.choice((1, 4, 8)), draw.choice((64, 128, 128))
    batch, seqlen_k = log_uniform(draw, *BATCHES), log_uniform(draw, *KEYS)
    if draw.random() < 0.5:
        seqlen_k = -(-seqlen_k // 64) * 64
    while batch * seqlen_k * heads_kv * head_dim * 4 > MOST_BYTES:
        batch //= 2
    drawn: dict[str, Any] = {
        "head_dim": head_dim,
        "batch": batch,
        "seqlen_q": log_uniform(draw, *QUERIES),
        "seqlen_k": seqlen_k,
        "num_heads_q": heads_kv * group,
        "num_heads_kv": heads_kv,
        "dtype": draw.choice(("bfloat16", "float16")),
    }
    if drawn["seqlen_q"] > 1:  # one query sees all keys either way, and SDPA runs only the call without a mask
        drawn["causal"] = draw.choice((False, True))
    page_size = draw.choice((0, 0, 0, 0, 16, 64, 128, 256))
    return drawn | ({"page_size": page_size} if page_size else {})


# Other configs --------------------------------------------------------------------------------------------------------


def others(problem: AttentionProblem, gpu: Gpu) -> dict[str, Config]:
    """Returns configs to compare with the default, by name: on Hopper other ways to load keys, and numbers of splits
    with which the blocks fill whole waves; on other GPUs other tiles, which pointers load."""
    first, found = split_kv.default(problem, gpu), {}
    is_hopper = gpu.capability == 90
    of_maps = ((64, 2, 3, True), (64, 4, 4, True), (128, 4, 3, True), (64, 4, 3, False))
    of_pointers = itertools.product((16, 32, 64, 128), (2, 4), (2, 3, 4), (False,))
    tilings = [
        dataclasses.replace(first, block_n=keys, num_warps=warps, num_stages=stages, by_map=by_map, roles=False)
        for keys, warps, stages, by_map in (of_maps if is_hopper else of_pointers)
    ]
    if first.block_m == 16 and is_hopper:
        tilings += [Config(16, 64, 4, n, launched_ahead=True, by_map=True, roles=True) for n in (6, 3, 2)]
    for tiling in tilings:
        if split_kv.smem_bytes(problem, gpu, tiling) > gpu.smem_per_block_bytes:
            continue
        if tiling.by_map and not may_map(problem, gpu, tiling):
            continue
        split = splits.with_splits(problem, gpu, tiling)
        tiles = splits.blocks_with_rows(problem, tiling)
        sms = gpu.assumed_sms
        whole = {max(1, waves * sms * splits.blocks_per_sm(problem, gpu, tiling) // tiles) for waves in (1, 2)}
        for number in sorted({split.num_splits, 1, *whole} if is_hopper else {split.num_splits}):
            config = dataclasses.replace(split, num_splits=min(number, splits.MAX_SPLITS))
            if config != first:
                found[_name(config)] = config
    return found


def _name(config: Config) -> str:
    way = "roles" if config.roles else "maps" if config.by_map else "pointers"
    tile = f"{config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages"
    return f"{tile}, {config.num_splits} splits, {way}"


def contenders_of_others(case: Case) -> Mapping[str, Peer]:
    """Returns the configs of `others` as contenders."""
    configs = others(case.problem, current_gpu(torch.device("cuda", torch.cuda.current_device())))
    return {f"{OURS}split_kv {name}": partial(configured, split_kv.NAME, config) for name, config in configs.items()}


if __name__ == "__main__":
    sys.exit(main())
