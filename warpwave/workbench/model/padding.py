"""The products that a kernel computes beyond those of visible pairs: repeated, padded, hidden and ragged ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem


@dataclass(frozen=True)
class Padding:
    """Factors of excess products: scores computed again (`again`, and `again_exp` of their exponentials), padded
    columns (`heads`), hidden pairs, and ragged ends of sequences."""

    again: float
    again_exp: float
    heads: float
    hidden: float
    ragged: float


def padding(problem: AttentionProblem, kernel: Any, config: Any, gpu: Gpu, cost: Cost, gradients: bool) -> Padding:
    """Splits a kernel's excess products into factors, by evaluating its `cost` on simpler calls.

    Args:
        gradients: whether the kernel computes gradients, whose products are others.
    """
    if not cost.flops:
        return Padding(1.0, 1.0, 1.0, 1.0, 1.0)
    again = cost.flops / (cost.flops - cost.repeated_flops)
    again_exp = cost.exponentials / max(1, cost.exponentials - cost.repeated_exponentials)
    whole = replace(
        problem,
        batch=1,
        seqlen_q=1536,  # a multiple of every block_m and block_n
        seqlen_k=1536,
        num_heads_q=1,
        num_heads_kv=1,
        causal=None,
        window_size=(-1, -1),
        mask_shape=None,
        mask_visible_pairs=None,
        bias_shape=None,
        packed=False,
        total_q=0,
        total_k=0,
        lengths=None,
        page_size=0,
    )

    def padded(of: AttentionProblem, found: Cost) -> float:
        """Returns the products that are computed once, over those of visible pairs."""
        return (found.flops - found.repeated_flops) / of.work(gradients).flops

    heads = max(1.0, padded(whole, kernel.cost(whole, gpu, config)))
    total = max(1.0, padded(problem, cost) / heads)
    if not problem.has_band:
        if problem.mask_visible_pairs is None:
            return Padding(again, again_exp, heads, 1.0, total)
        shown = replace(problem, mask_visible_pairs=None).visible_pairs / max(1, problem.visible_pairs)
        return Padding(again, again_exp, heads, min(total, shown), max(1.0, total / shown))
    bare = replace(problem, causal=None, window_size=(-1, -1), mask_shape=None, mask_visible_pairs=None)
    ragged = min(total, max(1.0, padded(bare, kernel.cost(bare, gpu, config)) / heads))
    return Padding(again, again_exp, heads, total / ragged, ragged)
