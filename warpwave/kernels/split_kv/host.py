"""Attention with the keys split over blocks, for few queries and long caches, contiguous or paged; portable Triton.

A program owns a tile of rows of one kv head and one split of their keys, and runs the online softmax of `flash_fwd`
over it. The rows are the queries of all heads that read the kv head, so K and V are read once for the group. A second
small kernel merges the partial results of the splits in a fixed order (kernels/partials.py).

    rows m = query * group + head in group;   S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask
    split s of S: tiles of keys s, s + S, s + 2 S, ... of those its rows see, S from `choose_splits`; consecutive tiles
    if a sequence's bits must not depend on the batch

Dao et al., "Flash-Decoding for long-context inference" (2023); pages as in Kwon et al., "Efficient memory management
for large language model serving with PagedAttention" (2023): a sequence's tokens lie in pages of one pool, which a page
table lists. Keys that no row sees are not read, so a window skips pages.

Bound: memory, at one query a sequence: 2 * group FLOPs for each byte of K and V in 16 bits; a cache of 8-bit numbers
has half the bytes. Latency if the cache is short. Unlike the ladder's flash_fwd it has enough blocks to fill the GPU
even if queries alone do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from warpwave.gpu import WGMMA_ROWS, Gpu, current_gpu
from warpwave.kernels import cache_descales, partials
from warpwave.kernels.arguments import (
    Allocate,
    Results,
    Run,
    allocator,
    as_it_is,
    band_constants,
    behind,
    dot_precision,
    feature_constants,
    matrix_options,
    padded,
    score_rules,
    straightener,
    stride_unit,
    strides_in,
    tile_widths,
    window,
)
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.kernels.split_kv import tensor_maps
from warpwave.kernels.split_kv.choice import configs
from warpwave.kernels.split_kv.config import Config, is_launched_ahead, num_parts, one_step, tiles
from warpwave.kernels.split_kv.device import split_kv_kernel
from warpwave.operands import NUM_COMMON, CachedOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch, scratch
from warpwave.runtime.tensor_maps import MapPlan

NAME = "split_kv"
NEEDS_GPU = True
QUANTIZED_CACHE = True
SHARES_TILES = True
MAX_KNOWN = 256  # launches that a binder keeps

# Host -----------------------------------------------------------------------------------------------------------------

SINKS = CachedOperands._fields.index("sinks") - 3  # position after q, k and v


def bind(problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    return Binder(current_gpu(operands.q.device))(problem, operands, config, out)


class _OfClass(NamedTuple):
    """The common part of the launches of one class and config.

    Attributes:
        attend, merge: the families of both launches; merge is None if keys are not split.
        maps: the tensor maps of K and V.
        unit: the result of `stride_unit`.
        beside: by shape of q and number of parts, what depends on these alone: what allocates results, the workspace of
            partial results, and the launcher of their merge.
    """

    attend: launch.Family
    merge: launch.Family | None
    maps: Sequence[MapPlan]
    unit: int
    beside: dict[tuple[Any, ...], tuple[Allocate, Callable[[], partials.Workspace], launch.Launcher | None]]


class Binder:
    """Binds the calls of one class (dispatch.py).

    In 16 bits without copies, a call with a known config computes only its sizes and tensor maps.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[tuple[Any, ...], _OfClass] = {}

    def __call__(
        self, problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None
    ) -> Run:
        """Binds as `bind` does."""
        # The number of splits is a run-time argument, but these results of it are compiled in. Whether a launch with
        # roles can run also depends on the number of queries.
        gpu, parts = self._gpu, num_parts(config)
        merging = None if parts == 1 else partials.loads(problem, parts)
        alike = operands.k.stride() == operands.v.stride()  # compiled in
        of_config = (vars(config) | {"num_splits": 0}).values()
        key = (*of_config, merging, one_step(problem, gpu, config), config.roles and problem.seqlen_q, alike)
        known = self._known.get(key)
        if known is not None and _has_regular_strides(operands, known.unit):
            attend = _attending(problem, gpu, operands, config, known)
            beside = known.beside.get((operands.q.shape, parts)) or _beside(problem, operands.q, parts, merging, known)
            if attend is not None and beside is not None:
                return _running(attend, *beside)
        straight = straightener(operands)
        first = straight(operands)
        served = _served(problem, gpu, first, config)
        is_as_asked, config = served is config, served
        allocate, workspace = _memory(problem, operands.q, num_parts(config))
        specs = specify(problem, gpu, first, *allocate(out), config, workspace())
        family, maps = _family(specs[0], problem, gpu, first, config)
        families = [launch.Family(spec) for spec in specs[1:]]
        attend, merge = family.first(), next((each.first() for each in families), None)
        assert (merge is not None) == (num_parts(config) > 1)
        # The arithmetic of float32 under an error budget depends on lengths, so only 16 bits have classes.
        if is_as_asked and problem.dtype != "float32" and straight is as_it_is:
            unit = stride_unit(*operands[:3])
            if _has_regular_strides(operands, unit):
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = _OfClass(family, next(iter(families), None), maps, unit, {})
        return behind(straight, _running(attend, allocate, workspace, merge))


