"""Host code that the launches of `hopper/flash_bwd` share: the tensors of a call, and the statistics of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.kernels import arguments
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.dropout import PERIOD
from warpwave.kernels.hopper.flash_bwd import rows, sum_splits
from warpwave.kernels.hopper.flash_bwd.config import (
    Config,
    divided_tail,
    group_splits,
    has_hidden_rows,
    is_broad,
    scheduled_blocks,
    steps_of_dq,
)
from warpwave.kernels.prepass import mask_bits, zero_unwritten
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.tensor_maps import MapPlan


class Hidden(NamedTuple):
    """The memory of the launches that read a mask or a bias (hidden.py); fields are None where there is none.

    Attributes:
        words, words_transposed: the packed mask and its transpose (prepass/mask_bits.py).
        walks, walks_transposed: lists of the steps of blocks of queries, and of blocks of keys.
        seen_queries, seen_keys: int8 flags of the queries and keys that mask and bias do not hide entirely, zeros
            before the launches; in float32 of the keys alone, which are all written.
        copies_needed: int8, 0 before the launches: whether those of the gradients read the copies below.
        q, k, v, dout: copies with zeros for what is hidden entirely.
    """

    words: torch.Tensor | None = None
    words_transposed: torch.Tensor | None = None
    walks: torch.Tensor | None = None
    walks_transposed: torch.Tensor | None = None
    seen_queries: torch.Tensor | None = None
    seen_keys: torch.Tensor | None = None
    copies_needed: torch.Tensor | None = None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    dout: torch.Tensor | None = None

    @property
    def flags(self) -> list[torch.Tensor]:
        """Returns the flags that are zeros before the launches; none in float32, whose flags of keys are all
        written."""
        return [] if self.copies_needed is None else [flags for flags in self[4:7] if flags is not None]

    @property
    def copies(self) -> tuple[torch.Tensor, ...]:
        """Returns the copies; none without a mask or a bias."""
        return tuple(copy for copy in self[7:] if copy is not None)


class Workspace(NamedTuple):
    """The buffers that the launches pass to one another (rows.py)."""

    lse_log2: torch.Tensor  # (batch * num_heads_q, rows)
    delta: torch.Tensor
    dq_sums: torch.Tensor | None  # (lines, 128), where one launch makes all gradients
    turns: torch.Tensor | None  # (batch * num_heads_q, tiles): see turns.py
    of_sinks: torch.Tensor | None  # (batch * num_heads_q, tiles)
    q_parts: torch.Tensor | None  # of float32: see split_launch.workspace_shapes
    k_parts: torch.Tensor | None
    v_parts: torch.Tensor | None
    dout_parts: torch.Tensor | None
    sums: torch.Tensor | None  # the exact sums of dS (rows.py); in 16 bits only if the gradient of slopes is wanted
    units: torch.Tensor | None
    centers: torch.Tensor | None
    maxima: torch.Tensor | None
    # float32: of each split of a group (config.group_splits), or of each part of the divided blocks, (parts of all of
    # them, 128, 1, head_dim or head_dim_v) (config.divided_tail)
    dk_splits: torch.Tensor | None
    dv_splits: torch.Tensor | None
    hidden: Hidden = Hidden()


class Tensors(NamedTuple):
    """The tensors of a call; out and lse are the forward's, and contiguous like dout and dlse."""

    operands: Operands
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    workspace: Workspace
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None  # dS of each query head and batch item, if it is wanted; rows may be padded
    of_slopes: torch.Tensor | None = None  # what each query adds to the slopes' gradient, if that is wanted, float32

    @property
    def offsets(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the offsets of packed sequences."""
        return self.operands.cu_seqlens_q, self.operands.cu_seqlens_k

    @property
    def of_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what blocks of keys write: dK and dV, or those of each split of a group. Where blocks are divided
        (`config.divided_tail`), those of their parts; whole blocks then store dK and dV by tensor maps."""
        splits = self.workspace.dk_splits, self.workspace.dv_splits
        return (self.dk, self.dv) if splits[0] is None or splits[1] is None else splits  # type: ignore[return-value]


class Step(NamedTuple):
    """One launch, and the tensors of a call that it takes.

    Args:
        given: returns the launch's arguments; tensors that maps describe come first.
        plans: the tensor maps; empty if there are none.
    """

    launch: launch.Launch
    given: Callable[[Tensors], Sequence[Any]]
    plans: Sequence[MapPlan | None] = ()


def mapped(plans: Sequence[MapPlan | None], sources: Sequence[torch.Tensor]) -> list[launch.Mapped | None]:
    """Returns the arguments of a launch that have tensor maps, None for absent ones."""
    return [None if plan is None else launch.Mapped(plan, sources[plan.source]) for plan in plans]


def bias_kind(tensors: Tensors) -> str:
    """Returns how a bias is read (`host.bias_kind`). A bias whose gradient is wanted has a number for each score."""
    return "cells" if tensors.dbias is not None else host.bias_kind(tensors.operands.bias)


def steps_over_keys(problem: AttentionProblem, tensors: Tensors, config: Config) -> tuple[int, int]:
    """Returns the keys of a step in the launch of dQ, and the tiles of V in flight (`config.steps_of_dq`)."""
    bias = tensors.operands.bias
    is_copied = bias is not None and bias_kind(tensors) == "cells"
    return steps_of_dq(problem, config, bias.element_size() if bias is not None and is_copied else 0)


def query_tiles(problem: AttentionProblem, block_m: int) -> int:
    """Returns the query tiles of a head, of all packed sequences together."""
    if problem.packed:
        return problem.total_q // block_m + problem.batch
    return -(-problem.seqlen_q // block_m)


def heads_of(problem: AttentionProblem) -> int:
    """Returns the query heads of all batch items; packed sequences count as one item."""
    return problem.num_heads_q * (1 if problem.packed else problem.batch)


def head_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the strides of batch, head and row."""
    batch, row, head, _ = arguments.token_strides(tensor)
    return batch, head, row


def queries_end(problem: AttentionProblem) -> int:
    """Returns the number of queries of a dense call up to the last one that sees a key."""
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    return problem.seqlen_q if band.low is None else min(problem.seqlen_q, problem.seqlen_k - band.low)


def statistic_plan(source: int, tensor: torch.Tensor, block_m: int) -> MapPlan:
    """Returns the tensor map of a statistic of rows."""
    return MapPlan(source, tuple(tensor.shape), tuple(tensor.stride()), (1, block_m), is_swizzled=False)


def first_row_multiple(problem: AttentionProblem) -> int:
    """Returns a number that divides the first query of the first tile (band.band_of)."""
    if problem.mask_shape is not None or problem.bias_shape is not None:
        return mask_bits.TILE_KEYS
    return PERIOD.value if problem.dropout_p else 1


def block_sizes(problem: AttentionProblem) -> list[int]:
    """Returns the run-time arguments of launches over tiles of rows (rows.py): lengths and window."""
    *lengths, left, right = arguments.lengths(problem)
    return [*lengths, problem.batch, left, right]


def heads_at_once(problem: AttentionProblem, config: Config, heads: int, blocks: int, bytes_of_head: int) -> int:
    """Returns how many kv heads run together, each counted once for each of its splits.

    Args:
        heads, blocks: of the schedule.
        bytes_of_head: bytes of the queries of one query head in L2.
    """
    # As if L2 held one query head of each kv head that runs. If it held whole groups, few kv heads would run together,
    # and the longest blocks of the last ones would start late. One query head per kv head was 1.20 to 1.42 times as
    # fast in the joint launch (2026-11-25-h100-descriptors.json), which then walked head after head; it was not timed
    # again, and never in the launch apart.
    held = host.heads_in_l2(problem, heads, blocks, bytes_of_head)
    if problem.packed or not (config.is_joint and is_broad(problem)):
        return held
    # In the joint launch all blocks of a head walk its tiles at the same time, so L2 need not hold the whole head. More
    # heads leave less of the multiprocessors idle at the end: 0.98 to 1.11 times as fast above head_dim 128, up to it
    # 0.96 to 1.03 (docs/notes/backward.md).
    enough = -(-host.LEAST_BLOCKS_DENSE * host.NUM_SMS * heads * problem.batch // blocks)
    return min(heads * problem.batch, max(held, enough))


def of_keys(problem: AttentionProblem, tensors: Tensors, config: Config, bytes_of_row: int) -> list[Any]:
    """Returns the first numbers of a launch that draws blocks of keys (band.work_on_keys), in its order: those of
    `groups.KeyGradients`, `groups.KeySchedule` and `band.Options`.

    Args:
        bytes_of_row: bytes of a query of a head in L2.
    """
    tiles_per_head = -(-problem.seqlen_k // config.block_n)
    splits = group_splits(problem, config)
    heads = problem.num_heads_kv * splits
    blocks = scheduled_blocks(problem, config)
    scale, softcap_log2 = host.score_units(problem)
    dk, dv = tensors.of_keys
    return [
        arguments.slope_strides(tensors.operands.alibi_slopes)[0],
        *head_strides(dk),
        *head_strides(dv),
        blocks,
        problem.num_heads_q,
        heads,
        -(-problem.num_heads_q // heads),
        splits,
        *divided_tail(problem, config),
        problem.batch,
        tiles_per_head,
        heads_at_once(problem, config, heads, blocks, problem.seqlen_q * bytes_of_row),
        *arguments.lengths(problem),
        query_tiles(problem, config.block_m) * config.block_m,
        scale,
        softcap_log2,
        problem.softmax_scale,
    ]


def of_queries(
    problem: AttentionProblem, tensors: Tensors, bytes_of_row: int, block_m: int, statistic_rows: int
) -> list[Any]:
    """Returns the first numbers of a launch that draws tiles of `block_m` queries and writes dQ, in its order: those of
    `dq.OfQueries`, `groups.Schedule` and `band.Options`.

    Args:
        bytes_of_row: bytes of a key of a head in L2.
        statistic_rows: rows of statistics of a head.
    """
    group = problem.num_heads_q // problem.num_heads_kv
    tiles = query_tiles(problem, block_m) * heads_of(problem)
    scale, softcap_log2 = host.score_units(problem)
    return [
        arguments.slope_strides(tensors.operands.alibi_slopes)[0],
        *head_strides(tensors.dq),
        tiles,
        problem.num_heads_q,
        group,
        problem.batch,
        -(-problem.seqlen_q // block_m),
        host.heads_in_l2(problem, problem.num_heads_q, tiles, problem.seqlen_k * bytes_of_row, group),
        *arguments.lengths(problem),
        statistic_rows,
        scale,
        softcap_log2,
        problem.softmax_scale,
    ]


def of_mask(problem: AttentionProblem, tensors: Tensors, transposed: bool) -> list[int]:
    """Returns the numbers of a mask or its transpose in a launch, those of `groups.Mask`; zeros without one."""
    hidden = tensors.workspace.hidden
    walks = hidden.walks_transposed if transposed else hidden.walks
    if walks is None:
        return [0] * 7
    return [*mask_bits.packed(problem, transposed).word_strides, *arguments.broadcast_strides(walks)[:3]]


def mask_per_step(problem: AttentionProblem) -> bool:
    """Returns whether a mask may show different pairs of a key in two steps of a block of keys. Padding does not: a key
    is shown to all queries of the block's heads or to none, so the block needs no list, and its words once."""
    if problem.mask_shape is None:
        return False
    _, heads, queries, _ = problem.mask_shape
    return queries > 1 or problem.has_band or (heads > 1 and problem.num_heads_q > problem.num_heads_kv)


def constants_of(problem: AttentionProblem, splits: int = 1, ascends: bool = False) -> dict[str, Any]:
    """Returns the compile-time options of a call that hold for every launch over scores.

    Args:
        splits: blocks that divide the query heads of a tile of keys, in a launch that owns keys.
        ascends: `config.ascends`, in the joint launch.
    """
    features = arguments.feature_constants(problem)
    return {
        **arguments.band_constants(problem),
        "HAS_ALIBI": features["HAS_ALIBI"],
        "HAS_SOFTCAP": features["HAS_SOFTCAP"],
        "IS_VARLEN": problem.packed,
        "IS_UNEVEN": problem.num_heads_q % (problem.num_heads_kv * splits) > 0,
        "ASCENDS": ascends,
        "HAS_MASK": problem.mask_shape is not None,
        "MASK_PER_STEP": mask_per_step(problem),
    }


def zeros(problem: AttentionProblem, tensors: Tensors) -> list[Step]:
    """Returns the launch that zeroes the gradients that blocks do not write; an empty list if they write all."""
    if not has_hidden_rows(problem):
        return []

    def given(t: Tensors) -> tuple[Any, ...]:
        return t.dq, *t.of_keys, *t.offsets

    return [Step(zero_unwritten.specify(problem, given(tensors)[:3], tensors.offsets), given)]


def statistics(problem: AttentionProblem, tensors: Tensors, config: Config) -> Step:
    """Returns the launch of the statistics of rows, zeros for the counts of turns, and parts of the sinks' gradient."""
    tiles = query_tiles(problem, config.block_m)
    of_dlse = [0, 0, 0] if tensors.dlse is None else [*arguments.lse_strides(problem), 1]

    def given(t: Tensors) -> tuple[Any, ...]:
        work = t.workspace
        left = work.lse_log2, work.delta, work.sums, work.turns, work.of_sinks
        return t.out, t.dout, t.lse, t.dlse, t.operands.sinks, *left, *t.offsets

    return Step(
        launch.Launch(
            kernel=rows.statistics_kernel,
            grid=heads_of(problem) * tiles,
            tensors=given(tensors),
            scalars=[
                *arguments.token_strides(tensors.out),
                *arguments.token_strides(tensors.dout),
                *arguments.lse_strides(problem),
                *of_dlse,
                problem.num_heads_q,
                tiles,
                *block_sizes(problem),
            ],
            constants={
                "BLOCK_M": config.block_m,
                "HEAD_DIM_V": problem.head_dim_v,
                "WIDTH_V": arguments.padded(problem.head_dim_v),
                **arguments.band_constants(problem),
                "HAS_SINKS": problem.has_sinks,
                "IS_VARLEN": problem.packed,
                "ALIGN": first_row_multiple(problem),
            },
            options={"num_warps": 4 if problem.head_dim_v <= 128 else 8, "num_stages": 1, "enable_fp_fusion": True},
        ),
        given,
    )


def sums_of_splits(problem: AttentionProblem, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launch that adds up dK and dV of the splits of a group; none without splits."""
    splits, block = group_splits(problem, config), sum_splits.BLOCK
    if splits == 1:
        return []
    keys = tensors.dk.numel() // problem.head_dim

    def given(t: Tensors) -> tuple[Any, ...]:
        return *t.of_keys, t.dk, t.dv

    of = launch.Launch(
        kernel=sum_splits.sum_splits_kernel,
        grid=2 * -(-keys // block),
        tensors=given(tensors),
        scalars=[keys, splits],
        constants={
            "ROWS": block,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "WIDTH": arguments.padded(problem.head_dim),
            "WIDTH_V": arguments.padded(problem.head_dim_v),
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )
    return [Step(of, given)]
