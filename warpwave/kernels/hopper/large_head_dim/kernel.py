"""Attention for head_dim above 384 on NVIDIA Hopper: warp-specialized, in Gluon, bf16 and fp16.

The accumulator of 64 queries and 512 columns takes half of an SM's registers. A block therefore has 64 queries and
divides the columns among warpgroups: one computes scores and softmax, and two multiply the probabilities by half of V's
columns each. A producer warp keeps rings of chunks of K and V full (roles.py describes the protocol). Blocks are
persistent and draw tiles of queries from a counter, longest first (../scheduler.py).

    S = softmax_scale * Q K^T, then softcap, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

The online softmax is that of hopper/flash_fwd: its maximum lags, so the accumulators are rarely rescaled.

Bound: K and V from L2. 64 queries give 64 FLOP per byte of K and V, and the tensor cores need about 100. Shared memory,
which every operand is read from, is next. Unlike in hopper/flash_fwd, no operand needs to fit a tile.
docs/notes/hopper_large_head_dim.md lists what was tried.
"""

from __future__ import annotations

import torch

from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import arguments, reasons
from warpwave.kernels.cost import Cost, line_bytes, walk
from warpwave.kernels.hopper import host, scheduler
from warpwave.kernels.hopper.groups import Queries, Schedule
from warpwave.kernels.hopper.large_head_dim import roles
from warpwave.kernels.hopper.large_head_dim.config import (
    BLOCK_M,
    BLOCK_N,
    CHUNK,
    Config,
    cannot,
    chunks_of,
    smem_bytes,
    v_chunks_of,
    v_stages_of,
)
from warpwave.kernels.hopper.parts import barriers
from warpwave.kernels.hopper.visible import Rules
from warpwave.operands import Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import launch, tensor_maps
from warpwave.runtime.gluon_or_stub import fence_async_shared, gl, jit

NAME = "hopper/large_head_dim"
NEEDS_GPU = True
MAX_HEAD_DIM = 768  # Q stays in shared memory together with a ring of seven chunks
MAX_HEAD_DIM_V = 2048


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _ring(tensor_map, STAGES: gl.constexpr):
    chunks = gl.allocate_shared_memory(tensor_map.dtype, [STAGES] + tensor_map.block_type.shape, tensor_map.layout)
    return roles.Chunks(chunks, barriers(STAGES, 1), barriers(STAGES, 1), STAGES)


