"""three_kernel's two launches on Hopper (hopper/products.py): maps, arguments, what they cannot. Host code alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from warpwave import launch
from warpwave.hardware.gpu import Gpu
from warpwave.kernels.arguments import lse_strides
from warpwave.kernels.hopper import launcher
from warpwave.kernels.hopper.launcher import MapPlan, has_map
from warpwave.kernels.hopper.products import hopper_scores_kernel, hopper_values_kernel
from warpwave.kernels.three_kernel_plan import Chunk, Plan
from warpwave.kernels.triton_or_stub import NO_TRITON
from warpwave.problem import AttentionProblem, Operands

TILE = (128, 256, 64)  # queries; keys, or columns of v; what a step sums over
SMEM_BYTES = 3 * 2 * (128 + 256) * 64 + 2 * 128 * 256 + 1024  # the ring, a tile on its way out, and barriers
NUM_SMS = 132  # of an H100 or H200 SXM, where no device is asked
FAR = 2**30  # a key behind all others, that adding a row to does not overflow


__all__ = ["NO_TRITON", "SMEM_BYTES", "bind", "cannot", "launches", "mappable"]


def cannot(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Why these launches cannot compute a problem there."""
    if gpu.capability != 90:
        return [f"'hopper' products are Hopper's, sm_90, and this is {gpu.name}"]
    reasons = []
    if problem.dtype == "float32":
        reasons.append("'hopper' products are of 16-bit operands")
    there = {
        "packed sequences": problem.packed,
        "a mask": problem.mask_shape is not None,
        "a bias": problem.bias_shape is not None,
        "ALiBi slopes": problem.alibi_shape is not None,
        "softcap": problem.softcap > 0,
        "a left side of a window": problem.window_size[0] >= 0,
    }
    reasons += [f"'hopper' products know nothing of {name}" for name, is_there in there.items() if is_there]
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 8:
            reasons.append(f"{name} is {size}; the copy engine takes multiples of 8")
    return reasons


def mappable(operands: Operands) -> Operands:
    """Operands that tensor maps can describe: what they cannot is copied."""
    copied = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name in ("q", "k", "v")
        if not has_map(tensor := getattr(operands, name))
    }
    return operands._replace(**copied) if copied else operands


def _of_tokens(source: int, tensor: torch.Tensor, tokens: int, rows: int, columns: int) -> MapPlan:
    """The map of a (batch, seqlen, head, width) tensor, of which `tokens` are read."""
    batch, _, heads, width = tensor.shape
    strides = (tensor.stride(0), tensor.stride(2), tensor.stride(1), 1)
    return MapPlan(source, (batch, heads, max(1, tokens), width), strides, (1, 1, rows, columns))


def _of_p(p: torch.Tensor, columns: int) -> MapPlan:
    heads, rows, width = p.shape
    return MapPlan(2, (1, heads, rows, width), (heads * rows * width, rows * width, width, 1), (1, 1, 64, columns))


def launches(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: Any, lse: Any, cut: Plan, chunk: Chunk,
    workspace: dict[str, Any], *, described: bool = True,
) -> list[tuple[launch.Launch, list[MapPlan | None], tuple[torch.Tensor, ...]]]:  # fmt: skip
    """Both launches of a chunk, with their maps and the four tensors that those are of. A test that runs them without
    Triton's compiler wants no descriptors."""
    q, k, v = operands[:3]
    p, factor, row_scale = workspace["p"], workspace["tile_max"], workspace["row_scale"]
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    high = FAR if band.high is None else band.high
    keys_end = min(problem.seqlen_k, problem.seqlen_q + high)  # behind it lies what no query sees, NaN perhaps
    sms, blocks, columns = (
        gpu.num_sms or NUM_SMS,
        -(-chunk.rows // TILE[0]),
        -(-problem.head_dim_v // TILE[1]),
    )
    on_gpu = out.device.type == "cuda"
    counter = launcher.counters(out.device).for_graphs if on_gpu else torch.empty(1, dtype=torch.int32, device="meta")
    options = {"num_warps": 4, "enable_fp_fusion": True}
    group = problem.num_heads_q // problem.num_heads_kv

    def described_by(maps: list[MapPlan | None], of: tuple[torch.Tensor, ...]) -> list[Any]:
        return [plan.descriptor(of[plan.source]) if described else plan for plan in maps if plan is not None]

    def scalars(columns: int) -> list[int]:
        return [chunk.first_head, chunk.row_begin, chunk.row_begin + chunk.rows, problem.seqlen_k, high,
                problem.num_heads_q, group, chunk.heads, blocks, columns, int(band.high is not None),
                cut.width // TILE[1], cut.rows]  # fmt: skip

    of_scores: list[MapPlan | None] = [
        _of_tokens(0, q, problem.seqlen_q, 64, TILE[2]),
        _of_tokens(1, k, keys_end, TILE[1], TILE[2]),
        _of_p(p, TILE[1]),
    ]
    of_values: list[MapPlan | None] = [
        _of_p(p, TILE[2]),
        _of_tokens(1, v, keys_end, TILE[2], TILE[1]),
        _of_tokens(3, out, problem.seqlen_q, 64, TILE[1]),
    ]
    sources = ((q, k, p, p), (p, v, p, out))
    scores = launch.Launch(
        kernel=hopper_scores_kernel,
        grid=min(sms, chunk.heads * blocks),
        tensors=(*described_by(of_scores, sources[0]), factor, row_scale, lse, operands.sinks, counter),
        scalars=[*lse_strides(problem), *scalars(1), -(-problem.head_dim // TILE[2]),
                 problem.softmax_scale * math.log2(math.e)],
        constants={"HAS_HIGH": band.high is not None, "HAS_SINKS": problem.has_sinks,
                   "WRITE_LSE": problem.return_lse},
        options=options,
    )  # fmt: skip
    values = launch.Launch(
        kernel=hopper_values_kernel,
        grid=min(sms, chunk.heads * blocks * columns),
        tensors=(*described_by(of_values, sources[1]), factor, row_scale, counter),
        scalars=scalars(columns),
        constants={},
        options=options,
    )
    return [(scores, of_scores, sources[0]), (values, of_values, sources[1])]


def bind(*arguments: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """`scores(q, k, p, factor, row_scale, lse, sinks)` and `values(p, v, out, factor, row_scale)`, compiled."""
    score, sum_values = (launcher.bind(*of_launch) for of_launch in launches(*arguments))

    def scores(q: Any, k: Any, p: Any, *pointers: Any) -> None:
        score((q, k, p, p), pointers)

    def values(p: Any, v: Any, out: Any, *pointers: Any) -> None:
        sum_values((p, v, p, out), pointers)

    return scores, values
