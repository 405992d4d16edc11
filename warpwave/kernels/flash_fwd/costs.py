"""The bytes that `flash_fwd` moves and the operations that it computes for one problem."""

from __future__ import annotations

from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import dot_precision, total_widths
from warpwave.kernels.cost import (
    ODD_ROWS,
    Cost,
    bytes_per_score,
    conversions,
    launch_order,
    multiply_add_bytes,
    odd_rows,
    waits_for_memory,
    walk,
)
from warpwave.kernels.flash_fwd.config import Config, smem_bytes
from warpwave.kernels.prepass.split_ahead import PARTS
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what one launch moves and computes: whole tiles, padding included; K and V once for each query tile. With
    split_ahead, it includes what the first launch reads, and the parts that it writes. The factors of quantized
    tensors, one number a tile, are left out."""
    size, size_out = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.dtype_of_out]
    block_d, block_dv = total_widths(problem, gpu, config.block_m)
    visited, longest, items, cut = walk(problem, config.block_m, config.block_n)
    scores = visited * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    arithmetic = dot_precision(problem, gpu)
    workspace = split_reads = 0
    key_bytes = problem.bytes_of_key
    if config.split_ahead and arithmetic in PARTS:
        keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
        split_reads, key_bytes = keys * key_bytes, 2 * PARTS[arithmetic] * (block_d + block_dv)
        workspace = keys * key_bytes
    key_reads = visited * config.block_n * key_bytes
    multiply_adds = problem.dtype == "float32" and arithmetic == "ieee"
    products = (
        (config.block_m, config.block_n, block_d),
        (config.block_m, block_dv, config.block_n),
    )
    split = scores + visited * config.block_n * (block_d + block_dv)  # elements of P, K and V split in the loop
    out_bytes = rows * (problem.head_dim_v * size_out + (4 if problem.return_lse else 0))
    reads = size * rows * problem.head_dim + key_reads + scores * bytes_per_score(problem)
    attend = Cost(
        blocks=-(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch,
        flops=2 * scores * (block_d + block_dv),
        exponentials=scores,
        read_bytes=reads,
        write_bytes=out_bytes,
        smem_bytes=smem_bytes(problem, gpu, config),
        scratch_bytes=key_reads if workspace else 0,
        steps=visited,
        longest=longest,
        # Under a mask the longest come first.
        order=launch_order(problem, config.block_m, config.block_n) if problem.packed and not problem.has_band else (),
        cut=cut,
        far=waits_for_memory(config.num_stages),
        items=items,  # blocks past the end of a packed sequence have no work
        smem_margin=_smem_margin(gpu, config) if size == 2 and gpu.vendor == "nvidia" else 0,
        loop=_loop(problem, block_d, multiply_adds),
        threads=config.num_warps * gpu.warp_size,
        registers=_registers(problem, gpu, config),
        # Two Hopper warpgroups have 64 rows each. If tiles arrive one at a time, they wait for each other.
        chains=2 if gpu.capability == 90 and size <= 2 and (config.block_m, config.num_warps) == (128, 8) else 1,
        operand_bytes=int(visited * multiply_add_bytes(products, config.num_warps * 32)) if multiply_adds else 0,
        conversions=visited * config.block_n * block_dv  # values of int8 become float16
        if problem.dtype_of_v == "int8"
        else conversions(problem, gpu, scores if workspace else split, config.block_m, config.num_warps),
    )
    if not workspace:
        return attend
    return replace(
        attend,
        read_bytes=reads + split_reads,
        write_bytes=out_bytes + workspace,
        workspace_bytes=workspace,
        scratch_bytes=key_reads + workspace,
        launches=2,
        parts=(Cost(0, 0, 0, split_reads, workspace, scratch_bytes=workspace), attend),
    )


def _smem_margin(gpu: Gpu, config: Config) -> int:
    """Returns `Cost.smem_margin` of 16-bit inputs: P, half of it where the matrix unit reads shared memory, and
    barriers."""
    return config.block_m * config.block_n * (2 if gpu.has_mma else 1) + 1024


def _registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns approximately the registers of a thread: output and scores of its rows in float32, probabilities, and
    some forty more."""
    threads = max(1, config.num_warps * gpu.warp_size)
    block_d, block_dv = total_widths(problem, gpu, config.block_m)
    elements = config.block_m * (block_dv + config.block_n * 3 // 2)
    if problem.dtype == "float32" and dot_precision(problem, gpu) == "ieee":
        # Multiply-adds hold operands too, and tiles that are not in flight pass through registers.
        loaded = config.block_n * (block_d + block_dv)
        elements += 44 * threads + (loaded if config.num_stages == 1 else 0)
    elif problem.dtype == "float32" and config.block_m < 64:  # every warp holds the parts of all rows of Q
        elements += threads * (40 + 3 * config.block_m * block_d // (2 * gpu.warp_size))
    return min(gpu.registers_per_thread or 255, 40 + elements // threads)


def _loop(problem: AttentionProblem, block_d: int, multiply_adds: bool) -> str:
    """Returns `Cost.loop`: separate names for multiply-adds, by head_dim; for float32 with a mask or bias; for tiles of
    256 columns, with eight warps; and for rows that do not start at multiples of 32 bytes, whose loads are narrower."""
    if multiply_adds:
        return "wide multiply-adds" if block_d >= 128 else "multiply-adds"
    if problem.dtype == "float32" and bytes_per_score(problem):
        return "float32 cells"
    if problem.dtype != "float32" and block_d > 128:
        return "wide"
    return ODD_ROWS if odd_rows(problem) else ""
