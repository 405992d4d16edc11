"""The launches of hopper/flash_fwd: tensor maps and arguments of the attention; what precedes it, which packs a mask,
splits float32 or widens values of 8 bits; and what follows it, which merges the results of split keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from warpwave import precision
from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu
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
from warpwave.runtime import launch, tensor_maps

NAME = "hopper/flash_fwd"
NO_PAGES = (None, None, None)
NO_SPLITS = (None, None)
BIAS_SOURCE = 4 + 7  # index in the kernel's pointers, after the maps of q, k, v and out (tensor_maps.MapPlan.source)


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
        specified = specify_parts(problem, gpu, operands, out, lse, config)
        return (*specified.before, specified.attend)
    if isinstance(operands, CachedOperands) and not problem.packed:
        problem, operands = as_packed(problem, operands)
        out = out.flatten(0, 1)
    operands = operands._replace(bias=bias_for_maps(operands.bias))
    *before, attend, _, _ = specify_whole(problem, gpu, operands, out, lse, config)
    if config.num_splits > 1:
        return attend, specify_merge(problem, operands, attend, out, lse, config)
    return (*before, attend) if before else attend


def as_packed(problem: AttentionProblem, operands: CachedOperands) -> tuple[AttentionProblem, CachedOperands]:
    """Returns a call on a cache whose queries are not packed as a packed one: all queries one after another."""
    flat = replace(problem, packed=True, total_q=problem.rows, total_k=problem.batch * problem.seqlen_k)
    return flat, operands._replace(q=operands.q.flatten(0, 1))


def seen_keys(problem: AttentionProblem, operands: AnyOperands) -> tuple[host.Described, host.Described]:
    """Returns shape and strides of K and of V, or of pools of pages, in the axis order of tensor maps. Dense tensors
    end after the last key that a query sees."""
    packed = problem.packed and not problem.page_size
    rows = None if packed or problem.page_size else host.keys_end(problem)
    return host.seen(operands.k, packed, rows), host.seen(operands.v, packed, rows)


def page_scalars(operands: AnyOperands) -> tuple[int | None, ...]:
    """Returns the numbers of `groups.Pages`, None if keys are not in pages."""
    if isinstance(operands, CachedOperands):
        return operands.page_table.stride(0), operands.k.shape[0], operands.page_table.shape[0]
    return NO_PAGES


def _plans(
    problem: AttentionProblem, config: Config, operands: AnyOperands, out: torch.Tensor
) -> list[tensor_maps.MapPlan | None]:
    """Returns the tensor maps of q, k, v and out, host.MAX_PIECES each, and of the bias. Maps of K and V end
    after the last key that a query sees."""
    plans: list[tensor_maps.MapPlan | None] = []
    of_keys, of_values = row_pieces(problem, config)
    widths = (of_keys, of_keys, of_values, () if config.num_splits > 1 else out_pieces(problem, config))
    of_q, of_out = (host.together(host.seen(x, problem.packed), config.heads) for x in (operands.q, out))
    described = (of_q, *seen_keys(problem, operands), of_out)
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


def specify_whole(
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


class OfParts(NamedTuple):
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


def specify_parts(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> OfParts:
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
    return OfParts(pack, flag, maxima, split, attend, parts, plans)


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
    others = (words, operands.bias, inverses, operands.dropout_seed, *factors(operands), *_tables(operands))
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
    return [*schedule, *after_schedule(problem, operands), *page_scalars(operands), *of_splits]


def specify_merge(
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


def after_schedule(problem: AttentionProblem, operands: AnyOperands) -> list[Any]:
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


def factors(operands: AnyOperands) -> tuple[Any, Any, Any]:
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


def bias_for_maps(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a bias with one number for each score in a form that a tensor map can describe, any other unchanged."""
    return host.mappable_bias(bias) if bias is not None and host.bias_kind(bias) == "cells" else bias


def _register_cap(config: Config) -> dict[str, int]:
    """Returns the registers a thread starts with when blocks share an SM: 256 threads a block."""
    return {} if config.blocks_per_sm == 1 else {"maxnreg": 65536 // (256 * config.blocks_per_sm) // 8 * 8}
