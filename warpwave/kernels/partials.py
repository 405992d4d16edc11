"""Partial results of attention over parts of the keys, and how they become one. No kernel by itself.

A part that saw some of a row's keys leaves what the online softmax keeps: the accumulator, un-normalised, and its
maximum and sum. Parts merge as tiles do,

    m = max(m_s);   acc = sum(exp2(m_s - m) * acc_s);   l = sum(exp2(m_s - m) * l_s);   out = acc / l

always in the order of the parts, whichever block finished first: results are repeatable, and no value is ever added
by an atomic. Maxima are kept apart from sums because a log-sum-exp, rounded to float32, would carry an error of the
size of the largest logit into every weight (Dao et al., "Flash-Decoding for long-context inference" (2023), merges by
the log-sum-exp instead).

Bound: memory. Each part of a row is `4 * (head_dim_v + 2)` bytes written and read once.
"""

from __future__ import annotations

import torch

from warpwave.kernels.arguments import padded
from warpwave.kernels.primitives import LN_2, LOG2_E, rounded
from warpwave.kernels.triton_or_stub import jit, tl
from warpwave.launch import Launch
from warpwave.problem import AttentionProblem

PARTS_AT_ONCE = 8  # that a merging block loads together: their latencies overlap
UNSPECIALISED = ["rows_heads", "num_heads_q", "num_parts", "lse_rows"]


@jit
def join(m_i, l_i, m_other, l_other):
    """The state of two parts as one: their new maximum and sum, and what scales the accumulator of either."""
    m_new = tl.maximum(m_i, m_other)
    m_shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # parts that saw no key
    scale = tl.math.exp2(m_i - m_shift)
    scale_other = tl.math.exp2(m_other - m_shift)
    return m_new, l_i * scale + l_other * scale_other, scale, scale_other


@jit
def lse_of(m_i, l_i):
    """Natural log-sum-exp of a row's state in base two; minus infinity where it saw no key."""
    return tl.where(l_i == 0.0, float("-inf"), (m_i + tl.math.log2(l_i)) * LN_2)


@jit
def inverse_sum(l_i):
    """What a row's accumulator is multiplied by in the end: a row that saw no key has sum 0, and its output is 0."""
    return tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))


@jit
def lse_offset(row, head, num_heads_q, lse_rows):
    """Where lse, (batch, num_heads_q, seqlen_q) or packed (num_heads_q, total_q), holds a row counted over all."""
    return (row // lse_rows * num_heads_q + head) * lse_rows + row % lse_rows


@jit(do_not_specialize=UNSPECIALISED)
def merge_partials_kernel(
    acc_ptr,
    state_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    rows_heads,
    num_heads_q,
    num_parts,
    lse_rows,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """All parts of one row of one head, PARTS at a time.

    Bound: latency; the parts were written a moment ago and lie in L2.
    """
    row_head = tl.program_id(0).to(tl.int64)
    rows_heads = tl.cast(rows_heads, tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for first in range(0, num_parts, PARTS):
        parts = first + tl.arange(0, PARTS)
        there = parts < num_parts
        offsets = parts.to(tl.int64) * rows_heads + row_head
        m = tl.load(state_ptr + 2 * parts.to(tl.int64) * rows_heads + row_head, mask=there, other=float("-inf"))
        l = tl.load(state_ptr + (2 * parts.to(tl.int64) + 1) * rows_heads + row_head, mask=there, other=0.0)
        m_here = tl.max(m, 0, keep_dims=True)
        m_shift = tl.where(m_here == float("-inf"), 0.0, m_here)
        weight = tl.math.exp2(m - m_shift)  # [PARTS], 0 for a part that saw no key
        # The accumulator of a part that saw no key was never written.
        loaded = (there & (l != 0.0))[:, None] & (dims < HEAD_DIM_V)[None, :]
        some = tl.load(acc_ptr + offsets[:, None] * HEAD_DIM_V + dims[None, :], mask=loaded, other=0.0)
        m_i, l_i, scale, scale_here = join(m_i, l_i, m_here, tl.sum(weight * l, 0, keep_dims=True))
        acc = acc * scale[:, None] + tl.sum(weight[:, None] * some, 0, keep_dims=True) * scale_here[:, None]

    head = row_head % num_heads_q
    if HAS_SINKS:
        # One more key, whose value is zero.
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
        m_i, l_i, scale, _ = join(m_i, l_i, sink_log2, 1.0)
        acc = acc * scale[:, None]
    out = acc * inverse_sum(l_i)[:, None]
    offsets = row_head * HEAD_DIM_V + dims[None, :]
    tl.store(out_ptr + offsets, rounded(out, out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM_V)[None, :])
    if WRITE_LSE:
        offset = lse_offset(row_head // num_heads_q, head, num_heads_q, lse_rows)
        tl.store(lse_ptr + offset + tl.arange(0, 1), lse_of(m_i, l_i))


def allocate(
    problem: AttentionProblem, num_parts: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(acc, state): float32 (num_parts, rows, num_heads_q, head_dim_v) and, maxima then sums, (num_parts, 2, rows,
    num_heads_q). From torch's allocator at every call, so that they belong to the stream, and under capture to the
    graph, that uses them."""
    shape = (problem.rows, problem.num_heads_q)
    return (
        torch.empty((num_parts, *shape, problem.head_dim_v), dtype=torch.float32, device=device),
        torch.empty((num_parts, 2, *shape), dtype=torch.float32, device=device),
    )


def workspace_bytes(problem: AttentionProblem, num_parts: int) -> int:
    """Of `allocate`."""
    return 4 * num_parts * problem.rows * problem.num_heads_q * (problem.head_dim_v + 2)


def lse_rows(problem: AttentionProblem) -> int:
    """Rows of lse that lie behind one another: those of a sequence, or all of them where they are packed."""
    return max(1, problem.total_q if problem.packed else problem.seqlen_q)


def specify_merge(
    problem: AttentionProblem,
    num_parts: int,
    acc: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Launch:
    """The launch that merges `num_parts` parts of every row."""
    return Launch(
        kernel=merge_partials_kernel,
        grid=problem.rows * problem.num_heads_q,
        tensors=(acc, state, out, lse, sinks),
        scalars=[problem.rows * problem.num_heads_q, problem.num_heads_q, num_parts, lse_rows(problem)],
        constants={
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_DV": padded(problem.head_dim_v),
            "PARTS": PARTS_AT_ONCE,
            "HAS_SINKS": problem.has_sinks,
            "WRITE_LSE": problem.return_lse,
        },
        options={"num_warps": 2, "num_stages": 1, "enable_fp_fusion": problem.dtype != "float32"},
    )
