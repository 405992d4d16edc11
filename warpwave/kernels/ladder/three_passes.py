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
    feature_constants,
    lengths,
    lse_strides,
    score_rules,
    straightener,
    token_strides,
)
from warpwave.kernels.cost import ODD_ROWS, Cost, bytes_per_score, in_turn, odd_rows, visited_tiles, walk
from warpwave.kernels.groups import OfHeads, ScoreRules, Sequences, Window
from warpwave.kernels.partials import final_state, lse_of
from warpwave.kernels.primitives import band_edges, packed_sequence, visible_keys
from warpwave.kernels.scores import rules_of_rows, score_bits
from warpwave.operands import Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

HIDDEN = tl.constexpr(-1.0)  # marks a hidden pair in P, whose value must have no effect even if it is NaN
SOFTMAX_ROWS, SOFTMAX_KEYS = 16, 128  # a tile of the softmax: 8 scores a thread, and rows of 512 bytes
LINE = tl.constexpr(16)  # scores of a line of 64 bytes; rows are whole lines, so that a thread moves 16 bytes
UNSPECIALIZED = ["num_heads_q", "group_size"]
SOFTMAX_SMEM_BYTES = 1024  # to find maxima and sums over warps
MAX_SCORES_BYTES = 16 * 1024**3  # 16 heads of 16,384 x 16,384; more memory is better spent otherwise


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def whole_lines(key_begin, key_end):
    """Returns a range of keys rounded outward to whole lines of scores."""
    return key_begin // LINE * LINE, tl.cdiv(tl.maximum(key_end, 0), LINE) * LINE


