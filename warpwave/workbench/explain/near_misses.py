"""Finds small changes with which a preferred kernel would serve a call.

The changed call goes through the kernel's own `why_not`, so no rule is stated twice. A change keeps the result, or the
part of it that is needed: no gradients, zero padding, or a positional mask instead of a boolean one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem, Band, Causal

LARGEST_MASK = 1 << 27  # cells that are examined; more would take too long for `explain`


@dataclass(frozen=True)
class NearMiss:
    """A kernel that is preferred to the one that serves a call, and what would let it serve the call.

    Attributes:
        kernel: its name.
        changes: phrases; all of them are needed.
    """

    kernel: str
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel} would serve this call: {'; and '.join(self.changes)}"


class _Edit(NamedTuple):
    problem: AttentionProblem
    change: str


def nearest(problem: AttentionProblem, gpu: Gpu, ahead: list[Any], mask_band: Band | None = None) -> list[NearMiss]:
    """Returns, for each kernel in `ahead` that refuses the call, the smallest known change that it would accept. For a
    CPU that is a move to a GPU, and the first kernel stands for all."""
    paths = []
    for kernel in ahead:
        if not dispatch.why_not(kernel, problem, gpu):
            continue
        place = None
        if gpu.is_cpu and kernel.NEEDS_GPU:  # the oldest architecture stands for the GPUs that portable kernels run on
            place, on = Gpu.for_arch("sm_80"), "move q, k and v to a GPU (.cuda())"
        for edited in _edits(problem, mask_band):
            there = edited.problem
            if place is not None:  # which may have a kernel for the gradients
                there = dispatch.forward_of(there, place)[0]
            if not dispatch.why_not(kernel, there, place or gpu) and not _outrun(kernel, there, place or gpu):
                changes = tuple(text for text in (on if place else "", edited.change) if text)
                paths.append(NearMiss(kernel.NAME, changes))
                break
        if place is not None and paths:
            break
    return paths


def _outrun(kernel: Any, problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether "auto" would still prefer another kernel for the changed call."""
    if max(problem.head_dim, problem.head_dim_v) < getattr(kernel, "MEANT_FROM", 0):
        return True
    return hasattr(kernel, "outrun") and bool(kernel.outrun(problem, gpu))


def _edits(problem: AttentionProblem, mask_band: Band | None) -> Iterator[_Edit]:
    """Yields changed calls with the same result (or the needed part of it), fewest changes first."""
    makers = [_without_grad, _without_mask_of(mask_band), _without_lse, _with_other_precision]
    makers += [functools.partial(padded_to, multiple=multiple) for multiple in (8, 16, 32, 64, 128)]
    yield _Edit(problem, "")
    for number in (1, 2, 3):
        for chosen in itertools.combinations(makers, number):
            edited: _Edit | None = _Edit(problem, "")
            for make in chosen:
                assert edited is not None
                step = make(edited.problem)
                if step is None:
                    edited = None
                    break
                edited = _Edit(step.problem, "; and ".join(filter(None, (edited.change, step.change))))
            if edited is not None:
                yield edited


def _without_grad(problem: AttentionProblem) -> _Edit | None:
    if not problem.requires_grad:
        return None
    return _Edit(replace(problem, requires_grad=False), "call under torch.no_grad() if gradients are not needed")


def _without_lse(problem: AttentionProblem) -> _Edit | None:
    return (
        _Edit(replace(problem, return_lse=False), "drop return_lse if lse is not used") if problem.return_lse else None
    )


def _with_other_precision(problem: AttentionProblem) -> _Edit | None:
    if problem.precision == "default":
        return None
    return _Edit(replace(problem, precision="default"), 'use precision="default", which keeps float32 accuracy')


def _without_mask_of(band: Band | None) -> Callable[[AttentionProblem], _Edit | None]:
    def make(problem: AttentionProblem) -> _Edit | None:
        changed = as_positional(problem, band)
        return None if changed is None else _Edit(changed[0], changed[1])

    return make


def padded_to(problem: AttentionProblem, multiple: int) -> _Edit | None:
    """Returns the call with head_dim and head_dim_v padded to a multiple, and how; None if they are multiples."""
    d, dv = (-(-size // multiple) * multiple for size in (problem.head_dim, problem.head_dim_v))
    if (d, dv) == (problem.head_dim, problem.head_dim_v):
        return None
    steps = []
    if d != problem.head_dim:
        steps.append(f"pad q and k with zeros from head_dim {problem.head_dim} to {d}")
    if dv != problem.head_dim_v:
        steps.append(f"pad v from {problem.head_dim_v} to {dv} and cut the output back")
    change = f"{', '.join(steps)}, with softmax_scale={problem.softmax_scale:.6g} given"
    return _Edit(replace(problem, head_dim=d, head_dim_v=dv), change)


# Masks that are positional --------------------------------------------------------------------------------------------


def positional_band(mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> Band | None:
    """Returns the band that equals a boolean mask for every batch and head; None if there is none or the mask is too
    large. Reads the mask, which waits for its device.

    Args:
        mask: (batch, num_heads_q, seqlen_q, seqlen_k), axes of size 1 broadcast.
    """
    if not mask.numel() or mask.numel() > LARGEST_MASK or not seqlen_q or not seqlen_k:
        return None
    plane = mask[0, 0].expand(seqlen_q, seqlen_k)
    keys, rows = torch.arange(seqlen_k, device=mask.device), torch.arange(seqlen_q, device=mask.device)
    seen = plane.any(1)
    if not bool(seen.any()):
        return None
    first = plane.int().argmax(1)
    last = seqlen_k - 1 - plane.flip(1).int().argmax(1)
    begins, ends = seen & (first > 0), seen & (last < seqlen_k - 1)  # rows whose edge lies inside
    low = int((first - rows)[begins][0]) if bool(begins.any()) else None
    high = int((last - rows)[ends][0]) if bool(ends.any()) else None
    distance = keys - rows[:, None]
    band = torch.ones_like(plane)
    if low is not None:
        band &= distance >= low
    if high is not None:
        band &= distance <= high
    return Band(low, high) if bool((mask == band).all()) else None


def as_positional(problem: AttentionProblem, band: Band | None) -> tuple[AttentionProblem, str] | None:
    """Returns the call without its boolean mask, and how to write it; None if no positional mask equals the mask, or
    the mask was not examined.

    Args:
        band: what the mask is equal to, from `positional_band`.
    """
    if problem.mask_shape is None:
        return None
    without = replace(problem, mask_shape=None, mask_visible_pairs=None)
    if problem.mask_visible_pairs == without.visible_pairs:
        return without, "drop the mask: it hides nothing" + (" beyond the positional mask" if problem.has_band else "")
    if band is None or problem.has_band:
        return None
    offset = problem.seqlen_k - problem.seqlen_q
    low, high = band
    if low is None and high == offset:
        return replace(without, causal=Causal()), "pass causal=True instead of the mask, which is equal to it"
    if low is None and high == 0:
        changed = replace(without, causal=Causal("top_left"))
        return changed, 'pass causal=Causal("top_left") instead of the mask, which is equal to it'
    left, right = -1 if low is None else offset - low, -1 if high is None else high - offset
    if left < -1 or right < -1 or (low is not None and left < 0) or (high is not None and right < 0):
        return None
    changed = replace(without, window_size=(left, right))
    return changed, f"pass window_size=({left}, {right}) instead of the mask, which is equal to it"
