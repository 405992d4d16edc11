"""FlashAttention-2: the functions of `flash_attn`, computed by warpwave, for programs that change one import.

    from warpwave.integrations.flash_attn import flash_attn_func     # was: from flash_attn import flash_attn_func

`flash_attn_3` and `flash_attn_4` are the same for `flash_attn_interface` and `flash_attn.cute`. Argument orders,
defaults, alignments and shapes of results are those packages'. Tensors may also be float32 or on other devices, and
head_dim is not limited to 256. Calls that warpwave cannot compute raise UnsupportedProblem before anything is changed.

Common to all functions: a causal mask is aligned to the last key, a query that sees no key gives 0, window_size is
(left, right) around the position aligned to the last key, both included, and negative or None for unlimited (in
version 4 None). lse is float32, the natural logarithm, (batch, num_heads, seqlen_q), packed (num_heads, total_q).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warpwave.api import attention, attention_varlen, attention_with_kv_cache
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.integrations import caches
from warpwave.kv_cache import CacheLayer, Rotary
from warpwave.options import as_float, as_int

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int | None, int | None]
UNLIMITED: Window = (-1, -1)
SAME: Mapping[str, str] = MappingProxyType({})  # the caller's names are FlashAttention-2's


# What the three versions share ----------------------------------------------------------------------------------------


def options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Returns these arguments in the form of warpwave's calls."""
    try:
        left, right = (-1 if side is None else max(-1, as_int("a side of window_size", side)) for side in window_size)
    except (TypeError, ValueError):
        raise InvalidType(f"window_size is {window_size!r}; it must be (left, right)") from None
    cap = 0.0 if softcap is None else as_float("softcap", softcap)
    if learnable_sink is not None:
        check_is_tensor("learnable_sink", learnable_sink)
    return {
        "softmax_scale": softmax_scale,
        "causal": host_bool("causal", causal),
        "window_size": (left, right),
        "softcap": 0.0 if cap < 0 else cap,
        "alibi_slopes": alibi_slopes,
        "sinks": None if learnable_sink is None else learnable_sink.float(),
    }


def for_training(deterministic: bool, dropout_p: float = 0.0, returns_probabilities: bool = False) -> dict[str, Any]:
    """Returns the arguments of warpwave's calls for dropout and for gradients that repeat bit for bit.

    Args:
        deterministic: False leaves the choice to `torch.use_deterministic_algorithms`.
        returns_probabilities: whether FlashAttention-2 would return the probabilities of a call with dropout.

    Raises:
        UnsupportedProblem: the probabilities of a call with dropout, which warpwave never holds in memory.
    """
    dropout_p = as_float("dropout_p", dropout_p)
    if dropout_p and returns_probabilities:
        raise UnsupportedProblem(
            f"return_attn_probs was given with dropout_p {dropout_p}; warpwave returns no probabilities", {},
            "warpwave.attention(..., dropout_p=, return_lse=True) for the log-sum-exp",
        )  # fmt: skip
    return {"dropout_p": dropout_p, "deterministic": host_bool("deterministic", deterministic) or None}


def host_int(name: str, value: Any) -> int:
    """Returns an integer, which may be a tensor of one, as an int. A tensor on a GPU makes the host wait."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.dtype.is_floating_point:
        return int(value)
    number: int = as_int(name, value)
    return number


def host_bool(name: str, value: Any) -> bool:
    """Returns a switch, which may be None, an integer or a tensor of one, as a bool."""
    is_one = value.numel() == 1 if isinstance(value, torch.Tensor) else value is None or isinstance(value, int)
    if not is_one and type(value).__name__ != "bool":  # NumPy's class has the same name
        raise InvalidType(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def check_is_tensor(name: str, value: Any) -> None:
    """Raises InvalidType if an argument whose shape is read before warpwave's call is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise InvalidType(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")


