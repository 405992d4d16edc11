"""FlashAttention forward for NVIDIA Hopper: warp-specialised, in Gluon, bf16 and fp16, head_dim up to 256.

A block is one producer warp and one to three consumer warpgroups of 64 queries. The producer moves Q, K and V tiles
into shared memory by TMA; consumers multiply them by wgmma straight from there, keep probabilities in registers, and
turn the scores of one tile into probabilities while the tensor cores are busy with the tile before (roles.py,
softmax.py). Blocks stay on their SM and draw tiles of queries from a counter, longest first (scheduler.py).

    S = softmax_scale * Q K^T, then softcap, ALiBi, mask;   out = softmax(S) V;   lse = log(sum(exp(S)))

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1 and
3.2. The online softmax rescales only when a row's maximum has risen by more than `softmax.LAG`.

Bound: tensor cores under the power limit from head_dim 128 on, exponentials and instruction issue at 64, launch latency
when the grid does not fill the GPU. It adds to flash_fwd everything that Hopper has of its own; what was tried and what
each part gained is in docs/hopper.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from warpwave import launch
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels import arguments
from warpwave.kernels.cost import Cost
from warpwave.kernels.hopper import launcher, roles, scheduler
from warpwave.kernels.hopper.compat import fence_async_shared, gl, jit, mbarrier
from warpwave.kernels.hopper.parts import FREE_BARRIERS, ROWS, Ring, ring_init
from warpwave.kernels.hopper.visible import Rules
from warpwave.kernels.triton_or_stub import NO_TRITON
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Operands

NAME = "hopper/flash_fwd"
NEEDS_GPU = True
MAX_HEAD_DIM = 256
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """Tile shape and how blocks share an SM.

    Args:
        block_m: queries of a block, 64 for each consumer warpgroup: 64, 128 or 192.
        block_n: keys a step walks: 64 or 128.
        num_stages: K and V tiles in flight, at least 2.
        blocks_per_sm: blocks that share an SM, and its registers and shared memory: 1 to 3; more than 1 only with
            64 queries a block.
    """

    block_m: int
    block_n: int
    num_stages: int
    blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("block_m", (64, 128, 192)), ("block_n", (64, 128)), ("blocks_per_sm", (1, 2, 3))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be one of {allowed}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages is {self.num_stages}; it must be at least 2")
        if self.blocks_per_sm > 1 and self.block_m != 64:
            raise ValueError(f"blocks_per_sm is {self.blocks_per_sm}; more than 1 needs block_m 64, not {self.block_m}")
        if self.blocks_per_sm > 1 and self.num_stages > 4:
            raise ValueError(f"num_stages is {self.num_stages}; blocks that share an SM have barriers for 4")

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.block_m // 64


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

    Tensor maps are of (batch, head, row, column), one for each piece of a tile's width; absent pieces are None.
    """
    q_maps = _present(q_map, q_map_2, q_map_3)
    k_maps = _present(k_map, k_map_2, k_map_3)
    v_maps = _present(v_map, v_map_2, v_map_3)
    out_maps = _present(out_map, out_map_2, out_map_3)
    rules = Rules(
        scale, softcap_log2, window_left, window_right, GROUPS, BLOCK_N, HAS_LOW, HAS_HIGH, TOP_LEFT, HAS_ALIBI,
        HAS_SOFTCAP, HAS_SINKS, IS_VARLEN, WRITE_LSE, OWN_OUT, VALUES_FIRST,
    )  # fmt: skip
    # Tuples and aggregates hold no None: the counter stands for pointers that are absent and that nobody reads.
    if not IS_VARLEN:
        out_ptr = counter_ptr
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

    q_tiles = _buffers(q_maps, GROUPS)
    k_full = _barriers(STAGES)
    v_full = _barriers(STAGES)
    if NAMED_BARRIERS:
        k_ring = Ring(_buffers(k_maps, STAGES), k_full, k_full, STAGES, FREE_BARRIERS)
        v_ring = Ring(_buffers(v_maps, STAGES), v_full, v_full, STAGES, FREE_BARRIERS + STAGES)
    else:
        k_ring = Ring(_buffers(k_maps, STAGES), k_full, _barriers(STAGES), STAGES, 0)
        v_ring = Ring(_buffers(v_maps, STAGES), v_full, _barriers(STAGES), STAGES, 0)
    out_tiles = q_tiles
    if OWN_OUT:
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
MAX_PIECES = 3
NUM_SMS = 132  # of an H100 or H200 SXM, where no device is asked
SHORT_KEYS = 2048


