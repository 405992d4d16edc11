"""Calls on a paged cache: the implementation of `attention_with_kv_cache`.

Lengths and page tables are contents of tensors, so they change without a new plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch

from warpwave import autograd, dispatch, plans
from warpwave.checks.calls import describe_cached_call
from warpwave.checks.out import check_apart, check_out
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.gpu import Gpu
from warpwave.kernels import descales
from warpwave.kernels.family import Family
from warpwave.kv_cache import (
    CacheLayer,
    PagedKVCache,
    Rotary,
    check_cache_contents,
    check_counts,
    check_positions,
    integers,
    new_tokens,
    values_in,
)
from warpwave.operands import CachedOperands, DropoutOperands, Operands, QuantizedOperands
from warpwave.options import Options
from warpwave.problem import AttentionProblem

append_kv, split_kv = Family("append_kv"), dispatch.split_kv
# The largest num_splits of a call: 16 keys in each split of a million. At head_dim_v 128, the partial results of one
# row then take 34 MB.
MOST_SPLITS = 65_536


OfCall = TypeVar("OfCall", bound=Callable[..., Any])


def outside_graphs(call: OfCall) -> OfCall:
    """Decorates a call at which torch.compile breaks its graph, instead of tracing all that the host does in it."""
    apart = torch._disable_dynamo(call)  # torch.compiler.disable would import Dynamo now, which takes a second

    @wraps(call)
    def outside(*arguments: Any, **options: Any) -> Any:
        return (apart if autograd.is_compiling() else call)(*arguments, **options)

    return outside  # type: ignore[return-value]


class Serving(NamedTuple):
    """Options that only calls on a cache have.

    Attributes:
        num_splits: number of splits of the keys, None for the closed form's.
        batch_invariant: whether a sequence's bits must not depend on the batch.
        shared_prefix: identical tokens at the beginning of every sequence, read once for all; 0 for none.
    """

    num_splits: int | None = None
    batch_invariant: bool = False
    shared_prefix: int = 0


def check_records(
    cache: PagedKVCache,
    rows: Sequence[int],
    queries: Sequence[int] | None,
    appended: Sequence[int] | None,
    window_left: int,
    max_seqlen_k: int | None,
) -> None:
    """Compares a call with what the cache knows on the host. Rows without a sequence have no tokens, and pass.

    Args:
        queries: of each row; None if they are not known.
        appended: the tokens that the call appends to each row; None for none, or if they are not known.

    Raises:
        InvalidInput: a query would see tokens that were evicted, or a sequence is longer than `max_seqlen_k`.
    """
    unknown = [0] * len(rows)
    for row, count, new in zip(rows, queries or unknown, appended or unknown, strict=False):
        begin, length = cache.kept(row)
        length += new
        has_queries = queries is None or count > 0
        if has_queries and begin and (window_left < 0 or length - count - window_left < begin):
            raise InvalidInput(
                f"the tokens of row {row} before {begin} were evicted; with a left window of {window_left} (-1: none) "
                f"and {count} queries at the end of its {length} tokens, the call needs them"
            )
        if max_seqlen_k and length > max_seqlen_k:
            raise InvalidInput(
                f"max_seqlen_k is {max_seqlen_k} and row {row} has {length} tokens; it must be at least {length}, or "
                "None"
            )


def layer_of(cache: Any) -> CacheLayer:
    """Returns the layer that a call reads.

    Raises:
        InvalidInput, InvalidType: the argument is not a cache, or is a cache of several layers.
    """
    if isinstance(cache, PagedKVCache):
        return cache.layer
    if isinstance(cache, CacheLayer):
        return cache
    raise InvalidType(f"cache is a {type(cache).__name__}; it must be a warpwave.PagedKVCache or CacheLayer")


def index_of(cache: PagedKVCache | CacheLayer, rows: Sequence[int]) -> torch.Tensor:
    """Returns rows given as integers as int32 on the cache's device."""
    if isinstance(cache, PagedKVCache):
        return cache.index(rows)
    rows = integers("rows", rows, "a row")
    if not isinstance(cache.page_table, torch.Tensor):
        raise InvalidType(f"page_table is a {type(cache.page_table).__name__}; it must be a torch.Tensor")
    count = len(cache.page_table) if cache.page_table.dim() else 0
    for i, row in enumerate(rows):
        if not 0 <= row < count:
            raise InvalidInput(f"rows[{i}] is {row}; the cache has {count} rows")
    return torch.tensor(rows, dtype=torch.int32, device="cpu").to(cache.page_table.device)


