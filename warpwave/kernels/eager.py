"""Tiled attention in torch operations: any device, every feature, O(seqlen) memory, differentiable.

The online softmax of `flash_fwd` over large tiles, one torch operation per step. The backward keeps only out and the
log-sum-exp, and recomputes each tile's probabilities:

    P = exp(S - lse);   dV = P^T dO;   dS = P * (dO V^T - delta);   dQ = dS K;   dK = dS^T Q

with `delta = rowsum(dO * out) - dlse`, which also carries a gradient through the log-sum-exp (Dao et al.,
"FlashAttention" (2022), appendix B.4). Every product accumulates in float32, and scores and probabilities stay
float32 between the two products if the device's products allow it. For float64 inputs every step is float64.
Quantized q, k and v are multiplied by their factors first, in float32.

Bound: memory traffic of the score tiles, and on a GPU the launches of some ten operations a tile. It covers what no
other kernel does: gradients, CPUs, head sizes above every kernel's limit. Packed calls read the sequence offsets on
the host, which waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from warpwave import precision
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import descales, dropout, rules
from warpwave.kernels.arguments import Results, Run
from warpwave.kernels.eager_cost import cost as cost
from warpwave.kernels.paging import as_cached, as_packed, one_by_one
from warpwave.kernels.torch_products import plainly, product
from warpwave.operands import AnyOperands, Operands, QuantizedOperands, differentiable
from warpwave.problem import LARGEST_BIAS, AttentionProblem, Band

NAME = "eager"
NEEDS_GPU = False
STRIDED_OUT = True
QUANTIZED = True
QUANTIZED_CACHE = True
NEG_INF = float("-inf")


@dataclass(frozen=True)
class Config:
    """Rows and keys of a tile, over all batches and heads at once."""

    block_m: int
    block_n: int

    def __post_init__(self) -> None:
        rules.check_sizes(self, {}, ("block_m", "block_n"))


# A batch of sequences, and its tiles ----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A unit of computation: a whole dense call, or one sequence of a packed call."""

    batch: range
    tokens_q: slice
    tokens_k: slice


