"""Attention as product, softmax, product, over chunks of query rows and heads: for head_dim in the thousands.

    S = Q K^T;   P = exp(S' - max), row sums;   out = P V / sum        S' is S scaled, capped, biased and masked

Far above head_dim 256 the two products are ordinary matrix products, and scores are small compared with q, k and v.
Scores are kept in memory one chunk at a time, in a workspace of bounded size. Raw scores are float32. P is 16-bit and
unnormalized, with the divisors of its rows in float32: 16-bit scores, or a P normalized before it is rounded, would
lose more accuracy than all other roundings together.

Each product is torch's (`library`) or ours (`triton`). Ours may also compute the softmax in the epilogue of the first
product (`fused`), which then writes 2 bytes a score, and no separate pass over scores remains. Milakov & Gimelshein,
"Online normalizer calculation for softmax" (2018), describes the sum of tiles of P with separate maxima.

Bound: tensor cores; below head_dim 1024 the traffic of the scores. It adds to tiled the bounded workspace, 16-bit P,
and torch's products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from warpwave import precision
from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import reasons
from warpwave.kernels.arguments import Allocate, Results, Run, allocator, straightener
from warpwave.kernels.cost import WARP_US, Cost, bytes_per_score, conversions, in_turn, visited_tiles
from warpwave.kernels.hopper import host
from warpwave.kernels.three_kernel import backward, choice, library
from warpwave.kernels.three_kernel import hopper_host as three_kernel_hopper
from warpwave.kernels.three_kernel import launches as three_kernel_launches
from warpwave.kernels.three_kernel.choice import configs, smallest_tile
from warpwave.kernels.three_kernel.config import (
    MAX_WORKSPACE_BYTES,
    block_k_of,
    block_v_of,
    library_cannot,
    smem_bytes,
)
from warpwave.kernels.three_kernel.launches import scale_warps, scaled_columns
from warpwave.kernels.three_kernel.library import is_odd, loop_of, runs_of_heads, tiles_of
from warpwave.kernels.three_kernel.plan import (
    Chunk,
    Config,
    Plan,
    Workspace,
    allocate_workspace,
    in_place,
    least_bytes,
    named,
    needs,
    pieces,
    plan,
    up,
    whole_rows,
    workspace_bytes,
)
from warpwave.kernels.torch_products import plainly
from warpwave.operands import Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import launch, scratch

NAME = "three_kernel"
NEEDS_GPU = True


# Launches -------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    needed.

    Raises:
        InvalidInput: the config's workspace does not hold one tile of queries.
        UnsupportedProblem: the config assigns torch a product it cannot compute.
    """
    parts = _bind(problem, operands, config, out)
    straight, allocate, workspace = parts.straight, parts.allocate, parts.workspace
    steps = [step for calls in parts.chunks for step in calls.steps.values()]

    def run(operands: Operands, out: torch.Tensor | None = None) -> Results:
        operands = straight(operands)
        out, lse = allocate(out)
        tensors = (*operands, out, lse, *workspace())
        for start, taken in steps:
            start(*taken(tensors))
        return out, lse

    def run_with_torch(operands: Operands, out: torch.Tensor | None = None) -> Results:
        operands = straight(operands)
        out, lse = allocate(out)
        left = workspace()
        with plainly(out.device):
            for calls in parts.chunks:
                _run_stages(STAGES, problem, calls, operands, out, lse, left)
        return out, lse

    return run_with_torch if "library" in (config.scores, config.values) else run


def stage_calls(problem: AttentionProblem, operands: Operands, config: Config) -> dict[str, Callable[[], None]]:
    """Returns each stage of a call separately, over all chunks in one workspace, for timing. In order, for one chunk,
    they form the call. Stages that the config does not have are omitted."""
    parts = _bind(problem, operands, config)
    out, lse = parts.allocate(None)
    workspace = allocate_workspace(problem, config, plan(problem, config), operands.q.device)

    def run(stages: Sequence[str], operands: Operands, out: torch.Tensor, lse: Any, workspace: Workspace) -> None:
        with plainly(out.device):
            for calls in parts.chunks:
                _run_stages(stages, problem, calls, parts.straight(operands), out, lse, workspace)

    run(STAGES, operands, out, lse, workspace)
    within = config.scores == "fused" or config.values == "online"  # another stage includes the softmax
    there = [stage for stage in STAGES if stage != "softmax" or not within]
    return {stage: partial(run, (stage,), operands, out, lse, workspace) for stage in there}


