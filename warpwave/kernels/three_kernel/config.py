"""The choice of three_kernel's config, and the GPU resources that a config needs. Holds no kernel."""

from __future__ import annotations

from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import dot_precision, padded, split_operand
from warpwave.kernels.three_kernel import estimates as wide_heads
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
    reasons, arithmetic = [], dot_precision(problem, gpu)
    asked = "library" in (config.scores, config.values)
    if asked and problem.packed:
        reasons.append("only the device knows where packed sequences begin; use 'triton' products for those")
    if asked and problem.dtype == "float32" and arithmetic != "ieee":
        reasons.append(f"the library's float32 products are 'ieee', not {arithmetic!r}: use 'triton' for those")
    if config.values == "library" and may_hide_keys(problem):
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


# Configs --------------------------------------------------------------------------------------------------------------

FILLED = 132  # blocks that fill a GPU whose number of multiprocessors is unknown
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
MOST_SHARES = 32  # splits of head_dim, which the softmax sums up
ONLINE_ROWS, ONLINE_COLUMNS = 16, 64  # queries and columns of v of a tile of the second launch with the softmax
WIDE_STEPS_FROM = 2048  # head_dim
CHEAP = ("tf32", "bf16x3")  # arithmetic that computes float32 products in at most three tensor-core products
FEW_KEYS = 512  # the most keys of which each tile of columns may recompute the softmax
WHOLE_ROW = 16_384  # keys of the longest row that a block of the softmax keeps in registers, 32 a thread
# The epilogue that computes the softmax costs one float32 multiply-add for each block_n multiply-adds of the second
# product, which run 16.7 times as fast on an H100: 33.4 * head_dim_v / block_n FLOP of the matrix unit per score. It
# saves 6 of 10 bytes per score. This is arithmetic (figures in large_head_dim); to be confirmed by measurement.
FUSED_FLOPS_A_COLUMN = 33.4
FLOPS_A_BYTE = 100


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory and that torch can
    compute."""
    first = default(problem, gpu)
    others = [
        with_workspace(problem, gpu, replace(first, scores=scores, values=values, split_d=1, **tile, **softmax))
        for scores, values in (("fused", "triton"), ("triton", "triton"), ("library", "triton"), ("library", "library"))
        for tile in _space(problem, gpu)
        for softmax in _softmax_space(problem)[: 1 if scores == "fused" else None]
    ]
    whole = {"block_m": 128, "block_n": 256, "split_d": 1}
    hopper = with_workspace(problem, gpu, replace(first, scores="hopper", values="hopper", **whole))
    others.insert(0, hopper)
    return [first, *(c for c in dict.fromkeys(others) if c != first and _fits(problem, gpu, c))]


def _softmax_space(problem: AttentionProblem) -> list[dict[str, int]]:
    """Returns tiles of the softmax: whole rows of 16 keys a thread if they fit a block, four and sixteen rows of part
    of their keys, and one row."""
    shapes = [(1, 2048, 8), (4, 512, 4), (16, 128, 8)]
    width = max(32, padded(problem.seqlen_k))
    if width <= WHOLE_ROW:
        shapes = [(1, width, max(1, min(16, width // 512))), *shapes[1:]]
    names = ("softmax_rows", "softmax_keys", "softmax_warps")
    return [dict(zip(names, shape, strict=True)) for shape in shapes]


def _fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    in_memory = least_bytes(problem, config) <= config.workspace_bytes
    in_smem = smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes
    return in_memory and in_smem and not library_cannot(problem, gpu, config)


def _space(problem: AttentionProblem, gpu: Gpu) -> list[dict[str, int]]:
    shapes = [(64, 64, 32, 64), (64, 128, 64, 128), (128, 64, 64, 64), (128, 128, 32, 128), (128, 128, 64, 128)]
    if problem.dtype != "float32":
        shapes += [(128, 256, 64, 256)]
    names = ("block_m", "block_n", "block_k", "block_v", "num_warps", "num_stages")
    return [
        dict(zip(names, (*shape, num_warps, num_stages), strict=True))
        for shape in shapes
        for num_warps in (4, 8)
        for num_stages in (2, 3)
        if not (gpu.capability == 90 and (shape[0], num_warps) == (64, 8))  # see flash_fwd
    ]


def with_workspace(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with the largest useful workspace, at most MAX_WORKSPACE_BYTES or a sixteenth of the device's
    memory unless one tile of queries takes more. Memory for sums is added to that for scores."""
    sms = gpu.num_sms or FILLED
    if config.scores == "hopper":
        wave = sms * least_bytes(problem, config)  # a block of 128 queries on each multiprocessor
        wanted = max(min(4 * wave, HOPPER_BYTES), 2 * wave)
    else:
        wanted = max(SCORES_BYTES, least_bytes(problem, config))
    if config.values == "library" and problem.dtype != "float32":
        wanted += config.sums_bytes
    limit = min(MAX_WORKSPACE_BYTES, gpu.memory_bytes // 16 or MAX_WORKSPACE_BYTES)
    return replace(config, workspace_bytes=min(wanted, max(limit, least_bytes(problem, config))))


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the Hopper launches if they are fastest, else torch's products if it can compute them, else ours."""
    config = smallest_tile(problem, gpu)
    if wide_heads.hopper_us(problem, gpu) <= wide_heads.torch_us(problem, gpu):
        hopper = replace(config, scores="hopper", values="hopper", block_m=128, block_n=256)
        return with_workspace(problem, gpu, hopper)
    blocks = problem.batch * problem.num_heads_q * -(-problem.seqlen_q // config.block_m)
    blocks *= -(-problem.seqlen_k // config.block_n)
    share = (2 if gpu.vendor == "interpreter" else gpu.num_sms or FILLED) // max(1, blocks)
    sharing = max(1, min(share, problem.head_dim // (2 * block_k_of(problem, config)), MOST_SHARES))
    if sharing > 1:
        # Few scores of long sums: blocks divide head_dim, with at least two steps each.
        if gpu.capability == 90 and problem.dtype == "float32" and _takes_wide_steps(problem, gpu):
            config = replace(config, block_k=64, num_stages=2)
        config = _online(problem, gpu, config) or _of_wide_tiles(problem, gpu, replace(config, split_d=sharing))
    else:
        config = _by_torch(problem, gpu, config)
    return with_workspace(problem, gpu, config)


def _takes_wide_steps(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether steps of 64 of head_dim, two in flight, are faster than three of 32: 13.6 us against 14.3 in
    bf16x3 at head_dim 4096, 16.0 against 16.9 in bf16x6, 5.4 against 5.7 in bf16x3 at 512 but not in bf16x6 (H200)."""
    arithmetic = dot_precision(problem, gpu)
    return arithmetic in CHEAP or (arithmetic != "ieee" and problem.head_dim >= WIDE_STEPS_FROM)


def _online(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config | None:
    """Returns a config of two launches if three would dominate a call's time: 5.4, 5.8 and 7.5 us in bf16x3, bf16x6 and
    ieee at head_dim 512, where three took 8.0, 9.4 and 13.6 (H200, 4 heads of 64 queries and keys). None if more
    columns of v fill the GPU once: at 2048 both took 9.4 us, and 10.8."""
    if gpu.capability != 90 or problem.dtype != "float32" or problem.seqlen_k > FEW_KEYS:
        return None
    sms, rows = gpu.num_sms or FILLED, problem.batch * problem.num_heads_q * -(-problem.seqlen_q // ONLINE_ROWS)
    if padded(-(-problem.head_dim_v * rows // sms)) > ONLINE_COLUMNS:
        return None
    shares = min(sms // max(1, problem.batch * problem.num_heads_q), problem.head_dim // config.block_k, MOST_SHARES)
    return replace(
        config, values="online", split_d=max(1, shares), block_v=ONLINE_COLUMNS, softmax_rows=ONLINE_ROWS,
        softmax_keys=64, softmax_warps=4 if dot_precision(problem, gpu) in CHEAP else 8,
    )  # fmt: skip


def _of_wide_tiles(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with tiles of 128 columns of v if tiles of 64 are more than two per multiprocessor: 20.3 us
    against 21.8 in bf16x3 at head_dim 8192, but 15.1 against 13.5 at 4096 (H200). With more than two parts per operand
    they do not fit."""
    if gpu.capability != 90 or problem.dtype != "float32" or dot_precision(problem, gpu) not in CHEAP:
        return config
    tiles = problem.batch * problem.num_heads_q * -(-problem.seqlen_q // config.block_m) * -(-problem.head_dim_v // 64)
    wide = replace(config, block_v=128)
    fits = smem_bytes(problem, gpu, wide) <= gpu.smem_per_block_bytes
    return wide if tiles > 2 * (gpu.num_sms or FILLED) and fits else config


def own_products(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the default for calls whose products torch cannot compute."""
    return with_workspace(problem, gpu, _by_ourselves(problem, gpu, smallest_tile(problem, gpu)))


def _by_torch(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with torch's products for every product that torch can compute."""
    for values in ("library", "triton"):
        by_torch = replace(config, scores="library", values=values)
        # float32 results of 16-bit products were not tested with AMD's libraries.
        known = problem.dtype == "float32" or gpu.vendor == "nvidia"
        if known and not library_cannot(problem, gpu, by_torch):
            return by_torch
    return _by_ourselves(problem, gpu, config)


def _by_ourselves(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with our products, and the softmax in the first one if that is faster."""
    fuses = problem.dtype != "float32" and _fuses(problem, gpu, min(128, config.block_n))
    return replace(config, scores="fused") if fuses else config


def _fuses(problem: AttentionProblem, gpu: Gpu, block_n: int) -> bool:
    """Returns whether the softmax goes into the first product's epilogue: if that saves more than it costs, and if two
    accumulators do not spill.

    Before Hopper, and on sm_120, products of 128 x 128 leave no registers for it; a mask or bias takes too many on
    every GPU. On Hopper it needs tiles of 128 x 128 instead of 128 x 256, which read one element of q, k and v per
    score in 128 less.
    """
    roomy = gpu.capability in (90, 100, 103) or gpu.vendor != "nvidia"
    flops = FUSED_FLOPS_A_COLUMN * problem.head_dim_v / block_n
    if gpu.capability == 90:
        flops += FLOPS_A_BYTE * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype] / 256
    return roomy and flops <= 6 * FLOPS_A_BYTE and not may_hide_keys(problem)


def smallest_tile(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the widest tile of the usual shapes that fits without spills (tests/compile), for three launches with our
    products."""
    rdna = gpu.vendor == "amd" and not gpu.arch.startswith("gfx9")
    hopper_or_later = gpu.capability in (90, 100, 103)
    small = problem.seqlen_q <= 64 and problem.seqlen_k <= FEW_KEYS  # larger tiles would be one block a head
    if gpu.vendor == "interpreter":  # runs one program after another: fewer are faster
        tile = (128, 128, 64 if problem.dtype == "float32" else 128, 128, 4, 1)
    elif problem.dtype == "float32":
        warps = 4 if gpu.vendor == "amd" or hopper_or_later else 8
        tile = (32, 32, 32, 32, 4, 2) if rdna or (small and not hopper_or_later) else (64, 64, 32, 64, warps, 2)
        if small and hopper_or_later:
            # Splits of head_dim fill the GPU: 64 queries at 8192 take 40 us (ieee), tiles of 32 took 78.
            tile = (64, 64, 32, 64, 4, 3)
    elif gpu.vendor == "amd":
        tile = (64, 64, 32, 64, 8 if rdna else 4, 2)
    elif small:
        tile = (64, 64, 64, 64, 4, 2)
    elif problem.seqlen_q <= 64:
        tile = (64, 128, 64 if hopper_or_later else 32, 128, 4, 3)
    else:
        tile = (128, 128, 64 if hopper_or_later else 32, 128, 8, 3)
        if gpu.capability == 90 and not _fuses(problem, gpu, 128):
            tile = (128, 256, 32, 256, 8, 4)  # a third more FLOP for each byte of L2; leaves no room for the epilogue
    if may_hide_keys(problem) and problem.dtype != "float32" and gpu.vendor != "interpreter":
        # Values and probabilities go through registers.
        tile = (*tile[:2], 32, min(tile[3], 128 if hopper_or_later else 64), *tile[4:])
    rows, keys, warps = _softmax_space(problem)[0].values()
    if gpu.vendor == "interpreter":
        rows = 64
    block_m, block_n, block_k, block_v, num_warps, num_stages = tile
    return Config(
        "triton", "triton", block_m, block_n, block_k, block_v, num_warps, num_stages, 1, rows, keys, warps,
        MAX_WORKSPACE_BYTES, SUMS_BYTES,
    )  # fmt: skip
