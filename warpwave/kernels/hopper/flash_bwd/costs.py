"""What the launches of `hopper/flash_bwd` move and compute for one problem."""

from __future__ import annotations

from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost, in_turn
from warpwave.kernels.gradient_costs import STATISTICS_BYTES, of_keys, of_rows
from warpwave.kernels.hopper.flash_bwd.config import BLOCK_N, Config, smem_bytes, width
from warpwave.kernels.hopper.host import NUM_SMS
from warpwave.problem import DTYPE_BYTES, AttentionProblem

THREADS = 128  # of a block that passes over rows
JOINT_THREADS = 384  # two consumer warpgroups, and one that loads and adds


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute, whole tiles and padding included, in the order in which they run.

    Another set of launches, for other head sizes, is another list of parts made of `gradient_costs`.
    """
    size, rows = DTYPE_BYTES[problem.dtype], problem.rows * problem.num_heads_q
    sums = 4 * rows * width(problem)
    of_statistics = rows * STATISTICS_BYTES
    tiles = problem.num_heads_q * sum(-(-q // config.block_m) * n for (q, _), n in problem.counted_items().items())
    statistics = of_rows(
        tiles, rows * (2 * size * problem.head_dim_v + 4), sums + of_statistics, sums + of_statistics, THREADS
    )
    finish = of_rows(tiles, sums, rows * size * problem.head_dim, sums, THREADS)
    parts = (statistics, _joint(problem, gpu, config, sums), finish)
    return in_turn(parts, workspace_bytes=sums + of_statistics)


def _joint(problem: AttentionProblem, gpu: Gpu, config: Config, sums: int) -> Cost:
    """Returns the cost of the launch with all five products. It adds a tile of dQ to the sums at every step."""
    columns = width(problem)
    walk = of_keys(problem, config.block_m, BLOCK_N, (columns, columns))
    scores = walk.steps * config.block_m * BLOCK_N
    added = 4 * walk.steps * config.block_m * columns
    group = problem.num_heads_q // problem.num_heads_kv
    return replace(
        walk,
        blocks=min(walk.blocks, gpu.num_sms or NUM_SMS),
        flops=walk.flops + 2 * scores * columns,
        write_bytes=walk.write_bytes + added,
        added_bytes=added,
        scratch_bytes=2 * min(added, sums),  # once in and once out of L2, if the sums of all heads do not fit
        walked_bytes=walk.walked_bytes + 4 * group * problem.seqlen_q * columns,
        smem_bytes=smem_bytes(problem, config),
        threads=JOINT_THREADS,
        blocks_per_sm=1,
    )
