"""Draws shapes from a commit's hash, to check whether the forward is as fast outside the rows of its table.

    python -m benchmarks.draw_forward OUT.toml                 40 shapes from the hash of HEAD
    python -m benchmarks.draw_forward OUT.toml --seed HASH     those of another commit
    python -m benchmarks.draw_forward OUT.toml --any-head-dim  60 shapes of all head sizes, GQA, chunks of a prefill
    python -m benchmarks.draw_forward OUT.toml --named         the calls that lost before, or nearly, instead
    python -m benchmarks.draw_forward OUT.toml --time RECORD.jsonl [--beside FORWARD.jsonl] [--config M,N,STAGES ...]

The last command times them with cuDNN and FlashAttention-4, device time only. It prints the geometric mean over the
best peer, the worst call, every call below 0.97, and the mean of FORWARD.jsonl, a record of the suite `forward`, which
the 40 shapes should reach within 5 %. It compiles in many processes first, so that 40 shapes end within 100 seconds on
a machine with 16 cores. `warpwave bench OUT.toml` does the same in ten minutes, and also measures host time.

`--config` also times `hopper/flash_fwd` with that config, in the same rounds, and prints its speed relative to `auto`:
values of `Config` in its order. It may be repeated; `--only TEXT` keeps the calls whose names contain the text.

The drawn shapes cannot be known while the kernels are written, so no rule can be fitted to them. Widths, masks and work
are those of the suite `forward`; lengths, batches and heads are arbitrary. SDPA has no causal mask aligned to the last
key, no window and no softcap, so FlashAttention-4 is the only peer of such calls.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.draw_model_grid import toml_line
from benchmarks.drawn import SHAPES, configured, draw, gains, goal_verdict, log_uniform, over_best_peer, suite_of, timed
from warpwave.kernels.hopper import flash_fwd
from warpwave.workbench.bench.peers import Peer
from warpwave.workbench.bench.records import OURS, Measurement, read_records
from warpwave.workbench.bench.table import print_table, summary_tables
from warpwave.workbench.bench.workloads import Case, SuiteError, matching

LENGTHS = (1024, 16384)
WIDTH = (1024, 4096)  # heads * head_dim, 2048 in the suite `forward`
TOKENS = (8192, 32768)
PEERS = ("sdpa_cudnn", "flash_attention_4")

ANY_SHAPES = 60
HEAD_DIMS = tuple(range(8, 257, 8))
PAIRS = ((192, 128), (64, 128), (128, 64), (96, 64))  # head_dim, head_dim_v
ANY_LENGTHS = (256, 8192)
MOST_HEADS = 32  # narrow heads by the hundred would take seconds

# Calls that were slower than a peer, or hardly faster: tables as in a suite.
LONG = {"batch": 4, "seqlen_q": 4096}
EITHER = {"causal": [False, True]}
NAMED: tuple[dict[str, Any], ...] = (
    *({"head_dim": d, "num_heads_q": 2048 // d, **LONG, **EITHER} for d in (48, 80, 96, 112, 160, 176)),
    {"head_dim": 192, "head_dim_v": 128, "num_heads_q": 16, **LONG, **EITHER},
    {"head_dim": [112, 160], "num_heads_q": 16, "batch": 16, "seqlen_q": 1024, **EITHER},
    {"head_dim": 192, "head_dim_v": 128, "num_heads_q": 16, "batch": 16, "seqlen_q": 1024, "causal": True},
    {"head_dim": 48, "num_heads_q": 6, "num_heads_kv": 2, "batch": 32, "seqlen_q": 700, **EITHER},
    *({"head_dim": d, "num_heads_q": 2048 // d, **LONG, "softcap": 30.0, "causal": True} for d in (64, 128, 256)),
    {"head_dim": 128, "num_heads_q": 16, **LONG, "softcap": 30.0},
    *(
        {"head_dim": d, "num_heads_q": 2048 // d, "batch": 1, "seqlen_q": 16384, "causal": True}
        | {"window_size": [1023, 0]}
        for d in (64, 128, 256)
    ),
    {"head_dim": 128, "num_heads_q": 16, "batch": 1, "seqlen_q": 16384, "window_size": [512, 512]},
    {"head_dim": 128, "num_heads_q": 32, "num_heads_kv": 8, "batch": 2, "seqlen_q": 512, "seqlen_k": 12288, **EITHER},
    # Few queries of 32 heads on 8, aligned to the last key.
    *(
        {"head_dim": 128, "num_heads_q": 32, "num_heads_kv": 8, "batch": batch, "seqlen_q": queries, "seqlen_k": keys}
        | {"causal": queries > 1}
        for batch, queries, keys in (
            (200, 1, 777), (24, 4, 5001), (4, 32, 8192), (4, 64, 8192), (4, 128, 8192), (1, 64, 65536),
        )
    ),
    {"head_dim": 64, "num_heads_q": 16, "batch": 1, "seqlen_q": 1024, "dtype": "float16", "hot": True, **EITHER},
)  # fmt: skip


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the suite to write")
    parser.add_argument("--seed", help="a commit's hash; default: HEAD's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--any-head-dim", action="store_true", help="60 shapes of all head sizes instead of the 40")
    which.add_argument("--named", action="store_true", help="the calls of NAMED instead of drawn ones")
    parser.add_argument("--again", action="store_true", help="the draw was timed before: a suite of its own in records")
    parser.add_argument("--only", default="", metavar="TEXT", help="time only calls whose names contain this")
    parser.add_argument("--time", type=Path, metavar="RECORD", help="time the shapes, and append them to this record")
    parser.add_argument("--beside", type=Path, metavar="FORWARD", help="a record of the suite `forward`, to compare")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--config", type=config, action="append", default=[], help="also time hopper/flash_fwd with it")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}; it must be at least 1")
    if asked.beside is not None and not asked.beside.is_file():
        parser.error(f"--beside: there is no file {asked.beside}")
    if asked.config and asked.time is None:
        parser.error("--config needs --time")
    if asked.time is not None and not torch.cuda.is_available():
        parser.error("--time needs a GPU")
    name, of_seed = "drawn", suite
    if asked.any_head_dim:
        name, of_seed = "drawn any_head_dim", any_head_dim
    if asked.named:
        name, of_seed = "named forward", named
    if asked.again:
        name = f"{name} again"
    cases = draw(parser, asked.out, asked.seed, of_seed)
    try:
        cases = matching(cases, asked.only, name)
    except SuiteError as error:
        parser.error(f"--only: {error}")
    if asked.time is not None:
        measured = timed(name, cases, asked.time, asked.rounds, PEERS, partial(contenders_of, tuple(asked.config)))
        for table in summary_tables(measured):
            print_table(table)
        print(goal_verdict(measured))
        if asked.config:
            print("\n".join(gains(measured, least=0.0)))
        if asked.beside is not None:
            print(verdict(measured, [m for _, m in read_records(asked.beside).measurements]))
    return 0


def config(text: str) -> flash_fwd.Config:
    """Returns the config of a command-line argument: its values in order, as `128,64,2`."""
    try:
        return flash_fwd.Config(*map(int, text.split(",")))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no config of {flash_fwd.NAME}: {error}") from error


def contenders_of(configs: Sequence[flash_fwd.Config], _: Case) -> Mapping[str, Peer]:
    """Returns `hopper/flash_fwd` with each config as a contender. A call that a config does not fit is refused."""
    return {f"{OURS}{flash_fwd.NAME} {c}": partial(configured, flash_fwd.NAME, c) for c in configs}


# Suites ---------------------------------------------------------------------------------------------------------------


def suite(seed: str) -> str:
    """Returns the suite of 40 shapes as TOML."""
    return suite_of(f"{SHAPES} shapes drawn from {seed} by benchmarks/draw_forward.py", seed, _shape)


def any_head_dim(seed: str) -> str:
    """Returns the suite of 60 shapes of all head sizes as TOML."""
    said = f"{ANY_SHAPES} shapes of any head_dim drawn from {seed} by benchmarks/draw_forward.py"
    return suite_of(said, seed, _any_shape, ANY_SHAPES)


def named(seed: str) -> str:
    """Returns the calls of NAMED, which are not drawn, as a suite in TOML."""
    lines = [toml_line({"dtype": "bfloat16"} | table) for table in NAMED]
    return "\n".join(['description = "forward calls that lost before, or nearly"', "cases = [", *lines, "]", ""])


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


def _any_shape(draw: random.Random) -> dict[str, Any]:
    """Returns a call of any head size: two in three attend to themselves, one is a chunk of a longer prefill."""
    head_dim = head_dim_v = draw.choice(HEAD_DIMS)
    if draw.random() < 0.2:
        head_dim, head_dim_v = draw.choice(PAIRS)
    group = draw.choice((1, 1, 2, 4, 8))
    heads = min(MOST_HEADS, log_uniform(draw, -(-WIDTH[0] // head_dim), WIDTH[1] // head_dim))
    heads_kv = max(1, heads // group)
    seqlen_k = log_uniform(draw, *ANY_LENGTHS)
    if draw.random() < 0.5:
        seqlen_k = -(-seqlen_k // 64) * 64
    seqlen_q = max(1, seqlen_k // draw.choice((2, 4, 8))) if draw.random() < 1 / 3 else seqlen_k
    drawn: dict[str, Any] = {
        "head_dim": head_dim,
        "batch": max(1, round(log_uniform(draw, *TOKENS) / seqlen_k)),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "num_heads_q": heads_kv * group,
        "num_heads_kv": heads_kv,
        "dtype": draw.choice(("bfloat16", "float16")),
        "causal": draw.choice((False, True)),
    }
    return drawn | ({"head_dim_v": head_dim_v} if head_dim_v != head_dim else {})


# Beside the table -----------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(main())
