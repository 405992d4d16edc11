"""The GPU resources that a config of three_kernel needs, and its workspace. Holds no kernel."""

from __future__ import annotations

from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import dot_precision, padded, split_operand
from warpwave.kernels.three_kernel import hopper_host as three_kernel_hopper
from warpwave.kernels.three_kernel.plan import Config, least_bytes
from warpwave.problem import DTYPE_BYTES, AttentionProblem

MAX_WORKSPACE_BYTES = 1024**3


def may_hide_keys(problem: AttentionProblem) -> bool:
    """Returns whether anything other than position may hide a key from all queries."""
    return problem.mask_shape is not None or problem.bias_shape is not None


def block_k_of(problem: AttentionProblem, config: Config) -> int:
    """Returns the elements of head_dim per step of the first product."""
    return min(config.block_k, padded(problem.head_dim))


def block_v_of(problem: AttentionProblem, config: Config) -> int:
    """Returns the columns of v of a tile of the output."""
    return min(config.block_v, padded(problem.head_dim_v))


def library_cannot(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns why torch, or the Hopper launches, cannot compute the products that a config assigns to them."""
    if config.scores == "hopper":
        return three_kernel_hopper.cannot(problem, gpu)
    return torch_cannot(problem, gpu, config.scores, config.values)


def torch_cannot(problem: AttentionProblem, gpu: Gpu, scores: str, values: str) -> list[str]:
    """Returns why torch cannot compute the products that are `"library"`."""
    reasons, arithmetic = [], dot_precision(problem, gpu)
    asked = "library" in (scores, values)
    if asked and problem.packed:
        reasons.append("the offsets of packed sequences are on the device; use 'triton' products for those")
    if asked and problem.dtype == "float32" and arithmetic != "ieee":
        reasons.append(f"the library's float32 products are 'ieee', not {arithmetic!r}: use 'triton' for those")
    if values == "library" and may_hide_keys(problem):
        reasons.append("the library multiplies values that a mask or bias hides by 0, and NaN there would leak")
    return reasons


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    if config.scores == "hopper":
        return three_kernel_hopper.SMEM_BYTES
    size = DTYPE_BYTES[problem.dtype]
    block_k, block_v = block_k_of(problem, config), block_v_of(problem, config)
    stages = max(1, config.num_stages - 1) if gpu.vendor == "amd" and gpu.arch != "gfx950" else config.num_stages
    split = split_operand(problem, gpu)
    stored = 4 * config.block_m * config.block_n  # a tile of scores changes layout on its way to memory
    score = stages * split * size * (config.block_m + config.block_n) * block_k
    if config.scores == "library":
        score = stored = 0
    keys = config.block_n if config.scores == "fused" else config.block_k
    sum_values = stages * split * size * keys * (config.block_m + block_v)
    if may_hide_keys(problem):
        sum_values += size * keys * (config.block_m + block_v)  # both go through registers and back
    if config.values == "library":
        sum_values = 0
    if config.values == "online":
        # Both operands come from registers; float32 that is multiplied by parts comes in parts.
        parts = max(split, 2) if problem.dtype == "float32" else split
        sum_values = parts * size * config.softmax_keys * (config.softmax_rows + block_v)
    # tcgen05 products are stored through shared memory, and barriers and reductions over warps need some too.
    handed = 4 * config.block_m * block_v if gpu.capability >= 100 or gpu.vendor == "amd" else 0
    return max(score, stored, sum_values, handed) + 4096


# Workspace ------------------------------------------------------------------------------------------------------------

# Bytes of a chunk's scores, for torch's products or for ours. Keeping them in L2 is worth less than having few large
# products: 402, 418, 438 us at 128, 64, 32 MiB (H200, head_dim 512, 2,048 keys), 5.6, 6.4, 7.4 ms at 8,192 keys.
SCORES_BYTES = 128 * 1024**2
SUMS_BYTES = 32 * 1024**2  # of float32 sums, which are scaled in L2: 622, 733, 628 us at 32, 16, 64 MiB (head_dim 1024)
# The Hopper launches read P during their products, so it need not stay in L2. But a chunk that gives each
# multiprocessor one block of 128 queries costs a third more than one that gives it two (2,048 keys, 16 heads: 339
# against 248 us at head_dim 512, 519 against 432 at 1024). Two blocks take 139 MB at 2,048 keys and 557 MB at 8,192. If
# four fit this bound, four are used, which leaves a smaller remainder. 128, 256 and 512 MiB hold two blocks each on 132
# multiprocessors up to 1,970, 3,940 and 7,880 keys.
HOPPER_BYTES = 512 * 1024**2


def with_workspace(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with the largest useful workspace, at most MAX_WORKSPACE_BYTES or a sixteenth of the device's
    memory unless one tile of queries takes more. Memory for sums is added to that for scores."""
    sms = gpu.assumed_sms
    if config.scores == "hopper":
        wave = sms * least_bytes(problem, config)  # a block of 128 queries on each multiprocessor
        wanted = max(min(4 * wave, HOPPER_BYTES), 2 * wave)
    else:
        wanted = max(SCORES_BYTES, least_bytes(problem, config))
    if config.values == "library" and problem.dtype != "float32":
        wanted += config.sums_bytes
    limit = min(MAX_WORKSPACE_BYTES, gpu.memory_bytes // 16 or MAX_WORKSPACE_BYTES)
    return replace(config, workspace_bytes=min(wanted, max(limit, least_bytes(problem, config))))
