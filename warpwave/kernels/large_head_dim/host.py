"""FlashAttention for large heads in portable Triton: head_dim above 256 in pieces, keys split if rows are few.

A program owns BLOCK_M rows and some or all columns of v. For each tile of keys it sums the scores over pieces of
head_dim, takes one step of the online softmax, and updates one accumulator for each piece of v:

    S = sum_c Q_c K_c^T;   P = softmax step of S;   acc_j = alpha * acc_j + P V_j;   out_j = acc_j / l

The query heads that read one kv head share a tile, so a decode step reads K and V once for all of them. If v is the
first columns of k, one tensor as in a latent cache, their tiles are read once for both products. If few rows leave the
GPU idle, keys are split over blocks, and kernels/partials.py merges their states.

Dao, "FlashAttention-2" (2023), algorithm 1; Dao et al., "Flash-Decoding for long-context inference" (2023); latent
caches are DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

Bound: L2 and shared memory. The accumulator, BLOCK_M x head_dim_v float32, must fit the registers of a block. This
limits the number of rows that share each read of K and V. It adds heads of any width to split_kv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import partials
from warpwave.kernels.arguments import (
    SWIZZLE_WIDTH,
    WGMMA_ROWS,
    Results,
    Run,
    allocator,
    band_constants,
    broadcast_strides,
    dot_precision,
    feature_constants,
    lse_strides,
    padded,
    slope_strides,
    split_operand,
    straightener,
    token_strides,
    window,
)
from warpwave.kernels.cost import (
    ODD_ROWS,
    Cost,
    conversions,
    launch_order,
    merging,
    odd_rows,
    waits_for_memory,
    walk,
)
from warpwave.kernels.large_head_dim import latent_host as latent
from warpwave.kernels.large_head_dim.device import large_head_dim_kernel
from warpwave.problem import DTYPE_BYTES, AttentionProblem, CachedOperands
from warpwave.runtime import launch

NAME = "large_head_dim"
NEEDS_GPU = True
TABLES_END = CachedOperands._fields.index("rows") + 1  # the factors after the tables belong to caches it refuses


@dataclass(frozen=True)
class Config:
    """Tile shape, launch shape, and how programs divide the columns of v and the keys.

    Args:
        block_m: rows of a program, a row being one query of one head; a power of two, at least 16.
        block_n: keys per step, a power of two, at least 16.
        block_d: elements of head_dim that a product sums over, a power of two, at least 16; at least 64 with 64 or more
            rows, so that all tiles of Hopper's matrix unit have one swizzle (reason: `arguments.tile_widths`).
        v_parts: programs that divide the columns of v. Each recomputes all scores, so a second one adds
            `head_dim / (head_dim + head_dim_v)` of the work and halves the accumulator.
        num_splits: programs that divide the keys.
        q_resident: whether q is read once and kept in shared memory (or registers), and pieces of k are prefetched with
            those of v. Otherwise pieces of q and k are read together for every tile, which takes little memory.
        num_warps: warps of a program, a power of two.
        num_stages: steps in flight.
        by_map: on Hopper, run a decode step on a latent cache by tensor maps and wgmma (latent_device.py), which has
            its own tiles and warps. If v turns out not to be part of k, or maps cannot describe a tensor, this has no
            effect.
    """

    block_m: int
    block_n: int
    block_d: int
    v_parts: int
    num_splits: int
    q_resident: bool
    num_warps: int
    num_stages: int
    by_map: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_m", 16), ("block_n", 16), ("block_d", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, at least {least}")
        for name in ("v_parts", "num_splits", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.block_m >= WGMMA_ROWS and self.block_d < SWIZZLE_WIDTH:
            raise ValueError(
                f"block_d is {self.block_d} beside block_m {self.block_m}; from {WGMMA_ROWS} rows on it must be at "
                f"least {SWIZZLE_WIDTH}"
            )


# Host -----------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    allocate, straight, device = allocator(problem, operands.q), straightener(operands), operands.q.device
    gpu = current_gpu(device)
    bound: dict[bool, tuple[int, list[Callable[..., None]]]] = {}

    def launchers(operands: Any, out: torch.Tensor | None) -> tuple[int, list[Callable[..., None]]]:
        # Whether k and v are one tensor is not part of their layout, so every call checks it.
        one_tensor = latent.is_one_tensor(operands)
        if one_tensor not in bound:
            given = straight(operands)
            taken = config if latent.takes(problem, gpu, given) else _by_pointers(problem, gpu, config)
            launches = _specify(problem, gpu, given, *allocate(out), taken)
            bound[one_tensor] = taken.num_splits, [launch.bind(spec, takes) for spec, takes in launches]
        return bound[one_tensor]

    launchers(operands, out)

    def run(operands: Any, out: torch.Tensor | None = None) -> Results:
        operands = straight(operands)
        num_splits, (attend, *merge) = launchers(operands, out)
        out, lse = allocate(out)
        acc, state = partials.allocate(problem, num_splits, device) if num_splits > 1 else (None, None)
        attend(*operands[:3], out, lse, acc, state, *_beyond(operands))
        for launch_merge in merge:
            launch_merge(acc, state, out, lse, operands.sinks)
        return out, lse

    return run


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Any, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> tuple[launch.Launch, ...]:
    """Returns the launch, and the merge if keys are split, from tensors that may be without memory."""
    return tuple(spec for spec, _ in _specify(problem, gpu, operands, out, lse, config))


def _specify(
    problem: AttentionProblem, gpu: Gpu, operands: Any, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> list[tuple[launch.Launch, latent.Takes]]:
    """Returns each launch, and the positions of its tensors among the arguments it is given, None if they are the
    same."""
    acc = state = None
    by_map, merge = config.by_map and latent.takes(problem, gpu, operands), list[tuple[launch.Launch, latent.Takes]]()
    if config.num_splits > 1:
        acc, state = partials.allocate(problem, config.num_splits, out.device)
        specify_merge = latent.specify_merge if by_map else _merge
        merge = [(specify_merge(problem, config.num_splits, acc, state, out, lse, operands.sinks), None)]
    if by_map:
        arguments = (*operands[:3], out, lse, acc, state, *_beyond(operands))
        return [latent.specify(problem, gpu, operands, arguments, config.num_splits), *merge]
    heads = _heads_together(problem)
    units = problem.num_heads_q // heads
    attend = launch.Launch(
        kernel=large_head_dim_kernel,
        grid=_blocks(problem, config),
        tensors=(*operands[:3], out, lse, acc, state, *_beyond(operands)),
        scalars=[
            *token_strides(problem, operands.q),
            # Axes of a pool of pages: (page, token in the page, head, element).
            *(n for t in operands[1:3] for n in (t.stride() if problem.page_size else token_strides(problem, t))),
            *token_strides(problem, out)[:-1],
            *lse_strides(problem),
            *broadcast_strides(operands.mask),
            *broadcast_strides(operands.bias),
            *slope_strides(operands.alibi_slopes),
            problem.seqlen_q,
            problem.seqlen_k,
            problem.total_q,
            problem.total_k,
            units,
            problem.num_heads_q // problem.num_heads_kv,
            *window(problem),
            config.num_splits,
            problem.rows * problem.num_heads_q,
            *_pages(problem, operands),
            problem.softmax_scale,
            problem.softcap,
        ],
        constants=_constants(problem, gpu, config, heads, operands),
        # No fused multiply-adds: a score must be the same number as the maximum and as the minuend, so that the largest
        # probability is exactly 1.
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False},
    )
    return [(attend, None), *merge]


def _merge(
    problem: AttentionProblem, num_splits: int, acc: Any, state: Any, out: Any, lse: Any, sinks: Any
) -> launch.Launch:
    """Returns the merge, with the number of warps that registers allow for a row of this width."""
    spec = partials.specify_merge(problem, num_splits, acc, state, out, lse, sinks)
    width = padded(problem.head_dim_v)
    return spec._replace(options=dict(spec.options) | {"num_warps": min(8, max(4, width // 128))})


def _beyond(operands: Any) -> tuple[Any, ...]:
    """Returns the tensors other than q, k and v, with the tables of a cache if there is one."""
    return (*operands[3:TABLES_END], *[None] * (TABLES_END - len(operands)))


def _pages(problem: AttentionProblem, operands: Any) -> tuple[int, int, int]:
    """Returns the stride and rows of the page table, and the pages of the pool; zeros without a cache."""
    if not problem.page_size:
        return (0, 0, 0)
    return (operands.page_table.stride(0), operands.k.shape[0], operands.page_table.shape[0])


def _constants(
    problem: AttentionProblem, gpu: Gpu, config: Config, heads: int, operands: Any
) -> dict[str, int | bool | str]:
    """Returns the compile-time arguments of the kernel, by name."""
    block_v, v_pieces = _columns(problem, config)
    in_k = latent.is_one_tensor(operands) and config.q_resident and config.v_parts == 1 and block_v == config.block_d
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "BLOCK_V": block_v,
        "V_PIECES": v_pieces,
        "V_PARTS": config.v_parts,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "HEADS": heads,
        "Q_RESIDENT": config.q_resident,
        "V_IN_K": in_k,
        "SPLIT": config.num_splits > 1,
        **band_constants(problem),
        **feature_constants(problem),
        "IS_VARLEN": problem.packed,
        "PAGE_SIZE": problem.page_size,
        "HAS_ROWS": getattr(operands, "rows", None) is not None,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "IS_NVIDIA": gpu.vendor == "nvidia",
    }


def _heads_together(problem: AttentionProblem) -> int:
    """Returns the query heads whose rows share tiles: those that read one kv head. If heads may see different keys it
    is 1, because a NaN that one head sees would reach another."""
    for shape in (problem.mask_shape, problem.bias_shape):
        if shape is not None and shape[1] > 1:
            return 1
    return problem.num_heads_q // problem.num_heads_kv


def piece_of(width: int, most: int) -> int:
    """Returns the power of two, from 64 to `most`, whose multiples waste least of `width`: 128 for 384 and 640, 64 for
    320 and 576; the larger one if two are equal."""
    sizes = [size for size in (64, 128, 256, 512) if size <= most]
    return min(reversed(sizes), key=lambda size: -(-width // size) * size)


def _columns(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Returns (width of a piece of v, pieces) of a program: the width of q's and k's pieces if that fits, because v may
    be the same tensor."""
    width = -(-problem.head_dim_v // config.v_parts)
    piece = min(padded(width), config.block_d if config.q_resident else piece_of(width, 512))
    if config.block_m >= WGMMA_ROWS:
        piece = max(piece, SWIZZLE_WIDTH)
    return piece, -(-width // piece)


def _row_tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of row tiles of one sequence, summed over all head groups."""
    heads = _heads_together(problem)
    return -(-problem.seqlen_q * heads // config.block_m) * (problem.num_heads_q // heads)


def _blocks(problem: AttentionProblem, config: Config) -> int:
    return _row_tiles(problem, config) * problem.batch * config.v_parts * config.num_splits


# What it costs --------------------------------------------------------------------------------------------------------

MAX_COLUMNS = 512  # columns of v per program: for 64 rows they take half of the registers of an SM


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    if config.by_map and not latent.cannot(problem, gpu):
        return latent.smem_bytes(problem, gpu)
    size = DTYPE_BYTES[problem.dtype]
    block_v, v_pieces = _columns(problem, config)
    columns, width = block_v * v_pieces, -(-problem.head_dim // config.block_d) * config.block_d
    scores = 4 * config.block_m * config.block_n  # exchanged between warps, or stored as probabilities
    if problem.mask_shape is not None or problem.bias_shape is not None:
        scores += config.num_stages * config.block_m * config.block_n * 5
    split = split_operand(problem, gpu)
    stages = max(1, config.num_stages - 1) if gpu.vendor == "amd" and gpu.arch != "gfx950" else config.num_stages
    if gpu.vendor == "nvidia" and config.q_resident and config.block_m < 64:
        # Products of few rows take their operands from registers, so their buffers are free for the next step.
        stages = max(1, config.num_stages - 1)
    if config.q_resident:
        elements = config.block_m * width + stages * config.block_n * (width + columns)
        return size * split * elements + scores + 1024
    pieces = stages * split * (config.block_m + config.block_n) * config.block_d
    return size * (pieces + split * config.block_n * columns) + scores + 1024


def _registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns approximately the registers of a thread: accumulator and scores of its rows, values in flight, and some
    forty more."""
    threads = max(1, config.num_warps * gpu.warp_size)
    block_v, v_pieces = _columns(problem, config)
    elements = config.block_m * (block_v * v_pieces + 2 * config.block_n)
    if not config.q_resident:
        elements += config.block_n * block_v * v_pieces * DTYPE_BYTES[problem.dtype] // 4
    return 40 + elements // threads


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute: whole tiles, padding included; q once for each tile of keys if it is
    not resident, k once for each part of the columns of v."""
    size, heads = DTYPE_BYTES[problem.dtype], _heads_together(problem)
    block_v, v_pieces = _columns(problem, config)
    columns, width = block_v * v_pieces * config.v_parts, -(-problem.head_dim // config.block_d) * config.block_d
    of_tiles = walk(problem, config.block_m, config.block_n, heads)
    visited, longest = of_tiles.tiles, of_tiles.longest
    scores = visited * config.block_m * config.block_n * config.v_parts
    rows = problem.rows * problem.num_heads_q
    resident = rows if config.q_resident else visited * config.block_m
    beside = (0 if problem.mask_shape is None else 1) + (
        0 if problem.bias_shape is None else DTYPE_BYTES[problem.bias_dtype or problem.dtype]
    )
    out_bytes = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    workspace = partials.workspace_bytes(problem, config.num_splits) if config.num_splits > 1 else 0
    multiply_adds = " multiply-adds" if size == 4 and dot_precision(problem, gpu) == "ieee" else ""
    # Without q resident a step waits for V and for each piece of q and k; all stages but one are in flight.
    waits = 1 if config.q_resident else -(-(1 + width // config.block_d) // max(1, config.num_stages - 1))
    float32 = multiply_adds or (" float32" if size == 4 else "")
    split = config.block_n * (width + columns // config.v_parts) + config.block_m * config.block_n
    split += 0 if config.q_resident else config.block_m * width
    main = Cost(
        blocks=_blocks(problem, config),
        flops=2 * (scores * width + visited * config.block_m * config.block_n * columns),
        exponentials=scores,
        read_bytes=size * config.v_parts * (resident + visited * config.block_n) * problem.head_dim
        + size * visited * config.block_n * problem.head_dim_v
        + scores * beside,
        write_bytes=workspace or out_bytes,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=workspace,
        steps=visited * config.v_parts * waits,
        longest=-(-longest // config.num_splits) * waits,
        threads=config.num_warps * gpu.warp_size,
        # In float32, parts of operands in flight.
        registers=min(
            gpu.registers_per_thread or 255,
            _registers(problem, gpu, config) + (64 if size == 4 and not multiply_adds else 0),
        ),
        scratch_bytes=workspace,
        smem_margin=4 * config.block_m * config.block_n + 1024,
        order=launch_order(problem, config.block_m, config.block_n, heads, config.num_splits * config.v_parts, True),
        loop=_loop(problem, config, float32),
        conversions=conversions(problem, gpu, visited * config.v_parts * split, config.block_m, config.num_warps),
        cut=of_tiles.cut * config.v_parts,
        items=of_tiles.items * config.v_parts * config.num_splits,
        # In pieces q comes with k, from L2.
        far=waits_for_memory(config.num_stages) * (1.0 if config.q_resident else 0.6),
    )
    if not workspace:
        return main
    merge = merging(rows, config.num_splits, workspace, out_bytes)
    return replace(
        main,
        blocks=main.blocks + rows,
        exponentials=main.exponentials + merge.exponentials,
        read_bytes=main.read_bytes + workspace,
        write_bytes=workspace + out_bytes,
        scratch_bytes=2 * workspace,
        launches=2,
        parts=(replace(main, workspace_bytes=0), merge),
    )


def _loop(problem: AttentionProblem, config: Config, float32: str) -> str:
    """Returns `Cost.loop`: separate names for Q in pieces, by arithmetic; for few rows; and for rows that pointers load
    in narrower accesses."""
    if not config.q_resident:
        return f"pieces{float32}"
    if config.block_m <= 32:
        return "few rows"
    return ODD_ROWS if odd_rows(problem) else ""


# Configs --------------------------------------------------------------------------------------------------------------

FILLED = 132  # blocks that fill a GPU whose number of multiprocessors is unknown
TENSOR_MEMORY_COLUMNS = 512
MAX_SPLITS_BYTES = 64 * 1024**2  # bytes of states that await their merge: they should stay in L2


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory and registers."""
    fitting = [c for c in _space(problem, gpu) if _fits(problem, gpu, c)]
    default = _default(problem, gpu)
    while not _fits(problem, gpu, default):
        smaller = _smaller(default)
        if smaller == default:
            return fitting
        default = smaller
    return [default, *(c for c in fitting if c != default)]


def _fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    if gpu.capability in (100, 103) and config.q_resident and config.block_m >= 64:
        # Accumulators and scores are in tensor memory, which has a fixed number of columns; above it, compilation
        # fails.
        block_v, v_pieces = _columns(problem, config)
        if block_v * v_pieces + config.block_n > TENSOR_MEMORY_COLUMNS:
            return False
    return smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes


def _smaller(config: Config) -> Config:
    """Returns the next config to try if one does not fit."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.q_resident:
        return replace(config, q_resident=False, block_d=min(64, config.block_d))
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    if config.block_m > 16:
        return replace(config, block_m=16)
    return replace(config, block_d=max(16, config.block_d // 2))


def _space(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns configs with two values of v_parts, both ways to read q, and the tiles that do not spill by the register
    estimate. num_splits is that of the default: it depends on the grid."""
    default, parts = _default(problem, gpu), column_parts(problem, gpu)
    candidates = [
        Config(block_m, block_n, block_d, v_parts, default.num_splits, q_resident, num_warps, num_stages)
        for block_m in (16, 32, 64, 128)
        for block_n in (16, 32, 64)
        for q_resident, block_d in ((True, _block_d(problem, block_m, 128)), (False, _block_d(problem, block_m, 64)))
        for v_parts in dict.fromkeys((parts, 2 * parts if problem.head_dim_v > 128 * parts else parts))
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3)
        # Two warpgroups on 64 rows divide the keys between them: 16 each are the fewest that gave correct results.
        if not (gpu.capability == 90 and (block_m, num_warps) == (64, 8) and block_n == 16)
        if not (gpu.capability == 90 and (block_m, num_warps) == (64, 8) and problem.dtype == "float32")
    ]
    limit = gpu.registers_per_thread or 255
    return [c for c in candidates if _registers(problem, gpu, c) <= limit]


def _block_d(problem: AttentionProblem, block_m: int, most: int) -> int:
    piece = piece_of(problem.head_dim, most)
    return piece if block_m >= WGMMA_ROWS else min(padded(problem.head_dim), piece)


def column_parts(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the number of programs that divide the columns of v: as few as registers allow."""
    most = MAX_COLUMNS
    if gpu.vendor == "amd" and (not gpu.arch.startswith("gfx9") or problem.dtype == "float32"):
        most = MAX_COLUMNS // 2
    return -(-problem.head_dim_v // most)


def _by_pointers(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the replacement of a config if v is not part of k: for the default of latent caches, the default of other
    calls."""
    if config.by_map and config == _default(problem, gpu):
        return _default(problem, gpu, by_map=False)
    return replace(config, by_map=False)


def _default(problem: AttentionProblem, gpu: Gpu, by_map: bool = True) -> Config:
    """Returns the widest tile that spills on no target (tests/compile); on Hopper the fastest one measured."""
    if by_map and latent.is_latent(problem) and not latent.cannot(problem, gpu):
        return Config(16, 64, 64, 1, latent.num_splits(problem, gpu), True, 4, 2, True)
    rows, parts = problem.seqlen_q * _heads_together(problem), column_parts(problem, gpu)
    rdna = gpu.vendor == "amd" and not gpu.arch.startswith("gfx9")
    wide = gpu.vendor != "amd" and gpu.smem_per_block_bytes >= 160 * 1024
    if gpu.vendor == "interpreter":  # runs one program after another: fewer are faster
        config = Config(64, 64, _block_d(problem, 64, 128), parts, 1, problem.head_dim <= 512, 4, 1)
    elif problem.dtype == "float32":
        stages = 1 if gpu.vendor == "amd" or dot_precision(problem, gpu) == "ieee" else 2
        config = Config(16 if rows <= 16 else 32, 16, 32, parts, 1, False, 8, stages)
    elif rdna:
        config = Config(16 if rows <= 16 else 32, 16, 32, parts, 1, False, 8, 1)
    elif rows <= 16:
        # K and V are read once for at most 16 rows, so the bytes in flight decide.
        config = Config(16, 32 if wide else 16, _block_d(problem, 16, 64), parts, 1, problem.head_dim <= 1024, 4, 2)
        if latent.takes_longer_tiles(problem, gpu):
            config = replace(config, block_n=64)
    elif gpu.vendor == "amd":
        config = Config(64, 32, _block_d(problem, 64, 64), parts, 1, False, 4, 2)
    else:
        config = Config(64, 32, _block_d(problem, 64, 128), parts, 1, True, 8, 2)
        if gpu.capability != 90 or not _fits(problem, gpu, config):
            config = replace(config, q_resident=False, block_d=_block_d(problem, 64, 64))
            whole = problem.head_dim % 64 == 0 and problem.head_dim_v % 256 == 0
            if gpu.capability == 90 and whole and not _beside(problem):
                # 128 rows share each read, for 256 columns a program: 2.4 ms at head_dim 1024, where 64 rows of 512
                # columns took 6.2 (H200, 2,048 queries, 16 heads).
                config = replace(config, block_m=128, block_n=64, v_parts=-(-problem.head_dim_v // 256), num_stages=3)
        if gpu.capability != 90:
            config = _lighter(problem, config)
    return replace(config, num_splits=_num_splits(problem, gpu, config))


def _lighter(problem: AttentionProblem, config: Config) -> Config:
    """Returns the config with fewer keys or rows if other data takes the tile's registers: addresses of rows that are
    read one element at a time, of many narrow pieces, of a mask or bias, or of packed sequences."""
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return replace(config, block_m=32)
    ragged = problem.head_dim % 128 or -(-problem.head_dim_v // config.v_parts) % 128
    return replace(config, block_n=16) if _beside(problem) or ragged else config


def _beside(problem: AttentionProblem) -> bool:
    """Returns whether data other than the tile takes its registers."""
    return problem.packed or problem.mask_shape is not None or problem.bias_shape is not None


def _blocks_of_sm(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns how many blocks of a few rows a Hopper multiprocessor runs at once: two if shared memory holds both.

    While one block waits for a tile of keys, the other multiplies: 128 blocks read 3.3 to 3.6 TB/s of an H200's 4.8,
    256 blocks 4.4 to 4.5 (head_dim 512, 16 heads on 4).
    """
    if gpu.capability != 90 or config.block_m > 16 or not config.q_resident:
        return 1
    block_v, v_pieces = _columns(problem, config)
    width = -(-problem.head_dim // config.block_d) * config.block_d
    values = 0 if latent.is_latent(problem) else block_v * v_pieces  # in a latent cache they are part of the tile of k
    tiles = max(1, config.num_stages - 1) * config.block_n * (width + values)
    taken = DTYPE_BYTES[problem.dtype] * (config.block_m * width + tiles) + 4096
    return 2 if 2 * taken <= gpu.smem_per_block_bytes else 1


def _num_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the number of splits with which the grid fills the GPU once; each has at least two tiles of keys. If a
    result must not depend on the rest of the batch, it is the number for a sequence alone."""
    others = 1 if problem.batch_invariant else max(1, problem.batch)
    blocks = _row_tiles(problem, config) * config.v_parts * others
    places = 2 if gpu.vendor == "interpreter" else (gpu.num_sms or FILLED) * _blocks_of_sm(problem, gpu, config)
    wanted = places // max(1, blocks)
    bytes_each = max(1, partials.workspace_bytes(problem, 1) * others // max(1, problem.batch))
    return max(1, min(wanted, problem.seqlen_k // (2 * config.block_n), MAX_SPLITS_BYTES // bytes_each))
