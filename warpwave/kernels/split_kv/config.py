"""A config of `split_kv`, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.gpu import Gpu, reads_shared_memory
from warpwave.kernels import rules
from warpwave.kernels.arguments import dot_precision, tile_widths
from warpwave.kernels.cost import Walk, bytes_per_score, walk
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind
from warpwave.runtime.triton_or_stub import INTERPRETED


@dataclass(frozen=True)
class Config:
    """Tile shape, launch shape, and how the keys are split.

    Args:
        block_m: rows of a tile (queries times the query heads that share tiles), a power of two, at least 16.
        block_n: keys per step, a power of two, at least 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight.
        num_splits: number of splits of the keys of a tile of rows; one block per split.
        pieces: partial results of a tile of rows; 0 for one per split. Otherwise its keys are cut into at most this
            many pieces of equal length. A split is a number of whole pieces, and each piece stores its own result, so
            sums and bits do not depend on the number of splits.
        by_map: load K and V of 16 bits by tensor maps (TMA, sm_90 or newer) if a tile lies in one page. Tiles at the
            edges of the visible keys, and tensors that no map can describe, are loaded by pointers.
        launched_ahead: start before the preceding launch in the stream ends, and wait in the kernel (sm_90 or newer).
        roles: warp-specialize on Hopper, for up to `block_m` rows in all, 16 or 32: one warp loads keys by tensor
            maps, one copy for each page of 16 keys or more, and a warpgroup multiplies them (few_rows_device.py).
            `num_stages` tiles of K and of V are in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    pieces: int = 0
    launched_ahead: bool = False
    by_map: bool = False
    roles: bool = False

    def __post_init__(self) -> None:
        rules.check_sizes(self, {"block_m": 16, "block_n": 16, "num_warps": 1}, ("num_stages", "num_splits"))
        if self.pieces < 0 or (self.pieces and self.pieces < max(2, self.num_splits)):
            raise ValueError(f"pieces is {self.pieces}; it must be 0, or at least 2 and num_splits = {self.num_splits}")
        sizes = self.block_m in few_rows.ROWS and 64 <= self.block_n <= 256
        if self.roles and not (sizes and (self.num_warps, self.pieces, self.by_map) == (4, 0, True)):
            raise ValueError(
                f"{self} has roles=True; this needs block_m 16 or 32, block_n 64, 128 or 256, num_warps 4, "
                "by_map=True and pieces 0"
            )


# Sizes ----------------------------------------------------------------------------------------------------------------


