"""A config of `large_head_dim`, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.gpu import TCGEN05, WGMMA_ROWS, Gpu
from warpwave.kernels import rules
from warpwave.kernels.arguments import SWIZZLE_WIDTH, padded, split_operand
from warpwave.kernels.large_head_dim import latent_host as latent
from warpwave.problem import DTYPE_BYTES, AttentionProblem

TENSOR_MEMORY_COLUMNS = 512


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
        by_map: on Hopper, run a call on a latent cache by tensor maps and wgmma, which has its own tiles and warps:
            16 rows for one query a sequence (latent_device.py), or 64 (latent_rows_device.py). If v turns out not to be
            part of k, or maps cannot describe a tensor, this has no effect.
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
        sizes = {"block_m": 16, "block_n": 16, "block_d": 16, "num_warps": 1}
        rules.check_sizes(self, sizes, ("v_parts", "num_splits", "num_stages"))
        if self.block_m >= WGMMA_ROWS and self.block_d < SWIZZLE_WIDTH:
            raise ValueError(
                f"block_d is {self.block_d} and block_m {self.block_m}; from block_m {WGMMA_ROWS} on, block_d must be "
                f"at least {SWIZZLE_WIDTH}"
            )


# Sizes ----------------------------------------------------------------------------------------------------------------


def piece_of(width: int, most: int) -> int:
    """Returns the power of two, from 64 to `most`, whose multiples waste least of `width`: 128 for 384 and 640, 64 for
    320 and 576; the larger one if two are equal."""
    sizes = [size for size in (64, 128, 256, 512) if size <= most]
    return min(reversed(sizes), key=lambda size: -(-width // size) * size)


def columns_of(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Returns (width of a piece of v, pieces) of a program: the width of q's and k's pieces if that fits, because v may
    be the same tensor."""
    width = -(-problem.head_dim_v // config.v_parts)
    piece = min(padded(width), config.block_d if config.q_resident else piece_of(width, 512))
    if config.block_m >= WGMMA_ROWS:
        piece = max(piece, SWIZZLE_WIDTH)
    return piece, -(-width // piece)


def row_tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of row tiles of one sequence, summed over all head groups."""
    heads = problem.heads_together
    return -(-problem.seqlen_q * heads // config.block_m) * (problem.num_heads_q // heads)


def block_d_of(problem: AttentionProblem, block_m: int, most: int) -> int:
    """Returns the elements of head_dim that a product sums over, at most `most`."""
    piece = piece_of(problem.head_dim, most)
    return piece if block_m >= WGMMA_ROWS else min(padded(problem.head_dim), piece)


MAX_COLUMNS = 512  # columns of v per program: for 64 rows they take half of the registers of an SM


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    if config.by_map and not latent.cannot(problem, gpu, config.block_m):
        return latent.smem_bytes(problem, gpu, config.block_m)
    size = DTYPE_BYTES[problem.dtype]
    block_v, v_pieces = columns_of(problem, config)
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


def column_parts(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the number of programs that divide the columns of v: as few as registers allow."""
    most = MAX_COLUMNS
    if gpu.is_rdna or (gpu.is_cdna and problem.dtype == "float32"):
        most = MAX_COLUMNS // 2
    return -(-problem.head_dim_v // most)


def registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns approximately the registers of a thread: accumulator and scores of its rows, values in flight, and some
    forty more."""
    threads = max(1, config.num_warps * gpu.warp_size)
    block_v, v_pieces = columns_of(problem, config)
    elements = config.block_m * (block_v * v_pieces + 2 * config.block_n)
    if not config.q_resident:
        elements += config.block_n * block_v * v_pieces * DTYPE_BYTES[problem.dtype] // 4
    return 40 + elements // threads


def fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a config fits shared memory, and tensor memory where accumulators lie there."""
    if gpu.capability in TCGEN05 and config.q_resident and config.block_m >= 64:
        # Accumulators and scores are in tensor memory, which has a fixed number of columns; above it, compilation
        # fails.
        block_v, v_pieces = columns_of(problem, config)
        if block_v * v_pieces + config.block_n > TENSOR_MEMORY_COLUMNS:
            return False
    return smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes
