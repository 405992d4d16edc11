"""Tiles of rows that the query heads of a kv head share, and whether they fill a GPU if keys are not split. Holds no
device code."""

from __future__ import annotations

from warpwave.gpu import WGMMA_ROWS, Gpu
from warpwave.problem import AttentionProblem, by_kind

LEAST_SHARE_OF_SMS, LEAST_KEYS_PER_SM = 0.75, 384  # of tiles of 64 rows


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


def rows_of_sequence(problem: AttentionProblem) -> int:
    """Returns the rows of a sequence, on average, that may share tiles."""
    return problem.rows * heads_of_tile(problem) // max(1, problem.batch)


def why_split(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why `split_kv` is faster than `hopper/flash_fwd`, which gives each tile of rows one block, in a call of
    16 bits whose queries are few or read a cache.

    Measured from pages on an H200 (record 2026-11-28-h200-prefill-from-pages.json), time of `split_kv` over that of
    `hopper/flash_fwd`: 1.02 to 3.26 in 66 calls for which there is no reason, 1.69 in the geometric mean; 0.84 to 0.98
    in 4 short ones; 0.80 to 1.15 with tiles for half of the SMs, and 0.18 to 0.74 with fewer. On 8-bit caches 1.01 to
    2.38 in 46 calls with factors of heads (record 2026-11-28-h200-prefill-from-8-bit-pages.json), and 1.23 to 5.52 in
    32 with factors of tokens (record 2026-11-29-h200-factors-of-tokens.json).
    """
    sms, rows = gpu.assumed_sms, rows_of_sequence(problem)
    tiles = query_tiles(problem, WGMMA_ROWS, heads_of_tile(problem))
    if rows < WGMMA_ROWS:
        return [f"a sequence has {rows} rows of a kv head on average; split_kv is faster with fewer than {WGMMA_ROWS}"]
    if tiles < LEAST_SHARE_OF_SMS * sms:
        return [f"{tiles} tiles of rows leave some of {sms} SMs idle; split_kv divides the keys"]
    if tiles * problem.seqlen_k < LEAST_KEYS_PER_SM * sms:
        return [f"{tiles} tiles of {problem.seqlen_k} keys on {sms} SMs are short; split_kv has lighter blocks"]
    return []
