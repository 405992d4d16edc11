"""The choice of a config for a call of `large_head_dim`: the tables of tiles, and the number of splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels import partials, rules
from warpwave.kernels.arguments import dot_precision
from warpwave.kernels.large_head_dim import latent_host as latent
from warpwave.kernels.large_head_dim.config import (
    Config,
    block_d_of,
    column_parts,
    columns_of,
    fits,
    registers,
    row_tiles,
)
from warpwave.kernels.large_head_dim.splits import splits_by_rounds
from warpwave.kernels.rules import NOT_MEASURED, Rule
from warpwave.problem import DTYPE_BYTES, AttentionProblem

MAX_SPLITS_BYTES = 64 * 1024**2  # bytes of states that await their merge: they should stay in L2


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory and registers."""
    fitting = [c for c in _space(problem, gpu) if fits(problem, gpu, c)]
    default = of_table(problem, gpu)
    while not fits(problem, gpu, default):
        smaller = _smaller(default)
        if smaller == default:
            return fitting
        default = smaller
    return [default, *(c for c in fitting if c != default)]


def _smaller(config: Config) -> Config:
    """Returns the next config to try if one does not fit."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.q_resident:
        return replace(config, q_resident=False, block_d=min(64, config.block_d))
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    if config.block_m > 16:
        return replace(config, block_m=16)
    return replace(config, block_d=max(16, config.block_d // 2))


def _space(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns configs with two values of v_parts, both ways to read q, and the tiles that do not spill by the register
    estimate. num_splits is that of the default: it depends on the grid."""
    num_splits, parts = of_table(problem, gpu).num_splits, column_parts(problem, gpu)
    candidates = [
        Config(block_m, block_n, block_d, v_parts, num_splits, q_resident, num_warps, num_stages)
        for block_m in (16, 32, 64, 128)
        for block_n in (16, 32, 64)
        for q_resident, block_d in (
            (True, block_d_of(problem, block_m, 128)),
            (False, block_d_of(problem, block_m, 64)),
        )
        for v_parts in dict.fromkeys((parts, 2 * parts if problem.head_dim_v > 128 * parts else parts))
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3)
        # Two warpgroups on 64 rows divide the keys between them: 16 each are the fewest that gave correct results.
        if not (gpu.capability == 90 and (block_m, num_warps) == (64, 8) and block_n == 16)
        if not (gpu.capability == 90 and (block_m, num_warps) == (64, 8) and problem.dtype == "float32")
    ]
    limit = gpu.registers_per_thread or 255
    return [c for c in candidates if registers(problem, gpu, c) <= limit]


