"""Host time of eager calls with lengths that were never seen before, of a known class.

    PYTHONPATH=. python3 -m benchmarks.new_lengths [--lengths 1000] [--memory 10000] [--out RECORD.json]

Each case calls attention at each of many lengths: dense, packed, and one token of each sequence on caches whose page
tables differ in width. A call is timed on the host, from the call to its return, with an idle GPU. Prints, as JSON,
microseconds of a call at a new length (median, mean, 90th percentile), of the same call again, which makes the guard
of its layout, and of the third and later calls; and the resident memory of the process in MiB while `--memory` more
lengths are called.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import warpwave

HEADS, HEAD_DIM = 8, 128
Call = Callable[[], Any]


def dense(seqlen: int, head_dim: int = HEAD_DIM) -> Call:
    """Returns a causal prefill of one sequence."""
    q, k, v = (torch.empty(1, seqlen, HEADS, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    return lambda: warpwave.attention(q, k, v, causal=True)


def packed(seqlen: int) -> Call:
    """Returns a causal prefill of four packed sequences, the longest with half of the tokens."""
    q, k, v = (torch.empty(seqlen, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    offsets = torch.tensor([0, seqlen // 2, 3 * seqlen // 4, seqlen, seqlen], dtype=torch.int32, device="cuda")
    half = seqlen // 2
    return lambda: warpwave.attention_varlen(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=half, max_seqlen_k=half, causal=True
    )


def cached(pages: int, page_size: int) -> Call:
    """Returns a decode step of eight sequences of 1,024 tokens, with a page table of `pages` pages for each."""
    used, batch, heads_q = 1024, 8, 4 * HEADS
    k, v = _pool(page_size)
    q = torch.empty(batch, 1, heads_q, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(batch, pages, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), min(used, pages * page_size), dtype=torch.int32, device="cuda")
    layer = warpwave.CacheLayer(k, v, table, lengths)
    return lambda: warpwave.attention_with_kv_cache(q, layer, causal=True)


_pools: dict[int, list[torch.Tensor]] = {}


def _pool(page_size: int) -> list[torch.Tensor]:
    if page_size not in _pools:
        shape = (64, page_size, HEADS, HEAD_DIM)
        _pools[page_size] = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    return _pools[page_size]


CASES: dict[str, Callable[[int], Call]] = {
    "dense": dense,
    "dense, head_dim 64": lambda n: dense(n, 64),
    "packed": packed,
    "cached, pages of 16": lambda n: cached(n, 16),
    "cached, pages of 64": lambda n: cached(n, 64),
}


def measure(make: Callable[[int], Call], lengths: list[int]) -> dict[str, Any]:
    """Returns host times of the first, the second and the later calls at each length, in us."""
    first: list[float] = []
    second: list[float] = []
    later: list[float] = []
    for length in lengths:
        call = make(length)
        torch.cuda.synchronize()
        for times in (first, second, later, later):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
            torch.cuda.synchronize()
    return {
        "median_us": statistics.median(first),
        "mean_us": statistics.mean(first),
        "p90_us": statistics.quantiles(first, n=10)[-1],
        "first_us": first[0],
        "again_us": statistics.median(second),
        "known_us": statistics.median(later),
        "raw_us": [round(each, 1) for each in first],
    }


def memory(make: Callable[[int], Call], lengths: list[int], rounds: int = 10) -> list[float]:
    """Returns the largest resident memory of the process so far, in MiB, after each tenth of the lengths."""
    found = []
    for i in range(rounds):
        for length in lengths[i::rounds]:
            make(length)()
        torch.cuda.synchronize()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return found


def main() -> None:
    """Prints the record, and writes it if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, default=1000)
    parser.add_argument("--memory", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    drawn = random.Random(0)
    # Every length occurs once, so each is new. Earlier calls of other lengths have compiled every variant and config.
    lengths = drawn.sample(range(600, 16_000), arguments.lengths + 100)
    found: dict[str, Any] = {
        "what": "host us of calls at lengths never seen before (python3 -m benchmarks.new_lengths)",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lengths": {},
    }
    for name, make in CASES.items():
        of_case = [8 + length // 16 for length in lengths] if name.startswith("cached") else lengths
        of_case = list(dict.fromkeys(of_case))
        measure(make, of_case[:100])
        found["lengths"][name] = measure(make, of_case[100:])
        shown = {key: round(value, 1) for key, value in found["lengths"][name].items() if key != "raw_us"}
        print(json.dumps({name: shown}), flush=True)
    if arguments.memory:
        found["rss_mib"] = memory(dense, drawn.sample(range(16, 16_016), arguments.memory))
        print(json.dumps({"rss_mib": found["rss_mib"]}), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