def _parts(problem: AttentionProblem, operands: AnyOperands) -> list[_Part]:
    if not problem.packed:
        return [_Part(range(problem.batch), slice(None), slice(None))]
    if operands.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("kernel 'eager' reads cu_seqlens on the host, which a CUDA graph cannot capture")
    q, k = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
    return [_Part(range(b, b + 1), slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(problem.batch)]


class _Views:
    """One part of the operands (or of their gradients), with query heads grouped by the kv head they read.

    q is (batch, num_heads_kv, group, seqlen_q, head_dim), k and v are (batch, num_heads_kv, seqlen_k, ...). Mask, bias
    and slopes broadcast to (batch, num_heads_kv, group, seqlen_q, seqlen_k), sinks to (batch, num_heads_kv, group, 1).
    Absent tensors are None.
    """

    def __init__(self, problem: AttentionProblem, operands: AnyOperands, part: _Part) -> None:
        self.groups = (problem.num_heads_kv, problem.num_heads_q // problem.num_heads_kv)
        self.packed = problem.packed
        self.q: Any = self.rows(operands.q, part.tokens_q)
        self.k: Any = self._keys(operands.k, part.tokens_k)
        self.v: Any = self._keys(operands.v, part.tokens_k)
        self.mask = self._scores_shaped(operands.mask)
        self.bias = self._scores_shaped(operands.bias)
        slopes, sinks = operands.alibi_slopes, operands.sinks
        if slopes is not None:
            slopes = slopes[None] if slopes.dim() == 1 else slopes[part.batch.start : part.batch.stop]
            slopes = slopes.to(_wide(problem)).unflatten(1, self.groups)[..., None, None]
        self.slopes = slopes
        self.seed: Any = operands.dropout_seed
        self.batch = part.batch
        self.sinks = None if sinks is None else sinks.view(1, *self.groups, 1)

    def rows(self, t: Any, tokens: slice) -> Any:
        """Returns a tensor in the layout of q or out as (batch, num_heads_kv, group, seqlen_q, width)."""
        if t is None:
            return None
        return (t[None, tokens] if self.packed else t).transpose(1, 2).unflatten(1, self.groups)

    def rows_of_lse(self, t: Any, tokens: slice) -> Any:
        """Returns a tensor in the layout of lse as (batch, num_heads_kv, group, seqlen_q)."""
        if t is None:
            return None
        return (t[None, :, tokens] if self.packed else t).unflatten(1, self.groups)

    def _keys(self, t: torch.Tensor | None, tokens: slice) -> torch.Tensor | None:
        return None if t is None else (t[None, tokens] if self.packed else t).transpose(1, 2)

    def _scores_shaped(self, t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        return t.unsqueeze(1) if t.shape[1] == 1 else t.unflatten(1, self.groups)


class _Tile(NamedTuple):
    rows: slice
    keys: slice
    cut: bool  # whether the band hides some pair of the tile

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the tile of a tensor whose last two axes are rows and keys, each of which may be broadcast."""
        t = t if t.shape[-2] == 1 else t[..., self.rows, :]
        return t if t.shape[-1] == 1 else t[..., self.keys]


def _tiles(band: Band, rows: slice, seqlen_k: int, block_n: int) -> Iterator[_Tile]:
    """Yields the key tiles that some row of the block sees."""
    low, high = band
    begin = 0 if low is None else max(0, rows.start + low)
    end = seqlen_k if high is None else min(seqlen_k, rows.stop + high)
    if low is not None and high is not None and low > high:
        return
    for key_begin in range(begin, end, block_n):
        key_end = min(key_begin + block_n, end)
        cut_low = low is not None and key_begin < rows.stop - 1 + low
        cut_high = high is not None and key_end - 1 > rows.start + high
        yield _Tile(rows, slice(key_begin, key_end), cut_low or cut_high)


def _row_blocks(seqlen_q: int, block_m: int) -> Iterator[slice]:
    for begin in range(0, seqlen_q, block_m):
        yield slice(begin, min(begin + block_m, seqlen_q))


# Scores ---------------------------------------------------------------------------------------------------------------


def _scores(
    problem: AttentionProblem, views: _Views, tile: _Tile, band: Band
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scores of a tile in natural units, float32 (batch, kv, group, rows, keys), minus infinity where
    masked; and, with a softcap, the tanh from which they are computed."""
    # One product for all the query heads of a kv head.
    q = views.q[..., tile.rows, :].flatten(2, 3)
    scores = product(q, views.k[..., tile.keys, :].transpose(-1, -2)) * problem.softmax_scale
    scores = scores.unflatten(2, (views.groups[1], -1))
    squashed = None
    if problem.softcap:
        squashed = torch.tanh(scores / problem.softcap)
        scores = squashed * problem.softcap
    if views.bias is not None:
        bias = tile.of(views.bias).to(_wide(problem))
        bias = torch.where(bias.isinf(), bias, bias.clamp(-LARGEST_BIAS, LARGEST_BIAS))
        # -inf hides the pair, whatever the score: NaN + -inf would be NaN.
        scores = torch.where(bias == NEG_INF, bias, scores + bias)
    if views.slopes is not None:
        scores = scores - views.slopes * _alibi_distance(views, tile)
    if tile.cut:
        distance = _distance(views, tile)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if band.low is not None:
            hidden |= distance < band.low
        if band.high is not None:
            hidden |= distance > band.high
        scores = scores.masked_fill(hidden, NEG_INF)
    if views.mask is not None:
        scores = scores.masked_fill(~tile.of(views.mask), NEG_INF)
    return scores, squashed


def _distance(views: _Views, tile: _Tile) -> torch.Tensor:
    """Returns key - row, (rows, keys)."""
    device = views.q.device
    rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)
    return torch.arange(tile.keys.start, tile.keys.stop, device=device) - rows[:, None]


def _alibi_distance(views: _Views, tile: _Tile) -> torch.Tensor:
    """Returns the distance between key and row, with positions counted back from the last key and the last row."""
    return (_distance(views, tile) - (views.k.shape[-2] - views.q.shape[-2])).abs()


def _without_unseen(t: torch.Tensor, tile: _Tile, scores: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Returns rows of K or V for each query head (batch, kv, group, keys, width), zero if no row of that head sees the
    key. Its probability is 0, but 0 * NaN would leak a hidden NaN."""
    t = t[..., tile.keys, :][:, :, None]
    if not _hides(tile, problem):
        return t
    seen = (scores != NEG_INF).any(-2)[..., None]
    return torch.where(seen, t, torch.zeros((), dtype=t.dtype, device=t.device))


def _without_blind(t: torch.Tensor, tile: _Tile, scores: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Returns rows of Q or dout, zero if a row sees no key of the tile: a NaN there would be multiplied by 0."""
    if not _hides(tile, problem):
        return t
    return torch.where((scores != NEG_INF).any(-1)[..., None], t, torch.zeros((), dtype=t.dtype, device=t.device))


def _hides(tile: _Tile, problem: AttentionProblem) -> bool:
    """Returns whether some pair of the tile may be hidden."""
    return tile.cut or problem.mask_shape is not None or problem.bias_shape is not None


def _kept(views: _Views, tile: _Tile, problem: AttentionProblem) -> torch.Tensor | None:
    """Returns which pairs of a tile dropout keeps, (batch, kv, group, rows, keys); None without dropout."""
    if not problem.dropout_p:
        return None
    rows, keys = (range(side.start, side.stop) for side in (tile.rows, tile.keys))
    kept = dropout.kept(problem.dropout_p, views.seed, views.batch, range(problem.num_heads_q), rows, keys)
    return kept.unflatten(1, views.groups)


def _dropped(t: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Returns probabilities, or their gradient, with 0 for the pairs that are not kept. The others are not scaled yet:
    a probability near 1 would be rounded to 16 bits more coarsely after scaling than before."""
    return t if kept is None else torch.where(kept, t, 0.0)


def _scaled(t: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """Returns a product of dropped probabilities, or their gradient, with dropout's scale."""
    return t * dropout.scale(problem.dropout_p) if problem.dropout_p else t


def _wide(problem: AttentionProblem) -> torch.dtype:
    """Returns the dtype of scores and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


def _operand(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a float32 factor in the dtype that the product needs: 16 bits if the GPU multiplies 16-bit operands."""
    return t.to(like.dtype) if like.is_cuda else t


# Forward --------------------------------------------------------------------------------------------------------------


def forward(
    problem: AttentionProblem, operands: AnyOperands, config: Config, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out, like q with head_dim_v, and lse, float32 (batch, num_heads_q, seqlen_q), packed (num_heads_q,
    total_q).

    Args:
        out: stored to if given, whatever its strides.
    """
    q = operands.q
    rows = (problem.total_q,) if problem.packed else (problem.batch, problem.seqlen_q)
    if out is None:
        out = torch.empty((*q.shape[:-1], problem.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((*rows[:-1], problem.num_heads_q, rows[-1]), dtype=_wide(problem), device=q.device)
    parts = _parts(problem, operands)
    if problem.packed and sum(part.tokens_q.stop - part.tokens_q.start for part in parts) != problem.total_q:
        out.zero_()  # some tokens belong to no sequence
        lse.fill_(NEG_INF)
    with plainly(q.device):
        for part in parts:
            views = _Views(problem, operands, part)
            out_rows, lse_rows = views.rows(out, part.tokens_q), views.rows_of_lse(lse, part.tokens_q)
            band = problem.band(views.q.shape[-2], views.k.shape[-2])
            for block in _row_blocks(views.q.shape[-2], config.block_m):
                out_rows[..., block, :], lse_rows[..., block] = _attend(problem, views, band, block, config.block_n)
    return out, lse


def _attend(
    problem: AttentionProblem, views: _Views, band: Band, block: slice, block_n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of a block of rows."""
    q = views.q[..., block, :]
    m = torch.full(q.shape[:-1], NEG_INF, dtype=_wide(problem), device=q.device)
    total = torch.zeros_like(m)
    acc = torch.zeros((*q.shape[:-1], problem.head_dim_v), dtype=_wide(problem), device=q.device)
    for tile in _tiles(band, block, views.k.shape[-2], block_n):
        scores, _ = _scores(problem, views, tile, band)
        m_new = m.maximum(scores.amax(-1))
        shift = torch.where(m_new == NEG_INF, 0.0, m_new)  # for a row that saw no key yet
        p = torch.exp(scores - shift[..., None])
        alpha = torch.exp(m - shift)
        total = total * alpha + p.sum(-1)
        v = _without_unseen(views.v, tile, scores, problem)
        p = _dropped(p, _kept(views, tile, problem))
        acc = acc * alpha[..., None] + product(_operand(p, v), v)
        m = m_new
    if views.sinks is not None:
        # The sink is one more key, whose value is zero. It is added last: as the first maximum it would push the
        # probabilities of lower scores out of the range of 16 bits.
        m_new = m.maximum(views.sinks)
        shift = torch.where(m_new == NEG_INF, 0.0, m_new)
        alpha = torch.exp(m - shift)
        acc, total, m = acc * alpha[..., None], total * alpha + torch.exp(views.sinks - shift), m_new
    unseen = total == 0
    out = _scaled(acc, problem) / torch.where(unseen, 1.0, total)[..., None]
    return out.to(q.dtype), torch.where(unseen, NEG_INF, m + torch.log(total))


# Gradients ------------------------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients of the operands that can have one; None for those not requested."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None


def backward(
    problem: AttentionProblem,
    operands: AnyOperands,
    config: Config,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    wanted: Sequence[bool],
) -> Gradients:
    """Returns the gradients named by `wanted` (in the order of `Gradients`), each in the shape and dtype of its
    operand.

    Deterministic: no atomics, sums in a fixed order.
    """
    sources = differentiable(operands)
    sums = Gradients(
        *(
            torch.zeros(t.shape, dtype=_wide(problem), device=t.device) if want else None
            for t, want in zip(sources, wanted, strict=True)
        )
    )
    grad_operands = Operands(sums.q, sums.k, sums.v, None, sums.bias, sums.alibi_slopes, sums.sinks)
    with plainly(operands.q.device):
        for part in _parts(problem, operands):
            views = _Views(problem, operands, part)
            grads = _Views(problem, grad_operands, part)  # views of the sums: adding to them adds to the sums
            rows = [views.rows(t, part.tokens_q) for t in (out, dout)]
            rows += [views.rows_of_lse(t, part.tokens_q) for t in (lse, dlse)]
            band = problem.band(views.q.shape[-2], views.k.shape[-2])
            for block in _row_blocks(views.q.shape[-2], config.block_m):
                _attend_backward(problem, views, grads, band, block, config.block_n, *rows)
    return Gradients(*(None if g is None else g.to(t.dtype) for g, t in zip(sums, sources, strict=True)))


def _attend_backward(
    problem: AttentionProblem,
    views: _Views,
    grads: _Views,
    band: Band,
    block: slice,
    block_n: int,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> None:
    """Adds the contributions of one block of rows to every gradient."""
    out, dout, lse = out[..., block, :], dout[..., block, :], lse[..., block]
    # A row that sees nothing has out 0 whatever its upstream gradient is, NaN included.
    delta = torch.where(out == 0, 0.0, dout.to(_wide(problem)) * out.to(_wide(problem))).sum(-1)
    if dlse is not None:
        delta = delta - dlse[..., block]
    shift = torch.where(lse == NEG_INF, 0.0, lse)  # a row that saw nothing has only probabilities exp(-inf) = 0
    if grads.sinks is not None and views.sinks is not None:
        grads.sinks -= (torch.exp(views.sinks - shift) * delta).sum((0, -1), keepdim=True)
    ds_sum, p_distance = torch.zeros_like(delta), torch.zeros_like(delta)  # of a row: dS, and P times the distance

    for tile in _tiles(band, block, views.k.shape[-2], block_n):
        scores, squashed = _scores(problem, views, tile, band)
        p, kept = torch.exp(scores - shift[..., None]), _kept(views, tile, problem)
        q_heads, dout_heads = (
            _without_blind(t, tile, scores, problem).flatten(2, 3) for t in (views.q[..., block, :], dout)
        )
        if grads.v is not None:
            p_of_v = _operand(_dropped(p, kept), dout).flatten(2, 3)
            grads.v[..., tile.keys, :] += _scaled(product(p_of_v.transpose(-1, -2), dout_heads), problem)
        dp = product(dout_heads, views.v[..., tile.keys, :].transpose(-1, -2)).unflatten(2, p.shape[2:4])
        dp = _scaled(_dropped(dp, kept), problem)
        ds = torch.where(scores == NEG_INF, 0.0, p * (dp - delta[..., None]))
        if grads.bias is not None:
            part = tile.of(grads.bias)
            part += ds.sum_to_size(part.shape)
        if grads.slopes is not None:
            distance = _alibi_distance(views, tile)
            grads.slopes -= (ds * distance).sum_to_size(grads.slopes.shape)
            ds_sum += ds.sum(-1)
            p_distance += (p * distance).sum(-1)
        if squashed is not None:  # NaN where a score is hidden
            ds = torch.where(scores == NEG_INF, 0.0, ds * (1 - squashed * squashed))
        # The scale is applied after the products: before, it would push a small ds out of the range of 16 bits.
        if grads.q is not None:
            k = _without_unseen(views.k, tile, scores, problem)
            grads.q[..., block, :] += product(_operand(ds, k), k) * problem.softmax_scale
        if grads.k is not None:
            dk = product(_operand(ds, q_heads).flatten(2, 3).transpose(-1, -2), q_heads)
            grads.k[..., tile.keys, :] += dk * problem.softmax_scale
    if grads.slopes is not None:
        # out is rounded, so the computed dS of a row do not add up to the exact sum, dLSE + P(sink) * delta. The excess
        # would be multiplied by whole distances, which may exceed their differences by far.
        excess = ds_sum if dlse is None else ds_sum - dlse[..., block]
        if views.sinks is not None:
            excess = excess - torch.exp(views.sinks - shift) * delta
        of_rows = torch.where(p_distance == 0, 0.0, excess * p_distance).sum(-1)
        grads.slopes += of_rows.sum_to_size(grads.slopes.shape[:3])[..., None, None]


# Host -----------------------------------------------------------------------------------------------------------------


def bind(problem: AttentionProblem, operands: Any, config: Config, out: torch.Tensor | None = None) -> Run:
    """Returns `run(operands, out=None) -> (out, lse)`, where lse is None unless requested or needed for gradients."""
    keep_lse = problem.return_lse or problem.requires_grad

    def run(operands: Any, out: torch.Tensor | None = None) -> Results:
        lse: torch.Tensor | None
        if not (problem.is_quantized or problem.page_size):
            out, lse = forward(problem, operands, config, out)
        else:
            on_copies = _forward_of_quantized if problem.is_quantized else _forward_on_cache
            with plainly(operands.q.device):
                found, lse = on_copies(problem, operands, config)
                out = found if out is None else out.copy_(found)
        return out, lse if keep_lse else None

    return run


def _forward_of_quantized(problem: AttentionProblem, operands: QuantizedOperands, config: Config) -> Results:
    wide, numbers = descales.dequantized(problem, operands, torch.float32)
    out, lse = forward(wide, numbers, config)
    return descales.to_out(out, problem, operands.out_descale), lse


def _forward_on_cache(problem: AttentionProblem, operands: Any, config: Config) -> Results:
    packed, gathered = as_packed(problem, operands)
    if problem.batch_invariant:
        # Sequences run one by one, in separate tiles and memory, because tile sizes depend on the batch, and a CPU's
        # products depend on the alignment of their operands.
        gpu = current_gpu(gathered.q.device)
        each = [forward(*one, configs(one[0], gpu)[0]) for one in one_by_one(packed, gathered)]
        out = torch.cat([out for out, _ in each])
        lse = torch.cat([lse for _, lse in each], dim=1)
        missing = packed.total_q - len(out)  # tokens that belong to no sequence
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing))
        lse = torch.nn.functional.pad(lse, (0, missing), value=NEG_INF)
    else:
        out, lse = forward(packed, gathered, config)
    return as_cached(problem, out.to(operands.q.dtype), lse)


# What it can run and what it costs ------------------------------------------------------------------------------------


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns [], because eager runs everything everywhere, unless error_budget is below the error of torch's float32
    products."""
    return precision.why_not(problem, gpu, ("ieee",))


# Configs --------------------------------------------------------------------------------------------------------------

# Score elements of a tile, over all batches and heads; three float32 copies of it are live at once. 4 Mi elements keep
# them in 48 MB, about the last-level cache of a large CPU and the L2 of a large GPU.
TILE_ELEMENTS = 4 * 1024 * 1024


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the default first: tiles of bounded size, so that memory grows with seqlen and not with its square."""
    heads = max(1, (1 if problem.packed else problem.batch) * problem.num_heads_q)
    side = 1 << (max(256, math.isqrt(TILE_ELEMENTS // heads)).bit_length() - 1)
    default = Config(min(side, 1024), min(2 * side, 2048))
    return [default, *(c for c in (Config(128, 512), Config(256, 256), Config(512, 1024)) if c != default)]
