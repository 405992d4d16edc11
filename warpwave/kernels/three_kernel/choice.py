"""The choice of three_kernel's config: tables of the tile and of the launches. Holds no kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels import rules
from warpwave.kernels.arguments import dot_precision, padded
from warpwave.kernels.rules import IN_CODE_OF_MMA, NOT_MEASURED, Rule
from warpwave.kernels.three_kernel import estimates
from warpwave.kernels.three_kernel.config import (
    MAX_WORKSPACE_BYTES,
    SUMS_BYTES,
    block_k_of,
    library_cannot,
    may_hide_keys,
    smem_bytes,
    torch_cannot,
    with_workspace,
)
from warpwave.kernels.three_kernel.plan import Config, least_bytes
from warpwave.problem import DTYPE_BYTES, AttentionProblem

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


# What the tables read -------------------------------------------------------------------------------------------------


class Call:
    """The properties of a call that the rows read. Sizes are computed when a row reads them."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.problem, self.gpu, self.sms = problem, gpu, gpu.assumed_sms
        self.is_float32, self.is_amd = problem.dtype == "float32", gpu.vendor == "amd"
        self.is_hopper, self.has_big_tiles = gpu.capability == 90, gpu.capability in (90, 100, 103)
        self.is_rdna = gpu.is_rdna
        self.is_interpreted = gpu.vendor == "interpreter"
        self.arithmetic = dot_precision(problem, gpu)

    @property
    def is_small(self) -> bool:
        """Returns whether tiles of more than 64 queries and keys would be one block a head."""
        return self.problem.seqlen_q <= 64 and self.problem.seqlen_k <= FEW_KEYS

    @cached_property
    def tile(self) -> Config:
        """The config of the tables of tiles."""
        return smallest_tile(self.problem, self.gpu)

    @cached_property
    def split_d(self) -> int:
        """The splits of head_dim, of at least two steps each, with which the tiles of scores fill the GPU once."""
        p = self.problem
        blocks = p.batch * p.num_heads_q * -(-p.seqlen_q // self.tile.block_m) * -(-p.seqlen_k // self.tile.block_n)
        wanted = (2 if self.is_interpreted else self.sms) // max(1, blocks)
        return max(1, min(wanted, p.head_dim // (2 * block_k_of(p, self.tile)), MOST_SHARES))

    @property
    def suits_wide_steps(self) -> bool:
        """Returns whether steps of 64 of head_dim are faster: in cheap arithmetic, and in bf16x6 for long sums."""
        is_long = self.arithmetic != "ieee" and self.problem.head_dim >= WIDE_STEPS_FROM
        return self.is_hopper and self.is_float32 and (self.arithmetic in CHEAP or is_long)

    @property
    def suits_two_launches(self) -> bool:
        """Returns whether the softmax can be computed with the second product by one wave of narrow tiles."""
        p = self.problem
        if not (self.is_hopper and self.is_float32) or p.seqlen_k > FEW_KEYS:
            return False
        rows = p.batch * p.num_heads_q * -(-p.seqlen_q // ONLINE_ROWS)
        return padded(-(-p.head_dim_v * rows // self.sms)) <= ONLINE_COLUMNS

    @property
    def suits_wide_columns(self) -> bool:
        """Returns whether tiles of 64 columns of out are more than two per SM, and tiles of 128 fit."""
        p = self.problem
        if not (self.is_hopper and self.is_float32 and self.arithmetic in CHEAP):
            return False
        tiles = p.batch * p.num_heads_q * -(-p.seqlen_q // self.tile.block_m) * -(-p.head_dim_v // 64)
        wide = replace(self.stepped, split_d=self.split_d, block_v=128)
        return tiles > 2 * self.sms and smem_bytes(p, self.gpu, wide) <= self.gpu.smem_per_block_bytes

    @cached_property
    def stepped(self) -> Config:
        """The config of the tables of tiles and steps."""
        return _of_wide_steps(self.tile, self) if self.suits_wide_steps else self.tile

    @property
    def is_faster_by_hopper(self) -> bool:
        """Returns whether Hopper's own launches are estimated to take no longer than torch's products."""
        return estimates.hopper_us(self.problem, self.gpu) <= estimates.torch_us(self.problem, self.gpu)

    def is_by_torch(self, values: str) -> bool:
        """Returns whether torch computes the first product, and the second if `values` is "library". float32 results
        of 16-bit products were not tested with AMD's libraries."""
        known = self.is_float32 or self.gpu.vendor == "nvidia"
        return known and not torch_cannot(self.problem, self.gpu, "library", values)

    def fuses(self, block_n: int) -> bool:
        """Returns whether the softmax goes into the first product's epilogue: if that saves more than it costs, and if
        two accumulators do not spill.

        Before Hopper, and on sm_120, products of 128 x 128 leave no registers for it; a mask or bias takes too many on
        every GPU. On Hopper it needs tiles of 128 x 128 instead of 128 x 256, which read one element of q, k and v per
        score in 128 less.
        """
        p = self.problem
        flops = FUSED_FLOPS_A_COLUMN * p.head_dim_v / block_n
        if self.is_hopper:
            flops += FLOPS_A_BYTE * (p.head_dim + p.head_dim_v) * DTYPE_BYTES[p.dtype] / 256
        return (
            (self.has_big_tiles or self.gpu.vendor != "nvidia") and flops <= 6 * FLOPS_A_BYTE and not may_hide_keys(p)
        )


# The tables -----------------------------------------------------------------------------------------------------------

SWEEP = "2026-11-21-h200-three-kernel-sweep.log"
PRODUCTS_2 = "2026-11-21-h200-three-kernel-products-2.log"
LARGE_HEADS = "2026-11-22-h200-large-heads.log"
LARGE_HEADS_FEW_QUERIES = "2026-11-22-h200-large-heads-few-queries.log"
THREE_KERNEL_OF_MMA = "2026-11-27-h200-mma-three-kernel.log"
FEWEST_PROGRAMS = "not measured; the interpreter runs one program after another, so fewer are faster"


class Tile(NamedTuple):
    """Tiles of our own products."""

    block_m: int
    block_n: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


# The widest tile of the usual shapes that fits without spills (tests/compile). The figures are times on an H200.
TILES: tuple[Rule[Tile], ...] = (
    Rule(
        "the interpreter, float32",
        lambda c: c.is_interpreted and c.is_float32,
        (Tile(128, 128, 64, 128, 4, 1),),
        FEWEST_PROGRAMS,
    ),
    Rule("the interpreter", lambda c: c.is_interpreted, (Tile(128, 128, 128, 128, 4, 1),), FEWEST_PROGRAMS),
    Rule("float32, AMD RDNA", lambda c: c.is_float32 and c.is_rdna, (Tile(32, 32, 32, 32, 4, 2),), NOT_MEASURED),
    Rule(
        "float32, at most 64 queries and 512 keys, NVIDIA with wgmma or tcgen05",
        lambda c: c.is_float32 and c.has_big_tiles and c.is_small,
        (Tile(64, 64, 32, 64, 4, 3),),
        "splits of head_dim fill the GPU: 40 us, and 61 to 78 with tiles of 32 (64 queries, head_dim 8192, ieee)",
        SWEEP,
    ),
    Rule(
        "float32, at most 64 queries and 512 keys",
        lambda c: c.is_float32 and c.is_small,
        (Tile(32, 32, 32, 32, 4, 2),),
        NOT_MEASURED,
    ),
    Rule(
        "float32, AMD CDNA, or NVIDIA with wgmma or tcgen05",
        lambda c: c.is_float32 and (c.is_amd or c.has_big_tiles),
        (Tile(64, 64, 32, 64, 4, 2),),
        NOT_MEASURED,
    ),
    Rule(
        "float32, NVIDIA with mma",
        lambda c: c.is_float32,
        (Tile(64, 64, 32, 64, 4, 3),),
        "eight warps with two stages take 2.0 to 2.4 times as long at head_dim 64 to 256, " + IN_CODE_OF_MMA,
        THREE_KERNEL_OF_MMA,
    ),
    Rule("16 bits, AMD RDNA", lambda c: c.is_rdna, (Tile(64, 64, 32, 64, 8, 2),), NOT_MEASURED),
    Rule("16 bits, AMD CDNA", lambda c: c.is_amd, (Tile(64, 64, 32, 64, 4, 2),), NOT_MEASURED),
    Rule("16 bits, at most 64 queries and 512 keys", lambda c: c.is_small, (Tile(64, 64, 64, 64, 4, 2),), NOT_MEASURED),
    Rule(
        "16 bits, at most 64 queries, NVIDIA with wgmma or tcgen05",
        lambda c: c.has_big_tiles and c.problem.seqlen_q <= 64,
        (Tile(64, 128, 64, 128, 4, 3),),
        NOT_MEASURED,
    ),
    Rule(
        "16 bits, at most 64 queries", lambda c: c.problem.seqlen_q <= 64, (Tile(64, 128, 32, 128, 4, 3),), NOT_MEASURED
    ),
    Rule(
        "16 bits, Hopper, the softmax by itself",
        lambda c: c.is_hopper and not c.fuses(128),
        (Tile(128, 256, 32, 256, 8, 4),),
        "not measured; a third more FLOP for each byte of L2, which leaves no room for an epilogue",
    ),
    Rule(
        "16 bits, NVIDIA with wgmma or tcgen05",
        lambda c: c.has_big_tiles,
        (Tile(128, 128, 64, 128, 8, 3),),
        NOT_MEASURED,
    ),
    Rule("16 bits", lambda c: True, (Tile(128, 128, 32, 128, 8, 3),), NOT_MEASURED),
)


def _of_masks(config: Config, call: Call) -> Config:
    return replace(config, block_k=32, block_v=min(config.block_v, 128 if call.has_big_tiles else 64))


def _of_wide_steps(config: Config, call: Call) -> Config:
    return replace(config, block_k=64, num_stages=2)


# How a mask or bias changes the tile.
OF_MASKS: Rule[Callable[[Config, Call], Config]] = Rule(
    "a mask or bias in 16 bits",
    lambda c: may_hide_keys(c.problem) and not c.is_float32 and not c.is_interpreted,
    (_of_masks,),
    "not measured; values and probabilities go through registers",
)
# How the steps over head_dim change if blocks divide it.
OF_STEPS: Rule[Callable[[Config, Call], Config]] = Rule(
    "steps of 64 of head_dim, two in flight, where blocks divide it (float32, Hopper; bf16x6 from 2048 on)",
    lambda c: c.suits_wide_steps,
    (_of_wide_steps,),
    "three steps of 32 take 1.05 times as long at head_dim 512 and 4096 in bf16x3, 1.06 at 4096 in bf16x6",
    PRODUCTS_2,
)


def _by_hopper(config: Config, call: Call) -> Config:
    return replace(config, scores="hopper", values="hopper", block_m=128, block_n=256)


def _in_two_launches(config: Config, call: Call) -> Config:
    p = call.problem
    heads = max(1, p.batch * p.num_heads_q)
    return replace(
        config, values="online", split_d=max(1, min(call.sms // heads, p.head_dim // config.block_k, MOST_SHARES)),
        block_v=ONLINE_COLUMNS, softmax_rows=ONLINE_ROWS, softmax_keys=64,
        softmax_warps=4 if call.arithmetic in CHEAP else 8,
    )  # fmt: skip


# Which launches compute a call.
LAUNCHES: tuple[Rule[Callable[[Config, Call], Config]], ...] = (
    Rule(
        "Hopper's own launches are estimated to take no longer than torch's products",
        lambda c: c.is_faster_by_hopper,
        (_by_hopper,),
        "the choice is within 10 % of the fastest in 60 of 62 calls of 16 to 384 queries",
        LARGE_HEADS_FEW_QUERIES,
    ),
    Rule(
        "scores leave SMs idle; float32, Hopper, at most 512 keys, and 64 columns of out a block in one wave",
        lambda c: c.split_d > 1 and c.suits_two_launches,
        (_in_two_launches,),
        "two launches take 5.4, 5.8 and 7.5 us in bf16x3, bf16x6 and ieee at head_dim 512, three 8.0, 9.4 and 13.6 "
        "(4 heads of 64 queries and keys); at 2048 both take 9.4 and 10.8",
        PRODUCTS_2,
    ),
    Rule(
        "scores leave SMs idle; float32 in bf16x3, Hopper, more than two tiles of 64 columns of out an SM",
        lambda c: c.split_d > 1 and c.suits_wide_columns,
        (lambda config, call: replace(config, split_d=call.split_d, block_v=128),),
        "20.3 us at head_dim 8192, where 64 columns take 21.8; at 4096, where tiles are fewer, 15.1 and 13.5",
        LARGE_HEADS,
    ),
    Rule(
        "scores leave SMs idle: blocks divide head_dim",
        lambda c: c.split_d > 1,
        (lambda config, call: replace(config, split_d=call.split_d),),
        "17 us, and 19 by torch's products at head_dim 512; 40 and 207 at 8192 (ieee, 64 queries)",
        SWEEP,
    ),
    Rule(
        "torch computes both products",
        lambda c: c.is_by_torch("library"),
        (lambda config, _: replace(config, scores="library", values="library"),),
        "our products take 1.33 times as long at head_dim 512, 1.05 at 1024 (2,048 queries)",
        SWEEP,
    ),
    Rule(
        "torch computes the first product, and ours skips values that a mask or bias hides",
        lambda c: c.is_by_torch("triton"),
        (lambda config, _: replace(config, scores="library", values="triton"),),
        "our first product takes 1.05 times as long at head_dim 512 and 1024 (2,048 queries)",
        SWEEP,
    ),
    Rule(
        "16 bits, and the softmax in the first product's epilogue saves more than it costs",
        lambda c: not c.is_float32 and c.fuses(min(128, c.tile.block_n)),
        (lambda config, _: replace(config, scores="fused"),),
        "not measured; by arithmetic on both rates",
    ),
    Rule("our own products", lambda c: True, (lambda config, _: config,), NOT_MEASURED),
)
LAUNCHES_THAT_DIVIDE, OWN_LAUNCHES = LAUNCHES[1:4], LAUNCHES[-2:]  # head_dim over blocks; by our products alone
tile_of = rules.chooser(TILES, Call)
launches_of = rules.chooser(LAUNCHES, Call)
own_launches_of = rules.chooser(OWN_LAUNCHES, Call)


def _changes(problem: AttentionProblem, gpu: Gpu, call: Call) -> list[Rule[Callable[[Config, Call], Config]]]:
    """Returns the rows that follow those of the tile: of the steps, if blocks divide head_dim, and of the launches."""
    launches = launches_of(problem, gpu)
    divides = launches in LAUNCHES_THAT_DIVIDE and OF_STEPS.holds(call)
    return [*([OF_STEPS] if divides else []), launches]


def rows_of(problem: AttentionProblem, gpu: Gpu) -> list[Rule[Any]]:
    """Returns the rows that choose the default config: of the tile, its changes, and the launches."""
    call = Call(problem, gpu)
    masks = [OF_MASKS] if OF_MASKS.holds(call) else []
    return [tile_of(problem, gpu), *masks, *_changes(problem, gpu, call)]


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns Hopper's launches if they are fastest, else torch's products if it can compute them, else ours."""
    call = Call(problem, gpu)
    return with_workspace(problem, gpu, rules.changed(call.tile, _changes(problem, gpu, call), call))


def own_products(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the default for calls whose products torch cannot compute."""
    call = Call(problem, gpu)
    return with_workspace(problem, gpu, own_launches_of(problem, gpu).choices[0](call.tile, call))


def smallest_tile(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config of three launches with our products, with the tile of the tables."""
    call, tile = Call(problem, gpu), tile_of(problem, gpu).choices[0]
    rows, keys, warps = _softmax_space(problem)[0].values()
    config = Config(
        "triton", "triton", *tile, 1, 64 if call.is_interpreted else rows, keys, warps, MAX_WORKSPACE_BYTES, SUMS_BYTES
    )
    return _of_masks(config, call) if OF_MASKS.holds(call) else config


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the rows that chose it."""
    return rules.notes(rows_of(problem, gpu), config == default(problem, gpu))
