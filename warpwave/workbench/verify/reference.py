"""The three references for every kernel, in plain torch, on any device.

    R  `oracle`           float64 throughout, from the unchanged inputs;
    M  `rounding_model`   float64, but rounded where every kernel must round: the unnormalized probabilities before the
                          second product, and the result once;
    N  `naive`            the formula, operation by operation, in the input type.

A correct kernel is as far from R as M is. This separates a wrong mask from rounding errors far better than a fixed
tolerance, or than N, whose errors are several times larger. In float32 M has nothing to round, so N takes its place.
With precision "tf32" or "fp16x1" the operands of both products are rounded to TF32's 10-bit mantissa, in M and in N;
with "bf16x3" they are rounded to the sum of two bfloat16 numbers. Quantized q, k and v are multiplied by their factors
first, exactly in R and M. M then rounds the probabilities as a kernel must: with float8 values to e4m3, of 256 times
the probability, and with int8 values to float16. N is float32 there. The numbers of an 8-bit cache are exact in R and
M; N rounds them to the input type.

The code favors clarity: one sequence at a time, all its heads at once, scores in memory in chunks of query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpwave.kernels import cache_descales, descales, dropout
from warpwave.kernels.torch_products import keeps_float32
from warpwave.operands import AnyOperands, QuantizedOperands, differentiable
from warpwave.problem import LARGEST_BIAS, AttentionProblem

CHUNK_ELEMENTS = 1 << 25  # float64 scores in memory at once: 256 MiB

Rounding = Callable[[Tensor], Tensor]


class Forward(NamedTuple):
    """The results of R and M.

    Attributes:
        out: float64 from R, the input type from M; with the shape of the kernels' out.
        lse: float64 natural log-sum-exp, (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q).
        largest_logit: the largest magnitude of a visible logit, before or after softcap, bias and ALiBi; the reference
            for the LSE's error.
        largest_score: the same, before them: the reference for the error of a sum of float8 products.
    """

    out: Tensor
    lse: Tensor
    largest_logit: float
    largest_score: float


class Gradients(NamedTuple):
    """Gradients in the order of `Operands`, with the shapes of the operands; None for missing operands."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dalibi_slopes: Tensor | None = None
    dsinks: Tensor | None = None


def oracle(problem: AttentionProblem, operands: AnyOperands) -> Forward:
    """Returns R: the exact result, up to float64 rounding. A float8 out is in units of its factor."""
    if isinstance(operands, QuantizedOperands):
        exact = _forward(*descales.dequantized(problem, operands, torch.float64), _keep, _keep)
        factor = operands.out_descale
        return exact if factor is None else exact._replace(out=exact.out / factor.double())
    return _forward(*_wide_cache(problem, operands, torch.float64), _keep, _keep)


def rounding_model(problem: AttentionProblem, operands: AnyOperands) -> Forward:
    """Returns M: the result of exact arithmetic with a kernel's unavoidable roundings."""
    if isinstance(operands, QuantizedOperands):
        wide, numbers = descales.dequantized(problem, operands, torch.float64)
        model = _forward(wide, numbers, _keep, _probability_rounding(problem))
        return model._replace(out=descales.to_out(model.out, problem, operands.out_descale))
    if problem.dtype == "float32" and _operand_rounding(problem) is None:
        return oracle(problem, operands)._replace(out=naive(problem, operands))
    model = _forward(*_wide_cache(problem, operands, torch.float64), *_model_rounding(problem))
    return model._replace(out=model.out.to(operands.q.dtype))


def naive(problem: AttentionProblem, operands: AnyOperands) -> Tensor:
    """Returns N: the formula as a user would write it in the input type; out only, because the LSE is compared with
    R."""
    if isinstance(operands, QuantizedOperands):
        wide = naive(*descales.dequantized(problem, operands, torch.float32))
        return descales.to_out(wide, problem, operands.out_descale)
    problem, operands = _wide_cache(problem, operands, operands.q.dtype)
    out = operands.q.new_empty(*operands.q.shape[:-1], problem.head_dim_v)
    for seq in _sequences(problem, operands):
        out[seq.q_at] = _naive_sequence(problem, seq)[0].transpose(0, 1)
    return out


def oracle_gradients(
    problem: AttentionProblem, operands: AnyOperands, dout: Tensor, dlse: Tensor | None = None
) -> Gradients:
    """Returns R's gradients of `sum(out * dout) + sum(lse * dlse)`, in float64."""
    return _gradients(problem, operands, dout, dlse, _keep, _keep, _keep)


