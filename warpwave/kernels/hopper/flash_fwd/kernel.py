"""FlashAttention forward for NVIDIA Hopper: warp-specialized, in Gluon; bf16 and fp16, head_dim up to 384; float32 by
parts of 16 bits, up to 256; int8 q and k beside a 16-bit v, up to 256.

A block is one producer warp and one to three consumer warpgroups of 64 queries each. The producer loads Q, K and V
tiles into shared memory by TMA. Consumers multiply them by wgmma directly from shared memory and keep probabilities in
registers. They turn the scores of one tile into probabilities while the tensor cores work on the previous tile
(producer.py, consumer.py, ../softmax.py). Blocks are persistent and draw tiles of queries from a counter, longest first
(../scheduler.py). Preceding launches split float32 into one or two parts of scaled float16, or three of bfloat16
(prepass/scale_ahead.py, prepass/split_ahead.py); every product becomes one, three or six (../split_float32.py). A
preceding launch packs a boolean mask into bits (prepass/mask_bits.py); a bias is loaded with K (mask_bias.py).

    S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Products of int8 q and k are summed exactly in int32 and converted to float32; their factors are part of softmax_scale
(../factors.py).

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1 and
3.2. The online softmax rescales only when a row's maximum has risen by more than `softmax.LAG`.

Bound: tensor cores under the power limit from head_dim 128 on and in float32, exponentials and instruction issue at 64,
launch latency if the grid does not fill the GPU. It adds the Hopper-specific features to flash_fwd;
docs/notes/hopper.md lists what was tried and what each part gained.
"""

from __future__ import annotations

from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import Dropout
from warpwave.kernels.hopper.factors import Factors, OfKeys
from warpwave.kernels.hopper.flash_fwd.consumer import Consumer, consumer
from warpwave.kernels.hopper.flash_fwd.mask_bias import Beside, is_added
from warpwave.kernels.hopper.flash_fwd.producer import Producer, producer
from warpwave.kernels.hopper.parts import FREE_BARRIERS, Ring, barriers, buffers, present, ring_init
from warpwave.kernels.hopper.visible import Rules
from warpwave.runtime.gluon_or_stub import fence_async_shared, gl, jit, mbarrier

__all__ = ["hopper_flash_fwd_kernel"]

