"""FlashAttention forward in one pass, portable Triton: every GPU that Triton compiles for, head_dim up to 256.

A program owns BLOCK_M queries of one head, walks the keys they see in tiles of BLOCK_N, and maintains a running
softmax. Scores never leave the chip, and memory traffic is that of q, k, v and out.

    S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1. The keys
fall into three ranges: a masked one at the left edge of a window, one that every query of the tile sees, and a masked
one at the diagonal or the ragged end. Hidden tiles are never visited. With TWO_LOOPS only edge tiles pay for masks.

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency if the grid does not
fill the GPU. It adds to the ladder's tiled kernel the online softmax, and with it O(seqlen) memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from warpwave import precision
from warpwave.gpu import Gpu, current_gpu, reads_shared_memory
from warpwave.kernels import descales, dropout, reasons
from warpwave.kernels.arguments import (
    Results,
    Run,
    allocator,
    band_constants,
    behind,
    column_widths,
    dot_precision,
    feature_constants,
    lengths,
    lse_strides,
    maker,
    matrix_options,
    pair_group,
    score_rules,
    straightener,
    stride_unit,
    strides_in,
    tile_widths,
    two_loops,
)
from warpwave.kernels.column_tiles import (
    columns_of,
    have_nan,
    load_tiles,
    only_where,
    operands,
    pointers_of,
    row_products,
    store_tiles,
    times,
    with_products,
    zeros,
)
from warpwave.kernels.descales import float8_out, probabilities
from warpwave.kernels.dropout import dropout_keeps, dropout_of_head, load_dropout_key
from warpwave.kernels.flash_fwd.config import Config, fitting, smem_bytes, space
from warpwave.kernels.groups import Descales, Dropout, InUnits, OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.partials import final_state, lse_of
from warpwave.kernels.prepass import split_ahead
from warpwave.kernels.prepass.split_ahead import PARTS
from warpwave.kernels.primitives import (
    LOG2_E,
    add_bias,
    band_edges,
    band_visible,
    in_elements,
    key_ranges,
    keys_of_groups,
    load_parts,
    operand,
    packed_sequence,
    rules_of_head,
    softmax_step,
    steps_of,
    tanh,
    tile_again,
    tile_of,
    tile_pointers,
)
from warpwave.operands import NUM_COMMON, AnyOperands, QuantizedOperands
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

NAME = "flash_fwd"
NEEDS_GPU = True
STRIDED_OUT = True
QUANTIZED = True
MAX_HEAD_DIM = 256
# Arguments that the compiler must not specialize on; otherwise new lengths would recompile.
UNSPECIALIZED = ["stride_kp", "stride_vp", "num_heads_q", "group_size", "heads_in_l2"]

# Device code ----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=UNSPECIALIZED)
def flash_fwd_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    out_tensor: InUnits,
    lse_tensor: OfHeads,
    rules: ScoreRules,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    dropout: Dropout,
    descales: Descales,
    stride_kp,
    stride_vp,
    num_heads_q,
    group_size,
    heads_in_l2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_AHEAD: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    PAIR_GROUP: tl.constexpr,
):
    """Processes one tile of queries of one head.

    The grid has one dimension because 65,535 is the limit of the others. Neighboring programs share K and V through L2.
    """
    q_tensor = in_elements(q_tensor, STRIDE_UNIT)
    k_tensor = in_elements(k_tensor, STRIDE_UNIT)
    v_tensor = in_elements(v_tensor, STRIDE_UNIT)
    out_tensor = in_elements(out_tensor, STRIDE_UNIT)

    # Position of this program -----------------------------------------------------------------------------------------
    num_tiles = tl.cdiv(sequences.seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    if window.HAS_HIGH:
        # Longest first, so that the last to start are the shortest, over all heads whose K and V fit L2 together. The
        # incomplete group of heads comes first: as the last, its longest tiles would start when all others have ended.
        all_heads = tl.num_programs(0) // num_tiles
        missing = tl.cdiv(all_heads, heads_in_l2) * heads_in_l2 - all_heads  # heads that the first group lacks
        group = (pid // num_tiles + missing) // heads_in_l2
        first = tl.maximum(group * heads_in_l2 - missing, 0)
        heads = (group + 1) * heads_in_l2 - missing - first
        place = pid - first * num_tiles
        tile = num_tiles - 1 - place // heads
        batch_head = first + place % heads
    else:
        tile = pid % num_tiles
        batch_head = pid // num_tiles
    head = (batch_head % num_heads_q).to(tl.int64)
    batch = (batch_head // num_heads_q).to(tl.int64)
    kv_head = head // group_size

    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr = q_tensor.ptr, k_tensor.ptr, v_tensor.ptr, out_tensor.ptr, lse_tensor.ptr
    seqlen_q, seqlen_k = sequences.seqlen_q, sequences.seqlen_k
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        k_begin, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        if tile * BLOCK_M >= seqlen_q:
            return
        q_ptr += q_begin * q_tensor.stride_m
        k_ptr += k_begin * k_tensor.stride_m
        v_ptr += k_begin * v_tensor.stride_m
        out_ptr += q_begin * out_tensor.stride_m
        if WRITE_LSE:
            lse_ptr += q_begin
    q_ptr += batch * q_tensor.stride_b + head * q_tensor.stride_h
    k_ptr += batch * k_tensor.stride_b + kv_head * k_tensor.stride_h
    v_ptr += batch * v_tensor.stride_b + kv_head * v_tensor.stride_h
    out_ptr += batch * out_tensor.stride_b + head * out_tensor.stride_h
    if WRITE_LSE:
        lse_ptr += batch * lse_tensor.stride_b + head * lse_tensor.stride_h
    mask_ptr, bias_ptr, slope_log2 = rules_of_head(rules, batch, head, PAIR_GROUP)

    # The band of visible keys, low <= key - row <= high (problem.Band), and the ranges into which it cuts the keys.
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    row_begin = tile * BLOCK_M
    first_rows = tl.arange(0, BLOCK_M)
    rows = row_begin + first_rows
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    key_begin, key_end, first, whole_begin, whole_end = key_ranges(
        row_begin, row_last, seqlen_k, low, high, BLOCK_N, window.HAS_LOW, window.HAS_HIGH
    )

    # State of the online softmax --------------------------------------------------------------------------------------
    CHECK_D: tl.constexpr = HEAD_DIM < BLOCK_D + REST_D
    CHECK_DV: tl.constexpr = HEAD_DIM_V < BLOCK_DV + REST_DV
    dims = columns_of(BLOCK_D, REST_D)
    dims_v = columns_of(BLOCK_DV, REST_DV)
    q = pointers_of(q_ptr, rows, dims, q_tensor.stride_m, q_tensor.stride_d)
    q = load_tiles(q, 0, rows, dims, 0, seqlen_q, HEAD_DIM, CHECK_D)  # of [BLOCK_M, BLOCK_D]
    q = operands(q, PRECISION, IS_NVIDIA)
    first_keys = tl.arange(0, BLOCK_N)
    k_pointers = pointers_of(k_ptr, first_keys, dims, k_tensor.stride_m, k_tensor.stride_d)
    v_pointers = pointers_of(v_ptr, first_keys, dims_v, v_tensor.stride_m, v_tensor.stride_d)
    acc = zeros(BLOCK_M, dims_v)  # of [BLOCK_M, BLOCK_DV]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    scale = rules.softmax_scale
    scale_log2 = scale * LOG2_E
    if descales.QUANTIZED:
        # A tile of queries, or of keys, is inside one block of tokens, so it has one factor. It joins the scale.
        member = head - kv_head * group_size
        of_q, of_k = descales.q, descales.k
        q_descale_ptr = of_q.ptr + batch * of_q.stride_b + kv_head * of_q.stride_g + member * of_q.stride_h
        q_descale = tl.load(q_descale_ptr + row_begin // descales.Q_BLOCK * of_q.stride_n)
        scale_of_tile = rules.softmax_scale * q_descale
        k_descale_ptr = of_k.ptr + batch * of_k.stride_b + kv_head * of_k.stride_h
        # int8 values are exact in float16, in which they are multiplied. Matrix units mix the two kinds of float8, of
        # which e4m3 has one bit more.
        V_DTYPE: tl.constexpr = v_ptr.dtype.element_ty
        P_DTYPE: tl.constexpr = (
            tl.float16 if V_DTYPE == tl.int8 else tl.float8e4nv if V_DTYPE == tl.float8e5 else V_DTYPE
        )
    if descales.v.ptr is not None:
        v_descale_ptr = descales.v.ptr + batch * descales.v.stride_b + kv_head * descales.v.stride_h
    if dropout.HAS_DROPOUT:
        dropped_head = dropout_of_head(load_dropout_key(dropout.seed_ptr), batch, head)

    # The walks over the keys: 0, whole tiles; 1, the others, or all; 2, all again. Values that no query of a tile sees
    # must have no effect, but 0 * NaN is NaN. Zeroing them takes as many instructions as the rest of a tile, so walk 2
    # does it if out has a NaN, and has no steps otherwise.
    for WALK in tl.static_range(0 if TWO_LOOPS else 1, 3 if rules.HAS_MASK or rules.HAS_BIAS else 2):
        if WALK == 2:
            again = have_nan(acc)
            begin, end = first, tl.where(again, key_end, first)
            acc = only_where(~again, acc)
            m_i = tl.where(again, float("-inf"), m_i)
            l_of_first = l_i
        else:
            begin, end = steps_of(first, whole_begin, whole_end, key_end, WALK == 1, TWO_LOOPS)
        for step in range(begin, end, BLOCK_N):
            if WALK == 2:
                key_tile = tile_again(step, first, whole_begin, whole_end, TWO_LOOPS)
            else:
                key_tile = tile_of(step, whole_begin, whole_end, WALK == 1, TWO_LOOPS)
            at_edge = WALK == 1
            if WALK == 2 or not TWO_LOOPS:
                at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
            keys = key_tile + first_keys
            tile_offset = tl.cast(key_tile, tl.int64)
            # Keys that no query of the tile sees are not read: NaN there must have no effect.
            k_offset = tile_offset * k_tensor.stride_m
            if SPLIT_AHEAD:
                k = load_parts(
                    k_pointers[0] + k_offset, stride_kp, keys, dims[0], key_begin, key_end, PRECISION, WALK > 0
                )  # of [BLOCK_N, BLOCK_D]
                k = (k,)
            else:
                k = load_tiles(
                    k_pointers, k_offset, keys, dims, key_begin, key_end, HEAD_DIM, CHECK_D, WALK > 0
                )  # of [BLOCK_N, BLOCK_D]
                k = operands(k, PRECISION, IS_NVIDIA)
            scores = row_products(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
            if descales.QUANTIZED:
                scores = scores.to(tl.float32)  # sums of products of int8 are int32, and exact in float32
                scale = scale_of_tile * tl.load(k_descale_ptr + key_tile // descales.K_BLOCK * descales.k.stride_n)
                scale_log2 = scale * LOG2_E

            # The remaining factor that converts scores to bits. If anything is added or hidden, scores are converted
            # first: a scale of 0 is legal and 0 * -inf is NaN. Otherwise the scale is part of the softmax's fused
            # multiply-add, one instruction less for each score.
            scale_left = scale_log2
            if rules.HAS_SOFTCAP:
                scores = rules.softcap * tanh(scores * (scale / rules.softcap)) * LOG2_E
                scale_left = 1.0
            elif rules.HAS_MASK or rules.HAS_BIAS or rules.HAS_ALIBI:
                scores = scores * scale_log2
                scale_left = 1.0
            readable = (rows < seqlen_q)[:, None] & (keys_of_groups(keys, PAIR_GROUP) < key_end)[None, :]
            if rules.HAS_BIAS:
                bias_pointers = tile_pointers(bias_ptr, rows, keys, rules.bias.stride_m, rules.bias.stride_n)
                bias = tl.load(bias_pointers, mask=readable, other=float("-inf")).to(tl.float32)  # [BLOCK_M, BLOCK_N]
                scores = add_bias(scores, bias)
            if rules.HAS_ALIBI:
                distance = tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :])
                scores -= slope_log2 * distance.to(tl.float32)
            if at_edge:
                visible = band_visible(rows, keys, low, high, window.HAS_LOW, window.HAS_HIGH)
                visible = visible & (keys < key_end)[None, :]
                scores = tl.where(visible, scores * scale_left, float("-inf"))
                scale_left = 1.0
            if rules.HAS_MASK:
                mask_pointers = tile_pointers(mask_ptr, rows, keys, rules.mask.stride_m, rules.mask.stride_n)
                shown = tl.load(mask_pointers, mask=readable, other=0)  # [BLOCK_M, BLOCK_N]
                scores = tl.where(shown != 0, scores, float("-inf"))

            p, alpha, m_i, l_i = softmax_step(scores, scale_left, m_i, l_i)
            if dropout.HAS_DROPOUT:
                # After the sum: the log-sum-exp is that of the softmax without dropout.
                kept = dropout_keeps(
                    dropped_head, row_begin, first_rows[:, None], key_tile, first_keys[None, :],
                    dropout.threshold,
                )  # fmt: skip
                p = tl.where(kept, p, 0.0)
            if WALK == 2:
                seen = (tl.max((scores != float("-inf")).to(tl.int32), 0) != 0)[:, None]  # [BLOCK_N, 1]
            v_offset = tile_offset * v_tensor.stride_m
            if SPLIT_AHEAD:
                v = load_parts(
                    v_pointers[0] + v_offset, stride_vp, keys, dims_v[0], key_begin, key_end, PRECISION, WALK > 0
                )  # of [BLOCK_N, BLOCK_DV]
                if WALK == 2:
                    v = only_where(seen, v)
                v = (v,)
            else:
                v = load_tiles(
                    v_pointers, v_offset, keys, dims_v, key_begin, key_end, HEAD_DIM_V, CHECK_DV, WALK > 0
                )  # of [BLOCK_N, BLOCK_DV]
                if WALK == 2:
                    v = only_where(seen, v)
                if descales.QUANTIZED:
                    p = probabilities(p, P_DTYPE, descales.P_SCALE)
                    v = (v[0].to(p.dtype),) if V_DTYPE == tl.int8 else v
                else:
                    p = p.to(v[0].dtype)
                v = operands(v, PRECISION, IS_NVIDIA)
            p = operand(p, PRECISION, IS_NVIDIA)
            v_factor = None
            if descales.v.ptr is not None:
                # Hopper's matrix unit accumulates float8 products in few bits: the sum over all keys is kept outside
                # of it.
                v_factor = tl.load(v_descale_ptr + key_tile // descales.V_BLOCK * descales.v.stride_n)
            acc = with_products(p, v, times(acc, alpha[:, None]), v_factor, PRECISION)  # of [BLOCK_M, BLOCK_DV]
        if WALK == 2:
            l_i = l_of_first  # the same sum, but walk 2 may add in another order

    m_i, l_i, row_scale = final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)
    out = times(acc, row_scale[:, None])
    if dropout.HAS_DROPOUT:
        out = times(out, dropout.scale)
    if descales.QUANTIZED:
        out = times(out, 1.0 / descales.P_SCALE)
        if descales.out_ptr is not None:
            out = (float8_out(out[0], descales.out_ptr, descales.LARGEST_OUT),)
    store_tiles(out_ptr, rows, seqlen_q, dims_v, out_tensor.stride_m, out, HEAD_DIM_V)
    if WRITE_LSE:
        tl.store(lse_ptr + rows, lse_of(m_i, l_i), mask=rows < seqlen_q)


# Host -----------------------------------------------------------------------------------------------------------------

# The kernel takes q, k, v, out, lse, the other tensors of `Operands`, the seed of dropout, and the factors. A quantized
# call has no seed, and the launch ignores the number in its place.
TAKES_OF_QUANTIZED = (*range(12), 11, 12, 13, 14)
L2_BYTES = 16 * 1024 * 1024  # for K and V of the heads that run together; on an H200, 4 to 32 MB differ by 3 %


def bind(problem: AttentionProblem, operands: AnyOperands, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    allocate, straight = allocator(problem, operands.q), straightener(operands, in_groups=True)
    specified = specify(problem, current_gpu(operands.q.device), straight(operands), *allocate(out), config)
    if isinstance(specified, launch.Launch):
        launcher = launch.bind(specified, TAKES_OF_QUANTIZED if problem.is_quantized else None)

        def run(operands: AnyOperands, out: torch.Tensor | None = None) -> Results:
            q, k, v, *others = operands
            out, lse = allocate(out)
            launcher(q, k, v, out, lse, *others)
            return out, lse

        return behind(straight, run)

    split, attend = (launch.bind(spec) for spec in specified)
    *_, k_parts, v_parts = specified[0].tensors
    assert k_parts is not None and v_parts is not None
    make_parts = [maker(parts.shape, parts.dtype, parts.device) for parts in (k_parts, v_parts)]

    def run_split(operands: AnyOperands, out: torch.Tensor | None = None) -> Results:
        q, k, v, *others = operands
        out, lse = allocate(out)
        k_parts, v_parts = [make() for make in make_parts]
        split(k, v, k_parts, v_parts)
        attend(q, k_parts, v_parts, out, lse, *others)
        return out, lse

    return behind(straight, run_split)


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> launch.Launch | tuple[launch.Launch, launch.Launch]:
    """Returns one or two launches from tensors, which may be without memory (device "meta") if they are only
    compiled."""
    arithmetic = dot_precision(problem, gpu)
    if not (config.split_ahead and arithmetic in PARTS):
        return _specify(problem, gpu, operands, out, lse, replace(config, split_ahead=False))
    split, k, v = split_ahead.specify(problem, gpu, operands, tile_widths(problem, gpu, config.block_m), out.device)
    # The kernel's K and V are the first parts; the other parts follow at a fixed distance.
    first_k, first_v = (parts[0].transpose(-3, -2) for parts in (k, v))
    operands = operands._replace(k=first_k, v=first_v)
    attend = _specify(problem, gpu, operands, out, lse, config, k.stride(0) // 16, v.stride(0) // 16)
    return split, attend._replace(tensors=(operands.q, k, v, *attend.tensors[3:]))


def _specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
    stride_kp: int = 0,
    stride_vp: int = 0,
) -> launch.Launch:
    """Returns the launch of `flash_fwd_kernel`. If K and V were split ahead, `stride_kp` and `stride_vp` are the
    distances of their parts, in units of 16 elements."""
    return launch.Launch(
        kernel=flash_fwd_kernel,
        grid=-(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch,
        tensors=(*operands[:3], out, lse, *_others(operands)),
        scalars=_scalars(problem, operands, out, stride_kp, stride_vp),
        constants={
            **_constants(problem, gpu, config, stride_unit(*operands[:3], out)),
            "PAIR_GROUP": pair_group(*operands[3:5]),
        },
        # Fused multiply-adds are off in float32: the maximum times the scale must round like each score times the
        # scale, so that the largest probability is exactly 1.
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": problem.dtype != "float32",
            **matrix_options(problem, gpu, config.block_m, config.block_n, config.num_warps),
            **_occupancy_options(problem, gpu),
        },
    )


def _occupancy_options(problem: AttentionProblem, gpu: Gpu) -> dict[str, int]:
    """Returns Triton's option for two waves a SIMD on CDNA 2 to 4. Without it Triton 3.6 takes 4 to 48 registers more
    than two waves have (docs/notes/other_cards.md)."""
    is_plain = problem.mask_shape is None and problem.bias_shape is None and not problem.dropout_p
    is_wide = max(problem.head_dim, problem.head_dim_v) > 64 and problem.dtype != "float32" and not problem.is_quantized
    return {"waves_per_eu": 2} if gpu.arch in ("gfx90a", "gfx942", "gfx950") and is_wide and is_plain else {}


def _others(operands: AnyOperands) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors after q, k and v in the kernel's order; None where absent."""
    if isinstance(operands, QuantizedOperands):
        return (*operands[3:NUM_COMMON], None, *operands[NUM_COMMON:])
    return (*operands[3:NUM_COMMON], operands.dropout_seed, None, None, None, None)


