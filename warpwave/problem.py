"""`AttentionProblem`: the description of one attention call, and the facts that follow from it alone.

The dispatcher, the bounds, the benchmark and the tests all describe a call by this class. It contains shapes
and options, never tensors, devices or kernels, and imports nothing of this package. What a *technique* adds (scores
written to memory, padding to a tile) is stated by that kernel's `cost`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, **dict.fromkeys(QUANTIZED_DTYPES, 1)}
# warpwave/precision.py defines them.
PRECISIONS = ("default", "ieee", "tf32x3", "tf32", "bf16x6", "bf16x3", "fp16x3", "fp16x1")

# A finite bias of larger magnitude is clamped to this: scores are in units of log2, where float32 would overflow.
LARGEST_BIAS = 2.35e38

Alignment = Literal["bottom_right", "top_left"]


@dataclass(frozen=True)
class Causal:
    """A causal mask and the corner it is aligned to.

    Args:
        alignment: `"bottom_right"`: query i sees keys j <= i + seqlen_k - seqlen_q, so the last query sees every key
            (FlashAttention's convention). `"top_left"`: query i sees keys j <= i (torch's `is_causal`).
    """

    alignment: Alignment = "bottom_right"

    def __post_init__(self) -> None:
        if self.alignment not in ("bottom_right", "top_left"):
            raise ValueError(f"Causal alignment is {self.alignment!r}; it must be 'bottom_right' or 'top_left'")


class Band(NamedTuple):
    """The positional mask of one sequence: query i sees keys j with `low <= j - i <= high`; None is unlimited.

    Causal masks of either alignment, sliding windows and both together all have this form. Kernels therefore handle
    them with one comparison per side and can tell which key tiles are hidden, fully visible, or cut by an edge.
    """

    low: int | None
    high: int | None

    def keys(self, i: int, seqlen_k: int) -> range:
        """Returns the keys that query i sees."""
        first = 0 if self.low is None else max(0, i + self.low)
        last = seqlen_k - 1 if self.high is None else min(seqlen_k - 1, i + self.high)
        return range(first, max(first, last + 1))

    def pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Returns how many (query, key) pairs are visible, in closed form."""
        upper = seqlen_q * seqlen_k if self.high is None else _pairs_up_to(self.high, seqlen_q, seqlen_k)
        lower = 0 if self.low is None else _pairs_up_to(self.low - 1, seqlen_q, seqlen_k)
        return max(0, upper - lower)

    def keys_seen(self, seqlen_q: int, seqlen_k: int) -> int:
        """Returns how many keys at least one query sees. The visible ranges of adjacent queries overlap or touch."""
        if seqlen_q == 0 or (self.low is not None and self.high is not None and self.low > self.high):
            return 0
        first = 0 if self.low is None else max(0, self.low)
        last = seqlen_k - 1 if self.high is None else min(seqlen_k - 1, seqlen_q - 1 + self.high)
        return max(0, last - first + 1)

    def rows_that_see(self, seqlen_q: int, seqlen_k: int) -> int:
        """Returns how many queries see at least one key: `keys_seen` with queries and keys exchanged."""
        low, high = (None if side is None else -side for side in self)
        return Band(high, low).keys_seen(seqlen_k, seqlen_q)


def _pairs_up_to(diagonal: int, seqlen_q: int, seqlen_k: int) -> int:
    """Counts the pairs with j - i <= diagonal: the sum over i < seqlen_q of clamp(i + diagonal + 1, 0, seqlen_k)."""
    first_row = min(max(0, -diagonal), seqlen_q)  # rows before it see nothing
    full_row = min(max(first_row, seqlen_k - diagonal - 1), seqlen_q)  # rows from it on see every key
    n = full_row - first_row
    ramp = n * (first_row + diagonal + 1) + n * (n - 1) // 2
    return ramp + (seqlen_q - full_row) * seqlen_k


