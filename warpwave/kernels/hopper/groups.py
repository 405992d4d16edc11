"""Groups of parameters (../groups.py) that several Hopper kernels take.

Tensor maps are not fields, because Triton's launcher expands only maps that are whole arguments. A warp role takes a
group as an argument. An aggregate that is made from a group has its fields (`gluon_or_stub.aggregate`).

ptxas loads two adjacent numbers at once if the first begins at a multiple of 8 bytes. The order of a kernel's numbers
is therefore part of its code, and another order changes registers. A group has its pointers first or last so that they
do not move the numbers after them by half a pair.
"""

from __future__ import annotations

from typing import NamedTuple

from warpwave.runtime.gluon_or_stub import gl
from warpwave.runtime.parameters import Pointer


class Queries(NamedTuple):
    """What the queries of a call read and write without tensor maps.

    Attributes:
        out_ptr: out, given where rows of out are not stored by a tensor map: packed, in float32, and by large_head_dim;
            not with splits.
        lse_ptr: the log-sum-exp, (batch, head, query) float32, or (head, token) if packed.
        alibi_slopes_ptr, sinks_ptr: float32, (batch, head) and (head,); strides along heads are 1.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets of packed sequences, int32.
    """

    out_ptr: Pointer
    lse_ptr: Pointer
    alibi_slopes_ptr: Pointer
    sinks_ptr: Pointer
    cu_seqlens_q_ptr: Pointer
    cu_seqlens_k_ptr: Pointer
    stride_alibi_b: int
    stride_lb: int
    stride_lh: int


class Schedule(NamedTuple):
    """The tiles of a call: see `scheduler.dense_tile`, `packed_tile` and `paged_tile`.

    Attributes:
        num_heads: heads that have tiles of their own. Heads that share tiles count as one, here and below.
        group_size: query heads of a kv head.
        heads_in_l2: heads that run together (host.heads_in_l2).
    """

    num_tiles: int
    num_heads: int
    group_size: int
    batch: int
    tiles_per_head: int
    heads_in_l2: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int


class Splits(NamedTuple):
    """The partial results of blocks that split the keys of a tile (flash_fwd/splits.py); fields are absent, and COLUMNS
    is 0, without splits.

    Attributes:
        acc_ptr, state_ptr: a `partials.Workspace`, with COLUMNS columns.
        rows: queries of all sequences.
        num_splits: blocks that split the keys of a tile.
    """

    acc_ptr: Pointer
    state_ptr: Pointer
    rows: int
    num_splits: int
    COLUMNS: gl.constexpr


class KeySchedule(NamedTuple):
    """The blocks of keys of a call. As in `Schedule`, but fields of queries hold lengths of keys, and those of keys
    lengths of queries (flash_bwd/band.work_on_keys).

    Attributes:
        num_heads: kv heads, each counted once for each of its splits.
        group_size: query heads of a block, the most of any if splits do not divide those of a kv head
            (flash_bwd/steps.heads_of).
        splits: blocks that divide the query heads of a tile of keys (flash_bwd/config.group_splits).
        whole, parts: the blocks that are not divided, and the parts of each later one (flash_bwd/config.divided_tail).
    """

    num_tiles: int
    num_heads_q: int
    num_heads: int
    group_size: int
    splits: int
    whole: int
    parts: int
    batch: int
    tiles_per_head: int
    heads_in_l2: int
    seqlen_k: int
    seqlen_q: int
    total_k: int
    total_q: int


class KeyGradients(NamedTuple):
    """The destination of dK and dV without tensor maps, with strides of batch, head and row. Also ALiBi's slopes, and
    the offsets of packed sequences: as in `KeySchedule`, those of queries are of keys."""

    dk_ptr: Pointer
    dv_ptr: Pointer
    alibi_slopes_ptr: Pointer
    cu_seqlens_k_ptr: Pointer
    cu_seqlens_q_ptr: Pointer
    stride_alibi_b: int
    stride_dk_b: int
    stride_dk_h: int
    stride_dk_n: int
    stride_dv_b: int
    stride_dv_h: int
    stride_dv_n: int


class QDescaleStrides(NamedTuple):
    """Strides of factors of q, along batches, kv heads, query heads of a group, and blocks of queries."""

    b: int
    h: int
    member: int
    m: int


class KeyDescaleStrides(NamedTuple):
    """Strides of factors of k or v, along batches, kv heads, and blocks of keys; of a cache along pages, kv heads, and
    tokens."""

    b: int
    h: int
    n: int


class Dropout(NamedTuple):
    """Dropout of a call: (seed, offset), or None without dropout, and `dropout.scalars`."""

    seed_ptr: Pointer
    threshold: int
    scale: float


class Mask(NamedTuple):
    """A packed mask (prepass/mask_bits.py). Its rows are keys if scores are computed transposed.

    Attributes:
        words_ptr: its words, with strides of batch, head, tile of columns and row.
        walks_ptr: lists of the steps of a block that show a pair (prepass/mask_steps.py), with strides of
            batch, head and block.
    """

    words_ptr: Pointer
    walks_ptr: Pointer
    stride_words_b: int
    stride_words_h: int
    stride_words_t: int
    stride_words_m: int
    stride_walks_b: int
    stride_walks_h: int
    stride_walks_t: int
