"""Partial results of attention over parts of the keys, and their merge. Holds no complete kernel.

A part that saw some of a row's keys stores the state of the online softmax: the unnormalized accumulator, its maximum
and its sum. Parts merge as tiles do,

    m = max(m_s);   acc = sum(exp2(m_s - m) * acc_s);   l = sum(exp2(m_s - m) * l_s);   out = acc / l

always in the order of the parts, whichever block finished first. Results are repeatable, and no value is ever added by
an atomic. Maxima are stored separately from sums: a log-sum-exp, rounded to float32, would carry an error proportional
to the largest logit into every weight (Dao et al., "Flash-Decoding for long-context inference" (2023), merges by the
log-sum-exp instead).

Bound: memory. Each part of a row is `4 * (head_dim_v + 2)` bytes written and read once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpwave.kernels.arguments import padded
from warpwave.kernels.primitives import LN_2, LOG2_E, rounded
from warpwave.problem import AttentionProblem
from warpwave.runtime import scratch
from warpwave.runtime.launch import Launch
from warpwave.runtime.triton_or_stub import jit, tl

LOADED_AT_ONCE = 4096  # most elements that a merging block loads together, so that their latencies overlap
LEAST_COLUMNS = 64  # of a merging block: 256 bytes, adjacent in memory
UNSPECIALIZED = ["rows_heads", "num_heads_q", "num_parts", "lse_rows"]


@jit
def await_launch_before():
    """Waits for the preceding launch in a launch that may start early ("programmatic dependent launch", CUDA
    programming guide): waits until that launch has ended and its writes can be read, then lets the next launch start.
    Starting the next launch before the wait made a series of launches of 64 blocks 1.6 times as slow."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@jit
