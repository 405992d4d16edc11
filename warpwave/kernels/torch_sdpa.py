"""torch's own scaled_dot_product_attention, on the CPU, for the calls that it computes as we define them.

torch's CPU kernel is a vectorized FlashAttention and several times faster than our tile-by-tile torch operations.
Differences in behavior are handled here:

    autocast           is off, as for every kernel of torch operations: out has the dtype of q.
    float32 settings   if the process lets float32 products drop bits, eager computes the call.
    sdpa_kernel        if the process switches a backend of torch's CPU off, eager computes the call.
    scale              torch multiplies the causal mask's minus infinity by the scale: with a scale of 0 the mask is
                       explicit.

    packed sequences   one call each.
    masks              a boolean mask, a bias of minus infinity and position may hide a pair at once; torch takes one
                       mask. Its own causal mask, aligned to the first key, is requested by is_causal.
    NaN and Inf        torch adds minus infinity to a hidden score and multiplies the values of hidden keys by 0: both
                       let NaN and Inf through; and a row whose scores hold one is 0 at some lengths. eager computes the
                       call unless q and k, and also v if something is hidden, are known to be finite.

It returns no log-sum-exp and supports no softcap, sinks or ALiBi: those are refused.

Bound: the CPU's vector units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpwave import precision
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import eager
from warpwave.kernels.arguments import Results, Run
from warpwave.kernels.cost import Cost
from warpwave.kernels.torch_products import keeps_float32, plainly
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Band

NAME = "torch_sdpa"
NEEDS_GPU = False
# Most pairs of a sequence for which a positional mask is built, a byte each and four in torch. Above, eager skips what
# such a mask hides and allocates nothing of its size.
MOST_PAIRS = 2**24
LARGEST_SCORE = torch.finfo(torch.float32).max
# The operator, not torch.nn.functional's name, which others may have replaced by a function that calls this package.
_scaled_dot_product_attention = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Config:
    """Empty: torch picks its own tiles."""


def bind(problem: AttentionProblem, operands: Operands, config: Config, out: torch.Tensor | None = None) -> Run:
    """Returns `run(operands, out=None) -> (out, None)`; torch's result is copied to a given out."""
    by_position = problem.causal is not None or problem.window_size != (-1, -1)
    if not problem.packed:  # lengths of packed sequences may be on the device only
        lengths = (problem.seqlen_q, problem.seqlen_k)
        by_position = by_position and _hides(problem.band(*lengths), *lengths)
    hides = by_position or problem.mask_shape is not None or problem.bias_shape is not None

    def run(operands: Operands, out: torch.Tensor | None = None) -> Results:
        device = operands.q.device
        with plainly(device):
            rounds = problem.dtype == "float32" and not keeps_float32(device)
            if rounds or not _chooses_freely() or not _is_tame(problem, operands, hides):
                tiles = eager.configs(problem, current_gpu(device))[0]
                return eager.forward(problem, operands, tiles, out)[0], None
            if not problem.packed:
                found = _attend(problem, *operands[:5])
                return found if out is None else out.copy_(found), None
            q, k, v = operands[:3]
            if out is None:
                out = q.new_empty((*q.shape[:-1], problem.head_dim_v))
            ends = zip(operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist(), strict=True)
            begin_q, begin_k = next(ends)
            for end_q, end_k in ends:
                rows, keys = slice(begin_q, end_q), slice(begin_k, end_k)
                out[rows] = _attend(problem, q[None, rows], k[None, keys], v[None, keys], None, None)[0]
                begin_q, begin_k = end_q, end_k
            return out, None

    return run


def _chooses_freely() -> bool:
    """Returns whether torch may take both of its ways on a CPU. `torch.nn.attention.sdpa_kernel` switches ways off, and
    without one that takes the call torch raises an error."""
    return torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()


def _hides(band: Band, seqlen_q: int, seqlen_k: int) -> bool:
    """Returns whether a positional mask hides a pair of a sequence."""
    return (band.low is not None and band.low > 1 - seqlen_q) or (band.high is not None and band.high < seqlen_k - 1)


def _is_tame(problem: AttentionProblem, operands: Operands, hides: bool) -> bool:
    """Returns whether all elements of q and k are so small, and none NaN, that every score is finite; if the call
    `hides` pairs, also whether all of v is finite."""
    if 0 in (operands.q.numel(), operands.k.numel()):
        return True
    q, k, *v = (max(-float(low), float(high)) for low, high in (t.aminmax() for t in operands[: 3 if hides else 2]))
    return max(v, default=0.0) < math.inf and q * k * problem.head_dim * max(1.0, problem.softmax_scale) < LARGEST_SCORE


def _attend(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attends to sequences of one length, (batch, seqlen, heads, width)."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if 0 in (seqlen_q, seqlen_k):
        return q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    band = problem.band(seqlen_q, seqlen_k)
    shown = mask
    causal = band == Band(None, 0) and mask is None and bias is None and problem.softmax_scale > 0
    if _hides(band, seqlen_q, seqlen_k) and not causal:
        of_band = _shown(band, seqlen_q, seqlen_k, q.device)
        shown = of_band if shown is None else shown & of_band
    added = shown
    if bias is not None:
        added = bias if shown is None else bias.masked_fill(~shown, -math.inf)
    if added is not None:
        added = added.expand(-1, -1, seqlen_q, seqlen_k)
    grouped = problem.num_heads_q != problem.num_heads_kv
    out = _scaled_dot_product_attention(q, k, v, added, 0.0, causal, scale=problem.softmax_scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def _shown(band: Band, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """Returns (1, 1, seqlen_q, seqlen_k), True where a positional mask shows a pair."""
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None]
    shown = torch.ones_like(distance, dtype=torch.bool)
    if band.low is not None:
        shown &= distance >= band.low
    if band.high is not None:
        shown &= distance <= band.high
    return shown[None, None]


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason torch's CPU kernel would not compute this call as defined."""
    reasons = precision.why_not(problem, gpu, ("ieee",))
    if not gpu.is_cpu:
        reasons.append("it takes CPU tensors only")
    if problem.requires_grad:
        reasons.append("its gradients are not implemented; eager's are")
    if problem.return_lse:
        reasons.append("torch returns no lse")
    if problem.dropout_p:
        reasons.append("torch's dropout drops other probabilities for a seed")
    for seqlen_q, seqlen_k in problem.counted_items():
        band = problem.band(seqlen_q, seqlen_k)
        if _hides(band, seqlen_q, seqlen_k) and band != Band(None, 0) and seqlen_q * seqlen_k > MOST_PAIRS:
            reasons.append(f"torch would need a mask of {seqlen_q:,} x {seqlen_k:,}, and computes what it hides")
            break
    for name, present in (
        ("softcap", problem.softcap > 0),
        ("sinks", problem.has_sinks),
        ("alibi_slopes", problem.alibi_shape is not None),
    ):
        if present:
            reasons.append(f"torch has no {name}")
    return reasons


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the work of the problem itself: torch does not state how it tiles."""
    return Cost(0, problem.flops, problem.exponentials, problem.compulsory_bytes, problem.rows * problem.num_heads_q)


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the only config."""
    return [Config()]
