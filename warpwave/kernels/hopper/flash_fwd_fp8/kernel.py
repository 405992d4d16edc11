"""FlashAttention forward for NVIDIA Hopper with 8-bit products: warp-specialized, in Gluon; float8 q, k and v.

A block is one producer warp and one to three consumer warpgroups of 64 queries each, as in `flash_fwd`. 8-bit wgmma
reads both operands along the summed axis, so a preceding launch writes V transposed (prepass/transpose_values.py).
Probabilities are multiplied by 2^8 and rounded to float8_e4m3. The tensor cores add with about 14 bits, so no product
with V covers more than 128 keys; its sum is added in float32 (products.py), where the factor of V also goes
(../factors.py).

    S = softmax_scale * q_descale * k_descale * (Q K^T), then softcap, ALiBi, mask
    out = softmax(S) (V * v_descale);   lse = log(sum(exp(S)))

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), section 3.3.

Bound: no single unit. A step takes as long as its products plus the larger of exponentials and instruction issue
    (docs/notes/hopper_fp8.md).
"""

from __future__ import annotations

import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import arguments, descales
from warpwave.kernels.hopper import host, scheduler
from warpwave.kernels.hopper.factors import Factors, OfKeys
from warpwave.kernels.hopper.flash_fwd.config import query_tiles
from warpwave.kernels.hopper.flash_fwd.producer import Producer
from warpwave.kernels.hopper.flash_fwd_fp8.config import Config, pieces, registers
from warpwave.kernels.hopper.flash_fwd_fp8.consumer import Consumer, consumer
from warpwave.kernels.hopper.flash_fwd_fp8.producer import producer
from warpwave.kernels.hopper.groups import KeyDescaleStrides, QDescaleStrides, Queries, Schedule
from warpwave.kernels.hopper.parts import ROWS, Ring, barriers, buffers, present, ring_init
from warpwave.kernels.hopper.visible import Options, Rules
from warpwave.kernels.prepass import transpose_values
from warpwave.problem import AttentionProblem, QuantizedOperands
from warpwave.runtime import launch, scratch, tensor_maps
from warpwave.runtime.gluon_or_stub import fence_async_shared, gl, jit, mbarrier

__all__ = ["NAME", "NEEDS_GPU", "QUANTIZED", "bind", "hopper_flash_fwd_fp8_kernel", "specify"]

