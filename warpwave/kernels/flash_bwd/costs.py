"""The bytes that `flash_bwd` moves and the operations that it computes for one problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warpwave.gpu import WGMMA_OR_TCGEN05, Gpu, reads_shared_memory
from warpwave.kernels.arguments import total_widths
from warpwave.kernels.cost import (
    ODD_ROWS,
    Cost,
    bytes_per_score,
    conversions,
    in_turn,
    launch_order,
    launch_order_by_keys,
    multiply_add_bytes,
    odd_rows,
    waits_for_memory,
)
from warpwave.kernels.flash_bwd.config import (
    PARTS_AT_ONCE,
    Config,
    Tile,
    arithmetic_of,
    parts_of_bias,
    smem_in_use,
    smem_of_joint,
    smem_of_one_side,
    smem_of_tile,
    walked_of,
)
from warpwave.kernels.gradient_costs import ZEROS, cell_bytes, keys_of, of_keys, of_queries, of_rows
from warpwave.problem import DTYPE_BYTES, AttentionProblem

LAUNCHES_OF_KEYS = {  # split_dkv -> (products, those that an earlier launch has computed) of each launch
    False: (((2, 2), (0, 0)),),
    True: (((2, 1), (0, 0)), ((1, 1), (1, 0))),
}


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches of dq, dk and dv move and compute: whole tiles, padding included.

    There are seven products: S, dP and dQ in the first launch, S, dP, dV and dK in the second. If dk and dv take a
    launch each, S is computed three times. In float32 the first launch walks the keys twice: nine products. A joint
    launch computes five.
    """
    if walked := walked_of(problem, config):
        return _one_side(problem, gpu, config, walked)
    zeros = [ZEROS] if problem.packed else []
    if config.joint:
        return in_turn([*zeros, _joint(problem, gpu, config.dq)], workspace_bytes=0)
    rows = problem.rows * problem.num_heads_q
    parts = [*zeros, _of_queries(problem, gpu, config.dq)]
    for products, repeats in LAUNCHES_OF_KEYS[config.split_dkv]:
        parts.append(_of_keys(problem, gpu, config.dkv, products, repeats))
    return in_turn(parts, workspace_bytes=8 * rows)