def _running(
    attend: launch.Launcher,
    allocate: Allocate,
    workspace: Callable[[], partials.Workspace],
    merge: launch.Launcher | None,
) -> Run:
    def run(operands: Any, out: torch.Tensor | None = None) -> Results:
        q, k, v, *others = operands
        out, lse = allocate(out)
        acc, state = workspace()
        attend(q, k, v, out, lse, acc, state, *others)
        if merge is not None:
            merge(acc, state, out, lse, others[SINKS])
        return out, lse

    return run


def _has_regular_strides(operands: Any, unit: int) -> bool:
    """Returns whether the strides that differ within a class, of batches and heads, fit tensor maps and a kernel
    compiled for a `stride_unit`."""
    for tensor in operands[: 1 if isinstance(operands, CachedOperands) else 3]:
        batch, head = tensor.stride(0), tensor.stride(-2)
        if batch % 16 or head % unit or not (0 < batch < 2**36 and 0 < head < 2**36):
            return False
    return True


def _attending(
    problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config, known: _OfClass
) -> launch.Launcher | None:
    """Returns the launcher of another call of a known class; None if its variant is not compiled yet."""
    maps = known.maps
    if config.roles:
        table = operands.page_table if problem.page_size else None
        scalars: Sequence[int | float | None] = few_rows.scalars(problem, operands.q, operands.k, table, config, 0)
        if not problem.page_size:
            maps = few_rows.plans(problem, operands, config)
        return known.attend.launcher(few_rows.grid(problem, config), scalars, maps)
    if maps and not problem.page_size:
        maps = tensor_maps.plans(problem, gpu, operands, config)
    scalars = _scalars(problem, operands, config, 0, known.unit)
    return known.attend.launcher(_grid(problem, config), scalars, maps)


def _beside(
    problem: AttentionProblem, q: torch.Tensor, parts: int, merging: tuple[int, int, bool] | None, known: _OfClass
) -> tuple[Allocate, Callable[[], partials.Workspace], launch.Launcher | None] | None:
    """Makes and keeps an entry of `known.beside`; None if the merge is not compiled for it yet. `merging` is what
    `partials.loads` returns for these parts."""
    merge = None
    if known.merge is not None and merging is not None:
        merge = known.merge.launcher(partials.merge_grid(problem, merging[1]), partials.merge_scalars(problem, parts))
        if merge is None:
            return None
    if len(known.beside) >= MAX_KNOWN:
        known.beside.clear()
    found = known.beside[q.shape, parts] = (*_memory(problem, q, parts), merge)
    return found


def _memory(
    problem: AttentionProblem, q: torch.Tensor, parts: int
) -> tuple[Allocate, Callable[[], partials.Workspace]]:
    return allocator(problem, q), partials.workspaces(problem, parts, q.device)


