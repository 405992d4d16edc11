"""FlashAttention forward in one pass, portable Triton: every GPU that Triton compiles for, head_dim up to 256.

A program owns BLOCK_M queries of one head, walks the keys they see in tiles of BLOCK_N, and maintains a running
softmax. Scores never leave the chip, and memory traffic is that of q, k, v and out.

    S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1. The keys
fall into three ranges: a masked one at the left edge of a window, one that every query of the tile sees, and a masked
one at the diagonal or the ragged end. Only edge tiles pay for masks; hidden tiles are never visited.

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency if the grid does not
fill the GPU. It adds to the ladder's tiled kernel the online softmax, and with it O(seqlen) memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from warpwave import precision
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import descales, dropout, reasons
from warpwave.kernels.arguments import (
    Results,
    Run,
    allocator,
    band_constants,
    behind,
    broadcast_strides,
    dot_precision,
    feature_constants,
    lse_strides,
    maker,
    slope_strides,
    straightener,
    tile_widths,
    token_strides,
    window,
)
from warpwave.kernels.descales import float8_out, probabilities
from warpwave.kernels.dropout import dropout_keeps, load_dropout_key
from warpwave.kernels.flash_fwd.config import Config, configs, fitting, smem_bytes, space
from warpwave.kernels.flash_fwd.costs import cost
from warpwave.kernels.prepass import split_ahead
from warpwave.kernels.prepass.split_ahead import PARTS
from warpwave.kernels.primitives import (
    LN_2,
    LOG2_E,
    add_bias,
    band_visible,
    in_elements,
    key_ranges,
    load_parts,
    load_tile,
    only_rows,
    operand,
    packed_sequence,
    product,
    rounded,
    softmax_step,
    tanh,
    tile_pointers,
    transposed,
)
from warpwave.problem import DTYPE_BYTES, AnyOperands, AttentionProblem, QuantizedOperands, by_kind
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

__all__ = ["Config", "bind", "configs", "cost", "flash_fwd_kernel", "smem_bytes", "specify", "why_not"]

NAME = "flash_fwd"
NEEDS_GPU = True
STRIDED_OUT = True
QUANTIZED = True
MAX_HEAD_DIM = 256
# Arguments that the compiler must not specialize on; otherwise new lengths would recompile. These are sizes, and every
# stride whose alignment is already in its unit or is not useful.
UNSPECIALISED = [
    *("stride_qb", "stride_qm", "stride_qh", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn"),
    *("stride_vh", "stride_ob", "stride_om", "stride_oh", "stride_lb", "stride_lh", "stride_mask_b", "stride_mask_h"),
    *("stride_bias_b", "stride_bias_h", "stride_alibi_b", "stride_alibi_h", "stride_kp", "stride_vp", "seqlen_q"),
    *("seqlen_k", "total_q", "total_k", "num_heads_q", "group_size", "window_left", "window_right", "heads_in_l2"),
    *("dropout_threshold", "stride_q_descale_b", "stride_q_descale_g", "stride_q_descale_h", "stride_q_descale_n"),
    *("stride_k_descale_b", "stride_k_descale_h", "stride_k_descale_n"),
    *("stride_v_descale_b", "stride_v_descale_h", "stride_v_descale_n"),
]

# Device code ----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=UNSPECIALISED)
def flash_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    dropout_seed_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    out_descale_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_ob,
    stride_om,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_alibi_b,
    stride_alibi_h,
    stride_kp,
    stride_vp,
    stride_q_descale_b,
    stride_q_descale_g,
    stride_q_descale_h,
    stride_q_descale_n,
    stride_k_descale_b,
    stride_k_descale_h,
    stride_k_descale_n,
    stride_v_descale_b,
    stride_v_descale_h,
    stride_v_descale_n,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_heads_q,
    group_size,
    window_left,
    window_right,
    heads_in_l2,
    softmax_scale,
    softcap,
    dropout_threshold,
    dropout_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_AHEAD: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    QUANTIZED: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    P_SCALE: tl.constexpr,
    LARGEST_OUT: tl.constexpr,
):
    """Processes one tile of queries of one head.

    The grid has one dimension because 65,535 is the limit of the others. Neighboring programs share K and V through L2.
    """
    # Strides come in units. The compiler only recognizes multiples of 16, and the units let it see that rows of 40 or
    # 80 elements are 16-byte aligned. Otherwise they are read one element at a time.
    stride_qb, stride_qm, stride_qh = in_elements(stride_qb, stride_qm, stride_qh, STRIDE_UNIT)
    stride_kb, stride_kn, stride_kh = in_elements(stride_kb, stride_kn, stride_kh, STRIDE_UNIT)
    stride_vb, stride_vn, stride_vh = in_elements(stride_vb, stride_vn, stride_vh, STRIDE_UNIT)
    stride_ob, stride_om, stride_oh = in_elements(stride_ob, stride_om, stride_oh, STRIDE_UNIT)

    # Position of this program -----------------------------------------------------------------------------------------
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    if HAS_HIGH:
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

    if IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(cu_seqlens_q_ptr, batch, seqlen_q, total_q)
        k_begin, seqlen_k = packed_sequence(cu_seqlens_k_ptr, batch, seqlen_k, total_k)
        if tile * BLOCK_M >= seqlen_q:
            return
        q_ptr += q_begin * stride_qm
        k_ptr += k_begin * stride_kn
        v_ptr += k_begin * stride_vn
        out_ptr += q_begin * stride_om
        if WRITE_LSE:
            lse_ptr += q_begin
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    if WRITE_LSE:
        lse_ptr += batch * stride_lb + head * stride_lh
    if HAS_MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    if HAS_BIAS:
        bias_ptr += batch * stride_bias_b + head * stride_bias_h

    # The band of visible keys, low <= key - row <= high (problem.Band), and the ranges into which it cuts the keys.
    last_key_offset = seqlen_k - seqlen_q
    low = last_key_offset - window_left
    high = last_key_offset + window_right
    if TOP_LEFT:
        high = tl.minimum(high, 0)
    row_begin = tile * BLOCK_M
    first_rows = tl.arange(0, BLOCK_M)
    rows = row_begin + first_rows
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    key_begin, key_end, first, whole_begin, whole_end = key_ranges(
        row_begin, row_last, seqlen_k, low, high, BLOCK_N, HAS_LOW, HAS_HIGH
    )

    # State of the online softmax --------------------------------------------------------------------------------------
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    q = tile_pointers(q_ptr, rows, dims, stride_qm, stride_qd)
    q = load_tile(q, rows, dims, 0, seqlen_q, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_M, BLOCK_D]
    q = operand(q, PRECISION, IS_NVIDIA)
    first_keys = tl.arange(0, BLOCK_N)
    k_pointers = tile_pointers(k_ptr, first_keys, dims, stride_kn, stride_kd)
    v_pointers = tile_pointers(v_ptr, first_keys, dims_v, stride_vn, stride_vd)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    scale = softmax_scale
    scale_log2 = scale * LOG2_E
    if QUANTIZED:
        # A tile of queries, or of keys, is inside one block of tokens, so it has one factor. It joins the scale.
        member = head - kv_head * group_size
        q_descale_ptr += batch * stride_q_descale_b + kv_head * stride_q_descale_g + member * stride_q_descale_h
        scale_of_tile = softmax_scale * tl.load(q_descale_ptr + row_begin // Q_BLOCK * stride_q_descale_n)
        k_descale_ptr += batch * stride_k_descale_b + kv_head * stride_k_descale_h
        # int8 values are exact in float16, in which they are multiplied. Matrix units mix the two kinds of float8, of
        # which e4m3 has one bit more.
        V_DTYPE: tl.constexpr = v_ptr.dtype.element_ty
        P_DTYPE: tl.constexpr = (
            tl.float16 if V_DTYPE == tl.int8 else tl.float8e4nv if V_DTYPE == tl.float8e5 else V_DTYPE
        )
    if v_descale_ptr is not None:
        v_descale_ptr += batch * stride_v_descale_b + kv_head * stride_v_descale_h
    if HAS_DROPOUT:
        dropout_key = load_dropout_key(dropout_seed_ptr)
    if HAS_ALIBI:
        slope_log2 = tl.load(alibi_slopes_ptr + batch * stride_alibi_b + head * stride_alibi_h) * LOG2_E

    for key_tile in range(first, key_end, BLOCK_N):
        at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
        keys = key_tile + first_keys
        tile_offset = tl.cast(key_tile, tl.int64)
        # Keys that no query of the tile sees are not read: NaN there must have no effect.
        k = k_pointers + tile_offset * stride_kn
        if SPLIT_AHEAD:
            k = load_parts(k, stride_kp, keys, dims, key_begin, key_end, PRECISION)  # [BLOCK_N, BLOCK_D], each
        else:
            k = load_tile(k, keys, dims, key_begin, key_end, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_N, BLOCK_D]
            k = operand(k, PRECISION, IS_NVIDIA)
        k = transposed(k, PRECISION)
        scores = product(q, k, None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if QUANTIZED:
            scores = scores.to(tl.float32)  # sums of products of int8 are int32, and exact in float32
            scale = scale_of_tile * tl.load(k_descale_ptr + key_tile // K_BLOCK * stride_k_descale_n)
            scale_log2 = scale * LOG2_E

        # The remaining factor that converts scores to bits. If anything is added or hidden, scores are converted first:
        # a scale of 0 is legal and 0 * -inf is NaN. Otherwise the scale is part of the softmax's fused multiply-add,
        # one instruction less for each score.
        scale_left = scale_log2
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores * (scale / softcap)) * LOG2_E
            scale_left = 1.0
        elif HAS_MASK or HAS_BIAS or HAS_ALIBI:
            scores = scores * scale_log2
            scale_left = 1.0
        inside = (rows < seqlen_q)[:, None] & (keys < key_end)[None, :]
        if HAS_BIAS:
            offsets = rows.to(tl.int64)[:, None] * stride_bias_m + keys.to(tl.int64)[None, :] * stride_bias_n
            bias = tl.load(bias_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_M, BLOCK_N]
            scores = add_bias(scores, bias)
        if HAS_ALIBI:
            distance = tl.abs(rows[:, None] + last_key_offset - keys[None, :])
            scores -= slope_log2 * distance.to(tl.float32)
        if at_edge:
            visible = band_visible(rows, keys, low, high, HAS_LOW, HAS_HIGH) & (keys < key_end)[None, :]
            scores = tl.where(visible, scores * scale_left, float("-inf"))
            scale_left = 1.0
        if HAS_MASK:
            offsets = rows.to(tl.int64)[:, None] * stride_mask_m + keys.to(tl.int64)[None, :] * stride_mask_n
            shown = tl.load(mask_ptr + offsets, mask=inside, other=0)  # [BLOCK_M, BLOCK_N]
            scores = tl.where(shown != 0, scores, float("-inf"))

        p, alpha, m_i, l_i = softmax_step(scores, scale_left, m_i, l_i)
        if HAS_DROPOUT:
            # After the sum: the log-sum-exp is that of the softmax without dropout.
            kept = dropout_keeps(
                dropout_key, batch, head, row_begin, first_rows[:, None], key_tile, first_keys[None, :],
                dropout_threshold,
            )  # fmt: skip
            p = tl.where(kept, p, 0.0)
        v = v_pointers + tile_offset * stride_vn
        if SPLIT_AHEAD:
            v = load_parts(v, stride_vp, keys, dims_v, key_begin, key_end, PRECISION)  # [BLOCK_N, BLOCK_DV], each
            if HAS_MASK or HAS_BIAS:
                seen = tl.max((scores != float("-inf")).to(tl.int32), 0)  # [BLOCK_N]
                v = only_rows(v, seen != 0, PRECISION)
        else:
            v = load_tile(v, keys, dims_v, key_begin, key_end, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
            if HAS_MASK or HAS_BIAS:
                # A value that no query of the tile sees must have no effect, but 0 * NaN is NaN.
                seen = tl.max((scores != float("-inf")).to(tl.int32), 0)  # [BLOCK_N]
                v = tl.where((seen != 0)[:, None], v, tl.zeros_like(v))
            if QUANTIZED:
                p = probabilities(p, P_DTYPE, P_SCALE)
                v = v.to(p.dtype) if V_DTYPE == tl.int8 else v
            else:
                p = p.to(v.dtype)
            v = operand(v, PRECISION, IS_NVIDIA)
        p = operand(p, PRECISION, IS_NVIDIA)
        if v_descale_ptr is None:
            acc = product(p, v, acc * alpha[:, None], PRECISION)  # [BLOCK_M, BLOCK_DV]
        else:
            # Hopper's matrix unit accumulates float8 products in few bits: the sum over all keys is kept outside of it.
            of_tile = product(p, v, None, PRECISION)  # [BLOCK_M, BLOCK_DV]
            v_factor = tl.load(v_descale_ptr + key_tile // V_BLOCK * stride_v_descale_n)
            acc = acc * alpha[:, None] + of_tile * v_factor

    if HAS_SINKS:
        # The sink is one more key, whose value is zero. It is added last: as the first maximum it would push the
        # probabilities of lower scores out of the range of 16 bits.
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
        m_new = tl.maximum(m_i, sink_log2)
        m_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.math.exp2(m_i - m_shift)
        acc = acc * alpha[:, None]
        l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)
        m_i = m_new
    # A row that saw no key has sum 0: its output is 0 and its log-sum-exp minus infinity.
    out = acc * tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    if HAS_DROPOUT:
        out = out * dropout_scale
    if QUANTIZED:
        out = out * (1.0 / P_SCALE)
        if out_descale_ptr is not None:
            out = float8_out(out, out_descale_ptr, LARGEST_OUT)
    offsets = rows.to(tl.int64)[:, None] * stride_om + dims_v[None, :]
    inside = (rows < seqlen_q)[:, None] & (dims_v < HEAD_DIM_V)[None, :]
    tl.store(out_ptr + offsets, rounded(out, out_ptr.dtype.element_ty), mask=inside)
    if WRITE_LSE:
        lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.math.log2(l_i)) * LN_2)
        tl.store(lse_ptr + rows, lse, mask=rows < seqlen_q)


# Host -----------------------------------------------------------------------------------------------------------------

# The kernel takes q, k, v, out, lse, the other tensors of `Operands`, the seed of dropout, and the factors. A quantized
# call has no seed, and the launch ignores the number in its place.
TAKES_OF_QUANTIZED = (*range(12), 11, 12, 13, 14)
L2_BYTES = 16 * 1024 * 1024  # for K and V of the heads that run together; on an H200, 4 to 32 MB differ by 3 %


def bind(problem: AttentionProblem, operands: AnyOperands, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    allocate, straight = allocator(problem, operands.q), straightener(operands)
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
        constants=_constants(problem, gpu, config, stride_unit(operands, out)),
        # Fused multiply-adds are off in float32: the maximum times the scale must round like each score times the
        # scale, so that the largest probability is exactly 1.
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": problem.dtype != "float32",
        },
    )


def _others(operands: AnyOperands) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors after q, k and v in the kernel's order; None where absent."""
    if isinstance(operands, QuantizedOperands):
        return (*operands[3:9], None, *operands[9:])
    return (*operands[3:9], operands.dropout_seed, None, None, None, None)


