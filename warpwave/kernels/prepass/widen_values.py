"""A launch before `hopper/flash_fwd` that writes a V of 8 bits in float16, which holds every number of both float8
formats and of int8.

On Hopper the product of probabilities and values then runs in 16 bits. 8-bit wgmma would multiply at twice the rate,
but it reads both operands along the keys and adds with 14 bits, and probabilities would have to be rounded to 4 bits
(docs/notes/hopper_fp8.md).

Bound: memory: a byte is read and two are written for each element.
"""

from __future__ import annotations

import math

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments
from warpwave.kernels.groups import InUnits
from warpwave.operands import QuantizedOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import INTERPRETED, jit, tl

ELEMENTS = 4096  # of a program
UNSPECIALIZED = ["num_heads", "seqlen_k", "num_rows"]


@jit(do_not_specialize=UNSPECIALIZED)
def widen_values_kernel(
    v_tensor: InUnits,
    out_ptr,
    num_heads,
    seqlen_k,
    num_rows,
    UNIT: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAUNCHES_AHEAD: tl.constexpr,
):
    """Writes BLOCK_ROWS rows; a row is one head of a token, counted over heads, tokens and batches."""
    if LAUNCHES_AHEAD:  # the attention starts when all programs have started, and waits for their end
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    tokens = rows // num_heads
    begins = tokens // seqlen_k * v_tensor.stride_b + tokens % seqlen_k * v_tensor.stride_m
    begins += rows % num_heads * v_tensor.stride_h
    # Strides come in units, so that the compiler sees that rows are aligned, and reads 16 bytes at a time.
    offsets = begins[:, None] * UNIT + dims.to(tl.int64)[None, :] * v_tensor.stride_d
    inside = (rows < num_rows)[:, None] & (dims < HEAD_DIM_V)[None, :]
    values = tl.load(v_tensor.ptr + offsets, mask=inside)
    tl.store(out_ptr + (rows * HEAD_DIM_V)[:, None] + dims[None, :], values.to(tl.float16), mask=inside)


# Host -----------------------------------------------------------------------------------------------------------------


def specify(problem: AttentionProblem, gpu: Gpu, operands: QuantizedOperands, wide: torch.Tensor) -> launch.Launch:
    """Returns the launch that writes v into a contiguous float16 tensor of its shape."""
    *outer, inner = arguments.token_strides(operands.v)
    unit = math.gcd(16, *outer)
    width = wide.shape[-1]
    rows, block_d = math.prod(wide.shape[:-1]), arguments.padded(width)
    block_rows = max(1, ELEMENTS // block_d)
    return launch.Launch(
        kernel=widen_values_kernel,
        grid=max(1, -(-rows // block_rows)),
        tensors=(operands.v, wide),
        scalars=[
            *(stride // unit for stride in outer), inner, problem.num_heads_kv, max(1, wide.shape[-3]), rows,
        ],
        constants={
            "UNIT": unit, "HEAD_DIM_V": width, "BLOCK_ROWS": block_rows, "BLOCK_D": block_d,
            "LAUNCHES_AHEAD": gpu.arch == "sm_90" and not INTERPRETED,
        },
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )  # fmt: skip