STAGES = ("scores", "softmax", "values")
# The tensors of a call: its arguments, its results, and what the launches of a chunk pass to one another.
TENSORS = (*Operands._fields, "out", "lse", *Workspace._fields)


class Step(NamedTuple):
    """A launch, and what selects its arguments from a call's `TENSORS`."""

    start: launch.Launcher
    taken: Callable[[Sequence[Any]], tuple[Any, ...]]


def _step(start: launch.Launcher, names: str) -> Step:
    return Step(start, itemgetter(*map(TENSORS.index, names.split())))


class ChunkCalls(NamedTuple):
    """The calls that compute one chunk. A stage without a launch is torch's, or part of an epilogue."""

    chunk: Chunk
    steps: dict[str, Step]  # by stage, in order
    score_products: list[library.Product]
    # For each piece of torch's second product: its calls, and the launch that scales the sums if they are sums.
    value_products: list[tuple[list[library.Product], Callable[..., None] | None]]


class Bound(NamedTuple):
    """A compiled call.

    Attributes:
        straight: converts operands to the form the launches take.
        allocate: returns (out, lse), given an out or None.
        workspace: returns what a chunk's launches pass to one another; the next chunk's overwrite it.
        chunks: in order.
    """

    straight: Callable[[Operands], Operands]
    allocate: Allocate
    workspace: Callable[[], Workspace]
    chunks: list[ChunkCalls]