def rounding_model_gradients(
    problem: AttentionProblem, operands: AnyOperands, dout: Tensor, dlse: Tensor | None = None
) -> Gradients:
    """Returns M's gradients: P rounded for dv, dS for dq and dk, delta taken from the rounded out, each result rounded
    once."""
    if problem.dtype == "float32" and _operand_rounding(problem) is None:
        return naive_gradients(problem, operands, dout, dlse)
    dtype = operands.q.dtype
    grads = _gradients(problem, operands, dout, dlse, *_model_rounding(problem), lambda x: x.to(dtype).double())
    pairs = zip(grads, differentiable(operands), strict=True)
    return _gradients_of([None if g is None or x is None else g.to(x.dtype) for g, x in pairs])


def naive_gradients(
    problem: AttentionProblem, operands: AnyOperands, dout: Tensor, dlse: Tensor | None = None
) -> Gradients:
    """Returns N's gradients: autograd through the plain formula in the input type."""
    leaves = _leaves(operands)
    with torch.enable_grad():
        for seq in _sequences(problem, leaves):
            out, lse = _naive_sequence(problem, seq)
            loss = (out * dout[seq.q_at].transpose(0, 1)).sum()
            if dlse is not None:
                loss = loss + torch.where(lse.isfinite(), lse * _lse_at(dlse, seq).to(lse.dtype), 0).sum()
            loss.backward()
    return _collect(leaves)


def cancellation(problem: AttentionProblem, operands: AnyOperands, dout: Tensor) -> tuple[float, float]:
    """Returns the largest deviations of an entry of dq and of dk, if each dP - delta has an independent error with a
    deviation of |dout| |v|, the norms of its two vectors.

    A kernel computes both terms of dP - delta as sums of head_dim_v products and subtracts them. Their rounding errors
    are relative to the sums and remain where the difference is 0. N cannot measure this error: where a row sees one
    key, it subtracts a number from itself.
    """
    wide = _in_float64(operands, _keep)
    forward = _forward(problem, wide, _keep, _keep)
    largest = [0.0, 0.0]
    group = problem.num_heads_q // problem.num_heads_kv
    for seq in _sequences(problem, wide):
        of_keys = torch.zeros_like(seq.k)
        sizes = dout[seq.q_at].double().transpose(0, 1).square().sum(-1)  # of rows
        for rows in _row_chunks(seq):
            lse = _lse_at(forward.lse, seq)[:, rows]
            scores = _logits(problem, seq, rows, _products(problem, seq, rows))
            finite = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
            p = torch.exp(scores - finite) * dropout.scale(problem.dropout_p)
            size = p.square() * sizes[:, rows, None] * seq.v.square().sum(-1)[:, None]
            of_keys += size.transpose(1, 2) @ seq.q[:, rows].square()
            of_rows = size @ seq.k.square()
            largest[0] = max(largest[0], of_rows.max().item() if of_rows.numel() else 0.0)
        of_keys = of_keys.unflatten(0, (-1, group)).sum(1)
        largest[1] = max(largest[1], of_keys.max().item() if of_keys.numel() else 0.0)
    of_dq, of_dk = (abs(problem.softmax_scale) * x**0.5 for x in largest)
    return of_dq, of_dk


def round_to_tf32(x: Tensor) -> Tensor:
    """Returns the nearest values with a 10-bit mantissa, ties to even, for finite x. Its gradient is the identity's."""
    bits = x.detach().float().view(torch.int32)
    nearest = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return x + (nearest - x.detach())  # exact, because both are floats within one rounding step of each other


def round_to_two_bfloat16(x: Tensor) -> Tensor:
    """Returns the sum of the nearest bfloat16 and the bfloat16 nearest to the rest, with 16 bits or more. Its gradient
    is the identity's."""
    value = x.detach().float()
    high = value.bfloat16().float()
    both = high.double() + (value - high).bfloat16().double()
    return x + (both.to(x.dtype) - x.detach())


# One sequence ---------------------------------------------------------------------------------------------------------


class _Sequence(NamedTuple):
    """One sequence's part of every operand, heads first, and the slices of its rows in (packed) out, dq and dk, dv."""

    q: Tensor  # [num_heads_q, seqlen_q, head_dim]
    k: Tensor  # [num_heads_q, seqlen_k, head_dim], kv heads repeated for their query heads
    v: Tensor  # [num_heads_q, seqlen_k, head_dim_v]
    mask: Tensor | None  # [1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k]
    bias: Tensor | None  # the same
    slopes: Tensor | None  # [num_heads_q]
    sinks: Tensor | None  # [num_heads_q]
    dropout_seed: Tensor | None  # [2]
    item: int  # in the batch
    q_at: int | slice
    packed: bool


