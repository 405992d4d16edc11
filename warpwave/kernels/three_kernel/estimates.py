"""Estimated times of heads wider than 256 on Hopper in 16 bits, for the choice among launches.

The times are microseconds on an H200, without about 8 us that all launches take. They were fitted to 62 calls of 16 to
384 queries on 512 to 16,384 keys at head_dim 512 to 1024 in CUDA graphs
(benchmarks/records, 2026-11-22-h200-large-heads-few-queries.log). They are accurate enough to choose by, but they do
not model a call's time; workbench/model/predict.py does.

    hopper   three_kernel's own launches: rounds of tiles of 128 x 256, each for the columns that it sums over.
    torch    three_kernel with torch's products: an even share of the work, whatever their tiles; all of K and V, which
             nothing hides there; and one more product for each kv head that query heads share, which fills less.
    fused    large_head_dim: the work of whole tiles, at the rate of its tiles of 64 rows.

None is faster than reading K and V. Holds no device code.
"""

from __future__ import annotations

import math

from warpwave.gpu import Gpu
from warpwave.kernels.three_kernel import hopper_host as three_kernel_hopper
from warpwave.problem import DTYPE_BYTES, AttentionProblem

US_A_COLUMN_HOPPER, US_A_COLUMN_TORCH, US_A_PRODUCT = 0.0122, 0.0175, 4.0
BYTES_A_US, FUSED_FLOPS_A_US = 4.5e6, 1.65e8
SHARED = 2.0  # factor of the time if query heads share kv heads: their products are narrow
# The estimates were fitted from 16 queries on. With fewer they can be far too low, because torch's product of few rows
# leaves most of a GPU idle (docs/notes/large_head_dim.md).
FEWEST_QUERIES = 16
HOST_US = 52.0  # host time to call torch's products, without the 8


def hopper_us(problem: AttentionProblem, gpu: Gpu) -> float:
    """Returns the time of three_kernel's own launches; infinity if they cannot compute the call."""
    if three_kernel_hopper.cannot(problem, gpu) or not (problem.seqlen_q and problem.seqlen_k and problem.batch):
        return math.inf
    sms, (block_m, block_n, _) = gpu.assumed_sms, three_kernel_hopper.TILE
    key_tiles, columns = -(-problem.seqlen_k // block_n), -(-problem.head_dim_v // block_n)
    blocks = problem.batch * problem.num_heads_q * -(-problem.seqlen_q // block_m)
    rounds = -(-blocks * key_tiles // sms) * problem.head_dim + -(-blocks * columns // sms) * key_tiles * block_n
    return max(US_A_COLUMN_HOPPER * rounds, _reading_us(problem))


def torch_us(problem: AttentionProblem, gpu: Gpu) -> float:
    """Returns the time with torch's products, which is at least the host's time to call them."""
    sms, (block_m, block_n, _) = gpu.assumed_sms, three_kernel_hopper.TILE
    pairs = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    columns = pairs * (problem.head_dim + problem.head_dim_v) / (sms * block_m * block_n)
    shared = problem.num_heads_q != problem.num_heads_kv
    products = problem.batch * (problem.num_heads_kv if shared else 1)
    computing = US_A_COLUMN_TORCH * columns * (SHARED if shared else 1.0)
    return max(HOST_US, computing + _reading_us(problem) + US_A_PRODUCT * 2 * (products - 1))


def fused_us(problem: AttentionProblem) -> float:
    """Returns the time of large_head_dim."""
    rows = problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv
    if rows > 16:  # at most 16 rows have tiles of their own
        rows = -(-rows // 64) * 64
    pairs = problem.batch * problem.num_heads_kv * rows * problem.seqlen_k
    return max(2 * pairs * (problem.head_dim + problem.head_dim_v) / FUSED_FLOPS_A_US, _reading_us(problem))


def are_known(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether these estimates cover a call, that is, whether three_kernel's own launches can compute it."""
    return hopper_us(problem, gpu) < math.inf


def why_not_fused(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why three_kernel is faster than large_head_dim, for calls that the estimates cover; empty if it is
    not."""
    if problem.seqlen_q < FEWEST_QUERIES:
        return []
    fused, three = fused_us(problem), min(hopper_us(problem, gpu), torch_us(problem, gpu))
    if three >= fused:
        return []
    return [
        f"{problem.seqlen_q} queries of {problem.batch * problem.num_heads_q} heads on {problem.seqlen_k:,} keys take "
        f"it about {fused:.0f} us beside a launch's, and three_kernel {three:.0f} (kernels/three_kernel/estimates.py)"
    ]


def _reading_us(problem: AttentionProblem) -> float:
    width = (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    return problem.batch * problem.num_heads_kv * problem.seqlen_k * width / BYTES_A_US
