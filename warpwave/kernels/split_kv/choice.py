"""The choice of a config for a call: the default, and those that fit the GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import padded
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.kernels.split_kv.config import (
    Config,
    longest_steps,
    may_be_launched_ahead,
    may_map,
    one_step,
    smem_bytes,
)
from warpwave.kernels.split_kv.splits import (
    FEW,
    UNKNOWN_SMS,
    blocks_per_sm,
    blocks_with_rows,
    changed,
    scattered,
    with_splits,
)
from warpwave.problem import AttentionProblem, by_kind


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other tiling that fits the GPU's shared memory, and other splits of the
    default."""
    if not fitting(problem, gpu):
        return []
    first = default(problem, gpu)
    if problem.batch_invariant:  # another tile would give other bits
        return [first]
    others = [replace(first, num_splits=n) for n in (1, 2, 3, 2 * first.num_splits)]
    others += [with_splits(problem, gpu, c) for c in fitting(problem, gpu)]
    return list(dict.fromkeys([first, *others]))


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the first of `configs`, of a problem that has one, without listing the others."""
    tiling = _default(problem, gpu)
    while smem_bytes(problem, gpu, tiling) > gpu.smem_per_block_bytes:
        tiling = _smaller(tiling)
    return _shallow(problem, gpu, with_splits(problem, gpu, tiling))


FEW_STEPS = 4


def _shallow(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the config with fewer tiles in flight if splits have too few steps to fill them (Hopper only, as
    measured).

    One step: 1 x 1,024 keys 3.92 us with two stages, 4.07 with three; a prompt of 512 3.97 and 4.09. A few steps from
    pages by pointers: 1 x 8,192 keys in pages of 16 11.2 us and 12.5.
    """
    if config.roles or config.num_stages <= 2 or config.pieces or gpu.vendor != "nvidia" or gpu.capability != 90:
        return config
    steps = -(-longest_steps(problem, config) // config.num_splits)
    if not (one_step(problem, config) or (scattered(problem, config) and config.block_m < 64 and steps <= FEW_STEPS)):
        return config
    shallow = changed(config, num_stages=2)
    return shallow if with_splits(problem, gpu, shallow) == shallow else config


def _smaller(config: Config) -> Config:
    """Returns the next tiling to try if one does not fit: fewer tiles in flight, then fewer keys, then fewer rows."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    return replace(config, block_m=config.block_m // 2)


@by_kind
def fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the tilings that fit the GPU's shared memory."""
    return [c for c in _tilings() if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]


def smallest_smem_bytes(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the shared memory of the smallest tiling."""
    return min(smem_bytes(problem, gpu, config) for config in _tilings())


def _tilings() -> list[Config]:
    # Always four warps: eight warps on 64 rows or fewer split the keys of a product between them, which is slow on
    # Hopper, and at 64x16 in tf32 Triton 3.6 computes wrong products (flash_fwd/config.py).
    return [
        Config(block_m, block_n, 4, num_stages)
        for block_m in (16, 32, 64)
        for block_n in (16, 32, 64, 128)
        for num_stages in (1, 2, 3, 4)
    ]


@by_kind
def _of_rows(problem: AttentionProblem, gpu: Gpu, block_m: int) -> Config:
    """Returns the part of `_default` that does not depend on lengths, for tiles of `block_m` rows."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    bucket = 0 if wide <= 64 else 1 if wide <= 128 else 2
    masked = problem.mask_shape is not None or problem.bias_shape is not None
    if problem.dtype == "float32":
        config = Config(min(block_m, 32), (32, 16, 16)[bucket], 4, (2, 2, 1)[bucket])
    elif block_m == 64:
        # A chunk of a prompt batched with decoding sequences took 182 to 207 us with 64 x 64, 215 and more with 64 x
        # 32, and 200 with 128 x 64 on eight warps, whose single block per SM waits for its loads.
        roomy = gpu.vendor == "nvidia" and gpu.capability in (90, 100, 103)  # products leave registers free there
        config = Config(64, (64, 64 if roomy else 32, 32)[bucket], 4, 3 if roomy and bucket < 2 else 2)
    else:
        # Of 15 tilings none was faster by more than 3 %.
        config = Config(block_m, (64, 64, 32)[bucket], 4, 3)
    if gpu.vendor == "amd":
        config = changed(config, num_stages=min(2, config.num_stages))
        if gpu.arch.startswith("gfx1"):
            config = changed(config, block_m=min(block_m, 32), block_n=(32, 32, 16)[bucket], num_stages=1)
    if masked:
        config = changed(config, block_m=min(config.block_m, (64, 64, 32)[bucket]))
        config = changed(config, block_n=max(16, config.block_n // 2), num_stages=min(2, config.num_stages))
    return config


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the tiling: the fastest on an H200 that fits registers without spills (tests/compile)."""
    rows = problem.seqlen_q * (problem.num_heads_q // problem.num_heads_kv)
    if problem.batch_invariant and problem.packed:
        rows = 64  # the longest sequence depends on the rest of the batch
    config = _of_rows(problem, gpu, 16 if rows <= 16 else 32 if rows <= 32 else 64)
    if gpu.vendor == "nvidia" and gpu.capability == 90:  # measured on Hopper only
        config = _short_cache(problem, gpu, _short_prompt(problem, gpu, _mapped(problem, gpu, config)))
    ahead = may_be_launched_ahead(gpu) and _gains_ahead(problem, gpu, config)
    return changed(config, launched_ahead=ahead)


def _gains_ahead(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether starting ahead of the preceding launch's end was measured to be faster.

    It gained 4 to 6 % in decode from a cold cache, one seventh in a small prefill, and 1 to 8 % from pages. It cost 1 %
    in a chunk batched with decode from pages. It cost 26 % at 32 x 3,000 keys in pages of 16, where all blocks run at
    once without a merge between launches: blocks go where the preceding blocks ended first, three to one SM and one to
    another.
    """
    if not problem.page_size:
        return True
    if config.block_m >= 64:
        return False
    blocks, sms = blocks_with_rows(problem, config), gpu.num_sms or UNKNOWN_SMS
    uneven = sms < blocks <= sms * blocks_per_sm(problem, gpu, config)
    return config.by_map or not uneven or with_splits(problem, gpu, config).num_splits > 1


def _short_cache(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Splits a short cache in pages of less than 128 into one step of 32 keys each, loaded by pointers, if all blocks
    run at once.

    1 x 1,024 keys in pages of 64 took 4.4 us this way, 5.0 with 64 keys and 5.7 by maps; in pages of 16 4.7 to 5.1, 5.1
    and 6.3.
    """
    if config.roles or config.block_m != 16 or not 0 < problem.page_size < 128:
        return config
    tile = changed(config, block_n=32, num_warps=2, num_stages=2, by_map=False, kv_heads=1)
    shares = blocks_with_rows(problem, tile) * -(-problem.seqlen_k // 32)
    measured = (
        problem.dtype != "float32"
        and 128 < padded(problem.head_dim) + padded(problem.head_dim_v) <= 256
        and problem.mask_shape is None
        and problem.bias_shape is None
        and not problem.batch_invariant
        and not problem.packed
        and shares <= 2 * (gpu.num_sms or UNKNOWN_SMS)
    )
    if not measured:
        return config
    split = with_splits(problem, gpu, tile)
    return tile if one_step(problem, split) else config


SHORT = 128  # keys of one step


def _short_prompt(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Processes all keys of a dense prompt in one step if tiles of 16 rows all run at once; else makes the step no
    longer than the prompt.

    For calls of 2 to 3 us: one head of 128 queries took 2.37 us this way and 2.72 with 64 x 64 in two steps, 16 heads
    2.73 and 2.84; one head of 32 1.48 with 16 x 32 and 1.71 with 16 x 64, of 4 1.24 with 16 x 16. If tiles of 16 rows
    do not all run at once, one step for 65 to 128 keys gains 2 % (32 heads: 64 x 128 2.86, 64 x 64 2.92), too little
    for a rule.
    """
    measured = (
        (config.block_m == 64 or problem.seqlen_q == problem.seqlen_k)
        and problem.seqlen_k <= SHORT
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 64
        and problem.dtype != "float32"
        and problem.mask_shape is None
        and problem.bias_shape is None
        and not (problem.page_size or problem.packed or problem.batch_invariant)
    )
    if not measured:
        return config
    block_n = max(16, 1 << (max(1, problem.seqlen_k) - 1).bit_length())
    whole = changed(config, block_n=block_n, num_warps=4, num_stages=2, by_map=False, kv_heads=1)
    narrow = changed(whole, block_m=16)
    if blocks_with_rows(problem, narrow) <= (gpu.num_sms or UNKNOWN_SMS):
        return narrow
    return whole if block_n <= config.block_n else config


FULL = 0.9  # fraction of the SMs that have a block, in one wave
FEW_KEYS = 60  # keys for each of two blocks per SM: fewer are bound by latency
MOSTLY_EDGES = 2048  # keys that a tile of rows sees through a window


def _mapped(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """Returns the tiling with tensor maps, or the config unchanged if they cannot be used or were not measured to be
    faster.

    On an H200 one block per SM with two tiles of 128 keys in flight read 64 x 8,192 keys in 477 us, three blocks of 64
    keys in 487, and 16 x 4,096 in 63.6 and 64.2. If few tiles are split over all SMs, smaller blocks of two warps were
    faster: 1 x 4,096 keys 6.6 us against 7.8, 4 x 4,096 20.0 against 21.3, 1 x 65,536 65.4 against 66.2.
    """
    wide = padded(problem.head_dim) + padded(problem.head_dim_v)
    if config.block_m == 64:  # dense prompts were not compared; a chunk with decode: 185 us by pointers, 138 by maps
        mapped = changed(config, num_stages=3, by_map=True)
        return mapped if problem.page_size and wide <= 256 and may_map(problem, gpu, mapped) else config
    block_n = 128 if wide <= 256 else 64
    sms, tiles_of_rows = gpu.num_sms or UNKNOWN_SMS, blocks_with_rows(problem, config)
    if problem.page_size:
        block_n = min(block_n, problem.page_size)
    keys = longest_steps(problem, config) * config.block_n
    roles = few_rows.tiling(problem, gpu, tiles_of_rows, keys)
    if roles is not None:
        return _with_roles(*roles)
    if block_n < 64:
        return config
    if problem.window_size[0] >= 0 and keys < MOSTLY_EDGES:  # edge tiles, which maps cannot load
        return config
    few = tiles_of_rows <= FEW * sms or (_leaves_sms_idle(tiles_of_rows, sms) and 128 < wide)
    few = few and tiles_of_rows * keys >= 2 * sms * FEW_KEYS
    if few and wide <= 256 and not problem.batch_invariant:  # wider rows do not fit two warps' registers
        stages, block_n, warps = 3, min(block_n, 64), 2
    else:
        stages, warps = (3 if block_n * wide > 64 * 256 else 4), config.num_warps
    mapped = changed(config, block_n=block_n, num_warps=warps, num_stages=stages, by_map=True)
    return mapped if may_map(problem, gpu, mapped) else config


@lru_cache(4096)
def _with_roles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m, block_n, num_warps, num_stages, by_map=True, roles=True)


@lru_cache(4096)
def _leaves_sms_idle(tiles_of_rows: int, sms: int) -> bool:
    """Returns whether no number of splits gives nearly every SM one block and none two.

    Smaller blocks, of which an SM runs three, then took 27.5 us and one block per SM took 30.2 (12 x 2,048 keys), 27.4
    and 31.1 (6 x 4,096), 22.3 and 27.9 (20 x 1,024).
    """
    if tiles_of_rows > sms:
        return tiles_of_rows <= 1.5 * sms
    return all(tiles_of_rows * n < FULL * sms for n in range(1, sms // tiles_of_rows + 1))
