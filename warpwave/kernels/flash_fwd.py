"""FlashAttention forward in one pass, portable Triton: every GPU that Triton compiles for, head_dim up to 256.

A program owns BLOCK_M queries of one head, walks the keys they see in tiles of BLOCK_N, and keeps the softmax
running: scores never leave the chip, and memory traffic is that of q, k, v and out.

    S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), algorithm 1. The keys
fall in three ranges: a masked one at the left edge of a window, one that every query of the tile sees, and a masked
one at the diagonal or the ragged end. Only edge tiles pay for masks; hidden tiles are never visited.

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency when the grid does not
fill the GPU. It adds to the ladder's tiled kernel the online softmax, and with it O(seqlen) memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from warpwave import launch, precision
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels.arguments import (
    allocator,
    band_constants,
    broadcast_strides,
    dot_precision,
    feature_constants,
    lse_strides,
    padded,
    slope_strides,
    straightener,
    token_strides,
    window,
)
from warpwave.kernels.cost import Cost, visited_tiles
from warpwave.kernels.primitives import (
    LN_2,
    LOG2_E,
    band_visible,
    load_parts,
    load_tile,
    only_rows,
    operand,
    product,
    rounded,
    softmax_step,
    tanh,
    tile_pointers,
    transposed,
)
from warpwave.kernels.triton_or_stub import NO_TRITON, jit, tl
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Operands

NAME = "flash_fwd"
NEEDS_GPU = True
MAX_HEAD_DIM = 256
PARTS = {"bf16x3": 2, "bf16x6": 3}  # of an operand, where products are of bfloat16
WGMMA_OR_TCGEN05 = (90, 100, 103)  # compute capabilities whose matrix unit reads operands from shared memory
# Arguments the compiler must not specialise on, or new lengths would compile again: sizes, and every stride whose
# alignment is in the unit it comes in or is of no use.
UNSPECIALISED = [
    *("stride_qb", "stride_qm", "stride_qh", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn"),
    *("stride_vh", "stride_ob", "stride_om", "stride_oh", "stride_lb", "stride_lh", "stride_mask_b", "stride_mask_h"),
    *("stride_bias_b", "stride_bias_h", "stride_alibi_b", "stride_alibi_h", "stride_kp", "stride_vp", "seqlen_q"),
    *("seqlen_k", "total_q", "total_k", "num_heads_q", "group_size", "window_left", "window_right", "heads_in_l2"),
]

SPLIT_UNSPECIALISED = [
    *("stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh", "stride_kp", "stride_vp", "seqlen"),
    *("num_rows", "num_heads"),
]
SPLIT_ROWS = 32  # rows of K or V that a program splits


@dataclass(frozen=True)
class Config:
    """Tile shape and launch shape.

    Args:
        block_m: queries a program owns, a power of two, at least 16.
        block_n: keys a step walks, a power of two, at least 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight.
        split_ahead: whether a launch before this one splits K and V into the parts that products of bf16x3 and bf16x6
            take, once for all queries. A tile then goes from memory to the matrix unit as it is, and not through the
            registers of every block that needs it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_ahead: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, at least {least}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}; it must be at least 1")


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _key_ranges(
    row_begin, row_last, seqlen_k, low, high, BLOCK_N: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr
):
    """Where the keys of a query tile begin and end, and which tiles in between every query sees whole.

    Returns:
        key_begin, key_end: keys outside are seen by no query of the tile.
        first: key_begin rounded down to a tile.
        whole_begin, whole_end: tiles between them need no mask.
    """
    key_begin = 0
    key_end = seqlen_k
    whole_begin = 0
    whole_end = seqlen_k
    if HAS_LOW:
        key_begin = tl.maximum(row_begin + low, 0)
        whole_begin = tl.maximum(row_last + low, 0)
    if HAS_HIGH:
        key_end = tl.minimum(key_end, row_last + high + 1)
        whole_end = tl.minimum(whole_end, row_begin + high + 1)
    if HAS_LOW and HAS_HIGH:
        # A window that begins behind the diagonal (top-left causal) shows nothing at all.
        key_end = tl.where(low > high, 0, key_end)
    first = key_begin // BLOCK_N * BLOCK_N
    last = tl.cdiv(tl.maximum(key_end, 0), BLOCK_N) * BLOCK_N
    whole_begin = tl.minimum(tl.cdiv(whole_begin, BLOCK_N) * BLOCK_N, tl.maximum(first, last))
    whole_end = tl.maximum(tl.maximum(whole_end, 0) // BLOCK_N * BLOCK_N, whole_begin)
    return key_begin, key_end, first, whole_begin, whole_end


@jit
def _in_elements(stride_batch, stride_row, stride_head, UNIT: tl.constexpr):
    """64-bit, for a stride in elements may pass 2^31 where it did not in units."""
    return (
        tl.cast(stride_batch, tl.int64) * UNIT,
        tl.cast(stride_row, tl.int64) * UNIT,
        tl.cast(stride_head, tl.int64) * UNIT,
    )


@jit
def _split_tile(
    x_ptr, parts_ptr, tile, stride_b, stride_n, stride_h, stride_d, stride_p, seqlen, num_rows, num_heads,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS rows of K or V in parts, each part (batch, num_heads, seqlen, BLOCK_D), zero behind WIDTH."""
    rows = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    token, batch_head = rows % seqlen, rows // seqlen
    begins = batch_head // num_heads * stride_b + batch_head % num_heads * stride_h + token * stride_n
    inside = (rows < num_rows)[:, None] & (dims < WIDTH)[None, :]
    x = tl.load(x_ptr + (begins[:, None] + dims.to(tl.int64)[None, :] * stride_d), mask=inside, other=0.0)
    parts = operand(x, PRECISION, IS_NVIDIA)  # [BLOCK_ROWS, BLOCK_D]
    to = parts_ptr + (rows[:, None] * BLOCK_D + dims[None, :])
    for i in tl.static_range(2 if PRECISION == "bf16x3" else 3):
        tl.store(to + i * tl.cast(stride_p, tl.int64), parts[i].to(tl.bfloat16), mask=(rows < num_rows)[:, None])


@jit(do_not_specialize=SPLIT_UNSPECIALISED)
def split_kernel(
    k_ptr,
    v_ptr,
    k_parts_ptr,
    v_parts_ptr,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_kp,
    stride_vp,
    seqlen,
    num_rows,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Splits K and V, float32, into what products of PRECISION take: programs of even number K, the others V."""
    tile = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        _split_tile(
            k_ptr, k_parts_ptr, tile, stride_kb, stride_kn, stride_kh, stride_kd, stride_kp, seqlen, num_rows,
            num_heads, HEAD_DIM, BLOCK_ROWS, BLOCK_D, PRECISION, IS_NVIDIA,
        )  # fmt: skip
    else:
        _split_tile(
            v_ptr, v_parts_ptr, tile, stride_vb, stride_vn, stride_vh, stride_vd, stride_vp, seqlen, num_rows,
            num_heads, HEAD_DIM_V, BLOCK_ROWS, BLOCK_DV, PRECISION, IS_NVIDIA,
        )  # fmt: skip


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
    IS_VARLEN: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_AHEAD: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    ABLATE: tl.constexpr,
):
    """One tile of queries of one head.

    The grid has one dimension, for 65,535 is the limit of the others. Neighbouring programs share K and V through L2.
    ABLATE is empty but for `warpwave.ablation`, which leaves one resource out to time what it costs: results are wrong.
    """
    # Strides come in units: the compiler, which tells only multiples of 16 by itself, then sees that rows of 40 or 80
    # elements are 16-byte aligned, without which they are read one element at a time.
    stride_qb, stride_qm, stride_qh = _in_elements(stride_qb, stride_qm, stride_qh, STRIDE_UNIT)
    stride_kb, stride_kn, stride_kh = _in_elements(stride_kb, stride_kn, stride_kh, STRIDE_UNIT)
    stride_vb, stride_vn, stride_vh = _in_elements(stride_vb, stride_vn, stride_vh, STRIDE_UNIT)
    stride_ob, stride_om, stride_oh = _in_elements(stride_ob, stride_om, stride_oh, STRIDE_UNIT)

    # Where this program works -----------------------------------------------------------------------------------------
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    if HAS_HIGH:
        # Longest first, so that the last to start are the shortest: over all heads whose K and V fit L2 together.
        group = pid // (num_tiles * heads_in_l2)
        place = pid % (num_tiles * heads_in_l2)
        heads = tl.minimum(tl.num_programs(0) // num_tiles - group * heads_in_l2, heads_in_l2)
        tile = num_tiles - 1 - place // heads
        batch_head = group * heads_in_l2 + place % heads
    else:
        tile = pid % num_tiles
        batch_head = pid // num_tiles
    head = (batch_head % num_heads_q).to(tl.int64)
    batch = (batch_head // num_heads_q).to(tl.int64)
    kv_head = head // group_size

    if IS_VARLEN:
        # Clamped, so that offsets that are no offsets still read and write inside the tensors.
        q_begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_q_ptr + batch), 0), total_q)
        k_begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_k_ptr + batch), 0), total_k)
        seqlen_q = tl.minimum(tl.load(cu_seqlens_q_ptr + batch + 1), total_q) - q_begin
        seqlen_k = tl.minimum(tl.load(cu_seqlens_k_ptr + batch + 1), total_k) - k_begin
        if tile * BLOCK_M >= seqlen_q:
            return
        q_ptr += q_begin.to(tl.int64) * stride_qm
        k_ptr += k_begin.to(tl.int64) * stride_kn
        v_ptr += k_begin.to(tl.int64) * stride_vn
        out_ptr += q_begin.to(tl.int64) * stride_om
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

    # The band of visible keys, low <= key - row <= high (problem.Band), and the ranges it cuts the keys into.
    last_key_offset = seqlen_k - seqlen_q
    low = last_key_offset - window_left
    high = last_key_offset + window_right
    if TOP_LEFT:
        high = tl.minimum(high, 0)
    row_begin = tile * BLOCK_M
    rows = row_begin + tl.arange(0, BLOCK_M)
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    key_begin, key_end, first, whole_begin, whole_end = _key_ranges(
        row_begin, row_last, seqlen_k, low, high, BLOCK_N, HAS_LOW, HAS_HIGH
    )

    # The state of the online softmax ----------------------------------------------------------------------------------
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
    scale_log2 = softmax_scale * LOG2_E
    if HAS_ALIBI:
        slope_log2 = tl.load(alibi_slopes_ptr + batch * stride_alibi_b + head * stride_alibi_h) * LOG2_E

    for key_tile in range(first, key_end, BLOCK_N):
        at_edge = (key_tile < whole_begin) | (key_tile >= whole_end)
        keys = key_tile + first_keys
        tile_offset = tl.cast(key_tile, tl.int64)
        if ABLATE == "loads":
            tile_offset = tile_offset * 0
        if ABLATE == "mask":
            at_edge = False
        # Keys that no query of the tile sees are not read: NaN there must have no effect.
        k = k_pointers + tile_offset * stride_kn
        if SPLIT_AHEAD:
            k = load_parts(k, stride_kp, keys, dims, key_begin, key_end, PRECISION)  # [BLOCK_N, BLOCK_D], each
        else:
            k = load_tile(k, keys, dims, key_begin, key_end, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [BLOCK_N, BLOCK_D]
            k = operand(k, PRECISION, IS_NVIDIA)
        k = transposed(k, PRECISION)
        scores = product(q, k, None, PRECISION)  # [BLOCK_M, BLOCK_N]

        # What is left to multiply scores by, to make bits of them. Where something is added or hidden, that is done in
        # bits: a scale of 0 is legal and 0 * -inf is NaN. Elsewhere the scale rides in the softmax's fused
        # multiply-add, one instruction less for each score.
        scale_left = scale_log2
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores * (softmax_scale / softcap)) * LOG2_E
            scale_left = 1.0
        elif HAS_MASK or HAS_BIAS or HAS_ALIBI:
            scores = scores * scale_log2
            scale_left = 1.0
        inside = (rows < seqlen_q)[:, None] & (keys < key_end)[None, :]
        if HAS_BIAS:
            offsets = rows.to(tl.int64)[:, None] * stride_bias_m + keys.to(tl.int64)[None, :] * stride_bias_n
            bias = tl.load(bias_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_M, BLOCK_N]
            # -inf hides the pair, whatever the score: NaN + -inf would be NaN.
            scores = tl.where(bias == float("-inf"), float("-inf"), scores + bias * LOG2_E)
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

        if ABLATE == "exponentials":
            m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_left)
            p = scores * scale_left - m_new[:, None]
            alpha = tl.math.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            m_i = m_new
        else:
            p, alpha, m_i, l_i = softmax_step(scores, scale_left, m_i, l_i)
        v = v_pointers + tile_offset * stride_vn
        if SPLIT_AHEAD:
            v = load_parts(v, stride_vp, keys, dims_v, key_begin, key_end, PRECISION)  # [BLOCK_N, BLOCK_DV], each
            if HAS_MASK or HAS_BIAS:
                seen = tl.max((scores != float("-inf")).to(tl.int32), 0)  # [BLOCK_N]
                v = only_rows(v, seen != 0, PRECISION)
        else:
            v = load_tile(v, keys, dims_v, key_begin, key_end, HEAD_DIM_V, HEAD_DIM_V < BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
            if HAS_MASK or HAS_BIAS:
                # A value that no query of the tile sees must have no effect, and 0 * NaN would be one.
                seen = tl.max((scores != float("-inf")).to(tl.int32), 0)  # [BLOCK_N]
                v = tl.where((seen != 0)[:, None], v, 0.0)
            p = p.to(v.dtype)
            v = operand(v, PRECISION, IS_NVIDIA)
        p = operand(p, PRECISION, IS_NVIDIA)
        if ABLATE == "values":
            acc = acc * alpha[:, None]
        else:
            acc = product(p, v, acc * alpha[:, None], PRECISION)  # [BLOCK_M, BLOCK_DV]

    if HAS_SINKS:
        # One more key, whose value is zero. It comes last: as the first maximum it would push the probabilities of
        # lower scores out of the range of 16 bits.
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
        m_new = tl.maximum(m_i, sink_log2)
        m_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.math.exp2(m_i - m_shift)
        acc = acc * alpha[:, None]
        l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)
        m_i = m_new
    # A row that saw no key has sum 0: its output is 0 and its log-sum-exp minus infinity.
    out = acc * tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    offsets = rows.to(tl.int64)[:, None] * stride_om + dims_v[None, :]
    inside = (rows < seqlen_q)[:, None] & (dims_v < HEAD_DIM_V)[None, :]
    if ABLATE == "store":
        inside = inside & (l_i < 0.0)[:, None]  # a sum is never negative, which the compiler does not know
    tl.store(out_ptr + offsets, rounded(out, out_ptr.dtype.element_ty), mask=inside)
    if WRITE_LSE:
        lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.math.log2(l_i)) * LN_2)
        tl.store(lse_ptr + rows, lse, mask=rows < seqlen_q)