def longest_query(q: torch.Tensor, cu_seqlens_q: Any, seqlens_q: list[int] | None, max_seqlen_q: int | None) -> int:
    """Returns the most queries of a sequence; 0 if they are not packed, because their shape determines it.

    Raises:
        InvalidInput, InvalidType: the arguments do not determine it, or contradict each other.
    """
    if cu_seqlens_q is None:
        for name, value in (("seqlens_q", seqlens_q), ("max_seqlen_q", max_seqlen_q)):
            if value is not None:
                raise InvalidInput(f"{name} was given without cu_seqlens_q; only packed queries have it")
        return 0
    if seqlens_q is None:
        if max_seqlen_q is None:
            raise InvalidInput("cu_seqlens_q was given without max_seqlen_q; give it or seqlens_q, as host integers")
        return max_seqlen_q
    if not isinstance(cu_seqlens_q, torch.Tensor):
        raise InvalidType(f"cu_seqlens_q is a {type(cu_seqlens_q).__name__}; it must be a torch.Tensor")
    if cu_seqlens_q.dim() == 1 and len(seqlens_q) != len(cu_seqlens_q) - 1:
        raise InvalidInput(
            f"seqlens_q has {len(seqlens_q)} lengths and cu_seqlens_q {len(cu_seqlens_q)} offsets; it must have one "
            "offset more than lengths"
        )
    check_counts("seqlens_q", seqlens_q, len(q) if q.dim() else 0, "q", max_seqlen_q)
    return max(seqlens_q, default=0) if max_seqlen_q is None else max_seqlen_q


def check(operands: CachedOperands, options: Options, serving: Serving) -> AttentionProblem:
    """Returns the problem that a call describes, or raises an error that names the argument, before anything is
    written."""
    problem = describe_cached_call(operands, options, serving.batch_invariant)
    if serving.shared_prefix < 0:
        raise InvalidInput(f"shared_prefix is {serving.shared_prefix}; it must be a number of tokens, 0 for none")
    check_splits(serving)
    return problem


def check_splits(serving: Serving) -> None:
    """Raises InvalidInput if no call can have the number of splits."""
    if serving.num_splits is not None:
        if not 1 <= serving.num_splits <= MOST_SPLITS:
            raise InvalidInput(
                f"num_splits is {serving.num_splits}; it must be at least 1 and at most {MOST_SPLITS}, or None"
            )
        if serving.batch_invariant:
            raise InvalidInput("num_splits was given with batch_invariant=True, which splits by a sequence's length")


class NewTokens(NamedTuple):
    """The writes of a call before its attention: checked and compiled, not executed.

    Attributes:
        operands: the call's operands. If queries are rotated, q is the tensor that will hold them; if tokens are
            appended to a `PagedKVCache`, the offsets are made from the host's lengths.
        written: a context manager: writes, runs its body, and then updates a `PagedKVCache`'s host records. If the body
            raises, nothing was appended.
        tables: returns the page table and the lengths that the call will see; None for the present ones.
    """

    operands: Any
    written: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    tables: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


