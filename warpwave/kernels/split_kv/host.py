"""Attention with the keys split over blocks, for few queries and long caches, contiguous or paged; portable Triton.

A program owns a tile of rows of one kv head and one split of their keys, and runs the online softmax of `flash_fwd`
over it. The rows are the queries of all heads that read the kv head, so K and V are read once for the group. A second
small kernel merges the partial results of the splits in a fixed order (kernels/partials.py).

    rows m = query * group + head in group;   S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask
    split s: keys s * n to (s + 1) * n of those its rows see, n from `choose_splits`

Dao et al., "Flash-Decoding for long-context inference" (2023); pages as in Kwon et al., "Efficient memory management
for large language model serving with PagedAttention" (2023): a sequence's tokens lie in pages of one pool, which a page
table lists. Keys that no row sees are not read, so a window skips pages.

Bound: memory, at one query a sequence: 2 * group FLOPs for each byte of K and V in 16 bits. Latency if the cache is
short. Unlike the ladder's flash_fwd it has enough blocks to fill the GPU even if queries alone do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from warpwave import precision
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import partials, reasons
from warpwave.kernels.arguments import (
    Allocate,
    Results,
    Run,
    allocator,
    as_it_is,
    band_constants,
    behind,
    broadcast_strides,
    dot_precision,
    feature_constants,
    padded,
    slope_strides,
    straightener,
    tile_widths,
    token_strides,
    window,
)
from warpwave.kernels.cost import (
    PARTS,
    Cost,
    bytes_per_score,
    conversions,
    launch_order,
    merging,
    waits_for_memory,
)
from warpwave.kernels.split_kv import few_rows_host as few_rows
from warpwave.kernels.split_kv import tensor_maps
from warpwave.kernels.split_kv.config import (
    UNKNOWN_SMS,
    Config,
    blocks_with_rows,
    changed,
    choose_splits,
    columns,
    configs,
    default,
    fitting,
    head_groups,
    may_be_launched_ahead,
    may_map,
    num_parts,
    one_step,
    scattered,
    smallest_smem_bytes,
    smem_bytes,
    smem_expected,
    steps_over_keys,
    tile_heads,
    tiles,
)
from warpwave.kernels.split_kv.device import split_kv_kernel
from warpwave.problem import DTYPE_BYTES, AttentionProblem, CachedOperands, by_kind
from warpwave.runtime import graphs, launch, scratch
from warpwave.runtime.tensor_maps import MapPlan

NAME = "split_kv"
NEEDS_GPU = True
MAX_HEAD_DIM = 256
MAX_KNOWN = 256  # launches that a binder keeps

__all__ = [
    *(
        "Binder",
        "Config",
        "bind",
        "bind_with_prefix",
        "configs",
        "cost",
        "default",
        "notes",
        "outrun",
        "smem_bytes",
        "why_not",
    )
]


# Host -----------------------------------------------------------------------------------------------------------------

SINKS = CachedOperands._fields.index("sinks") - 3  # position after q, k and v


def bind(problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    return Binder()(problem, operands, config, out)


class _OfClass(NamedTuple):
    """The common part of the launches of one class and config.

    Attributes:
        attend, merge: the families of both launches; merge is None if keys are not split.
        maps: the tensor maps of K and V.
        unit: the result of `stride_unit`.
    """

    attend: launch.Family
    merge: launch.Family | None
    maps: Sequence[MapPlan]
    unit: int


class Binder:
    """Binds the calls of one class (dispatch.py).

    In 16 bits without copies, a call with a known config computes only its sizes and tensor maps.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _OfClass] = {}

    def __call__(
        self, problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None
    ) -> Run:
        """Binds as `bind` does."""
        allocate, device = allocator(problem, operands.q), operands.q.device
        # The number of splits is a run-time argument, but these results of it are compiled in. Whether a launch with
        # roles can run also depends on the number of queries.
        parts = num_parts(config)
        merging = None if parts == 1 else partials.loads(problem, parts)
        alike = changed(config, num_splits=1)
        key = (alike, merging, one_step(problem, config), config.roles and problem.seqlen_q)
        known = self._known.get(key)
        if known is not None and _has_regular_batches(operands):
            workspace = partials.workspaces(problem, parts, device)
            attend, merge = _launchers(problem, operands, config, known)
            if attend is not None:
                return _running(allocate, workspace, attend, merge)
        straight, gpu = straightener(operands), current_gpu(device)
        first = straight(operands)
        served = _served(problem, gpu, first, config)
        is_as_asked, config = served is config, served
        workspace = partials.workspaces(problem, num_parts(config), device)
        specs = specify(problem, gpu, first, *allocate(out), config, workspace())
        family, maps = _family(specs[0], problem, gpu, first, config)
        families = [launch.Family(spec) for spec in specs[1:]]
        attend, merge = family.first(), next((each.first() for each in families), None)
        assert (merge is not None) == (num_parts(config) > 1)
        # In 16 bits the host keeps up with two launches, and a graph would delay a full queue (runtime/graphs.py).
        if merge is None or problem.dtype != "float32":
            # The arithmetic of float32 under an error budget depends on lengths, so only 16 bits have classes.
            if problem.dtype != "float32" and straight is as_it_is and is_as_asked and _has_regular_batches(operands):
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = _OfClass(family, next(iter(families), None), maps, stride_unit(operands))
            return behind(straight, _running(allocate, workspace, attend, merge))
        between = graphs.Between("acc state", partials.needs(problem, num_parts(config)), device)
        others = " ".join(operands._fields[3:])
        attend_and_merge = graphs.bind(
            f"q k v out lse {others}",
            between,
            (attend, f"q k v out lse acc state {others}"),
            (merge, "acc state out lse sinks"),
        )

        def run_as_one(operands: Any, out: torch.Tensor | None = None) -> Results:
            q, k, v, *others = operands
            out, lse = allocate(out)
            attend_and_merge(q, k, v, out, lse, *others)
            return out, lse

        return behind(straight, run_as_one)


