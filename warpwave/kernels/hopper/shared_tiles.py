"""Tiles of rows that the query heads of a kv head share, and their number. Holds no device code."""

from __future__ import annotations

from warpwave.gpu import WGMMA_ROWS
from warpwave.problem import AttentionProblem, by_kind


def query_tiles(problem: AttentionProblem, block_m: int, heads: int = 1) -> int:
    """Returns the number of query tiles in the schedule, over all heads and sequences, if `heads` heads share a tile:
    in a packed call one a sequence if all fit one, else what `scheduler.packed_tile` needs."""
    if problem.packed and not 0 < problem.seqlen_q * heads <= block_m:
        return (problem.total_q * heads // block_m + problem.batch) * (problem.num_heads_q // heads)
    return -(-problem.seqlen_q * heads // block_m) * (problem.num_heads_q // heads) * problem.batch


@by_kind
def heads_of_tile(problem: AttentionProblem) -> int:
    """Returns the most heads that can share a tile: the largest power of two, up to 64, that divides the group of a kv
    head; 1 if something differs between the heads of a group, or if q has parts or factors."""
    beside = (problem.mask_shape, problem.bias_shape, problem.alibi_shape)
    if problem.dtype == "float32" or problem.is_quantized or problem.dropout_p or any(x is not None for x in beside):
        return 1
    group = problem.num_heads_q // problem.num_heads_kv
    return min(group & -group, WGMMA_ROWS)
