"""The launches of `flash_bwd` from a call's tensors: their kernels, arguments and constants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu, reads_shared_memory
from warpwave.kernels import dropout
from warpwave.kernels.arguments import (
    band_constants,
    column_widths,
    feature_constants,
    lengths,
    lse_strides,
    matrix_options,
    pair_group,
    score_rules,
    stride_unit,
    strides_in,
    token_strides,
    two_loops,
)
from warpwave.kernels.flash_bwd.config import PARTS_AT_ONCE, Config, Tile, arithmetic_of, has_mask_of_queries, walked_of
from warpwave.kernels.flash_bwd.dbias import flash_bwd_dbias_kernel
from warpwave.kernels.flash_bwd.dkv import flash_bwd_dkv_kernel
from warpwave.kernels.flash_bwd.dq import flash_bwd_dq_kernel
from warpwave.kernels.flash_bwd.joint import flash_bwd_joint_kernel
from warpwave.kernels.flash_bwd.one_side import flash_bwd_one_side_kernel
from warpwave.kernels.flash_bwd.parts import flash_bwd_add_parts_kernel
from warpwave.kernels.prepass import zero_unwritten
from warpwave.operands import AnyOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch

Results = tuple[torch.Tensor, torch.Tensor]  # out and lse
Scalars = list[int | float | None]


class Outputs(NamedTuple):
    """The tensors that the launches write; None for those that are not wanted.

    Attributes:
        dq, dk, dv, dbias: gradients, contiguous.
        statistics: log-sum-exp and delta of each row (`tiles.store_statistics`), int64, shaped as lse; None in a joint
            launch.
        of_slopes, of_sinks: the contribution of each tile of queries to a gradient, float32 (batch, num_heads_q,
            tiles).
        of_bias: sums of parts of dbias, float32 (parts, *dbias.shape), if there are several.
        dq_parts, dk_parts, dv_parts: parts of a gradient, float32 (splits, *dq.shape), if several blocks of a joint
            launch share it.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    statistics: Any = None
    of_slopes: Any = None
    of_sinks: Any = None
    of_bias: Any = None
    dq_parts: Any = None
    dk_parts: Any = None
    dv_parts: Any = None


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    results: Results,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    outputs: Outputs,
    config: Config,
) -> tuple[launch.Launch, ...]:
    """Returns the launches from tensors, which may be without memory (device "meta") if they are only compiled.

    Args:
        results: out and lse. The last stride of out and dout is 1; lse and dlse are contiguous.
        outputs: the tensors to write; gradients are contiguous.
    """
    launches = _Launches(problem, gpu, operands, results, dout, dlse, outputs, config)
    if walked_of(problem, config):
        return tuple(launches.of_one_side())
    return (*launches.zeros(), *(launches.joint() if config.joint else launches.apart()))


def tensors_of(
    problem: AttentionProblem,
    operands: AnyOperands,
    results: Results,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    outputs: Outputs,
    config: Config,
) -> list[tuple[Any, ...]]:
    """Returns the pointer arguments of each launch, in the kernels' order."""
    q, k, v, mask, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k, *_ = operands
    (out, lse), (dq, dk, dv, _dbias, statistics, of_slopes, of_sinks, *_) = results, outputs
    shared = (q, k, v, dout, mask, bias, slopes, cu_seqlens_q, cu_seqlens_k, operands.dropout_seed)
    if walked_of(problem, config):
        added = _parts(outputs)
        absent = [None] * (2 - len(added))
        of_parts = (*(parts for parts, _ in added), *absent, *(gradient for _, gradient in added), *absent)
        return [(*shared, lse, out, dlse, *_shared(outputs)), *([of_parts] if added else [])]
    zeros = [(dq, dk, dv, cu_seqlens_q, cu_seqlens_k)] if _has_zeros(problem, outputs) else []
    if config.joint:
        return [*zeros, (*shared, dlse, sinks, dq, dk, dv, _sums_of_bias(outputs), of_slopes, of_sinks)]
    found: list[tuple[Any, ...]] = [*zeros, (*shared, lse, statistics, out, dlse, sinks, dq, of_slopes, of_sinks)]
    found += ((*shared, statistics, *pair) for pair in _launches_of_keys(config, dk, dv))
    if (sums := _sums_of_bias(outputs)) is not None:
        found.append((*shared, statistics, sums))
    return found


def _has_zeros(problem: AttentionProblem, outputs: Outputs) -> bool:
    """Returns whether gradients must be zeroed: packed tokens may belong to no sequence."""
    return problem.packed and any(gradient is not None for gradient in outputs[:3])


def _shared(outputs: Outputs) -> tuple[Any, Any, Any]:
    """Returns where a joint launch writes dq, dk and dv: to the parts of those that blocks share."""
    pairs = zip(outputs[:3], (outputs.dq_parts, outputs.dk_parts, outputs.dv_parts), strict=True)
    dq, dk, dv = (whole if parts is None else parts[0] for whole, parts in pairs)
    return dq, dk, dv


