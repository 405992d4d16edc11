"""Measures the costs and gains of serving features: pages, batch invariance, shared prefixes, host time.

    PYTHONPATH=. python benchmarks/serving.py [--device cuda] [--rounds 9]

Device times are taken in CUDA graphs with all variants of a line interleaved, and ratios within each round. Host times
are those of an eager call. The calls have 32 query and 8 kv heads of 128 in bfloat16 and one query per sequence. Pages
have 16 and 64 tokens; for the cost of pages, shuffled pages of 16 to 256 are compared with one contiguous tensor. Every
variant's result is compared with the plain call's before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpwave import CacheLayer, attention, attention_with_kv_cache
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.timing import Samples, host_time_interleaved, paired_ratio, time_interleaved
from warpwave.workbench.bench.workloads import default_scale

CLOSE = 5e-3  # relative difference of two bfloat16 results summed in another order, as Euclidean norms
SHAPES: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (16, 4096), (64, 8192))
PAGED: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (1, 65536), (4, 4096), (16, 4096), (64, 8192), (128, 2048))
PAGE_SIZES = (16, 32, 64, 128, 256)
PREFIX = (64, 4352, 4096)  # requests, their tokens, those they share

Call = Callable[[], torch.Tensor]


def decode(batch: int, seqlen_k: int, page_size: int) -> AttentionProblem:
    """Returns a decode step of `batch` sequences of `seqlen_k` tokens."""
    return AttentionProblem(
        batch=batch, seqlen_q=1, seqlen_k=seqlen_k, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=default_scale(128), page_size=page_size,
    )  # fmt: skip


def on_cache(operands: Any, layer: CacheLayer | None = None, **options: Any) -> Call:
    """Returns the public call on the operands of `make_operands`, or on their queries and this cache."""
    layer = layer or CacheLayer(operands.k, operands.v, operands.page_table, operands.seqused_k)
    return lambda: attention_with_kv_cache(operands.q, layer, **options)


def agree(calls: dict[str, Call]) -> None:
    """Raises SystemExit naming the first call whose result is not that of the first one."""
    plain, *others = calls
    expected = calls[plain]().float()
    for name in others:
        difference = ((calls[name]().float() - expected).norm() / expected.norm()).item()
        if not difference <= CLOSE:
            raise SystemExit(f"{name} differs from {plain} by {difference:.2e}, more than {CLOSE}: not timed")


def device_times(calls: dict[str, Call], device: torch.device, rounds: int) -> dict[str, Samples]:
    """Returns interleaved device times, of CUDA graphs on a GPU."""
    agree(calls)
    mode = "graph" if device.type == "cuda" else "auto"
    return time_interleaved(calls, device=device, rounds=rounds, mode=mode, warmup_s=0.02, sample_s=0.01)


def versus(name: str, times: dict[str, Samples]) -> str:
    """Returns a line with both times and the median of their paired differences."""
    (plain, a), (other, b) = times.items()
    ratio = paired_ratio(b, a)
    return (
        f"{name:<44} {plain} {a.median_us:9.2f} us   {other} {b.median_us:9.2f} us   {100 * (ratio.median - 1):+6.1f} %"
    )


def pages(batch: int, seqlen_k: int, device: torch.device, rounds: int) -> str:
    """Returns the cost of pages relative to one tensor with the same keys and values."""
    dense = make_operands(decode(batch, seqlen_k, 0), device)
    calls: dict[str, Call] = {"contiguous": lambda: attention(dense.q, dense.k, dense.v)}
    for size in (size for size in PAGE_SIZES if seqlen_k % size == 0):
        count = batch * seqlen_k // size
        order = torch.randperm(count, generator=torch.Generator().manual_seed(size)).to(device)
        k, v = (torch.empty_like(x).view(count, size, *x.shape[2:]) for x in (dense.k, dense.v))
        k[order], v[order] = dense.k.view(k.shape), dense.v.view(v.shape)
        table = order.view(batch, -1).to(torch.int32)
        used = torch.full((batch,), seqlen_k, dtype=torch.int32, device=device)
        calls[str(size)] = on_cache(dense._replace(k=k, v=v), CacheLayer(k, v, table, used))
    times = device_times(calls, device, rounds)
    plain = times.pop("contiguous")
    cost = {size: paired_ratio(t, plain) for size, t in times.items()}
    each = "   ".join(f"{s} {t.median_us:.2f} us {100 * (cost[s].median - 1):+.1f} %" for s, t in times.items())
    return f"pages of, {batch} x {seqlen_k}: contiguous {plain.median_us:.2f} us   {each}"


def invariance(batch: int, seqlen_k: int, device: torch.device, rounds: int) -> str:
    """Returns the cost of batch invariance."""
    operands = make_operands(decode(batch, seqlen_k, 16), device)
    calls = {"free": on_cache(operands), "batch-invariant": on_cache(operands, batch_invariant=True)}
    return versus(f"batch invariance, {batch} x {seqlen_k}", device_times(calls, device, rounds))


def prefix(batch: int, seqlen_k: int, shared: int, device: torch.device, rounds: int) -> str:
    """Returns the gain of reading a shared prefix once."""
    operands = make_operands(decode(batch, seqlen_k, 64), device)
    operands.page_table[:, : shared // 64] = operands.page_table[:1, : shared // 64]
    calls = {"each": on_cache(operands), "once": on_cache(operands, shared_prefix=shared)}
    return versus(f"{batch} requests share {shared} of {seqlen_k} tokens", device_times(calls, device, rounds))


def host(batch: int, seqlen_k: int, device: torch.device, rounds: int) -> str:
    """Returns the host time of an eager call on a cache, without and with a new token, and of SDPA without a cache."""
    problem = decode(batch, seqlen_k, 16)
    operands = make_operands(problem, device)
    k_new, v_new = (torch.zeros(batch, 1, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    q, k, v = (
        torch.zeros(batch, heads, n, 128, dtype=torch.bfloat16, device=device)
        for heads, n in ((32, 1), (8, seqlen_k), (8, seqlen_k))
    )
    calls = {
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "on a cache": on_cache(operands),
        "and writing to it": on_cache(operands, k_new=k_new, v_new=v_new),
    }
    times = host_time_interleaved(calls, device=device, rounds=rounds)
    return f"host time, {batch} x {seqlen_k}: " + "   ".join(f"{n} {s.median_us:.1f} us" for n, s in times.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="short caches, as a smoke test")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    device, shared = torch.device(chosen.device), PREFIX
    shapes, paged = SHAPES, PAGED
    if chosen.small:
        shapes, paged, shared = ((2, 64),), ((2, 64),), (2, 192, 128)
    with torch.no_grad():
        for batch, seqlen_k in paged:
            print(pages(batch, seqlen_k, device, chosen.rounds), flush=True)
        for batch, seqlen_k in shapes:
            print(invariance(batch, seqlen_k, device, chosen.rounds), flush=True)
        print(prefix(*shared, device, chosen.rounds), flush=True)
        for batch, seqlen_k in shapes[:1]:
            print(host(batch, seqlen_k, device, chosen.rounds), flush=True)


if __name__ == "__main__":
    main()
