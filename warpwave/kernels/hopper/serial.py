"""Key tiles without overlap, for rows too wide to have two in flight: head_dim_v above 320.

An output tile then takes 176 or more registers a thread. With the additional registers for overlapping two key tiles,
ptxas made every single wgmma wait. The other warpgroup's products hide the softmax instead.
"""

from warpwave.kernels.hopper.parts import (
    ROWS,
    accumulator_layout,
    hand_back,
    like,
    matrix,
    rescale,
    unseen_zero,
    wait_for,
    wait_full,
    zero_accumulator,
)
from warpwave.kernels.hopper.rows import zero_values
from warpwave.kernels.hopper.softmax import in_bits, new_maximum, partial_sums, probabilities
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit, warpgroup_mma, warpgroup_mma_wait


@constexpr_function
def too_wide_to_overlap(pieces):
    """Returns whether a row of V with these pieces is too wide."""
    return sum(piece.shape[-1] for piece in pieces) > 320


@jit
def serial_step(
    q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, m_i, lead, l_i, acc, tile, place, keys, rules,
    AT_EDGE: gl.constexpr,
):  # fmt: skip
    """Processes tile n of the rings, the `tile`-th of the sequence, masked if it is at an edge."""
    wait_full(k_ring, n)
    scores = zero_accumulator(rules.BLOCK_N)
    for i in gl.static_range(len(k_ring.pieces)):
        q = matrix(q_tiles[i].index(GROUP + unseen_zero(n)))
        k = matrix(k_ring.pieces[i].index(n % k_ring.stages)).permute((1, 0))
        scores = warpgroup_mma(q, k, scores, use_acc=i > 0, is_async=True)
    x = warpgroup_mma_wait(0, deps=[scores])
    hand_back(k_ring, n)
    x, scale = in_bits(x, tile, place, keys, rules, AT_EDGE)
    shift, alpha, m_i, lead = new_maximum(x, scale, m_i, lead, AT_EDGE)
    p32, l_i = probabilities(x, scale, shift, alpha, l_i, rules.BLOCK_N)
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(rules.BLOCK_N), k_width=2)
    p = gl.convert_layout(p32.to(v_ring.pieces[0].dtype), layout, assert_trivial=True)
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[i], like(alpha, acc[i])),)
    wait_full(v_ring, n)
    if AT_EDGE and rules.IS_VARLEN:
        rows_used = keys.end - keys.begin - tile * rules.BLOCK_N
        if rows_used < rules.BLOCK_N:
            zero_values(v_ring, n, rows_used)
    pending = ()
    for i in gl.static_range(len(acc)):
        v = matrix(v_ring.pieces[i].index(n % v_ring.stages))
        pending = pending + (warpgroup_mma(p, v, scaled[i], is_async=True),)
    acc = wait_for(pending)
    hand_back(v_ring, n)
    return m_i, lead, l_i, acc


@jit
def serial_tiles(
    q_tiles, GROUP: gl.constexpr, k_ring, v_ring, n, begin, whole_begin, whole_end, end, place, keys, rules
):  # fmt: skip
    """Processes all key tiles [begin, end) of 64 rows, the last first. Returns the softmax state and the number of
    the next tile of the rings."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, accumulator_layout(rules.BLOCK_N)))
    lead = gl.zeros_like(m_i)
    l_i = partial_sums(zero_accumulator(rules.BLOCK_N), rules.BLOCK_N)
    acc = ()
    for i in gl.static_range(len(v_ring.pieces)):
        acc = acc + (zero_accumulator(v_ring.pieces[i].shape[-1]),)
    for i in range(end - whole_end):  # at the diagonal and the ragged end; at least one
        m_i, lead, l_i, acc = serial_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, end - 1 - i, place, keys, rules, True
        )
        n += 1
    for i in range(whole_end - whole_begin):
        m_i, lead, l_i, acc = serial_step(
            q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, whole_end - 1 - i, place, keys, rules, False
        )
        n += 1
    if rules.HAS_LOW:
        for i in range(whole_begin - begin):
            m_i, lead, l_i, acc = serial_step(
                q_tiles, GROUP, k_ring, v_ring, n, m_i, lead, l_i, acc, whole_begin - 1 - i, place, keys, rules, True
            )
            n += 1
    return n, m_i, lead, l_i, acc
