"""The host code of hopper/flash_fwd that binds calls: it compiles their launches, and runs them in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import arguments, partials
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_fwd.config import Config, widens_values
from warpwave.kernels.hopper.flash_fwd.launches import (
    NO_PAGES,
    NO_SPLITS,
    after_schedule,
    as_packed,
    bias_for_maps,
    factors,
    page_scalars,
    seen_keys,
    specify_merge,
    specify_parts,
    specify_whole,
)
from warpwave.kernels.hopper.shared_tiles import query_tiles
from warpwave.kernels.prepass import mask_bits, scale_ahead
from warpwave.operands import AnyOperands, CachedOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch, scratch, tensor_maps
from warpwave.runtime.tensor_maps import has_map

NEEDS_GPU = True
QUANTIZED = True
QUANTIZED_CACHE = True
NO_OTHERS = (None,) * 5  # words of a mask, bias, inverses, dropout's seed, factors of q
WIDENS_VALUES = True  # a v of 8 bits is multiplied in float16
SKIPS_HIDDEN_TILES = True  # tiles that a boolean mask hides from all queries of a block


def refuses(operands: AnyOperands) -> list[str]:
    """Returns why the kernel cannot read the pools of a cache; empty if it can. All other tensors are copied if tensor
    maps cannot describe them."""
    if not isinstance(operands, CachedOperands):
        return []
    return [
        f"{name} has strides {tuple(pool.stride())} and begins at {pool.data_ptr():#x}; TMA reads rows of stride 1, "
        "other strides that are multiples of 16 bytes, and no empty pool"
        for name, pool in (("k", operands.k), ("v", operands.v))
        if not (has_map(pool) and pool.numel())
    ]


def bind(
    problem: AttentionProblem, operands: AnyOperands, config: Config, out: torch.Tensor | None = None
) -> arguments.Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    return Binder(current_gpu(operands.q.device))(problem, operands, config, out)


class _OfClass(NamedTuple):
    """The common part of the launches of one class and config.

    Attributes:
        family, merge: of the launch, and of the merge of partial results; None if keys are not split.
        boxes: source and block of each tensor map.
        scalars: the result of `after_schedule`.
    """

    family: launch.Family
    merge: launch.Family | None
    boxes: Sequence[tuple[int, tuple[int, ...]]]
    scalars: Sequence[Any]


class Binder:
    """Binds the calls of one class (dispatch.py).

    In 16 bits without a mask, bias, dropout or copies, a call with a known config computes only its sizes and tensor
    maps.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[Config | tuple[Config, tuple[int, int, bool]], _OfClass] = {}

    def __call__(
        self, problem: AttentionProblem, operands: AnyOperands, config: Config, out: torch.Tensor | None = None
    ) -> arguments.Run:
        """Binds as `bind` does."""
        if isinstance(operands, CachedOperands) and not problem.packed:
            return _bind_flat(self, problem, operands, config, out)
        allocate = arguments.allocator(problem, operands.q)
        if problem.dtype == "float32":
            straight = arguments.straightener(operands)
            return _bind_split(problem, self._gpu, straight(operands), config, allocate, straight, out)
        # The number of splits is a run-time argument, but the launch that merges them is compiled for `loads` of it.
        splits = config.num_splits
        key: Config | tuple[Config, tuple[int, int, bool]] = config
        if splits > 1:
            key = (replace(config, num_splits=2), partials.loads(problem, splits))
        known = self._known.get(key)
        found = None if known is None else _launchers(problem, self._gpu, operands, config, known)
        if found is not None:
            return _running(problem, allocate, config, operands.q.device, *found)
        mappable = _mappable(problem, operands)
        first = mappable(operands)
        out, lse = allocate(out)
        *before, spec, sources, plans = specify_whole(problem, self._gpu, first, out, lse, config)
        merging = launch.Family(specify_merge(problem, first, spec, out, lse, config)) if splits > 1 else None
        *before, widen = map(launch.bind, before) if widens_values(problem) else (*map(launch.bind, before), None)
        pack = before[0] if before else None
        family = tensor_maps.family(spec, plans, sources)
        launch_kernel = family.first()
        merge = None if merging is None else merging.first()
        reads_more = pack is not None or operands.bias is not None or operands.dropout_seed is not None
        if not reads_more and not problem.is_quantized:
            if mappable is arguments.as_it_is:
                boxes = [(plan.source, plan.block) for plan in plans if plan is not None]
                self._known[key] = _OfClass(family, merging, boxes, after_schedule(problem, operands))
            run = _running(problem, allocate, config, operands.q.device, launch_kernel, merge)
            return arguments.behind(mappable, run)
        make_words = scratch.maker((mask_bits.packed(problem).size if before else 0,), torch.int32, out.device)
        workspace = scratch.memory([(sources[2].shape, torch.float16)] if widen else [], out.device)

        def run_beside(operands: AnyOperands, out: torch.Tensor | None = None) -> arguments.Results:
            q, k, v, mask, bias = operands[:5]
            out, lse = allocate(out)
            words = None
            if pack is not None:
                words = make_words()
                pack(mask, words)
            if widen is not None:
                wide = workspace()[0]
                widen(v, wide)
                v = wide
            others = (words, bias, None, operands.dropout_seed, *factors(operands))
            launch_kernel(q, k, v, out, out, lse, *operands[5:9], *others)
            return out, lse

        return arguments.behind(mappable, run_beside)


