"""A launch before an attention kernel that splits float32 operands once into the bfloat16 parts of its products: K and
V for `flash_fwd`, Q as well for `hopper/flash_fwd`. scale_ahead.py makes float16 parts, which need a scale.

A tile then goes directly from memory to the matrix unit instead of through the registers of every block that needs it.

Bound: memory: 4 bytes per element are read, and 4 or 6 written.
"""

from __future__ import annotations

import math

import torch

from warpwave.gpu import Gpu
from warpwave.kernels.arguments import dot_precision, padded, strides_in
from warpwave.kernels.groups import InUnits
from warpwave.kernels.primitives import operand
from warpwave.operands import AnyOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

PARTS = {"bf16x3": 2, "bf16x6": 3}  # parts of an operand, if products are bfloat16
SPLIT_UNSPECIALIZED = [
    *("seqlen", "num_rows", "num_heads", "seqlen_q", "seqlen_k", "rows_q", "rows_k", "num_heads_q", "num_heads_kv"),
    *("tiles_q", "tiles_k"),
]
SPLIT_ROWS = 32  # rows of an operand per program


@jit
def _split_tile(
    tensor: InUnits, parts_ptr, tile, seqlen, num_rows, num_heads, rows_of_head, rows_of_part, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, ROW: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Splits BLOCK_ROWS rows of an operand, counted over heads and batches, into parts: rows of ROW elements, zero past
    WIDTH, `rows_of_head` of them from one head to the next and `rows_of_part` from one part to the next."""
    rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    batch_head, token = (rows // seqlen).to(tl.int64), (rows % seqlen).to(tl.int64)
    # Strides come in units, so that the compiler sees that rows are aligned, and reads 16 bytes at a time.
    begins = batch_head // num_heads * tensor.stride_b + batch_head % num_heads * tensor.stride_h
    begins = (begins + token * tensor.stride_m)[:, None] * UNIT + dims.to(tl.int64)[None, :] * tensor.stride_d
    there = (rows < num_rows)[:, None]
    x = tl.load(tensor.ptr + begins, mask=there & (dims < WIDTH)[None, :], other=0.0)
    parts = operand(x, PRECISION, IS_NVIDIA)  # [BLOCK_ROWS, BLOCK_D]
    to = parts_ptr + ((batch_head * rows_of_head + token) * ROW)[:, None] + dims[None, :]
    there = there & (dims < ROW)[None, :]
    for i in tl.static_range(2 if PRECISION == "bf16x3" else 3):
        tl.store(to + i * tl.cast(rows_of_part, tl.int64) * ROW, parts[i].to(tl.bfloat16), mask=there)


@jit(do_not_specialize=SPLIT_UNSPECIALIZED)
def split_kernel(
    k_tensor: InUnits,
    v_tensor: InUnits,
    k_parts_ptr,
    v_parts_ptr,
    seqlen,
    num_rows,
    num_heads,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Splits float32 K and V into the parts for products of PRECISION. Programs with even numbers split K, the others
    V."""
    tile = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        _split_tile(
            k_tensor, k_parts_ptr, tile, seqlen, num_rows, num_heads, seqlen,
            num_rows, UNIT, HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCK_D, PRECISION, IS_NVIDIA,
        )  # fmt: skip
    else:
        _split_tile(
            v_tensor, v_parts_ptr, tile, seqlen, num_rows, num_heads, seqlen,
            num_rows, UNIT, HEAD_DIM_V, BLOCK_DV, BLOCK_ROWS, BLOCK_DV, PRECISION, IS_NVIDIA,
        )  # fmt: skip


@jit(do_not_specialize=SPLIT_UNSPECIALIZED)
def split_all_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    q_parts_ptr,
    k_parts_ptr,
    v_parts_ptr,
    seqlen_q,
    seqlen_k,
    rows_q,
    rows_k,
    num_heads_q,
    num_heads_kv,
    tiles_q,
    tiles_k,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROW: tl.constexpr,
    ROW_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Splits float32 Q, K and V; the parts of a head are adjacent, like heads. The first `tiles_q` programs split Q,
    the next `tiles_k` K, the others V."""
    pid = tl.program_id(0)
    if pid < tiles_q:
        _split_tile(
            q_tensor, q_parts_ptr, pid, seqlen_q, rows_q, num_heads_q,
            seqlen_q * PARTS, seqlen_q, UNIT, HEAD_DIM, ROW, BLOCK_ROWS, BLOCK_D, PRECISION, IS_NVIDIA,
        )  # fmt: skip
    elif pid < tiles_q + tiles_k:
        _split_tile(
            k_tensor, k_parts_ptr, pid - tiles_q, seqlen_k, rows_k,
            num_heads_kv, seqlen_k * PARTS, seqlen_k, UNIT, HEAD_DIM, ROW, BLOCK_ROWS, BLOCK_D, PRECISION, IS_NVIDIA,
        )  # fmt: skip
    else:
        _split_tile(
            v_tensor, v_parts_ptr, pid - tiles_q - tiles_k, seqlen_k, rows_k,
            num_heads_kv, seqlen_k * PARTS, seqlen_k, UNIT, HEAD_DIM_V, ROW_V, BLOCK_ROWS, BLOCK_DV, PRECISION,
            IS_NVIDIA,
        )  # fmt: skip


OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def operand_strides(tensors: tuple[torch.Tensor, ...]) -> tuple[list[int], int]:
    """Returns the strides of the operands, in units except along head_dim; and the unit: their common divisor, up to
    4."""
    unit = math.gcd(4, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))
    return strides_in(unit, *tensors), unit


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, widths: tuple[int, int], device: torch.device
) -> tuple[launch.Launch, torch.Tensor, torch.Tensor]:
    """Returns the launch, and the tensors for the parts of K and V: bfloat16 (parts, batch, num_heads_kv, seqlen_k,
    width), packed (parts, num_heads_kv, total_k, width). `widths` of K and of V are powers of two, to which head_dim
    and head_dim_v are padded."""
    arithmetic = dot_precision(problem, gpu)
    *outer, tokens, heads, _ = operands.k.shape
    rows = (*outer, heads, tokens)
    k, v = (torch.empty((PARTS[arithmetic], *rows, width), dtype=torch.bfloat16, device=device) for width in widths)
    strides, unit = operand_strides((operands.k, operands.v))
    split = launch.Launch(
        kernel=split_kernel,
        grid=2 * -(-math.prod(rows) // SPLIT_ROWS),
        tensors=(operands.k, operands.v, k, v),
        scalars=[*strides, rows[-1], math.prod(rows), problem.num_heads_kv],
        constants={
            "UNIT": unit, "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "BLOCK_ROWS": SPLIT_ROWS,
            "BLOCK_D": widths[0], "BLOCK_DV": widths[1], "PRECISION": arithmetic,
            "IS_NVIDIA": gpu.vendor == "nvidia",
        },
        options=OPTIONS,
    )  # fmt: skip
    return split, k, v


def part_shapes(problem: AttentionProblem, parts: int, width: int, width_v: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of q, k and v in `parts` parts each: (batch, num_heads * parts, seqlen, width), with the parts
    of a head adjacent; packed (1, num_heads * parts, total, width)."""
    p = problem
    batch, rows, keys = (1, p.total_q, p.total_k) if p.packed else (p.batch, p.seqlen_q, p.seqlen_k)
    q = (batch, p.num_heads_q * parts, rows, width)
    return q, (batch, p.num_heads_kv * parts, keys, width), (batch, p.num_heads_kv * parts, keys, width_v)


def specify_all(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, arithmetic: str, width: int, width_v: int
) -> tuple[launch.Launch, tuple[torch.Tensor, ...]]:
    """Returns the launch that splits q, k and v for an arithmetic, and its output tensors (`part_shapes`): rows of
    `width` and `width_v` elements, multiples of 16, zero past head_dim and head_dim_v."""
    device = operands.q.device
    shapes = part_shapes(problem, PARTS[arithmetic], width, width_v)
    parts = tuple(torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = shapes[:2]
    heads_q, heads_kv = heads_q // PARTS[arithmetic], heads_kv // PARTS[arithmetic]
    rows_q, rows_k = batch * heads_q * seqlen_q, batch * heads_kv * seqlen_k
    tiles_q, tiles_k = -(-rows_q // SPLIT_ROWS), -(-rows_k // SPLIT_ROWS)
    strides, unit = operand_strides(operands[:3])
    split = launch.Launch(
        kernel=split_all_kernel,
        grid=tiles_q + 2 * tiles_k,
        tensors=(*operands[:3], *parts),
        scalars=[*strides, seqlen_q, seqlen_k, rows_q, rows_k, heads_q, heads_kv, tiles_q, tiles_k],
        constants={
            "UNIT": unit, "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "ROW": width,
            "ROW_V": width_v, "PARTS": PARTS[arithmetic], "BLOCK_ROWS": SPLIT_ROWS,
            "BLOCK_D": padded(width), "BLOCK_DV": padded(width_v), "PRECISION": arithmetic,
            "IS_NVIDIA": gpu.vendor == "nvidia",
        },
        options=OPTIONS,
    )  # fmt: skip
    return split, parts