def _bind(problem: AttentionProblem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> Bound:
    problem = _with_lse(problem)
    device, gpu = operands.q.device, current_gpu(operands.q.device)
    if reasons := _cannot(problem, gpu, config):
        choice = configs(problem, gpu)[0]
        raise UnsupportedProblem(
            f"kernel {NAME!r} cannot run {problem.describe()} with {config}", {NAME: reasons}, f"config={choice}"
        )
    cut = plan(problem, config)
    allocate = allocator(problem, operands.q)
    by_torch = "library" in (config.scores, config.values)
    straight = host.mappable(operands) if config.scores == "hopper" else straightener(operands)
    if by_torch:
        straight = library.brought_near(straight, operands)
    with torch.no_grad():
        out, lse = allocate(out)
        workspace = allocate_workspace(problem, config, cut, device)
        calls = list(_calls(problem, gpu, straight(operands), out, lse, config, cut, workspace))
    memory = scratch.memory(needs(problem, config, cut), device, partial(named, problem, config, cut))
    return Bound(straight, allocate, memory, calls)


def _run_stages(
    stages: Sequence[str],
    problem: AttentionProblem,
    calls: ChunkCalls,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    chunk, steps, score_products, value_products = calls
    for stage in stages:
        if stage in steps:
            start, taken = steps[stage]
            start(*taken((*operands, out, lse, *workspace)))
        elif stage == "scores":
            assert workspace.scores is not None
            library.multiply(score_products, operands.q, operands.k, workspace.scores)
        elif stage == "values" and chunk.nothing_to_see:
            library.zero(problem, chunk, out)
        elif stage == "values":
            assert workspace.p is not None
            into = out if workspace.sums is None else workspace.sums
            for products, scale in value_products:
                library.multiply(products, workspace.p, operands.v, into)
                if scale is not None:
                    scale(workspace.sums, workspace.row_scale, out)


def _calls(problem: AttentionProblem, gpu: Gpu, operands: Operands, out: Any, lse: Any, config: Config, cut: Plan,
           workspace: Workspace) -> Iterator[ChunkCalls]:  # fmt: skip
    """Yields everything compiled, and torch's calls as views that only need a pointer."""
    q, k, v = operands[:3]

    if config.scores == "hopper":
        for chunk in cut.chunks:
            bound = three_kernel_hopper.bind(problem, gpu, operands, out, lse, cut, chunk, workspace)
            steps = {stage: _step(*step) for stage, step in zip(STAGES, bound, strict=True)}
            yield ChunkCalls(chunk, steps, [], [])
        return
    of_launches = three_kernel_launches.launches(problem, gpu, operands, out, lse, config, cut, workspace)
    p = workspace.p
    taken = three_kernel_launches.names_taken(config)
    for chunk, specs in zip(cut.chunks, of_launches, strict=True):
        steps = {
            stage: _step(launch.bind(spec), taken[stage])
            for stage, spec in zip(STAGES, specs[:3], strict=True)
            if spec is not None
        }
        scales = [launch.bind(spec) for spec in specs[3]]
        score_products: list[library.Product] = []
        value_products: list[tuple[list[library.Product], Callable[..., None] | None]] = []
        if config.scores == "library":
            assert workspace.scores is not None
            score_products = library.score_products(problem, chunk, q, k, workspace.scores.stride()[1:3])
        if config.values == "library" and not chunk.nothing_to_see:
            assert p is not None
            strides, into_sums = p.stride()[-3:-1], workspace.sums is not None
            parts = pieces(problem, config, chunk.heads, chunk.rows)
            for i, piece in enumerate(parts):
                products = library.value_products(problem, chunk, piece, v, out, strides, into_sums)
                value_products.append((products, scales[i] if into_sums else None))
        yield ChunkCalls(chunk, steps, score_products, value_products)


def _with_lse(problem: AttentionProblem) -> AttentionProblem:
    """Returns the problem with return_lse set if gradients need the log-sum-exp."""
    return replace(problem, return_lse=problem.return_lse or problem.requires_grad)


def _cannot(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns why a config cannot run on this GPU."""
    reasons = library_cannot(problem, gpu, config)
    if (needed := smem_bytes(problem, gpu, config)) > gpu.smem_per_block_bytes:
        reasons.append(
            f"its tiles take up to {needed / 1024:.0f} KiB of shared memory and {gpu.name} has "
            f"{gpu.smem_per_block_bytes / 1024:.0f} for a block; take fewer num_stages or a smaller block_n or block_v"
        )
    return reasons


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> tuple[launch.Launch, ...]:
    """Returns our launches of the first chunk, from tensors that may be without memory."""
    problem = _with_lse(problem)
    lse = torch.empty(1, dtype=torch.float32, device=out.device) if problem.return_lse and lse is None else lse
    cut = plan(problem, config)
    workspace = allocate_workspace(problem, config, cut, out.device)
    if config.scores == "hopper":
        of_chunk = three_kernel_hopper.launches(problem, gpu, operands, out, lse, cut, cut.chunks[0], workspace)
        return tuple(described.launch for described in of_chunk)
    *first, scales = next(three_kernel_launches.launches(problem, gpu, operands, out, lse, config, cut, workspace))
    return tuple(spec for spec in (*first, *scales[:1]) if spec is not None)


# What it can run and what it costs ------------------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = reasons.of_device(gpu) + reasons.of_dropout(problem)
    if problem.page_size:
        found.append("it reads no paged cache")
    if problem.batch_invariant:
        found.append("products are cut by the size of the batch: sums for another batch may run in another order")
    found += precision.why_not(problem, gpu)
    if found:
        return found
    config = smallest_tile(problem, gpu)
    if smem_bytes(problem, gpu, config) > gpu.smem_per_block_bytes:
        return [reasons.of_shared_memory(smem_bytes(problem, gpu, config), gpu)]
    if (least := least_bytes(problem, config)) > MAX_WORKSPACE_BYTES:
        return [
            f"scores of {config.block_m} queries of one head would take {least / 1024**3:.1f} GiB of memory; the limit "
            f"is {MAX_WORKSPACE_BYTES / 1024**3:.0f}: use large_head_dim or eager, which keep none"
        ]
    return []


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why calls with gradients are left to eager, for those that this kernel's gradients do not cover."""
    if not problem.requires_grad:
        return []
    found = backward.why_not(problem, gpu)
    return [f"{reason}: eager's would be used, after a second forward" for reason in found]


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the rows that chose it, the workspace of one chunk, and the number
    of tiles that a chunk gives the GPU."""
    cut = plan(problem, config)
    scores = 4 * config.split_d * cut.heads * cut.rows * cut.width
    if config.scores in ("fused", "hopper"):
        kept = f"P {scores // 4 * DTYPE_BYTES[problem.dtype] / 1e6:.1f} MB"
    else:
        there = "in their place" if in_place(problem, config, cut.width) else "beside them"
        each = f"{cut.heads} x {cut.rows} x {cut.width} x {4 * config.split_d} bytes"
        kept = f"scores {each} = {scores / 1e6:.1f} MB, P {there}"
    tiles = cut.heads * -(-cut.rows // 128) * -(-cut.width // 256)
    columns = cut.heads * -(-cut.rows // 128) * -(-problem.head_dim_v // 256)
    lines = [
        *choice.notes(problem, gpu, config),
        f"{len(cut.chunks)} chunks of {cut.heads} heads x {cut.rows} queries: {kept}",
        f"by tiles of 128 x 256 a chunk is {tiles} of scores and {columns} of out, for {gpu.num_sms or 'unknown'} SMs",
    ]
    if config.values == "library" and problem.dtype != "float32":
        parts = pieces(problem, config, cut.heads, cut.rows)
        most = max(piece.heads * piece.rows for piece in parts)
        lines.append(
            f"sums in {len(parts)} piece{'s' if len(parts) > 1 else ''} a chunk, at most {most} rows "
            f"x {problem.head_dim_v} x 4 bytes = {4 * most * problem.head_dim_v / 1e6:.1f} MB"
        )
    return lines


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute over all chunks: whole tiles for our products; for torch's, everything
    between a chunk's first and last visible key."""
    problem = _with_lse(problem)
    size, cut = DTYPE_BYTES[problem.dtype], plan(problem, config)
    rows = problem.rows * problem.num_heads_q
    block_k, block_v = block_k_of(problem, config), block_v_of(problem, config)
    if config.values == "hopper":
        block_v = three_kernel_hopper.TILE[1]  # independent of head_dim_v
    fused, m, n = config.scores in ("fused", "hopper"), config.block_m, config.block_n
    split = partial(conversions, problem, gpu, block_m=m, num_warps=config.num_warps)
    tiles, columns = visited_tiles(problem, m, n), -(-problem.head_dim_v // block_v)
    ours = tiles * m * n
    library = sum(chunk.heads * chunk.rows * max(0, chunk.key_end - chunk.key_begin) for chunk in cut.chunks)
    scored = library if config.scores == "library" else ours
    summed = library if config.values == "library" else ours
    p_bytes, chunks = (4 if problem.dtype == "float32" else size), len(cut.chunks)
    # One torch product takes the heads of one batch item, and of one kv head if query heads share it.
    runs = sum(len(list(runs_of_heads(problem, c.first_head, c.first_head + c.heads))) for c in cut.chunks)
    beside = bytes_per_score(problem)
    out_bytes = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    written = scored * (p_bytes if fused else 4 * config.split_d)
    asked = cut.chunks if "library" in (config.scores, config.values) else ()
    by_torch = tiles_of(problem, config, asked, gpu.assumed_sms, is_odd(problem))
    at_once = 0 if is_odd(problem) else 1  # cuBLAS's tiles have an SM to themselves
    operands = (tiles * (m + n) if config.scores != "library" else library * 2 // 128) * problem.head_dim * size
    row_tiles = sum(chunk.heads * -(-chunk.rows // m) for chunk in cut.chunks)
    score = Cost(
        blocks=0 if config.scores == "library" else row_tiles * (cut.width // n) * config.split_d,
        flops=2 * scored * up(problem.head_dim, 16 if config.scores == "library" else block_k * config.split_d),
        exponentials=scored if fused else 0,
        read_bytes=operands + (scored * beside if fused else 0),
        write_bytes=written,
        smem_bytes=smem_bytes(problem, gpu, config),
        scratch_bytes=written,
        items=by_torch.scores if config.scores == "library" else tiles * config.split_d,
        steps=by_torch.scores_steps if config.scores == "library" else tiles,
        threads=config.num_warps * gpu.warp_size,
        blocks_per_sm=at_once if config.scores == "library" else 0,
        launches=runs if config.scores == "library" else chunks,
        conversions=split(0 if config.scores == "library" else tiles * (m + n) * up(problem.head_dim, block_k)),
    )
    key_tiles = cut.width // n
    statistics = Cost(
        blocks=sum(2 * chunk.heads * -(-chunk.rows // m) for chunk in cut.chunks),
        flops=0,
        exponentials=rows * key_tiles,
        read_bytes=12 * rows * key_tiles,
        write_bytes=4 * rows * (2 if problem.return_lse else 1),
        launches=chunks,
    )
    sweeps = 1 if whole_rows(config, cut.width) else 2
    softmax = Cost(
        blocks=sum(chunk.heads * -(-chunk.rows // config.softmax_rows) for chunk in cut.chunks),
        flops=0,
        exponentials=sweeps * summed,
        read_bytes=sweeps * summed * (4 * config.split_d + beside),
        write_bytes=summed * p_bytes + 4 * rows + (4 * rows if problem.return_lse else 0),
        smem_bytes=1024,
        scratch_bytes=summed * (4 * sweeps * config.split_d + p_bytes),
        threads=config.softmax_warps * gpu.warp_size,
        trips=1,
        block_us=WARP_US * config.softmax_warps,
        launches=chunks,
    )
    p_read = summed * p_bytes * (-(-problem.head_dim_v // 128) if config.values == "library" else columns)
    sums = 8 * rows * problem.head_dim_v if config.values == "library" and problem.dtype != "float32" else 0
    scalings = sum(len(pieces(problem, config, c.heads, c.rows)) for c in cut.chunks) if sums else 0
    sum_values = Cost(
        blocks=0 if config.values == "library" else row_tiles * columns,
        flops=2 * summed * (problem.head_dim_v if config.values == "library" else columns * block_v),
        exponentials=0,
        read_bytes=p_read + summed // m * problem.head_dim_v * size,
        write_bytes=sums // 2 or out_bytes,
        smem_bytes=smem_bytes(problem, gpu, config),
        scratch_bytes=p_read + sums // 2,
        items=by_torch.values if config.values == "library" else 0,
        steps=by_torch.values_steps if config.values == "library" else tiles * columns,
        longest=0 if config.values == "library" else key_tiles,
        threads=config.num_warps * gpu.warp_size,
        blocks_per_sm=at_once if config.values == "library" else 0,
        launches=by_torch.values_launches if config.values == "library" else chunks,
        conversions=split(0 if config.values == "library" else summed * columns + tiles * n * columns * block_v),
    )
    if config.values == "online":
        tiles_of_rows = sum(chunk.heads * -(-chunk.rows // config.softmax_rows) for chunk in cut.chunks)
        sum_values = replace(
            sum_values,
            blocks=tiles_of_rows * columns,
            exponentials=summed * columns,
            read_bytes=summed * (4 * config.split_d + beside) * columns
            + summed // config.softmax_rows * problem.head_dim_v * size,
            scratch_bytes=summed * 4 * config.split_d * columns,
            threads=config.softmax_warps * gpu.warp_size,
            launches=chunks,
        )
    if config.scores == "hopper":
        parts: tuple[Cost, ...] = (score, statistics, sum_values)
    elif config.scores == "fused" or config.values == "online":
        parts = (score, sum_values)
    else:
        parts = (score, softmax, sum_values)
    if sums:
        scaled = scaled_columns(problem)
        scaling = Cost(
            blocks=rows * -(-problem.head_dim_v // scaled),
            flops=0,
            exponentials=0,
            read_bytes=sums // 2,
            write_bytes=out_bytes,
            scratch_bytes=sums // 2,
            threads=gpu.warp_size * scale_warps(scaled),
            trips=1,
            block_us=WARP_US * scale_warps(scaled),
            launches=scalings,
        )
        parts = (*parts, scaling)
    return in_turn(parts, workspace_bytes(problem, config), loop_of(problem, config.scores, config.values))
