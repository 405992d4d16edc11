"""Code shared by the kernels that compute attention in three passes over scores in memory. Holds no complete kernel.

    S = Q K^T            a product, the kernel's own: raw scores, float32
    P = exp(S' - max)    here, in place: S' is S scaled, capped, biased and masked; and the row sums
    out = P V / sum      a product, the kernel's own

All score transforms happen in the second pass, so the two products stay plain. P is left unnormalized. Rounded to 16
bits for the second product, it then has the rounding error of any flash kernel; a normalized P would lose more. Scores
stay float32: in 16 bits their own rounding would exceed all others together.

Bound: memory. A score of 4 bytes is written, read, read and written again as a probability, and read: 20 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import reasons
from warpwave.kernels.arguments import (
    Results,
    Run,
    allocator,
    band_constants,
    broadcast_strides,
    feature_constants,
    lse_strides,
    slope_strides,
    straightener,
    token_strides,
    window,
)
from warpwave.kernels.cost import ODD_ROWS, Cost, odd_rows, visited_tiles, walk
from warpwave.kernels.primitives import (
    LN_2,
    LOG2_E,
    add_bias,
    band_edges,
    band_visible,
    packed_sequence,
    tanh,
    visible_keys,
)
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Operands
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

HIDDEN = tl.constexpr(-1.0)  # marks a hidden pair in P, whose value must have no effect even if it is NaN
SOFTMAX_ROWS, SOFTMAX_KEYS = 16, 128  # a tile of the softmax: 8 scores a thread, and rows of 512 bytes
LINE = tl.constexpr(16)  # scores of a line of 64 bytes; rows are whole lines, so that a thread moves 16 bytes
UNSPECIALIZED = [
    *("stride_lb", "stride_lh", "stride_mask_b", "stride_mask_h", "stride_bias_b", "stride_bias_h", "stride_alibi_b"),
    *("stride_alibi_h", "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads_q", "group_size", "window_left"),
    "window_right",
]
SOFTMAX_SMEM_BYTES = 1024  # to find maxima and sums over warps
MAX_SCORES_BYTES = 16 * 1024**3  # 16 heads of 16,384 x 16,384; more memory is better spent otherwise


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def whole_lines(key_begin, key_end):
    """Returns a range of keys rounded outward to whole lines of scores."""
    return key_begin // LINE * LINE, tl.cdiv(tl.maximum(key_end, 0), LINE) * LINE


@jit(do_not_specialize=UNSPECIALIZED)
def softmax_rows_kernel(
    scores_ptr,
    row_scale_ptr,
    lse_ptr,
    mask_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    stride_sm,
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
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_heads_q,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RANGE_ROWS: tl.constexpr,
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
):
    """Converts raw scores of ROWS queries of one head to unnormalized probabilities, in place, and writes the factor of
    each row of P V to `row_scale`.

    It covers the lines of the keys that some query of its RANGE_ROWS sees, which the products' query tiles cover. Raw
    scores that no product wrote are hidden by position, whatever the memory holds.
    """
    num_tiles = tl.cdiv(seqlen_q, ROWS)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    head = (batch_head % num_heads_q).to(tl.int64)
    batch = (batch_head // num_heads_q).to(tl.int64)
    row_scale_ptr += batch_head.to(tl.int64) * seqlen_q
    scores_ptr += batch_head.to(tl.int64) * seqlen_q * stride_sm
    if IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(cu_seqlens_q_ptr, batch, seqlen_q, total_q)
        _, seqlen_k = packed_sequence(cu_seqlens_k_ptr, batch, seqlen_k, total_k)
        if tile * ROWS >= seqlen_q:
            return
        if WRITE_LSE:
            lse_ptr += q_begin
    rows = tile * ROWS + tl.arange(0, ROWS)
    range_begin = tile * ROWS // RANGE_ROWS * RANGE_ROWS
    low, high = band_edges(seqlen_q, seqlen_k, window_left, window_right, TOP_LEFT)
    range_last = tl.minimum(range_begin + RANGE_ROWS, seqlen_q) - 1
    key_begin, key_end = visible_keys(range_begin, range_last, seqlen_k, low, high, HAS_LOW, HAS_HIGH)
    line_begin, line_end = whole_lines(key_begin, key_end)
    if HAS_MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    if HAS_BIAS:
        bias_ptr += batch * stride_bias_b + head * stride_bias_h
    if HAS_ALIBI:
        slope_log2 = tl.load(alibi_slopes_ptr + batch * stride_alibi_b + head * stride_alibi_h) * LOG2_E

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    # Two sweeps: the first finds the maximum, the second computes and sums probabilities. Both recompute a score from
    # the raw one, which is cheaper than storing it in between.
    for sweep in tl.static_range(2):
        m_shift = tl.where(m_i == float("-inf"), 0.0, m_i)  # for a row that sees no key
        for key_tile in range(line_begin, line_end, KEYS):
            keys = key_tile + tl.arange(0, KEYS)
            inside = (rows < seqlen_q)[:, None] & (keys < key_end)[None, :]
            in_lines = (rows < seqlen_q)[:, None] & (keys < line_end)[None, :]
            pointers = scores_ptr + (rows.to(tl.int64)[:, None] * stride_sm + keys[None, :])
            scores = tl.load(pointers, mask=in_lines, other=0.0)  # [ROWS, KEYS]
            if HAS_SOFTCAP:
                scores = softcap * tanh(scores * (softmax_scale / softcap)) * LOG2_E
            else:
                scores = scores * (softmax_scale * LOG2_E)
            if HAS_BIAS:
                offsets = rows.to(tl.int64)[:, None] * stride_bias_m + keys.to(tl.int64)[None, :] * stride_bias_n
                bias = tl.load(bias_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [ROWS, KEYS]
                scores = add_bias(scores, bias)
            if HAS_ALIBI:
                distance = tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :])
                scores -= slope_log2 * distance.to(tl.float32)
            visible = inside & band_visible(rows, keys, low, high, HAS_LOW, HAS_HIGH)
            if HAS_MASK:
                offsets = rows.to(tl.int64)[:, None] * stride_mask_m + keys.to(tl.int64)[None, :] * stride_mask_n
                visible = visible & (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0)  # [ROWS, KEYS]
            scores = tl.where(visible, scores, float("-inf"))
            if sweep == 0:
                m_i = tl.maximum(m_i, tl.max(scores, 1))
            else:
                p = tl.math.exp2(scores - m_shift[:, None])
                l_i += tl.sum(p, 1)
                tl.store(pointers, tl.where(scores == float("-inf"), HIDDEN, p), mask=in_lines)

    alpha = tl.full([ROWS], 1.0, tl.float32)
    if HAS_SINKS:
        # The sink is one more key, whose value is zero. P stays relative to the maximum over keys: relative to a
        # dominant sink, low probabilities would leave the range of 16 bits.
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
        m_new = tl.maximum(m_i, sink_log2)
        m_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.math.exp2(m_i - m_shift)
        l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)
        m_i = m_new
    # A row that saw no key has sum 0: its output is 0 and its log-sum-exp minus infinity.
    tl.store(row_scale_ptr + rows, tl.math.div_rn(alpha, tl.where(l_i == 0.0, 1.0, l_i)), mask=rows < seqlen_q)
    if WRITE_LSE:
        lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.math.log2(l_i)) * LN_2)
        tl.store(lse_ptr + batch * stride_lb + head * stride_lh + rows, lse, mask=rows < seqlen_q)


# Host -----------------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """One of a kernel's two products.

    Args:
        kernel: its signature is (tensors, strides of its two operands or of v and out, stride_sm, sizes, constants).
        programs: programs per head.
        constants: its own, in addition to those of the band.
        options: launch options.
    """

    kernel: Any
    programs: int
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


Launches = tuple[launch.Launch, launch.Launch, launch.Launch]
Specify = Callable[[AttentionProblem, Gpu, Operands, torch.Tensor, torch.Tensor | None, Any], Launches]


def score_row(problem: AttentionProblem) -> int:
    """Returns the elements from one row of scores to the next, in whole lines."""
    line = 16  # LINE
    return -(-problem.seqlen_k // line) * line


def scores_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of the scores: one row per query, head and sequence; packed sequences count as the longest."""
    return 4 * problem.batch * problem.num_heads_q * problem.seqlen_q * score_row(problem)


