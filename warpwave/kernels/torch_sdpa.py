"""torch's own scaled_dot_product_attention, on the CPU, for the calls it computes exactly as we define them.

torch's CPU kernel is a vectorised FlashAttention and several times faster than our tile-by-tile torch operations.
What it does not have, or does differently, is refused here: it returns no log-sum-exp, knows no softcap, sinks,
windows or ALiBi, aligns a causal mask to the first key, and lets a NaN behind a boolean mask through.

Bound: the CPU's vector units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from warpwave import precision
from warpwave.hardware.gpu import Gpu
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem, Operands

NAME = "torch_sdpa"
NEEDS_GPU = False


@dataclass(frozen=True)
class Config:
    """Nothing to choose: torch picks its own tiles."""


def bind(
    problem: AttentionProblem, operands: Operands, config: Config
) -> Callable[[Operands], tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns `run(operands) -> (out, None)`."""
    causal, scale = problem.causal is not None, problem.softmax_scale
    grouped = problem.num_heads_q != problem.num_heads_kv

    def run(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (t.transpose(1, 2) for t in operands[:3])
        with torch.no_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None

    return run


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Every reason torch's CPU kernel would not compute what was asked."""
    reasons = precision.why_not(problem, gpu, ("ieee",))
    if not gpu.is_cpu:
        reasons.append("it serves CPU tensors only")
    if problem.requires_grad:
        reasons.append("its gradients are not wired up; eager's are")
    if problem.return_lse:
        reasons.append("torch returns no lse")
    if problem.packed:
        reasons.append("packed sequences would have to be padded")
    if (
        problem.causal is not None
        and problem.causal.alignment == "bottom_right"
        and problem.seqlen_q != problem.seqlen_k
    ):
        reasons.append("torch aligns a causal mask to the first key")
    for name, present in (
        ("window_size", problem.window_size != (-1, -1)),
        ("softcap", problem.softcap > 0),
        ("sinks", problem.has_sinks),
        ("alibi_slopes", problem.alibi_shape is not None),
    ):
        if present:
            reasons.append(f"torch has no {name}")
    if problem.mask_shape is not None or problem.bias_shape is not None:
        reasons.append("behind a mask or bias, torch lets the NaN of a key that no query sees reach the output")
    return reasons


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """The work of the problem itself: torch does not say how it tiles."""
    return Cost(0, problem.flops, problem.exponentials, problem.compulsory_bytes, problem.rows * problem.num_heads_q)


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The one there is."""
    return [Config()]
