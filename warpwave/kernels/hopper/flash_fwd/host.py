"""The host code of hopper/flash_fwd: tensor maps, arguments, the launches before it, which pack a mask, split float32
or widen values of 8 bits, and the one after it, which merges the results of split keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from warpwave import precision
from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import arguments, cache_descales, descales, dropout, partials
from warpwave.kernels.hopper import host
from warpwave.kernels.hopper.flash_fwd.config import (
    ABLE,
    Config,
    narrow_stages,
    num_parts,
    out_columns,
    out_pieces,
    registers,
    row_pieces,
    stores_registers,
    values_first,
    widens_values,
)
from warpwave.kernels.hopper.flash_fwd.kernel import hopper_flash_fwd_kernel
from warpwave.kernels.hopper.parts import ROWS
from warpwave.kernels.hopper.shared_tiles import heads_of_tile, query_tiles
from warpwave.kernels.hopper.split_tiles import can_split
from warpwave.kernels.prepass import mask_bits, scale_ahead, split_ahead, widen_values
from warpwave.operands import AnyOperands, CachedOperands, QuantizedOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch, scratch, tensor_maps
from warpwave.runtime.tensor_maps import has_map

NAME = "hopper/flash_fwd"
NEEDS_GPU = True
QUANTIZED = True
QUANTIZED_CACHE = True
NO_PAGES = (None, None, None)
NO_SPLITS = (None, None)
NO_OTHERS = (None,) * 5  # words of a mask, bias, inverses, dropout's seed, factors of q
WIDENS_VALUES = True  # a v of 8 bits is multiplied in float16
SKIPS_HIDDEN_TILES = True  # tiles that a boolean mask hides from all queries of a block
BIAS_SOURCE = 4 + 7  # index in the kernel's pointers, after the maps of q, k, v and out (tensor_maps.MapPlan.source)


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
        scalars: the result of `_after_schedule`.
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
        *before, spec, sources, plans = _specify_whole(problem, self._gpu, first, out, lse, config)
        merging = launch.Family(_specify_merge(problem, first, spec, out, lse, config)) if splits > 1 else None
        *before, widen = map(launch.bind, before) if widens_values(problem) else (*map(launch.bind, before), None)
        pack = before[0] if before else None
        family = tensor_maps.family(spec, plans, sources)
        launch_kernel = family.first()
        merge = None if merging is None else merging.first()
        reads_more = pack is not None or operands.bias is not None or operands.dropout_seed is not None
        if not reads_more and not problem.is_quantized:
            if mappable is arguments.as_it_is:
                boxes = [(plan.source, plan.block) for plan in plans if plan is not None]
                self._known[key] = _OfClass(family, merging, boxes, _after_schedule(problem, operands))
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
            others = (words, bias, None, operands.dropout_seed, *_factors(operands))
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
    """Binds a call on a cache whose queries are not packed, as `_flat` returns it."""
    flat, first = _flat(problem, operands)
    attend = binder(flat, first, config, None if out is None else out.flatten(0, 1))
    shape = (problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim_v)

    def run(operands: CachedOperands, out: torch.Tensor | None = None) -> arguments.Results:
        to = None if out is None else out.flatten(0, 1)
        found, lse = attend(operands._replace(q=operands.q.flatten(0, 1)), to)
        if lse is not None:
            lse = lse.view(-1, *shape[:2]).transpose(0, 1).contiguous()
        return found.view(shape) if out is None else out, lse

    return run


def _flat(problem: AttentionProblem, operands: CachedOperands) -> tuple[AttentionProblem, CachedOperands]:
    """Returns a call on a cache whose queries are not packed as a packed one: all queries one after another."""
    flat = replace(problem, packed=True, total_q=problem.rows, total_k=problem.batch * problem.seqlen_k)
    return flat, operands._replace(q=operands.q.flatten(0, 1))


def _launchers(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, config: Config, known: _OfClass
) -> tuple[launch.Launcher, launch.Launcher | None] | None:
    """Returns the launchers of another call of a known class, of its kernel and of its merge. Returns None if no tensor
    map can have its strides, or if Triton would compile again for its numbers."""
    packed = problem.packed
    seen = [host.seen(operands.q, packed), *_seen_keys(problem, operands)]
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
    of_pages = _page_scalars(operands) if problem.page_size else NO_PAGES  # a call fewer without pages
    of_splits = NO_SPLITS if splits == 1 else (problem.rows, splits)
    attend = known.family.launcher(grid, [*schedule, *known.scalars, *of_pages, *of_splits], maps)
    if attend is None:
        return None
    if known.merge is None:
        return attend, None
    columns = partials.loads(problem, splits)[1]
    merge = known.merge.launcher(partials.merge_grid(problem, columns), partials.merge_scalars(problem, splits))
    return None if merge is None else (attend, merge)


def _seen_keys(problem: AttentionProblem, operands: AnyOperands) -> tuple[host.Described, host.Described]:
    """Returns shape and strides of K and of V, or of pools of pages, in the axis order of tensor maps. Dense tensors
    end after the last key that a query sees."""
    packed = problem.packed and not problem.page_size
    rows = None if packed or problem.page_size else host.keys_end(problem)
    return host.seen(operands.k, packed, rows), host.seen(operands.v, packed, rows)


def _page_scalars(operands: AnyOperands) -> tuple[int | None, ...]:
    """Returns the numbers of `groups.Pages`, None if keys are not in pages."""
    if isinstance(operands, CachedOperands):
        return operands.page_table.stride(0), operands.k.shape[0], operands.page_table.shape[0]
    return NO_PAGES


def _mappable(problem: AttentionProblem, operands: AnyOperands) -> Callable[[AnyOperands], AnyOperands]:
    """Returns a function that copies the operands of this layout that tensor maps cannot describe."""
    # Pools are never copied: `refuses`.
    mapped = ("q",) if problem.page_size else ("q", "k") if widens_values(problem) else ("q", "k", "v")
    mappable = host.mappable(operands, mapped)
    if operands.bias is None or _bias_for_maps(operands.bias) is operands.bias:
        return mappable
    return lambda operands: mappable(operands)._replace(bias=_bias_for_maps(operands.bias))


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
    specified = _specify_parts(problem, gpu, operands, out, lse, config)
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


def _plans(
    problem: AttentionProblem, config: Config, operands: AnyOperands, out: torch.Tensor
) -> list[tensor_maps.MapPlan | None]:
    """Returns the tensor maps of q, k, v and out, host.MAX_PIECES each, and of the bias. Maps of K and V end
    after the last key that a query sees."""
    plans: list[tensor_maps.MapPlan | None] = []
    of_keys, of_values = row_pieces(problem, config)
    widths = (of_keys, of_keys, of_values, () if config.num_splits > 1 else out_pieces(problem, config))
    of_q, of_out = (host.together(host.seen(x, problem.packed), config.heads) for x in (operands.q, out))
    described = (of_q, *_seen_keys(problem, operands), of_out)
    of_tile = min(config.block_n, problem.page_size or config.block_n)
    for source, (of_tensor, parts) in enumerate(zip(described, widths, strict=True)):
        rows = of_tile if source in (1, 2) else ROWS.value
        plans += host.piece_maps(source, *of_tensor, rows, parts)
    return [*plans, _bias_plan(operands.bias, config)]


def _bias_plan(bias: torch.Tensor | None, config: Config) -> tensor_maps.MapPlan | None:
    """Returns the tensor map of a bias that has one number for each score, else None."""
    if bias is None or host.bias_kind(bias) != "cells":
        return None
    return host.bias_plan(BIAS_SOURCE, bias, (ROWS.value, config.block_n))


def _plans_of_parts(
    problem: AttentionProblem, config: Config, parts: tuple[torch.Tensor, ...]
) -> list[tensor_maps.MapPlan | None]:
    """Returns the tensor maps of q, k and v in parts (`split_ahead.part_shapes`); out has none."""
    plans: list[tensor_maps.MapPlan | None] = []
    for source, tensor in enumerate(parts):
        batch, heads, rows, width = tensor.shape
        if source > 0 and not problem.packed:
            rows = max(1, host.keys_end(problem))
        of_tile = config.block_n if source > 0 else ROWS.value
        shape = (batch, heads, rows, width)
        plans += host.piece_maps(source, shape, tensor.stride(), of_tile, row_pieces(problem, config)[source == 2])
    return [*plans, *[None] * (host.MAX_PIECES + 1)]  # no maps for out and the bias


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> launch.Launch | tuple[launch.Launch, ...]:
    """Returns the launch from tensors, which may be without memory (device "meta") if it is only compiled. If launches
    precede it, returns a tuple that ends with it: they make parts of float32, pack a mask or widen a v of 8 bits. If
    keys are split, returns it and the launch that merges partial results."""
    if problem.dtype == "float32":
        specified = _specify_parts(problem, gpu, operands, out, lse, config)
        return (*specified.before, specified.attend)
    if isinstance(operands, CachedOperands) and not problem.packed:
        problem, operands = _flat(problem, operands)
        out = out.flatten(0, 1)
    operands = operands._replace(bias=_bias_for_maps(operands.bias))
    *before, attend, _, _ = _specify_whole(problem, gpu, operands, out, lse, config)
    if config.num_splits > 1:
        return attend, _specify_merge(problem, operands, attend, out, lse, config)
    return (*before, attend) if before else attend


def _specify_whole(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> tuple[Any, ...]:
    """Returns the launches of a call whose operands are not split into parts: those that pack a boolean mask and widen
    v, if any, and the attention launch. Then returns the tensors that maps describe, and their maps."""
    _refuse_one_stage(problem, config)
    _refuse_heads(problem, config)
    _refuse_splits(problem, config)
    before, words, mapped = [], None, operands
    if operands.mask is not None:
        words = torch.empty(mask_bits.packed(problem).size, dtype=torch.int32, device=out.device)
        before = [mask_bits.specify(problem, operands.mask, words)]
    if isinstance(operands, QuantizedOperands) and widens_values(problem):
        mapped = operands._replace(v=torch.empty(operands.v.shape, dtype=torch.float16, device=out.device))
        before.append(widen_values.specify(problem, gpu, operands, mapped.v))
    sources, plans = (*mapped[:3], out), _plans(problem, config, mapped, out)
    attend = _specify(problem, gpu, operands, sources, plans, lse, config, 1, words=words)
    return (*before, attend, sources, plans)


def _refuse_one_stage(problem: AttentionProblem, config: Config) -> None:
    if config.num_stages < 2:
        raise UnsupportedProblem(
            f"{config} cannot run {problem.describe()}",
            {NAME: ["num_stages is 1; it must be at least 2: K comes one tile ahead of V where tiles overlap"]},
            "num_stages=2",
        )


def _refuse_heads(problem: AttentionProblem, config: Config) -> None:
    most = heads_of_tile(problem)
    if config.heads > most:
        raise UnsupportedProblem(
            f"{config} cannot run {problem.describe()}",
            {NAME: [f"heads is {config.heads}; at most {most} heads of this call can share a tile"]},
            f"heads={most}",
        )


def _refuse_splits(problem: AttentionProblem, config: Config) -> None:
    if config.num_splits > 1 and not can_split(problem):
        raise UnsupportedProblem(
            f"{config} cannot run {problem.describe()}",
            {
                NAME: [
                    f"num_splits is {config.num_splits}; keys are split only in 16 bits, and without a mask, "
                    "bias, dropout or batch_invariant"
                ]
            },
            "num_splits=1",
        )


class _OfParts(NamedTuple):
    """The launches of a float32 call, and what is between them.

    Attributes:
        pack, flag: pack a boolean mask, and flag the keys that it shows, for scales; None without one.
        maxima: finds the largest magnitudes of K and V; None if the next launch does so itself.
        split: makes parts of q, k and v.
        attend: the attention launch.
        parts, plans: of q, k and v, and their tensor maps.
    """

    pack: launch.Launch | None
    flag: launch.Launch | None
    maxima: launch.Launch | None
    split: launch.Launch
    attend: launch.Launch
    parts: tuple[torch.Tensor, ...]
    plans: list[tensor_maps.MapPlan | None]

    @property
    def before(self) -> list[launch.Launch]:
        """The launches before the attention launch, in order."""
        return [spec for spec in self[:4] if spec is not None]


def _specify_parts(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> _OfParts:
    """Returns the launches of a float32 call."""
    _refuse_heads(problem, config)
    _refuse_splits(problem, config)
    widths = [sum(found) for found in row_pieces(problem, config)]
    arithmetic, count = precision.arithmetic(problem, gpu, ABLE), num_parts(problem, gpu)
    if count == 1:
        _refuse_one_stage(problem, config)
    pack = flag = maxima = words = seen = inverses = None
    if operands.mask is not None:
        words = torch.empty(mask_bits.packed(problem).size, dtype=torch.int32, device=out.device)
        pack = mask_bits.specify(problem, operands.mask, words)
    if arithmetic in scale_ahead.PARTS:
        if words is not None:
            seen = torch.empty(mask_bits.keys_seen_shape(problem), dtype=torch.int8, device=out.device)
            flag = mask_bits.specify_keys_seen(problem, words, seen)
        shapes = split_ahead.part_shapes(problem, count, *widths)
        scaling = scale_ahead.specify(problem, gpu, operands, arithmetic, shapes, seen)
        (*before, split), parts, inverses = scaling.launches, scaling.parts, scaling.inverses
        maxima = before[0] if before else None
    else:
        split, parts = split_ahead.specify_all(problem, gpu, operands, arithmetic, *widths)
    plans = _plans_of_parts(problem, config, parts)
    attend = _specify(problem, gpu, operands, (*parts, out), plans, lse, config, count, inverses, words)
    return _OfParts(pack, flag, maxima, split, attend, parts, plans)


def _specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    sources: tuple[torch.Tensor, ...],
    plans: list[tensor_maps.MapPlan | None],
    lse: torch.Tensor | None,
    config: Config,
    parts: int,
    inverses: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
) -> launch.Launch:
    """Returns the launch of `hopper_flash_fwd_kernel` on the tensors that maps describe, `sources`; the last one is
    out."""
    out = sources[-1]
    splits, workspace = config.num_splits, partials.workspaces(problem, config.num_splits, out.device)()
    out_ptr = out if (problem.packed and splits == 1) or problem.dtype == "float32" else None
    tensors = {**dict(enumerate(sources)), BIAS_SOURCE: operands.bias}
    descriptors = [None if plan is None else launch.Mapped(plan, tensors[plan.source]) for plan in plans]
    tiles = query_tiles(problem, config.block_m, config.heads) * splits
    sms = gpu.assumed_sms
    others = (words, operands.bias, inverses, operands.dropout_seed, *_factors(operands), *_tables(operands))
    return launch.Launch(
        kernel=hopper_flash_fwd_kernel,
        grid=min(tiles, sms * config.blocks_per_sm),
        tensors=(*descriptors, out_ptr, lse, *operands[5:9], *others, *workspace, host.counter(out)),
        scalars=_scalars(problem, operands, config, tiles, parts),
        constants=_constants(problem, config, parts)
        | {"BIAS": host.bias_kind(operands.bias), "HAS_ROWS": _tables(operands)[2] is not None},
        options={
            "num_warps": 4,
            "enable_fp_fusion": True,
            **_register_cap(config),
            # It begins while the preceding launch runs.
            **({} if inverses is None and not widens_values(problem) else {"launch_pdl": True}),
        },
    )


def _scalars(problem: AttentionProblem, operands: AnyOperands, config: Config, tiles: int, parts: int) -> list[Any]:
    """Returns the run-time arguments after the pointers, in the kernel's order."""
    splits = config.num_splits
    schedule = host.of_schedule(problem, operands, tiles, splits, config.block_m, 2 * parts, config.heads)
    of_splits = NO_SPLITS if splits == 1 else (problem.rows, splits)
    return [*schedule, *_after_schedule(problem, operands), *_page_scalars(operands), *of_splits]


