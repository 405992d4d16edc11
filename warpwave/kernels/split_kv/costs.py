"""The bytes that `split_kv` moves and the operations that it computes for one problem."""

from __future__ import annotations

from warpwave.gpu import Gpu
from warpwave.kernels import partials
from warpwave.kernels.arguments import dot_precision, padded
from warpwave.kernels.cost import (
    PARTS,
    Cost,
    bytes_per_score,
    conversions,
    launch_order,
    merging,
    waits_for_memory,
    with_merge,
)
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.kernels.split_kv.choice import rows_said
from warpwave.kernels.split_kv.config import (
    Config,
    may_map,
    num_parts,
    one_step,
    smem_bytes,
    smem_of_one_step,
    steps_over_keys,
    tiles,
)
from warpwave.kernels.split_kv.splits import choose_splits, scattered, smem_expected
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost: whole tiles, padding included; K and V once for each tile of rows; partial results written and
    read if keys are split."""
    size, parts = DTYPE_BYTES[problem.dtype], num_parts(config)
    of_tiles = steps_over_keys(problem, config)
    steps, longest = of_tiles.tiles, of_tiles.longest
    scores = steps * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    outputs = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    scratch = partials.workspace_bytes(problem, parts) if parts > 1 else 0
    of_key = problem.bytes_of_key + (8 if problem.kv_factors == "token" else 0)
    keys_read = steps * config.block_n * of_key
    table = 8 * steps * (config.block_n // min(problem.page_size, config.block_n)) if problem.page_size else 0
    attend = Cost(
        blocks=tiles(problem, config)
        * (problem.num_heads_q // problem.heads_together)
        * config.num_splits
        * problem.batch,
        flops=2 * scores * (padded(problem.head_dim) + padded(problem.head_dim_v)),
        exponentials=scores,
        read_bytes=rows * problem.head_dim * size + keys_read + table + scores * bytes_per_score(problem),
        write_bytes=scratch if parts > 1 else outputs,
        smem_bytes=(smem_of_one_step if one_step(problem, gpu, config) else smem_bytes)(problem, gpu, config),
        workspace_bytes=scratch,
        steps=steps,
        longest=-(-longest // config.num_splits),
        threads=few_rows.THREADS if config.roles else config.num_warps * gpu.warp_size,
        registers=_registers(problem, gpu, config),
        scratch_bytes=scratch,
        order=launch_order(problem, config.block_m, config.block_n, problem.heads_together, config.num_splits),
        cut=of_tiles.cut,
        far=waits_for_memory(config.num_stages) if config.block_m > 32 or size == 4 else 0.0,
        loop=_loop(problem, gpu, config),
        items=of_tiles.items * config.num_splits,
        conversions=conversions(
            problem,
            gpu,
            scores + steps * config.block_n * (padded(problem.head_dim) + padded(problem.head_dim_v)),
            config.block_m,
            config.num_warps,
        ),
        smem_margin=_smem_margin(problem, gpu, config),
        ahead=config.launched_ahead,
    )
    if parts == 1:
        return attend
    columns = partials.column_blocks(problem, parts)
    merge = merging(rows, parts, scratch, outputs, ahead=config.launched_ahead, column_blocks=columns)
    return with_merge(attend, merge)


def _loop(problem: AttentionProblem, gpu: Gpu, config: Config) -> str:
    """Returns `Cost.loop`: separate names for tiles of 256 columns, for few rows, for few rows in float32, and for
    multiply-adds by head_dim, as in flash_fwd."""
    if config.block_m > 32:
        return "wide" if padded(problem.head_dim_v) > 128 else ""
    if config.roles:
        return "few rows maps"
    if problem.dtype != "float32":
        ways = {"pages": scattered(problem, config), "maps": config.by_map and may_map(problem, gpu, config)}
        return " ".join(["few rows", *(name for name, there in ways.items() if there)])
    if dot_precision(problem, gpu) != "ieee":
        return "few rows float32"
    return f"few rows {'wide ' if padded(problem.head_dim) >= 128 else ''}multiply-adds"


def _smem_margin(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the bytes by which `smem_bytes` exceeds what sm_90 compiles to."""
    if problem.dtype == "float32":
        return 0
    if config.block_m < 64:
        return max(0, smem_bytes(problem, gpu, config) - smem_expected(problem, config))
    return (2 * config.block_n + 8 * config.num_warps) * config.block_m + 1024


def _registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns approximately the registers of a thread: output and scores of its rows in float32, probabilities, and
    some sixty more; more again if tiles of few rows load keys by maps or from pages (sm_90, compiled)."""
    if config.roles:
        return few_rows.registers(problem, gpu, config)
    threads = max(1, config.num_warps * gpu.warp_size)
    elements = config.block_m * (padded(problem.head_dim_v) + config.block_n * 3 // 2)
    if problem.dtype == "float32" and dot_precision(problem, gpu) != "ieee" and config.block_m < 64:
        # Every warp holds the parts of all rows of Q, and those of the keys in flight.
        parts = PARTS[dot_precision(problem, gpu)]
        elements += threads * (40 + parts * config.block_m * padded(problem.head_dim) // (2 * gpu.warp_size))
    beside = 40 if problem.dtype == "float32" else 60 if config.block_m > 32 else 85
    return min(gpu.registers_per_thread or 255, beside + elements // threads)


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns the rows that chose the config, and why it splits the keys as it does, for `explain`."""
    pieces = ""
    if config.pieces:
        pieces = (
            f" in whole pieces, at most {config.pieces}, which depend only on the keys, so that a sequence's "
            "bits do not depend on the batch"
        )
    rows, chosen = rows_said(problem, gpu, config), choose_splits(problem, gpu, config)
    if chosen.num_splits == config.num_splits:
        return [*rows, f"num_splits = {config.num_splits}{pieces}: {chosen.reason}"]
    given = f"num_splits = {config.num_splits}{pieces}, as given"
    return [*rows, f"{given}; {chosen.num_splits} by default: {chosen.reason}"]
