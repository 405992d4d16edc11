"""Gradients of exact attention by recomputation, portable Triton: every target of Triton, head_dim up to 256.

Only out and the log-sum-exp of the forward are kept. One launch owns queries and walks keys, one owns keys and walks
queries; each recomputes the probabilities of a tile.

    P = exp(S - lse);   dV = P^T dO;   dS = P * (dO V^T - delta);   dQ = scale * dS K;   dK = scale * dS^T Q
    delta = rowsum(dO * out) - dlse

Dao, "FlashAttention-2" (2023), algorithm 2, with a separate loop for dQ instead of atomic additions: seven products
instead of five, each sum in a fixed order, and no later pass over dQ. The gradient of a bias takes a third launch.

If one tile holds a sequence, a joint launch computes all gradients with five products, and reads neither out nor the
log-sum-exp (joint.py). If one tile holds all queries or all keys, another joint launch walks the others (one_side.py).

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency for small grids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.kernels.arguments import straightener
from warpwave.kernels.flash_bwd.choice import fitting, space
from warpwave.kernels.flash_bwd.config import Config, arithmetic_of, check, parts_of_bias, smem_bytes, walked_of
from warpwave.kernels.flash_bwd.launches import Outputs, Results, specify, tensors_of
from warpwave.kernels.torch_products import keeps_float32
from warpwave.operands import DIFFERENTIABLE, AnyOperands, differentiable
from warpwave.problem import AttentionProblem, by_kind
from warpwave.runtime import launch, scratch
from warpwave.runtime.bounded import Bounded

NAME = "flash_bwd"
NEEDS_GPU = True
GRADIENTS = DIFFERENTIABLE
MAX_HEAD_DIM = 256
PARTS_OF = ("dq_parts", "dk_parts", "dv_parts")
MAX_LAYOUTS = 16  # layouts of out and dout for which a bound call keeps its launches

Gradients = tuple[torch.Tensor | None, ...]  # of q, k, v, bias, alibi_slopes, sinks
Run = Callable[[AnyOperands, Results, torch.Tensor, torch.Tensor | None], Gradients]


# Calls ----------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, wanted: Sequence[bool], config: Config) -> Run:
    """Prepares the gradients of one problem and layout.

    Args:
        operands: tensors of the shapes, strides and alignment of those that `run` takes.
        wanted: which gradients are wanted, of q, k, v, bias, alibi_slopes and sinks.

    Raises:
        ValueError: the config cannot compute them.

    Returns:
        `run(operands, results, dout, dlse)`: the gradients of sum(out * dout) + sum(lse * dlse), each contiguous, in
        the shape and dtype of its operand, None if not wanted. `results` are out and lse of any exact forward
        kernel; out and dout have any strides. It compiles when a layout of out and dout first occurs.
    """
    check(problem, config)
    wanted = [want and t is not None for want, t in zip(wanted, differentiable(operands), strict=True)]
    if _is_empty(problem):
        return lambda operands, results, dout, dlse: _of_nothing(problem, operands, results[1], dlse, wanted)
    straight = straightener(operands, in_groups=True)
    allocate = _allocator(problem, gpu, operands, wanted, config)
    bound: Bounded[tuple[Any, ...], list[launch.Launcher]] = Bounded(MAX_LAYOUTS)

    def run(operands: AnyOperands, results: Results, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        straightened, (out, lse) = straight(operands), results
        out, dout = _with_unit_stride(out), _with_unit_stride(dout.to(out.dtype))
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        outputs = allocate()
        given = [t for t in (out, lse, dout, dlse) if t is not None]
        key = (out.stride(), dout.stride(), *[t.data_ptr() & 15 == 0 for t in given])
        launchers = bound.get(key)
        if launchers is None:
            specs = specify(problem, gpu, straightened, (out, lse), dout, dlse, outputs, config)
            launchers = [launch.bind(spec) for spec in specs]
            bound.put(key, launchers)
        tensors = tensors_of(problem, straightened, (out, lse), dout, dlse, outputs, config)
        for launcher, taken in zip(launchers, tensors, strict=True):
            launcher(*taken)
        return _gradients(operands, outputs, wanted)

    return run


def _with_unit_stride(t: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, copied if its rows are strided, because rows are read in whole lines of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _is_empty(problem: AttentionProblem) -> bool:
    """Returns whether there is no query or no key."""
    sizes = (problem.total_q, problem.total_k) if problem.packed else ()
    return 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, *sizes)


def _of_nothing(
    problem: AttentionProblem,
    operands: AnyOperands,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Sequence[bool],
) -> Gradients:
    """Returns the gradients of a call in which no query sees a key: zeros, and for a sink the gradients of the
    log-sum-exp, which equals the sink."""
    found: list[torch.Tensor | None] = [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if want else None
        for t, want in zip(differentiable(operands), wanted, strict=True)
    ]
    *_, wants_sinks = wanted
    if wants_sinks and dlse is not None:
        heads = 0 if problem.packed else 1
        of_rows = torch.where(lse == -math.inf, 0.0, dlse)
        found[-1] = of_rows.transpose(0, heads).flatten(1).sum(1).to(operands.sinks.dtype)
    return tuple(found)


def _allocator(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, wanted: Sequence[bool], config: Config
) -> Callable[[], Outputs]:
    """Returns `allocate()`."""
    device, sources = operands.q.device, (*operands[:3], operands.bias)
    makers = [
        scratch.maker(t.shape, t.dtype, device) if want else None for t, want in zip(sources, wanted, strict=False)
    ]
    rows = (problem.total_q,) if problem.packed else (problem.batch, problem.seqlen_q)
    of_heads = (problem.batch, problem.num_heads_q, -(-problem.seqlen_q // config.dq.block_m))
    needs: dict[str, scratch.Need] = {}
    walked = walked_of(problem, config) if config.splits > 1 else ""
    for name, side, t, want in zip(PARTS_OF, ("keys", "queries", "queries"), operands[:3], wanted, strict=False):
        if want and side == walked:
            needs[name] = ((config.splits, *t.shape), torch.float32)
    if not config.joint:
        needs["statistics"] = ((*rows[:-1], problem.num_heads_q, rows[-1]), torch.int64)
    for name, want in zip(("of_slopes", "of_sinks"), wanted[4:], strict=True):
        if want:
            needs[name] = (of_heads, torch.float32)
    if wanted[3] and (parts := parts_of_bias(problem, gpu, config)) > 1:
        needs["of_bias"] = ((parts, *operands.bias.shape), torch.float32)
        makers[3] = None
    workspace = scratch.memory(list(needs.values()), device)

    def allocate() -> Outputs:
        gradients = [None if make is None else make() for make in makers]
        return Outputs(*gradients, **dict(zip(needs, workspace(), strict=True)))

    return allocate


def _gradients(operands: AnyOperands, outputs: Outputs, wanted: Sequence[bool]) -> Gradients:
    dbias, dslopes, dsinks = outputs.dbias, None, None
    *_, wants_slopes, wants_sinks = wanted
    if outputs.of_bias is not None:
        dbias = outputs.of_bias.sum(0).to(operands.bias.dtype)
    if wants_slopes:
        of_slopes, slopes = outputs.of_slopes, operands.alibi_slopes
        dslopes = of_slopes.sum((0, 2) if slopes.dim() == 1 else 2).to(slopes.dtype)
    if wants_sinks:
        dsinks = outputs.of_sinks.sum((0, 2)).to(operands.sinks.dtype)
    return (*outputs[:3], dbias, dslopes, dsinks)


# What it can run ------------------------------------------------------------------------------------------------------


@by_kind
def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot compute the gradients of the problem; empty if it can."""
    found = reasons.of_device(gpu)
    if problem.page_size:
        found.append("a paged cache takes no part in autograd")
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"a row of K or V must fit one tile, {MAX_HEAD_DIM} at most")
    found += precision.why_not(problem, gpu)
    if not found and not all(fitting(problem, gpu, owns_keys) for owns_keys in (False, True)):
        needed = min(smem_bytes(problem, gpu, Config(tile, tile)) for tile in space())
        found.append(reasons.of_shared_memory(needed, gpu))
    return found


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why three_kernel's gradients are faster: parts of float32 operands of wide heads fill the registers.

    Times of this kernel over three_kernel's, whose products are torch's, full and causal with eight heads
    (2026-11-27-h200-float32-gradients.log, three-kernel-parts.log). Above head_dim 128: 9.6 to 13 at 2 x 2048 full, 6.5
    causal; 2.8 to 3.4 at 1 x 512; 0.3 to 0.4 at 8 x 128, where torch's operations bind. At 72 to 128 from 1 x 1024 on:
    0.9 to 3.6 full, 0.9 to 2.1 causal. three_kernel starts torch's operations for each batch item, so the rule reads
    the scores of an item. Windows were not timed: torch's products compute part of what they hide.
    """
    if problem.dtype != "float32" or gpu.vendor != "nvidia" or arithmetic_of(problem, gpu) == "tf32":
        return []
    if not keeps_float32(torch.device("cuda")):
        return []  # three_kernel would compute its products in float64, which consumer cards do at 1/64 of the rate
    width, scores = max(problem.head_dim, problem.head_dim_v), problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    has_window = problem.window_size != (-1, -1)
    if width > 128 and scores >= (2**24 if has_window else 2**21):
        return ["float32 above head_dim 128: three_kernel's gradients are 2.8 to 13 times as fast"]
    if width > 64 and scores >= 2**23 and not has_window and (gpu.has_mma or gpu.capability == 90):
        return ["float32 at head_dim 65 to 128: three_kernel's gradients are 0.9 to 3.6 times as fast"]
    return []
