"""three_kernel's gradients: five torch products over the forward's chunks, and one launch between them.

    S = Q K^T,  dP = dO V^T;   P = exp(S' - lse),  dS = P * (dP - delta);   dV += P^T dO,  dQ = dS K,  dK += dS^T Q

A chunk holds all keys that its queries see. A row's statistics are therefore recomputed from the same scores as P, and
delta = rowsum(P * dP) from the same P and dP as dS, so common errors cancel to rounding, whatever the forward computed.
With a rounded out and log-sum-exp instead, float32 gradients of rows that one key dominates were off by that rounding,
times the values. P and dS overwrite S and dP. There are no atomics: sums run in a fixed order.

Dao et al., "FlashAttention" (2022), appendix B.4, with scores kept.

Bound: tensor cores; at head_dim in the hundreds the traffic of the scores, 8 bytes written, 8 read and 4 written each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments, reasons
from warpwave.kernels.groups import Window
from warpwave.kernels.partials import inverse_sum, join
from warpwave.kernels.primitives import (
    LOG2_E,
    band_edges,
    band_visible,
    rounded,
    softmax_step,
    tile_pointers,
    visible_keys,
)
from warpwave.kernels.three_kernel.plan import Chunk, Config, Plan, plan
from warpwave.kernels.three_kernel.softmax import LINE, UNSPECIALIZED, ChunkPlace, whole_lines
from warpwave.kernels.torch_products import add_product, plainly, product_into
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import INTERPRETED, jit, tl

WHOLE_ROW = 8192  # keys of the longest row whose S and dP a block keeps in registers
MOST_BOUND = 4096  # bound launches kept
WORKSPACE_BYTES = 128 * 1024**2  # for S and dP of a chunk: their traffic is small compared with five products


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _tile_of_rows(
    scores_ptr,
    dp_ptr,
    rows,
    keys,
    row_begin,
    key_base,
    row_inside,
    key_end,
    stride_sm,
    low,
    high,
    softmax_scale,
    window: Window,
):
    """Returns scores in bits, minus infinity where hidden, and dP, 0 where hidden: [ROWS, KEYS]."""
    visible = row_inside[:, None] & (keys < key_end)[None, :]
    visible = visible & band_visible(rows, keys, low, high, window.HAS_LOW, window.HAS_HIGH)
    in_lines = row_inside[:, None] & (keys < (key_end + LINE - 1) // LINE * LINE)[None, :]
    raw = tl.load(tile_pointers(scores_ptr, rows - row_begin, keys - key_base, stride_sm, 1), mask=in_lines, other=0.0)
    dp = tl.load(tile_pointers(dp_ptr, rows - row_begin, keys - key_base, stride_sm, 1), mask=in_lines, other=0.0)
    return tl.where(visible, raw * (softmax_scale * LOG2_E), float("-inf")), tl.where(visible, dp, 0.0)


@jit
def _store_gradients(
    p_ptr, ds_ptr, p, scores, dp, delta, rows, keys, row_begin, key_base, line_end, row_inside, stride_pm
):  # fmt: skip
    """Stores P and P * (dP - delta), up to the end of the lines."""
    in_lines = row_inside[:, None] & (keys < line_end)[None, :]
    p_out = tile_pointers(p_ptr, rows - row_begin, keys - key_base, stride_pm, 1)
    ds_out = tile_pointers(ds_ptr, rows - row_begin, keys - key_base, stride_pm, 1)
    ds = tl.where(scores == float("-inf"), 0.0, p * (dp - delta[:, None]))  # delta may be NaN in hidden pairs
    tl.store(p_out, rounded(p, p_ptr.dtype.element_ty), mask=in_lines)
    tl.store(ds_out, rounded(ds, ds_ptr.dtype.element_ty), mask=in_lines)


@jit(do_not_specialize=[*UNSPECIALIZED, "stride_gb", "stride_gh", "stride_gm"])
def chunk_gradients_kernel(
    scores_ptr,
    dp_ptr,
    p_ptr,
    ds_ptr,
    sinks_ptr,
    dlse_ptr,
    of_sinks_ptr,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_sh,
    stride_sm,
    stride_ph,
    stride_pm,
    seqlen_q,
    seqlen_k,
    num_heads_q,
    window: Window,
    chunk: ChunkPlace,
    num_tiles_m,
    softmax_scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """Computes P and dS of ROWS queries of one head, over the lines of the keys that some query of the chunk sees.

    If WHOLE, a row is one tile in registers, and P and dS may overwrite S and dP. `of_sinks` receives each row's
    contribution to the gradient of its head's sink, (batch, num_heads_q, seqlen_q).
    """
    tile = tl.program_id(0) % num_tiles_m
    chunk_head = (tl.program_id(0) // num_tiles_m).to(tl.int64)
    head = (chunk.first_head + chunk_head) % num_heads_q
    batch = (chunk.first_head + chunk_head) // num_heads_q
    row_begin = chunk.row_begin
    row_end = tl.minimum(row_begin + chunk.rows, seqlen_q)
    first_row = row_begin + tile * ROWS
    rows = first_row + tl.arange(0, ROWS)
    row_inside = rows < row_end
    low, high = band_edges(seqlen_q, seqlen_k, window.left, window.right, window.TOP_LEFT)
    key_begin, key_end = visible_keys(row_begin, row_end - 1, seqlen_k, low, high, window.HAS_LOW, window.HAS_HIGH)
    line_begin, line_end = whole_lines(key_begin, key_end)
    key_base = chunk.key_base // LINE * LINE  # a no-op that tells the compiler about the multiple: see softmax.py
    scores_ptr += chunk_head * stride_sh
    dp_ptr += chunk_head * stride_sh
    p_ptr += chunk_head * stride_ph
    ds_ptr += chunk_head * stride_ph

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    delta = tl.zeros([ROWS], tl.float32)  # rowsum(P * dP), unnormalized
    if WHOLE:
        keys = line_begin + tl.arange(0, KEYS)
        scores, dp = _tile_of_rows(
            scores_ptr, dp_ptr, rows, keys, row_begin, key_base, row_inside, key_end, stride_sm, low, high,
            softmax_scale, window,
        )  # fmt: skip
        p, _alpha, m_i, l_i = softmax_step(scores, 1.0, m_i, l_i)
        delta = tl.sum(p * dp, 1)
    else:
        for key_tile in range(line_begin, line_end, KEYS):
            scores, dp = _tile_of_rows(
                scores_ptr, dp_ptr, rows, key_tile + tl.arange(0, KEYS), row_begin, key_base, row_inside, key_end,
                stride_sm, low, high, softmax_scale, window,
            )  # fmt: skip
            p, alpha, m_i, l_i = softmax_step(scores, 1.0, m_i, l_i)
            delta = delta * alpha + tl.sum(p * dp, 1)

    l_all = l_i
    scale = tl.full([ROWS], 1.0, tl.float32)
    if HAS_SINKS:
        sink_log2 = tl.load(sinks_ptr + head) * LOG2_E
        _m_all, l_all, scale, of_sink = join(m_i, l_i, sink_log2, 1.0)
    scale = scale * inverse_sum(l_all)
    delta = delta * scale
    place = batch * stride_gb + head * stride_gh + rows.to(tl.int64) * stride_gm
    if HAS_DLSE:
        delta = delta - tl.load(dlse_ptr + place, mask=row_inside, other=0.0)
    if HAS_SINKS:
        # The sink's own probability times minus its delta; its value is 0.
        line = (batch * num_heads_q + head) * tl.cast(seqlen_q, tl.int64) + rows
        tl.store(of_sinks_ptr + line, -(of_sink * inverse_sum(l_all)) * delta, mask=row_inside)

    if WHOLE:
        _store_gradients(
            p_ptr, ds_ptr, p * scale[:, None], scores, dp, delta, rows, keys, row_begin, key_base, line_end, row_inside,
            stride_pm,
        )  # fmt: skip
    else:
        m_shift = tl.where(m_i == float("-inf"), 0.0, m_i)
        for key_tile in range(line_begin, line_end, KEYS):
            keys = key_tile + tl.arange(0, KEYS)
            scores, dp = _tile_of_rows(
                scores_ptr, dp_ptr, rows, keys, row_begin, key_base, row_inside, key_end, stride_sm, low, high,
                softmax_scale, window,
            )  # fmt: skip
            p = tl.math.exp2(scores - m_shift[:, None]) * scale[:, None]
            _store_gradients(
                p_ptr, ds_ptr, p, scores, dp, delta, rows, keys, row_begin, key_base, line_end, row_inside, stride_pm
            )  # fmt: skip


# Host -----------------------------------------------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why these launches cannot compute a problem's gradients."""
    found = reasons.of_device(gpu)
    if gpu.vendor == "amd":
        found.append(f"three_kernel's gradients need torch's products, float32 out of 16 bits; {gpu.name} is AMD's")
    return found or reasons.of_dropout(problem, "flash_bwd") + reasons.of_features(
        problem, "three_kernel's gradients do not support", {}
    )


