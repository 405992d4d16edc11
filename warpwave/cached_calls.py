"""Calls on a paged cache: what `attention_with_kv_cache` does behind its arguments, and `warmup`.

As in ops.py, a call that was made before skips checks and choices: its plan, a bound kernel, is found by what the
plan may rely on. Lengths and page tables are no part of that, so they change without a new plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from warpwave import dispatch, ops
from warpwave.checks import Options, check_cache_contents, check_problem, describe_cached_call
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.hardware.gpu import Gpu, current_gpu
from warpwave.kernels import append_kv, split_kv
from warpwave.kv_cache import CacheLayer, PagedKVCache, Rotary, new_tokens
from warpwave.problem import AttentionProblem, CachedOperands

MAX_PLANS = 4096
Run = Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
_plans: dict[tuple[Any, ...], Run] = {}
_said: set[str] = set()
log = logging.getLogger("warpwave")


class Serving(NamedTuple):
    """Options that only calls on a cache have.

    Attributes:
        num_splits: shares of the keys, None for the closed form's.
        batch_invariant: whether a sequence's bits may not depend on the batch.
        shared_prefix: tokens at the beginning of every sequence that are the same, read once for all; 0 for none.
    """

    num_splits: int | None = None
    batch_invariant: bool = False
    shared_prefix: int = 0


def find_plan(key: tuple[Any, ...] | None) -> Run | None:
    """The plan kept under a key of `ops.plan_key`."""
    try:
        return _plans.get(key) if key is not None else None
    except TypeError:  # a window given as a list, say, has no hash
        return None


def remember(operands: CachedOperands, said: tuple[Any, ...], run: Run) -> None:
    """Lets `ops.recall` find a plan."""
    with contextlib.suppress(TypeError):  # a window given as a list, say, has no hash
        ops.remember(operands, said, run)


def make_plan(
    key: tuple[Any, ...] | None,
    operands: CachedOperands,
    options: Options,
    serving: Serving,
    kernel: str,
    config: Any,
) -> Run:
    """Chooses and compiles the kernel of a call, and keeps the plan under the key, if it has one."""
    run = _plan(operands, options, serving, kernel, config)
    try:
        hash(key)
    except TypeError:
        return run
    if key is not None:
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = run
    return run


def check(operands: CachedOperands, options: Options, serving: Serving) -> AttentionProblem:
    """The problem that a call describes, or an error that names the argument; before anything is written."""
    problem = describe_cached_call(operands, options, serving.batch_invariant)
    if not isinstance(serving.shared_prefix, int) or serving.shared_prefix < 0:
        raise InvalidInput(f"shared_prefix is {serving.shared_prefix!r}; it must be a number of tokens, 0 for none")
    if serving.num_splits is not None:
        if not isinstance(serving.num_splits, int) or serving.num_splits < 1:
            raise InvalidInput(f"num_splits is {serving.num_splits!r}; it must be an integer, at least 1, or None")
        if serving.batch_invariant:
            raise InvalidInput("num_splits was given with batch_invariant=True, which splits by a sequence's length")
    return problem


def check_contents(operands: CachedOperands, options: Options, serving: Serving, appended: bool) -> None:
    """What `checked=True` asks for: lengths, rows, page ids and the prefix, as they are on the device; before the
    queries' own tokens are there, where they will be `appended`."""
    problem = describe_cached_call(operands, options, serving.batch_invariant)
    check_cache_contents(problem, operands)
    if serving.shared_prefix:
        _check_prefix(problem, operands, serving.shared_prefix, appended)


def prepare_new(
    cache: PagedKVCache | CacheLayer,
    operands: CachedOperands,
    max_seqlen_q: int,
    rows: Any,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    rotary: Rotary | None,
    seqlens_q: Sequence[int] | None,
) -> tuple[Callable[[], None], CachedOperands]:
    """(commit, operands): what writes a call's new tokens and rotates its queries, compiled and checked but not yet
    done, and the operands with the queries that it will have rotated."""
    q = operands.q
    if k_new is not None:
        leading = q.shape[:-2]
        if k_new.shape[: len(leading)] != leading:
            raise InvalidInput(
                f"k_new has shape {tuple(k_new.shape)} and q {tuple(q.shape)}; they must have the same tokens, "
                f"{tuple(leading)}"
            )
    if isinstance(cache, PagedKVCache) and k_new is not None and v_new is not None:
        if operands.cu_seqlens_q is not None and seqlens_q is None:
            raise InvalidInput("packed k_new is appended by lengths on the host: give seqlens_q beside cu_seqlens_q")
        books, appended = cache, list(rows)
        write, new, counts = books.prepare_append(
            books.layer, appended, k_new, v_new, q=q, cu_seqlens=operands.cu_seqlens_q, counts=seqlens_q, rotary=rotary
        )

        def commit() -> None:
            books.extend(appended, counts)
            write(new)

    else:
        layer = cache.layer if isinstance(cache, PagedKVCache) else cache
        cu_seqlens = operands.cu_seqlens_q
        new = new_tokens(layer, k_new, v_new, q=q, rows=operands.rows, cu_seqlens=cu_seqlens, rotary=rotary)
        interleaved = rotary is not None and rotary.interleaved
        write = append_kv.prepare(new, max_seqlen_q, interleaved)

        def commit() -> None:
            write(new)

    return commit, operands if rotary is None else operands._replace(q=new.q_out)


