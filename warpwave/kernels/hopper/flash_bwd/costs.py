"""What the launches of `hopper/flash_bwd` move and compute for one problem."""

from __future__ import annotations

from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost, in_turn
from warpwave.kernels.gradient_costs import STATISTICS_BYTES, of_keys, of_queries, of_rows
from warpwave.kernels.hopper.flash_bwd.config import (
    GROUP_ROWS,
    MAX_JOINT,
    Config,
    smem_bytes,
    smem_of_dkv,
    smem_of_dq,
    value_stages,
    width,
    widths,
)
from warpwave.kernels.hopper.host import NUM_SMS
from warpwave.problem import DTYPE_BYTES, AttentionProblem

THREADS = 384  # two consumer warpgroups, and one that loads and adds
APART = "apart"  # `Cost.loop`


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute, whole tiles and padding included, in the order in which they run.

    Another set of launches is another list of parts made of `gradient_costs`.
    """
    rows, size = problem.rows * problem.num_heads_q, DTYPE_BYTES[problem.dtype]
    sums = 4 * rows * width(problem) if config.is_joint else 0
    statistics = rows * STATISTICS_BYTES
    threads = 128 if problem.head_dim_v <= MAX_JOINT else 256
    first = of_rows(
        _row_tiles(problem, config),
        rows * (2 * size * problem.head_dim_v + 4),
        sums + statistics,
        sums + statistics,
        threads,
    )
    if not config.is_joint:
        return in_turn((first, _of_keys(problem, gpu, config), _of_queries(problem, gpu, config)), statistics)
    finish = of_rows(_row_tiles(problem, config), sums, rows * size * problem.head_dim, sums, threads)
    return in_turn((first, _joint(problem, gpu, config, sums), finish), sums + statistics)


def _row_tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the blocks of a launch over tiles of rows."""
    return problem.num_heads_q * sum(-(-q // config.block_m) * n for (q, _), n in problem.counted_items().items())


def _joint(problem: AttentionProblem, gpu: Gpu, config: Config, sums: int) -> Cost:
    """Returns the cost of the launch with all five products. It adds a tile of dQ to the sums at every step."""
    columns = width(problem)
    walk = of_keys(problem, config.block_m, config.block_n, (columns, columns))
    scores = walk.steps * config.block_m * config.block_n
    added = 4 * walk.steps * config.block_m * columns
    group = problem.num_heads_q // problem.num_heads_kv
    return replace(
        _persistent(walk, gpu, smem_bytes(problem, config)),
        flops=walk.flops + 2 * scores * columns,
        write_bytes=walk.write_bytes + added,
        added_bytes=added,
        scratch_bytes=2 * min(added, sums),  # once in and once out of L2, if the sums of all heads do not fit
        walked_bytes=walk.walked_bytes + 4 * group * problem.seqlen_q * columns,
    )


def _of_keys(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of the launch of dK and dV."""
    walk = of_keys(problem, config.block_m, config.block_n, widths(problem))
    return replace(_persistent(walk, gpu, smem_of_dkv(problem, config)), loop=APART)


def _of_queries(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of the launch of dQ, which walks tiles of `block_m` keys."""
    walk = of_queries(problem, 2 * GROUP_ROWS, config.block_m, widths(problem))
    return replace(_persistent(walk, gpu, smem_of_dq(problem, config, value_stages(problem, config))), loop=APART)


def _persistent(walk: Cost, gpu: Gpu, smem: int) -> Cost:
    """Returns the cost of a launch of one block an SM, which draws its tiles, the longest first."""
    return replace(
        walk, blocks=min(walk.blocks, gpu.num_sms or NUM_SMS), smem_bytes=smem, threads=THREADS, blocks_per_sm=1
    )
