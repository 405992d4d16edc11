"""The first kernel with tiled products: still three passes, scores in memory.

    S = Q K^T;   P = exp(S - max), row sums;   out = P V / sum        three launches, S and P in one float32 buffer

Each product is an ordinary matrix product of tiles. A block of threads loads a tile of both operands into shared memory
once, and the matrix unit reads from there what each thread of the naive kernel read for itself. A key is thus read once
for BLOCK_M queries, and the next tiles arrive while this one is multiplied. As in naive, tiles that causality or the
window hides entirely are not computed; a tile that an edge cuts is computed whole and masked afterward.

Tiling through shared memory comes from Volkov & Demmel, "Benchmarking GPUs to tune dense linear algebra" (2008); the
passes are Algorithm 0 of Dao et al., "FlashAttention" (2022), section 2.2.

Bound: memory. With fast products the traffic of the scores remains: 20 bytes each, for 4 * head_dim FLOP. It adds
shared memory and the matrix unit to naive. It does not change how scores are stored; flash_fwd does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import reasons, rules
from warpwave.kernels.arguments import Run, dot_precision, padded
from warpwave.kernels.cost import Cost, conversions
from warpwave.kernels.groups import Sequences, Tokens, Window
from warpwave.kernels.ladder import three_passes
from warpwave.kernels.ladder.three_passes import HIDDEN, UNSPECIALIZED, Launches, Product, place_of_tile, whole_lines
from warpwave.kernels.primitives import (
    band_edges,
    load_tile,
    operand,
    product,
    rounded,
    rows_and_keys,
    tile_pointers,
    transposed,
    visible_keys,
)
from warpwave.operands import Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime.triton_or_stub import jit, tl

NAME = "tiled"
NEEDS_GPU = True
STRIDED_OUT = True


@dataclass(frozen=True)
class Config:
    """Tiles of the two products, one shape for both, and launch shape.

    Args:
        block_m: queries of a tile, a power of two, at least 16.
        block_n: keys of a tile of scores, and columns of v of a tile of the output, a power of two, at least 16.
        block_k: elements that a step sums over: of head_dim in the first product, of keys in the second; a power of
            two, at least 16.
        num_warps: warps of a block, a power of two.
        num_stages: steps in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        sizes = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1}
        rules.check_sizes(self, sizes, ("num_stages",))


