"""The order in which blocks of keys add to dQ of a tile of queries, so that its bits are the same in every run.

Each tile of a head counts the blocks that have added to it. Blocks take turns in the order of their keys: a block waits
until the count is its rank, the number of blocks before it that see the tile. The block of rank 0 stores, so that the
sums need not be zeroed.

Nothing waits for ever, because a block waits only for blocks of fewer keys, which running programs took before
(`band.work_on_keys`, `scheduler.draw_in_order`). And little time is lost, because all blocks walk their queries from
the last tile to the first: under a band, blocks of more keys begin at the same tile or behind it, and end before it.

FlashAttention orders its sums so too, by semaphores (`deterministic`).
"""

from __future__ import annotations

from warpwave.runtime.gluon_or_stub import gl, jit


@jit
def rank_of(block, tile, band, rules):
    """Returns how many blocks add to a tile of queries before a block of keys does."""
    rank = block
    if rules.HAS_LOW:
        first_key = band.q_begin + tile * rules.BLOCK_M + band.low - band.k_begin
        rank = rank - gl.maximum(first_key, 0) // rules.BLOCK_N
    return rank


@jit
def wait_for_turn(count_ptr, rank):
    """Waits, in a role of one warp, until `rank` blocks have added to a tile, and their sums are visible to copies."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.b32 n, [$1]; setp.ne.b32 p, n, $2; @p bra AGAIN; "
        "fence.proxy.async.global; mov.b32 $0, n; }",
        "=r,l,r", [_of_lanes(count_ptr.to(gl.int64)), _of_lanes(rank)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def pass_turn(count_ptr, rank):
    """Waits, in a role of one warp, until its copies have been stored or added, and lets the next block add.

    The count is released although the copies are complete: with a relaxed store, dQ had other bits in one of 20 runs
    (`2026-11-24-h200-turns.log`).
    """
    gl.inline_asm_elementwise(
        # One lane started the copies, and only it waits for them.
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r", [_of_lanes(count_ptr.to(gl.int64)), _of_lanes(rank + 1)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _of_lanes(x):
    return gl.full([32], x, x.dtype, gl.BlockedLayout([1], [32], [1], [0]))