def await_launch_before_knowing(value, others):
    """Runs `await_launch_before` after the arithmetic that computes a program's position, which needs no wait.
    Otherwise the compiler would move that arithmetic after the wait. Returns `value`; neither number is negative."""
    value = tl.inline_asm_elementwise(
        "{ .reg .pred known; setp.ge.s32 known, $2, 0; @known griddepcontrol.wait; mov.u32 $0, $1; }",
        "=r,r,r", [value, value | others], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.extra.cuda.gdc_launch_dependents()
    return value


@jit
def join(m_i, l_i, m_other, l_other):
    """Returns the combined state of two parts: their maximum and sum, and the scale of each accumulator."""
    m_new = tl.maximum(m_i, m_other)
    m_shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # parts that saw no key
    scale = tl.math.exp2(m_i - m_shift)
    scale_other = tl.math.exp2(m_other - m_shift)
    return m_new, l_i * scale + l_other * scale_other, scale, scale_other


@jit
def lse_of(m_i, l_i):
    """Returns the natural log-sum-exp of a row's state in base two; minus infinity if it saw no key."""
    return tl.where(l_i == 0.0, float("-inf"), (m_i + tl.math.log2(l_i)) * LN_2)


@jit
def inverse_sum(l_i):
    """Returns the final factor of a row's accumulator. A row that saw no key has sum 0, and its output is 0."""
    return tl.math.div_rn(1.0, tl.where(l_i == 0.0, 1.0, l_i))


@jit
def final_state(m_i, l_i, sinks_ptr, heads, HAS_SINKS: tl.constexpr):
    """Returns a row's state with its sink, and the final factor of its accumulator. The sink is one more key, whose
    value is zero. It is added last: as the first maximum it would push the probabilities of lower scores out of the
    range of 16 bits."""
    scale = tl.full(m_i.shape, 1.0, tl.float32)
    if HAS_SINKS:
        m_i, l_i, scale, _ = join(m_i, l_i, tl.load(sinks_ptr + heads) * LOG2_E, 1.0)
    return m_i, l_i, scale * inverse_sum(l_i)


@jit
def lse_offset(row, head, num_heads_q, lse_rows):
    """Returns the offset in lse, (batch, num_heads_q, seqlen_q) or packed (num_heads_q, total_q), of a row counted over
    all sequences."""
    return (row // lse_rows * num_heads_q + head) * lse_rows + row % lse_rows


@jit
def parts_of_rows(
    acc_ptr,
    state_ptr,
    row_head,
    first,
    num_parts,
    rows_heads,
    dims,
    HEAD_DIM_V: tl.constexpr,
    PARTS: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Returns PARTS parts of some rows, from the part `first` on, merged: (maximum, sum, accumulator).

    All are loaded at once, so that their latencies overlap, and bypass L1, which does not see other SMs' writes. If
    many are empty (SPARSE), their states are loaded first, and then only the accumulators that are not empty.
    """
    parts = first + tl.arange(0, PARTS)
    there = (parts < num_parts)[:, None]  # [PARTS, 1]
    at = parts.to(tl.int64)[:, None] * rows_heads + row_head[None, :]
    at_state = at + parts.to(tl.int64)[:, None] * rows_heads
    m = tl.load(state_ptr + at_state, mask=there, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(state_ptr + at_state + rows_heads, mask=there, other=0.0, cache_modifier=".cg")
    offsets = at[:, :, None] * HEAD_DIM_V + dims[None, None, :]
    if SPARSE:
        there = there & (l != 0.0)
    inside = there[:, :, None] & (dims < HEAD_DIM_V)[None, None, :]
    acc = tl.load(acc_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")  # [PARTS, ROWS, BLOCK_DV]
    m_here = tl.max(m, 0)
    m_shift = tl.where(m_here == float("-inf"), 0.0, m_here)
    weight = tl.math.exp2(m - m_shift[None, :])  # 0 for a part that saw no key
    # The accumulator of such a part is 0 times values that it loaded for other rows, which may be NaN.
    weighted = tl.where((l == 0.0)[:, :, None], 0.0, weight[:, :, None] * acc)
    return m_here, tl.sum(weight * l, 0), tl.sum(weighted, 0)


@jit(do_not_specialize=UNSPECIALIZED)
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
    AT_ONCE: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
):
    """Merges BLOCK_DV columns of all parts of one row of one head, PARTS at a time, or at once.

    Bound: latency; the parts were written a moment ago and are in L2.
    """
    if LAUNCHED_AHEAD:
        await_launch_before()
    COLUMN_BLOCKS: tl.constexpr = (HEAD_DIM_V + BLOCK_DV - 1) // BLOCK_DV
    row_head = tl.program_id(0).to(tl.int64) // COLUMN_BLOCKS
    column_block = tl.program_id(0) % COLUMN_BLOCKS
    rows_heads = tl.cast(rows_heads, tl.int64)
    dims = column_block * BLOCK_DV + tl.arange(0, BLOCK_DV)
    only = row_head + tl.arange(0, 1)
    m_i, l_i, acc = parts_of_rows(acc_ptr, state_ptr, only, 0, num_parts, rows_heads, dims, HEAD_DIM_V, PARTS, SPARSE)
    if not AT_ONCE:
        for first in range(PARTS, num_parts, PARTS):
            m, l, some = parts_of_rows(
                acc_ptr, state_ptr, only, first, num_parts, rows_heads, dims, HEAD_DIM_V, PARTS, SPARSE
            )
            m_i, l_i, scale, scale_some = join(m_i, l_i, m, l)
            acc = acc * scale[:, None] + some * scale_some[:, None]

    head = row_head % num_heads_q
    m_i, l_i, scale = final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)
    out = acc * scale[:, None]
    offsets = row_head * HEAD_DIM_V + dims[None, :]
    tl.store(out_ptr + offsets, rounded(out, out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM_V)[None, :])
    if WRITE_LSE:
        offset = lse_offset(row_head // num_heads_q, head, num_heads_q, lse_rows)
        tl.store(lse_ptr + offset + tl.arange(0, 1), lse_of(m_i, l_i), mask=column_block == 0)


# acc, float32 (num_parts, rows, num_heads_q, head_dim_v), and state, float32 (num_parts, 2, rows, num_heads_q) with
# maxima before sums; None and None if there is one part, which needs no merge.
Workspace = tuple[torch.Tensor | None, torch.Tensor | None]


def allocate(
    problem: AttentionProblem, num_parts: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates the acc and state of a `Workspace` anew, so that they belong to the stream that uses them, or to the
    graph that is being captured."""
    acc, state = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in needs(problem, num_parts))
    return acc, state


def needs(problem: AttentionProblem, num_parts: int) -> list[scratch.Need]:
    """Returns the shapes and dtypes of acc and state."""
    shape = (problem.rows, problem.num_heads_q)
    return [((num_parts, *shape, problem.head_dim_v), torch.float32), ((num_parts, 2, *shape), torch.float32)]


def workspaces(problem: AttentionProblem, num_parts: int, device: torch.device | str) -> Callable[[], Workspace]:
    """Returns `workspace()`, to be called once for each launch; its memory is reused on one stream
    (runtime/scratch.py)."""
    if num_parts == 1:
        return lambda: (None, None)
    return scratch.memory(needs(problem, num_parts), torch.device(device))


def workspace_bytes(problem: AttentionProblem, num_parts: int) -> int:
    """Returns the bytes that `allocate` allocates."""
    return 4 * num_parts * problem.rows * problem.num_heads_q * (problem.head_dim_v + 2)


def lse_rows(problem: AttentionProblem) -> int:
    """Returns the number of consecutive rows of lse: those of a sequence, or all rows if sequences are packed."""
    return max(1, problem.total_q if problem.packed else problem.seqlen_q)


def specify_merge(
    problem: AttentionProblem,
    num_parts: int,
    acc: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    launched_ahead: bool = False,
    sparse: bool = False,
) -> Launch:
    """Returns the launch that merges `num_parts` parts of every row.

    If many may be empty (`sparse`), their states are loaded first.
    """
    parts, columns, at_once = loads(problem, num_parts)
    return Launch(
        kernel=merge_partials_kernel,
        grid=merge_grid(problem, columns),
        tensors=(acc, state, out, lse, sinks),
        scalars=merge_scalars(problem, num_parts),
        constants={
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_DV": columns,
            "PARTS": parts,
            "AT_ONCE": at_once,
            "SPARSE": sparse,
            "HAS_SINKS": problem.has_sinks,
            "WRITE_LSE": problem.return_lse,
            "LAUNCHED_AHEAD": launched_ahead,
        },
        options={
            "num_warps": 4 if parts > 8 else 2,
            "num_stages": 1,
            "enable_fp_fusion": problem.dtype != "float32",
            **({"launch_pdl": True} if launched_ahead else {}),
        },
    )


def loads(problem: AttentionProblem, num_parts: int) -> tuple[int, int, bool]:
    """Returns how many parts of how many columns of a row a block loads at a time, and whether these are all parts. The
    more parts there are, the more blocks divide the columns of a row."""
    parts = 1 << (num_parts - 1).bit_length()
    columns = min(padded(problem.head_dim_v), max(LEAST_COLUMNS, LOADED_AT_ONCE // parts))
    parts = min(parts, max(1, LOADED_AT_ONCE // columns))
    return parts, columns, num_parts <= parts


def merge_grid(problem: AttentionProblem, columns: int) -> int:
    """Returns the number of blocks of `specify_merge`'s launch, each of which has so many columns of a row."""
    return problem.rows * problem.num_heads_q * -(-problem.head_dim_v // columns)


def column_blocks(problem: AttentionProblem, num_parts: int) -> int:
    """Returns the number of blocks that divide the columns of a row."""
    return -(-problem.head_dim_v // loads(problem, num_parts)[1])


def merge_scalars(problem: AttentionProblem, num_parts: int) -> list[int]:
    """Returns the run-time arguments of `specify_merge`'s launch."""
    return [problem.rows * problem.num_heads_q, problem.num_heads_q, num_parts, lse_rows(problem)]