def _specify_merge(
    problem: AttentionProblem,
    operands: AnyOperands,
    attend: launch.Launch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> launch.Launch:
    """Returns the launch that merges the partial results of `attend`, after which it may begin early."""
    *_, acc, state, _ = attend.tensors
    return partials.specify_merge(problem, config.num_splits, acc, state, out, lse, operands.sinks, launched_ahead=True)


def _after_schedule(problem: AttentionProblem, operands: AnyOperands) -> list[Any]:
    """Returns the last run-time arguments. Those of a class (`_OfClass`) do not depend on lengths."""
    scale, softcap = host.score_units(problem)
    if problem.bias_shape is not None:  # scores stay in natural units until the bias is added (mask_bias.py)
        scale, softcap = (scale, problem.softcap) if softcap else (problem.softmax_scale, 0.0)
    if problem.dtype != "float32" and scale == 0.0:
        scale = 2.0**-100  # hidden scores are multiplied too, and 0 * -inf is NaN; all others still round to 0
    of_bias = arguments.broadcast_strides(operands.bias)[:3]
    of_factors: list[int | None] = [None] * 10
    if isinstance(operands, QuantizedOperands):
        of_factors = [*descales.strides_of_q(problem, operands.q_descale)]
        for descale in (operands.k_descale, operands.v_descale):
            of_factors += [None] * 3 if descale is None else descales.strides_of_keys(descale)
    elif isinstance(operands, CachedOperands) and problem.dtype_kv:
        strides = cache_descales.strides(operands.k_descale, operands.v_descale)
        of_factors[4:] = [x for page, cell, head in (strides[:3], strides[3:]) for x in (page, head, cell)]
    of_dropout = dropout.scalars(problem.dropout_p)
    return [scale, softcap, *mask_bits.strides(problem), *of_bias, *of_dropout, *of_factors]


def _factors(operands: AnyOperands) -> tuple[Any, Any, Any]:
    """Returns the factors of q, k and v, None for a tensor that is not quantized."""
    if isinstance(operands, QuantizedOperands):
        return operands.q_descale, operands.k_descale, operands.v_descale
    if isinstance(operands, CachedOperands):
        return None, operands.k_descale, operands.v_descale
    return None, None, None


def _tables(operands: AnyOperands) -> tuple[Any, Any, Any]:
    """Returns the page table, the lengths and the rows of a call on a cache; None where absent."""
    if isinstance(operands, CachedOperands):
        return operands.page_table, operands.seqused_k, operands.rows
    return None, None, None


def _constants(problem: AttentionProblem, config: Config, parts: int) -> dict[str, int | bool]:
    """Returns the compile-time arguments of the kernel, by name."""
    consumer, producer = registers(problem, config)
    block_q, block_k, block_v = problem.descale_blocks or (0, 0, 0)
    return {
        "GROUPS": config.groups,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "NARROW_STAGES": narrow_stages(problem, config),
        "OWN_OUT": stores_registers(problem, config) or out_columns(problem, config) > 0,
        "VALUES_FIRST": values_first(problem, config),
        "PARTS": parts,
        "HEAD_DIM_V": problem.head_dim_v if problem.dtype == "float32" else 0,
        "HEADS": config.heads,
        **host.options_of(problem),
        **({"WRITE_LSE": False, "HAS_SINKS": False} if config.num_splits > 1 else {}),  # the merge has both
        "COLUMNS": problem.head_dim_v if config.num_splits > 1 else 0,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "HAS_MASK": problem.mask_shape is not None,
        "Q_BLOCK": block_q,
        "K_BLOCK": block_k,
        "V_BLOCK": block_v,
        "TOKEN_FACTORS": problem.kv_factors == "token",
        "PAGE_SIZE": problem.page_size,
    }


def _bias_for_maps(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a bias with one number for each score in a form that a tensor map can describe, any other unchanged."""
    return host.mappable_bias(bias) if bias is not None and host.bias_kind(bias) == "cells" else bias


def _register_cap(config: Config) -> dict[str, int]:
    """Returns the registers a thread starts with when blocks share an SM: 256 threads a block."""
    return {} if config.blocks_per_sm == 1 else {"maxnreg": 65536 // (256 * config.blocks_per_sm) // 8 * 8}
