"""The accuracy gates: the allowed error of a kernel against R, in units of the errors of M and N.

    A   peer rule   max e(a) <= c * max e(N) + 2 * (one output rounding), e(x) = |x - R|; for sums over all rows the
                    unit is max(max e(M), max e(N))
    B1  maximum     max e(a) <= c * max e(M) + 1e-6 * max |R|; dq and dk in float32 add the cancellation of dP - delta
    B2  RMS         rms e(a) <= c * rms e(M) + 1e-7 * max |R|
    B3  row         rms e(a) of each row <= c * max(rms e(M) of that row, median over rows) + 1e-6 * max |R|; backward,
                    rms e(N) of that row / 2 is a third unit, and the floor is 4e-6; for rows of at most 8 columns,
                    c is doubled, and shares of the row are at least shares of the RMS of R; for rows of one column, the
                    floor includes one output rounding
    C   LSE         |lse - lse_R| <= 1e-5 + 2e-6 * max visible |logit|, and -inf exactly where R has it; precision
                    "tf32" adds c (of B1) * max |lse_M - lse_R|; float8: 2e-3 + 2^-17 * head_dim * max visible
                    |logit| before softcap, bias and ALiBi

The constants c are in `TABLE`. No other place of the test code has a tolerance.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from warpwave.operands import AnyOperands
from warpwave.problem import AttentionProblem
from warpwave.workbench.verify import reference
from warpwave.workbench.verify.reference import Forward, Gradients

Direction = Literal["forward", "backward"]


class Limits(NamedTuple):
    """The constant c of each gate."""

    peer: float
    maximum: float
    rms: float
    row: float


# What the kernels of this repository need on a GPU, over 20 seeds a type, is in calibration.json beside this file
# (`python -m tests.conformance.calibrate`); test_cases.py holds the two together. docs/accuracy.md derives what differs
# from 16 bit.
TABLE: dict[tuple[Direction, str], Limits] = {
    ("forward", "16-bit"): Limits(peer=2.0, maximum=2.0, rms=1.25, row=3.0),
    ("backward", "16-bit"): Limits(peer=2.0, maximum=2.0, rms=1.3, row=10.0),
    # No rounding of out to 10 bits puts a floor under the error of a row, as it does in 16 bits.
    ("forward", "tf32"): Limits(peer=2.0, maximum=2.0, rms=1.25, row=10.0),
    # Autograd does not round what N's backward multiplies: N is no peer here, and of no help to B3.
    ("backward", "tf32"): Limits(peer=math.inf, maximum=3.0, rms=1.3, row=20.0),
    # M is N in float32, so B1 is the peer rule, and a second one with c = 2 would undo its 4. tf32x3 needs those 4, its
    # products being a few 2^-22 off; and so does a flash backward, which takes P from a rounded LSE.
    # What M leaves out is the product of the remainders, which is as large as what rounding them costs; and as in tf32
    # nothing floors the error of a row.
    ("forward", "bf16x3"): Limits(peer=math.inf, maximum=4.0, rms=2.0, row=15.0),
    # N, in float32, is no peer. B1 to B3 allow for Hopper's sums and for M's draw of the probabilities (below). With
    # int8 q and k the roundings are those of 16 bits.
    ("forward", "float8"): Limits(peer=math.inf, maximum=2.0, rms=1.25, row=3.0),
    ("forward", "int8"): Limits(peer=math.inf, maximum=2.0, rms=1.25, row=3.0),
    ("forward", "float32"): Limits(peer=math.inf, maximum=4.0, rms=3.0, row=10.0),
    ("backward", "float32"): Limits(peer=math.inf, maximum=4.0, rms=3.0, row=10.0),
}
# Gradients of one number a head are sums over all rows, and so is that of a bias of few numbers. Their few errors are
# too few for a ratio near 1: the ratio of two normal draws exceeds c with a probability of 2 / (pi c). B1 and B2 fail
# where M's draw is small, and A where N's is. These gradients are held to 16 times the larger of both errors, which a
# correct kernel exceeds in one call of 2,000. For a float32 bias of one number, over 60 seeds (Hopper's backward on a
# CPU, bfloat16), B1 needs up to 49 and exceeds 2 for 11 seeds, A needs up to 22 of N, and this rule up to 8.2. From 16
# numbers on, B1 and B2 need 1.6 at most, and from 64 on 0.6.
SUMS = ("dalibi_slopes", "dsinks")
FEW_SUMS = 64  # a bias's gradient of fewer numbers
PEER_OF_SUMS = 16.0
PEER_WITH_SOFTCAP = 3.0
PEER_BACKWARD_SOFTCAP_FLOOR = 3e-4
SMALL = 4096  # with fewer elements an RMS is noisy, and so is that of a row
RMS_SMALL = 2.0
# dk and dv are sums over queries, and dk has the errors of dS that dq has. A few queries leave both a few errors,
# however many the keys: of 212 calls of 9 and 24 rows (sharp, bfloat16, Hopper's backward on a CPU), dq needs up to
# 1.35 times M's RMS, dk up to 1.39, at the least 0.5; from 129 rows on both need at most 1.08.
OF_KEYS, FEW_ROWS = ("dk", "dv"), 64
# The RMS of a row of two columns is two draws: three of 3,185 drawn calls needed 3.1 to 3.5 in 16 bits (H200). Of 8
# columns, one of 248 needed 3.3 forward (H200), and one of 219 needed 11 of 10 backward (Hopper's on a CPU).
# A row of one number has one output rounding, of up to half a last place, and M's may be near 0: two of 960 drawn calls
# of head_dim_v 1 on an H200 needed 7.3 and 9.8. The floor of such rows therefore includes one output rounding.
FEW_COLUMNS, ROW_OF_FEW = 8, 2.0  # c of B3 is so many times as large where a row has at most so many
MAXIMUM_FLOOR, RMS_FLOOR, ROW_FLOOR = 1e-6, 1e-7, 1e-6  # in units of max |R|
# In float32 a rounded logit is an error of N and of the kernel that does not average out: where few keys are visible
# it is one draw each, as is a sum over all rows. B1 to B3, and A of such a sum, allow for it: this share of R for each
# unit of the largest logit. And where a sink leads, an error common to a row's logits does not cancel: then out may be
# as far off as the LSE.
LOGIT_SHARE = 2.0**-24
# A logit is itself a sum, of head_dim terms: in order and of one sign (all logits near -40) its partial sums' roundings
# add up to a deviation of sqrt(head_dim) / 3 roundings of the whole. A row that two keys share passes it on, one draw,
# to its result, whatever M's own order drew. B3 allows three such deviations.
SUM_SHARE = 2.0**-24  # of the row, for each unit of sqrt(head_dim) * largest logit
# In bf16x3 the logits themselves are off by what M leaves out, 2^-22 of the largest one in the RMS; and a row that two
# keys share passes on half of that, whatever M drew for it. B3 allows four such deviations and a half.
REMAINDER_SHARE = 2.0**-20
UNDERFLOW = 1024 * torch.finfo(torch.float32).tiny  # GPUs may flush what is smaller, in each of a thousand terms
# The error of a row of dq is that of one number, its delta, and M's draw of it may be arbitrarily lucky: e(a) / e(M)
# has the tail of a ratio of two normal variables. N draws again, at some four times M's error. In float32, where N is
# M, dP - delta cancels to what the row's result says nothing about: hence a floor in units of the largest result.
NAIVE_ROW_SHARE = 1 / 2
# Of the largest number: how far gradients in 16 bits may be whose sums have another order, or come from another launch.
# A last place of bfloat16 is up to 2^-7; the most seen in 28 calls of 30 runs is 0.0017 (2026-11-25-h100-turns.json).
OTHER_ORDER = 0.01
ROW_FLOOR_BACKWARD = 4e-6
# The same cancellation in a whole gradient. Where a row sees one key, N subtracts a number from itself and is exact,
# and a kernel's dP and delta are two sums of head_dim_v products in different orders. The roundings of such a sum, in
# order and of either sign, add up to a deviation of 0.28 * 2^-24 |dout| |v|: the partial sum of t products has a
# deviation of sqrt(t) times a product's, its rounding one of 0.4 * 2^-24 of that, and the sum of t is head_dim_v^2 / 2.
# Two sums have 0.4 * 2^-24, and B1 of dq and dk allows five such deviations (`reference.cancellation`).
CANCELLATION_SHARE = 2.0 * 2.0**-24
# Tensor cores truncate as they accumulate, 16 products a step: 256 products of one sign end up to 1.4e-6 of their sum
# off, and 670 of them 3.7e-6, cuBLAS's as ours (H200, drawn calls). The bound grows with head_dim from there on.
LSE_ABSOLUTE, LSE_RELATIVE, LSE_HEAD_DIM = 1e-5, 2e-6, 256
# Hopper's matrix unit adds 32 float8 products and the sum so far in one step. It cuts each to 2^-13 of the largest, and
# the new sum too. So a score's error grows with the number of steps: emulated, up to 5.5 * 2^-13 of the largest score
# at head_dim 256 if terms have either sign, and 13.5 * 2^-13 if they have one (docs/accuracy.md).
LSE_ABSOLUTE_FLOAT8, LSE_RELATIVE_FLOAT8 = 2e-3, 2.0**-17  # the latter for each column of head_dim
# M rounds float8 probabilities relative to the maximum of a row, a kernel relative to the maximum so far: another draw
# of 4 bits. In a row that two keys share, one is exact, and the other moves the result by up to 2^-4 * 1/3.
PROBABILITY_SHARE = 2.0**-6  # of the row
# A row that two keys share also passes on half of a score's error, which is seldom the largest: an eighth, emulated.
# Beside a v of 16 bits M does not round probabilities to float8, and B1 and B2 allow the same share for the scores'
# errors: without it, `flash_fwd` and `hopper/flash_fwd` need up to 3.2 and 1.37 (calibration_quantized.json).
SCORE_SHARE = 1 / 4  # of the row, for each unit of the LSE's bound


class Gate(NamedTuple):
    """The outcome of one gate.

    Attributes:
        name: "B2 RMS of out".
        error: what the kernel showed.
        allowed: what the gate permits.
        needed: the constant c with which the gate would just have held; for C, the share of what is allowed.
    """

    name: str
    error: float
    allowed: float
    needed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # false for NaN


class Verdict(NamedTuple):
    """The outcomes of all gates that apply."""

    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def __str__(self) -> str:
        lines = []
        for name, error, allowed, needed in self.gates:
            state = "ok  " if error <= allowed else "FAIL"
            lines.append(f"  {state} {name:<24} {error:.3e} of {allowed:.3e} allowed, needs c = {needed:.3g}")
        return "\n".join(["gates hold" if self.passed else "gates fail", *lines])


class ForwardReferences(NamedTuple):
    """R, M and N of one call."""

    exact: Forward
    model: Forward
    naive: Tensor


def forward_references(problem: AttentionProblem, operands: AnyOperands) -> ForwardReferences:
    return ForwardReferences(
        reference.oracle(problem, operands),
        reference.rounding_model(problem, operands),
        reference.naive(problem, operands),
    )


def judge_forward(
    problem: AttentionProblem, references: ForwardReferences, out: Tensor, lse: Tensor | None = None
) -> Verdict:
    """Compares a kernel's out, and its lse if it has one, with the references."""
    exact, model, naive = references
    gates = _judge(problem, "forward", "out", exact.out, model.out, naive, out, _largest(problem, exact))
    if lse is not None:
        gates.append(_judge_lse(problem, exact, model, lse))
    return Verdict(tuple(gates))


