"""Attention as product, softmax, product, over chunks of query rows and heads: for head_dim in the thousands.

    S = Q K^T;   P = exp(S' - max), row sums;   out = P V / sum        S' is S scaled, capped, biased and masked

Far above head_dim 256 the two products are ordinary matrix products, and scores are small beside q, k and v. They are
kept in memory a chunk at a time, in a workspace of bounded size. Raw scores are float32; P has 16 bits un-normalised,
with what its rows are to be divided by in float32: 16-bit scores, or a P that is normalised before it is rounded, would
cost more than all other roundings together.

Each product is torch's (`library`) or ours (`triton`); ours may also take the softmax into the epilogue of the first
(`fused`), which then writes 2 bytes a score and no pass over scores is left. Milakov & Gimelshein, "Online normalizer
calculation for softmax" (2018), is how tiles of P with a maximum each become one sum.

Bound: tensor cores; below head_dim 1024 the traffic of the scores. It adds to tiled the bounded workspace, 16-bit P,
and torch's products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from warpwave import launch, precision
from warpwave.errors import UnsupportedProblem
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels.arguments import (
    allocator,
    band_constants,
    broadcast_strides,
    dot_precision,
    feature_constants,
    lse_strides,
    padded,
    slope_strides,
    split_operand,
    straightener,
    token_strides,
    window,
)
from warpwave.kernels.cost import Cost, visited_tiles
from warpwave.kernels.three_kernel_device import (
    chunk_scores_kernel,
    chunk_softmax_kernel,
    chunk_values_kernel,
)
from warpwave.kernels.three_kernel_plan import (
    Chunk,
    Config,
    Plan,
    allocate_workspace,
    least_bytes,
    normalises,
    plan,
    up,
    workspace_bytes,
)
from warpwave.kernels.triton_or_stub import NO_TRITON
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Operands

NAME = "three_kernel"
NEEDS_GPU = True


# torch's products -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _products_in(arithmetic: str) -> Iterator[None]:
    """torch's float32 products in the precision asked for, whatever the process allows elsewhere."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if arithmetic == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _multiply_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out = a b for each head, accumulated in float32; out is float32 unless a and b are of its dtype."""
    if not a.is_cuda:
        out.copy_(a.float() @ b.float())
    elif a.dtype != torch.float32:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a, b, out=out)


