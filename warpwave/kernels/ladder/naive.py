"""The naive attention kernel: three passes, scores in memory, one thread per element.

    S = Q K^T;   P = exp(S - max), row sums;   out = P V / sum        three launches, S and P in one float32 buffer

In the first product a thread owns one score and multiplies its query by its key, element by element, from memory. In
the second it owns one element of the output and multiplies a row of P by a column of V. Nothing is shared: of a block's
16 x 16 threads, sixteen read the same key, each for its own query, and only the first-level cache absorbs the repeated
reads. No matrix unit is used: products are float32 multiply-adds whatever the inputs' type, which is at least as
accurate as any `precision`.

The passes are those of the definition; written out as loops over memory they are Algorithm 0 of Dao et al.,
"FlashAttention" (2022), section 2.2.

Bound: load instructions. A multiply-add, 2 FLOP, costs two loads, so the load units saturate at an eighth of the
arithmetic units' peak, and the tensor cores are idle. The lesson: a correct kernel is easy, and the rest of the ladder
is about where operands come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import rules
from warpwave.kernels.arguments import Run
from warpwave.kernels.cost import Cost
from warpwave.kernels.groups import Sequences, Tokens, Window
from warpwave.kernels.ladder import three_passes
from warpwave.kernels.ladder.three_passes import HIDDEN, UNSPECIALIZED, Launches, Product, place_of_tile
from warpwave.kernels.primitives import band_edges, rounded, rows_and_keys, visible_keys
from warpwave.operands import Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime.triton_or_stub import jit, tl

NAME = "naive"
NEEDS_GPU = True
STRIDED_OUT = True


@dataclass(frozen=True)
class Config:
    """Shape of a block of threads.

    Args:
        block_m: queries of a block, a power of two, at least 16.
        block_n: keys of a block (columns of v in the second product), a power of two, at least 16.
        num_warps: warps of a block, a power of two; with as many threads as elements, each thread has one.
    """

    block_m: int
    block_n: int
    num_warps: int

    def __post_init__(self) -> None:
        rules.check_sizes(self, {"block_m": 16, "block_n": 16, "num_warps": 1})


# Device code ----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=UNSPECIALIZED)
def naive_scores_kernel(
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
    HEAD_DIM: tl.constexpr,
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
    # Threads beyond the edge read the edge again; their results are not stored.
    q_pointers = q_ptr + tl.minimum(rows, seqlen_q - 1).to(tl.int64) * q_tensor.stride_m
    k_pointers = k_ptr + tl.minimum(keys, seqlen_k - 1).to(tl.int64) * k_tensor.stride_m
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(HEAD_DIM):
        q = tl.load(q_pointers).to(tl.float32)  # [BLOCK_M]
        k = tl.load(k_pointers).to(tl.float32)  # [BLOCK_N]
        scores += q[:, None] * k[None, :]
        q_pointers += q_tensor.stride_d
        k_pointers += k_tensor.stride_d
    inside = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
    tl.store(scores_ptr + (rows.to(tl.int64)[:, None] * stride_sm + keys[None, :]), scores, mask=inside)


@jit(do_not_specialize=UNSPECIALIZED)
def naive_values_kernel(
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
    HEAD_DIM_V: tl.constexpr,
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
    # Threads beyond the edge read the edge again; their results are not stored.
    p_pointers = scores_ptr + (tl.minimum(rows, seqlen_q - 1).to(tl.int64) * stride_sm + key_begin)
    v_pointers = v_ptr + tl.minimum(columns, HEAD_DIM_V - 1).to(tl.int64) * v_tensor.stride_d
    v_pointers += tl.cast(key_begin, tl.int64) * v_tensor.stride_m
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(key_begin, key_end):
        p = tl.load(p_pointers)  # [BLOCK_M]
        v = tl.load(v_pointers).to(tl.float32)  # [BLOCK_N]
        acc += tl.where((p == HIDDEN)[:, None], 0.0, p[:, None] * v[None, :])
        p_pointers += 1
        v_pointers += v_tensor.stride_m
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
    block = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    score, sum_values = {**block, "HEAD_DIM": problem.head_dim}, {**block, "HEAD_DIM_V": problem.head_dim_v}
    options = {"num_warps": config.num_warps, "num_stages": 1}
    tiles_m = -(-problem.seqlen_q // config.block_m)
    tiles_n, tiles_v = -(-problem.seqlen_k // config.block_n), -(-problem.head_dim_v // config.block_n)
    return three_passes.specify(
        problem, operands, out, lse, block_m=config.block_m,
        score=Product(naive_scores_kernel, tiles_m * tiles_n, score, options),
        sum_values=Product(naive_values_kernel, tiles_m * tiles_v, sum_values, options),
    )  # fmt: skip


# What it can run and what it costs ------------------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can. Only the scores limit it:
    it needs no matrix unit, no shared memory, and only one element of a row of q at a time."""
    return three_passes.why_not(problem, gpu) + precision.why_not(problem, gpu, ("ieee",))


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block. Only the softmax uses it, to sum over warps."""
    return three_passes.SOFTMAX_SMEM_BYTES


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the three launches move and compute. Reads are those that miss the first-level cache, which serves
    repeated reads by the threads of a block: each query and key of a tile is counted once."""
    return three_passes.cost(
        problem, block_m=config.block_m, block_n=config.block_n, columns=config.block_n, step=1,
        width=problem.head_dim, smem_bytes=smem_bytes(problem, gpu, config),
        threads=config.num_warps * gpu.warp_size, bytes_of_pair=_bytes_of_pair(problem, gpu, config),
    )  # fmt: skip


def _bytes_of_pair(problem: AttentionProblem, gpu: Gpu, config: Config) -> tuple[float, float]:
    """Returns the bytes with which each product occupies the first-level cache for a query, a key and a column.

    The cache reads a word from each of 32 banks a clock. The lanes of a warp hold adjacent keys and read as many rows
    of K. Rows a multiple of 128 bytes apart share a bank and are read one after another, as are rows of Q. V and P take
    one clock each.
    """
    lanes = min(gpu.warp_size, config.block_n)
    row_bytes = DTYPE_BYTES[problem.dtype] * problem.num_heads_kv * problem.head_dim
    ways = -(-lanes // (128 // math.gcd(128, row_bytes)))
    return 128 / gpu.warp_size * (ways + gpu.warp_size // lanes), 128 / gpu.warp_size * 2


# Configs --------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first: 16 x 16 threads, one element each, as in the CUDA tutorials."""
    space = [Config(m, n, num_warps) for m in (16, 32, 64) for n in (16, 32, 64) for num_warps in (4, 8)]
    # Interpreted programs cost milliseconds each, whatever their size.
    default = Config(64, 64, 8) if gpu.vendor == "interpreter" else Config(16, 16, 256 // max(32, gpu.warp_size))
    return [default, *(c for c in space if c != default)]