def pieces(head_dim: int) -> tuple[int, ...]:
    """The powers of two a row of this width is made of, widest first: 80 = 64 + 16. Widths that are no sum of three
    such powers from 16 up are padded with zeros, which the copy engine supplies."""
    width = -(-head_dim // 16) * 16
    while True:
        parts = tuple(1 << bit for bit in range(8, 3, -1) if width & 1 << bit)
        if len(parts) <= MAX_PIECES:
            return parts
        width += 16


def bind(
    problem: AttentionProblem, operands: Operands, config: Config
) -> Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]:
    """Compiles for one problem and layout; returns `run(operands) -> (out, lse)`, lse None unless asked for."""
    allocate = arguments.allocator(problem, operands.q)
    straight = arguments.straightener(operands)
    copied = [name for name in ("q", "k", "v") if not _has_map(getattr(operands, name))]
    other_layout = bool(copied) or straight(operands) is not operands

    def mappable(operands: Operands) -> Operands:
        """Operands that tensor maps can describe: what they cannot is copied."""
        aligned = {n: getattr(operands, n).clone(memory_format=torch.contiguous_format) for n in copied}
        return straight(operands)._replace(**aligned)

    first = mappable(operands)
    out, lse = allocate()
    plans = _plans(problem, config, first, out)
    spec = specify(problem, current_gpu(out.device), first, out, lse, config)
    launch_kernel = launcher.bind(spec, plans, (first.q, first.k, first.v, out))

    def run(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        if other_layout:
            operands = mappable(operands)
        out, lse = allocate()
        q, k, v, _, _, *others = operands
        launch_kernel((q, k, v, out), (out, lse, *others))
        return out, lse

    return run


def _has_map(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe a tensor: rows of stride 1, other strides and the base 16-byte multiples."""
    *outer, inner = tensor.stride()
    size = tensor.element_size()
    return (
        (inner == 1 or tensor.shape[-1] == 1)
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 and 0 < stride * size < 2**40 for stride in outer)
    )


def _plans(
    problem: AttentionProblem, config: Config, operands: Operands, out: torch.Tensor
) -> list[launcher.MapPlan | None]:
    """The tensor maps of q, k, v and out, MAX_PIECES each. K and V end with the last key that a query sees."""
    keys_end = problem.seqlen_k
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    if band.high is not None:
        keys_end = min(keys_end, problem.seqlen_q + band.high)
    plans: list[launcher.MapPlan | None] = []
    for source, tensor in enumerate((*operands[:3], out)):
        if problem.packed:
            rows, heads, width = tensor.shape
            shape = (1, heads, rows, width)
            strides = (tensor.stride(0), tensor.stride(1), tensor.stride(0), 1)
        else:
            batch, rows, heads, width = tensor.shape
            is_kv = source in (1, 2)
            shape = (batch, heads, max(1, keys_end) if is_kv else rows, width)
            strides = (tensor.stride(0), tensor.stride(2), tensor.stride(1), 1)
        of_tile = config.block_n if source in (1, 2) else ROWS.value
        parts = [launcher.MapPlan(source, shape, strides, (1, 1, of_tile, part)) for part in pieces(width)]
        plans += [*parts, *[None] * (MAX_PIECES - len(parts))]
    return plans


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: torch.Tensor, lse: torch.Tensor | None, config: Config
) -> launch.Launch:
    """The launch, from tensors that may be without memory (device "meta") when it is only to be compiled."""
    plans = _plans(problem, config, operands, out)
    sources = (*operands[:3], out)
    descriptors = [None if plan is None else plan.descriptor(sources[plan.source]) for plan in plans]
    tiles = _query_tiles(problem, config)
    sms = gpu.num_sms or NUM_SMS
    on_meta = out.device.type == "meta"
    counter = torch.empty(1, dtype=torch.int32, device="meta") if on_meta else launcher.counters(out.device).for_graphs
    return launch.Launch(
        kernel=hopper_flash_fwd_kernel,
        grid=min(tiles, sms * config.blocks_per_sm),
        tensors=(*descriptors, out if problem.packed else None, lse, *operands[5:], counter),
        scalars=_scalars(problem, operands, config, tiles),
        constants=_constants(problem, config),
        options={"num_warps": 4, "enable_fp_fusion": True, **_register_cap(config)},
    )


def _query_tiles(problem: AttentionProblem, config: Config) -> int:
    """Places of tiles in the schedule, over all heads and sequences."""
    if problem.packed:
        return (problem.total_q // config.block_m + problem.batch) * problem.num_heads_q
    return -(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch


def _scalars(problem: AttentionProblem, operands: Operands, config: Config, tiles: int) -> list[int | float]:
    """The run-time arguments behind the pointers, in the kernel's order."""
    group_size = problem.num_heads_q // problem.num_heads_kv
    kv_bytes = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype])
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


