"""FlashAttention forward for NVIDIA Hopper: warp-specialised, in Gluon; bf16 and fp16, head_dim up to 384; float32 by
bfloat16 parts, up to 256.

A block is one producer warp and one to three consumer warpgroups of 64 queries. The producer moves Q, K and V tiles
into shared memory by TMA; consumers multiply them by wgmma straight from there, keep probabilities in registers, and
turn the scores of one tile into probabilities while the tensor cores are busy with the tile before (roles.py,
softmax.py). Blocks stay on their SM and draw tiles of queries from a counter, longest first (scheduler.py). float32 is
split into parts by a launch before (split_ahead.py), and every product becomes three or six (split_float32.py).

    S = softmax_scale * Q K^T, then softcap, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1 and
3.2. The online softmax rescales only when a row's maximum has risen by more than `softmax.LAG`.

Bound: tensor cores under the power limit from head_dim 128 on and in float32, exponentials and instruction issue at 64,
launch latency when the grid does not fill the GPU. It adds to flash_fwd everything that Hopper has of its own; what was
tried and what each part gained is in docs/hopper.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpwave import launch, precision
from warpwave.errors import UnsupportedProblem
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels import arguments, split_ahead
from warpwave.kernels.cost import Cost
from warpwave.kernels.hopper import launcher, roles, scheduler
from warpwave.kernels.hopper.compat import fence_async_shared, gl, jit, mbarrier
from warpwave.kernels.hopper.flash_fwd_configs import (
    ABLE,
    MAX_PIECES,
    NUM_SMS,
    Config,
    configs,
    num_parts,
    own_out,
    pieces,
    query_tiles,
    registers,
    smem_bytes,
)
from warpwave.kernels.hopper.parts import FREE_BARRIERS, ROWS, Ring, ring_init
from warpwave.kernels.hopper.visible import Rules
from warpwave.kernels.split_ahead import PARTS
from warpwave.kernels.triton_or_stub import NO_TRITON
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Operands

__all__ = ["Config", "bind", "configs", "cost", "hopper_flash_fwd_kernel", "pieces", "smem_bytes", "specify", "why_not"]

NAME = "hopper/flash_fwd"
NEEDS_GPU = True
MAX_HEAD_DIM = {"float16": 384, "bfloat16": 384, "float32": 256}
LOG2_E = 1.4426950408889634


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _buffers(maps, COUNT: gl.constexpr):
    """COUNT tiles in shared memory as the maps fill them: a tuple of pieces."""
    pieces = ()
    for i in gl.static_range(len(maps)):
        pieces = pieces + (
            gl.allocate_shared_memory(maps[i].dtype, [COUNT] + maps[i].block_type.shape, maps[i].layout),
        )
    return pieces


@jit
def _barriers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@jit
def _present(first, second, third):
    """The pieces that there are."""
    if second is None:
        return (first,)
    elif third is None:
        return (first, second)
    else:
        return (first, second, third)


UNSPECIALISED = [
    *("stride_alibi_b", "stride_lb", "stride_lh", "num_tiles", "num_heads", "group_size", "batch", "tiles_per_head"),
    *("heads_in_l2", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right"),
]


@jit(do_not_specialize=UNSPECIALISED)
def hopper_flash_fwd_kernel(
    q_map,
    q_map_2,
    q_map_3,
    k_map,
    k_map_2,
    k_map_3,
    v_map,
    v_map_2,
    v_map_3,
    out_map,
    out_map_2,
    out_map_3,
    out_ptr,
    lse_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    counter_ptr,
    stride_alibi_b,
    stride_lb,
    stride_lh,
    num_tiles,
    num_heads,
    group_size,
    batch,
    tiles_per_head,
    heads_in_l2,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    window_left,
    window_right,
    scale,
    softcap_log2,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    NAMED_BARRIERS: gl.constexpr,
    OWN_OUT: gl.constexpr,
    VALUES_FIRST: gl.constexpr,
    PARTS: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Tiles of 64 * GROUPS queries of one head, as many as the counter gives.

    Tensor maps are of (batch, head, row, column), one for each piece of a tile's width; absent pieces are None. In
    float32 PARTS heads of a map are the parts of one head, and out, of HEAD_DIM_V columns, has no maps.
    """
    q_maps = _present(q_map, q_map_2, q_map_3)
    k_maps = _present(k_map, k_map_2, k_map_3)
    v_maps = _present(v_map, v_map_2, v_map_3)
    out_maps = k_maps  # not used: parts leave no room for out, which goes to memory from registers
    if PARTS == 1:
        out_maps = _present(out_map, out_map_2, out_map_3)
    rules = Rules(
        scale, softcap_log2, window_left, window_right, GROUPS, BLOCK_N, HAS_LOW, HAS_HIGH, TOP_LEFT, HAS_ALIBI,
        HAS_SOFTCAP, HAS_SINKS, IS_VARLEN, WRITE_LSE, OWN_OUT, VALUES_FIRST, PARTS, HEAD_DIM_V,
    )  # fmt: skip
    # Tuples and aggregates hold no None: the counter stands for pointers that are absent and that nobody reads.
    if not IS_VARLEN and PARTS == 1:
        out_ptr = counter_ptr
    if not IS_VARLEN:
        cu_seqlens_q_ptr = counter_ptr
        cu_seqlens_k_ptr = counter_ptr
    if not WRITE_LSE:
        lse_ptr = counter_ptr
    if not HAS_ALIBI:
        alibi_slopes_ptr = counter_ptr
    if not HAS_SINKS:
        sinks_ptr = counter_ptr
    schedule = scheduler.Schedule(
        counter_ptr, num_tiles, num_heads, group_size, batch, tiles_per_head, heads_in_l2, seqlen_q, seqlen_k, total_q,
        total_k, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    )  # fmt: skip

    q_tiles = _buffers(q_maps, GROUPS * PARTS)
    k_full = _barriers(STAGES)
    v_full = _barriers(STAGES)
    if NAMED_BARRIERS:
        k_ring = Ring(_buffers(k_maps, STAGES * PARTS), k_full, k_full, STAGES, FREE_BARRIERS, PARTS)
        v_ring = Ring(_buffers(v_maps, STAGES * PARTS), v_full, v_full, STAGES, FREE_BARRIERS + STAGES, PARTS)
    else:
        k_ring = Ring(_buffers(k_maps, STAGES * PARTS), k_full, _barriers(STAGES), STAGES, 0, PARTS)
        v_ring = Ring(_buffers(v_maps, STAGES * PARTS), v_full, _barriers(STAGES), STAGES, 0, PARTS)
    out_tiles = q_tiles
    if OWN_OUT and PARTS == 1:
        out_tiles = _buffers(out_maps, GROUPS)
    # Every barrier allocated is used. The memory of one that is not would be handed out again as scratch, with a
    # barrier's bits in it: the first tile drawn was then garbage in 5 % of launches.
    q_full = _barriers(GROUPS)
    q_empty = _barriers(GROUPS)
    words = gl.allocate_shared_memory(gl.int32, [2 * scheduler.WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    box = scheduler.Mailbox(words, _barriers(2), _barriers(2))
    ring_init(k_ring, GROUPS)
    ring_init(v_ring, GROUPS)
    for g in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(g), count=1)
        mbarrier.init(q_empty.index(g), count=1)
    for i in gl.static_range(2):
        mbarrier.init(box.full.index(i), count=1)
        mbarrier.init(box.empty.index(i), count=GROUPS)
    fence_async_shared()

    of_producer = (q_maps, k_maps, v_maps, q_tiles, q_full, q_empty, k_ring, v_ring, box, schedule, rules)
    of_consumer = (
        out_maps, out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, stride_alibi_b, stride_lb, stride_lh, num_heads,
        seqlen_q, seqlen_k, q_tiles, out_tiles, q_full, q_empty, k_ring, v_ring, box, rules,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [(roles.consumer, (0,) + of_consumer), (roles.producer, of_producer)],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (roles.consumer, (0,) + of_consumer),
                (roles.consumer, (1,) + of_consumer),
                (roles.producer, of_producer),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (roles.consumer, (0,) + of_consumer),
                (roles.consumer, (1,) + of_consumer),
                (roles.consumer, (2,) + of_consumer),
                (roles.producer, of_producer),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# Host -----------------------------------------------------------------------------------------------------------------

# K and V of the heads that run together under a causal mask.
L2_BYTES = 32 * 1024 * 1024


def bind(
    problem: AttentionProblem, operands: Operands, config: Config
) -> Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]:
    """Compiles for one problem and layout; returns `run(operands) -> (out, lse)`, lse None unless asked for."""
    allocate = arguments.allocator(problem, operands.q)
    straight = arguments.straightener(operands)
    if problem.dtype == "float32":
        return _bind_split(problem, straight(operands), config, allocate, straight)
    copied = [name for name in ("q", "k", "v") if not launcher.has_map(getattr(operands, name))]
    other_layout = bool(copied) or straight(operands) is not operands

    def mappable(operands: Operands) -> Operands:
        """Operands that tensor maps can describe: what they cannot is copied."""
        aligned = {n: getattr(operands, n).clone(memory_format=torch.contiguous_format) for n in copied}
        return straight(operands)._replace(**aligned)

    first = mappable(operands)
    out, lse = allocate()
    plans = _plans(problem, config, first, out)
    spec = _specify_16_bits(problem, current_gpu(out.device), first, out, lse, config)
    launch_kernel = launcher.bind(spec, plans, (first.q, first.k, first.v, out))

    def run(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        if other_layout:
            operands = mappable(operands)
        out, lse = allocate()
        q, k, v, _, _, *others = operands
        launch_kernel((q, k, v, out), (out, lse, *others))
        return out, lse

    return run


def _bind_split(
    problem: AttentionProblem,
    operands: Operands,
    config: Config,
    allocate: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    straight: Callable[[Operands], Operands],
) -> Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]:
    """`bind` for float32: q, k and v are split into a workspace, whatever their strides, and tensor maps describe that.
    Each call has its own, so that calls on two streams, or in a graph and beside it, share nothing."""
    out, lse = allocate()
    split, attend, parts, plans = _specify_split(problem, current_gpu(out.device), operands, out, lse, config)
    split_operands = launch.bind(split)
    launch_kernel = launcher.bind(attend, plans, (*parts, out))
    shapes, device = tuple(part.shape for part in parts), out.device

    def run(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        operands = straight(operands)
        out, lse = allocate()
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        split_operands(operands.q, operands.k, operands.v, q, k, v)
        launch_kernel((q, k, v, out), (out, lse, *operands[5:]))
        return out, lse

    return run


def _plans(
    problem: AttentionProblem, config: Config, operands: Operands, out: torch.Tensor
) -> list[launcher.MapPlan | None]:
    """The tensor maps of q, k, v and out, MAX_PIECES each. K and V end with the last key that a query sees."""
    plans: list[launcher.MapPlan | None] = []
    for source, tensor in enumerate((*operands[:3], out)):
        if problem.packed:
            rows, heads, width = tensor.shape
            shape = (1, heads, rows, width)
            strides = (tensor.stride(0), tensor.stride(1), tensor.stride(0), 1)
        else:
            batch, rows, heads, width = tensor.shape
            shape = (batch, heads, _keys_end(problem) if source in (1, 2) else rows, width)
            strides = (tensor.stride(0), tensor.stride(2), tensor.stride(1), 1)
        plans += _pieces_of(source, shape, strides, config)
    return plans


def _plans_of_parts(
    problem: AttentionProblem, config: Config, parts: tuple[torch.Tensor, ...]
) -> list[launcher.MapPlan | None]:
    """The same of q, k and v in parts (`split_ahead.part_shapes`); out has none."""
    plans: list[launcher.MapPlan | None] = []
    for source, tensor in enumerate(parts):
        batch, heads, rows, width = tensor.shape
        if source > 0 and not problem.packed:
            rows = _keys_end(problem)
        plans += _pieces_of(source, (batch, heads, rows, width), tensor.stride(), config)
    return [*plans, *[None] * MAX_PIECES]


def _pieces_of(
    source: int, shape: tuple[int, ...], strides: tuple[int, ...], config: Config
) -> list[launcher.MapPlan | None]:
    """A tensor's maps, one for each piece of its width."""
    of_tile = config.block_n if source in (1, 2) else ROWS.value
    parts = [launcher.MapPlan(source, shape, strides, (1, 1, of_tile, part)) for part in pieces(shape[-1])]
    return [*parts, *[None] * (MAX_PIECES - len(parts))]


def _keys_end(problem: AttentionProblem) -> int:
    """Keys of a dense call up to the last that some query sees, 1 at least."""
    keys_end = problem.seqlen_k
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    if band.high is not None:
        keys_end = min(keys_end, problem.seqlen_q + band.high)
    return max(1, keys_end)


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> launch.Launch | tuple[launch.Launch, launch.Launch]:
    """The launch, in float32 the split and the launch, from tensors that may be without memory (device "meta") when
    only to be compiled."""
    if problem.dtype == "float32":
        return _specify_split(problem, gpu, operands, out, lse, config)[:2]
    return _specify_16_bits(problem, gpu, operands, out, lse, config)


def _specify_16_bits(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> launch.Launch:
    if config.num_stages < 2:
        raise UnsupportedProblem(
            f"{config} cannot run {problem.describe()}",
            {NAME: ["num_stages is 1; K comes one tile ahead of V in 16-bit types, which takes 2"]},
            "num_stages=2",
        )
    sources = (*operands[:3], out)
    return _specify(problem, gpu, operands, sources, _plans(problem, config, operands, out), lse, config, 1)


def _specify_split(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> tuple[launch.Launch, launch.Launch, tuple[torch.Tensor, ...], list[launcher.MapPlan | None]]:
    """The launch that splits q, k and v, the launch that attends, the parts between them, and their maps."""
    widths = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    split, parts = split_ahead.specify_all(problem, gpu, operands, precision.arithmetic(problem, gpu, ABLE), *widths)
    plans = _plans_of_parts(problem, config, parts)
    attend = _specify(problem, gpu, operands, (*parts, out), plans, lse, config, num_parts(problem, gpu))
    return split, attend, parts, plans


def _specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: Operands,
    sources: tuple[torch.Tensor, ...],
    plans: list[launcher.MapPlan | None],
    lse: torch.Tensor | None,
    config: Config,
    parts: int,
) -> launch.Launch:
    """The launch of `hopper_flash_fwd_kernel` on what maps describe, `sources`, the last of which is out."""
    out = sources[-1]
    descriptors = [None if plan is None else plan.descriptor(sources[plan.source]) for plan in plans]
    tiles = query_tiles(problem, config)
    sms = gpu.num_sms or NUM_SMS
    on_meta = out.device.type == "meta"
    counter = torch.empty(1, dtype=torch.int32, device="meta") if on_meta else launcher.counters(out.device).for_graphs
    return launch.Launch(
        kernel=hopper_flash_fwd_kernel,
        grid=min(tiles, sms * config.blocks_per_sm),
        tensors=(*descriptors, out if problem.packed or parts > 1 else None, lse, *operands[5:], counter),
        scalars=_scalars(problem, operands, config, tiles, parts),
        constants=_constants(problem, config, parts),
        options={"num_warps": 4, "enable_fp_fusion": True, **_register_cap(config)},
    )


def _scalars(
    problem: AttentionProblem, operands: Operands, config: Config, tiles: int, parts: int
) -> list[int | float]:
    """The run-time arguments behind the pointers, in the kernel's order."""
    group_size = problem.num_heads_q // problem.num_heads_kv
    size = DTYPE_BYTES[problem.dtype] if parts == 1 else 2 * parts
    kv_bytes = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size)
    heads_in_l2 = max(1, L2_BYTES // kv_bytes) * group_size
    scale, softcap_log2 = problem.softmax_scale * LOG2_E, 0.0
    if problem.softcap > 0:
        scale, softcap_log2 = problem.softmax_scale / problem.softcap, problem.softcap * LOG2_E
    return [
        arguments.slope_strides(operands.alibi_slopes)[0],
        *arguments.lse_strides(problem),
        tiles,
        problem.num_heads_q,
        group_size,
        problem.batch,
        -(-problem.seqlen_q // config.block_m),
        # No more heads than there are: tiles times heads is a tile's number, and must not wrap.
        min(problem.batch * problem.num_heads_q, heads_in_l2),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.total_q,
        problem.total_k,
        *arguments.window(problem),
        scale,
        softcap_log2,
    ]


def _constants(problem: AttentionProblem, config: Config, parts: int) -> dict[str, int | bool]:
    """The compile-time arguments of the kernel, by name, in its order."""
    features = arguments.feature_constants(problem)
    consumer, producer = registers(config)
    return {
        "GROUPS": config.groups,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "NAMED_BARRIERS": config.blocks_per_sm > 1,
        "OWN_OUT": parts > 1 or own_out(problem, config),
        "VALUES_FIRST": config.groups == 3,
        "PARTS": parts,
        "HEAD_DIM_V": problem.head_dim_v if parts > 1 else 0,
        **arguments.band_constants(problem),
        "HAS_ALIBI": features["HAS_ALIBI"],
        "HAS_SOFTCAP": features["HAS_SOFTCAP"],
        "HAS_SINKS": features["HAS_SINKS"],
        "IS_VARLEN": problem.packed,
        "WRITE_LSE": problem.return_lse,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
    }


def _register_cap(config: Config) -> dict[str, int]:
    """Registers a thread starts with where blocks share an SM: 256 threads a block."""
    return {} if config.blocks_per_sm == 1 else {"maxnreg": 65536 // (256 * config.blocks_per_sm) // 8 * 8}


# What it can run and what it costs ------------------------------------------------------------------------------------

MASK_REASON = "it takes no {} yet: values that no query sees must have no effect, and V goes to wgmma as it was copied"


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Every reason this kernel cannot run the problem there; empty when it can."""
    reasons = []
    if NO_TRITON is not None:
        reasons.append(NO_TRITON)
    if gpu.arch != "sm_90":
        reasons.append(f"found {gpu.name} ({gpu.arch}); it needs an NVIDIA Hopper GPU (sm_90)")
    if problem.dtype == "float32":
        if gpu.arch == "sm_90" and num_parts(problem, gpu) == 1:
            reasons.append(
                f"precision is {problem.precision!r}, {arguments.dot_precision(problem, gpu)} there; its products of "
                "float32 are bf16x3 and bf16x6"
            )
        reasons += precision.why_not(problem, gpu, ABLE)
    if problem.requires_grad:
        reasons.append("it computes no gradients; call under torch.no_grad() if none are needed")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM[problem.dtype]:
            reasons.append(
                f"{name} is {size}; rows of K and V must fit a tile and of out the registers: "
                f"{MAX_HEAD_DIM[problem.dtype]} at most in {problem.dtype}"
            )
        if size % 8 and problem.dtype != "float32":
            reasons.append(f"{name} is {size}; rows copied by TMA are a multiple of 16 bytes, so it must be one of 8")
    if problem.mask_shape is not None:
        reasons.append(MASK_REASON.format("boolean mask"))
    if problem.bias_shape is not None:
        reasons.append(MASK_REASON.format("bias"))
    return reasons


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Where `flash_fwd` takes less time: calls so short that setting up the ring and the roles is not earned back."""
    rows = -(-problem.seqlen_q // 64) * problem.batch * problem.num_heads_q
    short = problem.seqlen_k <= 512 and max(problem.head_dim, problem.head_dim_v) <= 64
    if not (short and rows <= (gpu.num_sms or NUM_SMS)) or problem.dtype == "float32":
        return []  # in float32 it is the faster one from 1 head x 512 on: 17.6 us against 27.8 (graph replays, an H200)
    # Graph replays on an H200, hot, in us, this kernel / flash_fwd (the shipped record, suite tiny): 1 head x 64 3.99 /
    # 2.58, x 128 3.96 / 3.11, x 512 6.59 / 6.22; 8 x 4 heads x 128 4.11 / 3.35. Beyond: 16 heads x 1024 13.1 / 13.8.
    return [
        "at most 512 keys of head_dim 64 and one tile an SM: flash_fwd, with lighter blocks, is up to 1.5 x as fast"
    ]


def tiles(problem: AttentionProblem, config: Config) -> int:
    """(query tile, key tile) pairs visited, over all heads and sequences: `visible.tiles_of_block` on the host."""
    total = 0
    counted: dict[tuple[int, int], int] = {}
    for seqlen_q, seqlen_k in problem.items():
        if (seqlen_q, seqlen_k) not in counted:
            low, high = problem.band(seqlen_q, seqlen_k)
            keys_begin = 0 if low is None else min(max(low, 0), seqlen_k)
            keys_end = seqlen_k if high is None else max(min(seqlen_k, seqlen_q + high), keys_begin)
            count = 0
            for row_first in range(0, seqlen_q, config.block_m):
                row_last = min(row_first + config.block_m, seqlen_q) - 1
                first = keys_begin if low is None else max(keys_begin, row_first + low)
                last = keys_end if high is None else min(keys_end, row_last + high + 1)
                begin = (first - keys_begin) // config.block_n
                count += max(1, -(-max(0, last - keys_begin) // config.block_n) - begin)
            counted[seqlen_q, seqlen_k] = count
        total += counted[seqlen_q, seqlen_k]
    return total * problem.num_heads_q


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """What one launch moves and computes: whole tiles, padding included; K and V once for each query tile. In float32
    also what the launch before reads, and the parts that it writes."""
    size = DTYPE_BYTES[problem.dtype]
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    visited = tiles(problem, config)
    scores = visited * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    q_bytes, k_bytes = size * problem.head_dim, size * (problem.head_dim + problem.head_dim_v)
    workspace = split_reads = 0
    if problem.dtype == "float32":
        arithmetic = precision.arithmetic(problem, gpu, ABLE)
        keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
        split_reads = rows * q_bytes + keys * k_bytes
        q_bytes, k_bytes = 2 * PARTS.get(arithmetic, 1) * width, 2 * PARTS.get(arithmetic, 1) * (width + width_v)
        workspace = rows * q_bytes + keys * k_bytes
    reads = rows * q_bytes + visited * config.block_n * k_bytes
    return Cost(
        blocks=min(query_tiles(problem, config), (gpu.num_sms or NUM_SMS) * config.blocks_per_sm),
        flops=2 * scores * (width + width_v),
        exponentials=scores,
        read_bytes=reads + split_reads,
        write_bytes=rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0)) + workspace,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=workspace,
        scratch_bytes=reads + workspace if workspace else 0,
        launches=2 if workspace else 1,
        items=query_tiles(problem, config),
        steps=visited,
        longest=-(-problem.seqlen_k // config.block_n),
        threads=128 * (config.groups + 1),
        chains=config.groups,
        blocks_per_sm=config.blocks_per_sm,
    )
