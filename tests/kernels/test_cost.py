"""The tiles that kernels visit, counted by arithmetic progressions, are those counted pair by pair."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwave.kernels.cost import Walk, launch_order, walk
from warpwave.problem import AttentionProblem, Causal

SIZES: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "dtype": "bfloat16", "softmax_scale": 0.1}


def counted(problem: AttentionProblem, block_m: int, block_n: int, heads: int, from_first: bool) -> Walk:
    """The same counts of one sequence from the pairs that its mask shows."""
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    low, high = problem.band(seqlen_q, seqlen_k)

    def shown(query: int, key: int) -> bool:
        after = low is None or key >= query + low
        return after and (high is None or key <= query + high) and key < seqlen_k

    origin = min(max(low or 0, 0), seqlen_k) if from_first else 0
    counts, cut = [], 0
    for line in range(0, seqlen_q * heads, block_m):
        queries = {row // heads for row in range(line, min(line + block_m, seqlen_q * heads))}
        visited = 0
        for first in range(origin, seqlen_k, block_n):
            pairs = [shown(query, key) for query in queries for key in range(first, first + block_n)]
            visited += any(pairs)
            cut += any(pairs) and not all(pairs)
        counts.append(max(visited, int(from_first)))
    units = problem.num_heads_q // heads
    return Walk(units * sum(counts), max(counts, default=0), units * sum(map(bool, counts)), units * cut)


side = st.integers(-1, 60)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 70), st.sampled_from([None, Causal(), Causal("top_left")]), side, side,
    st.integers(1, 16), st.integers(1, 16), st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_every_mask_and_tile(
    seqlen_q: int, seqlen_k: int, causal: Any, left: int, right: int, block_m: int, block_n: int, heads: int
) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=6, num_heads_kv=2, causal=causal,
        window_size=(left, right), **SIZES,
    )  # fmt: skip
    assert walk(problem, block_m, block_n, heads) == counted(problem, block_m, block_n, heads, False)
    low, high = problem.band(seqlen_q, seqlen_k)
    if low is None or high is None or low <= high:
        assert walk(problem, block_m, block_n, 1, True).tiles == counted(problem, block_m, block_n, 1, True).tiles


@pytest.mark.parametrize("seqlen", [3_000, 100_003])
def test_long_sequences_are_counted_as_they_are_walked(seqlen: int) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen + 77, num_heads_q=4, num_heads_kv=2, causal=Causal(),
        window_size=(2_000, -1), **SIZES,
    )  # fmt: skip
    ((steps, times),) = launch_order(problem, 64, 96, 2)
    found = walk(problem, 64, 96, 2)
    assert (found.tiles, found.longest, found.items) == (times * sum(steps), max(steps), times * len(steps))


def test_a_hundred_million_tokens_take_no_longer() -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=10**8, seqlen_k=10**8, num_heads_q=1, num_heads_kv=1, causal=Causal(), **SIZES
    )
    start = time.perf_counter()
    found = walk(problem, 128, 64)
    tiles = 10**8 // 128
    assert found == (tiles * (tiles + 1), 2 * tiles, tiles, 2 * tiles), (
        "tile i visits 2 i tiles of keys, of which 2 cut"
    )
    for block_m in (16, 128, 192):
        walk(problem, block_m, 64, from_first=True)
        assert launch_order(problem, block_m, 64) == ()
    assert time.perf_counter() - start < 2