def _scalars(
    problem: AttentionProblem, operands: AnyOperands, out: torch.Tensor, stride_kp: int, stride_vp: int
) -> list[int | float | None]:
    """Returns the run-time arguments after the pointers, in the kernel's order."""
    unit = stride_unit(operands, out)
    strides: list[int] = []
    for tensor in operands[:3]:
        *outer, inner = token_strides(problem, tensor)
        strides += (*(stride // unit for stride in outer), inner)
    strides += (stride // unit for stride in token_strides(problem, out)[:-1])
    strides += lse_strides(problem)
    strides += (*broadcast_strides(operands.mask), *broadcast_strides(operands.bias))
    strides += slope_strides(operands.alibi_slopes)
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    return [
        *strides,
        stride_kp,
        stride_vp,
        *descales.strides(problem, operands),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.total_q,
        problem.total_k,
        problem.num_heads_q,
        problem.num_heads_q // problem.num_heads_kv,
        *window(problem),
        # At most the number of heads: tiles times heads is a program id, which must not overflow.
        min(problem.batch * problem.num_heads_q, max(1, L2_BYTES // max(1, kv_bytes))),
        problem.softmax_scale,
        problem.softcap,
        *dropout.scalars(problem.dropout_p),
    ]


def stride_unit(operands: AnyOperands, out: torch.Tensor) -> int:
    """Returns the largest power of two, up to 16, that divides every stride between rows, heads and batches."""
    return math.gcd(16, *(stride for tensor in (*operands[:3], out) for stride in tensor.stride()[:-1]))


def _constants(problem: AttentionProblem, gpu: Gpu, config: Config, unit: int) -> dict[str, int | bool | str]:
    """Returns the compile-time arguments of the kernel, by name."""
    block_d, block_dv = tile_widths(problem, gpu, config.block_m)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STRIDE_UNIT": unit,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        **band_constants(problem),
        **feature_constants(problem),
        "HAS_DROPOUT": problem.dropout_p > 0,
        "IS_VARLEN": problem.packed,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "SPLIT_AHEAD": config.split_ahead,
        "IS_NVIDIA": gpu.vendor == "nvidia",
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
