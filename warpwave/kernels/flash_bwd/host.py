"""Gradients of exact attention by recomputation, portable Triton: every target of Triton, head_dim up to 256.

Only out and the log-sum-exp of the forward are kept. One launch owns queries and walks keys, one owns keys and walks
queries; each recomputes the probabilities of a tile.

    P = exp(S - lse);   dV = P^T dO;   dS = P * (dO V^T - delta);   dQ = scale * dS K;   dK = scale * dS^T Q
    delta = rowsum(dO * out) - dlse

Dao, "FlashAttention-2" (2023), algorithm 2, with a separate loop for dQ instead of atomic additions: seven products
instead of five, each sum in a fixed order, and no later pass over dQ. The gradient of a bias takes a third launch.

If one tile holds a sequence, a joint launch computes all gradients with five products, and reads neither out nor the
log-sum-exp (joint.py).

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency for small grids.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warpwave import precision
from warpwave.gpu import Gpu, reads_shared_memory
from warpwave.kernels import dropout, reasons
from warpwave.kernels.arguments import (
    band_constants,
    column_widths,
    feature_constants,
    lse_strides,
    matrix_options,
    pair_group,
    score_rules,
    straightener,
    stride_unit,
    strides_in,
    token_strides,
    two_loops,
    window,
)
from warpwave.kernels.flash_bwd.config import (
    PARTS_AT_ONCE,
    Config,
    Tile,
    arithmetic_of,
    check,
    fitting,
    parts_of_bias,
    smem_bytes,
    space,
    walked_of,
)
from warpwave.kernels.flash_bwd.dbias import flash_bwd_dbias_kernel
from warpwave.kernels.flash_bwd.dkv import flash_bwd_dkv_kernel
from warpwave.kernels.flash_bwd.dq import flash_bwd_dq_kernel
from warpwave.kernels.flash_bwd.joint import flash_bwd_joint_kernel
from warpwave.kernels.flash_bwd.one_side import flash_bwd_one_side_kernel
from warpwave.kernels.flash_bwd.parts import flash_bwd_add_parts_kernel
from warpwave.kernels.torch_products import keeps_float32
from warpwave.operands import DIFFERENTIABLE, AnyOperands, differentiable
from warpwave.problem import AttentionProblem, by_kind
from warpwave.runtime import launch, scratch
from warpwave.runtime.bounded import Bounded

NAME = "flash_bwd"
NEEDS_GPU = True
GRADIENTS = DIFFERENTIABLE
MAX_HEAD_DIM = 256
MAX_LAYOUTS = 16  # layouts of out and dout for which a bound call keeps its launches

Results = tuple[torch.Tensor, torch.Tensor]  # out and lse
Gradients = tuple[torch.Tensor | None, ...]  # of q, k, v, bias, alibi_slopes, sinks
Run = Callable[[AnyOperands, Results, torch.Tensor, torch.Tensor | None], Gradients]


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


# Calls ----------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, wanted: Sequence[bool], config: Config) -> Run:
    """Prepares the gradients of one problem and layout.

    Args:
        operands: tensors of the shapes, strides and alignment of those that `run` takes.
        wanted: which gradients are wanted, of q, k, v, bias, alibi_slopes and sinks.

    Raises:
        ValueError: the config cannot compute them.

    Returns:
        `run(operands, results, dout, dlse)`: the gradients of sum(out * dout) + sum(lse * dlse), each contiguous, in
        the shape and dtype of its operand, None if not wanted. `results` are out and lse of any exact forward
        kernel; out and dout have any strides. It compiles when a layout of out and dout first occurs.
    """
    check(problem, config)
    wanted = [want and t is not None for want, t in zip(wanted, differentiable(operands), strict=True)]
    if _is_empty(problem):
        return lambda operands, results, dout, dlse: _of_nothing(problem, operands, results[1], dlse, wanted)
    straight = straightener(operands, in_groups=True)
    allocate = _allocator(problem, gpu, operands, wanted, config)
    bound: Bounded[tuple[Any, ...], list[launch.Launcher]] = Bounded(MAX_LAYOUTS)

    def run(operands: AnyOperands, results: Results, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        straightened, (out, lse) = straight(operands), results
        out, dout = _with_unit_stride(out), _with_unit_stride(dout.to(out.dtype))
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        outputs = allocate()
        given = [t for t in (out, lse, dout, dlse) if t is not None]
        key = (out.stride(), dout.stride(), *[t.data_ptr() & 15 == 0 for t in given])
        launchers = bound.get(key)
        if launchers is None:
            specs = specify(problem, gpu, straightened, (out, lse), dout, dlse, outputs, config)
            launchers = [launch.bind(spec) for spec in specs]
            bound.put(key, launchers)
        tensors = _tensors(problem, straightened, (out, lse), dout, dlse, outputs, config)
        for launcher, taken in zip(launchers, tensors, strict=True):
            launcher(*taken)
        return _gradients(operands, outputs, wanted)

    return run


def _with_unit_stride(t: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, copied if its rows are strided, because rows are read in whole lines of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _is_empty(problem: AttentionProblem) -> bool:
    """Returns whether there is no query or no key."""
    sizes = (problem.total_q, problem.total_k) if problem.packed else ()
    return 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, *sizes)


def _of_nothing(
    problem: AttentionProblem,
    operands: AnyOperands,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Sequence[bool],
) -> Gradients:
    """Returns the gradients of a call in which no query sees a key: zeros, and for a sink the gradients of the
    log-sum-exp, which equals the sink."""
    found: list[torch.Tensor | None] = [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if want else None
        for t, want in zip(differentiable(operands), wanted, strict=True)
    ]
    *_, wants_sinks = wanted
    if wants_sinks and dlse is not None:
        heads = 0 if problem.packed else 1
        of_rows = torch.where(lse == -math.inf, 0.0, dlse)
        found[-1] = of_rows.transpose(0, heads).flatten(1).sum(1).to(operands.sinks.dtype)
    return tuple(found)


def _allocator(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, wanted: Sequence[bool], config: Config
) -> Callable[[], Outputs]:
    """Returns `allocate()`. Gradients of packed tokens begin as zeros: some may belong to no sequence."""
    device = operands.q.device

    def maker(t: torch.Tensor) -> Callable[[], torch.Tensor]:
        if problem.packed:
            return functools.partial(torch.zeros, t.shape, dtype=t.dtype, device=device)
        return scratch.maker(t.shape, t.dtype, device)

    sources = (*operands[:3], operands.bias)
    makers = [maker(t) if want else None for t, want in zip(sources, wanted, strict=False)]
    rows = (problem.total_q,) if problem.packed else (problem.batch, problem.seqlen_q)
    of_heads = (problem.batch, problem.num_heads_q, -(-problem.seqlen_q // config.dq.block_m))
    needs: dict[str, scratch.Need] = {}
    shared = {"keys": (0,), "queries": (1, 2), "": ()}[walked_of(problem, config)] if config.splits > 1 else ()
    for i in shared:
        if wanted[i]:
            needs[("dq_parts", "dk_parts", "dv_parts")[i]] = ((config.splits, *operands[i].shape), torch.float32)
    if not config.joint:
        needs["statistics"] = ((*rows[:-1], problem.num_heads_q, rows[-1]), torch.int64)
    for name, want in zip(("of_slopes", "of_sinks"), wanted[4:], strict=True):
        if want:
            needs[name] = (of_heads, torch.float32)
    if wanted[3] and (parts := parts_of_bias(problem, gpu, config)) > 1:
        needs["of_bias"] = ((parts, *operands.bias.shape), torch.float32)
        makers[3] = None
    workspace = scratch.memory(list(needs.values()), device)

    def allocate() -> Outputs:
        gradients = [None if make is None else make() for make in makers]
        return Outputs(*gradients, **dict(zip(needs, workspace(), strict=True)))

    return allocate


def _gradients(operands: AnyOperands, outputs: Outputs, wanted: Sequence[bool]) -> Gradients:
    dbias, dslopes, dsinks = outputs.dbias, None, None
    *_, wants_slopes, wants_sinks = wanted
    if outputs.of_bias is not None:
        dbias = outputs.of_bias.sum(0).to(operands.bias.dtype)
    if wants_slopes:
        of_slopes, slopes = outputs.of_slopes, operands.alibi_slopes
        dslopes = of_slopes.sum((0, 2) if slopes.dim() == 1 else 2).to(slopes.dtype)
    if wants_sinks:
        dsinks = outputs.of_sinks.sum((0, 2)).to(operands.sinks.dtype)
    return (*outputs[:3], dbias, dslopes, dsinks)


# Launches -------------------------------------------------------------------------------------------------------------


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
    out, (dq, dk, dv, _dbias, _statistics, of_slopes, of_sinks, *_) = results[0], outputs
    tensors = iter(_tensors(problem, operands, results, dout, dlse, outputs, config))
    unit = stride_unit(*operands[:3], out, dout, *outputs[:3])

    def in_units(*rows: torch.Tensor | None) -> list[int]:
        """Returns the strides of tensors whose last stride is 1; of absent tensors, 0 in place of the others."""
        given = [(0, 0, 0, 0) if t is None else token_strides(t) for t in rows]
        return [number for strides in given for number in (*(stride // unit for stride in strides[:-1]), 1)]

    shared: list[int | float | None] = [*strides_in(unit, *operands[:3]), *in_units(dout)]
    shared += score_rules(problem, *operands[3:6])
    shared += (problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k)
    shared += (*window(problem), *dropout.scalars(problem.dropout_p), *lse_strides(problem))
    heads = [problem.num_heads_q, problem.num_heads_q // problem.num_heads_kv]
    group = pair_group(*operands[3:5])

    def one(
        kernel: Any, blocks: int, tile: Tile, owned: int, scalars: list[int | float | None], constants: dict[str, Any]
    ) -> launch.Launch:
        return launch.Launch(
            kernel=kernel,
            grid=blocks,
            tensors=next(tensors),
            scalars=scalars,
            constants={**_constants(problem, gpu, tile, owned, unit), "PAIR_GROUP": group, **constants},
            # Off in float32, as in the forward: if one key dominates, its probability is exactly 1.
            options={
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
                "enable_fp_fusion": problem.dtype != "float32",
                **matrix_options(problem, gpu, tile.block_m, tile.block_n, tile.num_warps),
            },
        )

    def has_two_loops(owned: int, width: int) -> bool:
        # Two loops are measured with wgmma (docs/notes/backward.md), and not with tcgen05.
        return reads_shared_memory(gpu, owned) or two_loops(gpu, owned, width)

    if walked := walked_of(problem, config):
        tile, given, walks_keys = config.dq, _shared(outputs), walked == "keys"
        written = dict(zip(("WRITE_DQ", "WRITE_DK", "WRITE_DV"), given, strict=True))
        found = [
            one(
                flash_bwd_one_side_kernel, config.splits * problem.batch * problem.num_heads_kv, tile, tile.block_n,
                [*shared, *in_units(out, *given), problem.batch, config.splits, *heads],
                {
                    "WALKS_KEYS": walks_keys,
                    "HAS_DLSE": dlse is not None,
                    **{name: t is not None for name, t in written.items()},
                },
            )
        ]  # fmt: skip
        if parts := _parts(outputs):
            sizes = [t[0].numel() for t, _ in parts]
            found.append(
                launch.Launch(
                    kernel=flash_bwd_add_parts_kernel,
                    grid=sum(-(-size // PARTS_AT_ONCE) for size in sizes),
                    tensors=next(tensors),
                    scalars=[config.splits, *sizes, *([0] if len(sizes) == 1 else [])],
                    constants={"BLOCK": PARTS_AT_ONCE},
                    options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
                )
            )
        return tuple(found)
    if config.joint:
        tile, sums = config.dq, _sums_of_bias(outputs)
        parts, *owners = (1, problem.batch, problem.num_heads_kv) if sums is None else sums.shape[:3]
        written = {"DQ": dq, "DK": dk, "DV": dv, "DBIAS": sums, "DSLOPES": of_slopes, "DSINKS": of_sinks}
        return (
            one(
                flash_bwd_joint_kernel, parts * math.prod(owners), tile, tile.block_m,
                [*shared, *in_units(dq, dk, dv), problem.batch, *owners, *heads, parts],
                {
                    "HAS_GROUP": problem.num_heads_q > problem.num_heads_kv,
                    "HAS_DLSE": dlse is not None,
                    "HAS_SINKS": problem.has_sinks,
                    "PER_QUERY": sums is not None and sums.shape[3] > 1,
                    "PER_KEY": sums is not None and sums.shape[4] > 1,
                    **{f"WRITE_{name}": t is not None for name, t in written.items()},
                },
            ),
        )  # fmt: skip
    tile = config.dq
    blocks = -(-problem.seqlen_q // tile.block_m) * problem.num_heads_q * problem.batch
    written = {"WRITE_DQ": dq, "WRITE_DSLOPES": of_slopes, "WRITE_DSINKS": of_sinks}
    own = problem.dtype == "float32"
    statistics = {"OWN_STATISTICS": own, "HAS_DLSE": dlse is not None, "HAS_SINKS": problem.has_sinks}
    launches = [
        one(
            flash_bwd_dq_kernel, blocks, tile, tile.block_m,
            [*shared, *in_units(out, dq), *heads],
            {
                "TWO_LOOPS": has_two_loops(tile.block_m, column_widths(problem, gpu, tile.block_m)[0][0]),
                **statistics,
                **{name: t is not None for name, t in written.items()},
            },
        )
    ]  # fmt: skip
    (width, _), (width_v, _) = column_widths(problem, gpu, config.dkv.block_n)
    for own_dk, own_dv in _launches_of_keys(config, dk, dv):
        tile = config.dkv
        blocks = -(-problem.seqlen_k // tile.block_n) * problem.num_heads_kv * problem.batch
        launches.append(
            one(
                flash_bwd_dkv_kernel, blocks, tile, tile.block_n,
                [*shared, *in_units(own_dk, own_dv), *heads],
                {
                    "TWO_LOOPS": has_two_loops(tile.block_n, max(width, width_v)),
                    "WRITE_DK": own_dk is not None,
                    "WRITE_DV": own_dv is not None,
                },
            )
        )  # fmt: skip
    if (sums := _sums_of_bias(outputs)) is not None:
        tile = config.dq
        parts, bias_batch, bias_heads, rows, keys = sums.shape
        per_query, per_key = rows > 1, keys > 1
        blocks = parts * bias_batch * bias_heads * -(-rows // tile.block_m) * -(-keys // tile.block_n)
        launches.append(
            one(
                flash_bwd_dbias_kernel, blocks, tile, tile.block_m,
                [*shared, problem.batch, bias_batch, bias_heads, *heads, parts],
                {"PER_QUERY": per_query, "PER_KEY": per_key},
            )
        )  # fmt: skip
    return tuple(launches)


def _tensors(
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
        first = (*shared, lse, out, dlse, *_shared(outputs))
        parts = _parts(outputs)
        if not parts:
            return [first]
        sources, sums = zip(*parts, strict=True)
        none = (None,) * (2 - len(parts))
        return [first, (*sources, *none, *sums, *none)]
    if config.joint:
        return [(*shared, dlse, sinks, dq, dk, dv, _sums_of_bias(outputs), of_slopes, of_sinks)]
    found: list[tuple[Any, ...]] = [(*shared, lse, statistics, out, dlse, sinks, dq, of_slopes, of_sinks)]
    found += ((*shared, statistics, *pair) for pair in _launches_of_keys(config, dk, dv))
    if (sums := _sums_of_bias(outputs)) is not None:
        found.append((*shared, statistics, sums))
    return found


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


# What it can run ------------------------------------------------------------------------------------------------------


@by_kind
def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot compute the gradients of the problem; empty if it can."""
    found = reasons.of_device(gpu)
    if problem.page_size:
        found.append("a paged cache takes no part in autograd")
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"a row of K or V must fit one tile, {MAX_HEAD_DIM} at most")
    found += precision.why_not(problem, gpu)
    if not found and not all(fitting(problem, gpu, owns_keys) for owns_keys in (False, True)):
        needed = min(smem_bytes(problem, gpu, Config(tile, tile)) for tile in space())
        found.append(reasons.of_shared_memory(needed, gpu))
    return found


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why three_kernel's gradients are faster: parts of float32 operands of wide heads fill the registers.

    Times of this kernel over three_kernel's, whose products are torch's, full and causal with eight heads
    (2026-11-27-h200-float32-gradients.log, three-kernel-parts.log). Above head_dim 128: 9.6 to 13 at 2 x 2048 full, 6.5
    causal; 2.8 to 3.4 at 1 x 512; 0.3 to 0.4 at 8 x 128, where torch's operations bind. At 72 to 128 from 1 x 1024 on:
    0.9 to 3.6 full, 0.9 to 2.1 causal. three_kernel starts torch's operations for each batch item, so the rule reads
    the scores of an item. Windows were not timed: torch's products compute part of what they hide.
    """
    if problem.dtype != "float32" or gpu.vendor != "nvidia" or arithmetic_of(problem, gpu) == "tf32":
        return []
    if not keeps_float32(torch.device("cuda")):
        return []  # three_kernel would compute its products in float64, which consumer cards do at 1/64 of the rate
    width, scores = max(problem.head_dim, problem.head_dim_v), problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    has_window = problem.window_size != (-1, -1)
    if width > 128 and scores >= (2**24 if has_window else 2**21):
        return ["float32 above head_dim 128: three_kernel's gradients are 2.8 to 13 times as fast"]
    if width > 64 and scores >= 2**23 and not has_window and (gpu.has_mma or gpu.capability == 90):
        return ["float32 at head_dim 65 to 128: three_kernel's gradients are 0.9 to 3.6 times as fast"]
    return []
