"""Writes new keys and values into the pages of a cache, and rotates them and the queries; portable Triton.

A program moves one head of one new token: to the cell of the cache that the page table names, or, for a head of q, to
a separate tensor. With rotary embeddings, pairs of elements (i, i + rotary_dim / 2), or (2i, 2i + 1) interleaved,
are rotated by the angle of the token's position,

    x' = x * cos[position] - y * sin[position];   y' = y * cos[position] + x * sin[position]

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). Angles are applied in float32 and the
result is rounded once. In a cache of 8-bit numbers the rotated numbers are divided by a factor first, which belongs to
the head, or is computed here from the token's largest magnitude. The new tokens are the last ones of each sequence: the
caller has advanced the lengths.

Offsets, rows, lengths and page ids come from the device and may be any int32. They are clamped, or their writes are
skipped: every load and store stays inside its tensor.

Bound: launch latency at decode, where it moves some kilobytes; memory at prefill. Without Triton, `write_torch`
does the same with torch's indexing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from warpwave.kernels import cache_descales
from warpwave.kernels.arguments import padded
from warpwave.kernels.groups import AnyTokens, CacheDescales, Pages
from warpwave.kernels.paged_keys import factors_of_cells
from warpwave.kernels.paging import offsets_within
from warpwave.kernels.primitives import packed_sequence, rounded
from warpwave.kernels.quantize_tensor import LARGEST, eight_bit, eight_bit_by_torch, factor_of, factors_of
from warpwave.runtime import launch
from warpwave.runtime.bounded import Bounded
from warpwave.runtime.triton_or_stub import INTERPRETED, NO_TRITON, jit, tl

UNSPECIALIZED = ["seqlen", "total", "num_heads_kv", "num_heads_q", "pages_of_a_row", "angles"]


class New(NamedTuple):
    """The tensors of one launch.

    Attributes:
        k, v: new tokens, (batch, seqlen, num_heads_kv, width), packed (total, num_heads_kv, width); None to rotate only
            queries.
        q, q_out: queries to rotate, of the same shape with num_heads_q, and their output; None for none.
        k_pages, v_pages: the pools, (num_pages, page_size, num_heads_kv, width).
        page_table: int32 (cache_rows, pages_of_a_row).
        seqused_k: int32 (cache_rows,): lengths including the new tokens.
        rows: int32 (batch,): the cache's row of each sequence; None for 0, 1, 2 and so on.
        cu_seqlens: int32 (batch + 1,) if tokens are packed.
        cos, sin: float32 (positions, rotary_dim / 2); None for no rotation.
        k_descale, v_descale: of pools of 8-bit numbers (kernels/cache_descales.py): read if they belong to heads,
            written if they belong to tokens.
    """

    k: Any
    v: Any
    q: Any
    q_out: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    seqused_k: Any
    rows: Any = None
    cu_seqlens: Any = None
    cos: Any = None
    sin: Any = None
    k_descale: Any = None
    v_descale: Any = None


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _token(tensor: AnyTokens, batch, row, head):
    """Returns a pointer to one head of one token, or of one cell of a page."""
    return tensor.ptr + batch * tensor.stride_b + row * tensor.stride_m + head * tensor.stride_h


@jit
def _head(
    ptr,
    stride_element,
    cos_ptr,
    sin_ptr,
    position,
    dims,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Loads one head of one token, [BLOCK], in float32, with its first ROTARY_DIM elements rotated to a position."""
    elements = dims.to(tl.int64)
    x = tl.load(ptr + elements * stride_element, mask=dims < WIDTH, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        half: tl.constexpr = ROTARY_DIM // 2
        rotated = dims < ROTARY_DIM
        if INTERLEAVED:
            first = dims % 2 == 0
            partner = tl.where(first, dims + 1, dims - 1)
            angle = dims // 2
        else:
            first = dims < half
            partner = tl.where(first, dims + half, dims - half)
            angle = tl.where(first, dims, dims - half)
        y = tl.load(ptr + partner.to(tl.int64) * stride_element, mask=rotated, other=0.0).to(tl.float32)
        offsets = position.to(tl.int64) * half + angle
        cos = tl.load(cos_ptr + offsets, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + offsets, mask=rotated, other=0.0).to(tl.float32)
        x = x * cos + tl.where(first, -y, y) * sin
    return x


@jit
def _store_head(
    x,
    out,
    factor_ptr,
    there,
    inside,
    FACTORS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Stores one head of one token, [BLOCK], in the dtype of the pool, if the cell is valid.

    Args:
        factor_ptr: the head's factor, read if FACTORS is "head", or written if it is "token". A token whose head
            contains Inf or NaN gets an infinite factor, so that attention to it is NaN, as in a 16-bit cache.
    """
    if FACTORS == "":
        x = rounded(x, out.dtype.element_ty)
    else:
        if FACTORS == "token":
            magnitudes = tl.abs(tl.where(inside, x, 0.0))
            largest = tl.max(tl.where(magnitudes < float("inf"), magnitudes, float("inf")))  # NaN included
            factor = factor_of(largest, LARGEST)
            tl.store(factor_ptr, factor, mask=there)
        else:
            factor = tl.load(factor_ptr)
        x = eight_bit(x * tl.math.div_rn(1.0, factor), out.dtype.element_ty, LARGEST)
    tl.store(out, x, mask=inside & there)


@jit(do_not_specialize=UNSPECIALIZED)
def append_kv_kernel(
    k_tensor: AnyTokens,
    v_tensor: AnyTokens,
    q_tensor: AnyTokens,
    q_out_ptr,
    k_pool: AnyTokens,
    v_pool: AnyTokens,
    pages: Pages,
    cu_seqlens_ptr,
    cos_ptr,
    sin_ptr,
    descales: CacheDescales,
    seqlen,
    total,
    num_heads_kv,
    num_heads_q,
    pages_of_a_row,
    angles,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    HAS_KV: tl.constexpr,
    HAS_Q: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Processes one head of one new token: a kv head, both its key and its value, or a head of q.

    Bound: latency.
    """
    heads = num_heads_kv + num_heads_q
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    token = pid // heads % seqlen
    batch = (pid // heads // seqlen).to(tl.int64)
    first = batch * 0
    if IS_VARLEN:
        first, seqlen = packed_sequence(cu_seqlens_ptr, batch, seqlen, total)
        if token >= seqlen:
            return
        batch_in_memory = batch * 0
    else:
        batch_in_memory = batch
    row = batch
    if pages.HAS_ROWS:
        row = tl.minimum(tl.maximum(tl.load(pages.rows_ptr + batch), 0), pages.num_rows - 1).to(tl.int64)
    # In 64 bits, so that the subtraction cannot overflow for any length.
    position = tl.load(pages.seqused_k_ptr + row).to(tl.int64) - seqlen + token
    at = first + token  # row in memory, from the begin of the sequence or the packed tensor
    # Positions past the table of angles use its last row: a wrong angle, but a load inside the tensor.
    angle = tl.minimum(tl.maximum(position, 0), angles - 1)
    dims = tl.arange(0, BLOCK_D)
    # Absence is known at compile time: the branch must not be compiled, because an absent pointer has no element type.
    if HAS_Q:  # noqa: SIM102
        if head >= num_heads_kv:
            head_q = head - num_heads_kv
            x = _token(q_tensor, batch_in_memory, at, head_q)
            x = _head(x, q_tensor.stride_d, cos_ptr, sin_ptr, angle, dims, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
            row_out = first + token if IS_VARLEN else batch * seqlen + token
            out = q_out_ptr + (row_out * num_heads_q + head_q) * HEAD_DIM + dims
            tl.store(out, rounded(x, q_out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if HAS_KV:  # noqa: SIM102
        if head < num_heads_kv:
            # Nothing is written if a length or a page id is invalid.
            page_place = position // pages.PAGE_SIZE
            there = (position >= 0) & (page_place < pages_of_a_row)
            page = tl.load(pages.table_ptr + row * pages.stride_table + page_place, mask=there, other=-1)
            there = there & (page >= 0) & (page < pages.num_pages)
            page = page.to(tl.int64)
            cell = position % pages.PAGE_SIZE
            x = _token(k_tensor, batch_in_memory, at, head)
            x = _head(x, k_tensor.stride_d, cos_ptr, sin_ptr, angle, dims, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
            out = _token(k_pool, page, cell, head) + dims.to(tl.int64) * k_pool.stride_d
            factor = descales.k.ptr
            if descales.FACTORS != "":
                factor = factors_of_cells(descales.k, page, cell, head)
            _store_head(x, out, factor, there, dims < HEAD_DIM, descales.FACTORS, LARGEST)
            dims_v = tl.arange(0, BLOCK_DV)
            x = _token(v_tensor, batch_in_memory, at, head)
            x = _head(x, v_tensor.stride_d, cos_ptr, sin_ptr, angle, dims_v, HEAD_DIM_V, 0, False)
            out = _token(v_pool, page, cell, head) + dims_v.to(tl.int64) * v_pool.stride_d
            factor = descales.v.ptr
            if descales.FACTORS != "":
                factor = factors_of_cells(descales.v, page, cell, head)
            _store_head(x, out, factor, there, dims_v < HEAD_DIM_V, descales.FACTORS, LARGEST)


# Host -----------------------------------------------------------------------------------------------------------------


def specify(new: New, max_seqlen: int, interleaved: bool) -> launch.Launch:
    """Returns the launch. `max_seqlen` is the longest of the packed sequences; it is ignored if they are not packed."""
    tokens = new.k if new.k is not None else new.q
    packed = new.cu_seqlens is not None
    batch = len(new.cu_seqlens) - 1 if packed else tokens.shape[0]
    # No sequence has more tokens than the packed tensor; a larger max_seqlen would launch programs without a token.
    seqlen = min(max_seqlen, tokens.shape[0]) if packed else tokens.shape[1]
    heads_kv = 0 if new.k is None else new.k.shape[-2]
    heads_q = 0 if new.q is None else new.q.shape[-2]
    strides: list[int] = []
    for tensor in (new.k, new.v, new.q):
        strides += (0, 0, 0, 0) if tensor is None else (0, *tensor.stride()) if packed else tensor.stride()
    head_dim, head_dim_v = new.k_pages.shape[-1], new.v_pages.shape[-1]
    return launch.Launch(
        kernel=append_kv_kernel,
        grid=batch * seqlen * (heads_kv + heads_q),
        tensors=new,
        scalars=[
            *strides,
            *new.k_pages.stride(),
            *new.v_pages.stride(),
            new.page_table.stride(0),
            new.k_pages.shape[0],
            new.page_table.shape[0],
            *cache_descales.strides(new.k_descale, new.v_descale),
            seqlen,
            tokens.shape[0] if packed else 0,
            heads_kv,
            heads_q,
            new.page_table.shape[1],
            1 if new.cos is None else new.cos.shape[0],
        ],
        constants={
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_D": padded(head_dim),
            "BLOCK_DV": padded(head_dim_v),
            "PAGE_SIZE": new.k_pages.shape[1],
            "ROTARY_DIM": 0 if new.cos is None else 2 * new.cos.shape[1],
            "INTERLEAVED": interleaved,
            "IS_VARLEN": packed,
            "HAS_ROWS": new.rows is not None,
            "HAS_KV": new.k is not None,
            "HAS_Q": new.q is not None,
            "FACTORS": cache_descales.kind_of(new.k_descale),
            "LARGEST": LARGEST.get(new.k_pages.dtype, 0.0),
        },
        options={"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False},
    )


_launchers: Bounded[tuple[Any, ...], Any] = Bounded(256)


def prepare(new: New, max_seqlen: int = 0, interleaved: bool = False) -> Callable[[New], None]:
    """Compiles for a layout, once, and returns `write(new)` for tensors of that layout. All failures happen here.

    Args:
        max_seqlen: the longest of the packed sequences.
        interleaved: whether a rotation rotates adjacent elements.
    """
    if NO_TRITON is not None or not (new.k_pages.is_cuda or INTERPRETED):
        return lambda new: write_torch(new, interleaved)
    key = (max_seqlen, interleaved, *launch.layouts(new))
    launcher = _launchers.get(key)
    if launcher is None:
        spec = specify(new, max_seqlen, interleaved)
        if spec.grid == 0:
            return lambda new: None
        launcher = launch.bind(spec)
        _launchers.put(key, launcher)
    return lambda new: launcher(*new)


@torch.inference_mode()  # writes pools of either mode, and records no gradient
def write_torch(new: New, interleaved: bool = False) -> None:
    """Writes with torch's indexing. Waits for the device."""
    tokens = new.k if new.k is not None else new.q
    device = tokens.device
    parts = {name: getattr(new, name) for name in ("k", "v", "q", "q_out")}
    if new.cu_seqlens is not None:
        offsets = offsets_within(new.cu_seqlens, len(tokens))
    else:
        offsets = torch.arange(len(tokens) + 1, device=device) * tokens.shape[1]
        parts = {name: None if t is None else t.flatten(0, 1) for name, t in parts.items()}
    counts = offsets.diff()
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)  # of each token
    if not len(sequence):
        return
    parts = {name: None if t is None else t[: len(sequence)] for name, t in parts.items()}
    row = sequence if new.rows is None else new.rows.long().clamp(0, len(new.page_table) - 1)[sequence]
    nth = torch.arange(len(sequence), device=device) - offsets[sequence]
    position = new.seqused_k[row].long() - counts[sequence] + nth
    if new.q is not None:
        parts["q_out"].copy_(rotated(parts["q"], position, new.cos, new.sin, interleaved))
    if new.k is not None:
        page_size, columns = new.k_pages.shape[1], new.page_table.shape[1]
        column, cell = position // page_size, position % page_size
        # Nothing is written if a length or a page id is invalid.
        there = (position >= 0) & (column < columns)
        pages = new.page_table[row, column.clamp(0, columns - 1)].long()
        there &= (pages >= 0) & (pages < len(new.k_pages))
        keys = parts["k"] if new.k_descale is None else parts["k"].float()
        keys = rotated(keys, position, new.cos, new.sin, interleaved)
        cells = (pages[there], cell[there])
        _store_torch(keys[there], new.k_pages, new.k_descale, cells)
        _store_torch(parts["v"][there], new.v_pages, new.v_descale, cells)


def _store_torch(x: torch.Tensor, pool: torch.Tensor, factor: torch.Tensor | None, cells: Any) -> None:
    """Writes tokens, (tokens, heads, width), to cells of a pool, as `_store_head` does."""
    if factor is not None:
        x = x.float()
        if factor.dim() == 3:
            magnitudes = x.abs()
            magnitudes = torch.where(magnitudes < torch.inf, magnitudes, torch.inf)
            factor[cells] = factors_of(magnitudes.amax(-1), LARGEST[pool.dtype])
            factor = factor[cells]
        x = eight_bit_by_torch(x * (1 / factor)[..., None], pool.dtype)
    pool[cells] = x


def rotated(
    x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """Returns x, (tokens, heads, head_dim), with the first elements of each head rotated to the tokens' positions."""
    if cos is None or sin is None:
        return x
    rotary_dim = 2 * cos.shape[1]
    c, s = (t[position.long().clamp(0, len(t) - 1)].float()[:, None] for t in (cos, sin))
    head, out = x[..., :rotary_dim].float(), x.clone()
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    turned = [a * c + -b * s, b * c + a * s]
    out[..., :rotary_dim] = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out
