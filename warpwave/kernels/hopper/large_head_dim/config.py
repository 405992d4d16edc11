"""A config of `hopper/large_head_dim`, the sizes that follow from it, and the table that chooses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from warpwave.gpu import Gpu
from warpwave.kernels import rules
from warpwave.kernels.rules import Rule
from warpwave.problem import DTYPE_BYTES, AttentionProblem

BLOCK_M = 64
BLOCK_N = 64
CHUNK = 128  # columns
MAX_STAGES = 12
MAX_COLUMNS = 640  # of V per block: 160 registers a thread of the two warpgroups
SMEM_PER_BLOCK = 227 * 1024


@dataclass(frozen=True)
class Config:
    """How blocks divide the columns of V, and how many chunks are in flight.

    Args:
        v_parts: number of blocks that divide the columns of V for one tile of queries; each computes all its scores.
            At most 640 columns per block.
        num_stages: chunks of K and V in flight, 64 keys x 128 columns each: 2 to 12.
        scores_ahead: whether the scores of the next tile of keys are multiplied during the softmax or after it.
    """

    v_parts: int
    num_stages: int
    scores_ahead: bool = False

    def __post_init__(self) -> None:
        if self.v_parts < 1:
            raise ValueError(f"v_parts is {self.v_parts}; it must be at least 1")
        if not 2 <= self.num_stages <= MAX_STAGES:
            raise ValueError(f"num_stages is {self.num_stages}; it must be 2 to {MAX_STAGES}")


# Sizes ----------------------------------------------------------------------------------------------------------------


def chunks_of(width: int) -> int:
    """Returns the chunks of a row of this width."""
    return -(-width // CHUNK)


def v_chunks_of(problem: AttentionProblem, v_parts: int) -> int:
    """Returns the chunks of V's columns in one part; the last part may have fewer chunks that hold data."""
    return -(-chunks_of(problem.head_dim_v) // v_parts)


def v_stages_of(problem: AttentionProblem, v_parts: int) -> int:
    """Returns the stages of a ring of V: the chunks of a tile, all of which its reader awaits before it hands any
    back."""
    return max(2, -(-v_chunks_of(problem, v_parts) // 2))


def cannot(problem: AttentionProblem, config: Config) -> str:
    """Returns why a config cannot run a problem, or ""."""
    k_stages = config.num_stages - 2 * v_stages_of(problem, config.v_parts)
    if v_chunks_of(problem, config.v_parts) * CHUNK > MAX_COLUMNS:
        return f"a block takes at most {MAX_COLUMNS} columns of v"
    if k_stages < 2:
        return f"of {config.num_stages} chunks, {k_stages} remain for K, which needs at least 2"
    if config.scores_ahead and k_stages < chunks_of(problem.head_dim):
        return (
            f"scores_ahead needs a whole tile of K, {chunks_of(problem.head_dim)} chunks, and {k_stages} remain for K"
        )
    return ""


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns an upper bound on the shared memory of one block; tests compare it with what every config compiles to."""
    size = DTYPE_BYTES[problem.dtype]
    chunks = chunks_of(problem.head_dim) + config.num_stages
    # The last terms: two tiles of probabilities; factors, barriers and reductions.
    return size * (chunks * BLOCK_N * CHUNK + 2 * BLOCK_M * BLOCK_N) + 2048


# Choice of a config ---------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first, then every other candidate that fits the GPU's shared memory and registers."""
    first = default(problem, gpu)
    space = [
        Config(parts, stages, ahead)
        for parts in (first.v_parts, first.v_parts + 1)
        for stages in (first.num_stages, first.num_stages - 1, first.num_stages - 2)
        for ahead in (False, True)
        if stages >= 2 and not cannot(problem, Config(parts, stages, ahead))
    ]
    return [first, *(c for c in space if c != first)]


class Call:
    """The properties of a call that the rows read."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.v_parts = -(-problem.head_dim_v // MAX_COLUMNS)
        # As many chunks in flight as fit.
        fitting = (n for n in range(2, MAX_STAGES + 1) if smem_bytes(problem, gpu, Config(1, n)) <= SMEM_PER_BLOCK)
        self.num_stages = max(fitting)
        self.holds_tile = not cannot(problem, Config(self.v_parts, self.num_stages, True))


Change = Callable[[Config, Call], Config]

# How blocks divide the columns of V.
OF_COLUMNS: Rule[Change] = Rule(
    f"head_dim_v above {MAX_COLUMNS}: blocks divide the columns of V",
    lambda c: c.v_parts > 1,
    (lambda config, call: replace(config, v_parts=call.v_parts),),
    "not measured; a block's registers hold no more columns, and each block computes all scores",
)
# When the scores of the next tile are multiplied. Both rows depend on widths alone.
RULES: tuple[Rule[Change], ...] = (
    Rule(
        "the ring of K holds a tile of keys: scores of the next one during the softmax",
        lambda c: c.holds_tile,
        (lambda config, _: replace(config, scores_ahead=True),),
        "588 TFLOP/s, and 502 with scores after the softmax at 8192 x 512; 557 and 510 causal",
        "hopper_large_head_dim.md",
    ),
    Rule(
        "the ring of K holds less than a tile of keys: scores after the softmax",
        lambda c: True,
        (lambda config, _: config,),
        "not measured; chunks of a tile must be loaded before its scores",
    ),
)


def rows_of(problem: AttentionProblem, gpu: Gpu) -> list[Rule[Any]]:
    """Returns the rows that choose the default config: of the scores, and of the columns of V."""
    call = Call(problem, gpu)
    return [rules.deciding(RULES, call), *([OF_COLUMNS] if OF_COLUMNS.holds(call) else [])]


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config used when the caller names none: that of the rows, with as many chunks in flight as fit."""
    call = Call(problem, gpu)
    return rules.changed(Config(1, call.num_stages), rows_of(problem, gpu), call)


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the rows that chose it."""
    return rules.notes(rows_of(problem, gpu), config == default(problem, gpu))