def prepare_new(
    cache: PagedKVCache | CacheLayer,
    operands: CachedOperands,
    max_seqlen_q: int,
    rows: Sequence[int] | torch.Tensor | None,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    rotary: Rotary | None,
    seqlens_q: list[int] | None,
) -> NewTokens:
    """Checks and compiles the launch that writes a call's new tokens and rotates its queries.

    The tokens appended to a `PagedKVCache` are determined by numbers on the host alone, `seqlens_q` if tokens are
    packed, so that the device's tokens always match the host's records. In a `CacheLayer` the offsets on the device
    determine which cells are written, clamped to the tensors.
    """
    q = operands.q
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise InvalidType(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    packed = operands.cu_seqlens_q is not None
    if k_new is not None and v_new is None:
        v_new = values_in(layer_of(cache), k_new)
    if k_new is not None:
        leading, what = q.shape[:-2], "tokens"
        if rotary is None and not packed:
            leading, what = q.shape[:1], "batch"
        if k_new.shape[: len(leading)] != leading:
            raise InvalidInput(
                f"k_new has shape {tuple(k_new.shape)} and q {tuple(q.shape)}; they must have the same {what}, "
                f"{tuple(leading)}"
            )
    batch = len(operands.cu_seqlens_q) - 1 if packed else len(q)
    if isinstance(cache, PagedKVCache) and k_new is not None and v_new is not None:
        if isinstance(rows, torch.Tensor):
            raise InvalidType("rows is a tensor; appending k_new to a PagedKVCache takes the rows as integers")
        if packed and seqlens_q is None:
            raise InvalidInput("packed k_new is appended by lengths on the host: also give seqlens_q")
        append = cache.prepare_append(
            cache.layer,
            list(range(batch)) if rows is None else integers("rows", rows, "a row"),
            k_new,
            v_new,
            q=q,
            counts=seqlens_q if packed else None,
            name="seqlens_q",
            rotary=rotary,
        )
        if packed:
            operands = operands._replace(cu_seqlens_q=append.new.cu_seqlens)
        if rotary is not None:
            operands = operands._replace(q=append.new.q_out)
        return NewTokens(operands, append.applied, append.tables)

    layer = layer_of(cache)
    new = new_tokens(layer, k_new, v_new, q=q, rows=operands.rows, cu_seqlens=operands.cu_seqlens_q, rotary=rotary)
    if rotary is not None and isinstance(cache, PagedKVCache) and not isinstance(rows, torch.Tensor):
        lengths = cache.lengths
        check_positions(rotary, max((lengths.get(r, 0) for r in (range(batch) if rows is None else rows)), default=0))
    write = append_kv.prepare(new, max_seqlen_q, rotary is not None and rotary.interleaved)

    @contextlib.contextmanager
    def written() -> Iterator[None]:
        write(new)
        yield

    return NewTokens(operands if rotary is None else operands._replace(q=new.q_out), written)


def check_contents(
    operands: CachedOperands,
    new: NewTokens,
    options: Options,
    serving: Serving,
    seqlens_q: list[int] | None,
    k_new: torch.Tensor | None,
    rotary: Rotary | None,
) -> None:
    """Implements `checked=True`: compares offsets with the lengths on the host, and checks lengths, rows, page ids,
    positions and the prefix on the device.

    Args:
        operands: the caller's.
        new: the tokens that will be written first.
        k_new: their keys.

    Raises:
        InvalidInput: naming the first index that is wrong.
    """
    present = operands
    if new.tables is not None:
        page_table, seqused_k = new.tables()
        operands = operands._replace(page_table=page_table, seqused_k=seqused_k)
    if seqlens_q is not None:
        offsets = list(accumulate(seqlens_q, initial=0))
        for i, (got, said) in enumerate(zip(operands.cu_seqlens_q.tolist(), offsets, strict=True)):
            if got != said:
                raise InvalidInput(
                    f"cu_seqlens_q[{i}] is {got}; by seqlens_q it must be {said}, the sum of the first {i} lengths"
                )
    problem = describe_cached_call(operands, options, serving.batch_invariant)
    num_new = 0 if k_new is None or k_new.dim() < 4 else k_new.shape[1]
    check_cache_contents(problem, operands, present.page_table, num_new)
    rows = range(problem.batch) if operands.rows is None else operands.rows.tolist()
    used = operands.seqused_k.tolist()
    if rotary is not None:
        check_positions(rotary, max((used[row] for row in rows), default=0))
    if serving.shared_prefix:
        _check_prefix(problem, operands, present, serving.shared_prefix)


def check_apart_from_new(
    out: torch.Tensor,
    operands: CachedOperands,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    rotary: Rotary | None,
    wanting: list[torch.Tensor],
) -> None:
    """Checks `out` of a call that writes to the cache, before it writes.

    Args:
        operands: the caller's.
        k_new, v_new, rotary: checked by `prepare_new`.
        wanting: the tensors that require a gradient.

    Raises:
        InvalidInput: out shares memory with an argument.
        UnsupportedProblem: a gradient would be lost.
    """
    check_out(out, operands, bool(wanting))
    tensors = operands._asdict() | {"k_new": k_new, "v_new": v_new}
    if rotary is not None:
        tensors |= {"rotary.cos": rotary.cos, "rotary.sin": rotary.sin}
    check_apart(out, tensors)


def wanting_gradients(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors that a backward pass would reach through a call's results."""
    if not torch.is_grad_enabled():
        return []
    return [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]


def check_transforms(arguments: Sequence[Any]) -> None:
    """Raises InvalidInput if a transform of torch.func, or forward mode, would have to differentiate or batch the
    call."""
    if autograd.has_tangents(arguments):
        raise InvalidInput("attention_with_kv_cache has no derivatives, and an argument carries a tangent")
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if autograd.transforms() is not None and any(isinstance(t, torch.Tensor) and is_wrapped(t) for t in arguments):
        raise InvalidInput(
            "attention_with_kv_cache computes no gradients and has no batching rule: a transform of torch.func (grad, "
            "vjp, vmap) cannot see through it"
        )


class _WithoutGradients(torch.autograd.Function):
    """Links a call's results to tensors that require a gradient; its backward raises."""

    @staticmethod
    def forward(
        ctx: Any, results: tuple[torch.Tensor, torch.Tensor | None], *wanting: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise UnsupportedProblem(
            "attention_with_kv_cache computes no gradients; backward reached one of its results",
            {},
            "attention or attention_varlen, which have gradients; or torch.no_grad() around the call",
        )


def refusing_gradients(
    results: tuple[torch.Tensor, torch.Tensor | None], wanting: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (out, lse) such that a backward pass from them to tensors that require a gradient raises an error.
    Otherwise the gradient would be lost silently."""
    out, lse = _WithoutGradients.apply(results, *wanting)
    return out, lse


def choose(
    problem: AttentionProblem,
    gpu: Gpu,
    serving: Serving,
    kernel: str = "auto",
    config: Any = None,
    operands: CachedOperands | None = None,
) -> dispatch.Choice:
    """Returns the kernel and config of a call on a cache, with the requested number of splits. Instead of
    `hopper/flash_fwd`, auto takes `split_kv` for calls with `num_splits` or `shared_prefix`, and for pools that tensor
    maps cannot describe.

    Args:
        operands: the tensors, None if they are not known yet.
    """
    if serving.num_splits is not None and config is not None:
        raise InvalidInput("num_splits was given with a config, which has its own num_splits")
    choice = dispatch.choose(problem, gpu, kernel, config)
    if choice.kernel is dispatch.hopper_flash_fwd:
        refused = choice.kernel.refuses(operands) if operands is not None else []
        if kernel == "auto" and (refused or serving.num_splits is not None or serving.shared_prefix):
            choice = dispatch.choose(problem, gpu, split_kv.NAME)
        elif refused:
            raise UnsupportedProblem(
                f"kernel {kernel!r} cannot read this cache", {kernel: refused}, f"kernel={split_kv.NAME!r}"
            )
    if choice.kernel.NAME == split_kv.NAME and problem.batch_invariant and not choice.config.pieces:
        raise InvalidInput("batch_invariant=True needs a config with pieces: equal splits depend on the batch")
    if serving.num_splits is not None and hasattr(choice.config, "num_splits"):
        try:
            with_splits = replace(choice.config, num_splits=serving.num_splits)
        except ValueError as error:  # fewer splits than `MOST_SPLITS` may be the most of a kernel
            raise InvalidInput(f"kernel {choice.kernel.NAME!r} cannot take this number of splits: {error}") from None
        return choice._replace(config=with_splits, config_source="given")
    return choice


class Planner(plans.Planner):
    """Makes the plans of one class of calls on a cache, or of a single call."""

    portable = split_kv

    def __init__(self, options: Options, serving: Serving, kernel: str, config: Any) -> None:
        super().__init__(options, kernel, config)
        self.serving = serving
        if serving.shared_prefix:
            self.binders = {split_kv.NAME: partial(split_kv.bind_with_prefix, shared_prefix=serving.shared_prefix)}

    def describe(self, operands: CachedOperands, options: Options) -> AttentionProblem:
        """Checks a call in full and returns the problem it describes."""
        return describe_cached_call(operands, options, self.serving.batch_invariant)

    def choose(self, problem: AttentionProblem, operands: CachedOperands) -> dispatch.Choice:
        """Returns the kernel and the config.

        Raises:
            UnsupportedProblem: the shared prefix cannot be read once.
        """
        choice = choose(problem, self.gpu, self.serving, self.kernel, self.config, operands)
        prefix = self.serving.shared_prefix
        if prefix and (reasons := prefix_refusals(problem, prefix)):
            raise UnsupportedProblem(
                f"shared_prefix={prefix} cannot be read once for {problem.describe()}",
                {choice.kernel.NAME: reasons},
                "the same call without shared_prefix",
            )
        return choice


def prefix_refusals(problem: AttentionProblem, shared_prefix: int) -> list[str]:
    """Returns why attention over a shared prefix cannot be computed once for all sequences; empty if it can."""
    reasons = []
    if not 0 < shared_prefix <= problem.seqlen_k:
        reasons.append(f"shared_prefix is {shared_prefix}; sequences have at most {problem.seqlen_k} tokens")
    if problem.window_size[0] >= 0:
        reasons.append("a window shows each query another part of the prefix")
    if problem.alibi_shape is not None:
        reasons.append("ALiBi's distances to the prefix differ from sequence to sequence")
    if problem.causal is not None and problem.causal.alignment == "top_left":
        reasons.append("a causal mask aligned to the first key hides part of the prefix")
    if problem.batch_invariant:
        reasons.append("batch_invariant: a tile would hold queries of several sequences")
    return reasons


def _check_prefix(
    problem: AttentionProblem, operands: CachedOperands, present: CachedOperands, shared_prefix: int
) -> None:
    """Raises InvalidInput naming the first sequence whose beginning differs from the first sequence's, page by page, or
    that is too short for queries after the prefix.

    Args:
        operands: with the page table and the lengths that the call will see.
        present: with those before the call. The call's append copies a shared page that it writes to, so its sequences
            have the same tokens in different pages afterward.
    """
    rows = list(range(problem.batch)) if operands.rows is None else operands.rows.tolist()
    used = operands.seqused_k.tolist()
    seqlens_q = [problem.seqlen_q] * problem.batch
    if operands.cu_seqlens_q is not None:
        seqlens_q = operands.cu_seqlens_q.diff().tolist()
    pages = -(-shared_prefix // problem.page_size)
    table, before = (t.page_table[:, :pages].tolist() for t in (operands, present))
    held = present.seqused_k.tolist()
    for row, seqlen_q in zip(rows, seqlens_q, strict=True):
        if used[row] - seqlen_q < shared_prefix - 1:
            raise InvalidInput(
                f"row {row} has {used[row]} tokens, {seqlen_q} of them queries; shared_prefix={shared_prefix} must lie "
                "before them"
            )
        shared_before = before[row] == before[rows[0]] and min(held[row], held[rows[0]]) >= shared_prefix
        if table[row] != table[rows[0]] and not shared_before:
            raise InvalidInput(f"rows {rows[0]} and {row} do not share the pages of their first {shared_prefix} tokens")


def blank_operands(problem: AttentionProblem, device: torch.device) -> Any:
    """Returns operands of a problem, contiguous and filled with zeros; a pool has one page."""
    operands = operands_without_memory(problem)
    filled = type(operands)(
        *(None if t is None else torch.zeros(t.shape, dtype=t.dtype, device=device) for t in operands)
    )
    return filled._replace(v=filled.k[..., : problem.head_dim_v]) if problem.v_in_k else filled


def operands_without_memory(problem: AttentionProblem) -> Any:
    """Returns contiguous operands of a problem on device "meta", without storage; a v that is part of k is a view. A
    pool has one page."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    p, dtype = problem, getattr(torch, problem.dtype)
    of_keys = getattr(torch, p.dtype_of_k)
    rows = (p.total_q,) if p.packed else (p.batch, p.seqlen_q)
    keys = (p.total_k,) if p.packed else (p.batch, p.seqlen_k)
    q = empty(*rows, p.num_heads_q, p.head_dim, dtype=dtype)
    cells = (1, p.page_size) if p.page_size else keys
    k = empty(*cells, p.num_heads_kv, p.head_dim, dtype=of_keys)
    if p.v_in_k:
        v = k[..., : p.head_dim_v]
    else:
        v = empty(*cells, p.num_heads_kv, p.head_dim_v, dtype=of_keys if p.page_size else getattr(torch, p.dtype_of_v))
    slopes = None if p.alibi_shape is None else empty(*p.alibi_shape, dtype=torch.float32)
    sinks = empty(p.num_heads_q, dtype=torch.float32) if p.has_sinks else None
    offsets = empty(p.batch + 1, dtype=torch.int32) if p.packed else None
    if p.page_size:
        shape = (1, p.page_size, p.num_heads_kv) if p.kv_factors == "token" else (p.num_heads_kv,)
        factors = (None if p.kv_factors is None else empty(*shape, dtype=torch.float32) for _ in "kv")
        return CachedOperands(
            *(q, k, v),
            *(None, None, slopes, sinks, offsets, None),
            empty(p.batch, -(-p.seqlen_k // p.page_size), dtype=torch.int32),
            *(empty(p.batch, dtype=torch.int32) for _ in ("seqused_k", "rows")),
            *factors,
        )
    operands = Operands(
        *(q, k, v),
        None if p.mask_shape is None else empty(*p.mask_shape, dtype=torch.bool),
        None if p.bias_shape is None else empty(*p.bias_shape, dtype=getattr(torch, p.bias_dtype or p.dtype)),
        *(slopes, sinks, offsets, offsets),
    )
    if p.is_quantized:
        shapes = descales.shapes(p)
        factors = (None if shape is None else empty(*shape, dtype=torch.float32) for shape in shapes)
        return QuantizedOperands(*operands, *factors)
    return DropoutOperands(*operands, empty(2, dtype=torch.int64)) if p.dropout_p else operands
