"""A launch before `hopper/flash_fwd_fp8` that writes V transposed: [head_dim_v, keys] for each head.

wgmma multiplies 8-bit operands only if both run along the summed axis, which for P V is the keys. Place 4 l + 2 h + e
of 16 keys holds key 8 h + 2 l + e: a thread's probabilities, in wgmma's order of accumulators, are then in wgmma's
order of operands. Keys that no query sees are zeros, because their probability is 0 and 0 * NaN is NaN.

A sequence begins at a multiple of KEYS. In a packed call it owns the slots of KEYS keys that `in_use.item_of_slot`
states. Slots without a key in use are not written; only queries that see nothing read them.

Bound: memory: V is read once and written once. Four keys are packed into a word before they are exchanged between
threads.
"""

from __future__ import annotations

import math

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments
from warpwave.kernels.groups import InUnits, Sequences, Window
from warpwave.kernels.prepass.in_use import item_of_slot, rows_in_use
from warpwave.problem import AttentionProblem, QuantizedOperands
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import INTERPRETED, jit, tl

KEYS = tl.constexpr(128)  # keys of a slot: the longest tile of the attention
UNSPECIALIZED = ["batch", "num_heads", "num_slots"]


@jit
def _row_of_bytes(
    bytes_ptr, begin, keys, low_row, high_row, dims, stride_n, stride_d, WIDTH: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Loads a key's row of V for each word, as int32 of 8 bits; zeros outside the rows in use."""
    inside = ((keys >= low_row) & (keys < high_row))[:, None] & (dims < WIDTH)[None, :]
    # Strides come in units, so that the compiler sees that rows are aligned, and reads 16 bytes at a time.
    offsets = ((begin + keys).to(tl.int64) * stride_n)[:, None] * UNIT + dims.to(tl.int64)[None, :] * stride_d
    return tl.load(bytes_ptr + offsets, mask=inside, other=0).to(tl.int32)


@jit(do_not_specialize=UNSPECIALIZED)
def transpose_values_kernel(
    v_tensor: InUnits,
    sequences: Sequences,
    window: Window,
    out_ptr,
    batch,
    num_heads,
    num_slots,
    UNIT: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAUNCHES_AHEAD: tl.constexpr,
):
    """Writes one slot of one head, unless no query sees any of its keys. `num_slots` are those of a head."""
    if LAUNCHES_AHEAD:  # the attention starts when all programs have started, and waits for their end
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % num_heads
    place = tl.program_id(0) // num_heads
    if sequences.IS_VARLEN:
        item, first_slot = item_of_slot(place, sequences.cu_seqlens_k_ptr, sequences.total_k, batch, KEYS)
        row = head.to(tl.int64)
        slot = place
        first = (slot - first_slot) * KEYS
    else:
        item = place // num_slots
        row = item.to(tl.int64) * num_heads + head
        slot = place % num_slots
        first = slot * KEYS
    begin, low_row, high_row = rows_in_use(item, sequences, window, True)
    if (first < high_row) & (first + KEYS > low_row):
        words = tl.arange(0, KEYS // 4)
        dims = tl.arange(0, BLOCK_D)
        keys = first + words // 4 * 16 + words % 4 * 2
        bytes_ptr = v_tensor.ptr.to(tl.pointer_type(tl.uint8))
        bytes_ptr += (item.to(tl.int64) * v_tensor.stride_b + head.to(tl.int64) * v_tensor.stride_h) * UNIT
        packed = tl.zeros([KEYS // 4, BLOCK_D], tl.int32)
        for i in tl.static_range(4):
            row_of_word = _row_of_bytes(
                bytes_ptr,
                begin,
                keys + (i % 2 + i // 2 * 8),
                low_row,
                high_row,
                dims,
                v_tensor.stride_m,
                v_tensor.stride_d,
                HEAD_DIM_V,
                UNIT,
            )
            packed |= row_of_word << 8 * i
        rows = row * HEAD_DIM_V + dims
        to = (rows * num_slots + slot)[:, None] * (KEYS // 4) + words[None, :]
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + to, tl.trans(packed), mask=(dims < HEAD_DIM_V)[:, None])


# Host -----------------------------------------------------------------------------------------------------------------


def shape(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """Returns the shape of V transposed: (batch, num_heads_kv, head_dim_v, keys); packed, batch is 1."""
    p, keys = problem, KEYS.value
    if p.packed:
        return 1, p.num_heads_kv, p.head_dim_v, (p.total_k // keys + p.batch) * keys
    return p.batch, p.num_heads_kv, p.head_dim_v, max(1, -(-p.seqlen_k // keys)) * keys


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: QuantizedOperands, transposed: torch.Tensor
) -> launch.Launch:
    """Returns the launch that transposes v into a tensor of `shape`."""
    *outer, inner = arguments.token_strides(operands.v)
    unit = math.gcd(16, *outer)
    batch, heads, width, length = transposed.shape
    slots = length // KEYS.value
    block_d = arguments.padded(width)
    return launch.Launch(
        kernel=transpose_values_kernel,
        grid=batch * heads * slots,
        tensors=(operands.v, operands.cu_seqlens_q, operands.cu_seqlens_k, transposed),
        scalars=[
            *(stride // unit for stride in outer), inner, problem.seqlen_q, problem.seqlen_k, problem.total_q,
            problem.total_k, *arguments.window(problem), problem.batch, heads, slots,
        ],
        constants={
            "UNIT": unit, "HEAD_DIM_V": width, "BLOCK_D": block_d, "IS_VARLEN": problem.packed,
            **arguments.band_constants(problem),
            "LAUNCHES_AHEAD": gpu.arch == "sm_90" and not INTERPRETED,
        },
        options={"num_warps": max(1, block_d // 64), "num_stages": 1, "enable_fp_fusion": False},
    )  # fmt: skip
