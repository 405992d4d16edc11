"""What three_kernel's backward takes of the device's memory, before it runs. Host code alone."""

from __future__ import annotations

from warpwave.kernels.three_kernel.backward import WHOLE_ROW, plan_of, runs_of_heads
from warpwave.kernels.three_kernel.plan import Chunk
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def peak_bytes(problem: AttentionProblem) -> int:
    """Bytes that stand beside the operands and the upstream gradient at the most, the gradients of q, k, v and sinks
    among them: what is asked of torch's allocator, which rounds each tensor up to 512 bytes, and what cuBLAS keeps is
    not in it. For operands whose rows are contiguous, and a contiguous upstream of their dtype."""
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        return gradient_bytes(problem)
    return _in_chunks(problem)


def gradient_bytes(problem: AttentionProblem) -> int:
    """Of the gradients alone."""
    size = DTYPE_BYTES[problem.dtype]
    of_q = problem.batch * problem.seqlen_q * problem.num_heads_q * problem.head_dim
    of_kv = problem.batch * problem.seqlen_k * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    return size * (of_q + of_kv) + 4 * problem.num_heads_q * problem.has_sinks


def _row_bytes(problem: AttentionProblem) -> int:
    """A row of q and one of the upstream gradient."""
    return DTYPE_BYTES[problem.dtype] * (problem.head_dim + problem.head_dim_v)


def _of_sinks(problem: AttentionProblem) -> int:
    """What each row adds to the gradient of its head's sink."""
    return 4 * problem.batch * problem.num_heads_q * problem.seqlen_q


def _in_chunks(problem: AttentionProblem) -> int:
    """Of `three_kernel_gradients.backward`: its buffers, float32 sums, dq and a number a row all the while; copies of
    the rows of a chunk, and the last of them until the end; the float32 rows of dq of a part, or the sums rounded."""
    cut, size = plan_of(problem), DTYPE_BYTES[problem.dtype]
    scores = cut.heads * cut.rows * cut.width
    buffers = 2 * 4 * scores + (2 * size * scores if cut.width > WHOLE_ROW and size != 4 else 0)
    sums = 4 * problem.batch * problem.seqlen_k * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    of_q = size * problem.batch * problem.seqlen_q * problem.num_heads_q * problem.head_dim
    standing = buffers + sums + of_q + _of_sinks(problem)
    # While a chunk's copies are made those of the chunk before are still there.
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
    """Copies of a chunk's rows of q and the upstream gradient."""
    runs = runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads)
    heads = sum(kv_heads * members for _, _, kv_heads, members in runs if members > 1 and chunk.rows > 1)
    return heads * chunk.rows * _row_bytes(problem)


def _rows_of_dq(problem: AttentionProblem, chunk: Chunk) -> int:
    """dq of the largest part of a chunk, in float32."""
    runs = runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads)
    return 4 * max(kv_heads * members for _, _, kv_heads, members in runs) * chunk.rows * problem.head_dim
