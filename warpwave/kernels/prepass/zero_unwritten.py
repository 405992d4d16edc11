"""Zeroes the gradients that no other launch writes: those of tokens outside all sequences, and of tokens that the
positional mask hides entirely.

Bound: memory. Usually there are few such tokens, and the launch costs only its latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warpwave.kernels.arguments import band_constants, lengths
from warpwave.kernels.groups import Sequences, Window
from warpwave.kernels.prepass.in_use import begin_and_length, seen_by_position
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import jit, tl

MOST_PROGRAMS = 1024  # several share the hidden tokens of a sequence if there are fewer sequences
BLOCK = 8192  # elements that a program zeroes at once


@jit
def _zero(ptr, first, end, width, part, parts, BLOCK: tl.constexpr):
    """Zeroes every `parts`-th block of the tokens [first, end), from block `part` on. A token has `width` elements."""
    lanes = tl.arange(0, BLOCK)
    stop = end.to(tl.int64) * width
    for at in range(first.to(tl.int64) * width + part * BLOCK, stop, parts * BLOCK):
        tl.store(ptr + at + lanes, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=at + lanes < stop)


@jit
def _zero_gradient(ptr, width, sequences: Sequences, window: Window, batch, IS_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeroes the hidden tokens of a sequence, which `programs / batch` programs share, and this program's part of those
    before the first sequence and behind the last one."""
    item = tl.program_id(0) % batch
    part = tl.program_id(0) // batch
    parts = tl.num_programs(0) // batch
    begin_q, length_q = begin_and_length(
        sequences.cu_seqlens_q_ptr, item, sequences.seqlen_q, sequences.total_q, sequences.IS_VARLEN
    )
    begin_k, length_k = begin_and_length(
        sequences.cu_seqlens_k_ptr, item, sequences.seqlen_k, sequences.total_k, sequences.IS_VARLEN
    )
    low, high = seen_by_position(length_q, length_k, window, IS_KEYS)
    begin = begin_k if IS_KEYS else begin_q
    length = length_k if IS_KEYS else length_q
    longest = sequences.seqlen_k if IS_KEYS else sequences.seqlen_q
    if not sequences.IS_VARLEN:
        begin += item * longest
    _zero(ptr, begin, begin + low, width, part, parts, BLOCK)
    _zero(ptr, begin + tl.minimum(high, longest), begin + length, width, part, parts, BLOCK)
    if sequences.IS_VARLEN:
        total = sequences.total_k if IS_KEYS else sequences.total_q
        offsets_ptr = sequences.cu_seqlens_k_ptr if IS_KEYS else sequences.cu_seqlens_q_ptr
        first, _ = begin_and_length(offsets_ptr, 0, 0, total, True)
        last, of_last = begin_and_length(offsets_ptr, batch - 1, 0, total, True)
        _zero(ptr, tl.zeros_like(first), first, width, tl.program_id(0), tl.num_programs(0), BLOCK)
        _zero(ptr, last + of_last, total, width, tl.program_id(0), tl.num_programs(0), BLOCK)


@jit(do_not_specialize=["batch"])
def zero_unwritten_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    width_q,
    width_k,
    width_v,
    sequences: Sequences,
    window: Window,
    batch,
    BLOCK: tl.constexpr,
):
    """Zeroes hidden tokens and tokens outside all sequences, in the gradients that are given.

    Args:
        dq_ptr, dk_ptr, dv_ptr: (tokens, width), contiguous.
        width_q, width_k, width_v: elements of a token of all heads.
    """
    if dq_ptr is not None:
        _zero_gradient(dq_ptr, width_q, sequences, window, batch, False, BLOCK)
    if dk_ptr is not None:
        _zero_gradient(dk_ptr, width_k, sequences, window, batch, True, BLOCK)
    if dv_ptr is not None:
        _zero_gradient(dv_ptr, width_v, sequences, window, batch, True, BLOCK)


def specify(problem: AttentionProblem, gradients: Sequence[Any], offsets: Sequence[Any]) -> launch.Launch:
    """Returns the launch, with the arguments `(*gradients, *offsets)`.

    Args:
        gradients: contiguous, of q, k and v, of any number of heads; None if one is not wanted.
        offsets: of packed sequences of queries and of keys, else None.
    """
    widths = [0 if t is None else t.shape[-1] * t.shape[-2] for t in gradients]
    blocks = -(-max(t.numel() for t in gradients if t is not None) // BLOCK)
    parts = max(1, min(blocks, MOST_PROGRAMS // problem.batch))
    return launch.Launch(
        kernel=zero_unwritten_kernel,
        grid=problem.batch * parts,
        tensors=(*gradients, *offsets),
        scalars=[*widths, *lengths(problem), problem.batch],
        constants={"IS_VARLEN": problem.packed, **band_constants(problem), "BLOCK": BLOCK},
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False},
    )