class Work(NamedTuple):
    """The least work of one pass of a call, the forward or the backward, over visible pairs.

    Attributes:
        flops: multiplications and additions of the products.
        exponentials: one for each pair, and one per row for a sink.
        compulsory_bytes: bytes that cross the memory bus: each needed input read once, each output written once.
        over_head_dim, over_head_dim_v: products of a pair that read or write head_dim columns, and head_dim_v.
    """

    flops: int
    exponentials: int
    compulsory_bytes: int
    over_head_dim: int
    over_head_dim_v: int

    @property
    def is_backward(self) -> bool:
        return self.over_head_dim > 1


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """One attention call: `out = softmax(mask(bias(softcap(softmax_scale * q k^T)))) v`, with all its options.

    Frozen and hashable: two calls with the same problem run the same kernel and config.

    Args:
        batch: number of sequences.
        seqlen_q, seqlen_k: tokens per sequence; for packed calls the longest sequence (`max_seqlen_q`, `max_seqlen_k`).
        num_heads_q, num_heads_kv: query head h reads key/value head `h // (num_heads_q // num_heads_kv)`.
        head_dim, head_dim_v: width of q and k, and of v and out.
        dtype: `"float16"`, `"bfloat16"`, `"float32"` or `"float64"`, of q, k, v and out; or one of `QUANTIZED_DTYPES`,
            of q and k.
        causal: a `Causal`, or None.
        window_size: (left, right), keys a query sees before and after its own position, inclusive and aligned to the
            last key; -1 is unlimited.
        mask_shape: shape of the boolean mask as given (rank 4, size-1 axes broadcast), or None.
        bias_shape, bias_dtype: the same for the additive bias.
        alibi_shape: `(num_heads_q,)` or `(batch, num_heads_q)`, or None.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        has_sinks: one extra logit per query head joins the denominator.
        softmax_scale: resolved: 1/sqrt(head_dim) if the caller gave none.
        precision: for float32 inputs, how products are computed: one of `PRECISIONS`.
        packed: variable lengths: q is (total_q, heads, head_dim), k and v (total_k, heads, head_dim).
        total_q, total_k: tokens in the packed tensors; 0 if not packed.
        lengths: the (seqlen_q, seqlen_k) of each packed sequence if the caller knows them on the host, else None.
        mask_visible_pairs: (query, key) pairs over all batches and query heads that both the boolean mask and the
            positional masks show, if they were counted; None counts the boolean mask as showing everything.
        return_lse: whether the log-sum-exp is an output.
        requires_grad: whether a gradient will be computed.
        dropout_p: the probability with which a probability is dropped after the softmax; 0 is off.
        deterministic: whether gradients must have the same bits in every run. False without gradients.
        page_size: tokens of a page if k and v are pools of pages, (num_pages, page_size, num_heads_kv, head_dim), that
            a page table maps sequences to; otherwise 0. `packed` then refers to q alone, `seqlen_k` is the longest
            sequence that may occur, and `total_k` is `batch * seqlen_k`.
        batch_invariant: whether a sequence's result must have the same bits whatever else is in the batch.
        error_budget: for float32 inputs, the relative error that out may have, instead of a named `precision`, which
            is then "default"; None if none was given.
        dtype_v: of v, if q and k are quantized; None: `dtype`.
        dtype_out: of out, if q and k are quantized; None: `dtype`.
        descale_blocks: of quantized q, k and v: the number of consecutive tokens that share one factor, 64 or 128; 0 if
            all tokens of a head do. None if nothing is quantized.
        dtype_kv: of K and V in a paged cache of 8-bit numbers, `"float8_e4m3fn"` or `"int8"`; None: `dtype`.
        kv_factors: what shares a factor of such a cache: `"head"`, or `"token"` for each head of each token.
        v_in_k: whether v is the first head_dim_v columns of k, as in a latent cache, so that memory holds them once.
            It is set for calls whose tensors are so, if `looks_latent`; kernels compare the tensors of each call.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    softmax_scale: float
    causal: Causal | None = None
    window_size: tuple[int, int] = (-1, -1)
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    alibi_shape: tuple[int, ...] | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    precision: str = "default"
    packed: bool = False
    total_q: int = 0
    total_k: int = 0
    lengths: tuple[tuple[int, int], ...] | None = None
    mask_visible_pairs: int | None = None
    return_lse: bool = False
    requires_grad: bool = False
    page_size: int = 0
    batch_invariant: bool = False
    error_budget: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    dtype_v: str | None = None
    dtype_out: str | None = None
    descale_blocks: tuple[int, int, int] | None = None
    dtype_kv: str | None = None
    kv_factors: str | None = None
    v_in_k: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.descale_blocks is not None

    @property
    def dtype_of_k(self) -> str:
        return self.dtype_kv or self.dtype

    @property
    def dtype_of_v(self) -> str:
        return self.dtype_kv or self.dtype_v or self.dtype

    @property
    def dtype_of_out(self) -> str:
        return self.dtype_out or self.dtype

    @cached_property
    def heads_together(self) -> int:
        """The query heads whose rows may share tiles: those that read one kv head. If heads may see different keys it
        is 1, because a NaN that one head sees would reach another."""
        for shape in (self.mask_shape, self.bias_shape):
            if shape is not None and shape[1] > 1:
                return 1
        return self.num_heads_q // self.num_heads_kv

    @property
    def kind(self) -> object:
        """The same object for problems that differ only in `SIZES`, the scale, the size of a softcap, the probability
        of dropout, and the lengths of those axes of a mask or bias that are not broadcast. `by_kind` evaluates a rule
        that reads none of these once per kind."""
        fields = self.__dict__
        found = fields.get("_kind")
        if found is None:
            shapes = [shape and tuple([n == 1 for n in shape]) for shape in (self.mask_shape, self.bias_shape)]
            alibi = self.alibi_shape and len(self.alibi_shape)
            alignment = self.causal and self.causal.alignment
            switches = (alignment, self.softcap > 0, self.dropout_p > 0)
            key = (*[fields[name] for name in _FIELDS_OF_KIND], *switches, *shapes, alibi)
            if len(_kinds) >= MAX_KINDS:
                _kinds.clear()
            found = fields["_kind"] = _kinds.setdefault(key, object())
        return found

    # Visible pairs ---------------------------------------------------------------------------------------------------

    @property
    def has_band(self) -> bool:
        """Whether position alone hides some pair."""
        return self.causal is not None or self.window_size != (-1, -1)

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        """Returns the positional mask of one sequence with these lengths."""
        last_key_offset = seqlen_k - seqlen_q
        left, right = self.window_size
        low = None if left < 0 else last_key_offset - left
        high = None if right < 0 else last_key_offset + right
        if self.causal is not None:
            diagonal = 0 if self.causal.alignment == "top_left" else last_key_offset
            high = diagonal if high is None else min(high, diagonal)
        return Band(low, high)

    def items(self) -> Iterator[tuple[int, int]]:
        """Yields (seqlen_q, seqlen_k) of every sequence. Packed lengths that the host does not know are assumed
        equal."""
        if not self.packed:
            yield from [(self.seqlen_q, self.seqlen_k)] * self.batch
        elif self.lengths is not None:
            yield from self.lengths
        else:
            for b in range(self.batch):
                yield (_share(self.total_q, self.batch, b), _share(self.total_k, self.batch, b))

    def counted_items(self) -> dict[tuple[int, int], int]:
        """Returns each of `items` once, with the number of sequences that have these lengths."""
        if self.packed:
            return Counter(self.items())
        return {(self.seqlen_q, self.seqlen_k): self.batch} if self.batch else {}

    @property
    def pairs_are_exact(self) -> bool:
        """False if lengths or a boolean mask are on the device, uncounted: then the figures below are estimates."""
        lengths_known = not self.packed or self.lengths is not None
        return lengths_known and (self.mask_shape is None or self.mask_visible_pairs is not None)

    @property
    def visible_pairs(self) -> int:
        """Returns the (query, key) pairs to compute, over all sequences and query heads, by the masks alone."""
        if self.mask_visible_pairs is not None:
            return self.mask_visible_pairs
        return self.num_heads_q * self._sum_over_items(lambda sq, sk: self.band(sq, sk).pairs(sq, sk))

    # Compulsory work -------------------------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """Returns the multiplications and additions of the two products over visible pairs; softmax is not counted."""
        return 2 * self.visible_pairs * (self.head_dim + self.head_dim_v)

    @property
    def exponentials(self) -> int:
        """Returns the exponentials: one for each visible pair, and one per row for a sink."""
        return self.visible_pairs + (self.rows * self.num_heads_q if self.has_sinks else 0)

    def work(self, is_backward: bool = False) -> Work:
        """Returns the least work of the forward, or of a backward that recomputes the scores.

        The backward has five products: S = QK^T, dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q, 2.5 times the
        operations of the forward. It reads q, k, v and the gradient of out, and writes the gradients of q, k and v. It
        need not read out and the log-sum-exp, because both follow from S, dP and v.
        """
        if not is_backward:
            return Work(self.flops, self.exponentials, self.compulsory_bytes, 1, 1)
        size, width = DTYPE_BYTES[self.dtype], self.head_dim + self.head_dim_v
        of_lse = self.lse_bytes if self.return_lse else 0
        keys = (self.total_k if self.packed else self.batch * self.seqlen_k) * self.num_heads_kv
        rows = self.rows * self.num_heads_q
        # As in the forward, with the needed rows of dO for out; and dQ, dK, dV.
        moved = self.compulsory_bytes - of_lse - size * (rows - self.queries_needed) * self.head_dim_v
        moved += size * (rows * self.head_dim + keys * width)
        flops = 2 * self.visible_pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        return Work(flops, self.exponentials, moved, 3, 2)

    @property
    def rows(self) -> int:
        """Query tokens over all sequences."""
        return self.total_q if self.packed else self.batch * self.seqlen_q

    @property
    def lse_bytes(self) -> int:
        """Returns the bytes of the log-sum-exp of all rows: float32, or float64 for float64 inputs."""
        return max(4, DTYPE_BYTES[self.dtype]) * self.rows * self.num_heads_q

    @property
    def compulsory_bytes(self) -> int:
        """Returns the bytes that any implementation must move through device memory: each needed input read once, each
        output written once. Not counted are keys that no query sees, queries that see no key, cells of a mask or bias
        whose pair is hidden by position, and their broadcast axes."""
        size, size_out = DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.dtype_of_out]
        total = self.queries_needed * self.head_dim * size
        total += self.rows * self.num_heads_q * self.head_dim_v * size_out
        total += self.keys_needed * self.bytes_of_key
        total += self._bytes_of_factors()
        if self.mask_shape is not None:
            total += self._cells_needed(self.mask_shape)
        if self.bias_shape is not None:
            total += self._cells_needed(self.bias_shape) * DTYPE_BYTES[self.bias_dtype or self.dtype]
        if self.alibi_shape is not None:
            total += math.prod(self.alibi_shape) * 4
        if self.has_sinks:
            total += self.num_heads_q * 4
        if self.page_size:
            pages = self._sum_over_items(lambda sq, sk: -(-self.band(sq, sk).keys_seen(sq, sk) // self.page_size))
            total += 4 * (pages + self.batch + (self.batch + 1) * self.packed)
        elif self.packed:
            total += 2 * (self.batch + 1) * 4
        if self.return_lse:
            total += self.lse_bytes
        if self.dropout_p:
            total += 16
        return total

    @property
    def bytes_of_key(self) -> int:
        """Returns the bytes of a key and its value, of one kv head, without factors."""
        return self.head_dim * DTYPE_BYTES[self.dtype_of_k] + self.bytes_of_value

    @property
    def bytes_of_value(self) -> int:
        """Returns the bytes of a value, of one kv head, beside its key; 0 if it is part of the key."""
        return 0 if self.v_in_k else self.head_dim_v * DTYPE_BYTES[self.dtype_of_v]

    @property
    def looks_latent(self) -> bool:
        """Returns whether v is likely to be part of k, by the widths: one kv head, wider than its values."""
        return self.num_heads_kv == 1 and self.head_dim_v < self.head_dim

    def _bytes_of_factors(self) -> int:
        """Returns the bytes of the factors of q, k and v: one number for each block of tokens, or one for a tensor; of
        a cache, one for each head, or each head of each token, of k and of v."""
        if self.kv_factors is not None:
            return 8 * (self.keys_needed if self.kv_factors == "token" else self.num_heads_kv)
        if self.descale_blocks is None:
            return 0
        block_q, block_k, block_v = self.descale_blocks
        counts = [self.rows * self.num_heads_q // block_q if block_q else 1]
        for block, dtype in ((block_k, self.dtype), (block_v, self.dtype_of_v)):
            if dtype in QUANTIZED_DTYPES:
                counts.append(self.keys_needed // block if block else 1)
        return sum(4 * max(1, count) for count in counts)

    @property
    def keys_needed(self) -> int:
        """Returns a lower bound of the rows of K, over all batches and kv heads, that some visible pair needs."""
        keys = self.num_heads_kv * self._sum_over_items(lambda sq, sk: self.band(sq, sk).keys_seen(sq, sk))
        if self.mask_visible_pairs is None:
            return keys
        # The keys that a boolean mask hides from all queries are unknown here, but a key is in at most one pair per
        # row.
        pairs_a_key = max(1, self.seqlen_q * self.num_heads_q // self.num_heads_kv)
        return min(keys, -(-self.mask_visible_pairs // pairs_a_key))

    @property
    def queries_needed(self) -> int:
        """Returns a lower bound of the rows of Q, over all batches and query heads, that some visible pair needs."""
        queries = self.num_heads_q * self._sum_over_items(lambda sq, sk: self.band(sq, sk).rows_that_see(sq, sk))
        if self.mask_visible_pairs is None:
            return queries
        return min(queries, -(-self.mask_visible_pairs // max(1, self.seqlen_k)))

    def _cells_needed(self, shape: tuple[int, ...]) -> int:
        """Returns the cells of a mask or bias whose pair the positional masks show, with size-1 axes read once."""
        *outer, rows, keys = shape
        band = self.band(self.seqlen_q, self.seqlen_k)
        if rows > 1 and keys > 1:
            cells = band.pairs(self.seqlen_q, self.seqlen_k)
        elif keys > 1:
            cells = band.keys_seen(self.seqlen_q, self.seqlen_k)
        elif rows > 1:
            cells = band.rows_that_see(self.seqlen_q, self.seqlen_k)
        else:
            cells = rows * keys
        return math.prod(outer) * cells

    @property
    def intensity(self) -> float:
        """Returns the FLOPs per compulsory byte."""
        return self.flops / max(1, self.compulsory_bytes)

    def _sum_over_items(self, count: Any) -> int:
        return sum(times * count(sq, sk) for (sq, sk), times in self.counted_items().items())

    # Names -----------------------------------------------------------------------------------------------------------

    def cache_key(self) -> str:
        """Returns a short stable name of all fields, equal for equal problems in any process and version of Python."""
        text = ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Returns one line for people: sizes first, then all unusual options."""
        heads = (
            f"{self.num_heads_q}"
            if self.num_heads_q == self.num_heads_kv
            else f"{self.num_heads_q}/{self.num_heads_kv}"
        )
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q} x {self.seqlen_k}"
        if self.packed and self.page_size:
            lengths = f"packed, {self.total_q} tokens, at most {lengths}"
        elif self.packed:
            lengths = f"packed, {self.total_q} and {self.total_k} tokens, at most {lengths}"
        parts = [f"batch {self.batch}, seqlen {lengths}, heads {heads}, head_dim {dims}, {self.dtype}"]
        if self.causal is not None:
            parts.append("causal" if self.causal.alignment == "bottom_right" else "causal top-left")
        if self.window_size != (-1, -1):
            parts.append(f"window {self.window_size}")
        if self.mask_shape is not None:
            parts.append(f"mask {self.mask_shape}")
        if self.bias_shape is not None:
            parts.append(f"bias {self.bias_shape} {self.bias_dtype}")
        if self.alibi_shape is not None:
            parts.append("ALiBi")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.has_sinks:
            parts.append("sinks")
        if self.page_size:
            parts.append(f"cache in pages of {self.page_size}")
        if self.dtype_kv:
            parts.append(f"k and v {self.dtype_kv}, a factor for each {self.kv_factors}")
        if self.v_in_k:
            parts.append("v in k")
        if self.batch_invariant:
            parts.append("batch-invariant")
        if self.dtype == "float32":
            budget = self.error_budget
            parts.append(f"precision {self.precision}" if budget is None else f"relative error at most {budget:g}")
        if self.descale_blocks is not None:
            parts.append(f"v {self.dtype_of_v}, out {self.dtype_of_out}")
            shares = ("one of a head" if block == 0 else f"one of {block} tokens" for block in self.descale_blocks)
            parts.append(f"factors of q, k, v: {', '.join(shares)}")
        if self.return_lse:
            parts.append("with lse")
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p:g}")
        if self.requires_grad:
            parts.append("with deterministic gradients" if self.deterministic else "with gradients")
        return ", ".join(parts)


