"""Checks an output, on the same problem and inputs that are timed, before any time is shown.

The exact result in float64 is affordable on a sample: a few sequences and heads, and rows of them that always include
the first and the last. The reference for the error is a rounding model on the same sample (`reference.rounding_model`).
The error of any correct kernel matches it within a few percent, so every contender, ours or a peer's, must pass the
same two gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpwave.errors import InvalidInput
from warpwave.kernels import cache_descales
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.verify.reference import oracle, rounding_model

SAMPLED_BATCHES, SAMPLED_HEADS, SAMPLED_ROWS = 2, 4, 64
# Allowed factors over the model's error: for the largest element, and for the root mean square. In float32 the model is
# the plain formula, whose rounding error is not a minimum: any other order of summation differs from it.
MAX_LIMIT = {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0}
# The largest error of a few hundred rows is a single draw. It may include half a rounding step of the largest element
# that the model's own draw lacks (bfloat16, head_dim 96, causal: 2.16 times the model's in a sample, 1.0 in a whole
# call).
HALF_STEP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0}
RMS_LIMIT = {"float16": 1.25, "bfloat16": 1.25, "float32": 3.0}
FEW_ELEMENTS, RMS_LIMIT_OF_FEW = 4096, 2.0  # a mean over fewer elements is itself noisy


@dataclass(frozen=True)
class Verdict:
    """Whether an output may be timed, with its errors against float64.

    Attributes:
        passed: whether it passed every gate.
        reason: the gate that failed; empty if none did.
        rms_error, max_error: errors of this output; None if it could not be compared.
        model_rms_error, model_max_error: errors of the rounding model on the same sample.
        rows: number of query rows compared, over all sampled batches and heads.
    """

    passed: bool
    reason: str
    rms_error: float | None
    max_error: float | None
    model_rms_error: float
    model_max_error: float
    rows: int

    @property
    def error_ratio(self) -> float | None:
        """The RMS error divided by the rounding model's; a correct kernel has about 1."""
        return None if self.rms_error is None else self.rms_error / max(self.model_rms_error, 1e-300)


@dataclass(frozen=True)
class _Part:
    """One sequence's part of a sample.

    Attributes:
        take: selects it from the whole call's out, as (rows, heads, head_dim_v).
        exact, model: the same part of the exact result in float64, and of the rounding model.
    """

    take: Callable[[Tensor], Tensor]
    exact: Tensor
    model: Tensor


class Sample:
    """The exact result of a part of one call, and the rounding model's error on it.

    Args:
        problem, operands: the whole call, dense or packed, with any of its options.
        seed: seed for the choice of rows.

    Raises:
        InvalidInput: the call has dropout, which drops by position, and a sample of rows has other positions.
    """

    def __init__(self, problem: AttentionProblem, operands: Operands, *, seed: int = 0) -> None:
        if problem.dropout_p:
            raise InvalidInput(f"dropout_p is {problem.dropout_p}; samples are compared for calls without dropout only")
        self._problem, self._dtype = problem, operands.q.dtype
        self._shape = (*operands.q.shape[:-1], problem.head_dim_v)
        self._parts = [_part(problem, operands, sequence, seed) for sequence in _sequences(problem, SAMPLED_BATCHES)]
        self._largest = max(part.exact.abs().max().item() for part in self._parts)
        self._model_rms, self._model_max = self._errors([part.model for part in self._parts])
        self._elements = sum(part.exact.numel() for part in self._parts)
        self._rows = self._elements // problem.head_dim_v

    def judge(self, out: Tensor) -> Verdict:
        """Judges an output of the whole call, with the shape that `attention` or `attention_varlen` returns."""
        problem = self._problem
        if out.shape != self._shape or out.dtype != self._dtype:
            return self._verdict(f"out is {tuple(out.shape)} {out.dtype}, expected {self._shape} {self._dtype}")
        sampled = [part.take(out) for part in self._parts]
        if not all(part.isfinite().all() for part in sampled):
            return self._verdict("out has NaN or infinite elements")
        rms, largest = self._errors(sampled)
        budget = problem.error_budget
        if budget is not None:  # the caller's budget replaces the rounding model
            error = self.relative_error(out)
            kept = error <= budget
            return self._verdict("" if kept else f"relative error {error:.2e} is above {budget:g}", rms, largest)
        few = self._elements < FEW_ELEMENTS
        rms_limit = max(RMS_LIMIT[problem.dtype], RMS_LIMIT_OF_FEW if few else 0.0)
        max_limit = MAX_LIMIT[problem.dtype]
        reasons = []
        if rms > rms_limit * self._model_rms + 1e-7 * self._largest:
            reasons.append(f"RMS error {rms:.2e} is above {rms_limit:g} x {self._model_rms:.2e}, the rounding model's")
        if largest > max_limit * self._model_max + (1e-6 + HALF_STEP[problem.dtype]) * self._largest:
            reasons.append(f"error {largest:.2e} is above {max_limit:g} x {self._model_max:.2e}, the rounding model's")
        return self._verdict("; ".join(reasons), rms, largest)

    @property
    def rows(self) -> int:
        """Number of query rows compared, over all sampled batches and heads."""
        return self._rows

    def relative_error(self, out: Tensor) -> float:
        """Returns |out - exact| / |exact| over the sample, in Euclidean norms."""
        rms, _ = self._errors([part.take(out) for part in self._parts])
        size = sum(part.exact.square().sum().item() for part in self._parts)
        return rms / max(math.sqrt(size / self._elements), 1e-300)

    def _verdict(self, reason: str, rms: float | None = None, largest: float | None = None) -> Verdict:
        return Verdict(not reason, reason, rms, largest, self._model_rms, self._model_max, self._rows)

    def _errors(self, parts: Sequence[Tensor]) -> tuple[float, float]:
        errors = [out.double() - part.exact for out, part in zip(parts, self._parts, strict=True)]
        mean_square = sum(e.square().sum().item() for e in errors) / sum(e.numel() for e in errors)
        return math.sqrt(mean_square), max(e.abs().max().item() for e in errors)


