"""Attention with the keys split over blocks, for few queries and long caches, contiguous or paged; portable Triton.

A program owns a tile of rows of one kv head and one share of their keys, and keeps the online softmax of `flash_fwd`
over it. The rows are the queries of all the heads that read the kv head, side by side, so that K and V are read once
for the group. What the shares leave is merged in a fixed order (partials.py), by a second small kernel or by the block
that arrives last.

    rows m = query * group + head in group;   S = softmax_scale * Q K^T, then softcap, bias, ALiBi, mask
    share s: keys s * n to (s + 1) * n of those its rows see, n from `choose_splits`

Dao et al., "Flash-Decoding for long-context inference" (2023); pages as in Kwon et al., "Efficient memory management
for large language model serving with PagedAttention" (2023): tokens of a sequence lie in pages of one pool, and a table
says in which. Keys that no row sees are not read, so a window skips pages.

Bound: memory, at one query a sequence: 2 * group FLOPs for each byte of K and V in 16 bits. Latency where the cache is
short. It adds to the ladder's flash_fwd blocks enough to fill the GPU when queries alone do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from warpwave import launch, precision
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels import partials
from warpwave.kernels.arguments import (
    allocator,
    band_constants,
    broadcast_strides,
    dot_precision,
    feature_constants,
    padded,
    slope_strides,
    straightener,
    token_strides,
    window,
)
from warpwave.kernels.cost import Cost
from warpwave.kernels.split_kv_device import split_kv_kernel
from warpwave.kernels.triton_or_stub import NO_TRITON
from warpwave.problem import DTYPE_BYTES, AttentionProblem, CachedOperands

NAME = "split_kv"
NEEDS_GPU = True
MAX_HEAD_DIM = 256
MERGES = ("kernel", "last_block")


@dataclass(frozen=True)
class Config:
    """Tile shape, launch shape, and how the keys are split.

    Args:
        block_m: rows of a tile (queries times the query heads of a kv head), a power of two, at least 16.
        block_n: keys a step walks, a power of two, at least 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight.
        num_splits: shares that the keys of a tile of rows are split into; with `split_keys` set, what follows from it
            counts instead.
        split_keys: keys of a share, at absolute multiples of it, whatever the batch; 0 for equal shares.
        merge: `"kernel"`: a second launch merges; `"last_block"`: the last block of a tile to arrive does.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    split_keys: int = 0
    merge: str = "kernel"

    def __post_init__(self) -> None:
        for name, least in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, at least {least}")
        for name in ("num_stages", "num_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.split_keys < 0 or self.split_keys % self.block_n:
            raise ValueError(f"split_keys is {self.split_keys}; it must be 0 or a multiple of block_n = {self.block_n}")
        if self.merge not in MERGES:
            raise ValueError(f"merge is {self.merge!r}; it must be one of {', '.join(map(repr, MERGES))}")


# Host -----------------------------------------------------------------------------------------------------------------

Run = Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]