def _running(
    problem: AttentionProblem,
    allocate: arguments.Allocate,
    config: Config,
    device: torch.device,
    launch_kernel: launch.Launcher,
    merge: launch.Launcher | None,
) -> arguments.Run:
    workspace = None if merge is None else partials.workspaces(problem, config.num_splits, device)

    def run_splits(operands: AnyOperands, out: torch.Tensor | None = None) -> arguments.Results:
        q, k, v, _, _, slopes, sinks, offsets_q, offsets_k, *pages = operands
        out, lse = allocate(out)
        assert workspace is not None and merge is not None
        acc, state = workspace()
        pages = pages or [None] * 5
        of_pages = (*NO_OTHERS, *pages[3:], *pages[:3])
        launch_kernel(q, k, v, out, out, lse, slopes, sinks, offsets_q, offsets_k, *of_pages, acc, state)
        merge(acc, state, out, lse, sinks)
        return out, lse

    def run(operands: AnyOperands, out: torch.Tensor | None = None) -> arguments.Results:
        q, k, v, _, _, slopes, sinks, offsets_q, offsets_k, *pages = operands
        out, lse = allocate(out)
        others = (*NO_OTHERS, *pages[3:]) if pages else ()
        # out is passed twice: as the source of its tensor maps, and as the pointer that packed calls also store to.
        launch_kernel(q, k, v, out, out, lse, slopes, sinks, offsets_q, offsets_k, *others, *pages[:3])
        return out, lse

    return run if merge is None else run_splits


def _bind_flat(
    binder: Binder, problem: AttentionProblem, operands: CachedOperands, config: Config, out: torch.Tensor | None
) -> arguments.Run:
    """Binds a call on a cache whose queries are not packed, as `as_packed` returns it."""
    flat, first = as_packed(problem, operands)
    attend = binder(flat, first, config, None if out is None else out.flatten(0, 1))
    shape = (problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim_v)

    def run(operands: CachedOperands, out: torch.Tensor | None = None) -> arguments.Results:
        to = None if out is None else out.flatten(0, 1)
        found, lse = attend(operands._replace(q=operands.q.flatten(0, 1)), to)
        if lse is not None:
            lse = lse.view(-1, *shape[:2]).transpose(0, 1).contiguous()
        return found.view(shape) if out is None else out, lse

    return run


def _launchers(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, config: Config, known: _OfClass
) -> tuple[launch.Launcher, launch.Launcher | None] | None:
    """Returns the launchers of another call of a known class, of its kernel and of its merge. Returns None if no tensor
    map can have its strides, or if Triton would compile again for its numbers."""
    packed = problem.packed
    seen = [host.seen(operands.q, packed), *seen_keys(problem, operands)]
    for _, (batch, head, *_) in seen:  # strides of pools are the same in all calls of a class
        if batch % 8 or head % 8 or not (0 < batch < 2**39 and 0 < head < 2**39):
            return None
    heads, width = problem.num_heads_q, problem.head_dim_v
    row = heads * width
    if packed:
        seen += (((1, heads, problem.total_q, width), (row, width, row, 1)),)
    else:
        seen += (((problem.batch, heads, problem.seqlen_q, width), (problem.seqlen_q * row, width, row, 1)),)
    seen[0], seen[3] = host.together(seen[0], config.heads), host.together(seen[3], config.heads)
    maps = [tensor_maps.MapPlan(source, *seen[source], block) for source, block in known.boxes]
    splits = config.num_splits
    tiles = query_tiles(problem, config.block_m, config.heads) * splits
    schedule = host.of_schedule(problem, operands, tiles, splits, config.block_m, 2, config.heads)
    grid = min(tiles, gpu.assumed_sms * config.blocks_per_sm)
    of_pages = page_scalars(operands) if problem.page_size else NO_PAGES  # a call fewer without pages
    of_splits = NO_SPLITS if splits == 1 else (problem.rows, splits)
    attend = known.family.launcher(grid, [*schedule, *known.scalars, *of_pages, *of_splits], maps)
    if attend is None:
        return None
    if known.merge is None:
        return attend, None
    columns = partials.loads(problem, splits)[1]
    merge = known.merge.launcher(partials.merge_grid(problem, columns), partials.merge_scalars(problem, splits))
    return None if merge is None else (attend, merge)


