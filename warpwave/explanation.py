"""`explain`: which kernel serves a call, why not the others, and what the call costs at the least."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from warpwave import dispatch
from warpwave.api import _options
from warpwave.checks import describe_call
from warpwave.errors import InvalidType, UnsupportedProblem
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem, Causal, Operands


@dataclass(frozen=True)
class Explanation:
    """What would run a call, and why.

    Args:
        problem: the call.
        gpu: where it would run.
        kernel: the kernel that serves it, or None where the one asked for cannot.
        config: its config.
        config_source: `"default"` or `"given"`.
        reasons: kernel name -> why it cannot run the call, in the order of preference; empty for those that can.
        cost: what the kernel moves and computes, tiles and padding included; None without a kernel.
    """

    problem: AttentionProblem
    gpu: Gpu
    kernel: str | None
    config: Any
    config_source: str
    reasons: dict[str, list[str]]
    cost: Cost | None

    @property
    def flops(self) -> int:
        """Of the two products over visible pairs."""
        return self.problem.flops

    @property
    def compulsory_bytes(self) -> int:
        """Each needed input read once, each output written once."""
        return self.problem.compulsory_bytes

    def __str__(self) -> str:
        problem = self.problem
        lines = [
            f"call      {problem.describe()}",
            f"device    {self.gpu.name} ({self.gpu.arch})",
            f"kernel    {self.kernel or 'none'}" + (f", {self.config} ({self.config_source})" if self.kernel else ""),
        ]
        estimated = "" if problem.pairs_are_exact else " (estimated: the mask or the lengths are on the device)"
        pairs = problem.visible_pairs
        everything = problem.num_heads_q * sum(sq * sk for sq, sk in problem.items())
        lines += [
            f"pairs     {pairs:,} of {everything:,} (query, key) pairs are visible{estimated}",
            f"work      {problem.flops / 1e9:,.3f} GFLOP = 2 x pairs x (head_dim {problem.head_dim} + head_dim_v "
            f"{problem.head_dim_v}); {problem.exponentials / 1e6:,.3f} M exponentials",
            f"traffic   {problem.compulsory_bytes / 1e6:,.3f} MB at the least; {problem.intensity:,.1f} FLOP a byte",
        ]
        if self.cost is not None:
            cost = self.cost
            lines.append(
                f"tiles     {cost.flops / 1e9:,.3f} GFLOP computed, {cost.flops / max(1, problem.flops):.2f} x the "
                f"work; {cost.read_bytes / 1e6:,.3f} MB read through the caches"
                + (f"; {cost.blocks:,} blocks" if cost.blocks else "")
                + (f"; {cost.workspace_bytes / 1e6:,.1f} MB workspace" if cost.workspace_bytes else "")
            )
        for name, why in self.reasons.items():
            if why:
                lines += [f"not {name}: {reason}" for reason in why]
            elif name != self.kernel:
                lines.append(f"not {name}: it could, and comes behind {self.kernel}")
        return "\n".join(lines)


def explain(
    q: torch.Tensor | AttentionProblem,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str = "default",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
    gpu: Gpu | None = None,
) -> Explanation:
    """Says what a call would run and why, without running it.

    Args:
        q: the call's first tensor, followed by its other arguments just as `attention` or `attention_varlen` takes
            them; or an `AttentionProblem`, for a call that needs no tensors. Boolean masks and packed offsets are
            read, so that pairs are counted exactly; that waits for the device.
        gpu: the device to explain for; that of the tensors, or for a problem this machine's, if None.

    Returns:
        An `Explanation`; `print` it, or read its fields.

    Raises:
        InvalidInput, InvalidType: as the call itself would. What the call would refuse as unsupported is explained.
    """
    if isinstance(q, AttentionProblem):
        problem = q
        gpu = gpu or current_gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        operands = Operands(q, k, v, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k)
        options = _options(operands, causal, window_size, softcap, softmax_scale, precision, return_lse)
        problem = describe_call(operands, options._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k))
        problem = _counted(problem, operands)
        gpu = gpu or current_gpu(q.device)
    reasons = dispatch.reasons_against(problem, gpu)
    try:
        choice = dispatch.choose(problem, gpu, kernel, config)
    except (UnsupportedProblem, InvalidType):
        if kernel not in reasons or not reasons[kernel]:
            raise
        return Explanation(problem, gpu, None, None, "", {kernel: reasons.pop(kernel), **reasons}, None)
    cost = choice.kernel.cost(problem, gpu, choice.config)
    return Explanation(problem, gpu, choice.kernel.NAME, choice.config, choice.config_source, reasons, cost)


def _counted(problem: AttentionProblem, operands: Operands) -> AttentionProblem:
    """The problem with what only the tensors' contents tell: packed lengths, and the pairs a boolean mask shows."""
    if problem.packed:
        lengths = [offsets.diff().tolist() for offsets in operands[7:9]]
        return replace(problem, lengths=tuple(zip(*lengths, strict=True)))
    if operands.mask is None:
        return problem
    shown = operands.mask
    if problem.has_band:
        low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
        rows = torch.arange(problem.seqlen_q, device=shown.device)[:, None]
        distance = torch.arange(problem.seqlen_k, device=shown.device) - rows
        shown = shown.expand(*shown.shape[:2], problem.seqlen_q, problem.seqlen_k)
        if low is not None:
            shown = shown & (distance >= low)
        if high is not None:
            shown = shown & (distance <= high)
    everything = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    return replace(problem, mask_visible_pairs=int(shown.sum()) * everything // max(1, shown.numel()))