def _scalars(
    problem: AttentionProblem, operands: AnyOperands, out: torch.Tensor, stride_kp: int, stride_vp: int
) -> list[int | float | None]:
    """Returns the run-time arguments after the pointers, in the kernel's order."""
    unit = stride_unit(*operands[:3], out)
    strides = strides_in(unit, *operands[:3], out)
    strides[-1] = 1  # elements of out are adjacent
    strides += lse_strides(problem)
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    return [
        *strides,
        *score_rules(problem, *operands[3:6]),
        *lengths(problem),
        *dropout.scalars(problem.dropout_p),
        *descales.strides(problem, operands),
        stride_kp,
        stride_vp,
        problem.num_heads_q,
        problem.num_heads_q // problem.num_heads_kv,
        # At most the number of heads: tiles times heads is a program id, which must not overflow.
        min(problem.batch * problem.num_heads_q, max(1, L2_BYTES // max(1, kv_bytes))),
    ]


def _constants(problem: AttentionProblem, gpu: Gpu, config: Config, unit: int) -> dict[str, int | bool | str]:
    """Returns the compile-time arguments of the kernel, by name."""
    widths, widths_v = column_widths(problem, gpu, config.block_m)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STRIDE_UNIT": unit,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": widths[0],
        "REST_D": widths[1],
        "BLOCK_DV": widths_v[0],
        "REST_DV": widths_v[1],
        **band_constants(problem),
        **feature_constants(problem),
        "HAS_DROPOUT": problem.dropout_p > 0,
        "IS_VARLEN": problem.packed,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "SPLIT_AHEAD": config.split_ahead,
        "IS_NVIDIA": gpu.vendor == "nvidia",
        # By wgmma 26 calls are 0.965 times as fast (2026-11-27-h200-forward-loops.json); tcgen05 was not measured.
        "TWO_LOOPS": two_loops(gpu, config.block_m, widths_v[0]) and not reads_shared_memory(gpu, config.block_m),
        **descales.constants(problem),
    }


# What it can run and what it costs ------------------------------------------------------------------------------------


@by_kind
def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = [*reasons.of_device(gpu), *reasons.of_gradients(problem)]
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"a row of K or V must fit one tile: at most {MAX_HEAD_DIM}")
    found += precision.why_not(problem, gpu)
    found += reasons.of_quantized(problem, gpu)
    if not found and not fitting(problem, gpu):
        needed = min(smem_bytes(problem, gpu, config) for config in space())
        found.append(reasons.of_shared_memory(needed, gpu))
    return found
