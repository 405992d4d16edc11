"""A launch before gradients that zeroes those of the tokens that no later launch writes: tokens of no sequence, and
those that the positional mask hides entirely.

Bound: memory. Mostly there are few such tokens or none, and the launch takes its latency.
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

MOST_PROGRAMS = 1024  # unless there are more sequences: a long hidden one is divided between the idle multiprocessors
BLOCK = 8192  # elements that a program zeroes at once


@jit
def _zero(ptr, first, end, width, part, parts, BLOCK: tl.constexpr):
    """Zeroes the tokens [first, end) of a gradient, `width` elements each, one block in `parts`."""
    lanes = tl.arange(0, BLOCK)
    stop = end.to(tl.int64) * width
    for at in range(first.to(tl.int64) * width + part * BLOCK, stop, parts * BLOCK):
        tl.store(ptr + at + lanes, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=at + lanes < stop)


@jit
def _unwritten(item, sequences: Sequences, window: Window, batch, IS_KEYS: tl.constexpr):
    """Returns [first, seen_begin) and [seen_end, end) of the tokens of a sequence, and between it and its neighbors,
    that no launch writes."""
    begin_q, length_q = begin_and_length(
        sequences.cu_seqlens_q_ptr, item, sequences.seqlen_q, sequences.total_q, sequences.IS_VARLEN
    )
    begin_k, length_k = begin_and_length(
        sequences.cu_seqlens_k_ptr, item, sequences.seqlen_k, sequences.total_k, sequences.IS_VARLEN
    )
    low, high = seen_by_position(length_q, length_k, window, IS_KEYS)
    begin = begin_k if IS_KEYS else begin_q
    longest = sequences.seqlen_k if IS_KEYS else sequences.seqlen_q
    if sequences.IS_VARLEN:
        total = sequences.total_k if IS_KEYS else sequences.total_q
        offsets_ptr = sequences.cu_seqlens_k_ptr if IS_KEYS else sequences.cu_seqlens_q_ptr
        next_begin, _ = begin_and_length(offsets_ptr, tl.minimum(item + 1, batch - 1), 0, total, True)
        first = tl.where(item == 0, 0, begin)
        end = tl.where(item == batch - 1, total, next_begin)
    else:
        begin += item * longest
        first = begin
        end = begin + longest
    return first, begin + low, begin + tl.minimum(high, longest), end


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
    """Zeroes the tokens of one sequence, and those before the first or after it, in gradients that are given.

    Args:
        dq_ptr, dk_ptr, dv_ptr: (tokens, width), contiguous.
        width_q, width_k, width_v: elements of a token of all heads.
    """
    item = tl.program_id(0) % batch
    part = tl.program_id(0) // batch
    parts = tl.num_programs(0) // batch
    if dq_ptr is not None:
        first, seen_begin, seen_end, end = _unwritten(item, sequences, window, batch, False)
        _zero(dq_ptr, first, seen_begin, width_q, part, parts, BLOCK)
        _zero(dq_ptr, seen_end, end, width_q, part, parts, BLOCK)
    first, seen_begin, seen_end, end = _unwritten(item, sequences, window, batch, True)
    if dk_ptr is not None:
        _zero(dk_ptr, first, seen_begin, width_k, part, parts, BLOCK)
        _zero(dk_ptr, seen_end, end, width_k, part, parts, BLOCK)
    if dv_ptr is not None:
        _zero(dv_ptr, first, seen_begin, width_v, part, parts, BLOCK)
        _zero(dv_ptr, seen_end, end, width_v, part, parts, BLOCK)


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