UNSPECIALIZED = [
    *("stride_alibi_b", "stride_lb", "stride_lh", "num_tiles", "num_heads", "group_size", "batch", "tiles_per_head"),
    *("heads_in_l2", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right", "stride_words_b"),
    *("stride_words_h", "stride_words_t", "stride_words_m", "stride_bias_b", "stride_bias_h", "stride_bias_m"),
    *("flags_begin", "stride_flags_b", "stride_flags_h", "stride_flags_m"),
    "dropout_threshold",
    *("stride_q_descale_b", "stride_q_descale_h", "stride_q_descale_member", "stride_q_descale_m"),
    *("stride_k_descale_b", "stride_k_descale_h", "stride_k_descale_n"),
]


@jit(do_not_specialize=UNSPECIALIZED)
def hopper_flash_fwd_kernel(
    q_map,
    q_map_2,
    q_map_3,
    k_map,
    k_map_2,
    k_map_3,
    v_map,
    v_map_2,
    v_map_3,
    out_map,
    out_map_2,
    out_map_3,
    bias_map,
    out_ptr,
    lse_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    inverses_ptr,
    words_ptr,
    bias_ptr,
    dropout_seed_ptr,
    q_descale_ptr,
    k_descale_ptr,
    counter_ptr,
    stride_alibi_b,
    stride_lb,
    stride_lh,
    num_tiles,
    num_heads,
    group_size,
    batch,
    tiles_per_head,
    heads_in_l2,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    window_left,
    window_right,
    scale,
    softcap_log2,
    stride_words_b,
    stride_words_h,
    stride_words_t,
    stride_words_m,
    flags_begin,
    stride_flags_b,
    stride_flags_h,
    stride_flags_m,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    dropout_threshold,
    dropout_scale,
    stride_q_descale_b,
    stride_q_descale_h,
    stride_q_descale_member,
    stride_q_descale_m,
    stride_k_descale_b,
    stride_k_descale_h,
    stride_k_descale_n,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    NAMED_BARRIERS: gl.constexpr,
    OWN_OUT: gl.constexpr,
    VALUES_FIRST: gl.constexpr,
    PARTS: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr,
    K_BLOCK: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Processes tiles of 64 * GROUPS queries of one head until the counter is exhausted.

    Tensor maps have the axes (batch, head, row, column), one map for each piece of a tile's width; absent pieces are
    None. In float32, PARTS consecutive heads of a map are the parts of one head, and out, of HEAD_DIM_V columns, has no
    maps. Q_BLOCK and K_BLOCK tokens of int8 share a factor, or all tokens of a head if 0.
    """
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    out_maps = k_maps  # unused: in float32 out is stored from registers
    if HEAD_DIM_V == 0:
        out_maps = present(out_map, out_map_2, out_map_3)
    dropout = ()
    if dropout_seed_ptr is not None:
        dropout = Dropout(dropout_seed_ptr, dropout_threshold, dropout_scale)
    factors = ()
    if q_descale_ptr is not None:
        of_k = OfKeys(k_descale_ptr, (stride_k_descale_b, stride_k_descale_h, stride_k_descale_n), K_BLOCK)
        strides = (stride_q_descale_b, stride_q_descale_h, stride_q_descale_member, stride_q_descale_m)
        factors = Factors(q_descale_ptr, strides, of_k, group_size, Q_BLOCK)
    rules = Rules(
        scale, softcap_log2, window_left, window_right, GROUPS, BLOCK_N, HAS_LOW, HAS_HIGH, TOP_LEFT, HAS_ALIBI,
        HAS_SOFTCAP, HAS_SINKS, IS_VARLEN, WRITE_LSE, OWN_OUT, VALUES_FIRST, PARTS, HEAD_DIM_V,
        K_BLOCK > 0, dropout, factors,
    )  # fmt: skip
    # Tuples and aggregates cannot hold None, so the counter stands in for absent pointers. It is never read through
    # them.
    if not IS_VARLEN and HEAD_DIM_V == 0:
        out_ptr = counter_ptr
    if HEAD_DIM_V == 0 or PARTS > 2:
        inverses_ptr = counter_ptr
    q_inverses_ptr = inverses_ptr + batch * (2 * (num_heads // group_size))  # after the inverses of K and V
    if not IS_VARLEN:
        cu_seqlens_q_ptr = counter_ptr
        cu_seqlens_k_ptr = counter_ptr
    if not WRITE_LSE:
        lse_ptr = counter_ptr
    if not HAS_ALIBI:
        alibi_slopes_ptr = counter_ptr
    if not HAS_SINKS:
        sinks_ptr = counter_ptr
    schedule = scheduler.Schedule(
        counter_ptr, num_tiles, num_heads, group_size, batch, tiles_per_head, heads_in_l2, seqlen_q, seqlen_k, total_q,
        total_k, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    )  # fmt: skip

    q_tiles = buffers(q_maps, GROUPS * PARTS)
    beside = ()
    if HAS_MASK or BIAS != "":
        if not HAS_MASK:
            words_ptr = counter_ptr
        if BIAS == "":
            bias_ptr = counter_ptr
        bias_maps = ()
        bias_tiles = q_tiles  # unused if there is no map
        if BIAS == "cells":
            bias_maps = (bias_map,)
            bias_tiles = buffers(bias_maps, STAGES * GROUPS)
        beside = Beside(
            words_ptr, (stride_words_b, stride_words_h, stride_words_t, stride_words_m),
            (flags_begin, stride_flags_b, stride_flags_h, stride_flags_m), bias_ptr,
            (stride_bias_b, stride_bias_h, stride_bias_m), bias_maps, bias_tiles[0], HAS_MASK, BIAS,
        )  # fmt: skip
    k_full = barriers(STAGES)
    v_full = barriers(STAGES)
    if NAMED_BARRIERS:
        k_ring = Ring(buffers(k_maps, STAGES * PARTS), k_full, k_full, STAGES, FREE_BARRIERS, PARTS)
        v_ring = Ring(buffers(v_maps, STAGES * PARTS), v_full, v_full, STAGES, FREE_BARRIERS + STAGES, PARTS)
    else:
        k_ring = Ring(buffers(k_maps, STAGES * PARTS), k_full, barriers(STAGES), STAGES, 0, PARTS)
        v_ring = Ring(buffers(v_maps, STAGES * PARTS), v_full, barriers(STAGES), STAGES, 0, PARTS)
    out_tiles = q_tiles
    if OWN_OUT and HEAD_DIM_V == 0:
        if len(out_maps) > len(v_maps):  # out is stored in two halves
            out_tiles = buffers((out_maps[0],), GROUPS)
        else:
            out_tiles = buffers(out_maps, GROUPS)
    # Every allocated barrier must be used. Otherwise its memory is reused as scratch while it still holds a barrier's
    # bits; this made the first drawn tile garbage in 5 % of launches.
    q_full = barriers(GROUPS)
    q_empty = barriers(GROUPS)
    many_words: gl.constexpr = scheduler.words_of(is_added(beside))
    words = gl.allocate_shared_memory(gl.int32, [many_words, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    box = scheduler.Mailbox(words, barriers(2), barriers(2))
    ring_init(k_ring, GROUPS)
    ring_init(v_ring, GROUPS)
    for g in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(g), count=1)
        mbarrier.init(q_empty.index(g), count=1)
    for i in gl.static_range(2):
        mbarrier.init(box.full.index(i), count=1)
        mbarrier.init(box.empty.index(i), count=GROUPS)
    fence_async_shared()

    of_producer = Producer(
        q_maps, k_maps, v_maps, q_tiles, q_full, q_empty, k_ring, v_ring, box, schedule, rules, beside
    )
    of_consumer = Consumer(
        out_maps, out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, inverses_ptr, q_inverses_ptr, stride_alibi_b,
        stride_lb, stride_lh, num_heads, group_size, seqlen_q, seqlen_k, q_tiles, out_tiles, q_full, q_empty, k_ring,
        v_ring, box, rules, beside,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [(consumer, (0, of_consumer)), (producer, (of_producer,))],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (0, of_consumer)),
                (consumer, (1, of_consumer)),
                (producer, (of_producer,)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, of_consumer)),
                (consumer, (1, of_consumer)),
                (consumer, (2, of_consumer)),
                (producer, (of_producer,)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