def bind(problem: AttentionProblem, operands: Any, config: Config) -> Run:
    """Compiles for one problem and layout; returns `run(operands) -> (out, lse)`, lse None unless asked for."""
    allocate, straight = allocator(problem, operands.q), straightener(operands)
    gpu, device = current_gpu(operands.q.device), operands.q.device
    num_parts = num_splits(problem, config)
    workspace = _workspace(problem, config, device)
    specs = specify(problem, gpu, straight(operands), *allocate(), config, workspace())
    attend, *merge = (launch.bind(spec) for spec in specs)

    def run(operands: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        operands = straight(operands)
        out, lse = allocate()
        acc, state, arrived = workspace()
        attend(*_tensors(operands, out, lse, acc, state, arrived))
        if merge:
            merge[0](acc, state, out, lse, operands.sinks)
        return out, lse

    assert len(merge) == (num_parts > 1 and config.merge == "kernel")
    return run


def bind_with_prefix(
    problem: AttentionProblem, operands: Any, config: Config, shared_prefix: int
) -> Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]:
    """`bind` for sequences whose first `shared_prefix` tokens are the same: read once, as the keys of one sequence that
    asks all the queries, and merged with what each sequence has behind them.

    Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024).
    """
    gpu, device = current_gpu(operands.q.device), operands.q.device
    allocate, straight = allocator(problem, operands.q), straightener(operands)
    behind = replace(config, merge="kernel")
    prefix = replace(
        problem, batch=1, seqlen_q=problem.rows, seqlen_k=shared_prefix, packed=False, total_q=0, total_k=0,
        causal=None, window_size=(-1, -1), has_sinks=False, return_lse=False,
    )  # fmt: skip
    before = configs(prefix, gpu)[0]
    parts_before, parts_behind = num_splits(prefix, before), num_splits(problem, behind)

    def first_of(operands: Any) -> CachedOperands:
        q = operands.q if problem.packed else operands.q.flatten(0, 1)
        rows = None if operands.rows is None else operands.rows[:1]
        first: CachedOperands = operands._replace(q=q[None], rows=rows, sinks=None, cu_seqlens_q=None)
        return first

    def workspaces() -> tuple[torch.Tensor, torch.Tensor, Workspace, Workspace]:
        acc, state = partials.allocate(problem, parts_before + parts_behind, device)
        before, behind = slice(parts_before), slice(parts_before, None)
        return acc, state, Workspace(acc[before], state[before], None), Workspace(acc[behind], state[behind], None)

    out, lse = allocate()
    acc, state, space_before, space_behind = workspaces()
    operands = straight(operands)
    launchers = [
        launch.bind(spec)
        for spec in (
            specify(prefix, gpu, first_of(operands), out, None, before, space_before)[0],
            specify(problem, gpu, operands, out, lse, behind, space_behind, shared_prefix)[0],
            partials.specify_merge(problem, parts_before + parts_behind, acc, state, out, lse, operands.sinks),
        )
    ]

    def run(operands: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        operands = straight(operands)
        out, lse = allocate()
        acc, state, space_before, space_behind = workspaces()
        launchers[0](*_tensors(first_of(operands), out, None, *space_before))
        launchers[1](*_tensors(operands, out, lse, *space_behind))
        launchers[2](acc, state, out, lse, operands.sinks)
        return out, lse

    return run


class Workspace(NamedTuple):
    """Beside the outputs: what the shares leave, and how many blocks of each tile have arrived."""

    acc: torch.Tensor | None
    state: torch.Tensor | None
    arrived: torch.Tensor | None


def _workspace(problem: AttentionProblem, config: Config, device: torch.device | str) -> Callable[[], Workspace]:
    num_parts = num_splits(problem, config)
    if num_parts == 1:
        return lambda: Workspace(None, None, None)
    if config.merge == "kernel":
        return lambda: Workspace(*partials.allocate(problem, num_parts, device), None)
    tiles = _tiles(problem, config) * problem.num_heads_kv * problem.batch

    def allocate() -> Workspace:
        # Zeroed in stream order before the launch that counts, at every call and every replay: a counter that the
        # launch itself puts back to zero stays dirty when a launch is killed, and later results are silently wrong.
        arrived = torch.zeros(tiles, dtype=torch.int32, device=device)
        return Workspace(*partials.allocate(problem, num_parts, device), arrived)

    return allocate


def _tensors(
    operands: Any, out: torch.Tensor, lse: Any, acc: Any, state: Any, arrived: Any
) -> tuple[torch.Tensor | None, ...]:
    """In the kernel's order; a dense or packed call has no tables."""
    tables = operands[9:] if len(operands) > 9 else (None, None, None)
    return (*operands[:3], out, lse, acc, state, arrived, *operands[3:9], *tables)


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Any,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
    workspace: Workspace | None = None,
    first_key: int = 0,
) -> tuple[launch.Launch, ...]:
    """The launches, from tensors that may be without memory (device "meta") when they are only to be compiled.

    Args:
        first_key: keys before it are left out: somebody else attends to them.
    """
    workspace = workspace or _workspace(problem, config, out.device)()
    acc, state, arrived = workspace
    num_parts = num_splits(problem, config)
    merge_here = num_parts > 1 and config.merge == "last_block"
    attend = launch.Launch(
        kernel=split_kv_kernel,
        grid=_tiles(problem, config) * problem.num_heads_kv * num_parts * problem.batch,
        tensors=_tensors(operands, out, lse, acc, state, arrived),
        scalars=_scalars(problem, operands, config, first_key),
        constants=_constants(problem, gpu, operands, config, acc is not None, merge_here),
        # As flash_fwd: without fused multiply-adds in float32, the largest probability is exactly 1.
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": problem.dtype != "float32",
        },
    )
    if acc is None or state is None or merge_here:
        return (attend,)
    return (attend, partials.specify_merge(problem, num_parts, acc, state, out, lse, operands.sinks))