def _running(
    allocate: Allocate,
    workspace: Callable[[], partials.Workspace],
    attend: launch.Launcher,
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


def _has_regular_batches(operands: Any) -> bool:
    """Returns whether the batch strides, which differ within a class, fit tensor maps, any `stride_unit`, and a kernel
    compiled for equal strides of K and V."""
    q, k, v = operands[:3]
    steps = [q.stride(0)] if len(operands) > 9 else [q.stride(0), k.stride(0), v.stride(0)]
    for step in steps:
        if step % 16 or not 0 < step < 2**36:
            return False
    return steps[-1] == steps[-2:][0]


def _launchers(
    problem: AttentionProblem, operands: Any, config: Config, known: _OfClass
) -> tuple[launch.Launcher | None, launch.Launcher | None]:
    """Returns the launchers of another call of a known class; None if its variant is not compiled yet."""
    maps = known.maps
    if config.roles:
        table = operands.page_table if problem.page_size else None
        scalars = few_rows.scalars(problem, operands.q, operands.k, table, config, 0)
        grid = few_rows.grid(problem, config)
        if not problem.page_size:
            maps = few_rows.plans(problem, operands, config)
    else:
        scalars, grid = _scalars(problem, operands, config, 0, known.unit), _grid(problem, config)
        if maps and not problem.page_size:
            maps = tensor_maps.plans(problem, current_gpu(operands.q.device), operands, config)
    attend, merge = known.attend.launcher(grid, scalars, maps), None
    if known.merge is not None:
        merge = known.merge.launcher(
            problem.rows * problem.num_heads_q, partials.merge_scalars(problem, num_parts(config))
        )
        if merge is None:
            return None, None
    return attend, merge


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

    def divided(tensors: tuple[torch.Tensor, ...], _: int | None) -> tuple[Any, ...]:
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
    """Returns the config, or its pointer equivalent if it has roles and no tensor map can describe K or V."""
    if not config.roles or few_rows.takes(problem, gpu, operands):
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
    """Returns the tensors in the kernel's order; a dense or packed call has no tables."""
    tables = operands[9:] if len(operands) > 9 else (None, None, None)
    return (*operands[:3], out, lse, acc, state, *operands[3:9], *tables)


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

    Raises:
        ValueError: the config's kv heads do not divide the problem's.
    """
    if problem.num_heads_kv % config.kv_heads:
        raise ValueError(f"kv_heads is {config.kv_heads}; it must divide the call's {problem.num_heads_kv} kv heads")
    config = _served(problem, gpu, operands, config)
    acc, state = workspace or partials.workspaces(problem, num_parts(config), out.device)()
    ahead = _launched_ahead(gpu, config)
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
            tensors=(*arguments, *maps),
            scalars=_scalars(problem, operands, config, first_key),
            constants=_constants(problem, gpu, operands, config, acc is not None, bool(plans)),
            # As in flash_fwd: without fused multiply-adds in float32, the largest probability is exactly 1.
            options={
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "enable_fp_fusion": problem.dtype != "float32",
                **({"launch_pdl": True} if ahead else {}),
            },
        )
    if acc is None or state is None:
        return (attend,)
    parts, sparse = num_parts(config), config.pieces > 0
    return (attend, partials.specify_merge(problem, parts, acc, state, out, lse, operands.sinks, ahead, sparse))


def _grid(problem: AttentionProblem, config: Config) -> int:
    return tiles(problem, config) * head_groups(problem, config) * config.num_splits * problem.batch


def _scalars(
    problem: AttentionProblem, operands: Any, config: Config, first_key: int, unit: int | None = None
) -> list[int | float]:
    """Returns the run-time arguments after the pointers, in the kernel's order.

    Args:
        unit: the result of `stride_unit`, if it is known.
    """
    unit = stride_unit(operands) if unit is None else unit
    paged = isinstance(operands, CachedOperands)
    strides: list[int] = []
    for tensor in operands[:3]:
        # Pools have the axes of a dense tensor: page, token, head, element.
        stride = tensor.stride() if paged and tensor is not operands.q else token_strides(problem, tensor)
        strides += (stride[0] // unit, stride[1] // unit, stride[2] // unit, stride[3])
    strides += (*broadcast_strides(operands.mask), *broadcast_strides(operands.bias))
    strides += slope_strides(operands.alibi_slopes)
    return [
        *strides,
        operands.page_table.stride(0) if paged else 0,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.rows,
        problem.total_k,
        problem.num_heads_kv,
        *window(problem),
        config.num_splits,
        first_key,
        operands.k.shape[0] if paged else 0,
        operands.page_table.shape[0] if paged else 0,
        partials.lse_rows(problem),
        problem.softmax_scale,
        problem.softcap,
    ]


def stride_unit(operands: Any) -> int:
    """Returns the largest power of two, up to 16, that divides every stride between rows, heads, and batches or
    pages."""
    return math.gcd(16, *(stride for tensor in operands[:3] for stride in tensor.stride()[:-1]))


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
        "GROUP_SIZE": problem.num_heads_q // problem.num_heads_kv,
        "KV_HEADS": config.kv_heads,
        "STRIDE_UNIT": stride_unit(operands),
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
        "LAUNCHED_AHEAD": _launched_ahead(gpu, config),
        "BY_MAP": by_map,
        "ONE_STEP": one_step(problem, config),
    }


def _launched_ahead(gpu: Gpu, config: Config) -> bool:
    return config.launched_ahead and may_be_launched_ahead(gpu)


# What it can run and what it costs ------------------------------------------------------------------------------------


@by_kind
def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = [*reasons.of_device(gpu), *reasons.of_gradients(problem), *reasons.of_dropout(problem)]
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"a row of K or V must fit one tile: at most {MAX_HEAD_DIM}")
    found += reasons.of_pages(problem)
    found += precision.why_not(problem, gpu)
    if not found and not fitting(problem, gpu):
        found.append(reasons.of_shared_memory(smallest_smem_bytes(problem, gpu), gpu))
    return found


FEW_QUERIES = 16  # of a sequence: a tile of queries would be mostly empty
FEWEST_KEYS = 64  # one tile of keys: nothing to split, and no bandwidth needed
KEYS = (256, 1024)  # of a prompt: the fewest and the most at which splitting was measured to be faster
TINY = (1, 128)  # of a prompt whose tiles of rows all run at once: the fewest and the most
# Fewest splits with which prefill gains: with fewer, tiles of queries alone nearly fill the GPU. In float32 smaller
# tiles lose more against a kernel that makes parts ahead; measured with 16.
FEWEST_SPLITS, FEWEST_SPLITS_FLOAT32 = 4, 8


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why kernels with one block per tile of queries are faster; empty if `auto` should split keys instead.

    Measured in CUDA graphs on an H200 (2026-11-21): decode is 2.0 to 7.6 times as fast as with hopper/flash_fwd; one
    head of 512 queries and keys in 8 splits is 1.41 times as fast as with flash_fwd, of 256 in 4 splits 1.07.

    Prompts of 128 and 64 keys, and 32 heads of 128, head_dim 64, are not worth splitting; they were 1.30, 1.18 and 1.15
    times as fast (a day later), because one step covers all keys and launches start before the preceding ones end;
    otherwise 0.89 to 0.95. One head of 4, 16, 32 and 48: 1.24, 1.38, 1.48 and 1.83 us, with flash_fwd 2.13, 2.43, 2.47
    and 2.53. Longer prompts were not compared.

    In float32, one head of 512 takes 11.2 us by default, 8.1 as tf32 and 11.6 as ieee; with hopper/flash_fwd, which
    makes parts first, 14.6 and 10.2; with flash_fwd 26.5, 20.9 and 110.
    """
    if problem.page_size:  # no other GPU kernel reads pages
        return []
    if problem.seqlen_q <= FEW_QUERIES and problem.seqlen_k > FEWEST_KEYS:
        return []
    asked = f"{problem.seqlen_q} queries and {problem.seqlen_k} keys a sequence"
    outside = [f"{asked}; faster at {FEW_QUERIES} queries or fewer, and at {KEYS[0]} to {KEYS[1]} keys"]
    if not TINY[0] <= problem.seqlen_k <= KEYS[1]:
        return outside  # every long prompt ends here, without computing a config
    config = default(problem, gpu)
    if config is not None and _tiny(problem, gpu, config):
        return []
    if problem.seqlen_k < KEYS[0]:
        return [] if config is not None and _between(problem, gpu, config) else outside
    shares = 1 if config is None else config.num_splits
    fewest = FEWEST_SPLITS_FLOAT32 if problem.dtype == "float32" else FEWEST_SPLITS
    if shares >= fewest:
        return []
    return [f"{asked} would give num_splits = {shares}; splitting is faster from num_splits = {fewest} on"]


def _between(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a prompt, longer than one step and too short to split, is bound by how soon its launch starts.

    Measured: one head of 160, 192 and 224 keys 1.12 to 1.21 times as fast as with flash_fwd, 32 heads 1.12, 64 heads
    1.08, 128 heads 0.91; 16 heads of 128 columns 1.08 (H200, 2026-11-22).
    """
    return (
        TINY[1] < problem.seqlen_k == problem.seqlen_q
        and problem.dtype != "float32"
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 128
        and problem.mask_shape is None
        and problem.bias_shape is None
        and not problem.packed
        and gpu.capability == 90
        and _launched_ahead(gpu, config)
        and blocks_with_rows(problem, config) <= 1.5 * (gpu.num_sms or UNKNOWN_SMS)
    )


def _tiny(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a prompt is bound by how soon its one wave of blocks starts, within the measured range."""
    return (
        problem.seqlen_q <= problem.seqlen_k
        and (problem.seqlen_q > FEW_QUERIES or problem.seqlen_q == problem.seqlen_k)
        and TINY[0] <= problem.seqlen_k <= TINY[1]
        and problem.dtype != "float32"
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 64
        and problem.mask_shape is None
        and problem.bias_shape is None
        and gpu.capability == 90
        and _launched_ahead(gpu, config)
        and blocks_with_rows(problem, config) <= (gpu.num_sms or UNKNOWN_SMS)
    )


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost: whole tiles, padding included; K and V once for each tile of rows; partial results written and
    read if keys are split."""
    size, parts = DTYPE_BYTES[problem.dtype], num_parts(config)
    of_tiles = steps_over_keys(problem, config)
    steps, longest = of_tiles.tiles, of_tiles.longest
    scores = steps * config.block_m * columns(config)
    rows = problem.rows * problem.num_heads_q
    outputs = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    scratch = partials.workspace_bytes(problem, parts) if parts > 1 else 0
    keys_read = steps * columns(config) * (problem.head_dim + problem.head_dim_v) * size
    table = 8 * steps * (config.block_n // min(problem.page_size, config.block_n)) if problem.page_size else 0
    attend = Cost(
        blocks=tiles(problem, config) * head_groups(problem, config) * config.num_splits * problem.batch,
        flops=2 * scores * (padded(problem.head_dim) + padded(problem.head_dim_v)),
        exponentials=scores,
        read_bytes=rows * problem.head_dim * size + keys_read + table + scores * bytes_per_score(problem),
        write_bytes=scratch if parts > 1 else outputs,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=scratch,
        steps=steps,
        longest=-(-longest // config.num_splits),
        threads=few_rows.THREADS if config.roles else config.num_warps * gpu.warp_size,
        registers=_registers(problem, gpu, config),
        scratch_bytes=scratch,
        order=launch_order(problem, config.block_m, config.block_n, tile_heads(problem, config), config.num_splits),
        cut=of_tiles.cut,
        far=waits_for_memory(config.num_stages) if config.block_m > 32 or size == 4 else 0.0,
        loop=_loop(problem, gpu, config),
        items=of_tiles.items * config.num_splits,
        conversions=conversions(
            problem,
            gpu,
            scores + steps * columns(config) * (padded(problem.head_dim) + padded(problem.head_dim_v)),
            config.block_m,
            config.num_warps,
        ),
        smem_margin=_smem_margin(problem, gpu, config),
        ahead=config.launched_ahead,
    )
    if parts == 1:
        return attend
    merge = merging(rows, parts, scratch, outputs, ahead=config.launched_ahead)
    return replace(
        attend,
        exponentials=attend.exponentials + merge.exponentials,
        read_bytes=attend.read_bytes + scratch,
        write_bytes=attend.write_bytes + outputs,
        scratch_bytes=2 * scratch,
        launches=2,
        parts=(attend, merge),
    )


def _loop(problem: AttentionProblem, gpu: Gpu, config: Config) -> str:
    """Returns `Cost.loop`: separate names for tiles of 256 columns, for few rows, for few rows in float32, and for
    multiply-adds by head_dim, as in flash_fwd."""
    if config.block_m > 32:
        return "wide" if padded(problem.head_dim_v) > 128 else ""
    if config.roles:
        return "few rows maps"
    if problem.dtype != "float32":
        ways = {"pages": scattered(problem, config), "maps": config.by_map and may_map(problem, gpu, config)}
        return " ".join(["few rows", *(name for name, there in ways.items() if there)])
    if dot_precision(problem, gpu) != "ieee":
        return "few rows float32"
    return f"few rows {'wide ' if padded(problem.head_dim) >= 128 else ''}multiply-adds"


def _smem_margin(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns the bytes by which `smem_bytes` exceeds what sm_90 compiles to."""
    if problem.dtype == "float32":
        return 0
    if config.block_m < 64:
        return max(0, smem_bytes(problem, gpu, config) - smem_expected(problem, config))
    return (2 * columns(config) + 8 * config.num_warps) * config.block_m + 1024


def _registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """Returns approximately the registers of a thread: output and scores of its rows in float32, probabilities, and
    some sixty more; more again if tiles of few rows load keys by maps or from pages (sm_90, compiled)."""
    if config.roles:
        return few_rows.registers(problem, gpu, config)
    threads = max(1, config.num_warps * gpu.warp_size)
    elements = config.block_m * (padded(problem.head_dim_v) + columns(config) * 3 // 2)
    if problem.dtype == "float32" and dot_precision(problem, gpu) != "ieee" and config.block_m < 64:
        # Every warp holds the parts of all rows of Q, and those of the keys in flight.
        parts = PARTS[dot_precision(problem, gpu)]
        elements += threads * (40 + parts * config.block_m * padded(problem.head_dim) // (2 * gpu.warp_size))
    beside = 40 if problem.dtype == "float32" else 60 if config.block_m > 32 else 85
    return min(gpu.registers_per_thread or 255, beside + elements // threads)


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns why the config splits the keys as it does, for `explain`."""
    pieces = ""
    if config.pieces:
        pieces = (
            f" in whole pieces, at most {config.pieces}, which depend only on the keys, so that a sequence's "
            "bits do not depend on the batch"
        )
    chosen = choose_splits(problem, gpu, config)
    if chosen.num_splits == config.num_splits:
        return [f"num_splits = {config.num_splits}{pieces}: {chosen.reason}"]
    return [f"num_splits = {config.num_splits}{pieces}, as given; {chosen.num_splits} by default: {chosen.reason}"]