def _workspace(problem: AttentionProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates scores (batch, num_heads_q, seqlen_q, score_row) and row_scale (batch, num_heads_q, seqlen_q),
    float32."""
    rows = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    scores = torch.empty((*rows, score_row(problem)), dtype=torch.float32, device=device)
    return scores, torch.empty(rows, dtype=torch.float32, device=device)


def bind(specify: Specify, problem: AttentionProblem, operands: Operands, config: Any, out: torch.Tensor | None) -> Run:
    """Compiles the three launches for one problem and layout; returns `run(operands, out=None) -> (out, lse)`."""
    allocate, straight, device = allocator(problem, operands.q), straightener(operands), operands.q.device
    launches = specify(problem, current_gpu(device), straight(operands), *allocate(out), config)
    score, softmax, sum_values = map(launch.bind, launches)
    del launches  # frees the workspace it was specified for

    def run(operands: Operands, out: torch.Tensor | None = None) -> Results:
        q, k, v, mask, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k = straight(operands)
        out, lse = allocate(out)
        scores, row_scale = _workspace(problem, device)
        score(q, k, scores, cu_seqlens_q, cu_seqlens_k)
        softmax(scores, row_scale, lse, mask, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k)
        sum_values(scores, row_scale, v, out, cu_seqlens_q, cu_seqlens_k)
        return out, lse

    return run


def specify(
    problem: AttentionProblem,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    block_m: int,
    score: Product,
    sum_values: Product,
) -> Launches:
    """Returns the launches from tensors, which may be without memory (device "meta") if they are only compiled.

    Args:
        block_m: queries of a tile of the two products.
        score, sum_values: Q K^T and P V.
    """
    q, k, v, mask, bias, slopes, sinks, *cu_seqlens = operands
    scores, row_scale = _workspace(problem, out.device)
    heads = problem.batch * problem.num_heads_q
    band, varlen = band_constants(problem), {"IS_VARLEN": problem.packed}
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k, problem.num_heads_q)
    group_size = problem.num_heads_q // problem.num_heads_kv
    stride_sm = score_row(problem)

    def product(which: Product, tensors: tuple[Any, ...], strides: tuple[int, ...]) -> launch.Launch:
        return launch.Launch(
            kernel=which.kernel,
            grid=which.programs * heads,
            tensors=(*tensors, *cu_seqlens),
            scalars=(*strides, stride_sm, *lengths, group_size, *window(problem)),
            constants={**which.constants, **band, **varlen},
            options=which.options,
        )

    softmax = launch.Launch(
        kernel=softmax_rows_kernel,
        grid=-(-problem.seqlen_q // SOFTMAX_ROWS) * heads,
        tensors=(scores, row_scale, lse, mask, bias, slopes, sinks, *cu_seqlens),
        scalars=(
            stride_sm,
            *lse_strides(problem),
            *broadcast_strides(mask),
            *broadcast_strides(bias),
            *slope_strides(slopes),
            *lengths,
            *window(problem),
            problem.softmax_scale,
            problem.softcap,
        ),
        constants={
            "ROWS": SOFTMAX_ROWS,
            "KEYS": SOFTMAX_KEYS,
            "RANGE_ROWS": max(SOFTMAX_ROWS, block_m),
            **band,
            **feature_constants(problem),
            **varlen,
            "WRITE_LSE": problem.return_lse,
        },
        # No fused multiply-adds: a score must be the same number as the maximum and as the minuend, so that the largest
        # probability is exactly 1.
        options={"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False},
    )
    q_strides, k_strides, v_strides = (token_strides(problem, t) for t in (q, k, v))
    return (
        product(score, (q, k, scores), (*q_strides, *k_strides)),
        softmax,
        product(sum_values, (scores, row_scale, v, out), (*v_strides, *token_strides(problem, out)[:-1])),
    )


# What such a kernel can run and what it costs -------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason against keeping scores in memory."""
    found = reasons.of_triton()
    if gpu.vendor == "cpu":
        found.append("found tensors on the CPU; it needs an NVIDIA or AMD GPU")
    found += reasons.of_gradients(problem) + reasons.of_dropout(problem)
    needed, limit = scores_bytes(problem), min(MAX_SCORES_BYTES, gpu.memory_bytes or MAX_SCORES_BYTES)
    if needed > limit:
        found.append(
            f"its scores would take {needed / 1024**3:.1f} GiB of memory; the limit is {limit / 1024**3:.1f} "
            f"on {gpu.name}: use flash_fwd, which keeps none, or fewer heads or sequences a call"
        )
    return found


def cost(
    problem: AttentionProblem, *, block_m: int, block_n: int, columns: int, step: int, width: int, smem_bytes: int,
    threads: int, registers: tuple[int, int] = (0, 0), bytes_of_pair: tuple[float, float] = (0.0, 0.0),
    split: Callable[[int], int] = lambda elements: 0,
) -> Cost:  # fmt: skip
    """Returns what the three passes move and compute: whole tiles, padding included.

    Args:
        block_m, block_n: queries and keys of a tile of scores.
        columns: of v, of a tile of the output.
        step: keys per step of the second product.
        width: head_dim as the first product pads it.
        smem_bytes: of the product that needs more.
        threads: of a block of the products.
        registers: of a thread of each product, in addition to its elements of a tile.
        bytes_of_pair: bytes that multiply-adds read from shared memory or L1 for a query, a key and a column, by
        product.
        split: the number of conversions to parts for a number of elements of operands.
    """
    size, heads = DTYPE_BYTES[problem.dtype], problem.batch * problem.num_heads_q
    column_tiles = -(-problem.head_dim_v // columns)
    row_tiles = -(-problem.seqlen_q // block_m)
    score_tiles = visited_tiles(problem, block_m, block_n)
    scored = score_tiles * block_m * block_n
    sums = walk(problem, block_m, step)
    summed = sums.tiles * step  # keys, over all query tiles
    softmax_rows = max(SOFTMAX_ROWS, block_m)
    covered = visited_tiles(problem, softmax_rows, 1) * softmax_rows  # tiles of one key: the exact visible width
    beside = 0 if problem.mask_shape is None else 1
    beside += 0 if problem.bias_shape is None else DTYPE_BYTES[problem.bias_dtype or problem.dtype]
    rows = problem.rows * problem.num_heads_q

    def inside(tile: int) -> float:
        """Returns the fraction of the rows of all tiles that a sequence has. Past its end tiles compute, but nothing
        new is read or written."""
        there = sum(q for q, _ in problem.items())
        return there / max(1, sum(-(-q // tile) * tile for q, _ in problem.items()))

    written, covered = int(scored * inside(block_m)), int(covered * inside(softmax_rows))
    p_read = int(summed * column_tiles * block_m * 4 * inside(block_m))
    score = Cost(
        blocks=heads * row_tiles * -(-problem.seqlen_k // block_n),
        flops=2 * scored * width,
        exponentials=0,
        read_bytes=score_tiles * (block_m + block_n) * problem.head_dim * size,  # q and k
        write_bytes=4 * written,
        smem_bytes=smem_bytes,
        items=score_tiles,
        scratch_bytes=4 * written,
        threads=threads,
        registers=registers[0] and registers[0] + block_m * block_n // threads,
        operand_bytes=int(scored * width * bytes_of_pair[0]),
        conversions=split(score_tiles * (block_m + block_n) * width),
    )
    softmax = Cost(
        blocks=heads * -(-problem.seqlen_q // SOFTMAX_ROWS),
        flops=0,
        exponentials=covered,
        read_bytes=2 * covered * (4 + beside),  # both sweeps
        write_bytes=4 * covered + rows * (4 + (4 if problem.return_lse else 0)),
        smem_bytes=SOFTMAX_SMEM_BYTES,
        scratch_bytes=12 * covered,
        # One block per head processes its keys one tile after another; several blocks would hide each other's waits.
        trips=-(-problem.seqlen_k // SOFTMAX_KEYS) if problem.seqlen_q <= SOFTMAX_ROWS else 0,
    )
    sum_values = Cost(
        blocks=heads * row_tiles * column_tiles,
        flops=2 * summed * block_m * column_tiles * columns,
        exponentials=0,
        # P for each tile of columns, and v
        read_bytes=p_read + summed * problem.head_dim_v * size,
        write_bytes=rows * problem.head_dim_v * size,
        smem_bytes=smem_bytes,
        steps=sums.tiles * column_tiles,
        longest=sums.longest,
        cut=sums.cut * column_tiles,
        items=sums.items * column_tiles,
        scratch_bytes=p_read,
        threads=threads,
        registers=registers[1] and registers[1] + block_m * columns // threads,
        operand_bytes=int(summed * block_m * column_tiles * columns * bytes_of_pair[1]),
        conversions=split(summed * column_tiles * (block_m + columns)),
    )
    parts = (score, softmax, sum_values)
    return Cost(
        blocks=sum(part.blocks for part in parts),
        flops=sum(part.flops for part in parts),
        exponentials=covered,
        read_bytes=sum(part.read_bytes for part in parts),
        write_bytes=sum(part.write_bytes for part in parts),
        smem_bytes=smem_bytes,
        workspace_bytes=scores_bytes(problem) + 4 * heads * problem.seqlen_q,
        scratch_bytes=sum(part.scratch_bytes for part in parts),
        loop="one query" if problem.seqlen_q == 1 else ODD_ROWS if odd_rows(problem) else "",
        launches=3,
        parts=parts,
    )
