"""Groups of parameters that a kernel takes as one argument: a tensor with its strides, score rules, sequences, window,
dropout.

The families in Triton use the same groups under the same names. One compiled kernel serves every value of a field of
type `int`; Triton specializes a field of type `Specialized` (runtime/parameters.py). A kernel cannot assign to a field.
A device function must not return a group with constants or absent pointers, because Triton turns returned values into
run-time values; `in_elements` returns a stride that may be the constant 1, which inlining restores.
"""

from __future__ import annotations

from typing import NamedTuple

from warpwave.runtime.parameters import Pointer, Specialized
from warpwave.runtime.triton_or_stub import tl


class Tokens(NamedTuple):
    """A tensor of tokens (q, k, v, out, their gradients), with the strides of batch items, tokens, heads and
    elements."""

    ptr: Pointer
    stride_b: Specialized
    stride_m: Specialized
    stride_h: Specialized
    stride_d: Specialized


class InUnits(NamedTuple):
    """A tensor of tokens, or a pool of pages, whose strides of batch items (pages), tokens and heads count units of
    STRIDE_UNIT elements, which `primitives.in_elements` converts.

    The compiler recognizes only multiples of 16. With the units it also recognizes that rows of 40 or 80 elements are
    16-byte aligned; otherwise it would read them one element at a time.
    """

    ptr: Pointer
    stride_b: int
    stride_m: int
    stride_h: int
    stride_d: Specialized


class AnyTokens(NamedTuple):
    """A tensor of tokens, or a pool of pages, of any strides in elements. One compiled kernel serves all strides but
    `stride_d`."""

    ptr: Pointer
    stride_b: int
    stride_m: int
    stride_h: int
    stride_d: Specialized


class OfHeads(NamedTuple):
    """A tensor with data of each head: lse (one number a query, adjacent in memory), ALiBi's slopes."""

    ptr: Pointer
    stride_b: int
    stride_h: int


class Pairs(NamedTuple):
    """A tensor with an element for each query and key: mask, bias. Strides are 0 along broadcast axes."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_m: Specialized
    stride_n: Specialized


class ScoreRules(NamedTuple):
    """The operations on scores after the product."""

    mask: Pairs
    bias: Pairs
    alibi_slopes: OfHeads
    softmax_scale: float
    softcap: float
    HAS_MASK: tl.constexpr
    HAS_BIAS: tl.constexpr
    HAS_ALIBI: tl.constexpr
    HAS_SOFTCAP: tl.constexpr


class Sequences(NamedTuple):
    """Lengths of a batch. If sequences are packed, `cu_seqlens` states their offsets, and lengths are the longest."""

    cu_seqlens_q_ptr: Pointer
    cu_seqlens_k_ptr: Pointer
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    IS_VARLEN: tl.constexpr


class Window(NamedTuple):
    """The band of keys that a query sees by position (`arguments.window`), and the edges that it has."""

    left: int
    right: int
    HAS_LOW: tl.constexpr
    HAS_HIGH: tl.constexpr
    TOP_LEFT: tl.constexpr


class Partials(NamedTuple):
    """The number of splits of the keys, and the buffers of their partial results (partials.py)."""

    acc_ptr: Pointer
    state_ptr: Pointer
    num_splits: int


class Pages(NamedTuple):
    """The pages of sequences in a pool. Each sequence has a row of the table, row `rows[batch]` if `rows` is given."""

    table_ptr: Pointer
    seqused_k_ptr: Pointer
    rows_ptr: Pointer
    stride_table: int
    num_pages: int
    num_rows: int
    PAGE_SIZE: tl.constexpr
    HAS_ROWS: tl.constexpr


class DescalesOfPool(NamedTuple):
    """Factors of a pool of 8-bit keys or values, by page, token in it, and kv head. A shared axis has stride 0."""

    ptr: Pointer
    stride_p: int
    stride_t: int
    stride_h: int


class CacheDescales(NamedTuple):
    """Factors of pools of 8-bit numbers. FACTORS states what has one: "head", "token", or "" without factors."""

    k: DescalesOfPool
    v: DescalesOfPool
    FACTORS: tl.constexpr


class Dropout(NamedTuple):
    """Parameters of dropout of probabilities (dropout.py)."""

    seed_ptr: Pointer
    threshold: int
    scale: float
    HAS_DROPOUT: tl.constexpr


class DescalesOfQ(NamedTuple):
    """Factors of q, by batch item, kv head, query head of its group, and block of tokens."""

    ptr: Pointer
    stride_b: int
    stride_g: int
    stride_h: int
    stride_n: int


class DescalesOfKeys(NamedTuple):
    """Factors of k or v, by batch item, kv head, and block of tokens."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_n: int


class Descales(NamedTuple):
    """Factors of quantized operands, the tokens of a block that shares one, and the scales of probabilities and out."""

    q: DescalesOfQ
    k: DescalesOfKeys
    v: DescalesOfKeys
    out_ptr: Pointer
    QUANTIZED: tl.constexpr
    Q_BLOCK: tl.constexpr
    K_BLOCK: tl.constexpr
    V_BLOCK: tl.constexpr
    P_SCALE: tl.constexpr
    LARGEST_OUT: tl.constexpr
