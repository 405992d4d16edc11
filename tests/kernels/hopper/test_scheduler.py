"""In which order the Hopper kernels' blocks of queries come, by the scheduler's own source on the CPU."""

from __future__ import annotations

import heapq

import pytest

from tests.kernels.hopper import gluon_on_cpu
from warpwave.kernels.hopper.groups import Schedule
from warpwave.runtime.triton_or_stub import NO_TRITON

pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")
SMS = 132


def blocks(heads: int, tiles_per_head: int, heads_in_l2: int) -> list[tuple[int, int]]:
    """(head, tile) of every block of a causal call, in the order in which they are drawn."""
    from warpwave.kernels.hopper import scheduler

    names = gluon_on_cpu.functions({scheduler.__name__: scheduler}, gluon_on_cpu.Block(0, 1))[scheduler.__name__]
    total = heads * tiles_per_head
    schedule = Schedule(total, heads, 1, 1, tiles_per_head, heads_in_l2, 1, 1, 0, 0)
    drawn = [names.dense_tile(schedule, t, True) for t in range(total)]
    return [(int(work.head), int(work.tile)) for work in drawn]


@pytest.mark.parametrize(
    ("heads", "tiles", "in_l2"), [(1, 1, 1), (10, 7, 3), (9, 4, 3), (7, 5, 7), (5, 3, 1), (13, 2, 4)]
)
def test_every_block_comes_once(heads: int, tiles: int, in_l2: int) -> None:
    drawn = blocks(heads, tiles, in_l2)
    assert sorted(drawn) == [(h, t) for h in range(heads) for t in range(tiles)]
    # Heads side by side share K and V through L2, at most `in_l2` of them, and the longest tiles are first.
    groups: list[list[tuple[int, int]]] = []
    for block in drawn:
        if not groups or block[1] > groups[-1][-1][1]:
            groups.append([])
        groups[-1].append(block)
    left = [heads % in_l2] if heads % in_l2 else []
    assert [len({h for h, _ in g}) for g in groups] == left + [in_l2] * (heads // in_l2)


@pytest.mark.parametrize(
    ("heads", "tiles", "in_l2"), [(10, 75, 3), (24, 25, 20), (14, 78, 6), (13, 55, 4), (46, 55, 9), (16, 128, 4)]
)
def test_few_sms_idle_at_the_end(heads: int, tiles: int, in_l2: int) -> None:
    """What is left of the heads makes no last group: of its longest tiles, begun last, 18 % of the SMs' time was lost
    at (10, 75, 3), 17 % at (24, 25, 20)."""
    ends = [0.0] * SMS
    for _, tile in blocks(heads, tiles, in_l2):
        heapq.heappush(ends, heapq.heappop(ends) + tile + 2)
    busy = heads * sum(tile + 2 for tile in range(tiles)) / SMS
    assert busy / max(ends) > 0.95
