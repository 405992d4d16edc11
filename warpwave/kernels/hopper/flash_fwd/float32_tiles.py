"""Key tiles of float32 operands in several parts, in a consumer of the Hopper forward (../split_float32.py).

Tiles are not overlapped within a group: a tile's products take so much longer than its softmax that the other group's
products hide it. Probabilities and values are multiplied in slices of the columns, to limit registers.
"""

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.flash_fwd.mask_bias import (
    hidden_by_mask,
    is_masked,
    read_ahead,
    shown_before,
    without_unseen,
    word_of,
)
from warpwave.kernels.hopper.parts import ROWS, accumulator_layout, hand_back, unseen_zero, wait_full, zero_accumulator
from warpwave.kernels.hopper.rows import zero_values
from warpwave.kernels.hopper.softmax import in_bits, new_maximum, partial_sums, probabilities
from warpwave.kernels.hopper.split_float32 import (
    add_values,
    num_slices,
    scaled,
    split_operand,
    split_scores,
    zero_slices,
)
from warpwave.runtime.gluon_or_stub import gl, jit


@jit
def split_step(
    q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules,
    AT_EDGE: gl.constexpr,
):  # fmt: skip
    """Processes tile n of the ring, the `tile`-th of the sequence, masked if it is at an edge. A boolean mask also
    contains what position hides."""
    hides: gl.constexpr = AT_EDGE and not is_masked(place)
    without_unseen(v_ring, n, tile, place, keys, rules)
    ahead = read_ahead(tile, place, keys, rules, AT_EDGE)
    wait_full(k_ring, n)
    x = split_scores(q_tiles, GROUP, k_ring, n, rules)
    hand_back(k_ring, n)
    scale = 1.0
    if not hides and not rules.HAS_SOFTCAP and not rules.HAS_ALIBI:
        x = scaled(x, rules.scale)
    else:
        x, scale = in_bits(x, tile, place, keys, rules, hides)
    x = hidden_by_mask(x, ahead, tile, place, keys, rules)
    shift, alpha, m_i, lead = new_maximum(x, scale, m_i, lead, AT_EDGE)
    p32, l_i = probabilities(x, scale, shift, alpha, l_i, rules.BLOCK_N)
    p = split_operand(p32, rules.PARTS)
    wait_full(v_ring, n)
    if AT_EDGE and rules.IS_VARLEN:
        rows_used = keys.end - keys.begin - tile * rules.BLOCK_N
        if rows_used < rules.BLOCK_N:
            zero_values(v_ring, n, rows_used)
    summed = ()
    for i in gl.static_range(len(acc)):
        if i > 0:
            # This wait never blocks; its spin loop ends the basic block. Without it ptxas starts the next slice's
            # products before it adds up this slice's, and spills both.
            wait_full(v_ring, n)
        summed = summed + (add_values(p, v_ring, n, acc[i], alpha, i, rules.PARTS),)
    hand_back(v_ring, n)
    return m_i, lead, l_i, summed


@jit
def first_split_state(v_ring, rules):
    """Returns maximum, lead, per-thread sums, and the accumulator, before the first tile."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, accumulator_layout(rules.BLOCK_N)))
    l_i = partial_sums(zero_accumulator(rules.BLOCK_N), rules.BLOCK_N)
    return m_i, gl.zeros_like(m_i), l_i, zero_slices(v_ring)


@jit
def split_tiles(
    q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
):  # fmt: skip
    """Processes all key tiles [begin, end) of 64 queries, the last first. Returns the softmax state and the number of
    the next tile of the rings."""
    m_i, lead, l_i, acc = first_split_state(v_ring, rules)
    at_edge = end - whole_end  # the diagonal and the ragged end, at least one tile
    if num_slices(v_ring.pieces) > 2:
        at_edge += unseen_zero(n)  # if the compiler knows that the loop runs once, it unrolls it, and that code spills
    for i in range(at_edge):
        m_i, lead, l_i, acc = split_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, end - 1 - i, place, keys, rules, True
        )
        n += 1
    for i in range(whole_end - whole_begin):
        m_i, lead, l_i, acc = split_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, whole_end - 1 - i, place, keys, rules, False
        )
        n += 1
    if rules.HAS_LOW:
        for i in range(whole_begin - begin):
            m_i, lead, l_i, acc = split_step(
                q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, whole_begin - 1 - i, place, keys, rules, True
            )
            n += 1
    return n, m_i, lead, l_i, acc


@jit
def masked_split_tiles(q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, begin, end, work, place, keys, rules):
    """Processes, like `split_tiles`, the tiles of [begin, end) that a mask shows to the block, at least one."""
    m_i, lead, l_i, acc = first_split_state(v_ring, rules)
    beside = place.beside
    bits = scheduler.shown_last(place.box, place.message)
    word, _ = word_of(end - 1, keys, rules)
    tile, word, bits = shown_before(end, word, bits, begin, work, keys, beside, rules, 4)
    tile = gl.maximum(tile, begin)
    while tile >= begin:
        m_i, lead, l_i, acc = split_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules, True
        )
        n += 1
        tile, word, bits = shown_before(tile, word, bits, begin, work, keys, beside, rules, 4)
    return n, m_i, lead, l_i, acc