def refuse(function: str, **given: Any) -> None:
    """Raises UnsupportedProblem for the first of these arguments that is given."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            raise UnsupportedProblem(f"{function}: {name} is not supported; it must be left at its default", {}, "")


def packed(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: Any,
    longest: tuple[Any, Any],
    said: dict[str, Any],
    training: dict[str, Any],
    *,
    seqused_k: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    names: Mapping[str, str] = SAME,
) -> Any:
    """Computes a packed call, on a paged cache if there is a table. With seqused_k or a table it has neither gradients
    nor dropout.

    Args:
        longest: max_seqlen_q and max_seqlen_k; on a paged cache a max_seqlen_k of 0 is the table's capacity.
        names: argument, by FlashAttention-2's name -> the caller's name of it, for messages.
    """
    most = names.get("max_seqlen_q", "max_seqlen_q"), names.get("max_seqlen_k", "max_seqlen_k")
    longest = (host_int(most[0], longest[0]), host_int(most[1], longest[1]))
    if training["dropout_p"] and (seqused_k is not None or table is not None):
        raise UnsupportedProblem(
            f"{function}: dropout_p is {training['dropout_p']}; calls on a cache have no dropout", {}, "dropout_p=0.0"
        )
    if cu_seqlens_k is None and (seqused_k is None or table is None):
        of_keys = names.get("cu_seqlens_k", "cu_seqlens_k")
        raise InvalidInput(f"{function}: {of_keys} is None; the lengths of the keys must be given")
    try:
        if seqused_k is None and table is None:
            return attention_varlen(
                q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest[0],
                max_seqlen_k=longest[1], return_lse=return_lse, **said, **training,
            )  # fmt: skip
        _check_each_sequence(
            function, len(cu_seqlens_q) - 1, names,
            seqused_k=seqused_k, block_table=table, cu_seqlens_k=None if cu_seqlens_k is None else cu_seqlens_k[1:],
        )  # fmt: skip
        used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        if table is None:
            k_pages, v_pages, pages = caches.tokens(k, v, cu_seqlens_k[:-1], longest[1])
        else:
            k_pages, v_pages, pages = k, v, table.contiguous()
        return attention_with_kv_cache(
            q, CacheLayer(k_pages, v_pages, pages, used.contiguous()), cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], num_splits=num_splits or None, return_lse=return_lse,
            **said,
        )  # fmt: skip
    except Exception:
        keys = "total_k" if table is None else "num_pages page_size"
        required: dict[str, tuple[Any, str]] = {
            "q": (q, "total_q num_heads_q head_dim"), "k": (k, f"{keys} num_heads_kv head_dim"),
            "v": (v, f"{keys} num_heads_kv head_dim_v"), "cu_seqlens_q": (cu_seqlens_q, "batch+1"),
        }  # fmt: skip
        others = {
            "cu_seqlens_k": (cu_seqlens_k, "batch+1"), "seqused_k": (seqused_k, "batch"),
            "block_table": (table, "batch pages_of_a_sequence"),
        }  # fmt: skip
        _raise_wrong_argument(function, required, others, names)
        raise


def _check_each_sequence(function: str, batch: int, names: Mapping[str, str], **given: torch.Tensor | None) -> None:
    """Raises InvalidInput or InvalidType if an argument with one entry for each sequence has another number of them, or
    another dtype. These arguments enter arithmetic that would broadcast or convert them before the core's checks."""
    for name, tensor in given.items():
        if tensor is not None and (tensor.dtype not in caches.DTYPES[name] or len(tensor) != batch):
            allowed, said = " or ".join(map(str, caches.DTYPES[name])), names.get(name, name)
            wrong = InvalidInput if tensor.dtype in caches.DTYPES[name] else InvalidType
            raise wrong(
                f"{function}: {said} is {tensor.dtype} of {len(tensor)} sequences; it must be {allowed} of {batch}"
            )


