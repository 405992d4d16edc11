"""The order in which blocks of keys add to dQ of a tile of queries.

The first block in order stores its share, so that the sums need not be zeroed, and the others add theirs to it. Each
tile of a head has a count in memory. A block waits until the count is its rank:

- Deterministic: the rank is the number of blocks before it that see the tile, and each block raises the count by one.
  The order of the sums, and with it their bits, is the same in every run.
- Otherwise the rank is 0 for the first block and 1 for all others, and only the first block raises the count. That is
  up to 1.15 times as fast (`2026-11-27-h200-gradients-beside-peers.json`).

Under a mask, the ranks are listed with the steps (prepass/mask_steps.py). A block that shows nothing has rank -1 and
adds nothing. The sums of a tile whose count is still 0 at the end are read as zeros.

Nothing waits for ever, because a block waits only for blocks that running programs took before (`band.work_on_keys`,
`scheduler.draw_in_order`). All blocks walk all heads of a tile before the next tile, in one of two directions:

- The blocks of the first keys come first, and walk their queries from the last tile to the first. Under a causal mask,
  a block of later keys sees fewer tiles than one of earlier keys, but begins at the same tile, so it seldom gets ahead
  of the first block. With a window it begins at the same or a later tile. Parts of blocks (`config.divided_tail`) begin
  where the same parts of other blocks begin. In order, each of the blocks that begin together waits for the one before.
- In order, in long causal calls without groups (`config.ascends`): the blocks of the last keys come first, and walk
  their queries from the first tile that they see to the last. Each begins where no other block of its head is, behind
  those that came before, so it does not wait. The longest blocks come last.

FlashAttention orders its sums so too, by semaphores (`deterministic`).
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from warpwave.kernels.hopper.flash_bwd.steps import rank_listed
from warpwave.runtime.gluon_or_stub import aggregate, gl, jit


@aggregate
class Turns:
    """The counts of all tiles, int32, and whether every block has a rank of its own."""

    counts_ptr: gl.tensor
    IS_DETERMINISTIC: gl.constexpr


@jit
def rank_of(turns, block, tile, walk, i, band, rules):
    """Returns the count for which a block of keys waits before it adds to a tile of queries, in its i-th step; -1 if it
    adds nothing."""
    if rules.HAS_MASK:
        rank = rank_listed(walk, i)
    elif rules.ASCENDS:
        last_key = gl.minimum(band.q_begin + (tile + 1) * rules.BLOCK_M - 1 + band.high, band.k_end - 1)
        rank = (last_key - band.k_begin) // rules.BLOCK_N - block
    else:
        rank = block
        if rules.HAS_LOW:
            first_key = band.q_begin + tile * rules.BLOCK_M + band.low - band.k_begin
            rank = rank - gl.maximum(first_key, 0) // rules.BLOCK_N
    if not turns.IS_DETERMINISTIC:
        rank = gl.minimum(rank, 1)
    return rank


@jit
def wait_for_turn(count_ptr, rank):
    """Waits, in a role of one warp, until the count of a tile is `rank`, and the sums of the blocks before are visible
    to copies."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.b32 n, [$1]; setp.ne.b32 p, n, $2; @p bra AGAIN; "
        "fence.proxy.async.global; mov.b32 $0, n; }",
        "=r,l,r", [_of_lanes(count_ptr.to(gl.int64)), _of_lanes(rank)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def pass_turn(count_ptr, rank):
    """Waits, in a role of one warp, until its copies have been stored or added, and raises the count of a tile.

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
