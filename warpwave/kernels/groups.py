"""What kernels take as one argument: a tensor with its strides, the rules of scores, sequences, window, dropout.

The families in Triton, except the ladder, use the same groups under the same names. One compiled kernel serves every
value of a field of type `int`; for one of type `Specialized` Triton compiles anew (runtime/parameters.py). In a kernel,
a group is a tuple whose fields cannot be assigned. A device function returns no group with constants or absent
pointers: Triton makes run-time values of what is returned.
"""

from __future__ import annotations

from typing import NamedTuple

from warpwave.runtime.parameters import Pointer, Specialized
from warpwave.runtime.triton_or_stub import tl


class Tokens(NamedTuple):
    """A tensor of tokens, as q, k, v, out and their gradients, with its strides: of batch items, tokens, heads and
    elements."""

    ptr: Pointer
    stride_b: Specialized
    stride_m: Specialized
    stride_h: Specialized
    stride_d: Specialized


class InUnits(NamedTuple):
    """A tensor of tokens, or a pool of pages, whose strides of batch items (pages), tokens and heads count units of
    STRIDE_UNIT elements, which `primitives.in_elements` converts; single elements where a kernel has no unit.

    The compiler recognizes only multiples of 16, and the units show it that rows of 40 or 80 elements are 16-byte
    aligned. Otherwise they are read one element at a time.
    """

    ptr: Pointer
    stride_b: int
    stride_m: int
    stride_h: int
    stride_d: Specialized


class OfHeads(NamedTuple):
    """What each head has, as lse (a number for each query, adjacent in memory) and ALiBi's slopes."""

    ptr: Pointer
    stride_b: int
    stride_h: int


class Pairs(NamedTuple):
    """A tensor of pairs of a query and a key, as mask and bias. Strides are 0 along broadcast axes."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_m: Specialized
    stride_n: Specialized


class ScoreRules(NamedTuple):
    """What happens to scores after the product."""

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
    """Lengths of a batch. If sequences are packed, `cu_seqlens` states where they begin; lengths are the longest."""

    cu_seqlens_q_ptr: Pointer
    cu_seqlens_k_ptr: Pointer
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    IS_VARLEN: tl.constexpr


class Window(NamedTuple):
    """Which keys a query sees by position (`arguments.window`), and which edges that band has."""

    left: int
    right: int
    HAS_LOW: tl.constexpr
    HAS_HIGH: tl.constexpr
    TOP_LEFT: tl.constexpr


class Splits(NamedTuple):
    """Into how many parts the keys are split, and where each stores its partial result (partials.py)."""

    acc_ptr: Pointer
    state_ptr: Pointer
    num_splits: int


class Pages(NamedTuple):
    """How sequences lie in a pool of pages: each has a row of the table, which `rows` numbers if it is there."""

    table_ptr: Pointer
    seqused_k_ptr: Pointer
    rows_ptr: Pointer
    stride_table: int
    num_pages: int
    num_rows: int
    PAGE_SIZE: tl.constexpr
    HAS_ROWS: tl.constexpr


class DescalesOfPool(NamedTuple):
    """Factors of a pool of 8-bit keys or values: of a page, a token in it, and a kv head. Shared ones have stride 0."""

    ptr: Pointer
    stride_p: int
    stride_t: int
    stride_h: int


class CacheDescales(NamedTuple):
    """Factors of pools of 8-bit numbers, and what shares one: "head", "token", or "" without factors."""

    k: DescalesOfPool
    v: DescalesOfPool
    FACTORS: tl.constexpr


class Dropout(NamedTuple):
    """Which probabilities are dropped (dropout.py)."""

    seed_ptr: Pointer
    threshold: int
    scale: float
    HAS_DROPOUT: tl.constexpr


class DescalesOfQ(NamedTuple):
    """Factors of q: of a batch item, a kv head, a query head of its group, and a block of tokens."""

    ptr: Pointer
    stride_b: int
    stride_g: int
    stride_h: int
    stride_n: int


class DescalesOfKeys(NamedTuple):
    """Factors of k or v: of a batch item, a kv head, and a block of tokens."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_n: int


class Descales(NamedTuple):
    """Factors of quantized operands, tokens of the blocks that share one, and how probabilities and out are scaled."""

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