class BackwardReferences(NamedTuple):
    """The gradients of R, M and N of one call."""

    exact: Gradients
    model: Gradients
    naive: Gradients
    largest_logit: float
    cancellation: tuple[float, float]  # of dq and dk in float32, in units of the rounding of dP - delta


def backward_references(
    problem: AttentionProblem, operands: AnyOperands, dout: Tensor, dlse: Tensor | None
) -> BackwardReferences:
    return BackwardReferences(
        reference.oracle_gradients(problem, operands, dout, dlse),
        reference.rounding_model_gradients(problem, operands, dout, dlse),
        reference.naive_gradients(problem, operands, dout, dlse),
        reference.oracle(problem, operands).largest_logit,
        reference.cancellation(problem, operands, dout) if problem.dtype == "float32" else (0.0, 0.0),
    )


def judge_backward(problem: AttentionProblem, references: BackwardReferences, got: Gradients) -> Verdict:
    """Compares a kernel's gradients with those of the references; gradients that are None are left out."""
    gates = []
    cancelled = dict(zip(("dq", "dk"), references.cancellation, strict=True))
    for name, r, m, n, a in zip(Gradients._fields, *references[:3], got, strict=True):
        if a is not None:
            assert r is not None and m is not None and n is not None
            allowed = CANCELLATION_SHARE * cancelled.get(name, 0.0)
            gates += _judge(problem, "backward", name, r, m, n, a, references.largest_logit, allowed)
    return Verdict(tuple(gates))


