"""Computes the device memory of three_kernel's backward before it runs. Holds no device code."""

from __future__ import annotations

from warpwave.kernels.three_kernel.backward import WHOLE_ROW, plan_of, runs_of_heads
from warpwave.kernels.three_kernel.plan import Chunk
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def peak_bytes(problem: AttentionProblem) -> int:
    """Returns the peak bytes allocated in addition to the operands and the upstream gradient, including the gradients
    of q, k, v and sinks.

    This counts requests to torch's allocator, which rounds each tensor up to 512 bytes; memory kept by cuBLAS is not
    included. It holds for operands with contiguous rows, and for a contiguous upstream gradient of their dtype.
    """
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        return gradient_bytes(problem)
    return _in_chunks(problem)


def gradient_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of the gradients alone."""
    size = DTYPE_BYTES[problem.dtype]
    keys = problem.total_k if problem.packed else problem.batch * problem.seqlen_k
    of_q = problem.rows * problem.num_heads_q * problem.head_dim
    of_kv = keys * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    return size * (of_q + of_kv) + 4 * problem.num_heads_q * problem.has_sinks


def _row_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of a row of q and of a row of the upstream gradient."""
    return DTYPE_BYTES[problem.dtype] * (problem.head_dim + problem.head_dim_v)


def _of_sinks(problem: AttentionProblem) -> int:
    """Returns the bytes of each row's contributions to the gradient of its head's sink."""
    return 4 * problem.batch * problem.num_heads_q * problem.seqlen_q


def _in_chunks(problem: AttentionProblem) -> int:
    """Returns the bytes of `backward.backward`: its buffers, float32 sums, dq and one number per row throughout; copies
    of the rows of a chunk, the last of them until the end; the float32 rows of dq of a part, or the rounded sums."""
    cut, size = plan_of(problem), DTYPE_BYTES[problem.dtype]
    scores = cut.heads * cut.rows * cut.width
    buffers = 2 * 4 * scores + (2 * size * scores if cut.width > WHOLE_ROW and size != 4 else 0)
    sums = 4 * problem.batch * problem.seqlen_k * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    of_q = size * problem.batch * problem.seqlen_q * problem.num_heads_q * problem.head_dim
    standing = buffers + sums + of_q + _of_sinks(problem)
    # While a chunk's copies are made, those of the previous chunk are still allocated.
    most, copied = 0, 0
    for chunk in cut.chunks:
        if chunk.nothing_to_see:
            continue
        of_chunk = _copied(problem, chunk)
        most = max(most, copied + of_chunk, of_chunk + _rows_of_dq(problem, chunk))
        copied = of_chunk
    rounded = 0 if size == 4 else sums // 4 * size
    sinks = 4 * problem.num_heads_q * problem.has_sinks
    return standing + max(most, copied + rounded + sinks)


def _copied(problem: AttentionProblem, chunk: Chunk) -> int:
    """Returns the bytes of the copies of a chunk's rows of q and the upstream gradient."""
    runs = runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads)
    heads = sum(kv_heads * members for _, _, kv_heads, members in runs if members > 1 and chunk.rows > 1)
    return heads * chunk.rows * _row_bytes(problem)


def _rows_of_dq(problem: AttentionProblem, chunk: Chunk) -> int:
    """Returns the bytes of dq of the largest part of a chunk, in float32."""
    runs = runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads)
    return 4 * max(kv_heads * members for _, _, kv_heads, members in runs) * chunk.rows * problem.head_dim