def _parts(outputs: Outputs) -> list[tuple[Any, Any]]:
    """Returns the parts of the gradients that blocks share, each with the gradient."""
    pairs = zip((outputs.dq_parts, outputs.dk_parts, outputs.dv_parts), outputs[:3], strict=True)
    return [(parts, whole) for parts, whole in pairs if parts is not None]


def _sums_of_bias(outputs: Outputs) -> torch.Tensor | None:
    """Returns what the launch of the bias writes, (parts, *dbias.shape): several sums, or dbias itself; or None."""
    if outputs.of_bias is not None or outputs.dbias is None:
        return outputs.of_bias
    return outputs.dbias[None]


def _launches_of_keys(config: Config, dk: Any, dv: Any) -> list[tuple[Any, Any]]:
    """Returns which of (dk, dv) each launch that owns keys writes."""
    each = [(dk, None), (None, dv)] if config.split_dkv else [(dk, dv)]
    return [pair for pair in each if pair != (None, None)]


class _Launches:
    """What the launches of one call share, and the launches."""

    def __init__(
        self,
        problem: AttentionProblem,
        gpu: Gpu,
        operands: AnyOperands,
        results: Results,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        outputs: Outputs,
        config: Config,
    ) -> None:
        self.problem, self.gpu, self.config, self.outputs = problem, gpu, config, outputs
        self.out, self.has_dlse = results[0], dlse is not None
        self.tensors = iter(tensors_of(problem, operands, results, dout, dlse, outputs, config))
        self.unit = stride_unit(*operands[:3], self.out, dout, *outputs[:3])
        self.shared: Scalars = [*strides_in(self.unit, *operands[:3]), *self.in_units(dout)]
        self.shared += (*score_rules(problem, *operands[3:6]), *lengths(problem))
        self.shared += (*dropout.scalars(problem.dropout_p), *lse_strides(problem))
        self.heads = [problem.num_heads_q, problem.num_heads_q // problem.num_heads_kv]
        self.group = pair_group(*operands[3:5])

    def in_units(self, *rows: torch.Tensor | None) -> list[int]:
        """Returns the strides of tensors whose last stride is 1; of absent tensors, 0 in place of the others."""
        given = [(0, 0, 0, 0) if t is None else token_strides(t) for t in rows]
        return [number for strides in given for number in (*(stride // self.unit for stride in strides[:-1]), 1)]

    def one(
        self, kernel: Any, blocks: int, tile: Tile, owned: int, scalars: Scalars, constants: dict[str, Any]
    ) -> launch.Launch:
        """Returns the next launch, which takes the shared arguments before `scalars`. Args: owned: rows of the tiles
        that a block owns."""
        return launch.Launch(
            kernel=kernel,
            grid=blocks,
            tensors=next(self.tensors),
            scalars=[*self.shared, *scalars],
            constants={
                **_constants(self.problem, self.gpu, tile, owned, self.unit),
                "PAIR_GROUP": self.group,
                "MASK_PER_QUERY": has_mask_of_queries(self.problem),
                **constants,
            },
            # Off in float32, as in the forward: if one key dominates, its probability is exactly 1.
            options={
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
                "enable_fp_fusion": self.problem.dtype != "float32",
                **matrix_options(self.problem, self.gpu, tile.block_m, tile.block_n, tile.num_warps),
            },
        )

    def has_two_loops(self, owned: int, width: int) -> bool:
        # Two loops are measured with wgmma (docs/notes/backward.md), and not with tcgen05.
        return reads_shared_memory(self.gpu, owned) or two_loops(self.gpu, owned, width)

    def of_one_side(self) -> Iterator[launch.Launch]:
        """Yields the joint launch that walks keys or queries, and the addition of parts."""
        problem, tile, splits, given = self.problem, self.config.dq, self.config.splits, _shared(self.outputs)
        yield self.one(
            flash_bwd_one_side_kernel, splits * problem.batch * problem.num_heads_kv, tile, tile.block_n,
            [*self.in_units(self.out, *given), problem.batch, splits, *self.heads],
            {
                "WALKS_KEYS": walked_of(problem, self.config) == "keys",
                "HAS_DLSE": self.has_dlse,
                **_wanted(("DQ", "DK", "DV"), given),
            },
        )  # fmt: skip
        if parts := _parts(self.outputs):
            size, other_size, *_ = [*(gradient.numel() for _, gradient in parts), 0]
            yield launch.Launch(
                kernel=flash_bwd_add_parts_kernel,
                grid=-(-size // PARTS_AT_ONCE) + -(-other_size // PARTS_AT_ONCE),
                tensors=next(self.tensors),
                scalars=[splits, size, other_size],
                constants={"BLOCK": PARTS_AT_ONCE},
                options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
            )

    def zeros(self) -> Iterator[launch.Launch]:
        """Yields the launch that zeroes gradients of packed tokens."""
        if _has_zeros(self.problem, self.outputs):
            given = next(self.tensors)
            yield zero_unwritten.specify(self.problem, given[:3], given[3:])

    def joint(self) -> Iterator[launch.Launch]:
        """Yields the joint launch whose tile holds a sequence."""
        problem, tile, sums = self.problem, self.config.dq, _sums_of_bias(self.outputs)
        parts, *owners = (1, problem.batch, problem.num_heads_kv) if sums is None else sums.shape[:3]
        dq, dk, dv, _dbias, _statistics, of_slopes, of_sinks, *_ = self.outputs
        yield self.one(
            flash_bwd_joint_kernel, parts * math.prod(owners), tile, tile.block_m,
            [*self.in_units(dq, dk, dv), problem.batch, *owners, *self.heads, parts],
            {
                "HAS_GROUP": problem.num_heads_q > problem.num_heads_kv,
                "HAS_DLSE": self.has_dlse,
                "HAS_SINKS": problem.has_sinks,
                "PER_QUERY": sums is not None and sums.shape[3] > 1,
                "PER_KEY": sums is not None and sums.shape[4] > 1,
                **_wanted(
                    ("DQ", "DK", "DV", "DBIAS", "DSLOPES", "DSINKS"), (dq, dk, dv, sums, of_slopes, of_sinks)
                ),
            },
        )  # fmt: skip

    def apart(self) -> Iterator[launch.Launch]:
        """Yields the launch that owns queries, those that own keys, and that of the bias."""
        problem, gpu, config = self.problem, self.gpu, self.config
        dq, dk, dv, _dbias, _statistics, of_slopes, of_sinks, *_ = self.outputs
        tile = config.dq
        yield self.one(
            flash_bwd_dq_kernel, -(-problem.seqlen_q // tile.block_m) * problem.num_heads_q * problem.batch, tile,
            tile.block_m, [*self.in_units(self.out, dq), *self.heads],
            {
                "TWO_LOOPS": self.has_two_loops(tile.block_m, column_widths(problem, gpu, tile.block_m)[0][0]),
                "OWN_STATISTICS": problem.dtype == "float32",
                "HAS_DLSE": self.has_dlse,
                "HAS_SINKS": problem.has_sinks,
                **_wanted(("DQ", "DSLOPES", "DSINKS"), (dq, of_slopes, of_sinks)),
            },
        )  # fmt: skip
        tile = config.dkv
        (width, _), (width_v, _) = column_widths(problem, gpu, tile.block_n)
        for pair in _launches_of_keys(config, dk, dv):
            yield self.one(
                flash_bwd_dkv_kernel, -(-problem.seqlen_k // tile.block_n) * problem.num_heads_kv * problem.batch,
                tile, tile.block_n, [*self.in_units(*pair), *self.heads],
                {
                    "TWO_LOOPS": self.has_two_loops(tile.block_n, max(width, width_v)),
                    **_wanted(("DK", "DV"), pair),
                },
            )  # fmt: skip
        if (sums := _sums_of_bias(self.outputs)) is not None:
            tile = config.dq
            parts, bias_batch, bias_heads, rows, keys = sums.shape
            per_query, per_key = rows > 1, keys > 1
            blocks = parts * bias_batch * bias_heads * -(-rows // tile.block_m) * -(-keys // tile.block_n)
            yield self.one(
                flash_bwd_dbias_kernel, blocks, tile, tile.block_m,
                [problem.batch, bias_batch, bias_heads, *self.heads, parts],
                {"PER_QUERY": per_query, "PER_KEY": per_key},
            )  # fmt: skip


def _wanted(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, bool]:
    """Returns the constants that state which tensors a launch writes."""
    return {f"WRITE_{name}": t is not None for name, t in zip(names, tensors, strict=True)}


def _constants(problem: AttentionProblem, gpu: Gpu, tile: Tile, owned: int, unit: int) -> dict[str, int | bool | str]:
    """Returns the compile-time arguments that all kernels have, by name."""
    widths, widths_v = column_widths(problem, gpu, owned)
    features = feature_constants(problem)
    del features["HAS_SINKS"]  # the log-sum-exp includes them
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STRIDE_UNIT": unit,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": widths[0],
        "REST_D": widths[1],
        "BLOCK_DV": widths_v[0],
        "REST_DV": widths_v[1],
        **band_constants(problem),
        **features,
        "HAS_DROPOUT": problem.dropout_p > 0,
        "IS_VARLEN": problem.packed,
        "PRECISION": arithmetic_of(problem, gpu),
        "IS_NVIDIA": gpu.vendor == "nvidia",
    }
