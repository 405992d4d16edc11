"""FlashAttention forward for NVIDIA Hopper: warp-specialized, in Gluon; bf16 and fp16, head_dim up to 384; float32 by
parts of 16 bits, up to 256; float8 or int8 q and k, or paged caches of them, up to 256.

A block is one producer warp and one to three consumer warpgroups of 64 rows each. The producer loads Q, K and V
tiles into shared memory by TMA. Consumers multiply them by wgmma directly from shared memory and keep probabilities in
registers. They turn the scores of one tile into probabilities while the tensor cores work on the previous tile
(producer.py, consumer.py, ../softmax.py). Blocks are persistent and draw tiles of queries from a counter, longest first
(../scheduler.py). Preceding launches split float32 into one or two parts of scaled float16, or three of bfloat16
(prepass/scale_ahead.py, prepass/split_ahead.py); every product becomes one, three or six (../split_float32.py). A
preceding launch packs a boolean mask into bits (prepass/mask_bits.py); a bias is loaded with K (mask_bias.py).
Quantized q and k are multiplied in 8 bits, and a quantized v in float16, in which a preceding launch writes it
(prepass/widen_values.py). Tiles of an 8-bit cache are converted by a third role (widener.py).
If tiles are few, several blocks split the keys of each, and a following launch merges their results (splits.py).

    S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Products of int8 q and k are summed exactly in int32. The sums start at a number whose bits are those of a float32, so
that they are read as float32 without a conversion (parts.OFFSET_OF_INT8). Factors of q and k are part of softmax_scale,
those of v multiply sums over keys (../factors.py). Those of single tokens multiply scores and probabilities
(../token_factors.py).

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1 and
3.2. The online softmax rescales only when a row's maximum has risen by more than `softmax.LAG`.

Bound: tensor cores under the power limit from head_dim 128 on and in float32, exponentials and instruction issue at 64,
launch latency if the grid does not fill the GPU. It adds the Hopper-specific features to flash_fwd;
docs/notes/hopper.md lists what was tried and what each part gained.
"""

from __future__ import annotations

from warpwave.kernels.groups import Pages
from warpwave.kernels.hopper import scheduler
from warpwave.kernels.hopper.dropout import of_call
from warpwave.kernels.hopper.factors import Factors, OfTensor, arrivals_of_keys, tile_factors
from warpwave.kernels.hopper.flash_fwd.consumer import Consumer, consumer
from warpwave.kernels.hopper.flash_fwd.mask_bias import Beside, MaskAndBias, is_added
from warpwave.kernels.hopper.flash_fwd.producer import Producer, producer
from warpwave.kernels.hopper.flash_fwd.widener import (
    WIDENER_WARPS,
    Widener,
    narrow_ring,
    unknown_end,
    widener,
)
from warpwave.kernels.hopper.groups import Dropout, KeyDescaleStrides, QDescaleStrides, Queries, Schedule, Splits
from warpwave.kernels.hopper.parts import (
    barriers,
    buffers,
    present,
    ring_of,
    wide_buffers,
)
from warpwave.kernels.hopper.token_factors import token_factors
from warpwave.kernels.hopper.visible import Options, Rules
from warpwave.runtime.gluon_or_stub import fence_async_shared, gl, jit, warp_specialize