def _constants(problem: AttentionProblem, config: Config) -> dict[str, int | bool]:
    """The compile-time arguments of the kernel, by name, in its order."""
    features = arguments.feature_constants(problem)
    consumer, producer = _registers(config)
    return {
        "GROUPS": config.groups,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "NAMED_BARRIERS": config.blocks_per_sm > 1,
        "OWN_OUT": _own_out(problem, config),
        "VALUES_FIRST": config.groups == 3,
        **arguments.band_constants(problem),
        "HAS_ALIBI": features["HAS_ALIBI"],
        "HAS_SOFTCAP": features["HAS_SOFTCAP"],
        "HAS_SINKS": features["HAS_SINKS"],
        "IS_VARLEN": problem.packed,
        "WRITE_LSE": problem.return_lse,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
    }


def _registers(config: Config) -> tuple[int, int]:
    """Registers of a consumer's and the producer's threads after they are handed over, multiples of 8. An SM has
    65,536; the producer's warpgroup counts in full."""
    return {1: (240, 24), 2: (240, 24), 3: (160, 32)}[config.groups]


def _register_cap(config: Config) -> dict[str, int]:
    """Registers a thread starts with where blocks share an SM: 256 threads a block."""
    return {} if config.blocks_per_sm == 1 else {"maxnreg": 65536 // (256 * config.blocks_per_sm) // 8 * 8}


def _own_out(problem: AttentionProblem, config: Config) -> bool:
    """Whether out has shared memory of its own, so that the next block's Q loads while the last product runs; else it
    takes Q's. Worth 10 % at 16 x 1024 (head_dim 128), and at 256 there is no room."""
    limit = SMEM_PER_SM // config.blocks_per_sm - 1024
    return pieces(problem.head_dim) != pieces(problem.head_dim_v) or _smem(problem, config, True) <= limit


# What it can run and what it costs ------------------------------------------------------------------------------------

SMEM_PER_SM = 228 * 1024  # of which the driver keeps 1 KiB a block
MASK_REASON = "it takes no {} yet: values that no query sees must have no effect, and V goes to wgmma as it was copied"


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Every reason this kernel cannot run the problem there; empty when it can."""
    reasons = []
    if NO_TRITON is not None:
        reasons.append(NO_TRITON)
    if gpu.arch != "sm_90":
        reasons.append(f"found {gpu.name} ({gpu.arch}); it needs an NVIDIA Hopper GPU (sm_90)")
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"dtype is {problem.dtype}; it takes float16 and bfloat16")
    if problem.requires_grad:
        reasons.append("it computes no gradients; call under torch.no_grad() if none are needed")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            reasons.append(f"{name} is {size}; a row of K or V must fit one tile, {MAX_HEAD_DIM} at most")
        if size % 8:
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
    if not (short and rows <= (gpu.num_sms or NUM_SMS)):
        return []
    # Graph replays on an H200, hot, in us, this kernel / flash_fwd (the shipped record, suite tiny): 1 head x 64 3.99 /
    # 2.58, x 128 3.96 / 3.11, x 512 6.59 / 6.22; 8 x 4 heads x 128 4.11 / 3.35. Beyond: 16 heads x 1024 13.1 / 13.8.
    return [
        "at most 512 keys of head_dim 64 and one tile an SM: flash_fwd, with lighter blocks, is up to 1.5 x as fast"
    ]


def smem_bytes(problem: AttentionProblem, gpu: Gpu, config: Config) -> int:
    """An upper bound on the shared memory of one block, which tests hold against what every config compiles to."""
    return _smem(problem, config, _own_out(problem, config))


def _smem(problem: AttentionProblem, config: Config, own_out: bool) -> int:
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    elements = config.block_m * (width + own_out * width_v) + config.num_stages * config.block_n * (width + width_v)
    return DTYPE_BYTES[problem.dtype] * elements + 2048  # the last for barriers and reductions


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
    """What one launch moves and computes: whole tiles, padding included; K and V once for each query tile."""
    size = DTYPE_BYTES[problem.dtype]
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    visited = tiles(problem, config)
    scores = visited * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    return Cost(
        blocks=min(_query_tiles(problem, config), (gpu.num_sms or NUM_SMS) * config.blocks_per_sm),
        flops=2 * scores * (width + width_v),
        exponentials=scores,
        read_bytes=size
        * (rows * problem.head_dim + visited * config.block_n * (problem.head_dim + problem.head_dim_v)),
        write_bytes=rows * (problem.head_dim_v * size + (4 if problem.return_lse else 0)),
        smem_bytes=smem_bytes(problem, gpu, config),
        items=_query_tiles(problem, config),
        steps=visited,
        longest=-(-problem.seqlen_k // config.block_n),
        threads=128 * (config.groups + 1),
        chains=config.groups,
        blocks_per_sm=config.blocks_per_sm,
    )


# Configs --------------------------------------------------------------------------------------------------------------


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The default first, then every other candidate that fits the GPU's shared memory and registers."""
    fitting = [c for c in _space() if _fits(problem, gpu, c)]
    default = _default(problem, gpu)
    return [default, *(c for c in fitting if c != default)]


def _space() -> list[Config]:
    return [
        Config(block_m, block_n, num_stages, blocks_per_sm)
        for block_m in (64, 128, 192)
        for block_n in (64, 128)
        for num_stages in (2, 3, 4)
        for blocks_per_sm in (1, 2, 3)
        if not (block_m > 64 and blocks_per_sm > 1)
    ]


def _fits(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Shared memory of all blocks of an SM, and a consumer thread's registers: scores, probabilities, accumulator."""
    if config.blocks_per_sm * (smem_bytes(problem, gpu, config) + 1024) > SMEM_PER_SM:
        return False
    width_v = sum(pieces(problem.head_dim_v))
    registers = config.block_n // 2 + config.block_n // 4 + width_v // 2 + 40
    return registers <= {1: 240, 2: 200, 3: 136}[config.blocks_per_sm] and registers <= _registers(config)[0]


def _default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """By head_dim, mask, keys, and work per SM; the figures are ratios of time on an H200 (docs/hopper.md)."""
    width = max(sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v)))
    if width > 128:
        return Config(128, 64, 2)
    if width > 64:
        return Config(128, 128, 2)
    if problem.has_band and problem.seqlen_k <= SHORT_KEYS:
        # Blocks of 64 queries waste less at the diagonal and idle less at the end: 1.20 times as fast as 192 queries at
        # 16 x 1024, but 0.97 at 4 x 4096 and 0.88 at 1 x 16384.
        return Config(64, 64, 3, 3)
    num_sms = gpu.num_sms or NUM_SMS
    if _rows_per_sm(problem, 192, num_sms) > 1.2 * _rows_per_sm(problem, 64, num_sms):
        # Too few blocks of 192 to go round: 1 x 1024 with 32 heads takes 1.3 times as long with them; the ratio is
        # 1.5. At 1.14, 16 x 1024, they are 1.03 times as fast.
        return Config(64, 128, 2, 2)
    return Config(192, 128, 3)


def _rows_per_sm(problem: AttentionProblem, block_m: int, num_sms: int) -> int:
    """Queries that the busiest SM works on, all blocks being as long."""
    return -(-_query_tiles(problem, Config(block_m, 64, 2)) // num_sms) * block_m
