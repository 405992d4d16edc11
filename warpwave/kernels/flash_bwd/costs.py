"""What `flash_bwd` moves and computes for one problem."""

from __future__ import annotations

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import tile_widths
from warpwave.kernels.cost import Cost, bytes_per_score, waits_for_memory, walk
from warpwave.kernels.flash_bwd.config import Config, smem_bytes
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """What the launches of dq, dk and dv move and compute: seven products over whole tiles, padding included; two of
    them, and the exponentials, in both launches."""
    size = DTYPE_BYTES[problem.dtype]
    rows, width = problem.rows * problem.num_heads_q, problem.head_dim + problem.head_dim_v
    keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
    parts = []
    for tile, owned, products in ((config.dq, config.dq.block_m, (2, 1)), (config.dkv, config.dkv.block_n, (2, 2))):
        owns_keys = tile is config.dkv and products == (2, 2)
        visited, longest, _, cut = walk(problem, tile.block_m, tile.block_n)
        block_d, block_dv = tile_widths(problem, gpu, owned)
        scores = visited * tile.block_m * tile.block_n
        walked = visited * (tile.block_m if owns_keys else tile.block_n)
        heads, length = (
            (problem.num_heads_kv, problem.seqlen_k) if owns_keys else (problem.num_heads_q, problem.seqlen_q)
        )
        # Beside the tiles: out, log-sum-exp and delta of each row.
        reads = size * ((keys if owns_keys else rows) * width + walked * width) + scores * bytes_per_score(problem)
        reads += 8 * walked if owns_keys else rows * (size * problem.head_dim_v + 4)
        writes = size * keys * width if owns_keys else rows * (size * problem.head_dim + 4)
        parts.append(
            Cost(
                blocks=-(-length // owned) * heads * problem.batch,
                flops=2 * scores * (products[0] * block_d + products[1] * block_dv),
                exponentials=scores,
                read_bytes=reads,
                write_bytes=writes,
                smem_bytes=smem_bytes(problem, gpu, config),
                steps=visited,
                longest=longest,
                cut=cut,
                far=waits_for_memory(tile.num_stages),
                threads=tile.num_warps * gpu.warp_size,
                registers=gpu.registers_per_thread or 255,
            )
        )
    dq, dkv = parts
    return Cost(
        blocks=dq.blocks + dkv.blocks,
        flops=dq.flops + dkv.flops,
        exponentials=dq.exponentials + dkv.exponentials,
        read_bytes=dq.read_bytes + dkv.read_bytes,
        write_bytes=dq.write_bytes + dkv.write_bytes,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=4 * rows,
        launches=2,
        parts=(dq, dkv),
    )