def _raise_wrong_argument(
    function: str, required: dict[str, tuple[Any, str]], others: dict[str, tuple[Any, str]], names: Mapping[str, str]
) -> None:
    """Raises the error of a refused call's first tensor that does not fit; returns if all do (caches.py)."""
    given = required | {name: other for name, other in others.items() if other[0] is not None}
    if (wrong := caches.wrong_argument(function, given, names)) is not None:
        raise wrong from None


def with_kvcache(
    function: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary: tuple[torch.Tensor | None, torch.Tensor | None, bool],
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    said: dict[str, Any],
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    names: Mapping[str, str] = SAME,
) -> Any:
    """Computes a call on a cache, contiguous or paged, after appending k and v to it in place.

    Args:
        max_seqlen_q: with cu_seqlens_q: the most queries of a sequence; all of q if None.
        names: argument, by FlashAttention-2's name -> the caller's name of it, for messages.
    """
    try:
        return _with_kvcache(
            function, q, k_cache, v_cache, k, v, rotary, cache_seqlens, cache_batch_idx, cache_leftpad, table, said,
            cu_seqlens_q, max_seqlen_q, num_splits, return_lse, names,
        )  # fmt: skip
    except Exception:
        tokens = "batch seqlen_q" if cu_seqlens_q is None else "total_q"
        new = "batch seqlen_new" if cu_seqlens_q is None else "total_q"
        cells = "cache_rows length" if table is None else "num_pages page_size"
        required: dict[str, tuple[Any, str]] = {
            "q": (q, f"{tokens} num_heads_q head_dim"), "k_cache": (k_cache, f"{cells} num_heads_kv head_dim"),
            "v_cache": (v_cache, f"{cells} num_heads_kv head_dim_v"),
        }  # fmt: skip
        others = {
            "cu_seqlens_q": (cu_seqlens_q, "batch+1"),
            "k": (k, f"{new} num_heads_kv head_dim"), "v": (v, f"{new} num_heads_kv head_dim_v"),
            "cache_seqlens": (cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None, "batch"),
            "cache_leftpad": (cache_leftpad, "batch"), "cache_batch_idx": (cache_batch_idx, "batch"),
            "block_table": (table, "batch pages_of_a_sequence"),
            "rotary_cos": (rotary[0], "positions rotary_dim/2"), "rotary_sin": (rotary[1], "positions rotary_dim/2"),
        }  # fmt: skip
        _raise_wrong_argument(function, required, others, names)
        raise


