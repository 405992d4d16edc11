"""A launch before `flash_fwd` that splits float32 K and V into the bfloat16 parts of its products, once for all.

A tile then goes from memory to the matrix unit as it is, and not through the registers of every block that needs it.

Bound: memory: 4 bytes an element are read, and 4 or 6 written.
"""

from __future__ import annotations

import math

import torch

from warpwave import launch
from warpwave.hardware.gpu import Gpu
from warpwave.kernels.arguments import dot_precision, padded, token_strides
from warpwave.kernels.primitives import operand
from warpwave.kernels.triton_or_stub import jit, tl
from warpwave.problem import AttentionProblem, Operands

PARTS = {"bf16x3": 2, "bf16x6": 3}  # of an operand, where products are of bfloat16
SPLIT_UNSPECIALISED = [
    *("stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh", "stride_kp", "stride_vp", "seqlen"),
    *("num_rows", "num_heads"),
]
SPLIT_ROWS = 32  # rows of K or V that a program splits


@jit
def _split_tile(
    x_ptr, parts_ptr, tile, stride_b, stride_n, stride_h, stride_d, stride_p, seqlen, num_rows, num_heads,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS rows of K or V in parts, each part (batch, num_heads, seqlen, BLOCK_D), zero behind WIDTH."""
    rows = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    token, batch_head = rows % seqlen, rows // seqlen
    begins = batch_head // num_heads * stride_b + batch_head % num_heads * stride_h + token * stride_n
    inside = (rows < num_rows)[:, None] & (dims < WIDTH)[None, :]
    x = tl.load(x_ptr + (begins[:, None] + dims.to(tl.int64)[None, :] * stride_d), mask=inside, other=0.0)
    parts = operand(x, PRECISION, IS_NVIDIA)  # [BLOCK_ROWS, BLOCK_D]
    to = parts_ptr + (rows[:, None] * BLOCK_D + dims[None, :])
    for i in tl.static_range(2 if PRECISION == "bf16x3" else 3):
        tl.store(to + i * tl.cast(stride_p, tl.int64), parts[i].to(tl.bfloat16), mask=(rows < num_rows)[:, None])


@jit(do_not_specialize=SPLIT_UNSPECIALISED)
def split_kernel(
    k_ptr,
    v_ptr,
    k_parts_ptr,
    v_parts_ptr,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_kp,
    stride_vp,
    seqlen,
    num_rows,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Splits K and V, float32, into what products of PRECISION take: programs of even number K, the others V."""
    tile = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        _split_tile(
            k_ptr, k_parts_ptr, tile, stride_kb, stride_kn, stride_kh, stride_kd, stride_kp, seqlen, num_rows,
            num_heads, HEAD_DIM, BLOCK_ROWS, BLOCK_D, PRECISION, IS_NVIDIA,
        )  # fmt: skip
    else:
        _split_tile(
            v_ptr, v_parts_ptr, tile, stride_vb, stride_vn, stride_vh, stride_vd, stride_vp, seqlen, num_rows,
            num_heads, HEAD_DIM_V, BLOCK_ROWS, BLOCK_DV, PRECISION, IS_NVIDIA,
        )  # fmt: skip


def specify(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, device: torch.device
) -> tuple[launch.Launch, torch.Tensor, torch.Tensor]:
    """The launch, and where it leaves K and V: bfloat16 (parts, batch, num_heads_kv, seqlen_k, width), packed (parts,
    num_heads_kv, total_k, width), width head_dim padded to a power of two."""
    arithmetic = dot_precision(problem, gpu)
    *outer, tokens, heads, _ = operands.k.shape
    rows = (*outer, heads, tokens)
    widths = padded(problem.head_dim), padded(problem.head_dim_v)
    k, v = (torch.empty((PARTS[arithmetic], *rows, width), dtype=torch.bfloat16, device=device) for width in widths)
    split = launch.Launch(
        kernel=split_kernel,
        grid=2 * -(-math.prod(rows) // SPLIT_ROWS),
        tensors=(operands.k, operands.v, k, v),
        scalars=[
            *token_strides(problem, operands.k), *token_strides(problem, operands.v), k.stride(0), v.stride(0),
            rows[-1], math.prod(rows), problem.num_heads_kv,
        ],
        constants={
            "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "BLOCK_ROWS": SPLIT_ROWS,
            "BLOCK_D": widths[0], "BLOCK_DV": widths[1], "PRECISION": arithmetic,
            "IS_NVIDIA": gpu.vendor == "nvidia",
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )  # fmt: skip
    return split, k, v