NAME = "hopper/flash_fwd_fp8"
NEEDS_GPU = True
QUANTIZED = True


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def hopper_flash_fwd_fp8_kernel(
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
    queries: Queries,
    schedule: Schedule,
    call_options: Options,
    q_descale_strides: QDescaleStrides,
    k_descale_strides: KeyDescaleStrides,
    v_descale_strides: KeyDescaleStrides,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    counter_ptr,
    STAGES: gl.constexpr,
    Q_BLOCK: gl.constexpr,
    K_BLOCK: gl.constexpr,
    V_BLOCK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Processes tiles of 64 * GROUPS queries of one head until the counter is exhausted.

    Tensor maps have the axes (batch, head, row, column), one map for each piece of a tile's width; absent pieces are
    None. Q_BLOCK, K_BLOCK and V_BLOCK tokens share a factor, or all tokens of a head if 0.
    """
    GROUPS: gl.constexpr = call_options.GROUPS
    q_maps = present(q_map, q_map_2, q_map_3)
    k_maps = present(k_map, k_map_2, k_map_3)
    v_maps = present(v_map, v_map_2, v_map_3)
    out_maps = present(out_map, out_map_2, out_map_3)
    of_k = OfKeys(k_descale_ptr, k_descale_strides, K_BLOCK)
    of_v = OfKeys(v_descale_ptr, v_descale_strides, V_BLOCK)
    factors = Factors(q_descale_ptr, q_descale_strides, of_k, schedule.group_size, Q_BLOCK)
    rules = Rules(call_options, True, (), factors)

    q_tiles = buffers(q_maps, GROUPS)
    k_ring = Ring(buffers(k_maps, STAGES), barriers(STAGES), barriers(STAGES), STAGES, 0, 1)
    v_ring = Ring(buffers(v_maps, STAGES), barriers(STAGES), barriers(STAGES), STAGES, 0, 1)
    out_tiles = buffers(out_maps, GROUPS)
    # Every allocated barrier must be used: see hopper/flash_fwd.
    q_full = barriers(GROUPS)
    q_empty = barriers(GROUPS)
    words = gl.allocate_shared_memory(gl.int32, [2 * scheduler.WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    box = scheduler.Mailbox(words, barriers(2), barriers(2))
    ring_init(k_ring, GROUPS)
    ring_init(v_ring, GROUPS)
    for g in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(g), count=1)
        mbarrier.init(q_empty.index(g), count=1)
    for i in gl.static_range(2):
        mbarrier.init(box.full.index(i), count=1)
        mbarrier.init(box.empty.index(i), count=GROUPS)
    fence_async_shared()

    of_producer = Producer(q_maps, k_maps, v_maps, q_tiles, q_full, q_empty, k_ring, v_ring, box, rules, ())
    of_consumer = Consumer(out_maps, of_v, q_tiles, out_tiles, q_full, q_empty, k_ring, v_ring, box, rules)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (0, of_consumer, queries, schedule)),
                (producer, (of_producer, queries, schedule, counter_ptr)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (0, of_consumer, queries, schedule)),
                (consumer, (1, of_consumer, queries, schedule)),
                (producer, (of_producer, queries, schedule, counter_ptr)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, of_consumer, queries, schedule)),
                (consumer, (1, of_consumer, queries, schedule)),
                (consumer, (2, of_consumer, queries, schedule)),
                (producer, (of_producer, queries, schedule, counter_ptr)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# Host -----------------------------------------------------------------------------------------------------------------


def bind(
    problem: AttentionProblem, operands: QuantizedOperands, config: Config, out: torch.Tensor | None = None
) -> arguments.Run:
    """Compiles for one problem and layout; returns `run(operands, out=None) -> (out, lse)`, where lse is None unless
    requested. V transposed is in a workspace; each stream and each graph has its own (runtime/scratch.py)."""
    allocate = arguments.allocator(problem, operands.q)
    mappable = host.mappable(problem, operands, ("q", "k"))
    first = mappable(operands)
    out, lse = allocate(out)
    transposed = torch.empty(transpose_values.shape(problem), dtype=first.v.dtype, device=out.device)
    ahead, attend = _specify(problem, current_gpu(out.device), first, transposed, out, lse, config)
    launch_kernel = tensor_maps.bind(
        attend, _plans(problem, config, first, transposed, out), (*first[:2], transposed, out)
    )
    transpose, workspace = launch.bind(ahead), scratch.memory([(transposed.shape, transposed.dtype)], out.device)

    def run(operands: QuantizedOperands, out: torch.Tensor | None = None) -> arguments.Results:
        q, k, v, _, _, slopes, sinks, offsets_q, offsets_k, *factors = operands
        out, lse = allocate(out)
        (transposed,) = workspace()
        transpose(v, offsets_q, offsets_k, transposed)
        launch_kernel(q, k, transposed, out, out, lse, slopes, sinks, offsets_q, offsets_k, *factors[:3])
        return out, lse

    return arguments.behind(mappable, run)


def _plans(
    problem: AttentionProblem, config: Config, operands: QuantizedOperands, transposed: torch.Tensor, out: torch.Tensor
) -> list[tensor_maps.MapPlan | None]:
    """Returns the tensor maps of q, k, v transposed and out, host.MAX_PIECES each. The map of K ends after the last key
    that a query sees."""
    of_q, of_k, of_out = (
        host.seen(operands.q, problem.packed),
        host.seen(operands.k, problem.packed, host.keys_end(problem)),
        host.seen(out, problem.packed),
    )
    width, width_v = pieces(problem.head_dim), pieces(problem.head_dim_v)
    of_v = tuple(transposed.shape), transposed.stride()
    columns = [tensor_maps.MapPlan(2, *of_v, (1, 1, many, config.block_n)) for many in width_v]
    return [
        *host.piece_maps(0, *of_q, ROWS.value, width),
        *host.piece_maps(1, *of_k, config.block_n, width),
        *columns, *[None] * (host.MAX_PIECES - len(columns)),
        *host.piece_maps(3, *of_out, ROWS.value, width_v),
    ]  # fmt: skip


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: QuantizedOperands,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> tuple[launch.Launch, launch.Launch]:
    """Returns the launch that transposes V and that of the attention, from tensors, which may be without memory (device
    "meta") if they are only compiled."""
    transposed = torch.empty(transpose_values.shape(problem), dtype=operands.v.dtype, device=out.device)
    return _specify(problem, gpu, operands, transposed, out, lse, config)


def _specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: QuantizedOperands,
    transposed: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config,
) -> tuple[launch.Launch, launch.Launch]:
    sources = (*operands[:2], transposed, out)
    plans = _plans(problem, config, operands, transposed, out)
    descriptors = [None if plan is None else launch.Mapped(plan, sources[plan.source]) for plan in plans]
    tiles = query_tiles(problem, config.block_m)
    out_ptr = out if problem.packed else None
    attend = launch.Launch(
        kernel=hopper_flash_fwd_fp8_kernel,
        grid=min(tiles, gpu.num_sms or host.NUM_SMS),
        tensors=(*descriptors, out_ptr, lse, *operands[5:12], host.counter(out)),
        scalars=_scalars(problem, operands, config, tiles),
        constants=_constants(problem, config),
        # It begins while the preceding launch runs.
        options={"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True},
    )
    return transpose_values.specify(problem, gpu, operands, transposed), attend


def _scalars(problem: AttentionProblem, operands: QuantizedOperands, config: Config, tiles: int) -> list[int | float]:
    """Returns the run-time arguments after the pointers, in the kernel's order."""
    return [
        *host.of_schedule(problem, operands, tiles, 1, config.block_m, 1),
        *host.score_units(problem),
        *descales.strides_of_q(problem, operands.q_descale),
        *descales.strides_of_keys(operands.k_descale),
        *descales.strides_of_keys(operands.v_descale),
    ]


def _constants(problem: AttentionProblem, config: Config) -> dict[str, int | bool]:
    """Returns the compile-time arguments of the kernel, by name."""
    assert problem.descale_blocks is not None
    consumer, producer = registers(config)
    block_q, block_k, block_v = problem.descale_blocks
    return {
        "GROUPS": config.groups,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "Q_BLOCK": block_q,
        "K_BLOCK": block_k,
        "V_BLOCK": block_v,
        **host.options_of(problem),
        "OWN_OUT": True,
        "VALUES_FIRST": True,
        "PARTS": 1,
        "HEAD_DIM_V": 0,
        "HEADS": 1,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
    }