def limits(problem: AttentionProblem, direction: Direction) -> Limits:
    """Returns the constants for a problem."""
    # Gradients are computed without splitting, so they are held to float32's row.
    arithmetic = _arithmetic(problem)
    found = TABLE[direction, "float32" if (direction, arithmetic) == ("backward", "bf16x3") else arithmetic]
    return found._replace(peer=max(found.peer, PEER_WITH_SOFTCAP)) if problem.softcap else found


def _arithmetic(problem: AttentionProblem) -> str:
    if problem.is_quantized:
        return "int8" if problem.dtype == "int8" else "float8"
    if problem.dtype != "float32":
        return "16-bit"
    return {"tf32": "tf32", "fp16x1": "tf32", "bf16x3": "bf16x3"}.get(problem.precision, "float32")


def _judge(
    problem: AttentionProblem,
    direction: Direction,
    name: str,
    exact: Tensor,
    model: Tensor,
    naive: Tensor,
    got: Tensor,
    largest_logit: float,
    cancelled: float = 0.0,
) -> list[Gate]:
    if (got.shape, got.dtype) != (model.shape, model.dtype):
        raise AssertionError(f"{name} is {tuple(got.shape)} {got.dtype}; it must be {tuple(model.shape)} {model.dtype}")
    if got.numel() == 0:
        return []
    c = limits(problem, direction)
    e_got, e_model, e_naive = ((x.double() - exact).abs() for x in (got, model, naive))
    largest = exact.abs().max().item()

    arithmetic, floor = _arithmetic(problem), 0.0
    is_sums = name in SUMS or (name == "dbias" and got.numel() < FEW_SUMS)
    if c.peer < math.inf or is_sums:
        rounded = exact.to(got.dtype)
        floor = 2 * ((rounded + 0.3) - 0.3 - rounded).abs().max().item()
    if direction == "backward" and problem.softcap:
        floor += PEER_BACKWARD_SOFTCAP_FLOOR
    logit_share = 0.0
    if problem.has_sinks and arithmetic in ("float32", "bf16x3", "float8"):
        logit_share = _lse_allowance(problem, largest_logit)
    elif arithmetic == "float8" and problem.dtype_of_v in ("float16", "bfloat16"):
        logit_share = SCORE_SHARE * _lse_allowance(problem, largest_logit)
    elif arithmetic in ("float32", "bf16x3"):
        logit_share = LOGIT_SHARE * largest_logit
    if is_sums:
        floor += logit_share * largest
        unit = torch.maximum(e_model.max(), e_naive.max())
        return [_gate(f"A peer rule of {name}", e_got.max(), unit, PEER_OF_SUMS, floor)]
    gates = []
    if c.peer < math.inf:
        gates.append(_gate(f"A peer rule of {name}", e_got.max(), e_naive.max(), c.peer, floor))

    floor = (MAXIMUM_FLOOR + logit_share) * largest + cancelled + UNDERFLOW
    gates.append(_gate(f"B1 maximum of {name}", e_got.max(), e_model.max(), c.maximum, floor))
    small = got.numel() < SMALL
    few = small or (name in OF_KEYS and problem.rows * problem.num_heads_q < FEW_ROWS)
    rms_limit = max(c.rms, RMS_SMALL) if few else c.rms
    floor = RMS_FLOOR * largest + logit_share * _rms(exact).item() + UNDERFLOW
    gates.append(_gate(f"B2 RMS of {name}", _rms(e_got), _rms(e_model), rms_limit, floor))
    if arithmetic in ("float32", "bf16x3"):
        logit_share = max(logit_share, SUM_SHARE * math.sqrt(problem.head_dim) * largest_logit)
    if arithmetic == "bf16x3":
        logit_share = max(logit_share, REMAINDER_SHARE * largest_logit)
    if arithmetic == "float8":
        logit_share = PROBABILITY_SHARE + max(logit_share, SCORE_SHARE * _lse_allowance(problem, largest_logit))
    if not small and name != "dbias":  # whose rows are keys
        rows, model_rows, naive_rows, exact_rows = (_rms(x, -1).flatten() for x in (e_got, e_model, e_naive, exact))
        shown = model_rows[exact_rows > 0]  # rows that see nothing have no error, and say nothing of the others
        unit, row_floor = torch.maximum(model_rows, shown.median() if len(shown) else model_rows), ROW_FLOOR
        if direction == "backward":
            unit, row_floor = torch.maximum(unit, NAIVE_ROW_SHARE * naive_rows), ROW_FLOOR_BACKWARD
        few_columns = got.shape[-1] <= FEW_COLUMNS
        # A score's error moves a row by a share of v. A row of few columns may be near 0 although v is not.
        scale = exact_rows.clamp(min=_rms(exact)) if few_columns else exact_rows
        floors = row_floor * largest + logit_share * scale + UNDERFLOW
        if got.shape[-1] == 1:
            floors = floors + exact.abs().amax(-1).flatten() * torch.finfo(got.dtype).eps / 2
        row_limit = c.row * (ROW_OF_FEW if few_columns else 1)
        worst = (rows - row_limit * unit - floors).nan_to_num(nan=math.inf).argmax()
        gates.append(_gate(f"B3 row of {name}", rows[worst], unit[worst], row_limit, floors[worst].item()))
    return gates