# What the tables read -------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The part of a config that the rows choose.

    Args:
        block_d: the most elements of head_dim that a product sums over.
        columns: columns of v of a program; 0 for as many as registers hold.
    """

    block_m: int
    block_n: int
    block_d: int
    q_resident: bool
    num_warps: int
    num_stages: int
    columns: int = 0
    by_map: bool = False


RESIDENT = Tile(64, 32, 128, True, 8, 2)  # Hopper's tile of many rows beside a resident q


class Call:
    """The properties of a call that the rows read."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.problem, self.gpu = problem, gpu
        self.is_few = problem.seqlen_q * problem.heads_together <= 16  # rows
        self.is_interpreted, self.is_hopper = gpu.vendor == "interpreter", gpu.capability == 90
        self.is_float32, self.is_amd = problem.dtype == "float32", gpu.vendor == "amd"
        self.is_rdna = gpu.is_rdna
        self.has_room = not self.is_amd and gpu.smem_per_block_bytes >= 160 * 1024

    def is_latent(self, rows: int) -> bool:
        """Returns whether the launch for latent caches with blocks of so many rows can run the call, and v is likely to
        be part of k."""
        return self.problem.looks_latent and not latent.cannot(self.problem, self.gpu, rows)

    @property
    def is_one_stage(self) -> bool:
        """Returns whether the parts of one step fill registers or shared memory."""
        in_one = self.is_amd or dot_precision(self.problem, self.gpu) == "ieee"
        return self.is_rdna or (self.is_float32 and in_one)

    @property
    def holds_q(self) -> bool:
        """Returns whether q stays in shared memory beside Hopper's tile of many rows."""
        return self.is_hopper and fits(self.problem, self.gpu, config_of(RESIDENT, self))

    @property
    def shares_registers(self) -> bool:
        """Returns whether data other than the tile needs registers."""
        return self.problem.packed or self.problem.mask_shape is not None or self.problem.bias_shape is not None

    @property
    def is_whole(self) -> bool:
        """Returns whether pieces have no padding, and no other data takes their registers."""
        return self.problem.head_dim % 64 == 0 and self.problem.head_dim_v % 256 == 0 and not self.shares_registers

    @property
    def is_ragged(self) -> bool:
        """Returns whether head_dim, or a program's columns of v, are no multiple of 128."""
        p = self.problem
        return bool(p.head_dim % 128 or -(-p.head_dim_v // column_parts(p, self.gpu)) % 128)


def config_of(tile: Tile, call: Call) -> Config:
    """Returns the config of a tile, with keys that are not split."""
    p, (m, n, d, q_resident, warps, stages, columns, by_map) = call.problem, tile
    if by_map:
        return Config(m, n, d, 1, 1, q_resident, warps, stages, by_map)
    parts = -(-p.head_dim_v // columns) if columns else column_parts(p, call.gpu)
    return Config(m, n, block_d_of(p, m, d) if d >= 64 else d, parts, 1, q_resident, warps, stages)


# The tables -----------------------------------------------------------------------------------------------------------

LARGE_HEADS = "2026-11-22-h200-large-heads.log"
LATENTS = "2026-11-22-h200-latents.log"
MANY_ROWS = "2026-11-29-h200-decode-large-heads.jsonl"
FEWEST_PROGRAMS = "not measured; the interpreter runs one program after another, so fewer are faster"
# K and V are read once for at most 16 rows, so the bytes in flight decide.
FEW_ROWS = "tiles of 16, 32 and 64 keys read the same 4.48 TB/s at batch 16 and head_dim 512"
LOG = "large_head_dim.md"

BY_MAP: tuple[Rule[Tile], ...] = (
    Rule(
        "one query of at most 16 heads on a latent cache, Hopper, 16 bits, head_dim up to 640: tensor maps",
        lambda c: c.is_latent(latent.FEW),
        (Tile(16, 64, 64, True, 4, 2, by_map=True),),
        "19.7 us, and 25.6 by pointers at 8 x 4,096 keys; 40.1 and 56.4 at 1 x 65,536; level at 16 x 65,536",
        LATENTS,
    ),
    Rule(
        "more than 16 rows on a latent cache, Hopper, 16 bits, head_dim_v a multiple of 128 up to 512 and at most 64 "
        "columns more in k: tensor maps",
        lambda c: not c.is_few and c.is_latent(latent.MANY),
        (Tile(64, 64, 64, True, 16, 2, by_map=True),),
        "1.30 to 3.20 times as fast as by pointers in 21 calls on an H200, 2.23 in the geometric mean",
        MANY_ROWS,
    ),
)
# The widest tile that spills on no target (tests/compile); on Hopper the fastest one measured. The figures are of an
# H200.
BY_POINTERS: tuple[Rule[Tile], ...] = (
    Rule(
        "the interpreter, head_dim up to 512",
        lambda c: c.is_interpreted and c.problem.head_dim <= 512,
        (Tile(64, 64, 128, True, 4, 1),),
        FEWEST_PROGRAMS,
    ),
    Rule("the interpreter", lambda c: c.is_interpreted, (Tile(64, 64, 128, False, 4, 1),), FEWEST_PROGRAMS),
    Rule(
        "AMD RDNA, or float32 on AMD or in ieee; at most 16 rows",
        lambda c: c.is_one_stage and c.is_few,
        (Tile(16, 16, 32, False, 8, 1),),
        NOT_MEASURED,
    ),
    Rule(
        "AMD RDNA, or float32 on AMD or in ieee",
        lambda c: c.is_one_stage,
        (Tile(32, 16, 32, False, 8, 1),),
        NOT_MEASURED,
    ),
    Rule(
        "float32, at most 16 rows",
        lambda c: c.is_float32 and c.is_few,
        (Tile(16, 16, 32, False, 8, 2),),
        NOT_MEASURED,
    ),
    Rule("float32", lambda c: c.is_float32, (Tile(32, 16, 32, False, 8, 2),), NOT_MEASURED),
    Rule(
        "16 bits, at most 16 rows, Hopper, a latent cache of head_dim up to 640 with a split for each resident block",
        lambda c: c.is_few and latent.takes_longer_tiles(c.problem, c.gpu),
        (Tile(16, 64, 64, True, 4, 2),),
        "32 keys a step took 1.31 times as long with two blocks per SM, 1.05 times with four",
        LARGE_HEADS,
    ),
    Rule(
        "16 bits, at most 16 rows, head_dim up to 1024, NVIDIA with 160 KiB of shared memory",
        lambda c: c.is_few and c.problem.head_dim <= 1024 and c.has_room,
        (Tile(16, 32, 64, True, 4, 2),),
        FEW_ROWS,
        LOG,
    ),
    Rule(
        "16 bits, at most 16 rows, head_dim up to 1024",
        lambda c: c.is_few and c.problem.head_dim <= 1024,
        (Tile(16, 16, 64, True, 4, 2),),
        NOT_MEASURED,
    ),
    Rule(
        "16 bits, at most 16 rows, NVIDIA with 160 KiB of shared memory",
        lambda c: c.is_few and c.has_room,
        (Tile(16, 32, 64, False, 4, 2),),
        NOT_MEASURED,
    ),
    Rule("16 bits, at most 16 rows", lambda c: c.is_few, (Tile(16, 16, 64, False, 4, 2),), NOT_MEASURED),
    Rule("16 bits, AMD CDNA", lambda c: c.is_amd, (Tile(64, 32, 64, False, 4, 2),), NOT_MEASURED),
    Rule(
        "16 bits, Hopper, q fits shared memory",
        lambda c: c.holds_q,
        (RESIDENT,),
        "not measured; q is read once instead of once for each tile of keys",
    ),
    Rule(
        "16 bits, Hopper, head_dim in whole pieces of 64 and head_dim_v of 256, no mask or bias, not packed",
        lambda c: c.is_hopper and c.is_whole,
        (Tile(128, 64, 64, False, 8, 3, columns=256),),
        "128 rows share each read: 2.4 ms at head_dim 1024, and 6.2 with 64 rows of 512 columns",
        LOG,
    ),
    Rule("16 bits, Hopper", lambda c: c.is_hopper, (Tile(64, 32, 64, False, 8, 2),), NOT_MEASURED),
    Rule("16 bits", lambda c: True, (Tile(64, 32, 64, False, 8, 2),), NOT_MEASURED),
)
RULES = (*BY_MAP, *BY_POINTERS)
# Fewer rows or keys on NVIDIA other than Hopper, if other data takes the registers of a tile of many rows: addresses of
# rows that are read one element at a time, of many narrow pieces, of a mask or bias, or of packed sequences.
LIGHTER: tuple[Rule[Callable[[Config, Call], Config]], ...] = (
    Rule(
        "head_dim or head_dim_v not a multiple of 8",
        lambda c: c.problem.head_dim % 8 > 0 or c.problem.head_dim_v % 8 > 0,
        (lambda config, _: replace(config, block_m=32),),
        NOT_MEASURED,
    ),
    Rule(
        "a mask, a bias, packed sequences, or widths that are no multiple of 128",
        lambda c: c.shares_registers or c.is_ragged,
        (lambda config, _: replace(config, block_n=16),),
        NOT_MEASURED,
    ),
    Rule("widths in multiples of 128 alone", lambda c: True, (lambda config, _: config,), NOT_MEASURED),
)


def rows_of(problem: AttentionProblem, gpu: Gpu, by_map: bool = True) -> list[Rule[Any]]:
    """Returns the rows that choose the default config: of the tile, and of its change.

    Args:
        by_map: whether v may be part of k.
    """
    call = Call(problem, gpu)
    first = rules.deciding(RULES if by_map else BY_POINTERS, call)
    return [first, rules.deciding(LIGHTER, call)] if first is BY_POINTERS[-1] else [first]


def of_table(problem: AttentionProblem, gpu: Gpu, by_map: bool = True) -> Config:
    """Returns the config that the tables choose, whether or not it fits shared memory."""
    first, *changes = rows_of(problem, gpu, by_map)
    call = Call(problem, gpu)
    config = rules.changed(config_of(first.choices[0], call), changes, call)
    splits = latent.num_splits(problem, gpu, config.block_m) if config.by_map else _num_splits(problem, gpu, config)
    bytes_each = max(1, partials.workspace_bytes(problem, 1) * latent.sequences(problem) // max(1, problem.batch))
    return replace(config, num_splits=max(1, min(splits, MAX_SPLITS_BYTES // bytes_each)))


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the rows that chose it."""
    chosen = configs(problem, gpu)[0]
    return rules.notes(rows_of(problem, gpu), config == chosen, chosen == of_table(problem, gpu))


# Splits ---------------------------------------------------------------------------------------------------------------


def _blocks_of_sm(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns how many blocks of a few rows a Hopper multiprocessor runs at once: two if shared memory holds both.

    While one block waits for a tile of keys, the other multiplies: 128 blocks read 3.3 to 3.6 TB/s of an H200's 4.8,
    256 blocks 4.4 to 4.5 (head_dim 512, 16 heads on 4).
    """
    if gpu.capability != 90 or config.block_m > 16 or not config.q_resident:
        return 1
    block_v, v_pieces = columns_of(problem, config)
    width = -(-problem.head_dim // config.block_d) * config.block_d
    values = 0 if problem.looks_latent else block_v * v_pieces  # in a latent cache they are part of the tile of k
    tiles = max(1, config.num_stages - 1) * config.block_n * (width + values)
    taken = DTYPE_BYTES[problem.dtype] * (config.block_m * width + tiles) + 4096
    return 2 if 2 * taken <= gpu.smem_per_block_bytes else 1


def _num_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the number of splits for blocks that read by pointers."""
    blocks = row_tiles(problem, config) * config.v_parts * latent.sequences(problem)
    places = 2 if gpu.vendor == "interpreter" else gpu.assumed_sms * _blocks_of_sm(problem, gpu, config)
    return splits_by_rounds(blocks, problem.seqlen_k, config.block_n, places)
