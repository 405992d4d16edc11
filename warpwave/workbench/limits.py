"""Limits of the calls that the workbench describes. Larger calls exceed every device's memory or the host's time."""

from __future__ import annotations

import math

from warpwave.errors import InvalidInput
from warpwave.problem import DTYPE_BYTES, AttentionProblem

LARGEST_BYTES = 1 << 39  # per operand; the largest card of the catalog has 288 GB
MOST_TOKENS = (1 << 31) - 1  # of q, and of k; offsets of packed sequences are 32-bit integers
MOST_SEQUENCES = 1 << 20  # per call; the host lists them
LONGEST = 1 << 27  # tokens per sequence; the host takes a minute to count the tiles of each kernel


def check_size(problem: AttentionProblem) -> None:
    """Refuses a call that is too large.

    Raises:
        InvalidInput: the message names the operand or the size that is too large.
    """
    p = problem
    if p.batch > MOST_SEQUENCES:
        raise InvalidInput(f"batch is {p.batch:,}; a call can have {MOST_SEQUENCES:,} sequences at most")
    keys = p.total_k if p.packed else p.batch * p.seqlen_k
    size = DTYPE_BYTES[p.dtype]
    operands = {
        "q": p.rows * p.num_heads_q * p.head_dim * size,
        "k": keys * p.num_heads_kv * p.head_dim * DTYPE_BYTES[p.dtype_of_k],
        "v": keys * p.num_heads_kv * p.head_dim_v * DTYPE_BYTES[p.dtype_of_v],
        "mask": 0 if p.mask_shape is None else math.prod(p.mask_shape),
        "bias": 0 if p.bias_shape is None else math.prod(p.bias_shape) * DTYPE_BYTES[p.bias_dtype or p.dtype],
    }
    for name, bytes_ in operands.items():
        if bytes_ > LARGEST_BYTES:
            raise InvalidInput(f"{name} would take {bytes_ / 1e12:,.1f} TB, more than any GPU has")
    for name, length in (("seqlen_q", p.seqlen_q), ("seqlen_k", p.seqlen_k)):
        if length > LONGEST:
            raise InvalidInput(f"{name} is {length:,}; a sequence can have {LONGEST:,} tokens at most")
    for name, tokens in (("q", p.rows), ("k", keys)):
        if tokens > MOST_TOKENS:
            raise InvalidInput(f"{name} has {tokens:,} tokens; a call can have {MOST_TOKENS:,} at most")