def choose(
    problem: AttentionProblem, gpu: Gpu, serving: Serving, kernel: str = "auto", config: Any = None
) -> dispatch.Choice:
    """The kernel and config of a call on a cache, the number of splits as asked."""
    if serving.num_splits is not None and config is not None:
        raise InvalidInput("num_splits was given with a config, which has its own")
    choice = dispatch.choose(problem, gpu, kernel, config)
    if choice.kernel is split_kv and problem.batch_invariant and not choice.config.pieces:
        raise InvalidInput("batch_invariant=True needs a config with pieces: equal shares depend on the batch")
    if serving.num_splits is not None and hasattr(choice.config, "num_splits"):
        return choice._replace(config=replace(choice.config, num_splits=serving.num_splits), config_source="given")
    return choice


def _plan(operands: CachedOperands, options: Options, serving: Serving, kernel: str, config: Any) -> Run:
    problem = describe_cached_call(operands, options, serving.batch_invariant)
    gpu = current_gpu(operands.q.device)
    choice = choose(problem, gpu, serving, kernel, config)
    if kernel == "auto" and not choice.kernel.NEEDS_GPU:
        _say_once(problem, gpu, choice.kernel.NAME)
    prefix = serving.shared_prefix
    if prefix:
        reasons = prefix_refusals(problem, prefix)
        if reasons:
            raise UnsupportedProblem(
                f"shared_prefix={prefix} cannot be read once for {problem.describe()}",
                {choice.kernel.NAME: reasons},
                "the same call without shared_prefix",
            )
    if problem.rows == 0 or problem.batch == 0:
        return lambda operands: ops.without_keys(problem, operands)
    if prefix and choice.kernel is split_kv:
        return split_kv.bind_with_prefix(problem, operands, choice.config, prefix)
    run: Run = choice.kernel.bind(problem, operands, choice.config)
    return run


def _say_once(problem: AttentionProblem, gpu: Gpu, name: str) -> None:
    """That no GPU kernel serves, and why: once for CPU tensors, once for each reason on a GPU."""
    reason = "tensors on the CPU" if gpu.is_cpu else "; ".join(split_kv.why_not(problem, gpu))
    if reason not in _said:
        _said.add(reason)
        log.warning("attention on a cache is served by %s, not %s: %s", name, split_kv.NAME, reason)


def prefix_refusals(problem: AttentionProblem, shared_prefix: int) -> list[str]:
    """Why a prefix that sequences share cannot be attended to once for all; empty where it can."""
    reasons = []
    if not 0 < shared_prefix <= problem.seqlen_k:
        reasons.append(f"shared_prefix is {shared_prefix}; sequences have {problem.seqlen_k} tokens at the most")
    if problem.window_size[0] >= 0:
        reasons.append("a window shows each query another part of it")
    if problem.alibi_shape is not None:
        reasons.append("ALiBi's distances to it differ from sequence to sequence")
    if problem.causal is not None and problem.causal.alignment == "top_left":
        reasons.append("a causal mask aligned to the first key hides part of it")
    if problem.batch_invariant:
        reasons.append("batch_invariant: a tile would hold queries of several sequences")
    return reasons


def _check_prefix(problem: AttentionProblem, operands: CachedOperands, shared_prefix: int, appended: bool) -> None:
    """Raises InvalidInput naming the first sequence whose beginning is not the first one's, page by page, or that is
    too short for queries behind the prefix."""
    rows = list(range(problem.batch)) if operands.rows is None else operands.rows.tolist()
    used = operands.seqused_k.tolist()
    seqlens_q = [problem.seqlen_q] * problem.batch
    if operands.cu_seqlens_q is not None:
        seqlens_q = operands.cu_seqlens_q.diff().tolist()
    pages = -(-shared_prefix // problem.page_size)
    table = operands.page_table[:, :pages].tolist()
    for row, seqlen_q in zip(rows, seqlens_q, strict=True):
        before = used[row] if appended else used[row] - seqlen_q  # tokens before the queries
        if before < shared_prefix - 1:
            raise InvalidInput(
                f"row {row} has {used[row]} tokens, {seqlen_q} of them queries; shared_prefix={shared_prefix} must lie "
                "before them"
            )
        if table[row] != table[rows[0]]:
            raise InvalidInput(f"rows {rows[0]} and {row} do not share the pages of their first {shared_prefix} tokens")


def warmup(problems: Iterable[AttentionProblem], device: torch.device | str = "cuda", **options: Any) -> int:
    """Compiles what calls will need, before requests come or a CUDA graph is captured.

    Args:
        problems: of dense, packed or cached calls. Tensors are taken as contiguous; a cached problem's K and V lie in a
            pool as `PagedKVCache` makes it, and its call names its rows.
        device: where the calls will run.
        options: `kernel`, `config`, and for cached problems `num_splits`, as the calls will have them.

    Returns:
        How many plans were made.

    Raises:
        UnsupportedProblem: naming the problem that no kernel, or not the one asked for, can run.
        InvalidInput: an option that no call has.
    """
    unknown = options.keys() - {"kernel", "config", "num_splits"}
    if unknown:
        raise InvalidInput(f"warmup takes kernel, config and num_splits; {', '.join(sorted(unknown))} is none of them")
    device, made = torch.device(device), 0
    kernel, config = options.get("kernel", "auto"), options.get("config")
    for problem in problems:
        check_problem(problem)
        gpu = current_gpu(device)
        serving = Serving(options.get("num_splits"), problem.batch_invariant)
        if problem.page_size:
            choice = choose(problem, gpu, serving, kernel, config)
        else:
            choice = dispatch.choose(problem, gpu, kernel, config)
        if problem.rows and problem.batch:
            choice.kernel.bind(problem, blank_operands(problem, device), choice.config)
            made += 1
    return made


def blank_operands(problem: AttentionProblem, device: torch.device) -> Any:
    """Operands of a problem, contiguous and with memory of no particular content; a pool has one page."""
    from warpwave.compiled import operands_without_memory

    return type(operands := operands_without_memory(problem))(
        *(None if t is None else torch.empty(t.shape, dtype=t.dtype, device=device) for t in operands)
    )
