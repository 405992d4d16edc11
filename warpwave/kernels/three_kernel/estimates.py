"""How long calls of heads wider than 256 take on Hopper in 16 bits, by which launches: what a choice among them asks.

Microseconds of an H200, beside some 8 that all of them take, fitted to 62 calls of 16 to 384 queries on 512 to 16,384
keys at head_dim 512 to 1024 in CUDA graphs (benchmarks/records, 2026-11-22-h200-large-heads-few-queries.log). They are
near enough to choose by, and no model of a call's time: that is workbench/model.

    hopper   three_kernel's own launches: rounds of tiles of 128 x 256, each for the columns that it sums over.
    torch    three_kernel by torch's products: whatever their tiles, an even share of the work, all of K and V, which
             nothing hides there, and a product more for each kv head that query heads share, which fills less.
    fused    large_head_dim: the work, at the rate of its tiles of 64 rows.

None is faster than K and V are read. Host code alone.
"""

from __future__ import annotations

import math

from warpwave.gpu import Gpu
from warpwave.kernels.three_kernel import hopper_host as three_kernel_hopper
from warpwave.problem import DTYPE_BYTES, AttentionProblem

FILLED = 132  # multiprocessors where nobody knows how many there are
US_A_COLUMN_HOPPER, US_A_COLUMN_TORCH, US_A_PRODUCT = 0.0122, 0.0175, 4.0
BYTES_A_US, FUSED_FLOPS_A_US = 4.5e6, 1.65e8
SHARED = 2.0  # times as long, where query heads share kv heads: their products are narrow
HOST_US = 52.0  # that the host takes to call torch's products, beside the 8


def hopper_us(problem: AttentionProblem, gpu: Gpu) -> float:
    """By three_kernel's own launches; infinity where they cannot compute the call."""
    if three_kernel_hopper.cannot(problem, gpu) or not (problem.seqlen_q and problem.seqlen_k and problem.batch):
        return math.inf
    sms, (block_m, block_n, _) = gpu.num_sms or FILLED, three_kernel_hopper.TILE
    key_tiles, columns = -(-problem.seqlen_k // block_n), -(-problem.head_dim_v // block_n)
    blocks = problem.batch * problem.num_heads_q * -(-problem.seqlen_q // block_m)
    rounds = -(-blocks * key_tiles // sms) * problem.head_dim + -(-blocks * columns // sms) * key_tiles * block_n
    return max(US_A_COLUMN_HOPPER * rounds, _reading_us(problem))


def torch_us(problem: AttentionProblem, gpu: Gpu) -> float:
    """By torch's products, of which the host makes no more than it can."""
    sms, (block_m, block_n, _) = gpu.num_sms or FILLED, three_kernel_hopper.TILE
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    columns = pairs * (problem.head_dim + problem.head_dim_v) / (sms * block_m * block_n)
    shared = problem.num_heads_q != problem.num_heads_kv
    products = problem.batch * (problem.num_heads_kv if shared else 1)
    computing = US_A_COLUMN_TORCH * columns * (SHARED if shared else 1.0)
    return max(HOST_US, computing + _reading_us(problem) + US_A_PRODUCT * 2 * (products - 1))


def fused_us(problem: AttentionProblem) -> float:
    """By large_head_dim."""
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    return max(2 * pairs * (problem.head_dim + problem.head_dim_v) / FUSED_FLOPS_A_US, _reading_us(problem))


def are_known(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Whether these estimates are for a call: one that three_kernel's own launches can compute."""
    return hopper_us(problem, gpu) < math.inf


def why_not_fused(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Why three_kernel is faster than large_head_dim, if it is, of calls that are known here."""
    fused, three = fused_us(problem), min(hopper_us(problem, gpu), torch_us(problem, gpu))
    if three >= fused:
        return []
    return [
        f"{problem.seqlen_q} queries of {problem.batch * problem.num_heads_q} heads on {problem.seqlen_k:,} keys take "
        f"it about {fused:.0f} us beside a launch's, and three_kernel {three:.0f} (three_kernel/estimates.py)"
    ]


def _reading_us(problem: AttentionProblem) -> float:
    width = (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    return problem.batch * problem.num_heads_kv * problem.seqlen_k * width / BYTES_A_US