# Host -----------------------------------------------------------------------------------------------------------------

L2_BYTES = 16 * 1024 * 1024  # K and V of the heads that run together. On an H200, 4 to 32 MB differ by 3 %.


def bind(
    problem: AttentionProblem, operands: Operands, config: Config
) -> Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]:
    """Compiles for one problem and layout; returns `run(operands) -> (out, lse)`, lse None unless asked for."""
    allocate, straight = allocator(problem, operands.q), straightener(operands)
    specified = specify(problem, current_gpu(operands.q.device), straight(operands), *allocate(), config)
    if isinstance(specified, launch.Launch):
        launcher = launch.bind(specified)

        def run(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
            operands = straight(operands)
            out, lse = allocate()
            launcher(*operands[:3], out, lse, *operands[3:])
            return out, lse

        return run

    split, attend = (launch.bind(spec) for spec in specified)
    *_, k_parts, v_parts = specified[0].tensors
    assert k_parts is not None and v_parts is not None
    shapes, device = (k_parts.shape, v_parts.shape), operands.q.device

    def run_split(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        operands = straight(operands)
        out, lse = allocate()
        k_parts, v_parts = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        split(operands.k, operands.v, k_parts, v_parts)
        attend(operands.q, k_parts, v_parts, out, lse, *operands[3:])
        return out, lse

    return run_split


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> launch.Launch | tuple[launch.Launch, launch.Launch]:
    """The launch, or both, from tensors that may be without memory (device "meta") when only to be compiled."""
    arithmetic = dot_precision(problem, gpu)
    if not (config.split_ahead and arithmetic in PARTS):
        return _specify(problem, gpu, operands, out, lse, replace(config, split_ahead=False))
    *outer, tokens, heads, _ = operands.k.shape
    rows = (*outer, heads, tokens)
    widths = padded(problem.head_dim), padded(problem.head_dim_v)
    k, v = (torch.empty((PARTS[arithmetic], *rows, width), dtype=torch.bfloat16, device=out.device) for width in widths)
    split = launch.Launch(
        kernel=split_kernel,
        grid=2 * -(-math.prod(rows) // SPLIT_ROWS),
        tensors=(operands.k, operands.v, k, v),
        scalars=[
            *token_strides(problem, operands.k), *token_strides(problem, operands.v), k.stride(0), v.stride(0),
            rows[-1], math.prod(rows), problem.num_heads_kv,
        ],
        constants={
            "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "BLOCK_ROWS": SPLIT_ROWS,
            "BLOCK_D": widths[0], "BLOCK_DV": widths[1], "PRECISION": arithmetic,
            "IS_NVIDIA": gpu.vendor == "nvidia",
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )  # fmt: skip
    # What the kernel takes for K and V: the first parts, which the others follow at a fixed distance.
    first_k, first_v = (parts[0].transpose(-3, -2) for parts in (k, v))
    operands = operands._replace(k=first_k, v=first_v)
    attend = _specify(problem, gpu, operands, out, lse, config, k.stride(0) // 16, v.stride(0) // 16)
    return split, attend._replace(tensors=(operands.q, k, v, *attend.tensors[3:]))


def _specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
    stride_kp: int = 0,
    stride_vp: int = 0,
) -> launch.Launch:
    """The launch of `flash_fwd_kernel`; where K and V were split ahead, with the distance of their parts, in units of
    16 elements."""
    return launch.Launch(
        kernel=flash_fwd_kernel,
        grid=-(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch,
        tensors=(*operands[:3], out, lse, *operands[3:]),
        scalars=_scalars(problem, operands, out, stride_kp, stride_vp),
        constants=_constants(problem, gpu, config, stride_unit(operands, out)),
        # Fused multiply-adds are off in float32, where the maximum times the scale must round as each score times the
        # scale does, so that the largest probability is exactly 1.
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": problem.dtype != "float32",
        },
    )


def _scalars(
    problem: AttentionProblem, operands: Operands, out: torch.Tensor, stride_kp: int, stride_vp: int
) -> list[int | float]:
    """The run-time arguments behind the pointers, in the kernel's order."""
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
        problem.seqlen_q,
        problem.seqlen_k,
        problem.total_q,
        problem.total_k,
        problem.num_heads_q,
        problem.num_heads_q // problem.num_heads_kv,
        *window(problem),
        # No more heads than there are: tiles times heads is a program id, and must not wrap.
        min(problem.batch * problem.num_heads_q, max(1, L2_BYTES // max(1, kv_bytes))),
        problem.softmax_scale,
        problem.softcap,
    ]


def stride_unit(operands: Operands, out: torch.Tensor) -> int:
    """The largest power of two, up to 16, that divides every stride between rows, heads and batches."""
    return math.gcd(16, *(stride for tensor in (*operands[:3], out) for stride in tensor.stride()[:-1]))


def _constants(problem: AttentionProblem, gpu: Gpu, config: Config, unit: int) -> dict[str, int | bool | str]:
    """The compile-time arguments of the kernel, by name."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STRIDE_UNIT": unit,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_DV": padded(problem.head_dim_v),
        **band_constants(problem),
        **feature_constants(problem),
        "IS_VARLEN": problem.packed,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "SPLIT_AHEAD": config.split_ahead,
        "IS_NVIDIA": gpu.vendor == "nvidia",
        "ABLATE": "",
    }


# What it can run and what it costs ------------------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Every reason this kernel cannot run the problem there; empty when it can."""
    reasons = []
    if NO_TRITON is not None:
        reasons.append(NO_TRITON)
    if gpu.vendor == "cpu":
        reasons.append(
            "found tensors on the CPU; it needs an NVIDIA GPU of compute capability 8.0 or newer, or an AMD one"
        )
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        reasons.append(f"found {gpu.name} ({gpu.arch}); it needs sm_80 or newer: Triton has no matrix path before")
    if problem.requires_grad:
        reasons.append("it computes no gradients; call under torch.no_grad() if none are needed")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            reasons.append(f"{name} is {size}; a row of K or V must fit one tile, {MAX_HEAD_DIM} at most")
    reasons += precision.why_not(problem, gpu)
    if not reasons and not _fitting(problem, gpu):
        needed = min(smem_bytes(problem, gpu, config) for config in _space())
        reasons.append(
            f"its smallest tile needs {needed / 1024:.0f} KiB of shared memory and {gpu.name} has "
            f"{gpu.smem_per_block_bytes / 1024:.0f} for a block"
        )
    return reasons


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """An upper bound on the shared memory of one block, which tests hold against what every target compiles to."""
    size, arithmetic = DTYPE_BYTES[problem.dtype], dot_precision(problem, gpu)
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if arithmetic in PARTS:
        return _smem_bytes_of_parts(problem, gpu, config, 2 * PARTS[arithmetic])
    q = size * config.block_m * block_d
    p = size * config.block_m * config.block_n
    kv = size * config.block_n * (block_d + block_dv)
    if problem.mask_shape is not None or problem.bias_shape is not None:
        score_bytes = _bytes_per_score(problem)
        kv += config.block_m * config.block_n * score_bytes  # their tiles are in flight as well
        p += size * config.block_n * block_dv  # V goes through registers to lose what nobody sees, and back
    if gpu.arch == "gfx950":
        # Copies go straight to shared memory (Triton 3.9), which keeps every tile in flight, rows padded.
        return max(q, config.num_stages * kv * 17 // 16) + p
    if gpu.vendor == "amd":
        return max(q, max(1, config.num_stages - 1) * kv) + p
    if arithmetic in ("tf32x3", "tf32"):
        if gpu.capability == 90:
            return 2 * (q + p) + config.num_stages * kv  # an operand and its remainder stand side by side
        return q + config.num_stages * kv + max(q, kv) // 2
    return q + p // 2 + config.num_stages * kv + 1024  # the last for barriers


def _smem_bytes_of_parts(problem: AttentionProblem, gpu: Gpu, config: Config, size: int) -> int:
    """`smem_bytes` where an element becomes parts of `size` bytes together: float32 tiles arrive, and the matrix unit
    takes their parts, which stand beside them; or parts arrive, and nothing stands beside."""
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    q, p = config.block_m * block_d, config.block_m * config.block_n
    k, v = config.block_n * block_d, config.block_n * block_dv
    stages = config.num_stages if gpu.vendor == "nvidia" or gpu.arch == "gfx950" else max(1, config.num_stages - 1)
    arriving = size * (k + v) if config.split_ahead else 4 * (k + v)
    beside = 0 if config.split_ahead else size * max(k, v)
    if problem.mask_shape is not None or problem.bias_shape is not None:
        arriving += p * _bytes_per_score(problem)
        beside = size * (k + v)
    if gpu.vendor == "nvidia":
        scores = 0 if gpu.capability == 90 else max(size, 8) * p  # parts of p and, from Blackwell on, accumulators
        return max(size, 4) * q + stages * arriving + beside + scores + 1024
    # Parts of p change hands as well, and q waits in the place of what has not arrived yet.
    return max(size * q, stages * arriving * 17 // 16 + beside) + size * p


def _bytes_per_score(problem: AttentionProblem) -> int:
    """What a score reads of mask and bias."""
    mask = 0 if problem.mask_shape is None else 1
    return mask + (0 if problem.bias_shape is None else DTYPE_BYTES[problem.bias_dtype or problem.dtype])


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """What one launch moves and computes: whole tiles, padding included; K and V once for each query tile. Split ahead,
    also what the first launch reads, and the parts that it writes."""
    size = DTYPE_BYTES[problem.dtype]
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    visited = visited_tiles(problem, config.block_m, config.block_n)
    scores = visited * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    arithmetic = dot_precision(problem, gpu)
    workspace = split_reads = 0
    key_bytes = size * (problem.head_dim + problem.head_dim_v)
    if config.split_ahead and arithmetic in PARTS:
        keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
        split_reads, key_bytes = keys * key_bytes, 2 * PARTS[arithmetic] * (block_d + block_dv)
        workspace = keys * key_bytes
    key_reads = visited * config.block_n * key_bytes
    return Cost(
        blocks=-(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch,
        flops=2 * scores * (block_d + block_dv),
        exponentials=scores,
        read_bytes=size * rows * problem.head_dim + key_reads + split_reads + scores * _bytes_per_score(problem),
        write_bytes=rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0)) + workspace,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=workspace,
        scratch_bytes=key_reads + workspace if workspace else 0,
        launches=2 if workspace else 1,
        steps=visited,
        longest=-(-problem.seqlen_k // config.block_n),
        threads=config.num_warps * gpu.warp_size,
        registers=_registers(problem, gpu, config),
    )


def _registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """About what a thread holds: output and scores of its rows in float32, probabilities, and some forty besides."""
    threads = max(1, config.num_warps * gpu.warp_size)
    elements = config.block_m * (padded(problem.head_dim_v) + config.block_n * 3 // 2)
    return min(gpu.registers_per_thread or 255, 40 + elements // threads)


# Configs --------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The default first, then every other candidate that fits the GPU's shared memory."""
    fitting = _fitting(problem, gpu)
    if not fitting:
        return []
    default = _default(problem, gpu)
    while default not in fitting:
        default = _smaller(default)
    return [default, *(c for c in fitting if c != default)]


def _smaller(config: Config) -> Config:
    """The next config to try where one does not fit: fewer tiles in flight, then fewer keys, then fewer queries."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    return replace(config, block_m=config.block_m // 2, num_warps=4)


def _fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    ways = (False, True) if dot_precision(problem, gpu) in PARTS else (False,)
    fitting = [c for c in _space(ways) if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]
    if gpu.capability == 90 and _uses_tensor_cores(problem, gpu):
        # Two warpgroups on 64 queries split the keys of a wgmma between them. That is slow (1.9 times the time at
        # head_dim 256, sweep 2), and in tf32, at 64x16, Triton 3.6 computes wrong products and reads out of bounds.
        fitting = [c for c in fitting if not (c.num_warps == 8 and c.block_m == 64)]
    return fitting


def _uses_tensor_cores(problem: AttentionProblem, gpu: Gpu) -> bool:
    return problem.dtype != "float32" or dot_precision(problem, gpu) != "ieee"


def _space(split_ahead: tuple[bool, ...] = (False,)) -> list[Config]:
    return [
        Config(block_m, block_n, num_warps, num_stages, ahead)
        for ahead in split_ahead
        for block_m in (16, 32, 64, 128)
        for block_n in (16, 32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3, 4)
    ]


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """The table's config, made smaller where a tile of mask or bias takes registers and shared memory too."""
    config = _default_without_mask(problem, gpu)
    if problem.mask_shape is None and problem.bias_shape is None:
        return config
    if _is_rdna(gpu):
        return config if problem.dtype == "float32" else Config(32, 16, 4, 1)
    config = replace(config, num_stages=min(2, config.num_stages))
    if gpu.vendor == "nvidia" and gpu.capability != 90:
        return replace(config, block_n=16)  # by registers (tests/compile): 32 keys spill at some head_dim of each
    return replace(config, block_n=max(16, config.block_n // 2))


def _default_of_parts(gpu: Gpu, arithmetic: str, bucket: int) -> Config:
    """Not timed yet: what compiles with fewest spills, two blocks an SM where that leaves tiles of a size."""
    if gpu.vendor == "amd":
        return (Config(64, 32, 4, 1), Config(64, 16, 4, 1), Config(32, 16, 4, 1))[bucket]
    if gpu.capability == 90:
        return (Config(128, 32, 8, 2, True), Config(128, 32, 8, 2, True), Config(64, 16, 4, 1, True))[bucket]
    return (Config(64, 32, 4, 2, True), Config(32, 32, 4, 2, True), Config(32, 16, 4, 1, True))[bucket]


def _leaves_sms_idle(problem: AttentionProblem, gpu: Gpu, block_m: int) -> bool:
    """Whether tiles of so many queries are at most half as many as there are SMs."""
    return 2 * -(-problem.seqlen_q // block_m) * problem.num_heads_q * problem.batch <= gpu.num_sms


def _is_rdna(gpu: Gpu) -> bool:
    return gpu.vendor == "amd" and not gpu.arch.startswith("gfx9")


def _width(problem: AttentionProblem) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def _default_without_mask(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Where a factor stands, the fastest of a sweep on an H200 (benchmarks/records, sweeps 1 and 2); elsewhere the
    widest tile that compiles without spills, or with fewest (tests/compile)."""
    bucket = 0 if _width(problem) <= 64 else 1 if _width(problem) <= 128 else 2
    if problem.dtype == "float32":
        arithmetic = dot_precision(problem, gpu)
        if _is_rdna(gpu):
            return Config(32, 16, 8, 1)
        if gpu.vendor == "amd" and arithmetic not in PARTS:
            return (Config(64, 32, 4, 2), Config(64, 16, 4, 2), Config(32, 16, 4, 1))[bucket]
        if arithmetic == "ieee":
            # At head_dim 64, 4 x 16 heads x 2048, 64x32 on four warps takes 1.2 times as long; at 128, 128x32 spills
            # and takes 1.9 times as long.
            return (Config(128, 64, 8, 2), Config(64, 32, 8, 2), Config(32, 32, 8, 1))[bucket]
        if gpu.capability == 90 and bucket == 0 and _leaves_sms_idle(problem, gpu, 128):
            # Not timed yet. On an H200, 1 head x 512 takes 44 us with tiles of 128 queries: 4 blocks on 132 SMs.
            return Config(32, 32, 4, 2)
        if arithmetic in PARTS:
            return _default_of_parts(gpu, arithmetic, bucket)
        if gpu.capability != 90 or bucket == 2:
            return (Config(32, 32, 4, 2), Config(32, 16, 4, 2), Config(32, 16, 8, 1))[bucket]
        if arithmetic == "tf32":
            # 128x64 takes 1.2 times as long at head_dim 64, 64x32 1.3 times at 128.
            return (Config(128, 32, 8, 3), Config(128, 32, 8, 2))[bucket]
        # 64x64 takes 1.15 times as long at head_dim 64, 64x32 1.6 times at 128.
        return (Config(128, 64, 8, 2), Config(128, 32, 8, 2))[bucket]
    if _is_rdna(gpu):
        return (Config(64, 32, 4, 1), Config(64, 32, 8, 1), Config(32, 16, 8, 1))[bucket]
    if gpu.vendor == "amd":
        return (Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 32, 8, 2))[bucket]
    if gpu.capability not in WGMMA_OR_TCGEN05:
        return (Config(64, 64, 4, 3), Config(64, 32, 4, 2), Config(64, 32, 8, 2))[bucket]
    # Four warps on 64 queries leave room for two blocks an SM, and one block's softmax hides behind the other's
    # products: causal at head_dim 128, 128x64 on eight warps takes 1.13 times as long at 16 x 1024, 1.05 times at
    # 4 x 4096. At 256 the accumulator leaves no room for two, and 64x32 takes 1.16 times as long as 128x64.
    return (Config(64, 64, 4, 3), Config(64, 64, 4, 3), Config(128, 64, 8, 2))[bucket]
