"""Costs of the launches that gradient kernels consist of: those that own queries, those that own keys, and passes over
rows.

A kernel's `cost` lists its launches, adds what its tiles and its GPU determine (shared memory, registers, stages), and
joins them by `cost.in_turn`. The five products of a pair are S, dP, dV, dQ and dK. A launch that computes S or dP after
another one has counts them as repeated.
"""

from __future__ import annotations

import math

from warpwave.kernels.cost import WARP_US, Cost, bytes_per_score, walk, walk_by_keys
from warpwave.problem import DTYPE_BYTES, AttentionProblem

STATISTICS_BYTES = 8  # log-sum-exp and delta of a row, float32
ZEROS = Cost(0, 0, 0, 0, 0, launches=1)  # of prepass/zero_unwritten.py, whose few tokens are not counted


def of_queries(problem: AttentionProblem, block_m: int, block_n: int, widths: tuple[int, int], walks: int = 1) -> Cost:
    """Returns the cost of a launch that owns queries, walks keys and writes dQ: S, dP, dQ. An earlier launch has
    computed S and dP.

    Args:
        block_m, block_n: queries that a block owns, and keys of a step.
        widths: columns of a tile of q and k, and of a tile of v and dO.
        walks: number of walks over the keys; dQ is summed in the last one.
    """
    size, rows, keys = DTYPE_BYTES[problem.dtype], problem.rows * problem.num_heads_q, keys_of(problem)
    visited, longest, items, cut = walk(problem, block_m, block_n)
    scores, width = visited * block_m * block_n, problem.head_dim + problem.head_dim_v
    cells = walks * scores * bytes_per_score(problem)
    once = size * (rows * (width + problem.head_dim) + keys * width) + rows * STATISTICS_BYTES
    once += min(cells, cell_bytes(problem))
    read = size * (rows * width + walks * visited * block_n * width) + 4 * rows + cells
    written = rows * (size * problem.head_dim + 4 * walks)
    return Cost(
        blocks=-(-problem.seqlen_q // block_m) * problem.num_heads_q * problem.batch,
        flops=2 * scores * (walks * sum(widths) + widths[0]),
        exponentials=walks * scores,
        read_bytes=read,
        write_bytes=written,
        items=items,
        steps=walks * visited,
        longest=walks * longest,
        cut=walks * cut,
        repeated_flops=2 * scores * walks * sum(widths),
        repeated_exponentials=walks * scores,
        first_bytes=min(once, read + written),  # a window hides keys
        walked_bytes=size * problem.seqlen_k * width,
        walked_heads=problem.batch * problem.num_heads_kv,
    )


def of_keys(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    widths: tuple[int, int],
    products: tuple[int, int] = (2, 2),
    repeats: tuple[int, int] = (0, 0),
) -> Cost:
    """Returns the cost of a launch that owns keys and walks the queries of all heads that read them: S, dP, dV, dK.

    Args:
        block_m, block_n: queries of a step, and keys that a block owns.
        widths: as in `of_queries`.
        products: number of products that sum over head_dim or write dK, and that sum over head_dim_v or write dV: (2,
            2) for dK and dV, (2, 1) for dK alone, (1, 1) for dV alone.
        repeats: how many of these an earlier launch has computed.
    """
    size, keys = DTYPE_BYTES[problem.dtype], keys_of(problem)
    visited, longest, items, cut = walk_by_keys(problem, block_m, block_n)
    scores, width = visited * block_m * block_n, problem.head_dim + problem.head_dim_v
    written = {(2, 2): width, (2, 1): problem.head_dim, (1, 1): problem.head_dim_v}[products]
    cells = scores * bytes_per_score(problem)
    rows, group = problem.rows * problem.num_heads_q, -(-problem.num_heads_q // problem.num_heads_kv)
    read = size * width * (keys + visited * block_m) + STATISTICS_BYTES * visited * block_m + cells
    once = size * (width * (rows + keys) + keys * written) + rows * STATISTICS_BYTES
    once += min(cells, cell_bytes(problem))
    return Cost(
        blocks=-(-problem.seqlen_k // block_n) * problem.num_heads_kv * problem.batch,
        flops=2 * scores * (products[0] * widths[0] + products[1] * widths[1]),
        exponentials=scores,
        read_bytes=read,
        write_bytes=size * keys * written,
        items=items,
        steps=visited,
        longest=longest,
        cut=cut,
        repeated_flops=2 * scores * (repeats[0] * widths[0] + repeats[1] * widths[1]),
        repeated_exponentials=scores if repeats[0] else 0,
        first_bytes=min(once, read + size * keys * written),
        walked_bytes=size * group * problem.seqlen_q * width,
        walked_heads=problem.batch * problem.num_heads_kv,
    )


def of_rows(blocks: int, read_bytes: int, write_bytes: int, scratch_bytes: int, threads: int) -> Cost:
    """Returns the cost of a launch of many small blocks that reads and writes rows once.

    Args:
        scratch_bytes: the part of the bytes that is in sums of an earlier or later launch.
        threads: of a block.
    """
    return Cost(
        blocks=blocks,
        flops=0,
        exponentials=0,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        threads=threads,
        registers=48,
        scratch_bytes=scratch_bytes,
        first_bytes=read_bytes + write_bytes - scratch_bytes,
        trips=1,
        block_us=threads // 32 * WARP_US,
    )


def cell_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of the mask and the bias."""
    mask = 0 if problem.mask_shape is None else math.prod(problem.mask_shape)
    if problem.bias_shape is None:
        return mask
    return mask + math.prod(problem.bias_shape) * DTYPE_BYTES[problem.bias_dtype or problem.dtype]


def keys_of(problem: AttentionProblem) -> int:
    """Returns the rows of k, over all kv heads."""
    return (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