# Device code ----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=UNSPECIALIZED)
def tiled_scores_kernel(
    q_tensor: Tokens,
    k_tensor: Tokens,
    scores_ptr,
    sequences: Sequences,
    window: Window,
    stride_sm,
    num_heads_q,
    group_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Computes raw scores of BLOCK_M queries with BLOCK_N keys of one head, if by position one of them sees another."""
    num_tiles_m, num_tiles_n = tl.cdiv(sequences.seqlen_q, BLOCK_M), tl.cdiv(sequences.seqlen_k, BLOCK_N)
    tile_m, tile_n, head, batch, batch_head = place_of_tile(num_tiles_m, num_tiles_n, num_heads_q)
    scores_ptr += batch_head * sequences.seqlen_q * stride_sm
    q_ptr, k_ptr, _, seqlen_q, seqlen_k = rows_and_keys(q_tensor, k_tensor, sequences, batch, head, group_size)
    row_begin = tile_m * BLOCK_M
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(row_begin, row_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    if (row_begin > row_last) | (tile_n * BLOCK_N >= key_end) | ((tile_n + 1) * BLOCK_N <= key_begin):
        return

    rows = row_begin + tl.arange(0, BLOCK_M)
    keys = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_K)
    q_pointers = tile_pointers(q_ptr, rows, dims, q_tensor.stride_m, q_tensor.stride_d)
    k_pointers = tile_pointers(k_ptr, keys, dims, k_tensor.stride_m, k_tensor.stride_d)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, HEAD_DIM, BLOCK_K):
        q = load_tile(q_pointers, rows, dims, 0, seqlen_q, HEAD_DIM, HEAD_DIM % BLOCK_K != 0)  # [BLOCK_M, BLOCK_K]
        # Keys that no query of the tile sees are not read: NaN there must have no effect.
        k = load_tile(k_pointers, keys, dims, key_begin, key_end, HEAD_DIM, HEAD_DIM % BLOCK_K != 0)
        k = transposed(operand(k, PRECISION, IS_NVIDIA))
        scores = product(operand(q, PRECISION, IS_NVIDIA), k, scores, PRECISION)  # [BLOCK_M, BLOCK_N]
        dims += BLOCK_K
        q_pointers += tl.cast(q_tensor.stride_d, tl.int64) * BLOCK_K
        k_pointers += tl.cast(k_tensor.stride_d, tl.int64) * BLOCK_K
    inside = (rows < seqlen_q)[:, None] & (keys < whole_lines(0, seqlen_k)[1])[None, :]
    tl.store(scores_ptr + (rows.to(tl.int64)[:, None] * stride_sm + keys[None, :]), scores, mask=inside)


@jit(do_not_specialize=UNSPECIALIZED)
def tiled_values_kernel(
    scores_ptr,
    row_scale_ptr,
    v_tensor: Tokens,
    out_tensor: Tokens,
    sequences: Sequences,
    window: Window,
    stride_sm,
    num_heads_q,
    group_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MAY_HIDE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Computes BLOCK_N columns of the output of BLOCK_M queries of one head, over all keys that some of them sees."""
    num_tiles_n: tl.constexpr = (HEAD_DIM_V + BLOCK_N - 1) // BLOCK_N
    num_tiles_m = tl.cdiv(sequences.seqlen_q, BLOCK_M)
    tile_m, tile_n, head, batch, batch_head = place_of_tile(num_tiles_m, num_tiles_n, num_heads_q)
    scores_ptr += batch_head * sequences.seqlen_q * stride_sm
    row_scale_ptr += batch_head * sequences.seqlen_q
    out_ptr, v_ptr, _, seqlen_q, seqlen_k = rows_and_keys(out_tensor, v_tensor, sequences, batch, head, group_size)
    row_begin = tile_m * BLOCK_M
    row_last = tl.minimum(row_begin + BLOCK_M, seqlen_q) - 1
    if row_begin > row_last:
        return
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(row_begin, row_last, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)

    rows = row_begin + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    line_begin, line_end = whole_lines(key_begin, key_end)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for key_tile in range(line_begin, line_end, BLOCK_K):
        keys = key_tile + tl.arange(0, BLOCK_K)
        inside = (rows < seqlen_q)[:, None] & (keys < line_end)[None, :]
        p = tile_pointers(scores_ptr, rows, keys, stride_sm, 1)
        p = tl.load(p, mask=inside, other=HIDDEN)  # [BLOCK_M, BLOCK_K]
        v = tile_pointers(v_ptr, keys, columns, v_tensor.stride_m, v_tensor.stride_d)
        v = load_tile(v, keys, columns, key_begin, key_end, HEAD_DIM_V, HEAD_DIM_V % BLOCK_N != 0)  # [BLOCK_K, BLOCK_N]
        if MAY_HIDE_KEYS:
            # A value that no query of the tile sees must have no effect, but 0 * NaN is NaN.
            seen = tl.max((p != HIDDEN).to(tl.int32), 0)  # [BLOCK_K]
            v = tl.where((seen != 0)[:, None], v, 0.0)
        p = tl.where(p == HIDDEN, 0.0, p)
        p = operand(p.to(v.dtype), PRECISION, IS_NVIDIA)
        acc = product(p, operand(v, PRECISION, IS_NVIDIA), acc, PRECISION)  # [BLOCK_M, BLOCK_N]
    out = acc * tl.load(row_scale_ptr + rows, mask=rows < seqlen_q, other=0.0)[:, None]
    inside = (rows < seqlen_q)[:, None] & (columns < HEAD_DIM_V)[None, :]
    offsets = rows.to(tl.int64)[:, None] * out_tensor.stride_m + columns[None, :]
    tl.store(out_ptr + offsets, rounded(out, out_ptr.dtype.element_ty), mask=inside)


# Host -----------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    return three_passes.bind(specify, problem, operands, config, out)


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> Launches:
    """Returns the three launches from tensors, which may be without memory (device "meta") if they are only
    compiled."""
    block_m, how = config.block_m, {"PRECISION": dot_precision(problem, gpu), "IS_NVIDIA": gpu.vendor == "nvidia"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    columns, block_d = _columns(problem, config), _block_d(problem, config)
    tiles_m, tiles_n = -(-problem.seqlen_q // block_m), -(-problem.seqlen_k // config.block_n)
    score = {"BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": block_d, "HEAD_DIM": problem.head_dim}
    sum_values = {
        "BLOCK_M": block_m,
        "BLOCK_N": columns,
        "BLOCK_K": config.block_k,
        "HEAD_DIM_V": problem.head_dim_v,
        "MAY_HIDE_KEYS": problem.mask_shape is not None or problem.bias_shape is not None,
    }
    return three_passes.specify(
        problem, operands, out, lse, block_m=block_m,
        score=Product(tiled_scores_kernel, tiles_m * tiles_n, {**score, **how}, options),
        sum_values=Product(
            tiled_values_kernel, tiles_m * -(-problem.head_dim_v // columns), {**sum_values, **how}, options
        ),
    )  # fmt: skip


def _columns(problem: AttentionProblem, config: Config) -> int:
    """Returns the columns of v of a tile of the output."""
    return min(config.block_n, padded(problem.head_dim_v))


def _block_d(problem: AttentionProblem, config: Config) -> int:
    """Returns the elements of head_dim per step of the first product."""
    return min(config.block_k, padded(problem.head_dim))


# What it can run and what it costs ------------------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = three_passes.why_not(problem, gpu) + reasons.of_matrix_unit(gpu) + precision.why_not(problem, gpu)
    if not found and not _fitting(problem, gpu):
        needed = min(smem_bytes(problem, gpu, config) for config in _space())
        found.append(reasons.of_shared_memory(needed, gpu))
    return found


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    size = DTYPE_BYTES[problem.dtype]
    block_d, columns = _block_d(problem, config), _columns(problem, config)
    score = config.num_stages * size * (config.block_m + config.block_n) * block_d
    score += size * config.block_m * block_d  # operands that `precision` converts in registers and stores again
    stored = 4 * config.block_m * config.block_n  # a tile of scores changes layout on its way to memory
    sum_values = config.num_stages * config.block_k * (4 * config.block_m + size * columns)  # P comes in float32
    sum_values += size * config.block_k * (config.block_m + columns)  # the same, and values that no query sees
    return max(score, stored, sum_values) + 1024


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the three launches move and compute: whole tiles, each read once per tile it is multiplied with."""
    block_d = _block_d(problem, config)

    def split(elements: int) -> int:
        return conversions(problem, gpu, elements, config.block_m, config.num_warps)

    return three_passes.cost(
        problem, block_m=config.block_m, block_n=config.block_n, columns=_columns(problem, config), step=config.block_k,
        width=-(-problem.head_dim // block_d) * block_d, smem_bytes=smem_bytes(problem, gpu, config),
        threads=config.num_warps * gpu.warp_size, registers=(30, 62),
        split=split,
    )  # fmt: skip


# Configs --------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory."""
    fitting = _fitting(problem, gpu)
    if not fitting:
        return []
    default = _default(problem, gpu)
    if default not in fitting:
        default = fitting[-1]
    return [default, *(c for c in fitting if c != default)]


def _fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    fitting = [c for c in _space() if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]
    if gpu.capability == 90:
        # Two warpgroups on 64 queries split the keys of a wgmma between them. In flash_fwd this was slow and, in tf32
        # with Triton 3.6, wrong.
        fitting = [c for c in fitting if not (c.num_warps == 8 and c.block_m == 64)]
    return fitting


def _space() -> list[Config]:
    return [
        Config(block_m, block_n, block_k, num_warps, num_stages)
        for block_m, block_n in ((16, 16), (32, 32), (64, 64), (64, 128), (128, 64), (128, 128))
        for block_k in (32, 64)
        for num_warps in (4, 8)
        for num_stages in (2, 3)
    ]


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the widest tile of the usual shapes that fits and does not spill on any target except gfx1100 at head_dim
    256 (tests/compile).

    AMD's 64 KB leave no room to convert the layout of 128 x 128 scores, and RDNA has no matrix unit for float32.
    Operands split for tf32x3 take eight warps unless wgmma reads one of them from shared memory.
    """
    if gpu.is_rdna:
        return Config(32, 32, 32, 8, 2) if problem.dtype == "float32" else Config(64, 64, 32, 8, 2)
    if gpu.vendor == "amd" or (problem.dtype == "float32" and gpu.capability == 90):
        return Config(64, 64, 32, 4, 2)
    if problem.dtype == "float32":
        return Config(64, 64, 32, 8, 2)
    return Config(128, 128, 32, 8, 3)
