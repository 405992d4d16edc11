"""What `flash_bwd` moves and computes for one problem."""

from __future__ import annotations

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import tile_widths
from warpwave.kernels.cost import Cost, bytes_per_score, waits_for_memory, walk
from warpwave.kernels.flash_bwd.config import Config, Tile, smem_bytes
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """What the launches of dq, dk and dv move and compute, over whole tiles, padding included.

    There are seven products: S, dP and dQ in the first launch, S, dP, dV and dK in the second. If dk and dv take a
    launch each, S is computed three times.
    """
    each = [_of_queries(problem, gpu, config.dq, smem_bytes(problem, gpu, config))]
    for products in [(2, 1), (1, 1)] if config.split_dkv else [(2, 2)]:
        each.append(_of_keys(problem, gpu, config.dkv, smem_bytes(problem, gpu, config), products))
    return Cost(
        blocks=sum(part.blocks for part in each),
        flops=sum(part.flops for part in each),
        exponentials=sum(part.exponentials for part in each),
        read_bytes=sum(part.read_bytes for part in each),
        write_bytes=sum(part.write_bytes for part in each),
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=(8 if problem.dtype == "float32" else 4) * problem.rows * problem.num_heads_q,
        launches=len(each),
        parts=tuple(each),
    )


def _of_queries(problem: AttentionProblem, gpu: Gpu, tile: Tile, smem: int) -> Cost:
    """`cost` of the launch that owns queries. In float32 it walks the keys twice, S and dP each time."""
    size, rows = DTYPE_BYTES[problem.dtype], problem.rows * problem.num_heads_q
    block_d, block_dv = tile_widths(problem, gpu, tile.block_m)
    visited, longest, _, cut = walk(problem, tile.block_m, tile.block_n)
    walks = 2 if problem.dtype == "float32" else 1
    scores = walks * visited * tile.block_m * tile.block_n
    width = problem.head_dim + problem.head_dim_v
    return Cost(
        blocks=-(-problem.seqlen_q // tile.block_m) * problem.num_heads_q * problem.batch,
        flops=2 * scores * (block_d + block_dv) + 2 * scores // walks * block_d,
        exponentials=scores,
        read_bytes=size * (rows * (width + problem.head_dim_v) + walks * visited * tile.block_n * width)
        + 4 * rows
        + scores * bytes_per_score(problem),
        write_bytes=rows * (size * problem.head_dim + 4 * walks),
        smem_bytes=smem,
        steps=walks * visited,
        longest=walks * longest,
        cut=walks * cut,
        far=waits_for_memory(tile.num_stages),
        threads=tile.num_warps * gpu.warp_size,
        registers=gpu.registers_per_thread,
    )


def _of_keys(problem: AttentionProblem, gpu: Gpu, tile: Tile, smem: int, products: tuple[int, int]) -> Cost:
    """`cost` of a launch that owns keys.

    Args:
        products: how many sum over head_dim or write dk, and how many over head_dim_v or dv.
    """
    size = DTYPE_BYTES[problem.dtype]
    keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
    block_d, block_dv = tile_widths(problem, gpu, tile.block_n)
    visited, longest, _, cut = walk(problem, tile.block_m, tile.block_n)
    scores, width = visited * tile.block_m * tile.block_n, problem.head_dim + problem.head_dim_v
    writes = {(2, 2): width, (2, 1): problem.head_dim, (1, 1): problem.head_dim_v}[products]
    return Cost(
        blocks=-(-problem.seqlen_k // tile.block_n) * problem.num_heads_kv * problem.batch,
        flops=2 * scores * (products[0] * block_d + products[1] * block_dv),
        exponentials=scores,
        read_bytes=size * width * (keys + visited * tile.block_m)
        + 8 * visited * tile.block_m
        + scores * bytes_per_score(problem),
        write_bytes=size * keys * writes,
        smem_bytes=smem,
        steps=visited,
        longest=longest * problem.num_heads_q // problem.num_heads_kv,
        cut=cut,
        far=waits_for_memory(tile.num_stages),
        threads=tile.num_warps * gpu.warp_size,
        registers=gpu.registers_per_thread,
    )