_bound: dict[tuple[Any, ...], Callable[..., None]] = {}


class _Buffers(NamedTuple):
    """S and dP of a chunk, (heads, rows, width) float32, and P and dS, in place of those or separate, in the operands'
    dtype. Heads are contiguous, so those of one kv head are one matrix."""

    scores: torch.Tensor
    dp: torch.Tensor
    p: torch.Tensor
    ds: torch.Tensor

    def of_heads(self, first: int, kv_heads: int, members: int, keys: slice) -> _Buffers:
        """Returns the buffers of `kv_heads` times `members` heads from the first on: [kv_heads, members * rows, keys]
        each."""
        heads = slice(first, first + kv_heads * members)
        return _Buffers(*(t[heads].view(kv_heads, -1, t.shape[2])[..., keys] for t in self))


class _Memory:
    """The memory that the chunks of a call use for their buffers, one chunk after another."""

    def __init__(self, problem: AttentionProblem, cut: Plan, device: torch.device) -> None:
        size, self.dtype = cut.heads * cut.rows * cut.width, getattr(torch, problem.dtype)
        self.width, self.whole = cut.width, cut.width <= WHOLE_ROW
        self.wide = [torch.empty(size, dtype=torch.float32, device=device) for _ in range(2)]
        beside = not self.whole and self.dtype != torch.float32
        self.short = [torch.empty(size, dtype=self.dtype, device=device) for _ in range(2)] if beside else None

    def of(self, chunk: Chunk) -> _Buffers:
        """Returns the buffers of a chunk."""
        shape = (chunk.heads, chunk.rows, self.width)
        wide, short = (
            None if ts is None else [t[: math.prod(shape)].view(shape) for t in ts] for ts in (self.wide, self.short)
        )
        assert wide is not None
        return _Buffers(*wide, *(short or (t.view(self.dtype) for t in wide)))  # 16-bit results use half of each row


