"""Tiles counted without walking them are the tiles that eager walks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwave.gpu import CPU
from warpwave.kernels import eager, eager_cost
from warpwave.kernels.eager_cost import Tiles, tiles_of_sequence
from warpwave.problem import AttentionProblem, Band, Causal

PROBLEM = AttentionProblem(
    batch=3, seqlen_q=2500, seqlen_k=3100, num_heads_q=6, num_heads_kv=2, head_dim=64, head_dim_v=40, dtype="bfloat16",
    softmax_scale=0.1, causal=Causal(),
)  # fmt: skip


def walked(band: Band, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> Tiles:
    """The same counts by the loops that compute."""
    counts = [0] * len(Tiles._fields)
    for block in eager._row_blocks(seqlen_q, block_m):
        counts[0] += 1
        rows = block.stop - block.start
        for tile in eager._tiles(band, block, seqlen_k, block_n):
            keys = tile.keys.stop - tile.keys.start
            for i, count in enumerate((1, tile.cut, keys, rows, rows * keys, rows * keys * tile.cut), 1):
                counts[i] += count
    return Tiles(*counts)


edge = st.none() | st.integers(-150, 150) | st.integers(-15, 15)


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 140), st.integers(0, 140), st.integers(1, 16), st.integers(1, 24), edge, edge)
def test_every_band_and_tile(
    seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, low: int | None, high: int | None
) -> None:
    sizes = (Band(low, high), seqlen_q, seqlen_k, block_m, block_n)
    assert tiles_of_sequence(*sizes) == walked(*sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": None},
        {"causal": Causal("top_left"), "window_size": (300, -1)},
        {"causal": None, "window_size": (700, 65), "seqlen_q": 4099},
        {"seqlen_q": 1},
        {"batch": 4, "packed": True, "total_q": 4000, "total_k": 6006,
         "lengths": ((2500, 3100), (0, 5), (1499, 2900), (1, 1))},
    ],
)  # fmt: skip
def test_the_cost_of_ordinary_calls_is_that_of_the_walk(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(PROBLEM, **changes)
    for config in (*eager.configs(problem, CPU), eager.Config(100, 77)):
        counted = eager.cost(problem, CPU, config)
        with monkeypatch.context() as patch:
            patch.setattr(eager_cost, "tiles_of_sequence", walked)
            assert eager.cost(problem, CPU, config) == counted


def test_a_call_of_any_length_is_counted_at_once() -> None:
    """A walk of its 10^10 tiles would take hours."""
    for window in ((-1, -1), (4096, 0), (1_000_003, 77)):
        problem = replace(PROBLEM, seqlen_q=10**8 + 1, seqlen_k=10**8, window_size=window, batch=1)
        started = time.perf_counter()
        cost = eager.cost(problem, CPU, eager.Config(512, 1023))  # 1,023 blocks in a period
        assert time.perf_counter() - started < 1
        assert cost.flops >= problem.flops