def _judge_lse(problem: AttentionProblem, exact: Forward, model: Forward, lse: Tensor) -> Gate:
    if (lse.shape, lse.dtype) != (exact.lse.shape, torch.float32):
        raise AssertionError(
            f"lse is {tuple(lse.shape)} {lse.dtype}; it must be {tuple(exact.lse.shape)} torch.float32"
        )
    allowed = _lse_allowance(problem, _largest(problem, exact))
    if _arithmetic(problem) in ("tf32", "bf16x3"):  # which round q and k, and so every logit, by the caller's choice
        allowed += limits(problem, "forward").maximum * _worst_distance(model.lse, exact.lse)
    error = _worst_distance(lse.double(), exact.lse)
    return Gate("C LSE", error, allowed, error / allowed)


def _largest(problem: AttentionProblem, exact: Forward) -> float:
    return exact.largest_score if _arithmetic(problem) == "float8" else exact.largest_logit


def _lse_allowance(problem: AttentionProblem, largest_logit: float) -> float:
    if _arithmetic(problem) == "float8":
        return LSE_ABSOLUTE_FLOAT8 + LSE_RELATIVE_FLOAT8 * problem.head_dim * largest_logit
    return LSE_ABSOLUTE + LSE_RELATIVE * max(1.0, problem.head_dim / LSE_HEAD_DIM) * largest_logit


def _worst_distance(a: Tensor, b: Tensor) -> float:
    """Returns the largest |a - b|. Equal infinities have distance 0; any other non-finite value is infinitely far."""
    distance = torch.where(a == b, 0.0, (a - b).abs().nan_to_num(nan=math.inf))
    return distance.max().item() if distance.numel() else 0.0


def _gate(name: str, error: Tensor, unit: Tensor, c: float, floor: float) -> Gate:
    e, u = error.item(), unit.nan_to_num(nan=math.inf).item()  # N overflows where a kernel need not
    excess = e - floor
    needed = 0.0 if excess <= 0 else excess / u if u > 0 else math.inf
    return Gate(name, e, c * u + floor, needed)


def _rms(x: Tensor, *dims: int) -> Tensor:
    return x.square().mean(dims).sqrt()
