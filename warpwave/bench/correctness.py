"""Is an output right? Asked on the very problem and inputs about to be timed, before any time is shown.

The exact result in float64 is affordable on a sample: a few batches and heads, and rows of them that always include
the first and the last. The yardstick is the rounding model on the same sample (`reference.rounding_model`), which a
correct kernel's error matches within a few per cent, whoever wrote it; so every contender, ours or a peer's, must
pass the same two gates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpwave.problem import AttentionProblem, Operands
from warpwave.reference import oracle, rounding_model

SAMPLED_BATCHES, SAMPLED_HEADS, SAMPLED_ROWS = 2, 4, 64
# How far beyond the model's error an output may be: in its largest element, and in the root of the mean square. In
# float32 the model is the plain formula, whose rounding is no floor: any other order of summation differs from it.
MAX_LIMIT = {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0}
RMS_LIMIT = {"float16": 1.25, "bfloat16": 1.25, "float32": 3.0}
FEW_ELEMENTS, RMS_LIMIT_OF_FEW = 4096, 2.0  # a mean over fewer elements is itself noisy


@dataclass(frozen=True)
class Verdict:
    """Whether an output may be timed, and the errors that say so, against float64.

    Attributes:
        passed: every gate held.
        reason: what failed, empty when nothing did.
        rms_error, max_error: of this output; None where it could not be compared.
        model_rms_error, model_max_error: of the rounding model on the same sample.
        rows: query rows compared, over all sampled batches and heads.
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
        """RMS error in units of the rounding model's: 1 is as good as rounding allows."""
        return None if self.rms_error is None else self.rms_error / max(self.model_rms_error, 1e-300)


class Sample:
    """The exact result of part of one call, and the yardstick for it.

    Args:
        problem, operands: the whole call.
        seed: of the choice of rows.
    """

    def __init__(self, problem: AttentionProblem, operands: Operands, *, seed: int = 0) -> None:
        if problem.packed:
            raise ValueError("a sample of a packed call is not defined yet")
        self._problem, self._dtype = problem, operands.q.dtype
        device = operands.q.device
        self._at = (
            _spread(problem.batch, SAMPLED_BATCHES).to(device),
            _rows(problem.seqlen_q, seed).to(device),
            _spread(problem.num_heads_q, SAMPLED_HEADS).to(device),
        )
        sampled_problem, sampled_operands = self._cut(operands)
        self._exact = oracle(sampled_problem, sampled_operands).out
        self._largest = self._exact.abs().max().item()
        self._model_rms, self._model_max = self._errors(rounding_model(sampled_problem, sampled_operands).out)
        self._rows = self._exact.numel() // problem.head_dim_v

    def judge(self, out: Tensor) -> Verdict:
        """Compare an output of the whole call, `(batch, seqlen_q, num_heads_q, head_dim_v)`."""
        problem = self._problem
        shape = (problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim_v)
        if out.shape != shape or out.dtype != self._dtype:
            return self._verdict(f"out is {tuple(out.shape)} {out.dtype}, expected {shape} {self._dtype}")
        sampled = self._take(out)
        if not sampled.isfinite().all():
            return self._verdict("out has NaN or infinite elements")
        rms, largest = self._errors(sampled)
        few = self._exact.numel() < FEW_ELEMENTS
        rms_limit = max(RMS_LIMIT[problem.dtype], RMS_LIMIT_OF_FEW if few else 0.0)
        max_limit = MAX_LIMIT[problem.dtype]
        reasons = []
        if rms > rms_limit * self._model_rms + 1e-7 * self._largest:
            reasons.append(f"RMS error {rms:.2e} is above {rms_limit:g} x {self._model_rms:.2e}, the rounding model's")
        if largest > max_limit * self._model_max + 1e-6 * self._largest:
            reasons.append(f"error {largest:.2e} is above {max_limit:g} x {self._model_max:.2e}, the rounding model's")
        return self._verdict("; ".join(reasons), rms, largest)

    def _verdict(self, reason: str, rms: float | None = None, largest: float | None = None) -> Verdict:
        return Verdict(not reason, reason, rms, largest, self._model_rms, self._model_max, self._rows)

    def _errors(self, out: Tensor) -> tuple[float, float]:
        error = out.double() - self._exact
        return error.square().mean().sqrt().item(), error.abs().max().item()

    def _take(self, x: Tensor) -> Tensor:
        batches, rows, heads = self._at
        return x[batches][:, rows][:, :, heads]

    def _cut(self, operands: Operands) -> tuple[AttentionProblem, Operands]:
        """The sample as a call of its own. Rows picked out of their order keep their band as a boolean mask."""
        problem = self._problem
        batches, rows, heads = self._at
        kv_heads = heads // (problem.num_heads_q // problem.num_heads_kv)
        offset = torch.arange(problem.seqlen_k, device=rows.device) - rows[:, None]
        band = problem.band(problem.seqlen_q, problem.seqlen_k)
        visible = torch.ones_like(offset, dtype=torch.bool)
        if band.low is not None:
            visible &= offset >= band.low
        if band.high is not None:
            visible &= offset <= band.high
        mask = visible[None, None]
        sampled = replace(
            problem,
            batch=len(batches),
            seqlen_q=len(rows),
            num_heads_q=len(heads),
            num_heads_kv=len(heads),
            causal=None,
            window_size=(-1, -1),
            mask_shape=tuple(mask.shape),
        )
        k, v = (x[batches][:, :, kv_heads] for x in (operands.k, operands.v))
        return sampled, Operands(q=self._take(operands.q), k=k, v=v, mask=mask)


def _spread(size: int, count: int) -> Tensor:
    """Up to `count` different indices below `size`, the first and the last among them."""
    return torch.linspace(0, size - 1, min(size, count)).round().long()


def _rows(seqlen: int, seed: int) -> Tensor:
    if seqlen <= SAMPLED_ROWS:
        return torch.arange(seqlen)
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(seqlen - 2, generator=generator)[: SAMPLED_ROWS - 2] + 1
    return torch.cat([torch.tensor([0, seqlen - 1]), inner]).sort().values