def plan_of(problem: AttentionProblem) -> Plan:
    """Returns the forward's chunks, for scores alone."""
    block_m = 64
    width = -(-problem.seqlen_k // 128) * 128
    bytes_ = max(WORKSPACE_BYTES // 2, block_m * (width + 128) * 4)
    config = Config("library", "triton", block_m, 128, 16, 16, 4, 1, 1, 1, 1 << 30, 4, bytes_ + 2**20)
    return plan(problem, config)


def by_sight(problem: AttentionProblem, chunk: Chunk) -> Iterator[Chunk]:
    """Yields the chunk in parts: rows that see no key, rows that see one, and again rows that see none. Multiplying the
    rows that see nothing by 0 would turn a NaN in q or dout into a NaN in dk or dv."""
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    end = chunk.row_begin + chunk.rows
    first = chunk.row_begin if high is None else min(max(chunk.row_begin, -high), end)
    last = end if low is None else max(min(end, problem.seqlen_k - low), first)
    for begin, stop in ((chunk.row_begin, first), (first, last), (last, end)):
        if begin < stop:
            key_end = chunk.key_end if (begin, stop) == (first, last) else chunk.key_begin
            yield chunk._replace(row_begin=begin, rows=stop - begin, key_end=key_end)


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of sum(out * dout) + sum(lse * dlse) by q, k, v, bias, ALiBi slopes and sinks, None where
    not wanted; each in the shape and dtype of its operand. Deterministic.

    Args:
        dout: like out, (batch, seqlen_q, num_heads_q, head_dim_v).
        dlse: float32, (batch, num_heads_q, seqlen_q), or None.
        wanted: which of the six.
    """
    q, k, v = operands[:3]
    sinks = None if operands.sinks is None else operands.sinks.contiguous()
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        return _of_nothing(operands, dlse, wanted)
    cut = plan_of(problem)
    memory = _Memory(problem, cut, q.device)
    wants_q, *wants_kv, _, _, wants_sinks = wanted
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if wants_q else None
    dk, dv = (
        torch.zeros(t.shape, dtype=torch.float32, device=q.device) if want else None
        for t, want in zip((k, v), wants_kv, strict=True)
    )
    of_sinks = torch.empty((problem.batch, problem.num_heads_q, problem.seqlen_q), dtype=torch.float32, device=q.device)
    if sinks is None:
        of_sinks = of_sinks[:, :, :0]
    dout = dout.to(q.dtype)
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = dout.contiguous()
    with plainly(q.device):
        for chunk in [part for whole in cut.chunks for part in by_sight(problem, whole)]:
            if chunk.nothing_to_see:
                _of_unseen(problem, chunk, sinks, dlse, of_sinks, dq)
                continue
            buffers = memory.of(chunk)
            parts = list(_parts(problem, chunk, buffers, q, k, v, dout))
            for part in parts:
                product_into(part.buffers.scores, part.q, part.k.transpose(1, 2))
                product_into(part.buffers.dp, part.dout, part.v.transpose(1, 2))
            _between(problem, chunk, cut, buffers, sinks, dlse, of_sinks)
            for part in parts:
                _accumulate(problem, chunk, part, dq, dk, dv)
        # The scale is applied after the products: before, it would push a small dS out of the range of 16 bits.
        results = [dq, _scaled(dk, problem.softmax_scale, k.dtype), _scaled(dv, 1.0, v.dtype)]
        dsinks = of_sinks.sum((0, 2)) if wants_sinks and sinks is not None else None
    return (*results, None, None, dsinks)


def _of_nothing(
    operands: Operands, dlse: torch.Tensor | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of a call without queries or keys: nothing depends on q, k and v, and lse is the sink."""
    results = [torch.zeros_like(t) if want else None for t, want in zip(operands[:3], wanted, strict=False)]
    dsinks = None
    if wanted[-1] and operands.sinks is not None:
        dsinks = torch.zeros_like(operands.sinks) if dlse is None else dlse.sum((0, 2))
    return (*results, None, None, dsinks)


def _of_unseen(
    problem: AttentionProblem, chunk: Chunk, sinks: Any, dlse: Any, of_sinks: torch.Tensor, dq: torch.Tensor | None
) -> None:
    """Computes the sink's gradient of rows that see only their sink: its probability is 1, and its delta is minus the
    upstream gradient of lse."""
    rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
    heads = slice(chunk.first_head, chunk.first_head + chunk.heads)
    if dq is not None:
        for batch, head, kv_heads, members in runs_of_heads(problem, heads.start, heads.stop):
            dq[batch, rows, head : head + kv_heads * members] = 0.0
    if sinks is None:
        return
    flat = of_sinks.flatten(0, 1)[heads]
    flat[:, rows] = 0.0
    if dlse is not None:
        flat[:, rows] = dlse.flatten(0, 1)[heads, rows]


class _Part(NamedTuple):
    """The operands of one torch product: heads of one batch item; those that share a kv head form one matrix.

    Attributes:
        batch, head, kv_head, kv_heads, members: `kv_heads` times `members` query heads, from `head` on.
        q, dout: [kv_heads, members * rows, width]; views if a kv head has one member, else copies.
        k, v: [kv_heads, keys, width], views.
        buffers: [kv_heads, members * rows, keys] each.
    """

    batch: int
    head: int
    kv_head: int
    kv_heads: int
    members: int
    q: torch.Tensor
    dout: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    buffers: _Buffers


def runs_of_heads(problem: AttentionProblem, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (batch item, query head, kv heads, members) of heads counted over the batch: whole groups of one batch
    item together, and the remaining members of a group alone."""
    group = problem.num_heads_q // problem.num_heads_kv
    while begin < end:
        batch, head = divmod(begin, problem.num_heads_q)
        there = min(problem.num_heads_q - head, end - begin)
        if head % group or there < group:
            run = (1, min(group - head % group, there))
        else:
            run = (there // group, group)
        yield batch, head, *run
        begin += run[0] * run[1]


def _parts(
    problem: AttentionProblem, chunk: Chunk, buffers: _Buffers, q: Any, k: Any, v: Any, dout: Any
) -> Iterator[_Part]:
    group, done = problem.num_heads_q // problem.num_heads_kv, 0
    of_keys = slice(chunk.key_begin, chunk.key_end)
    of_rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
    columns = slice(chunk.key_begin - chunk.key_base, chunk.key_end - chunk.key_base)
    for batch, head, kv_heads, members in runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads):
        of_q, of_kv = slice(head, head + kv_heads * members), slice(head // group, head // group + kv_heads)
        q_rows, dout_rows = (
            t[batch, of_rows, of_q].transpose(0, 1).reshape(kv_heads, -1, t.shape[-1]) for t in (q, dout)
        )
        k_rows, v_rows = (t[batch, of_keys, of_kv].transpose(0, 1) for t in (k, v))
        of_heads = buffers.of_heads(done, kv_heads, members, columns)
        yield _Part(batch, head, head // group, kv_heads, members, q_rows, dout_rows, k_rows, v_rows, of_heads)
        done += kv_heads * members


def _between(
    problem: AttentionProblem, chunk: Chunk, cut: Plan, buffers: _Buffers, sinks: Any, dlse: Any, of_sinks: torch.Tensor
) -> None:
    """Converts S and dP to P and dS with a launch that is bound once for all steps of a training."""
    tensors = (buffers.scores, buffers.dp, buffers.p, buffers.ds, sinks, dlse, None if sinks is None else of_sinks)
    layouts = tuple(None if t is None else (t.shape, t.stride(), t.data_ptr() % 16) for t in tensors)
    key = (problem, chunk, buffers.scores.device, layouts)
    if key not in _bound:
        if len(_bound) >= MOST_BOUND:
            _bound.clear()
        _bound[key] = launch.bind(_specify(problem, chunk, cut, buffers, tensors))
    _bound[key](*tensors)


def _specify(
    problem: AttentionProblem, chunk: Chunk, cut: Plan, buffers: _Buffers, tensors: tuple[Any, ...]
) -> launch.Launch:
    *_, sinks, dlse, _ = tensors
    whole = cut.width <= WHOLE_ROW
    keys = arguments.padded(cut.width) if whole else 2048
    warps = max(1, min(16, keys // 256))
    rows = 64 if INTERPRETED else 1  # runs one program after another: fewer are faster
    tiles = -(-chunk.rows // rows)
    return launch.Launch(
        kernel=chunk_gradients_kernel,
        grid=chunk.heads * tiles,
        tensors=tensors,
        scalars=[*((0, 0, 0) if dlse is None else dlse.stride()), *buffers.scores.stride()[:2], *buffers.p.stride()[:2],
                 problem.seqlen_q, problem.seqlen_k, problem.num_heads_q, *arguments.window(problem), chunk.first_head,
                 chunk.row_begin, chunk.rows, chunk.key_base, tiles, problem.softmax_scale],
        constants={"ROWS": rows, "KEYS": keys, "WHOLE": whole, **arguments.band_constants(problem),
                   "HAS_SINKS": sinks is not None, "HAS_DLSE": dlse is not None},
        options={"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False},
    )  # fmt: skip


def _accumulate(problem: AttentionProblem, chunk: Chunk, part: _Part, dq: Any, dk: Any, dv: Any) -> None:
    """Computes dq of a part's rows, which no other chunk adds to, and adds to the sums of k and v."""
    of_keys = slice(chunk.key_begin, chunk.key_end)
    p, ds = part.buffers.p, part.buffers.ds
    if dq is not None:
        rows = torch.empty(part.q.shape, dtype=torch.float32, device=dq.device)
        product_into(rows, ds, part.k)
        rows = rows.view(part.kv_heads * part.members, chunk.rows, -1).transpose(0, 1)
        heads = slice(part.head, part.head + part.kv_heads * part.members)
        into = dq[part.batch, chunk.row_begin : chunk.row_begin + chunk.rows, heads]
        torch.mul(rows, problem.softmax_scale, out=into)
    for total, pairs, rows in ((dv, p, part.dout), (dk, ds, part.q)):
        if total is not None:
            into = total[part.batch, of_keys, part.kv_head : part.kv_head + part.kv_heads].transpose(0, 1)
            add_product(into, pairs.transpose(1, 2), rows)


def _scaled(total: torch.Tensor | None, scale: float, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns sums as a gradient: scaled, and rounded once."""
    if total is None or (dtype == torch.float32 and scale == 1.0):
        return total
    into = total if dtype == torch.float32 else torch.empty(total.shape, dtype=dtype, device=total.device)
    return torch.mul(total, scale, out=into)
