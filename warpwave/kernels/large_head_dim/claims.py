"""What `large_head_dim` can run, and which calls `auto` leaves to `three_kernel`."""

from __future__ import annotations

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.kernels.large_head_dim import latent_host as latent
from warpwave.kernels.large_head_dim.choice import Call, configs
from warpwave.kernels.large_head_dim.config import column_parts
from warpwave.kernels.reasons import FEW_QUERIES_OF_WIDE_HEADS, MEANT_FROM
from warpwave.kernels.three_kernel import estimates as wide_heads
from warpwave.problem import AttentionProblem

MAX_HEAD_DIM = 8192
FEW_KEYS = 512
# The cost of three_kernel's scores in memory, in FLOP of the products. Each score moves 10 bytes through L2 (4 written,
# 4 read, 2 written and read as P), at some 100 FLOP in the time of a byte: 800 TFLOP/s and 8.0 TB/s of L2 on an H200.
# This is arithmetic; NVIDIA GPUs have a measured rule.
FLOPS_A_SCORE_IN_MEMORY = 1000


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = reasons.of_device(gpu)
    found += reasons.of_gradients(problem, "it computes no gradients; use three_kernel or eager, which do")
    found += reasons.of_dropout(problem)
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"it must be at most {MAX_HEAD_DIM}: use three_kernel or eager")
    found += reasons.of_pages(problem)
    if problem.page_size and problem.packed and problem.batch_invariant:
        found.append("keys are split by the longest of the packed sequences, so batch_invariant cannot be kept")
    found += precision.why_not(problem, gpu)
    if not found and not configs(problem, gpu):
        found.append(f"no tile fits the {gpu.smem_per_block_bytes / 1024:.0f} KiB of shared memory of a block")
    return found


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why three_kernel is faster, for calls that it can run.

    On NVIDIA it is, unless few queries read many keys, or sequences are packed, which its fastest products do not
    support. On other GPUs this is decided by arithmetic: if programs divide the columns of v, each recomputes all
    scores.
    """
    if problem.page_size or problem.batch_invariant or max(problem.head_dim, problem.head_dim_v) < MEANT_FROM:
        return []  # or another kernel runs first
    if gpu.vendor == "nvidia":
        few = problem.seqlen_q <= FEW_QUERIES_OF_WIDE_HEADS
        if few and problem.v_in_k and any(Call(problem, gpu).is_latent(rows) for rows in (latent.FEW, latent.MANY)):
            return []
        if few and wide_heads.are_known(problem, gpu):
            return wide_heads.why_not_fused(problem, gpu)
        if problem.packed or (few and problem.seqlen_k > FEW_KEYS):
            return []
        return [
            f"seqlen_q is {problem.seqlen_q}: for more than {FEW_QUERIES_OF_WIDE_HEADS} queries, or no more than "
            f"{FEW_KEYS} keys, three_kernel is faster: 2.8, 3.2, 5.3 and 14 times at head_dim 384, 512, 640 and 1024 "
            "with 2,048 queries (H200; 1.9 times at 512 with torch's products, which serve other cards)"
        ]
    parts = column_parts(problem, gpu)
    anew = 2 * (parts - 1) * problem.head_dim
    if anew <= FLOPS_A_SCORE_IN_MEMORY:
        return []
    return [
        f"head_dim_v {problem.head_dim_v} takes {parts} programs a tile, all computing the same scores: {anew} FLOP "
        f"a score more, and three_kernel's scores in memory cost the time of {FLOPS_A_SCORE_IN_MEMORY}"
    ]