@jit
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
    queries: Queries,
    schedule: Schedule,
    call_options: Options,
    mask_and_bias: MaskAndBias,
    inverses_ptr,
    dropout: Dropout,
    q_descale_strides: QDescaleStrides,
    k_descale_strides: KeyDescaleStrides,
    v_descale_strides: KeyDescaleStrides,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    pages: Pages,
    splits: Splits,
    counter_ptr,
    STAGES: gl.constexpr,
    NARROW_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    Q_BLOCK: gl.constexpr,
    K_BLOCK: gl.constexpr,
    V_BLOCK: gl.constexpr,
    TOKEN_FACTORS: gl.constexpr,
):
    """Processes tiles of 64 * GROUPS rows until the counter is exhausted. A row is a query of one of HEADS heads.

    Tensor maps have the axes (batch, head, row, column), one map for each piece of a tile's width; absent pieces are
    None. If several heads share a tile, maps of Q and out have the axes of host.together. In float32, PARTS
    consecutive heads of a map are the parts of one head. Out of float32, of HEAD_DIM_V columns, and partial results
    have no maps. Q_BLOCK, K_BLOCK and V_BLOCK quantized tokens share a factor, or all tokens of a head if 0.
    NARROW_STAGES tiles of an 8-bit cache wait for the widener, 0 for another call. With TOKEN_FACTORS, each head of
    each token of that cache has a factor.
    """
    GROUPS: gl.constexpr = call_options.GROUPS
    PARTS: gl.constexpr = call_options.PARTS
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    has_out_maps: gl.constexpr = call_options.HEAD_DIM_V == 0 and splits.COLUMNS == 0
    out_maps = k_maps  # unused: float32 and partial results are stored from registers
    if has_out_maps:
        out_maps = present(out_map, out_map_2, out_map_3)
    has_blocks: gl.constexpr = K_BLOCK > 0 or V_BLOCK > 0
    factors = ()
    if TOKEN_FACTORS:
        factors = token_factors(
            k_descale_ptr, k_descale_strides, v_descale_ptr, v_descale_strides, NARROW_STAGES, STAGES,
            call_options.BLOCK_N,
        )  # fmt: skip
    elif k_descale_ptr is not None:
        of_k = OfTensor(k_descale_ptr, k_descale_strides, K_BLOCK)
        of_v = ()
        if v_descale_ptr is not None:
            of_v = OfTensor(v_descale_ptr, v_descale_strides, V_BLOCK)
        of_q = ()
        if q_descale_ptr is not None:
            of_q = OfTensor(q_descale_ptr, q_descale_strides, Q_BLOCK)
        of_tiles = ()
        if has_blocks:
            of_tiles = tile_factors(STAGES)
        factors = Factors(of_q, of_k, of_v, schedule.group_size, of_tiles, ())
    aligns_keys: gl.constexpr = has_blocks or pages.PAGE_SIZE > 0
    narrows_queries: gl.constexpr = NARROW_STAGES > 0 and q_maps[0].dtype == gl.bfloat16
    raises: gl.constexpr = narrows_queries or TOKEN_FACTORS
    rules = Rules(call_options, aligns_keys, narrows_queries, raises, of_call(dropout), factors)
    q_inverses_ptr = inverses_ptr
    if inverses_ptr is not None:  # after the inverses of K and V
        num_heads_kv = schedule.num_heads // schedule.group_size
        q_inverses_ptr = inverses_ptr + schedule.batch * (2 * num_heads_kv)

    q_tiles = buffers(q_maps, GROUPS * PARTS)
    beside = ()
    if mask_and_bias.HAS_MASK or mask_and_bias.BIAS != "":
        bias_maps = ()
        bias_tiles = q_tiles  # unused if there is no map
        if mask_and_bias.BIAS == "cells":
            bias_maps = (bias_map,)
            bias_tiles = buffers(bias_maps, STAGES * GROUPS)
        beside = Beside(mask_and_bias, bias_maps, bias_tiles[0])
    if NARROW_STAGES > 0:
        k_tiles = wide_buffers(k_maps, gl.float16, STAGES, call_options.BLOCK_N)
        v_tiles = wide_buffers(v_maps, gl.float16, STAGES, call_options.BLOCK_N)
    else:
        k_tiles = buffers(k_maps, STAGES * PARTS, call_options.BLOCK_N)
        v_tiles = buffers(v_maps, STAGES * PARTS, call_options.BLOCK_N)
    k_ring = ring_of(k_tiles, STAGES, GROUPS, PARTS, arrivals_of_keys(factors))
    v_ring = ring_of(v_tiles, STAGES, GROUPS, PARTS)
    out_tiles = q_tiles
    if call_options.OWN_OUT and has_out_maps:
        if len(out_maps) > len(v_maps):  # out is stored in two halves
            out_tiles = buffers((out_maps[0],), GROUPS)
        else:
            out_tiles = buffers(out_maps, GROUPS)
    q_full = barriers(GROUPS, 1)
    q_empty = barriers(GROUPS, 1)
    box = scheduler.mailbox(GROUPS, is_added(beside))
    k_source = k_ring  # what the producer fills
    v_source = v_ring
    of_widener = ()
    if NARROW_STAGES > 0:
        k_source = narrow_ring(k_maps, NARROW_STAGES, call_options.BLOCK_N, 2 if TOKEN_FACTORS else 1)
        v_source = narrow_ring(v_maps, NARROW_STAGES, call_options.BLOCK_N, 1)
        of_widener = Widener(k_source, v_source, k_ring, v_ring, unknown_end(), factors if TOKEN_FACTORS else ())
    fence_async_shared()
    of_producer = Producer(
        q_maps, k_maps, v_maps, q_tiles, q_full, q_empty, k_source, v_source, box, rules, beside, of_widener
    )
    of_consumer = Consumer(
        out_maps, inverses_ptr, q_inverses_ptr, q_tiles, out_tiles, q_full, q_empty, k_ring, v_ring, box, rules, beside
    )
    warp_specialize(
        [
            (consumer, (0, of_consumer, queries, schedule, splits)),
            (consumer, (1, of_consumer, queries, schedule, splits)) if GROUPS > 1 else (),
            (consumer, (2, of_consumer, queries, schedule, splits)) if GROUPS > 2 else (),
            (widener, (of_widener,)) if NARROW_STAGES > 0 else (),
            (producer, (of_producer, queries, schedule, pages, splits, counter_ptr)),
        ],
        [4, 4, WIDENER_WARPS, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
