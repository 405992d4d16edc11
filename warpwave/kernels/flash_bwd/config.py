"""Configs of `flash_bwd`: their tiles, what they can compute, and the shared memory of their launches."""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.gpu import WGMMA_OR_TCGEN05, WGMMA_ROWS, Gpu
from warpwave.kernels import rules
from warpwave.kernels.arguments import column_widths, dot_precision, total_widths
from warpwave.kernels.cost import PARTS, bytes_per_score
from warpwave.problem import DTYPE_BYTES, AttentionProblem


@dataclass(frozen=True)
class Tile:
    """Tile shape and launch shape of one launch.

    Args:
        block_m: queries of a tile, a power of two, at least 16.
        block_n: keys of a tile, a power of two, at least 16.
        num_warps: warps of a block, a power of two.
        num_stages: tiles in flight, of the operands that the loop walks.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        rules.check_sizes(self, {"block_m": 16, "block_n": 16, "num_warps": 1}, ("num_stages",))


@dataclass(frozen=True)
class Config:
    """Tiles of the launches.

    Args:
        dq: of the launch that owns `block_m` queries and walks keys; the launch of the bias has the same tile.
        dkv: of the launch that owns `block_n` keys and walks queries.
        split_dkv: whether dk and dv take a launch each: one product more, and half the accumulators of a thread.
        joint: whether one launch with the tile `dq` computes every gradient. The tile must hold all queries or all keys
            of a sequence; if it does not hold the others, blocks walk them. `dkv` and `split_dkv` have no effect then.
        splits: parts of the others, each of which a block walks.
    """

    dq: Tile
    dkv: Tile
    split_dkv: bool = False
    joint: bool = False
    splits: int = 1

    def __post_init__(self) -> None:
        rules.check_sizes(self, {}, ("splits",))

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The names of fields that no launch of this config reads."""
        return ("dkv", "split_dkv") if self.joint else ("splits",)


def adds_up(problem: AttentionProblem) -> bool:
    """Returns whether one block of a joint launch can add up every gradient: not of a bias beside grouped heads, whose
    sums run over different heads."""
    return problem.bias_shape is None or problem.num_heads_q == problem.num_heads_kv


def walked_of(problem: AttentionProblem, config: Config) -> str:
    """Returns what the blocks of a joint launch walk: "keys" if its tile holds the queries alone, "queries" if it holds
    the keys alone, "" if it holds both."""
    if not config.joint:
        return ""
    return "keys" if problem.seqlen_k > config.dq.block_n else "queries" if problem.seqlen_q > config.dq.block_m else ""


def has_mask_of_queries(problem: AttentionProblem) -> bool:
    """Returns whether a mask has an axis of queries. Padding has none: it is read as one row."""
    return problem.mask_shape is not None and problem.mask_shape[2] > 1


def may_walk(problem: AttentionProblem, walked: str) -> bool:
    """Returns whether blocks of a joint launch can walk keys, or queries: not of packed sequences, beside a bias, ALiBi
    or sinks, whose gradients are sums over what several blocks walk, not the keys of grouped heads, and not in float32,
    where a block must compute the statistics of its rows from its own products."""
    has_sums = problem.bias_shape is not None or problem.alibi_shape is not None or problem.has_sinks
    is_grouped = problem.num_heads_q > problem.num_heads_kv
    is_float32 = problem.dtype == "float32"
    return not (problem.packed or has_sums or is_float32 or (walked == "keys" and is_grouped))


def check(problem: AttentionProblem, config: Config) -> None:
    """Raises ValueError if the config cannot compute the gradients of the problem."""
    if not config.joint:
        return
    tile = config.dq
    if problem.seqlen_q > tile.block_m and problem.seqlen_k > tile.block_n:
        raise ValueError(
            f"config has a joint launch with a tile of {tile.block_m} x {tile.block_n}; it must hold all queries or "
            f"all keys of a sequence, {problem.seqlen_q} x {problem.seqlen_k}"
        )
    walked = walked_of(problem, config)
    if walked and not may_walk(problem, walked):
        raise ValueError(
            f"config has a joint launch that walks {walked}, which takes no packed sequences, bias, ALiBi, sinks or "
            f"float32, and walks no keys of grouped heads; its tile of {tile.block_m} x {tile.block_n} must hold all "
            f"queries and keys of a sequence, {problem.seqlen_q} x {problem.seqlen_k}"
        )
    if not adds_up(problem):
        raise ValueError("config has a joint launch, which takes no bias beside grouped heads; joint must be False")