def _sequences(problem: AttentionProblem, operands: AnyOperands) -> Iterator[_Sequence]:
    q, k, v, mask, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k, *_ = operands
    group = problem.num_heads_q // problem.num_heads_kv
    ends_q = cu_seqlens_q.tolist() if problem.packed else []
    ends_k = cu_seqlens_k.tolist() if problem.packed and not problem.page_size else []
    for b in range(problem.batch):
        q_at = slice(ends_q[b], ends_q[b + 1]) if problem.packed else b
        k_at: Any = b
        if problem.page_size:
            k_at = _cells(problem, operands, b)
        elif problem.packed:
            k_at = slice(ends_k[b], ends_k[b + 1])
        yield _Sequence(
            q[q_at].transpose(0, 1),
            k[k_at].transpose(0, 1).repeat_interleave(group, dim=0),
            v[k_at].transpose(0, 1).repeat_interleave(group, dim=0),
            None if mask is None else mask[b % len(mask)],
            None if bias is None else bias[b % len(bias)],
            slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
            sinks,
            operands.dropout_seed if problem.dropout_p else None,
            b,
            q_at,
            problem.packed,
        )


def _cells(problem: AttentionProblem, operands: Any, b: int) -> tuple[Tensor, Tensor]:
    """Returns the page and the slot in the page of each key of a sequence in a cache, each [seqlen_k]."""
    row = b if operands.rows is None else int(operands.rows[b])
    positions = torch.arange(int(operands.seqused_k[row]), device=operands.q.device)
    pages = operands.page_table[row, positions // problem.page_size].long()
    return pages, positions % problem.page_size


def _lse_at(lse: Tensor, seq: _Sequence) -> Tensor:
    """Returns the sequence's part of a tensor in the layout of lse: [num_heads_q, seqlen_q]."""
    return lse[:, seq.q_at] if seq.packed else lse[seq.q_at]


def _products(problem: AttentionProblem, seq: _Sequence, rows: slice) -> Tensor:
    """Returns the scaled products of query rows with all keys, in the dtype of q: [num_heads_q, rows, seqlen_k]."""
    return _product(seq.q[:, rows], seq.k.transpose(1, 2)) * problem.softmax_scale


def _logits(problem: AttentionProblem, seq: _Sequence, rows: slice, scores: Tensor) -> Tensor:
    """Applies softcap, bias, ALiBi and masks to these products; hidden pairs become -inf."""
    seqlen_q, seqlen_k, dtype = seq.q.shape[1], seq.k.shape[1], seq.q.dtype
    i = torch.arange(seqlen_q, device=seq.q.device)[rows, None]
    j = torch.arange(seqlen_k, device=seq.q.device)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if seq.bias is not None:
        bias = seq.bias if seq.bias.shape[1] == 1 else seq.bias[:, rows]
        bound = min(LARGEST_BIAS, torch.finfo(bias.dtype).max)
        bias = torch.where(bias.isinf(), bias, bias.clamp(-bound, bound))
        scores = scores + bias.to(dtype)
    if seq.slopes is not None:
        distance = (i + seqlen_k - seqlen_q - j).abs()
        scores = scores - (seq.slopes[:, None, None] * distance).to(dtype)

    hidden = torch.zeros(1, 1, 1, dtype=torch.bool, device=scores.device)
    band = problem.band(seqlen_q, seqlen_k)
    if band.low is not None:
        hidden = hidden | (j - i < band.low)
    if band.high is not None:
        hidden = hidden | (j - i > band.high)
    if seq.mask is not None:
        hidden = hidden | ~(seq.mask if seq.mask.shape[1] == 1 else seq.mask[:, rows])
    return scores.masked_fill(hidden, -torch.inf)


def _dropped(problem: AttentionProblem, seq: _Sequence, rows: range, p: Tensor) -> Tensor:
    """Applies dropout to probabilities, or to their gradient, [num_heads_q, rows, seqlen_k]."""
    if seq.dropout_seed is None:
        return p
    items, heads, keys = range(seq.item, seq.item + 1), range(p.shape[0]), range(p.shape[2])
    (kept,) = dropout.kept(problem.dropout_p, seq.dropout_seed, items, heads, rows, keys)
    return p.masked_fill(~kept, 0.0) * dropout.scale(problem.dropout_p)


def _naive_sequence(problem: AttentionProblem, seq: _Sequence) -> tuple[Tensor, Tensor]:
    """Returns out [num_heads_q, seqlen_q, head_dim_v] and lse [num_heads_q, seqlen_q] in the input type."""
    round_operand = _operand_rounding(problem) or _keep
    seq = seq._replace(q=round_operand(seq.q), k=round_operand(seq.k), v=round_operand(seq.v))
    scores = _logits(problem, seq, slice(None), _products(problem, seq, slice(None)))
    if seq.sinks is not None:
        column = seq.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    if scores.shape[-1] == 0:
        return scores @ seq.v, scores.new_full(scores.shape[:-1], -torch.inf)
    # A row without visible keys has no softmax. Any finite scores serve, because its result is replaced.
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    p = torch.softmax(scores, dim=-1)[..., : seq.k.shape[1]]
    p = _dropped(problem, seq, range(seq.q.shape[1]), p)
    out = _product(round_operand(p), seq.v).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return out, lse


# All sequences, in float64 --------------------------------------------------------------------------------------------


def _forward(problem: AttentionProblem, operands: AnyOperands, round_operand: Rounding, round_p: Rounding) -> Forward:
    operands = _in_float64(operands, round_operand)
    out = operands.q.new_zeros(*operands.q.shape[:-1], problem.head_dim_v)
    lse = operands.q.new_zeros(_lse_shape(problem))
    largest_logit = largest_score = 0.0
    for seq in _sequences(problem, operands):
        for rows in _row_chunks(seq):
            products = _products(problem, seq, rows)
            s = _logits(problem, seq, rows, products)
            m = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
            empty = m == -torch.inf
            shift = m.masked_fill(empty, 0.0)
            p = torch.exp(s - shift[..., None])
            total = p.sum(-1)
            lse_rows = (m + torch.log(total)).masked_fill(empty, -torch.inf)
            if seq.sinks is not None:
                total = total + torch.exp(seq.sinks[:, None] - shift)
                lse_rows = torch.logaddexp(lse_rows, seq.sinks[:, None])
            # The LSE cannot be used: next to a maximum such as `finfo.min` the sum is lost in rounding.
            inverse = (1 / total).masked_fill(empty, 0.0)
            kept = _dropped(problem, seq, _positions(rows, seq), round_p(p))
            out[seq.q_at][rows] = (kept @ seq.v * inverse[..., None]).transpose(0, 1)
            _lse_at(lse, seq)[:, rows] = lse_rows
            if s.numel():
                of_scores, of_logits = (x.abs().masked_fill(s == -torch.inf, 0.0).max().item() for x in (products, s))
                largest_score = max(largest_score, of_scores)
                largest_logit = max(largest_logit, of_scores, of_logits)
    return Forward(out, lse, largest_logit, largest_score)


def _gradients(
    problem: AttentionProblem,
    operands: AnyOperands,
    dout: Tensor,
    dlse: Tensor | None,
    round_operand: Rounding,
    round_p: Rounding,
    round_out: Rounding,
) -> Gradients:
    """Computes the gradients: dS explicitly, and from there autograd from the logits to the inputs.

    The rounded values are those that a kernel multiplies or sums: P for dv, dS for the bias and the slopes, and for dq
    and dk the gradient of the products, which is dS times the softcap's derivative.
    """
    forward = _forward(problem, operands, round_operand, round_p)
    delta = (dout.double() * round_out(forward.out)).sum(-1).transpose(-1, -2)  # in the layout of lse
    dlogit = -delta if dlse is None else dlse.double() - delta  # added to every dP of the row
    dout = round_operand(dout.double())
    leaves = _leaves(_in_float64(operands, round_operand))
    added = [x for x in (leaves.bias, leaves.alibi_slopes) if x is not None]
    with torch.enable_grad():
        for seq in _sequences(problem, leaves):
            for rows in _row_chunks(seq):
                products = _products(problem, seq, rows)
                leaf = products.detach().requires_grad_()
                s = _logits(problem, seq, rows, leaf)
                lse_rows = _lse_at(forward.lse, seq)[:, rows]
                dlogit_rows = _lse_at(dlogit, seq)[:, rows]
                dout_rows = dout[seq.q_at][rows].transpose(0, 1)
                with torch.no_grad():
                    p = torch.exp(s - lse_rows.masked_fill(lse_rows == -torch.inf, 0.0)[..., None])
                    positions = _positions(rows, seq)
                    dp = _dropped(problem, seq, positions, dout_rows @ seq.v.transpose(1, 2))
                    ds = p * (dp + dlogit_rows[..., None])
                    dv = _dropped(problem, seq, positions, round_p(p)).transpose(1, 2) @ dout_rows
                (dproducts,) = torch.autograd.grad(s, leaf, ds, retain_graph=True)
                if added:
                    torch.autograd.backward([s], [round_p(ds)], inputs=added)
                # The graph is retained because the chunks share its part for k and v.
                torch.autograd.backward([products, seq.v], [round_p(dproducts), dv], retain_graph=True)
                if seq.sinks is not None:
                    p_sink = torch.exp(seq.sinks.detach()[:, None] - lse_rows)
                    seq.sinks.backward((p_sink * dlogit_rows).sum(-1))
    return _collect(leaves)


def _positions(rows: slice, seq: _Sequence) -> range:
    """Returns the positions of query rows in the sequence."""
    return range(seq.q.shape[1])[rows]


def _row_chunks(seq: _Sequence) -> Iterator[slice]:
    heads, seqlen_q = seq.q.shape[:2]
    step = max(1, CHUNK_ELEMENTS // max(1, heads * seq.k.shape[1]))
    for start in range(0, seqlen_q, step):
        yield slice(start, start + step)


# Small things ---------------------------------------------------------------------------------------------------------


def _keep(x: Tensor) -> Tensor:
    return x


def _operand_rounding(problem: AttentionProblem) -> Rounding | None:
    """Returns the rounding of float32 operands that the caller chose; None if they keep all or nearly all bits."""
    roundings = {"tf32": round_to_tf32, "fp16x1": round_to_tf32, "bf16x3": round_to_two_bfloat16}
    return roundings.get(problem.precision) if problem.dtype == "float32" else None


def _model_rounding(problem: AttentionProblem) -> tuple[Rounding, Rounding]:
    """Returns how M rounds the operands of a product, and the factors that a kernel computes itself (P, dS)."""
    if problem.dtype == "float32":
        rounding = _operand_rounding(problem) or _keep
        return rounding, rounding
    dtype = getattr(torch, problem.dtype)
    return _keep, lambda x: x.to(dtype).double()  # the operands already have the input type


def _probability_rounding(problem: AttentionProblem) -> Rounding:
    """Returns how M rounds the unnormalized probabilities of a quantized call."""
    if problem.dtype_of_v in descales.FLOAT8.values():
        return lambda p: (p * descales.P_SCALE).to(torch.float8_e4m3fn).double() / descales.P_SCALE
    dtype = torch.float16 if problem.dtype_of_v == "int8" else getattr(torch, problem.dtype_of_v)
    return lambda p: p.to(dtype).double()


def _lse_shape(problem: AttentionProblem) -> tuple[int, ...]:
    if problem.packed:
        return (problem.num_heads_q, problem.total_q)
    return (problem.batch, problem.num_heads_q, problem.seqlen_q)


def _wide_cache(problem: AttentionProblem, operands: Any, dtype: torch.dtype) -> tuple[AttentionProblem, Any]:
    """Returns a call on a cache of 8-bit numbers as one on pools of `dtype`; other calls unchanged."""
    return cache_descales.dequantized(problem, operands, dtype) if problem.page_size else (problem, operands)


def _in_float64(operands: AnyOperands, round_operand: Rounding) -> AnyOperands:
    q, k, v, _, bias, slopes, sinks, *_ = operands
    q, k, v = (round_operand(x.detach().double()) for x in (q, k, v))
    bias, slopes, sinks = (None if x is None else x.detach().double() for x in (bias, slopes, sinks))
    return operands._replace(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, sinks=sinks)


def _leaves(operands: AnyOperands) -> AnyOperands:
    q, k, v, bias, slopes, sinks = (
        None if x is None else x.detach().clone().requires_grad_() for x in differentiable(operands)
    )
    return operands._replace(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, sinks=sinks)


def _collect(leaves: AnyOperands) -> Gradients:
    """Returns the gradients in the leaves; there are none without query rows."""
    found = [None if x is None else torch.zeros_like(x) if x.grad is None else x.grad for x in differentiable(leaves)]
    return _gradients_of(found)


def _gradients_of(tensors: list[Tensor | None]) -> Gradients:
    dq, dk, dv, *others = tensors
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv, *others)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b without TF32, even if the process allows torch to use it."""
    if a.dtype == torch.float32 and not keeps_float32(a.device):
        return (a.double() @ b.double()).float()
    return a @ b