@by_kind
def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block that loads Q before its keys; tests compare it with what
    every target compiles to."""
    if config.roles:
        return few_rows.smem_bytes(problem, config.block_m, config.block_n, config.num_stages)
    size, arithmetic = DTYPE_BYTES[problem.dtype], dot_precision(problem, gpu)
    block_d, block_dv = tile_widths(problem, gpu, config.block_m)
    q = size * config.block_m * block_d
    p = size * config.block_m * config.block_n
    kv = config.block_n * (block_d * DTYPE_BYTES[problem.dtype_of_k] + block_dv * DTYPE_BYTES[problem.dtype_of_v])
    # Page ids of the next tile change layout. Barriers and reductions over warps take the rest.
    more = 1024 + (16 * config.block_n if problem.page_size else 0)
    more += 8 * config.block_m * config.num_warps
    if config.pieces or problem.batch_invariant:  # accumulators that the loop stores change layout in shared memory
        more += 4 * config.block_m * block_dv
    if problem.dtype_kv:  # the factors of keys in flight, and the largest weight of each row
        more += 16 * config.block_n * config.num_stages + 8 * config.block_m * config.num_warps
        if reads_shared_memory(gpu, config.block_m):  # K and V in 16 bits
            more += config.block_n * size * (block_d + block_dv)
    if problem.mask_shape is not None or problem.bias_shape is not None:
        kv += config.block_m * config.block_n * bytes_per_score(problem)
        p += size * config.block_n * block_dv  # V goes through registers, which clear what no row sees, and back
    if gpu.arch == "gfx950":
        return max(q, config.num_stages * kv * 17 // 16) + p + more
    if gpu.vendor == "amd":
        return max(q, max(1, config.num_stages - 1) * kv) + p + more
    if problem.dtype == "float32" and arithmetic != "ieee":
        return q + p + config.num_stages * kv + max(q, kv) + more  # the parts of an operand coexist
    if gpu.has_mma:
        return q + p + max(1, config.num_stages - 1) * kv + more  # a tile is in registers when the next one arrives
    return q + p + config.num_stages * kv + more


def tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the tiles of rows that the longest sequence has for the heads that share tiles."""
    return -(-problem.seqlen_q * problem.heads_together // config.block_m)


def num_parts(config: Config) -> int:
    """Returns the partial results of a tile of rows; more than one are merged."""
    return config.pieces or config.num_splits


def one_step(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a block loads Q together with its keys: a split has at most one tile of keys, and the buffers of
    both fit shared memory."""
    alone = config.pieces == 0 and not config.roles and problem.dtype != "float32"
    if not alone or config.num_stages == 1 or -(-problem.seqlen_k // config.block_n) > config.num_splits:
        return False
    return smem_of_one_step(problem, gpu, config) <= gpu.smem_per_block_bytes


@by_kind
def smem_of_one_step(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block that loads Q with its keys, in the loop: Triton gives it
    as many buffers as the keys."""
    q = DTYPE_BYTES[problem.dtype] * config.block_m * tile_widths(problem, gpu, config.block_m)[0]
    return smem_bytes(problem, gpu, config) + (config.num_stages - 1) * q


def steps_over_keys(problem: AttentionProblem, config: Config) -> Walk:
    """Counts the key steps of all tiles of rows, before the keys are split."""
    return walk(problem, config.block_m, config.block_n, problem.heads_together)


def longest_steps(problem: AttentionProblem, config: Config) -> int:
    """Counts the key steps of the tile of rows that sees most keys. Without a left window that is the last tile of the
    longest sequence, which sees keys from the first one on."""
    if problem.window_size[0] >= 0 or problem.lengths is not None or not problem.batch:
        return steps_over_keys(problem, config).longest
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if problem.packed:  # as in `AttentionProblem.items`, whose first sequence is the longest
        seqlen_q, seqlen_k = -(-problem.total_q // problem.batch), -(-problem.total_k // problem.batch)
    right = problem.window_size[1]
    if problem.causal is not None and problem.causal.alignment == "top_left":
        high = 0 if right < 0 else min(0, seqlen_k - seqlen_q + right)
        seqlen_k = min(seqlen_k, seqlen_q + high)
    return max(0, -(-seqlen_k // config.block_n)) if seqlen_q else 0


def may_be_launched_ahead(gpu: Gpu) -> bool:
    """Returns whether a launch on this GPU may start before the preceding one has ended."""
    return gpu.vendor == "nvidia" and gpu.capability >= 90


def is_launched_ahead(gpu: Gpu, config: Config) -> bool:
    """Returns whether the launches of a config begin before the preceding ones end."""
    return config.launched_ahead and may_be_launched_ahead(gpu)


def may_map(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether tensor maps can load this config's tiles of K and V, judging by shapes.

    A mask or a bias excludes them: it hides values that a map would load, and values that no row sees may be NaN.
    Tiles of 8-bit numbers were not tried.
    """
    return (
        (INTERPRETED or (gpu.vendor == "nvidia" and gpu.capability >= 90))
        and problem.dtype != "float32"
        and problem.dtype_kv is None
        and problem.mask_shape is None
        and problem.bias_shape is None
        and (config.roles or problem.page_size % config.block_n == 0)
        and problem.head_dim % 8 == 0
        and problem.head_dim_v % 8 == 0
        and config.block_n <= 256
    )
