"""In which order the Hopper kernels' blocks of queries come, by the scheduler's own source on the CPU."""

from __future__ import annotations

import heapq
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.groups import Schedule
from warpwave.problem import AttentionProblem

pytestmark = needs_triton
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


@pytest.mark.parametrize(("heads", "in_l2"), [(8, 3), (8, 8), (5, 1), (4, 2)])
def test_every_block_of_packed_sequences_comes_once(heads: int, in_l2: int) -> None:
    """Also if the heads are several groups. These come one after another, each with the last tiles of a head first, as
    the turns of the backward require."""
    from warpwave.kernels.hopper import scheduler

    lengths, block_m = (300, 0, 64, 129, 1), 64
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    total = int(ends[-1])
    names = gluon_on_cpu.functions({scheduler.__name__: scheduler}, gluon_on_cpu.Block(0, 1))[scheduler.__name__]
    slots = total // block_m + len(lengths)
    schedule = Schedule(slots * heads, heads, 1, len(lengths), 5, in_l2, 300, 300, total, total)
    offsets = SimpleNamespace(**{f"cu_seqlens_{x}_ptr": gluon_on_cpu.Pointer(ends) for x in "qk"})
    drawn = [names.packed_tile(schedule, offsets, torch.tensor(t), block_m) for t in range(slots * heads)]
    found = [(int(w.head), int(w.batch), int(w.tile)) for w in drawn if 0 <= w.tile * block_m < w.seqlen_q]
    tiles = [(b, t) for b, length in enumerate(lengths) for t in range(-(-length // block_m))]
    assert sorted(found) == [(h, *tile) for h in range(heads) for tile in tiles]
    for head in range(heads):
        assert [tile for h, *tile in found if h == head] == [list(tile) for tile in tiles[::-1]]
    left = [heads % in_l2] if heads % in_l2 else []
    in_order = [h for h, *_ in found]
    for size in left + [in_l2] * (heads // in_l2):
        group, in_order = in_order[: size * len(tiles)], in_order[size * len(tiles) :]
        assert len(set(group)) == size


class Int(int):
    """A number whose quotients are those of the kernel's language, which truncates them; Python rounds down."""

    def __add__(self, other: Any) -> Int:
        return Int(int(self) + int(other))

    def __sub__(self, other: Any) -> Int:
        return Int(int(self) - int(other))

    def __rsub__(self, other: Any) -> Int:
        return Int(int(other) - int(self))

    def __mul__(self, other: Any) -> Int:
        return Int(int(self) * int(other))

    def __floordiv__(self, other: Any) -> Int:
        return Int(abs(int(self)) // int(other) * (1 if self >= 0 else -1))

    def __mod__(self, other: Any) -> Int:
        return self - self // other * other


@pytest.mark.parametrize("lengths", [(16, 0, 64, 1, 63, 64), (0, 0, 5, 3, 0, 7), (1,), (0, 64)])
@pytest.mark.parametrize(("heads", "in_l2"), [(4, 4), (4, 3), (2, 1), (1, 1)])
def test_a_slot_for_each_sequence(heads: int, in_l2: int, lengths: tuple[int, ...]) -> None:
    """Of sequences that fit a tile. Launches that draw in order ask for tiles past the last one too, before they check
    their number: those must read no offset outside the tensor."""
    from warpwave.kernels.hopper import scheduler
    from warpwave.kernels.hopper.shared_tiles import query_tiles

    block_m, batch, total = 64, len(lengths), sum(lengths)
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    problem = AttentionProblem(
        batch=batch, seqlen_q=max(lengths), seqlen_k=max(lengths), num_heads_q=heads, num_heads_kv=1, head_dim=128,
        head_dim_v=128, dtype="bfloat16", softmax_scale=0.1, packed=True, total_q=total, total_k=total,
    )  # fmt: skip
    tiles = query_tiles(problem, block_m)
    assert tiles == batch * heads
    names = gluon_on_cpu.functions({scheduler.__name__: scheduler}, gluon_on_cpu.Block(0, 1))[scheduler.__name__]
    schedule = Schedule(tiles, heads, 1, batch, 1, in_l2, 64, 64, total, total)
    offsets = SimpleNamespace(**{f"cu_seqlens_{x}_ptr": gluon_on_cpu.Pointer(ends) for x in "qk"})
    drawn = [names.packed_tile(schedule, offsets, Int(t), block_m) for t in range(tiles + SMS)]
    assert all(0 <= work.batch < batch for work in drawn)
    found = [(int(w.head), int(w.batch), int(w.tile), int(w.q_begin), int(w.seqlen_q)) for w in drawn[:tiles]]
    assert sorted(found) == [(h, b, 0, int(ends[b]), lengths[b]) for h in range(heads) for b in range(batch)]


def test_heads_that_run_together() -> None:
    packed = AttentionProblem(
        batch=4, seqlen_q=8192, seqlen_k=8192, num_heads_q=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, packed=True, total_q=16384, total_k=16384,
    )  # fmt: skip
    dense, of_head = replace(packed, packed=False), 8 << 20
    assert host.heads_in_l2(dense, 32, 32 * 128, of_head) == 4  # of 128, as many as 32 MiB hold
    assert host.heads_in_l2(dense, 32, 32 * 128, of_head, sharing=4) == 16
    assert host.heads_in_l2(dense, 32, 32 * 128, 1) == 4 * 32
    # Queries and outputs take room in L2 too, unless less than two blocks an SM would be left.
    assert host.heads_in_l2(dense, 32, 128 * 128, of_head, bytes_beside=of_head) == 3
    assert host.heads_in_l2(dense, 32, 128 * 264, of_head, bytes_beside=of_head) == 2
    assert host.heads_in_l2(dense, 32, 128 * 20, of_head, bytes_beside=of_head) == 4
    assert host.heads_in_l2(dense, 32, 128 * 20, of_head, sharing=4, bytes_beside=of_head) == 16
    assert host.heads_in_l2(packed, 32, 32 * 1056, of_head) == 4
    assert host.heads_in_l2(packed, 32, 32 * 132, of_head) == 8  # eight blocks an SM, of 132 slots a head
    assert host.heads_in_l2(packed, 32, 32 * 128, of_head, sharing=4) == 16
    assert host.heads_in_l2(packed, 32, 32 * 60, of_head, sharing=4) == 20  # 18 would divide a group
    assert host.heads_in_l2(packed, 32, 32, of_head) == 32
    assert host.heads_in_l2(packed, 32, 0, of_head) == 32


@pytest.mark.parametrize("lengths", [(300, 0, 64, 129, 1), (1, 1, 1, 200, 1), (192, 192, 192), (130, 70), (63, 64, 65)])
@pytest.mark.parametrize(("heads", "in_l2"), [(4, 4), (4, 2), (1, 1)])
def test_sequences_that_decode_come_before_prompts(heads: int, in_l2: int, lengths: tuple[int, ...]) -> None:
    """Of a call on a paged cache. All tiles come once, and those of a sequence with several from the last to the
    second."""
    from warpwave.kernels.hopper import pages as of_pages
    from warpwave.kernels.hopper import scheduler

    block_m = 64
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    total = int(ends[-1])
    modules = {m.__name__: m for m in (scheduler, of_pages)}
    names = gluon_on_cpu.functions(modules, gluon_on_cpu.Block(0, 1))[scheduler.__name__]
    slots = total // block_m + len(lengths)
    schedule = Schedule(slots * heads, heads, 1, len(lengths), 5, in_l2, 300, 900, total, total)
    offsets = SimpleNamespace(cu_seqlens_q_ptr=gluon_on_cpu.Pointer(ends))
    used = torch.arange(500, 500 + len(lengths))
    pages = SimpleNamespace(seqused_k_ptr=gluon_on_cpu.Pointer(used), HAS_ROWS=False)
    drawn = [names.paged_tile(schedule, offsets, pages, torch.tensor(t), block_m) for t in range(slots * heads)]
    drawn = [w for w in drawn if 0 <= w.tile * block_m < w.seqlen_q]
    assert all(int(w.seqlen_k) == 500 + int(w.batch) for w in drawn)
    found = [(int(w.head), int(w.batch), int(w.tile)) for w in drawn]
    tiles = [(b, t) for b, length in enumerate(lengths) for t in range(-(-length // block_m))]
    assert sorted(found) == [(h, *tile) for h in range(heads) for tile in tiles]
    for head in range(heads):
        order = [(b, t) for h, b, t in found if h == head]
        several = [tile for tile in order if lengths[tile[0]] > block_m and tile[1] > 0]
        assert several == sorted(several, reverse=True)
        decoding = [order.index(tile) for tile in order if lengths[tile[0]] <= block_m]
        assert all(at < order.index(tile) for at in decoding for tile in several)