@jit
def place_of_tile(num_tiles_m, num_tiles_n, num_heads_q):
    """Returns row and column of a product's tile, and its head, batch item, and head counted over the batch, 64-bit."""
    tile_n = tl.program_id(0) % num_tiles_n
    tile_m = tl.program_id(0) // num_tiles_n % num_tiles_m
    batch_head = (tl.program_id(0) // num_tiles_n // num_tiles_m).to(tl.int64)
    return tile_m, tile_n, batch_head % num_heads_q, batch_head // num_heads_q, batch_head


@jit(do_not_specialize=UNSPECIALIZED)
def softmax_rows_kernel(
    scores_ptr,
    row_scale_ptr,
    lse_tensor: OfHeads,
    rules: ScoreRules,
    sinks_ptr,
    sequences: Sequences,
    window: Window,
    stride_sm,
    num_heads_q,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    RANGE_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Converts raw scores of ROWS queries of one head to unnormalized probabilities, in place, and writes the factor of
    each row of P V to `row_scale`.

    It covers the lines of the keys that some query of its RANGE_ROWS sees, which the products' query tiles cover. Raw
    scores that no product wrote are hidden by position, whatever the memory holds.
    """
    seqlen_q, seqlen_k, lse_ptr = sequences.seqlen_q, sequences.seqlen_k, lse_tensor.ptr
    num_tiles = tl.cdiv(seqlen_q, ROWS)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    head = (batch_head % num_heads_q).to(tl.int64)
    batch = (batch_head // num_heads_q).to(tl.int64)
    row_scale_ptr += batch_head.to(tl.int64) * seqlen_q
    scores_ptr += batch_head.to(tl.int64) * seqlen_q * stride_sm
    if sequences.IS_VARLEN:
        q_begin, seqlen_q = packed_sequence(sequences.cu_seqlens_q_ptr, batch, seqlen_q, sequences.total_q)
        _, seqlen_k = packed_sequence(sequences.cu_seqlens_k_ptr, batch, seqlen_k, sequences.total_k)
        if tile * ROWS >= seqlen_q:
            return
        if WRITE_LSE:
            lse_ptr += q_begin
    rows = tile * ROWS + tl.arange(0, ROWS)
    range_begin = tile * ROWS // RANGE_ROWS * RANGE_ROWS
    row_inside = rows < seqlen_q
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    range_last = tl.minimum(range_begin + RANGE_ROWS, seqlen_q) - 1
    key_begin, key_end = visible_keys(range_begin, range_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    line_begin, line_end = whole_lines(key_begin, key_end)
    mask_rows, bias_rows, slopes_log2 = rules_of_rows(rules, batch, head, rows)

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    # Two sweeps: the first finds the maximum, the second computes and sums probabilities. Both recompute a score from
    # the raw one, which is cheaper than storing it in between.
    for sweep in tl.static_range(2):
        m_shift = tl.where(m_i == float("-inf"), 0.0, m_i)  # for a row that sees no key
        for key_tile in range(line_begin, line_end, KEYS):
            keys = key_tile + tl.arange(0, KEYS)
            in_lines = row_inside[:, None] & (keys < line_end)[None, :]
            pointers = scores_ptr + (rows.to(tl.int64)[:, None] * stride_sm + keys[None, :])
            raw = tl.load(pointers, mask=in_lines, other=0.0)  # [ROWS, KEYS]
            scores = score_bits(
                raw, rows, keys, row_inside, key_end, seqlen_k - seqlen_q, low, high, mask_rows, bias_rows,
                slopes_log2, rules, window,
            )  # fmt: skip
            if sweep == 0:
                m_i = tl.maximum(m_i, tl.max(scores, 1))
            else:
                p = tl.math.exp2(scores - m_shift[:, None])
                l_i += tl.sum(p, 1)
                tl.store(pointers, tl.where(scores == float("-inf"), HIDDEN, p), mask=in_lines)

    # P stays relative to the maximum over keys: a sink far above the scores would push it out of the range of 16 bits.
    m_i, l_i, row_scale = final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)
    tl.store(row_scale_ptr + rows, row_scale, mask=row_inside)
    if WRITE_LSE:
        lse_rows = lse_ptr + (batch * lse_tensor.stride_b + head * lse_tensor.stride_h + rows)
        tl.store(lse_rows, lse_of(m_i, l_i), mask=row_inside)


# Host -----------------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """One of a kernel's two products.

    Args:
        kernel: takes its tensors, Sequences, Window, stride_sm, num_heads_q, group_size, and constants.
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
    of_sequences = lengths(problem)
    group_size = problem.num_heads_q // problem.num_heads_kv
    stride_sm = score_row(problem)

    def product(which: Product, tensors: tuple[Any, ...], strides: tuple[int, ...]) -> launch.Launch:
        return launch.Launch(
            kernel=which.kernel,
            grid=which.programs * heads,
            tensors=(*tensors, *cu_seqlens),
            scalars=(*strides, *of_sequences, stride_sm, problem.num_heads_q, group_size),
            constants={**which.constants, **band, **varlen},
            options=which.options,
        )

    softmax = launch.Launch(
        kernel=softmax_rows_kernel,
        grid=-(-problem.seqlen_q // SOFTMAX_ROWS) * heads,
        tensors=(scores, row_scale, lse, mask, bias, slopes, sinks, *cu_seqlens),
        scalars=(
            *lse_strides(problem),
            *score_rules(problem, mask, bias, slopes),
            *of_sequences,
            stride_sm,
            problem.num_heads_q,
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
    q_strides, k_strides, v_strides = (token_strides(t) for t in (q, k, v))
    return (
        product(score, (q, k, scores), (*q_strides, *k_strides)),
        softmax,
        product(sum_values, (scores, row_scale, v, out), (*v_strides, *token_strides(out)[:-1], 1)),
    )


# What such a kernel can run and what it costs -------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason against keeping scores in memory."""
    found = reasons.of_triton(gpu)
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
        bytes_of_pair: bytes that multiply-adds read from shared memory or L1 for a query, a key and a column, for each
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
    beside = bytes_per_score(problem)
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
    workspace = scores_bytes(problem) + 4 * heads * problem.seqlen_q
    loop = "one query" if problem.seqlen_q == 1 else ODD_ROWS if odd_rows(problem) else ""
    return in_turn((score, softmax, sum_values), workspace, loop)