def cost_of_bias(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launch of a bias's gradient moves and computes: S and dP again, for each cell of the bias. It
    includes the addition of its parts."""
    assert problem.bias_shape is not None
    tile, widths = config.dq, total_widths(problem, gpu, config.dq.block_m)
    walk = of_queries(problem, tile.block_m, tile.block_n, widths)
    batch, heads, rows, keys = problem.bias_shape
    cells = batch * heads * rows * keys
    parts = parts_of_bias(problem, gpu, config)
    if config.joint:  # the launch adds up dS in registers
        sums = 4 * cells * parts if parts > 1 else 0
        written = cells * bytes_per_score(problem)
        return Cost(0, 0, 0, sums, written + sums, first_bytes=written, scratch_bytes=2 * sums, launches=int(parts > 1))
    blocks = parts * batch * heads * -(-rows // tile.block_m) * -(-keys // tile.block_n)
    flops, sums = walk.repeated_flops, 4 * cells * parts if parts > 1 else 0
    return replace(
        _with_tile(walk, problem, gpu, tile, False),
        blocks=blocks,
        items=blocks,
        longest=0,
        flops=flops,
        read_bytes=walk.read_bytes + sums,
        scratch_bytes=walk.scratch_bytes + sums,
        write_bytes=cells * bytes_per_score(problem) + sums,
        first_bytes=walk.first_bytes + cells * bytes_per_score(problem),
    )


def _joint(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> Cost:
    """Returns the cost of the launch of every gradient, which reads and writes rows once and no row of padding."""
    widths = total_widths(problem, gpu, tile.block_m)
    walk = of_keys(problem, tile.block_m, tile.block_n, widths)
    size, rows, keys = DTYPE_BYTES[problem.dtype], problem.rows * problem.num_heads_q, keys_of(problem)
    width, group = problem.head_dim + problem.head_dim_v, problem.num_heads_q // problem.num_heads_kv
    cells = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k * bytes_per_score(problem)
    written = size * (rows * problem.head_dim + keys * width)
    once = size * (rows + keys) * width + written
    return replace(
        _with_tile(walk, problem, gpu, tile, True),
        flops=walk.flops + 2 * walk.steps * tile.block_m * tile.block_n * widths[0],
        read_bytes=size * (rows + group * keys) * width + cells,
        write_bytes=written,
        first_bytes=once + min(cells, cell_bytes(problem)),
        smem_bytes=smem_of_joint(problem, gpu, tile),
        smem_margin=0,
        far=1.0,
        registers=_registers_of_joint(problem, gpu, tile),
        loop="joint" if reads_shared_memory(gpu, tile.block_m) else "joint mma",
    )


def _one_side(problem: AttentionProblem, gpu: Gpu, config: Config, walked: str) -> Cost:
    """Returns the cost of the joint launch that walks keys or queries, and of the addition of the parts of what it
    holds. It reads and writes what it walks once; each block reads what it holds."""
    tile, splits, size = config.dq, config.splits, DTYPE_BYTES[problem.dtype]
    widths = total_widths(problem, gpu, tile.block_n)
    walk = of_keys(problem, tile.block_m, tile.block_n, widths)
    tiles = -(-problem.seqlen_q // tile.block_m) * -(-problem.seqlen_k // tile.block_n)
    steps = tiles * problem.batch * problem.num_heads_q  # also of tiles that a band hides
    scores = steps * tile.block_m * tile.block_n
    rows, keys = problem.rows * problem.num_heads_q, keys_of(problem)
    width, width_v = problem.head_dim + problem.head_dim_v, problem.head_dim_v
    sides = (rows * (width + width_v), rows * problem.head_dim), (keys * width, keys * width)
    (held, held_gradients), (others, gradients) = sides if walked == "keys" else sides[::-1]
    parts = 4 * splits * held_gradients if splits > 1 else 0
    cells = scores * bytes_per_score(problem)
    written = size * gradients + (parts or size * held_gradients)
    blocks = splits * problem.batch * problem.num_heads_kv
    smem = smem_of_one_side(problem, gpu, tile, walked)
    main = replace(
        _with_tile(walk, problem, gpu, tile, True),
        blocks=blocks,
        items=blocks,
        longest=0,
        order=(),
        steps=steps,
        flops=2 * scores * (3 * widths[0] + 2 * widths[1]),
        exponentials=scores,
        read_bytes=size * (splits * held + others) + 8 * rows + cells,
        write_bytes=written,
        scratch_bytes=parts,
        first_bytes=size * (held + others + gradients) + 4 * rows + min(cells, cell_bytes(problem)),
        walked_bytes=size * others // max(1, problem.batch * problem.num_heads_kv),
        smem_bytes=smem,
        smem_margin=0,
        registers=_registers_of_one_side(gpu, tile, widths, walked),
        loop=f"walks {walked}",
    )
    if not parts:
        return in_turn([main], workspace_bytes=0)
    count = -(-held_gradients // PARTS_AT_ONCE)
    added = of_rows(count, parts, size * held_gradients, parts, 128)
    return in_turn([main, added], workspace_bytes=parts)


def _of_queries(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> Cost:
    """Returns `cost` of the launch that owns queries. In float32 it walks the keys twice, and computes S and dP each
    time."""
    widths = total_widths(problem, gpu, tile.block_m)
    walks = 2 if problem.dtype == "float32" else 1
    walk = of_queries(problem, tile.block_m, tile.block_n, widths, walks)
    out = 0 if walks == 2 else problem.rows * problem.num_heads_q * problem.head_dim_v * 2  # delta is computed from it
    walk = replace(walk, read_bytes=walk.read_bytes + out, first_bytes=walk.first_bytes + out)
    if problem.packed or problem.has_band:
        last_first = problem.causal is not None or problem.window_size[1] >= 0
        order = launch_order(problem, tile.block_m, tile.block_n, splits=1, last_first=last_first)
        walk = replace(walk, order=tuple((tuple(walks * n for n in steps), times) for steps, times in order))
    return _with_tile(walk, problem, gpu, tile, False)


def _of_keys(
    problem: AttentionProblem, gpu: Gpu, tile: Tile, products: tuple[int, int], repeats: tuple[int, int]
) -> Cost:
    """Returns `cost` of a launch that owns keys."""
    widths = total_widths(problem, gpu, tile.block_n)
    walk = of_keys(problem, tile.block_m, tile.block_n, widths, products, repeats)
    if problem.packed or problem.has_band:
        walk = replace(walk, order=launch_order_by_keys(problem, tile.block_m, tile.block_n))
    return _with_tile(walk, problem, gpu, tile, True)


def _with_tile(walk: Cost, problem: AttentionProblem, gpu: Gpu, tile: Tile, owns_keys: bool) -> Cost:
    """Returns the cost of a launch with the SM resources of its tile."""
    owned, walked = (tile.block_n, tile.block_m) if owns_keys else (tile.block_m, tile.block_n)
    widths = total_widths(problem, gpu, owned)
    threads = tile.num_warps * gpu.warp_size
    split: dict[str, Any] = {}
    multiply_adds = problem.dtype == "float32" and arithmetic_of(problem, gpu) == "ieee"
    if multiply_adds:
        # Two products sum over the columns of a tile, and the others over its walked rows.
        shapes = [(owned, walked, width) for width in widths] + [(owned, width, walked) for width in widths]
        of_step = multiply_add_bytes(shapes if owns_keys else shapes[:3], threads)
        split["operand_bytes"] = int(walk.steps * of_step)
    else:
        scores = tile.block_m * tile.block_n
        elements = walk.steps * ((2 if owns_keys else 1) * (scores + walked * sum(widths)))
        split["conversions"] = conversions(problem, gpu, elements, owned, tile.num_warps)
    smem = smem_of_tile(problem, gpu, tile, owns_keys)
    in_use = smem if gpu.vendor == "amd" else min(smem, smem_in_use(problem, gpu, tile, owns_keys))
    return replace(
        walk,
        smem_bytes=smem,
        smem_margin=smem - in_use,
        far=waits_for_memory(tile.num_stages),
        threads=threads,
        registers=_registers(problem, gpu, tile, owns_keys),
        loop=_loop(problem, multiply_adds, reads_shared_memory(gpu, owned)),
        **split,
    )


def _registers(problem: AttentionProblem, gpu: Gpu, tile: Tile, owns_keys: bool) -> int:
    """Returns approximately the registers of a thread: gradients, S and dP of its rows in float32, P or dS in half of
    that, and some forty more. In float32, with a bias, and on GPUs whose matrix units read operands from registers,
    operands pass through registers too: all registers are in use."""
    reads_smem = gpu.capability in WGMMA_OR_TCGEN05 or gpu.vendor == "amd"
    if problem.dtype == "float32" or not reads_smem or bytes_per_score(problem):
        return gpu.registers_per_thread or 255
    owned = tile.block_n if owns_keys else tile.block_m
    block_d, block_dv = total_widths(problem, gpu, owned)
    elements = owned * (block_d + (block_dv if owns_keys else 0)) + tile.block_m * tile.block_n * 5 // 2
    return min(gpu.registers_per_thread or 255, 40 + elements // (tile.num_warps * gpu.warp_size))


def _registers_of_joint(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> int:
    """Returns approximately the registers of a thread of the joint launch, from what sm_90 compiles to: some forty,
    scores, parts of the operands, and addresses of a mask's or bias's cells. A loop over heads takes all."""
    limit = gpu.registers_per_thread or 255
    if problem.num_heads_q > problem.num_heads_kv:
        return limit
    elements = (tile.block_m + tile.block_n) * sum(total_widths(problem, gpu, tile.block_m))
    of_block = 1.5 * tile.block_m * tile.block_n + 0.375 * elements
    of_cells = 40 if bytes_per_score(problem) else 0
    return min(limit, 40 + of_cells + int(of_block) // (tile.num_warps * gpu.warp_size))


def _registers_of_one_side(gpu: Gpu, tile: Tile, widths: tuple[int, int], walked: str) -> int:
    """Returns approximately the registers of a thread of the joint launch that walks keys or queries, from what sm_90
    compiles to: some sixty, scores, the gradients of what the block holds, and one of what it walks."""
    of_rows, of_keys = tile.block_m * widths[0], tile.block_n * sum(widths)
    gradients = of_rows + of_keys // 2 if walked == "keys" else of_keys + of_rows
    elements = 5 * tile.block_m * tile.block_n // 2 + gradients
    return min(gpu.registers_per_thread or 255, 60 + 6 * elements // (5 * tile.num_warps * gpu.warp_size))


def _loop(problem: AttentionProblem, multiply_adds: bool, reads_shared: bool) -> str:
    """Returns `Cost.loop`: separate names for float32, whose parts reach a unit that reads shared memory otherwise than
    one that reads registers; for tiles of 256 columns, for a mask or bias, and for rows that do not start at multiples
    of 32 bytes, whose loads are narrower."""
    if problem.dtype == "float32":
        return "multiply-adds" if multiply_adds else "float32 shared" if reads_shared else "float32"
    if bytes_per_score(problem):
        return "cells"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return "wide"
    return ODD_ROWS if odd_rows(problem) else ""