SIZES = ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "lengths", "mask_visible_pairs")
_FIELDS_OF_KIND = tuple(
    field.name
    for field in fields(AttentionProblem)
    if field.name
    not in (*SIZES, "causal", "softmax_scale", "softcap", "dropout_p", "mask_shape", "bias_shape", "alibi_shape")
)
_kinds: dict[tuple[Any, ...], object] = {}
MAX_KINDS = 4096
MAX_RULINGS = 4096  # per rule

P = ParamSpec("P")
R = TypeVar("R")


def by_kind(rule: Callable[Concatenate[AttentionProblem, P], R]) -> Callable[Concatenate[AttentionProblem, P], R]:
    """Evaluates a rule once for each kind of problem, so that a new length costs a look-up.

    Args:
        rule: a function of a problem and of hashable arguments that reads no size. In the problem that it gets, `SIZES`
            and the scale are None, so that computing with them raises; softcap is 0 or 1, dropout_p 0 or 0.5; axes of
            mask and bias are 1 or 2.

    Returns:
        The same function. Callers must not change what it returns.
    """
    # Kind and ids of the arguments -> result and arguments. Ids, because hashing a dataclass runs Python code. The
    # arguments are kept so that no other object gets their ids.
    found: dict[tuple[Any, ...], tuple[R, Any]] = {}

    @wraps(rule)
    def of_kind(problem: AttentionProblem, *rest: P.args, **named: P.kwargs) -> R:
        if problem.error_budget is not None:  # its error depends on the number of keys
            return rule(problem, *rest, **named)
        key = (problem.__dict__.get("_kind") or problem.kind, *map(id, rest))
        if named:
            key += (*named.items(),)
        try:
            return found[key][0]
        except KeyError:
            if len(found) >= MAX_RULINGS:
                found.clear()
            return found.setdefault(key, (rule(_without_sizes(problem), *rest, **named), rest))[0]

    return of_kind


def _without_sizes(problem: AttentionProblem) -> AttentionProblem:
    def shape(of: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if of is None else tuple(1 if n == 1 else 2 for n in of)

    return replace(
        problem,
        **dict.fromkeys((*SIZES, "softmax_scale")),  # type: ignore[arg-type]
        softcap=float(problem.softcap > 0),
        dropout_p=0.5 * (problem.dropout_p > 0),
        mask_shape=shape(problem.mask_shape),
        bias_shape=shape(problem.bias_shape),
        alibi_shape=shape(problem.alibi_shape),
    )


def _share(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)