def _runs_of_heads(problem: AttentionProblem, chunk: Chunk) -> Iterator[tuple[int, slice, slice, slice]]:
    """(batch item, query heads, kv heads, heads of the chunk) that one product of torch can take: those of one batch
    item, and where query heads share kv heads, of one kv head."""
    group = problem.num_heads_q // problem.num_heads_kv
    begin, end = chunk.first_head, chunk.first_head + chunk.heads
    while begin < end:
        batch, head = divmod(begin, problem.num_heads_q)
        most = problem.num_heads_q - head if group == 1 else group - head % group
        count = min(most, end - begin)
        kv = slice(head, head + count) if group == 1 else slice(head // group, head // group + 1)
        yield batch, slice(head, head + count), kv, slice(begin - chunk.first_head, begin - chunk.first_head + count)
        begin += count


def _library_scores(problem: AttentionProblem, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, into: Any) -> None:
    """Raw scores of every pair between the chunk's first and last visible key, into [heads, rows, keys]."""
    keys, columns = _key_slices(chunk)
    rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
    for batch, heads, kv_heads, here in _runs_of_heads(problem, chunk):
        a = q[batch, rows, heads].transpose(0, 1)  # [heads, rows, head_dim]
        b = k[batch, keys, kv_heads].permute(1, 2, 0)  # [1 or heads, head_dim, keys]
        _multiply_into(into[here, : chunk.rows, columns], a, b.expand(a.shape[0], -1, -1))


def _library_values(
    problem: AttentionProblem, chunk: Chunk, v: torch.Tensor, out: torch.Tensor, workspace: dict[str, Any], p: Any
) -> None:
    """The chunk's rows of out: P V, and by how much its rows are to be multiplied, where the softmax left that."""
    keys, columns = _key_slices(chunk)
    rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
    for batch, heads, kv_heads, here in _runs_of_heads(problem, chunk):
        into = out[batch, rows, heads].transpose(0, 1)  # [heads, rows, head_dim_v]
        if chunk.nothing_to_see:
            into.zero_()
            continue
        a = p[here, : chunk.rows, columns]
        b = v[batch, keys, kv_heads].transpose(0, 1).expand(a.shape[0], -1, -1)  # [heads, keys, head_dim_v]
        if workspace["sums"] is None:
            _multiply_into(into, a, b)
        else:
            sums = workspace["sums"][here, : chunk.rows]
            _multiply_into(sums, a, b)
            torch.mul(sums, workspace["row_scale"][here, : chunk.rows, None], out=into)


def _key_slices(chunk: Chunk) -> tuple[slice, slice]:
    """The chunk's visible keys, in k and v and in the workspace."""
    return slice(chunk.key_begin, chunk.key_end), slice(
        chunk.key_begin - chunk.key_base, chunk.key_end - chunk.key_base
    )


# Launches -------------------------------------------------------------------------------------------------------------


def bind(
    problem: AttentionProblem, operands: Operands, config: Config
) -> Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]:
    """Compiles for one problem and layout; returns `run(operands) -> (out, lse)`, lse None unless somebody needs it.

    Raises:
        InvalidInput: the config's workspace does not hold one tile of queries.
        UnsupportedProblem: the config asks torch for a product it cannot compute.
    """
    make, run_stage = _stages(problem, operands, config)

    def run(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse, workspace = make()
        run_stage(STAGES, operands, out, lse, workspace)
        return out, lse

    return run


def stage_calls(problem: AttentionProblem, operands: Operands, config: Config) -> dict[str, Callable[[], None]]:
    """Each stage of a call alone, over all chunks in one workspace, to be timed. In order, for one chunk, they are the
    call. A stage that the config has none of is left out."""
    make, run_stage = _stages(problem, operands, config)
    out, lse, workspace = make()
    run_stage(STAGES, operands, out, lse, workspace)
    there = [stage for stage in STAGES if stage != "softmax" or config.scores != "fused"]
    return {stage: partial(run_stage, (stage,), operands, out, lse, workspace) for stage in there}


STAGES = ("scores", "softmax", "values")


def _stages(problem: AttentionProblem, operands: Operands, config: Config) -> tuple[Callable[..., Any], ...]:
    """`make() -> (out, lse, workspace)` and `run_stage(which stages, operands, out, lse, workspace)`, all compiled."""
    device, gpu = operands.q.device, current_gpu(operands.q.device)
    if reasons := _library_cannot(problem, gpu, config):
        choice = configs(problem, gpu)[0]
        raise UnsupportedProblem(
            f"kernel {NAME!r} cannot run {problem.describe()} with {config}", {NAME: reasons}, f"config={choice}"
        )
    cut = plan(problem, config)
    allocate, straight = allocator(problem, operands.q), straightener(operands)

    def make() -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
        return (*allocate(), allocate_workspace(problem, config, cut, device))

    with torch.no_grad():
        out, lse, workspace = make()
        launchers = [
            tuple(None if spec is None else launch.bind(spec) for spec in launches)
            for launches in _launches(problem, gpu, straight(operands), out, lse, config, cut, workspace)
        ]
    del out, lse, workspace
    arithmetic = dot_precision(problem, gpu)

    def run_stage(
        stages: Sequence[str],
        operands: Operands,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: dict[str, Any],
    ) -> None:
        q, k, v, mask, bias, slopes, sinks, *ends = straight(operands)
        raw, p, row_scale, *states = (workspace[name] for name in ("scores", "p", "row_scale", "tile_max", "tile_sum"))
        with torch.no_grad(), _products_in(arithmetic):
            for chunk, (score, softmax, sum_values) in zip(cut.chunks, launchers, strict=True):
                if "scores" in stages and score is not None:
                    score(q, k, p if raw is None else raw, *states, mask, bias, slopes, *ends)
                elif "scores" in stages and not chunk.nothing_to_see:
                    _library_scores(problem, chunk, q, k, raw[0])
                if "softmax" in stages and softmax is not None:
                    softmax(raw, p, row_scale, lse, mask, bias, slopes, sinks, *ends)
                if "values" in stages and sum_values is not None:
                    sum_values(p, row_scale, *states, v, out, lse, sinks, *ends)
                elif "values" in stages:
                    _library_values(problem, chunk, v, out, workspace, p[0] if p is raw else p)

    return make, run_stage


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> tuple[launch.Launch, ...]:
    """The launches of the first chunk that are ours, from tensors that may be without memory."""
    lse = torch.empty(1, dtype=torch.float32, device=out.device) if problem.return_lse and lse is None else lse
    cut = plan(problem, config)
    workspace = allocate_workspace(problem, config, cut, out.device)
    first = next(_launches(problem, gpu, operands, out, lse, config, cut, workspace))
    return tuple(spec for spec in first if spec is not None)


def _launches(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
    cut: Plan,
    workspace: dict[str, Any],
) -> Iterator[tuple[launch.Launch | None, launch.Launch | None, launch.Launch | None]]:
    """First product, softmax and second product of each chunk; None for what torch computes or an epilogue does."""
    q, k, v, mask, bias, slopes, sinks, *ends = operands
    fused, band, varlen = config.scores == "fused", band_constants(problem), {"IS_VARLEN": problem.packed}
    features = feature_constants(problem)
    of_sinks = {"HAS_SINKS": features.pop("HAS_SINKS")}
    hides = {"MAY_HIDE_KEYS": _may_hide_keys(problem)}
    arithmetic = {"PRECISION": dot_precision(problem, gpu), "IS_NVIDIA": gpu.vendor == "nvidia"}
    raw, p = workspace["scores"], workspace["p"]
    strides = (cut.rows * cut.width, cut.width)  # of a head and a row of the workspace
    split = (cut.heads * cut.rows * cut.width,)
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k, problem.num_heads_q)
    group, scale = (problem.num_heads_q // problem.num_heads_kv,), (problem.softmax_scale, problem.softcap)
    beside = (*broadcast_strides(mask), *broadcast_strides(bias), *slope_strides(slopes))
    # No fused multiply-adds: a score must be the same number where it is the maximum and where that is subtracted, so
    # that the largest probability is exactly 1.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    block_k, block_v = _block_k(problem, config), _block_v(problem, config)
    for chunk in cut.chunks:
        where = (chunk.first_head, chunk.row_begin, chunk.rows, chunk.key_base)
        tiles_m = -(-chunk.rows // config.block_m)
        tiles_n = cut.width // config.block_n
        score = softmax = sum_values = None
        if config.scores != "library":
            score = launch.Launch(
                kernel=chunk_scores_kernel,
                grid=chunk.heads * tiles_m * tiles_n * config.split_d,
                tensors=(q, k, p if fused else raw, workspace["tile_max"], workspace["tile_sum"], mask, bias, slopes,
                         *ends),
                scalars=[*token_strides(problem, q), *token_strides(problem, k), *beside, *strides, *split, *lengths,
                         *group, *window(problem), *where, tiles_m, tiles_n, *scale],
                constants={"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": block_k,
                           "HEAD_DIM": problem.head_dim, "SPLIT_D": config.split_d, "FUSED": fused, **hides, **band,
                           **features, **varlen, **arithmetic},
                options=options,
            )  # fmt: skip
        if not fused:
            tiles = -(-chunk.rows // config.softmax_rows)
            # torch's second product reads all that any row of the chunk sees; ours, what one of a tile does.
            together = up(chunk.rows, config.softmax_rows) if config.values == "library" else config.block_m
            softmax = launch.Launch(
                kernel=chunk_softmax_kernel,
                grid=chunk.heads * tiles,
                tensors=(raw, p, workspace["row_scale"], lse, mask, bias, slopes, sinks, *ends),
                scalars=[*lse_strides(problem), *beside, *strides, *split, *lengths, *window(problem), *where, tiles,
                         max(together, config.softmax_rows), *scale],
                constants={"ROWS": config.softmax_rows, "KEYS": config.softmax_keys, "SPLIT_D": config.split_d,
                           "NORMALISE": normalises(problem, config), **hides, **band, **features, **of_sinks,
                           **varlen, "WRITE_LSE": problem.return_lse},
                options={"num_warps": config.softmax_warps, "num_stages": 1, "enable_fp_fusion": False},
            )  # fmt: skip
        if config.values == "triton":
            sum_values = launch.Launch(
                kernel=chunk_values_kernel,
                grid=chunk.heads * tiles_m * -(-problem.head_dim_v // block_v),
                tensors=(p, workspace["row_scale"], workspace["tile_max"], workspace["tile_sum"], v, out, lse, sinks,
                         *ends),
                scalars=[*token_strides(problem, v), *token_strides(problem, out)[:-1], *lse_strides(problem), *strides,
                         *lengths, *group, *window(problem), *where, tiles_m, tiles_n],
                constants={"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
                           "BLOCK_V": block_v, "HEAD_DIM_V": problem.head_dim_v, "FUSED": fused, **hides, **band,
                           **of_sinks, **varlen, "WRITE_LSE": problem.return_lse, **arithmetic},
                options=options,
            )  # fmt: skip
        yield score, softmax, sum_values


def _may_hide_keys(problem: AttentionProblem) -> bool:
    """Whether a key may be hidden from everybody by something else than its position."""
    return problem.mask_shape is not None or problem.bias_shape is not None


def _block_k(problem: AttentionProblem, config: Config) -> int:
    """Elements of head_dim of a step of the first product."""
    return min(config.block_k, padded(problem.head_dim))


def _block_v(problem: AttentionProblem, config: Config) -> int:
    """Columns of v of a tile of the output."""
    return min(config.block_v, padded(problem.head_dim_v))


# What it can run and what it costs ------------------------------------------------------------------------------------

MAX_WORKSPACE_BYTES = 1024**3


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Every reason this kernel cannot run the problem there; empty when it can."""
    reasons = []
    if NO_TRITON is not None:
        reasons.append(NO_TRITON)
    if gpu.vendor == "cpu":
        reasons.append(
            "found tensors on the CPU; it needs an NVIDIA GPU of compute capability 8.0 or newer, or an AMD one"
        )
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        reasons.append(f"found {gpu.name} ({gpu.arch}); it needs sm_80 or newer: Triton has no matrix path before")
    if problem.page_size:
        reasons.append("it reads no paged cache")
    if problem.batch_invariant:
        reasons.append(
            "how its products are cut follows from the batch: sums for another batch may run in another order"
        )
    reasons += precision.why_not(problem, gpu)
    if problem.requires_grad:
        reasons.append("it computes no gradients; call under torch.no_grad() if none are needed")
    if reasons:
        return reasons
    config = _tiles(problem, gpu)
    if smem_bytes(problem, gpu, config) > gpu.smem_per_block_bytes:
        needed = smem_bytes(problem, gpu, config) / 1024
        return [
            f"its smallest tile needs {needed:.0f} KiB of shared memory and {gpu.name} has "
            f"{gpu.smem_per_block_bytes / 1024:.0f} for a block"
        ]
    if (least := least_bytes(problem, config)) > MAX_WORKSPACE_BYTES:
        return [
            f"scores of {config.block_m} queries of one head would take {least / 1024**3:.1f} GiB of memory, and it "
            f"takes {MAX_WORKSPACE_BYTES / 1024**3:.0f} at most; use large_head_dim or eager, which keep none"
        ]
    return []


def _library_cannot(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Why torch cannot compute the products that a config asks it for."""
    reasons, arithmetic = [], dot_precision(problem, gpu)
    asked = "library" in (config.scores, config.values)
    if asked and problem.packed:
        reasons.append("only the device knows where packed sequences begin; products are ours, not the library's")
    if asked and problem.dtype == "float32" and arithmetic not in ("ieee", "tf32"):
        reasons.append(f"the library has no products in {arithmetic!r}; products are ours, or precision is 'ieee'")
    if config.values == "library" and _may_hide_keys(problem):
        reasons.append("the library multiplies values that a mask or bias hides by 0, and NaN there would leak")
    return reasons


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """An upper bound on the shared memory of one block, which tests hold against what every target compiles to."""
    size = DTYPE_BYTES[problem.dtype]
    block_k, block_v = _block_k(problem, config), _block_v(problem, config)
    stages = max(1, config.num_stages - 1) if gpu.vendor == "amd" and gpu.arch != "gfx950" else config.num_stages
    split = split_operand(problem, gpu)
    stored = 4 * config.block_m * config.block_n  # a tile of scores changes hands on its way to memory
    score = stages * split * size * (config.block_m + config.block_n) * block_k
    if config.scores == "library":
        score = stored = 0
    keys = config.block_n if config.scores == "fused" else config.block_k
    sum_values = stages * split * size * keys * (config.block_m + block_v)
    if _may_hide_keys(problem):
        sum_values += size * keys * (config.block_m + block_v)  # both go through registers and back
    if config.values == "library":
        sum_values = 0
    # tcgen05 products leave by shared memory, and barriers and reductions over warps want some too.
    handed = 4 * config.block_m * block_v if gpu.capability >= 100 or gpu.vendor == "amd" else 0
    return max(score, stored, sum_values, handed) + 4096


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """What the launches move and compute over all chunks: whole tiles of ours, and of torch's whatever lies between a
    chunk's first and last visible key."""
    size, cut = DTYPE_BYTES[problem.dtype], plan(problem, config)
    rows = problem.rows * problem.num_heads_q
    block_k, block_v = _block_k(problem, config), _block_v(problem, config)
    fused, m, n = config.scores == "fused", config.block_m, config.block_n
    tiles, columns = visited_tiles(problem, m, n), -(-problem.head_dim_v // block_v)
    ours = tiles * m * n
    library = sum(chunk.heads * chunk.rows * max(0, chunk.key_end - chunk.key_begin) for chunk in cut.chunks)
    scored = library if config.scores == "library" else ours
    summed = library if config.values == "library" else ours
    p_bytes, chunks = (4 if problem.dtype == "float32" else size), len(cut.chunks)
    beside = (0 if problem.mask_shape is None else 1) + (
        0 if problem.bias_shape is None else DTYPE_BYTES[problem.bias_dtype or problem.dtype]
    )
    out_bytes = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    written = scored * (p_bytes if fused else 4 * config.split_d)
    # A tile of torch's is taken for 128 x 128.
    operands = (tiles * (m + n) if config.scores != "library" else library * 2 // 128) * problem.head_dim * size
    score = Cost(
        blocks=sum(chunk.heads * -(-chunk.rows // m) * (cut.width // n) for chunk in cut.chunks) * config.split_d,
        flops=2 * scored * up(problem.head_dim, 16 if config.scores == "library" else block_k * config.split_d),
        exponentials=scored if fused else 0,
        read_bytes=operands + (scored * beside if fused else 0),
        write_bytes=written,
        smem_bytes=smem_bytes(problem, gpu, config),
        scratch_bytes=written,
        items=0 if config.scores == "library" else tiles * config.split_d,
        steps=tiles,
        threads=config.num_warps * gpu.warp_size,
        launches=chunks,
    )
    softmax = Cost(
        blocks=sum(chunk.heads * -(-chunk.rows // config.softmax_rows) for chunk in cut.chunks),
        flops=0,
        exponentials=2 * summed,
        read_bytes=2 * summed * (4 * config.split_d + beside),
        write_bytes=summed * p_bytes + 4 * rows + (4 * rows if problem.return_lse else 0),
        smem_bytes=1024,
        scratch_bytes=summed * (8 * config.split_d + p_bytes),
        threads=config.softmax_warps * gpu.warp_size,
        launches=chunks,
    )
    p_read = summed * p_bytes * (columns if config.values == "triton" else -(-problem.head_dim_v // 128))
    sums = 8 * rows * problem.head_dim_v if config.values == "library" and problem.dtype != "float32" else 0
    sum_values = Cost(
        blocks=sum(chunk.heads * -(-chunk.rows // m) for chunk in cut.chunks) * columns,
        flops=2 * summed * (problem.head_dim_v if config.values == "library" else columns * block_v),
        exponentials=0,
        read_bytes=p_read + summed // m * problem.head_dim_v * size + sums // 2,
        write_bytes=out_bytes + sums // 2,
        smem_bytes=smem_bytes(problem, gpu, config),
        scratch_bytes=p_read + sums,
        steps=tiles * columns,
        longest=cut.width // n,
        threads=config.num_warps * gpu.warp_size,
        launches=chunks,
    )
    parts = (score, sum_values) if fused else (score, softmax, sum_values)
    return Cost(
        blocks=sum(part.blocks for part in parts),
        flops=sum(part.flops for part in parts),
        exponentials=sum(part.exponentials for part in parts),
        read_bytes=sum(part.read_bytes for part in parts),
        write_bytes=sum(part.write_bytes for part in parts),
        smem_bytes=max(part.smem_bytes for part in parts),
        workspace_bytes=workspace_bytes(problem, config),
        scratch_bytes=sum(part.scratch_bytes for part in parts),
        launches=len(parts) * chunks,
        parts=parts,
    )


# Configs --------------------------------------------------------------------------------------------------------------

FILLED = 132  # blocks that keep a GPU busy where it is not known how many multiprocessors it has
IN_L2_BYTES = 32 * 1024**2  # of a workspace that stays in L2 beside what the products read: 40 to 60 MB are usual
WAVES = 2  # of tiles of scores in a chunk: with fewer a GPU is part idle, with more a chunk leaves L2
# The epilogue that takes the softmax away costs one multiply-add of float32 for each block_n of the second product's,
# which run 16.7 times as fast on an H100: 33.4 * head_dim_v / block_n FLOP of the matrix unit a score. What it saves is
# 6 of 10 bytes a score. By arithmetic (large_head_dim has the figures); to be confirmed by measurement.
FUSED_FLOPS_A_COLUMN = 33.4
FLOPS_A_BYTE = 100


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The default first, then every other candidate that fits the GPU's shared memory and that torch can compute."""
    default = _default(problem, gpu)
    others = [
        with_workspace(problem, gpu, replace(default, scores=scores, values=values, split_d=1, **tile, **softmax))
        for scores, values in (("fused", "triton"), ("triton", "triton"), ("library", "triton"), ("library", "library"))
        for tile in _space(problem, gpu)
        for softmax in SOFTMAX_SPACE[: 1 if scores == "fused" else None]
    ]
    return [default, *(c for c in dict.fromkeys(others) if c != default and _fits(problem, gpu, c))]


# Tiles of the softmax: rows, keys and warps. A row a warp, four rows of a warp each, and eight warps on sixteen rows.
SOFTMAX_SPACE = tuple(
    {"softmax_rows": rows, "softmax_keys": keys, "softmax_warps": warps}
    for rows, keys, warps in ((16, 128, 8), (1, 1024, 1), (4, 512, 4), (1, 2048, 8))
)


def _fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    in_memory = least_bytes(problem, config) <= config.workspace_bytes
    in_smem = smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes
    return in_memory and in_smem and not _library_cannot(problem, gpu, config)


def _space(problem: AttentionProblem, gpu: Gpu) -> list[dict[str, int]]:
    shapes = [(64, 64, 32, 64), (64, 128, 64, 128), (128, 64, 64, 64), (128, 128, 32, 128), (128, 128, 64, 128)]
    if problem.dtype != "float32":
        shapes += [(128, 256, 64, 256)]
    names = ("block_m", "block_n", "block_k", "block_v", "num_warps", "num_stages")
    return [
        dict(zip(names, (*shape, num_warps, num_stages), strict=True))
        for shape in shapes
        for num_warps in (4, 8)
        for num_stages in (2, 3)
        if not (gpu.capability == 90 and (shape[0], num_warps) == (64, 8))  # see flash_fwd
    ]


def with_workspace(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """The config with a workspace that stays in L2, unless the GPU would be idle then or a tile of queries not fit."""
    filling = WAVES * (gpu.num_sms or FILLED) * config.block_m * config.block_n * 6  # float32 scores, 16-bit P
    wanted = max(IN_L2_BYTES, filling, least_bytes(problem, config))
    return replace(config, workspace_bytes=min(wanted, MAX_WORKSPACE_BYTES))


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """By arithmetic and compile facts; not measured yet."""
    config = _tiles(problem, gpu)
    blocks = problem.batch * problem.num_heads_q * -(-problem.seqlen_q // config.block_m)
    blocks *= -(-problem.seqlen_k // config.block_n)
    share = (2 if gpu.vendor == "interpreter" else gpu.num_sms or FILLED) // max(1, blocks)
    sharing = max(1, min(share, problem.head_dim // (8 * _block_k(problem, config)), 32))
    if sharing > 1:
        # Few scores of long sums: blocks share head_dim, eight steps each at the least.
        config = replace(config, split_d=sharing)
    elif problem.dtype == "float32":
        library = replace(config, scores="library", values="library")
        config = config if _library_cannot(problem, gpu, library) else library
    elif _fuses(problem, gpu, min(128, config.block_n)):
        config = replace(config, scores="fused")
    return with_workspace(problem, gpu, config)


def _fuses(problem: AttentionProblem, gpu: Gpu, block_n: int) -> bool:
    """Whether the softmax goes into the first product's epilogue: where that saves more than it costs, and where two
    accumulators do not spill. Before Hopper, and on sm_120, products of 128 x 128 leave no registers for it; a mask or
    bias takes too many everywhere. On Hopper it takes tiles of 128 x 128 where 128 x 256 would do, and these read an
    element of q, k and v a score in 128 less."""
    roomy = gpu.capability in (90, 100, 103) or gpu.vendor != "nvidia"
    flops = FUSED_FLOPS_A_COLUMN * problem.head_dim_v / block_n
    if gpu.capability == 90:
        flops += FLOPS_A_BYTE * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype] / 256
    return roomy and flops <= 6 * FLOPS_A_BYTE and not _may_hide_keys(problem)


def _tiles(problem: AttentionProblem, gpu: Gpu) -> Config:
    """The widest tile of the usual shapes that fits without spills (tests/compile); three launches, products ours."""
    rdna = gpu.vendor == "amd" and not gpu.arch.startswith("gfx9")
    hopper_or_later = gpu.capability in (90, 100, 103)
    small = problem.seqlen_q <= 64 and problem.seqlen_k <= 512  # where larger tiles would be one block a head
    if gpu.vendor == "interpreter":  # which runs one program after another: the fewer the better
        tile = (128, 128, 128, 128, 4, 1)
    elif problem.dtype == "float32":
        warps = 4 if gpu.vendor == "amd" or hopper_or_later else 8
        tile = (32, 32, 32, 32, 4, 2) if rdna or small else (64, 64, 32, 64, warps, 2)
    elif gpu.vendor == "amd":
        tile = (64, 64, 32, 64, 8 if rdna else 4, 2)
    elif small:
        tile = (64, 64, 64, 64, 4, 2)
    elif problem.seqlen_q <= 64:
        tile = (64, 128, 64 if hopper_or_later else 32, 128, 4, 3)
    else:
        tile = (128, 128, 64 if hopper_or_later else 32, 128, 8, 3)
        if gpu.capability == 90 and not _fuses(problem, gpu, 128):
            tile = (128, 256, 32, 256, 8, 4)  # a third more FLOP for each byte of L2; the epilogue has no room for it
    if _may_hide_keys(problem) and problem.dtype != "float32" and gpu.vendor != "interpreter":
        # Values and probabilities go through registers.
        tile = (*tile[:2], 32, min(tile[3], 128 if hopper_or_later else 64), *tile[4:])
    return Config("triton", "triton", *tile, 1, 16, 128, 8, MAX_WORKSPACE_BYTES)