@jit(do_not_specialize=["window_left", "window_right", "num_heads", "head_dim_v_8"])
def hopper_large_head_dim_kernel(
    q_map,
    k_map,
    v_map,
    queries: Queries,
    schedule: Schedule,
    window_left,
    window_right,
    num_heads,
    head_dim_v_8,
    scale,
    softcap_log2,
    counter_ptr,
    widths: roles.Widths,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    VALUES_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Processes tiles of 64 queries of one head and V_CHUNKS * 128 columns of out until the counter is exhausted.

    Tensor maps have the axes (batch, head, row, column) and copy chunks. The scheduler counts each part of the columns
    of V as a head: head h, part p is its head h * V_PARTS + p.
    """
    rules = Rules((
        window_left, window_right, scale, softcap_log2, 1, roles.KEYS, HAS_LOW, HAS_HIGH, TOP_LEFT, HAS_ALIBI,
        HAS_SOFTCAP, HAS_SINKS, IS_VARLEN, WRITE_LSE, False, False, 1, 0, 1,
    ))  # type: ignore[arg-type]  # fmt: skip
    dtype: gl.constexpr = k_map.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [widths.K_CHUNKS] + q_map.block_type.shape, q_map.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    p_tiles = gl.allocate_shared_memory(dtype, [2, 64, roles.KEYS], p_layout)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_ring = _ring(k_map, K_STAGES)
    v_ring_0 = _ring(v_map, V_STAGES)
    v_ring_1 = _ring(v_map, V_STAGES)
    box = scheduler.mailbox(3)
    q_full = barriers(1, 1)
    q_empty = barriers(1, 1)
    p_full = barriers(2, 1)
    p_empty = barriers(2, 2)
    fence_async_shared()

    head_dim_v = head_dim_v_8 * 8
    gl.warp_specialize(
        [
            (roles.scores, (
                queries, schedule, q_tiles, q_full, q_empty, k_ring, p_tiles, factors, p_full, p_empty, box, widths,
                rules,
            )),
            (roles.values, (
                0, v_ring_0, queries.out_ptr, schedule, num_heads, head_dim_v, p_tiles, factors, p_full, p_empty, box,
                widths, rules,
            )),
            (roles.values, (
                1, v_ring_1, queries.out_ptr, schedule, num_heads, head_dim_v, p_tiles, factors, p_full, p_empty, box,
                widths, rules,
            )),
            (roles.producer, (
                q_map, k_map, v_map, q_tiles, q_full, q_empty, k_ring, v_ring_0, v_ring_1, box, widths, rules,
                queries, schedule, counter_ptr,
            )),
        ],
        [4, 4, 1],
        [VALUES_REGISTERS, VALUES_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# Host -----------------------------------------------------------------------------------------------------------------


def bind(
    problem: AttentionProblem, operands: Operands, config: Config, out: torch.Tensor | None = None
) -> arguments.Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested."""
    allocate = arguments.allocator(problem, operands.q)
    mappable = host.mappable(operands)
    first = mappable(operands)
    out, lse = allocate(out)
    spec = specify(problem, current_gpu(out.device), first, out, lse, config)
    launch_kernel = tensor_maps.bind(spec, _plans(problem, first), (first.q, first.k, first.v, out))

    def run(operands: Operands, out: torch.Tensor | None = None) -> arguments.Results:
        q, k, v, _, _, *others = operands
        out, lse = allocate(out)
        launch_kernel(q, k, v, out, out, lse, *others)
        return out, lse

    return arguments.behind(mappable, run)


def _plans(problem: AttentionProblem, operands: Operands) -> list[tensor_maps.MapPlan | None]:
    """Returns the tensor maps of q, k and v. Maps of k and v end after the last key that a query sees."""
    plans: list[tensor_maps.MapPlan | None] = []
    for source, tensor in enumerate(operands[:3]):
        shape, strides = host.seen(tensor, problem.packed, host.keys_end(problem) if source else None)
        plans.append(tensor_maps.MapPlan(source, shape, strides, (1, 1, BLOCK_N, CHUNK)))
    return plans


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> launch.Launch:
    """Returns the launch from tensors, which may be without memory (device "meta") if it is only compiled."""
    if reason := cannot(problem, config):
        raise UnsupportedProblem(
            f"{config} cannot run {problem.describe()}",
            {NAME: [reason]},
            "another v_parts, more num_stages or no scores_ahead",
        )
    sources = operands[:3]
    descriptors = [launch.Mapped(plan, sources[plan.source]) for plan in _plans(problem, operands) if plan is not None]
    tiles = _query_tiles(problem, config)
    return launch.Launch(
        kernel=hopper_large_head_dim_kernel,
        grid=min(tiles, gpu.assumed_sms),
        tensors=(*descriptors, out, lse, *operands[5:], host.counter(out)),
        scalars=_scalars(problem, operands, config, tiles),
        constants=_constants(problem, config),
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


def _query_tiles(problem: AttentionProblem, config: Config) -> int:
    """Returns the number of slots for query tiles in the schedule, over all heads, parts and sequences."""
    heads = problem.num_heads_q * config.v_parts
    if problem.packed:
        return (problem.total_q // BLOCK_M + problem.batch) * heads
    return -(-problem.seqlen_q // BLOCK_M) * heads * problem.batch


def _scalars(problem: AttentionProblem, operands: Operands, config: Config, tiles: int) -> list[int | float]:
    """Returns the run-time arguments after the pointers, in the kernel's order."""
    size = DTYPE_BYTES[problem.dtype]
    return [
        *host.of_schedule(problem, operands, tiles, config.v_parts, BLOCK_M, size),
        problem.num_heads_q,
        problem.head_dim_v // 8,
        *host.score_units(problem),
    ]


def _constants(problem: AttentionProblem, config: Config) -> dict[str, int | bool]:
    """Returns the compile-time arguments of the kernel, by name."""
    v_chunks = v_chunks_of(problem, config.v_parts)
    v_stages = v_stages_of(problem, config.v_parts)
    return {
        "K_STAGES": config.num_stages - 2 * v_stages,
        "V_STAGES": v_stages,
        "K_CHUNKS": chunks_of(problem.head_dim),
        "K_LAST": 64 if 0 < problem.head_dim % CHUNK <= 64 else CHUNK,
        "V_CHUNKS": v_chunks,
        "V_PARTS": config.v_parts,
        "AHEAD": config.scores_ahead,
        **host.options_of(problem),
        "VALUES_REGISTERS": 192 if v_chunks == 5 else 168,
        "PRODUCER_REGISTERS": 24,
    }


# What it can run and what it costs ------------------------------------------------------------------------------------

MASK_REASON = "it takes no {} yet: values that no query sees must have no effect, and V goes to wgmma as it was copied"


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = reasons.of_hopper(gpu)
    if problem.dtype not in ("float16", "bfloat16"):
        found.append(f"dtype is {problem.dtype}; it takes float16 and bfloat16")
    found += reasons.of_gradients(problem) + reasons.of_dropout(problem)
    for name, size, most in (
        ("head_dim", problem.head_dim, MAX_HEAD_DIM),
        ("head_dim_v", problem.head_dim_v, MAX_HEAD_DIM_V),
    ):
        if size > most:
            found.append(f"{name} is {size}; it must be at most {most}: use three_kernel, large_head_dim or eager")
        if size % 8:
            found.append(f"{name} is {size}; it must be a multiple of 8, because TMA copies multiples of 16 bytes")
    if problem.page_size:
        found.append("it reads no paged cache")
    if problem.mask_shape is not None:
        found.append(MASK_REASON.format("boolean mask"))
    if problem.bias_shape is not None:
        found.append(MASK_REASON.format("bias"))
    return found


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why another kernel is faster for all but packed calls, which three_kernel's fastest products do not
    support.

    For packed calls it is 2.7, 3.1 and 3.4 times as fast as large_head_dim at head_dim 512, causal and full, and 640,
    causal, in six sequences of 300 to 4,096 tokens, and 1.6 times in 40 of 200 at 512 (H200, 16 heads).
    """
    if max(problem.head_dim, problem.head_dim_v) < reasons.MEANT_FROM:
        return []  # or another kernel runs first
    few = reasons.FEW_QUERIES_OF_WIDE_HEADS
    if problem.batch_invariant or problem.seqlen_q <= few:
        return [f"large_head_dim, which splits keys, serves sequences of {few} queries or fewer and batch_invariant"]
    if not problem.packed:
        return ["if calls are not packed, three_kernel is faster; it needs a workspace, which this kernel does not"]
    return []


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what one launch moves and computes: whole tiles, padding included; K once for each part of V's
    columns."""
    size, rows = DTYPE_BYTES[problem.dtype], problem.rows * problem.num_heads_q
    width_k = -(-problem.head_dim // 64) * 64
    width_v = v_chunks_of(problem, config.v_parts) * CHUNK
    visited, longest, *_ = walk(problem, BLOCK_M, BLOCK_N, from_first=True)
    scores = visited * config.v_parts * BLOCK_M * BLOCK_N
    # Bytes of K and V for each visited pair, in whole lines.
    of_keys = config.v_parts * line_bytes(size * problem.head_dim) + line_bytes(size * problem.head_dim_v)
    return Cost(
        blocks=min(_query_tiles(problem, config), gpu.assumed_sms),
        flops=2 * scores * (width_k + width_v),
        exponentials=scores,
        read_bytes=size * rows * config.v_parts * problem.head_dim + visited * BLOCK_N * of_keys,
        write_bytes=rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0)),
        smem_bytes=smem_bytes(problem, gpu, config),
        items=_query_tiles(problem, config),
        steps=visited * config.v_parts,
        longest=longest,
        cut=walk(problem, BLOCK_M, BLOCK_N).cut * config.v_parts,
        threads=128 * 4,
        chains=1,
    )
