"""The order in which blocks of keys add to dQ, over drawn bands: the device functions themselves, run on the CPU."""

from __future__ import annotations

import random
from types import SimpleNamespace as Fields
from typing import Any

import pytest
import torch

from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton

pytestmark = needs_triton


def drawn(rng: random.Random) -> tuple[Any, Any]:
    """The lengths of a sequence, and rules with a window, an alignment, a direction, and tiles that may begin early."""
    has_low, has_high = rng.random() < 0.5, rng.random() < 0.5
    left = rng.choice((0, 1, 13, 64, 127, 128, 300)) if has_low else 2**30
    right = rng.choice((0, 0, 1, 5, 70)) if has_high else 2**30
    block_m = rng.choice((64, 128))
    rules = Fields(
        BLOCK_M=block_m, BLOCK_N=128, HAS_LOW=has_low, HAS_HIGH=has_high, TOP_LEFT=has_high and rng.random() < 0.4,
        IS_VARLEN=rng.random() < 0.5, ASCENDS=has_high and rng.random() < 0.5, HAS_MASK=False, BIAS="",
        window_left=torch.tensor(left), window_right=torch.tensor(right),
        dropout=Fields() if rng.random() < 0.3 else (),
    )  # fmt: skip
    lengths = rng.choice((1, 3, 60, 64, 65, 127, 200, 333)), rng.choice((1, 2, 63, 128, 129, 200, 400, 513))
    return Fields(seqlen_q=torch.tensor(lengths[0]), seqlen_k=torch.tensor(lengths[1])), rules


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_blocks_that_walk_a_tile_of_queries_have_its_turns_in_their_order(is_deterministic: bool) -> None:
    """And each tile whose sums are read has a first block, which stores them. Without an order, all others wait for
    that block alone. Tiles come before heads, so that no block gets ahead by its shorter heads."""
    from warpwave.kernels.hopper import parts, scheduler, words
    from warpwave.kernels.hopper.flash_bwd import band, steps, turns

    modules = {module.__name__: module for module in (band, parts, scheduler, steps, turns, words)}
    functions = gluon_on_cpu.functions(modules, gluon_on_cpu.Block(0, 1))
    bands, ranks, places = (functions[module.__name__] for module in (band, turns, steps))
    even, uneven = Fields(group_size=3, key_heads=()), Fields(group_size=3, num_heads=7, key_heads=(3,))
    for heads, of_split in ((even, ((0, 3), (3, 3), (6, 3))), (uneven, ((0, 2), (2, 2), (4, 3)))):
        assert tuple(tuple(map(int, places.heads_of(Fields(head=i), heads))) for i in range(3)) == of_split
    rng, tiles_seen = random.Random(5), 0
    for _ in range(800):
        work, rules = drawn(rng)
        own = bands.band_of(work, rules)
        found: dict[int, list[int]] = {}
        for block in range(-(-max(0, int(own.k_end - own.k_begin)) // rules.BLOCK_N)):
            span = bands.query_span(own, own.k_begin + block * rules.BLOCK_N, rules)
            walked = list(range(int(span.begin), int(span.end)))[:: 1 if rules.ASCENDS else -1]
            steps_of_block = [
                tuple(map(int, places.place_of_step(i, *places.heads_of(Fields(head=2), even), span, True, rules)))
                for i in range(3 * len(walked))
            ]
            assert steps_of_block == [(head, tile) for tile in walked for head in (6, 7, 8)]
            for tile in walked:
                turn_of = Fields(IS_DETERMINISTIC=is_deterministic)
                rank = ranks.rank_of(turn_of, block, torch.tensor(tile), None, 0, own, rules)
                found.setdefault(tile, []).append(int(rank))
        for turn in found.values():
            if rules.ASCENDS:  # the last keys first
                turn.reverse()
            assert turn == [i if is_deterministic else min(i, 1) for i in range(len(turn))], (work, rules, found)
        tiles = -(-max(0, int(own.q_end - own.q_begin)) // rules.BLOCK_M)
        assert tiles == 0 or sorted(found) == list(range(tiles)), (work, rules, found)
        tiles_seen += len(found)
    assert tiles_seen > 800