def _with_kvcache(
    function: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None,
    v: torch.Tensor | None, rotary: tuple[torch.Tensor | None, torch.Tensor | None, bool],
    cache_seqlens: int | torch.Tensor | None, cache_batch_idx: torch.Tensor | None, cache_leftpad: torch.Tensor | None,
    table: torch.Tensor | None, said: dict[str, Any], cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None,
    num_splits: int | None, return_lse: bool, names: Mapping[str, str],
) -> Any:  # fmt: skip
    if (k is None) != (v is None):
        raise InvalidInput(f"{function}: one of k and v is None; both are appended to the cache, or neither")
    if table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise UnsupportedProblem(
            f"{function}: a page table was given with cache_batch_idx or cache_leftpad", {}, "rows of the page table"
        )
    cos, sin, interleaved = rotary
    if cos is not None or sin is not None:
        _check_rotary(function, q, k, cos, sin, cache_leftpad, said, cu_seqlens_q)
    if cu_seqlens_q is None:
        batch, max_seqlen_q = len(q), None
    else:
        batch = len(cu_seqlens_q) - 1
        max_seqlen_q = len(q) if max_seqlen_q is None else host_int("max_seqlen_q", max_seqlen_q)
    used = cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None
    _check_each_sequence(
        function, batch, names,
        cache_seqlens=used, cache_leftpad=cache_leftpad, cache_batch_idx=cache_batch_idx, block_table=table,
    )  # fmt: skip
    if table is None:
        size = None if cache_leftpad is None else 1  # one-token pages: a sequence may begin anywhere
        k_pages, v_pages, table = caches.contiguous(k_cache, v_cache, size)
        _check_cache_rows(function, cache_batch_idx, len(table))
        table = table[:batch] if cache_batch_idx is None else table[cache_batch_idx.long()]
        if cache_leftpad is not None:
            cells = torch.arange(table.shape[1], device=table.device) + cache_leftpad[:, None]
            inside = (cells >= 0) & (cells < table.shape[1])
            # -1 where the row has ended: nothing is written there.
            table = table.gather(1, torch.where(inside, cells, 0)).where(inside, -1)
    else:
        k_pages, v_pages = k_cache, v_cache
    if used is None:
        capacity, lengths = table.shape[1] * k_pages.shape[1], names.get("cache_seqlens", "cache_seqlens")
        length = capacity if cache_seqlens is None else as_int(lengths, cache_seqlens)
        # Of packed tokens, some sequence has at least the mean.
        new = 0 if k is None else k.shape[1] if cu_seqlens_q is None else -(-len(k) // max(1, batch))
        if not 0 <= length <= capacity - new:
            raise InvalidInput(
                f"{function}: {lengths} is {length} (None: all of the cache) and k has {new} tokens of a sequence; the "
                f"cache has room for {capacity}"
            )
        if cos is not None and length + new > len(cos):
            raise InvalidInput(
                f"{function}: rotary_cos has {len(cos)} positions; a sequence will have {length + new} tokens"
            )
        used = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if cache_leftpad is not None:
        used = used - cache_leftpad
    if k is not None:
        used = used + (k.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff())
    turning = None if cos is None or sin is None else Rotary(_in_float32(cos), _in_float32(sin), interleaved)
    return attention_with_kv_cache(
        q, CacheLayer(k_pages, v_pages, table.contiguous(), used.contiguous()), k_new=k, v_new=v, rotary=turning,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, num_splits=num_splits or None, return_lse=return_lse,
        **said,
    )  # fmt: skip


def _check_cache_rows(function: str, cache_batch_idx: torch.Tensor | None, rows: int) -> None:
    """Raises InvalidInput naming the first index in host memory that is not a row of the cache. Indices on a GPU are
    not read, because the host would wait."""
    if cache_batch_idx is None or cache_batch_idx.device.type != "cpu":
        return
    for b, row in enumerate(cache_batch_idx.tolist()):
        if not 0 <= row < rows:
            raise InvalidInput(f"{function}: cache_batch_idx[{b}] is {row}; the cache has {rows} rows")


def _check_rotary(
    function: str, q: Any, k: Any, cos: Any, sin: Any, cache_leftpad: Any, said: dict[str, Any], cu_seqlens_q: Any
) -> None:
    if cos is None or sin is None:
        raise InvalidInput(f"{function}: one of rotary_cos and rotary_sin is None")
    if k is None:
        raise InvalidInput(f"{function}: rotary_cos was given without k and v, which it rotates")
    if cache_leftpad is not None:
        raise UnsupportedProblem(f"{function}: rotary_cos was given with cache_leftpad", {}, "rotated q, k and v")
    if cu_seqlens_q is None and k.shape[1] != q.shape[1]:
        raise UnsupportedProblem(
            f"{function}: q has {q.shape[1]} tokens and k {k.shape[1]}; with rotary_cos they must be the same", {}, ""
        )
    one_position = not said["causal"] and said["window_size"] == (-1, -1)
    if one_position and (cu_seqlens_q is not None or q.shape[1] > 1):
        raise UnsupportedProblem(
            f"{function}: without a causal mask or a window, rotary_cos rotates all of q to one position", {}, "causal"
        )


_float32 = WeakTensorKeyDictionary()  # table of rotations -> (its version, the same in float32)


def _in_float32(table: torch.Tensor) -> torch.Tensor:
    """Returns a table of rotations as float32, which is kept as long as the table is unchanged. Tensors made in
    inference mode do not count their changes, so of these nothing is kept."""
    if table.dtype == torch.float32:
        return table
    if not table.is_floating_point():
        raise InvalidType(f"a table of rotations is {table.dtype}; it must be floating-point")
    if table.is_inference():
        return table.float()
    version, found = _float32.get(table, (None, None))
    if found is None or version != table._version:
        found = table.float()
        if table.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _float32[table] = (table._version, found)
    return found


# FlashAttention-2 -----------------------------------------------------------------------------------------------------


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention of (batch, seqlen, num_heads, head_dim) tensors; k and v may have fewer heads.

    Returns:
        out; with return_attn_probs (out, lse, an empty tensor).

    Raises:
        UnsupportedProblem: return_attn_probs with dropout_p.
        InvalidInput, InvalidType: as `warpwave.attention`.
    """
    said = options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    said |= for_training(deterministic, dropout_p, return_attn_probs)
    found = attention(q, k, v, return_lse=return_attn_probs, **said)
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` of qkv, (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_func` of q and kv, (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Computes attention of packed sequences: (total, num_heads, head_dim) tensors and int32 (batch + 1,) offsets.

    With block_table, int32 (batch, pages), k and v are pools of pages, (num_pages, page_size, num_heads_kv, head_dim),
    the lengths of the keys are the differences of cu_seqlens_k, and there are neither gradients nor dropout.

    Returns:
        out; with return_attn_probs (out, lse, an empty tensor).

    Raises:
        UnsupportedProblem: dropout_p with return_attn_probs or block_table.
    """
    said = options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    training = for_training(deterministic, dropout_p, return_attn_probs)
    found = packed(
        "flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), said, training,
        table=block_table, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_varlen_func` of qkv, (total, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn_varlen_func` of q and kv, (total_k, 2, num_heads_kv, head_dim)."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes attention of q, (batch, seqlen_q, num_heads, head_dim), to a cache, after appending k and v to it.

    Args:
        k_cache, v_cache: (rows, length, num_heads_kv, head_dim); with block_table (num_pages, page_size, num_heads_kv,
            head_dim). GPU kernels read lengths that are multiples of 64 fastest, and need pages of a power of two.
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), written into the cache at cache_seqlens, in place.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate q and k to their positions, which begin at
            cache_seqlens. Need as many new tokens as queries, and a causal mask or a window if those are several.
        cache_seqlens: the tokens in the cache before k: one number, or int32 (batch,); all of the cache if None.
        cache_batch_idx: integers (batch,): the row of the cache of each sequence, from 0 on. On a GPU the contents are
            not checked: a row past the cache fails in torch's device-side assertion, after which the process can no
            longer use the GPU.
        cache_leftpad: int32 (batch,): the first cell of each sequence; the cells before are hidden. It is read as
            one-token pages, which is slower. Its contents are not checked: a sequence that begins after its last cell
            has no keys, and its new tokens are not written.
        num_splits: 0 for warpwave's choice.

    Returns:
        out; with return_softmax_lse (out, lse).

    Raises:
        UnsupportedProblem: block_table with cache_batch_idx or cache_leftpad; rotary_cos with cache_leftpad, with
            another number of new tokens than queries, or for several queries without a mask by position.
        InvalidInput, InvalidType: as `warpwave.attention_with_kv_cache`, which has no gradients.
    """
    return with_kvcache(
        "flash_attn_with_kvcache", q, k_cache, v_cache, k, v, (rotary_cos, rotary_sin, rotary_interleaved),
        cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        options(softmax_scale, causal, window_size, softcap, alibi_slopes),
        num_splits=num_splits, return_lse=return_softmax_lse,
    )  # fmt: skip


def _unpacked(name: str, tensor: torch.Tensor, count: int, axes: int) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that are stacked along the third axis from the end."""
    check_is_tensor(name, tensor)
    if tensor.dim() != axes or tensor.shape[-3] != count:
        raise InvalidInput(
            f"{name} has shape {tuple(tensor.shape)}; it must have {axes} axes, {count} long the third from the end"
        )
    return tensor.unbind(-3)