def arithmetic_of(problem: AttentionProblem, gpu: Gpu) -> str:
    """Returns the arithmetic of products: that of the forward, but bf16x6 for a call that names bf16x3, because
    gradients must be as accurate as float32 products (tests/conformance/gates.py)."""
    found = dot_precision(problem, gpu)
    return "bf16x6" if found == problem.precision == "bf16x3" else found


# Shared memory --------------------------------------------------------------------------------------------------------


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every target compiles to."""
    if walked := walked_of(problem, config):
        return smem_of_one_side(problem, gpu, config.dq, walked)
    if config.joint:
        return smem_of_joint(problem, gpu, config.dq)
    return max(smem_of_tile(problem, gpu, config.dq, False), smem_of_tile(problem, gpu, config.dkv, True))


def smem_of_tile(problem: AttentionProblem, gpu: Gpu, tile: Tile, owns_keys: bool) -> int:
    """Returns `smem_bytes` of one launch. Args: owns_keys: whether a block owns keys and walks queries, or owns queries
    and walks keys.
    """
    owned, walked = (tile.block_n, tile.block_m) if owns_keys else (tile.block_m, tile.block_n)
    widths = total_widths(problem, gpu, owned)
    size, arithmetic = DTYPE_BYTES[problem.dtype], arithmetic_of(problem, gpu)
    score = tile.block_m * tile.block_n
    step, operand = size * walked * sum(widths), size * walked * max(widths)
    has_mask = problem.mask_shape is not None or problem.bias_shape is not None
    if gpu.has_mma and problem.dtype != "float32":
        # A tile is in registers when the next one arrives.
        arriving = step * (tile.num_stages - 1) if tile.num_stages > 1 else step * 3 // 2
        beside = operand + 1024 if has_mask else 0
    else:
        arriving = step * tile.num_stages
        beside = operand if tile.num_stages == 1 else 0  # a tile and its transpose
        beside = step if has_mask else beside  # they pass through registers, where rows that nothing sees are zeroed
    if has_mask:
        arriving += score * bytes_per_score(problem) * tile.num_stages
    if gpu.vendor == "amd":
        one = size * (owned + walked) * max(widths)  # one operand at a time passes through it
        ahead = arriving if tile.num_stages > 1 or gpu.arch == "gfx950" else 0
        return (one + ahead) * 17 // 16 + size * score
    if gpu.capability == 90 and arithmetic.startswith("bf16") and owned >= WGMMA_ROWS:
        # Operands are there in parts; with several stages the tiles that arrive are there too (compiled figures).
        in_parts = 2 * PARTS[arithmetic] * (owned + walked) * sum(widths)
        arriving = step * tile.num_stages if tile.num_stages > 1 else 0
        return in_parts + arriving + score * bytes_per_score(problem) * tile.num_stages + 2 * 1024
    if arithmetic in PARTS and gpu.capability in WGMMA_OR_TCGEN05:
        # Shared memory holds operands and scores twice: unchanged, and in parts.
        parts = 2 * PARTS[arithmetic] if arithmetic.startswith("bf16") else 4
        beside += parts * (walked * sum(widths) + 2 * score)
        size += parts
    elif arithmetic in PARTS:
        # Parts of operands are in registers; scores are exchanged several times (compiled figures).
        beside = size * (walked * sum(widths) // 2 + 10 * score) + (size * owned * sum(widths) if has_mask else 0)
        beside += 3 * 1024
    return size * owned * sum(widths) + arriving + beside + 2 * size * score + 2 * 1024


def smem_of_joint(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> int:
    """Returns `smem_bytes` of the joint launch: its operands, and a float32 tile of scores or of a gradient,
    which changes its layout; on AMD, one operand or tile at a time."""
    size, widths = DTYPE_BYTES[problem.dtype], total_widths(problem, gpu, tile.block_m)
    gradient, score = max(tile.block_m, tile.block_n) * max(widths), tile.block_m * tile.block_n
    if gpu.vendor == "amd":
        return max(size * gradient, 4 * score) * 17 // 16
    if (arithmetic := arithmetic_of(problem, gpu)).startswith("bf16"):
        size = max(size, 2 * PARTS[arithmetic])
    return size * (tile.block_m + tile.block_n) * sum(widths) + 4 * max(gradient, score) + 1024


def smem_of_one_side(problem: AttentionProblem, gpu: Gpu, tile: Tile, walked: str) -> int:
    """Returns `smem_bytes` of a joint launch that walks keys or queries: what it holds, the tiles in flight, among them
    out beside q and dO, and what changes its layout: scores, or a gradient and an operand. Under a mask, K without
    infinities and NaN is there too."""
    size, widths = DTYPE_BYTES[problem.dtype], total_widths(problem, gpu, tile.block_n)
    score, held, of_step = tile.block_m * tile.block_n, tile.block_m * sum(widths), tile.block_n * sum(widths)
    if walked == "queries":
        held, of_step = of_step, held + tile.block_m * widths[1]
    changing = 2 * size * score
    widest = max(map(max, column_widths(problem, gpu, tile.block_n)))
    if tile.block_m < WGMMA_ROWS <= tile.block_n and max(widths) > 128:  # dQ is by mma, other products are by wgmma
        changing = max(changing, size * tile.block_n * widest)
    if tile.block_n < WGMMA_ROWS <= tile.block_m:  # dQ is by wgmma, other products are by mma
        changing = max(changing, size * tile.block_m * widest)
    if problem.mask_shape is not None:
        changing += size * tile.block_n * widths[0]
    return size * (held + tile.num_stages * of_step) + changing + 2 * 1024


def smem_in_use(problem: AttentionProblem, gpu: Gpu, tile: Tile, owns_keys: bool) -> int:
    """Returns the part of `smem_of_tile` that launches usually need on NVIDIA GPUs: the owned operands, and the walked
    tiles in flight, with `mma` all but the one in registers. Without float32 parts they compile to that."""
    owned, walked = (tile.block_n, tile.block_m) if owns_keys else (tile.block_m, tile.block_n)
    in_registers = gpu.has_mma and problem.dtype != "float32" and tile.num_stages > 1
    rows = owned + walked * (tile.num_stages - in_registers)
    return DTYPE_BYTES[problem.dtype] * rows * sum(total_widths(problem, gpu, owned))


BLOCKS_PER_SM = 4
PARTS_AT_ONCE = 1024  # numbers of a gradient of which a block adds the parts


def splits_of(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> int:
    """Returns into how many parts the queries or keys that a joint launch walks are divided: what gives each SM one
    block of eight warps, or two smaller ones, or four of small tiles, with at least two tiles in each part."""
    of_sm = 1 if tile.num_warps > 4 else 2 if tile.block_m * tile.block_n >= 2048 else 4
    owners = problem.batch * problem.num_heads_kv
    group = problem.num_heads_q // problem.num_heads_kv
    tiles = -(-problem.seqlen_k // tile.block_n)
    if tiles == 1:
        tiles = group * -(-problem.seqlen_q // tile.block_m)
    return max(1, min(tiles // 2, of_sm * gpu.assumed_sms // max(1, owners)))


def parts_of_bias(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns into how many sums the gradient of a bias is divided: one, or what gives each SM four blocks if the tiles
    of the bias are few and many batch items or heads read them."""
    assert problem.bias_shape is not None
    batch, heads, rows, keys = problem.bias_shape
    items = (problem.batch if batch == 1 else 1) * (problem.num_heads_q if heads == 1 else 1)
    tiles = batch * heads * -(-rows // config.dq.block_m) * -(-keys // config.dq.block_n)
    return max(1, min(items, BLOCKS_PER_SM * gpu.assumed_sms // max(1, tiles)))