def _mappable(problem: AttentionProblem, operands: AnyOperands) -> Callable[[AnyOperands], AnyOperands]:
    """Returns a function that copies the operands of this layout that tensor maps cannot describe."""
    # Pools are never copied: `refuses`.
    mapped = ("q",) if problem.page_size else ("q", "k") if widens_values(problem) else ("q", "k", "v")
    mappable = host.mappable(operands, mapped)
    if operands.bias is None or bias_for_maps(operands.bias) is operands.bias:
        return mappable
    return lambda operands: mappable(operands)._replace(bias=bias_for_maps(operands.bias))


def _bind_split(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    config: Config,
    allocate: arguments.Allocate,
    straight: Callable[[AnyOperands], AnyOperands],
    out: torch.Tensor | None,
) -> arguments.Run:
    """Binds float32: q, k and v are split into a workspace, whatever their strides, and tensor maps describe the
    workspace. Each stream and each graph has its own (runtime/scratch.py)."""
    out, lse = allocate(out)
    specified = specify_parts(problem, gpu, operands, out, lse, config)
    parts = specified.parts
    optional = [specified.pack, specified.flag, specified.maxima]
    pack, flag, find_maxima = [None if spec is None else launch.bind(spec) for spec in optional]
    make_parts = launch.bind(specified.split)
    launch_kernel = tensor_maps.bind(specified.attend, specified.plans, (*parts, out))
    needs: list[scratch.Need] = [(part.shape, part.dtype) for part in parts]
    many_inverses, many_maxima = scale_ahead.workspace_floats(problem)
    if pack is not None:
        needs.append(((mask_bits.packed(problem).size,), torch.int32))
    if flag is not None:
        needs.append((mask_bits.keys_seen_shape(problem), torch.int8))
    if find_maxima is not None:
        needs.append(((many_maxima,), torch.float32))
    is_scaled = parts[0].dtype == torch.float16
    if is_scaled:
        needs.append(((many_inverses,), torch.float32))

    def named(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        """Returns parts, words, flags of keys, inverses, and maxima."""
        given = iter(tensors[3:])
        words, seen, maxima, inverses = (
            next(given) if there else None for there in (pack, flag, find_maxima, is_scaled)
        )
        # If no launch finds maxima, none reads them, but a pointer to them must not be absent.
        return *tensors[:3], words, seen, inverses, inverses if maxima is None else maxima

    workspace = scratch.memory(needs, out.device, named)

    def run(operands: AnyOperands, out: torch.Tensor | None = None) -> arguments.Results:
        q, k, v, mask, _, slopes, sinks, offsets_q, offsets_k, *_ = operands
        out, lse = allocate(out)
        q_parts, k_parts, v_parts, words, seen, inverses, maxima = workspace()
        if pack is not None:
            pack(mask, words)
        if flag is not None:
            flag(words, seen)
        if find_maxima is not None:
            find_maxima(k, v, offsets_q, offsets_k, seen, maxima)
        if is_scaled:
            make_parts(q, k, v, offsets_q, offsets_k, seen, q_parts, k_parts, v_parts, inverses, maxima)
        else:
            make_parts(q, k, v, q_parts, k_parts, v_parts)
        others = (words, None, inverses)
        launch_kernel(q_parts, k_parts, v_parts, out, out, lse, slopes, sinks, offsets_q, offsets_k, *others)
        return out, lse

    return arguments.behind(straight, run)