def bind_with_prefix(
    problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None, *, shared_prefix: int
) -> Run:
    """Binds a call whose sequences share their first `shared_prefix` tokens. The prefix is read once, as the keys of
    one sequence that has all the queries, and merged with the result over the rest of each sequence.

    Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024).
    """
    gpu, device = current_gpu(operands.q.device), operands.q.device
    allocate, straight = allocator(problem, operands.q), straightener(operands)
    behind = _served(problem, gpu, straight(operands), config)
    prefix = replace(
        problem, batch=1, seqlen_q=problem.rows, seqlen_k=shared_prefix, packed=False, total_q=0, total_k=0,
        causal=None, window_size=(-1, -1), has_sinks=False, return_lse=False,
    )  # fmt: skip
    before = _served(prefix, gpu, straight(operands), configs(prefix, gpu)[0])
    parts_before, parts_behind = num_parts(before), num_parts(behind)

    def first_of(operands: Any) -> CachedOperands:
        q = operands.q if problem.packed else operands.q.flatten(0, 1)
        rows = None if operands.rows is None else operands.rows[:1]
        first: CachedOperands = operands._replace(q=q[None], rows=rows, sinks=None, cu_seqlens_q=None)
        return first

    def divided(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        acc, state = tensors
        before, behind = slice(parts_before), slice(parts_before, None)
        first, second = ((acc[part], state[part]) for part in (before, behind))
        return acc, state, first, second

    workspaces = scratch.memory(partials.needs(problem, parts_before + parts_behind), device, divided)
    out, lse = allocate(out)
    acc, state, space_before, space_behind = workspaces()
    operands = straight(operands)
    first = first_of(operands)
    launchers = [
        _bound(specify(prefix, gpu, first, out, None, before, space_before)[0], prefix, gpu, first, before),
        _bound(
            specify(problem, gpu, operands, out, lse, behind, space_behind, shared_prefix)[0],
            problem,
            gpu,
            operands,
            behind,
        ),
        launch.bind(partials.specify_merge(problem, parts_before + parts_behind, acc, state, out, lse, operands.sinks)),
    ]

    def run(operands: Any, out: torch.Tensor | None = None) -> Results:
        operands = straight(operands)
        out, lse = allocate(out)
        acc, state, space_before, space_behind = workspaces()
        launchers[0](*_tensors(first_of(operands), out, None, *space_before))
        launchers[1](*_tensors(operands, out, lse, *space_behind))
        launchers[2](acc, state, out, lse, operands.sinks)
        return out, lse

    return run


def _served(problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config) -> Config:
    """Returns the config, or its pointer equivalent if it has roles and no tensor map can describe K or V, or there are
    more rows than its blocks hold."""
    if not config.roles or few_rows.takes(problem, gpu, operands, config.block_m):
        return config
    narrow = problem.dtype != "float32" and padded(problem.head_dim) + padded(problem.head_dim_v) <= 256
    return replace(config, roles=False, by_map=False, block_n=64 if narrow else 32, num_stages=2)


def _family(
    spec: launch.Launch, problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config
) -> tuple[launch.Family, Sequence[MapPlan]]:
    """Returns the family of the first of `specify`'s launches, whose launchers take `_tensors`, and its tensor maps."""
    if config.roles:
        maps: Sequence[MapPlan] = few_rows.plans(problem, operands, config)
        return launch.Family(spec, (*maps, *few_rows.POINTERS)), maps
    maps = tensor_maps.plans(problem, gpu, operands, config)
    return tensor_maps.family(spec, maps), maps


def _bound(spec: launch.Launch, problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config) -> launch.Launcher:
    """Returns the launcher of the first of `specify`'s launches, which takes `_tensors`."""
    return _family(spec, problem, gpu, operands, config)[0].first()


def _tensors(operands: Any, out: torch.Tensor, lse: Any, acc: Any, state: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors in the kernel's order; a dense or packed call has no tables and no factors."""
    tables = operands[NUM_COMMON:] or (None,) * 5
    return (*operands[:3], out, lse, acc, state, *operands[3:NUM_COMMON], *tables)


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Any,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
    workspace: partials.Workspace | None = None,
    first_key: int = 0,
) -> tuple[launch.Launch, ...]:
    """Returns the launches from tensors, which may be without memory (device "meta") if they are only compiled.

    Args:
        first_key: keys before it are left to another launch.
    """
    config = _served(problem, gpu, operands, config)
    acc, state = workspace or partials.workspaces(problem, num_parts(config), out.device)()
    ahead = is_launched_ahead(gpu, config)
    arguments = _tensors(operands, out, lse, acc, state)
    if config.roles:
        attend = few_rows.specify(problem, gpu, operands, arguments, config, first_key)
    else:
        plans = tensor_maps.plans(problem, gpu, operands, config)
        maps: list[Any] = [launch.Mapped(plan, tensor) for plan, tensor in zip(plans, operands[1:3], strict=False)] or [
            None,
            None,
        ]
        attend = launch.Launch(
            kernel=split_kv_kernel,
            grid=_grid(problem, config),
            tensors=(*maps, *arguments),
            scalars=_scalars(problem, operands, config, first_key),
            constants=_constants(problem, gpu, operands, config, acc is not None, bool(plans)),
            # As in flash_fwd: without fused multiply-adds in float32, the largest probability is exactly 1.
            options={
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "enable_fp_fusion": problem.dtype != "float32",
                **({"launch_pdl": True} if ahead else {}),
                **matrix_options(problem, gpu, config.block_m, config.block_n, config.num_warps),
            },
        )
    if acc is None or state is None:
        return (attend,)
    parts, sparse = num_parts(config), config.pieces > 0
    return (attend, partials.specify_merge(problem, parts, acc, state, out, lse, operands.sinks, ahead, sparse))


def _grid(problem: AttentionProblem, config: Config) -> int:
    return tiles(problem, config) * (problem.num_heads_q // problem.heads_together) * config.num_splits * problem.batch


def _scalars(
    problem: AttentionProblem, operands: Any, config: Config, first_key: int, unit: int | None = None
) -> list[int | float | None]:
    """Returns the run-time arguments after the pointers, in the kernel's order.

    Args:
        unit: the result of `stride_unit`, if it is known.
    """
    unit = stride_unit(*operands[:3]) if unit is None else unit
    paged = isinstance(operands, CachedOperands)
    return [
        *strides_in(unit, *operands[:3]),
        config.num_splits,
        *score_rules(problem, *operands[3:6]),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.rows,
        problem.total_k,
        *window(problem),
        operands.page_table.stride(0) if paged else 0,
        operands.k.shape[0] if paged else 0,
        operands.page_table.shape[0] if paged else 0,
        *cache_descales.strides(*((operands.k_descale, operands.v_descale) if paged else (None, None))),
        problem.num_heads_q // problem.heads_together,
        first_key,
        partials.lse_rows(problem),
    ]


def in_words(operands: Any) -> bool:
    """Returns whether two neighbors of the 8-bit numbers of every row of K and V are an aligned word."""
    return stride_unit(*operands[:3]) % 2 == 0 and all(
        pool.stride(-1) == 1 and pool.shape[-1] % 2 == 0 and pool.data_ptr() % 16 == 0 for pool in operands[1:3]
    )


def _constants(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Any,
    config: Config,
    in_parts: bool,
    by_map: bool,
) -> dict[str, int | bool | str]:
    """Returns the compile-time arguments of the kernel, by name."""
    block_d, block_dv = tile_widths(problem, gpu, config.block_m)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HEADS": problem.heads_together,
        "UNITS_OF_KV_HEAD": problem.num_heads_q // (problem.heads_together * problem.num_heads_kv),
        "STRIDE_UNIT": stride_unit(*operands[:3]),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        **band_constants(problem),
        **feature_constants(problem),
        "IS_VARLEN": problem.packed,
        "PAGE_SIZE": problem.page_size,
        "ALIKE": operands.k.stride() == operands.v.stride(),
        "HAS_ROWS": getattr(operands, "rows", None) is not None,
        "IN_PARTS": in_parts,
        "PIECES": config.pieces,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "IS_NVIDIA": gpu.vendor == "nvidia",
        "LAUNCHED_AHEAD": is_launched_ahead(gpu, config),
        "BY_MAP": by_map,
        "ONE_STEP": one_step(problem, gpu, config),
        "FACTORS": problem.kv_factors or "",
        "FLOAT8": problem.dtype_kv == "float8_e4m3fn",
        # With 64 rows, products on sm_90 and sm_100 read shared memory. Elsewhere operands come from registers, but
        # words spill (sm_80, int8, head_dim 256: 1,112 bytes, 328 without) or need 19 to 74 % more instructions.
        "IN_WORDS": problem.dtype_kv is not None and config.block_m < WGMMA_ROWS and in_words(operands),
    }