def _part(problem: AttentionProblem, operands: Any, sequence: int, seed: int) -> _Part:
    """Returns some rows and heads of one sequence, computed as a separate call."""
    device = operands.q.device
    seqlen_q, seqlen_k = list(problem.items())[sequence]
    rows = _rows(seqlen_q, seed).to(device)
    heads = _spread(problem.num_heads_q, SAMPLED_HEADS).to(device)
    start_q, start_k = _start(operands.cu_seqlens_q, sequence), _start(operands.cu_seqlens_k, sequence)

    def take(x: Tensor) -> Tensor:
        return (x[start_q + rows] if problem.packed else x[sequence, rows])[:, heads]

    kv_heads = heads // (problem.num_heads_q // problem.num_heads_kv)
    at: Any = slice(start_k, start_k + seqlen_k) if problem.packed else sequence
    if problem.page_size:
        keys = torch.arange(seqlen_k, device=device)
        at = (operands.page_table[sequence, keys // problem.page_size].long(), keys % problem.page_size)
    factors = (operands.k_descale, operands.v_descale) if problem.page_size else (None, None)
    pools = zip(operands[1:3], factors, strict=True)
    k, v = (cache_descales.of_cells(x, factor, at, torch.float64)[:, kv_heads] for x, factor in pools)
    # The picked rows lose their positions, so positional masks become a boolean mask, and ALiBi becomes a bias.
    distance = torch.arange(seqlen_k, device=device) - rows[:, None]  # [rows, seqlen_k]
    visible = _visible(problem, operands, sequence, rows, heads, distance, (seqlen_q, seqlen_k))
    bias = _bias(operands, sequence, rows, heads, distance + seqlen_q - seqlen_k)
    sampled = replace(
        problem,
        batch=1,
        seqlen_q=len(rows),
        seqlen_k=seqlen_k,
        num_heads_q=len(heads),
        num_heads_kv=len(heads),
        causal=None,
        window_size=(-1, -1),
        mask_shape=tuple(visible.shape),
        bias_shape=None if bias is None else tuple(bias.shape),
        alibi_shape=None,
        packed=False,
        total_q=0,
        total_k=0,
        lengths=None,
        mask_visible_pairs=None,
        page_size=0,
        dtype_kv=None,
        kv_factors=None,
    )
    sinks = None if operands.sinks is None else operands.sinks[heads]
    cut = Operands(take(operands.q)[None], k[None], v[None], mask=visible, bias=bias, sinks=sinks)
    return _Part(take, oracle(sampled, cut).out[0], rounding_model(sampled, cut).out[0])


def _visible(
    problem: AttentionProblem,
    operands: Operands,
    sequence: int,
    rows: Tensor,
    heads: Tensor,
    distance: Tensor,
    lengths: tuple[int, int],
) -> Tensor:
    """Returns the conjunction of all masks: [1, 1 or heads, rows, seqlen_k]."""
    band = problem.band(*lengths)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if band.low is not None:
        visible &= distance >= band.low
    if band.high is not None:
        visible &= distance <= band.high
    shown = visible[None, None]
    return shown if operands.mask is None else shown & _cut(operands.mask, sequence, rows, heads)


def _bias(operands: Operands, sequence: int, rows: Tensor, heads: Tensor, distance: Tensor) -> Tensor | None:
    """Returns the sum of bias and ALiBi: [1, 1 or heads, 1 or rows, 1 or seqlen_k], in float64 if it has ALiBi."""
    bias = None if operands.bias is None else _cut(operands.bias, sequence, rows, heads)
    if operands.alibi_slopes is None:
        return bias
    slopes = operands.alibi_slopes[sequence] if operands.alibi_slopes.dim() == 2 else operands.alibi_slopes
    alibi = -slopes[heads].double()[:, None, None] * distance.abs()
    return alibi[None] if bias is None else bias + alibi


def _cut(x: Tensor, sequence: int, rows: Tensor, heads: Tensor) -> Tensor:
    """Returns the sample's part of a mask or bias. Axes of size 1 are kept, because they are broadcast."""
    x = x[sequence % x.shape[0]][None]
    x = x if x.shape[1] == 1 else x[:, heads]
    return x if x.shape[2] == 1 else x[:, :, rows]


def _start(offsets: Tensor | None, sequence: int) -> int:
    return 0 if offsets is None else int(offsets[sequence])


def _sequences(problem: AttentionProblem, count: int) -> list[int]:
    """Returns the sequences to sample, including the first and last, and for packed ones the longest and shortest."""
    chosen = _spread(problem.batch, count).tolist()
    if problem.packed:
        longest_first = sorted(range(problem.batch), key=lambda b: -math.prod(list(problem.items())[b]))
        chosen += [longest_first[0], longest_first[-1]]
    return sorted(set(chosen))


def _spread(size: int, count: int) -> Tensor:
    """Returns up to `count` different indices below `size`, including the first and the last."""
    return torch.linspace(0, size - 1, min(size, count)).round().long()


def _rows(seqlen: int, seed: int) -> Tensor:
    if seqlen <= SAMPLED_ROWS:
        return torch.arange(seqlen)
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(seqlen - 2, generator=generator)[: SAMPLED_ROWS - 2] + 1
    return torch.cat([torch.tensor([0, seqlen - 1]), inner]).sort().values