def _scalars(problem: AttentionProblem, operands: Any, config: Config, first_key: int) -> list[int | float]:
    """The run-time arguments behind the pointers, in the kernel's order."""
    unit = stride_unit(operands)
    paged = isinstance(operands, CachedOperands)
    strides: list[int] = []
    for tensor in operands[:3]:
        # Pools have the axes of a dense tensor: page, token, head, element.
        *outer, inner = tensor.stride() if paged and tensor is not operands.q else token_strides(problem, tensor)
        strides += (*(stride // unit for stride in outer), inner)
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
        num_splits(problem, config),
        config.split_keys,
        first_key,
        operands.k.shape[0] if paged else 0,
        operands.page_table.shape[0] if paged else 0,
        partials.lse_rows(problem),
        problem.softmax_scale,
        problem.softcap,
    ]


def stride_unit(operands: Any) -> int:
    """The largest power of two, up to 16, that divides every stride between rows, heads, and batches or pages."""
    return math.gcd(16, *(stride for tensor in operands[:3] for stride in tensor.stride()[:-1]))


def _constants(
    problem: AttentionProblem, gpu: Gpu, operands: Any, config: Config, in_parts: bool, merge_here: bool
) -> dict[str, int | bool | str]:
    """The compile-time arguments of the kernel, by name."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP_SIZE": problem.num_heads_q // problem.num_heads_kv,
        "STRIDE_UNIT": stride_unit(operands),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_DV": padded(problem.head_dim_v),
        **band_constants(problem),
        **feature_constants(problem),
        "IS_VARLEN": problem.packed,
        "PAGE_SIZE": problem.page_size,
        "HAS_ROWS": getattr(operands, "rows", None) is not None,
        "IN_PARTS": in_parts,
        "MERGE_HERE": merge_here,
        "WRITE_LSE": problem.return_lse,
        "PRECISION": dot_precision(problem, gpu),
        "IS_NVIDIA": gpu.vendor == "nvidia",
    }


# What it can run and what it costs ------------------------------------------------------------------------------------


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
    if problem.requires_grad:
        reasons.append("it computes no gradients; call under torch.no_grad() if none are needed")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            reasons.append(f"{name} is {size}; a row of K or V must fit one tile, {MAX_HEAD_DIM} at most")
    if problem.page_size & (problem.page_size - 1):
        reasons.append(f"page_size is {problem.page_size}; its pages are powers of two, so that no address is divided")
    reasons += precision.why_not(problem, gpu)
    if not reasons and not _fitting(problem, gpu):
        needed = min(smem_bytes(problem, gpu, config) for config in _tilings(problem))
        reasons.append(
            f"its smallest tile needs {needed / 1024:.0f} KiB of shared memory and {gpu.name} has "
            f"{gpu.smem_per_block_bytes / 1024:.0f} for a block"
        )
    return reasons


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """An upper bound on the shared memory of one block, which tests hold against what every target compiles to."""
    size, arithmetic = DTYPE_BYTES[problem.dtype], dot_precision(problem, gpu)
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    q = size * config.block_m * block_d
    p = size * config.block_m * config.block_n
    kv = size * config.block_n * (block_d + block_dv)
    # Page ids and what is loaded by them are in flight as well; barriers and reductions over warps take the rest.
    more = 1024 + (16 * config.block_n * config.num_stages if problem.page_size else 0)
    more += 8 * config.block_m * config.num_warps
    if problem.mask_shape is not None or problem.bias_shape is not None:
        kv += config.block_m * config.block_n * _bytes_per_score(problem)
        p += size * config.block_n * block_dv  # V goes through registers to lose what nobody sees, and back
    if gpu.arch == "gfx950":
        return max(q, config.num_stages * kv * 17 // 16) + p + more
    if gpu.vendor == "amd":
        return max(q, max(1, config.num_stages - 1) * kv) + p + more
    if problem.dtype == "float32" and arithmetic != "ieee":
        return q + p + config.num_stages * kv + max(q, kv) + more  # the parts of an operand stand side by side
    # What is read by way of a page id waits for it, so that two stages come to one tile in flight.
    tiles = max(2, (config.num_stages + 1) // 2) if problem.page_size else config.num_stages
    return q + p + tiles * kv + more


def _bytes_per_score(problem: AttentionProblem) -> int:
    """What a score reads of mask and bias."""
    mask = 0 if problem.mask_shape is None else 1
    return mask + (0 if problem.bias_shape is None else DTYPE_BYTES[problem.bias_dtype or problem.dtype])


def _tiles(problem: AttentionProblem, config: Config) -> int:
    """Tiles of rows of one kv head of the longest sequence."""
    return -(-problem.seqlen_q * (problem.num_heads_q // problem.num_heads_kv) // config.block_m)


def num_splits(problem: AttentionProblem, config: Config) -> int:
    """Shares of the keys of a tile of rows, as launched: the config's own, or what `split_keys` makes of the longest
    range of keys that a tile of rows sees."""
    if not config.split_keys:
        return config.num_splits
    seen = problem.seqlen_k
    left, right = window(problem)
    if problem.window_size[0] >= 0 and not (problem.causal is not None and problem.causal.alignment == "top_left"):
        # A tile of rows sees that many; its range may begin and end inside a share.
        queries = -(-config.block_m // (problem.num_heads_q // problem.num_heads_kv)) + 1
        seen = min(seen, left + min(right, seen) + queries + config.split_keys)
    return max(1, -(-seen // config.split_keys))


def _steps(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """(steps over keys of all tiles of rows, those of the longest) before the keys are split."""
    group = problem.num_heads_q // problem.num_heads_kv
    total = longest = 0
    counted: dict[tuple[int, int], tuple[int, int]] = {}
    for seqlen_q, seqlen_k in problem.items():
        if (seqlen_q, seqlen_k) not in counted:
            low, high = problem.band(seqlen_q, seqlen_k)
            steps = []
            for row in range(0, seqlen_q * group, config.block_m):
                last = min((row + config.block_m - 1) // group, seqlen_q - 1)
                first_key = 0 if low is None else max(0, row // group + low)
                end = seqlen_k if high is None else min(seqlen_k, last + high + 1)
                hidden = low is not None and high is not None and low > high
                steps.append(0 if hidden else max(0, -(-end // config.block_n) - first_key // config.block_n))
            counted[seqlen_q, seqlen_k] = (sum(steps), max(steps, default=0))
        total += counted[seqlen_q, seqlen_k][0]
        longest = max(longest, counted[seqlen_q, seqlen_k][1])
    return total * problem.num_heads_kv, longest


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Whole tiles, padding included; K and V once for each tile of rows; parts written and read where keys split."""
    size, parts = DTYPE_BYTES[problem.dtype], num_splits(problem, config)
    steps, longest = _steps(problem, config)
    scores = steps * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    outputs = rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0))
    scratch = partials.workspace_bytes(problem, parts) if parts > 1 else 0
    by_kernel = parts > 1 and config.merge == "kernel"
    keys_read = steps * config.block_n * (problem.head_dim + problem.head_dim_v) * size
    table = 8 * steps * (config.block_n // min(problem.page_size, config.block_n)) if problem.page_size else 0
    attend = Cost(
        blocks=_tiles(problem, config) * problem.num_heads_kv * parts * problem.batch,
        flops=2 * scores * (padded(problem.head_dim) + padded(problem.head_dim_v)),
        exponentials=scores,
        read_bytes=rows * problem.head_dim * size + keys_read + table + scores * _bytes_per_score(problem),
        write_bytes=scratch if by_kernel else outputs + scratch,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=scratch,
        steps=steps,
        longest=-(-longest // parts),
        threads=config.num_warps * gpu.warp_size,
        registers=_registers(problem, gpu, config),
        scratch_bytes=scratch if by_kernel else 2 * scratch,
    )
    if parts == 1:
        return attend
    if not by_kernel:
        return replace(attend, read_bytes=attend.read_bytes + scratch, launches=2)  # the other zeroes the counters
    merge = Cost(rows, 0, rows * parts, scratch, outputs, threads=2 * gpu.warp_size, scratch_bytes=scratch)
    return replace(
        attend,
        exponentials=attend.exponentials + merge.exponentials,
        read_bytes=attend.read_bytes + scratch,
        write_bytes=attend.write_bytes + outputs,
        scratch_bytes=2 * scratch,
        launches=2,
        parts=(attend, merge),
    )


def _registers(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """About what a thread holds: output and scores of its rows in float32, probabilities, and some forty besides."""
    threads = max(1, config.num_warps * gpu.warp_size)
    elements = config.block_m * (padded(problem.head_dim_v) + config.block_n * 3 // 2)
    return min(gpu.registers_per_thread or 255, 40 + elements // threads)


# Configs --------------------------------------------------------------------------------------------------------------

UNKNOWN_SMS = 132  # where no device was asked: an H100's and an H200's
BLOCKS_PER_SM = 2  # of four warps, which together keep some 100 KB in flight: more than memory's latency asks for
START_STEPS = 3  # a block begins, and fills its pipeline, in about as long as so many steps take
MERGE_STEPS = 2  # the launch that merges, likewise
MAX_SPLITS = 128
INVARIANT_SPLIT_KEYS = {True: 256, False: 1024}  # for one tile of rows, as at decode, and otherwise


class Splits(NamedTuple):
    """A number of shares, and the arithmetic behind it."""

    num_splits: int
    reason: str


def choose_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> Splits:
    """The number of shares with which the busiest SM walks the fewest steps over keys, in closed form.

        steps(S) = ceil(blocks * S / places) * (ceil(longest / S) + START_STEPS) + (MERGE_STEPS + S / PARTS if S > 1)

    `blocks` are tiles of rows times kv heads times sequences, `places` the blocks that the GPU runs at once, and
    `longest` the steps of the tile that sees most keys. Too few shares leave SMs idle, too many start and merge.
    """
    blocks = max(1, _tiles(problem, config) * problem.num_heads_kv * problem.batch)
    sms = gpu.num_sms or UNKNOWN_SMS
    places = sms * max(1, min(BLOCKS_PER_SM, gpu.smem_per_block_bytes // max(1, smem_bytes(problem, gpu, config))))
    longest = max(1, _steps(problem, config)[1])

    def steps(s: int) -> float:
        merge = MERGE_STEPS + s / partials.PARTS_AT_ONCE if s > 1 else 0
        return -(-blocks * s // places) * (-(-longest // s) + START_STEPS) + merge

    best = min(range(1, min(MAX_SPLITS, longest) + 1), key=steps)
    reason = (
        f"{blocks} tiles of rows for {places} places on {sms} SMs, {longest} steps of {config.block_n} keys each, of "
        f"which the busiest place then walks about {steps(best):.0f}, starts and merge counted"
    )
    return Splits(best, reason + (f"; with one share, {steps(1):.0f}" if best > 1 else ""))


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Why the config splits the keys as it does, for `explain`."""
    parts = num_splits(problem, config)
    if config.split_keys:
        return [
            f"keys in shares of {config.split_keys} at fixed places, {parts} at the most: a sequence's bits do not "
            "depend on the batch"
        ]
    chosen = choose_splits(problem, gpu, config)
    if chosen.num_splits == parts:
        return [f"keys in {parts} shares: {chosen.reason}"]
    return [f"keys in {parts} shares, as asked; {chosen.num_splits} by default: {chosen.reason}"]


def with_splits(problem: AttentionProblem, gpu: Gpu, config: Config) -> Config:
    """The tiling with the keys split for this problem."""
    if problem.batch_invariant:
        # Of a packed call's longest sequence nothing may follow for the others.
        decodes = not problem.packed and _tiles(problem, config) == 1
        return replace(config, num_splits=1, split_keys=INVARIANT_SPLIT_KEYS[decodes])
    return replace(config, num_splits=choose_splits(problem, gpu, config).num_splits)


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The default first, then every other tiling that fits the GPU's shared memory, and other splits of the default."""
    fitting = _fitting(problem, gpu)
    if not fitting:
        return []
    tiling = _default(problem, gpu)
    while smem_bytes(problem, gpu, tiling) > gpu.smem_per_block_bytes:
        tiling = _smaller(tiling)
    default = with_splits(problem, gpu, tiling)
    others = [replace(default, merge="last_block")] if num_splits(problem, default) > 1 else []
    if problem.batch_invariant:  # another tile has other bits
        return [default, *others]
    others += [replace(default, num_splits=n) for n in (1, 2, 3, 2 * default.num_splits)]
    others += [with_splits(problem, gpu, c) for c in fitting]
    return list(dict.fromkeys([default, *others]))


def _smaller(config: Config) -> Config:
    """The next tiling to try where one does not fit: fewer tiles in flight, then fewer keys, then fewer rows."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    return replace(config, block_m=config.block_m // 2)


def _fitting(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    return [c for c in _tilings(problem) if smem_bytes(problem, gpu, c) <= gpu.smem_per_block_bytes]


def _tilings(problem: AttentionProblem) -> list[Config]:
    # Eight warps on 64 rows or fewer split the keys of a product between them, which is slow on Hopper, and at 64x16
    # in tf32 Triton 3.6 computes wrong products (kernels/flash_fwd.py): four, then, everywhere.
    return [
        Config(block_m, block_n, 4, num_stages)
        for block_m in (16, 32, 64)
        for block_n in (16, 32, 64, 128)
        for num_stages in ((1, 2, 3, 5) if problem.page_size else (1, 2, 3))
    ]


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """The tiling, by what fits registers without spills (tests/compile). Nothing here has been measured yet."""
    rows = problem.seqlen_q * (problem.num_heads_q // problem.num_heads_kv)
    if problem.batch_invariant and problem.packed:
        rows = 64  # whose longest sequence depends on who else is there
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    bucket = 0 if wide <= 64 else 1 if wide <= 128 else 2
    masked = problem.mask_shape is not None or problem.bias_shape is not None
    if problem.dtype == "float32":
        config = Config(min(block_m, 32), (32, 16, 16)[bucket], 4, (2, 2, 1)[bucket])
    elif block_m == 64:
        config = Config(64, (64, 32, 32)[bucket], 4, 2)
    else:
        # As many tiles in flight either way: see smem_bytes.
        config = Config(block_m, (64, 64, 32)[bucket], 4, 5 if problem.page_size else 3)
    if gpu.vendor == "amd":
        config = replace(config, num_stages=min(2, config.num_stages))
        if gpu.arch.startswith("gfx1"):
            config = replace(config, block_m=min(block_m, 32), block_n=(32, 32, 16)[bucket], num_stages=1)
    if masked:
        config = replace(config, block_m=min(config.block_m, (64, 64, 32)[bucket]))
        config = replace(config, block_n=max(16, config.block_n // 2), num_stages=min(2, config.num_stages))
    return config
