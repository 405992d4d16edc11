"""The doors: `attention` for dense batches and `attention_varlen` for packed sequences.

They are typed to return Any: a tensor or, with `return_lse`, a pair. A union would make every typed caller narrow it.
"""

from __future__ import annotations

from typing import Any

import torch

from warpwave import ops
from warpwave.checks import Options, check_are_tensors, check_packed_lengths, describe_call
from warpwave.errors import InvalidType
from warpwave.problem import Causal, Operands


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str = "default",
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention, `softmax(softmax_scale * q k^T + ...) v`, on any device.

    The score of query i and key j is `softmax_scale * q_i.k_j`; then `softcap * tanh(score / softcap)`; then `+ bias`;
    then ALiBi, `- slope * |i + seqlen_k - seqlen_q - j|`; then the masks, all of which must show the pair. A query that
    sees no key gives 0.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), float16, bfloat16 or float32. Any strides.
        k: (batch, seqlen_k, num_heads_kv, head_dim), the dtype of q. Query head h reads kv head
            `h // (num_heads_q // num_heads_kv)`.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), the dtype of q.
        causal: True aligns the mask to the last key: query i sees keys `j <= i + seqlen_k - seqlen_q`.
            `Causal("top_left")` aligns it to the first, `j <= i`, as torch's `is_causal` does.
        window_size: (left, right): query i sees keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`, both included; -1 is unlimited.
        mask: bool, True = visible, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k).
        bias: added to the scores, in the dtype of q or float32, broadcastable likewise; -inf hides a pair.
        alibi_slopes: float32, (num_heads_q,) or (batch, num_heads_q).
        softcap: 0 for none.
        sinks: float32, (num_heads_q,): one more logit a head in the denominator, natural-log and unscaled.
        softmax_scale: not negative; 1/sqrt(head_dim) if None.
        precision: how float32 products are computed: `"ieee"`, `"tf32x3"` (three tensor-core products, float32
            accuracy), `"tf32"` (10-bit mantissas), or `"default"`: the fastest with float32 accuracy.
        kernel: `"auto"`, or the name of the kernel that must run the call; `warpwave.explain` lists them.
        config: a `Config` of the kernel named.
        return_lse: also return the log-sum-exp.

    Returns:
        out: (batch, seqlen_q, num_heads_q, head_dim_v), contiguous, the dtype of q.
        lse: if asked for: natural logarithm, float32, (batch, num_heads_q, seqlen_q), minus infinity for a query that
            sees no key.

    Raises:
        InvalidInput: (a ValueError) a shape or value no call can have; the message names the argument.
        InvalidType: (a TypeError) a type or dtype no call can have.
        UnsupportedProblem: (a NotImplementedError) the kernel asked for cannot run this; carries every reason.
        RuntimeError: the call must compile and a CUDA graph is being captured.

    Note:
        Scores, softmax and sums are float32; with 16-bit inputs the un-normalised probabilities are rounded to the
        inputs' dtype before the second product. Forward results are repeatable bit for bit. First derivatives of out
        and lse exist with respect to q, k, v, bias, alibi_slopes and sinks.
        Dao, "FlashAttention-2" (2023); Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Example:
        >>> import torch, warpwave
        >>> q, k, v = (torch.randn(2, 128, 4, 64) for _ in range(3))
        >>> warpwave.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 4, 64])
    """
    operands = Operands(q, k, v, mask, bias, alibi_slopes, sinks)
    options = _options(operands, causal, window_size, softcap, softmax_scale, precision, return_lse)
    return _call(operands, options, kernel, config)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool | Causal = False,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    precision: str = "default",
    checked: bool = False,
    kernel: str = "auto",
    config: Any = None,
    return_lse: bool = False,
) -> Any:
    """`attention` over sequences of different lengths, packed one behind the other.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k: (total_k, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,): sequence b is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q, max_seqlen_k: the longest sequences, as host integers.
        checked: look at the contents of the offsets first, which waits for the device, and raise InvalidInput naming
            the first wrong index. Unchecked, wrong offsets give unspecified values but stay inside the tensors.

    The other arguments, errors and notes are those of `attention`.

    Returns:
        out: (total_q, num_heads_q, head_dim_v).
        lse: if asked for: (num_heads_q, total_q).
    """
    operands = Operands(q, k, v, None, None, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            raise InvalidType(f"{name} is None; it must be an int32 torch.Tensor of batch + 1 offsets")
    options = _options(operands, causal, window_size, softcap, softmax_scale, precision, return_lse)
    options = options._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if checked:
        describe_call(operands, options)
        check_packed_lengths(operands, options)
    return _call(operands, options, kernel, config)


def _options(
    operands: Operands,
    causal: bool | Causal,
    window_size: tuple[int, int] | None,
    softcap: float,
    softmax_scale: float | None,
    precision: str,
    return_lse: bool,
) -> Options:
    if causal is False:
        alignment = ""
    elif causal is True:
        alignment = "bottom_right"
    elif isinstance(causal, Causal):
        alignment = causal.alignment
    else:
        raise InvalidType(f"causal is {causal!r}; it must be True, False or a warpwave.Causal")
    left, right = (-1, -1) if window_size is None else _window(window_size)
    needs_grad = False
    if torch.is_grad_enabled():
        for t in operands:  # a loop, for `any` over a generator costs a microsecond here
            needs_grad = needs_grad or (isinstance(t, torch.Tensor) and t.requires_grad)
    return Options(0, 0, alignment, left, right, softcap, softmax_scale, precision, return_lse, needs_grad)


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise InvalidType(f"window_size is {window_size!r}; it must be (left, right), -1 for unlimited") from None
    if not (isinstance(left, int) and isinstance(right, int)):
        raise InvalidType(f"window_size is {window_size!r}; both sides must be integers")
    return left, right


def _call(operands: Operands, options: Options, kernel: str, config: Any) -> Any:
    if not _direct(operands, options):
        check_are_tensors(operands)
        out, lse = torch.ops.warpwave.attention(*operands, *options, kernel, ops.encode_config(config))
    else:
        out, lse = ops.attend(operands, options, kernel, config)
    return (out, lse) if options.return_lse else out


def _direct(operands: Operands, options: Options) -> bool:
    """Whether nothing needs torch's dispatcher: no gradient, no tracing, no mode, no transform, plain tensors."""
    if options.needs_grad or torch.compiler.is_compiling():
        return False
    for t in operands:
        if t is not None and type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            return False
    return not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None
