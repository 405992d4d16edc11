"""Dropout: one function of the seed and of positions decides which probabilities are dropped, on every device and in
every kernel.

The pair of query i and key j, of query head h in batch item b, has a random number of 16 bits. It is dropped if the
number, as a signed one, is below 2^16 p - 2^15, rounded; a pair that is kept counts `scale(p)` times. The numbers are
those of Philox2x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); 7 rounds are the fewest that
pass BigCrush), and a seed is two 64-bit integers (seed, offset):

    (c, d)   = Philox(key = low half of seed, counter = (high half of seed, low half of offset))
    (k, l)   = Philox(key = c, counter = (d, high half of offset))
    (u, v)   = Philox(key = k, counter = (h, b))
    words    = Philox(key = l, counter = (u ^ (j without bit 3), v ^ (i without bit 3)))
    number   = the high half of word (bit 3 of i) if bit 3 of j is 0, else the low half

i and j count from the beginning of their sequence and b counts sequences, so a packed sequence drops what the same
sequence of a dense batch drops. It does not depend on tiles, configs or kernels. Two heads of a call have pairs with
the same counter only if their (u, v) agree in all bits above those of a position. Some of 2,048 heads do with a
probability of 2^-19 at 4,096 tokens and 2^-9 at 131,072.

Why bit 3: four pairs share one call. In the accumulator of a wgmma instruction, a thread holds rows r and r + 8 and
columns c and c + 8, in a tile of scores and in a transposed one. It uses all four numbers of a call, and no data is
exchanged. With mma instructions, whose warps share the columns of a tile, a thread uses two of the four, elsewhere one
or two.
"""

from __future__ import annotations

from typing import Any

import torch

from warpwave.errors import InvalidInput, InvalidType
from warpwave.problem import AttentionProblem
from warpwave.runtime.triton_or_stub import jit, tl

_ROUNDS = 7
ROUNDS = tl.constexpr(_ROUNDS)
SHARED_BIT = tl.constexpr(8)  # bit 3 of a position, in which the pairs that share a call differ
SEED_SHAPE = (2,)  # (seed, offset), int64

_MULTIPLIER, _KEY_STEP = 0xD256D193, 0x9E3779B9
_WORD = 0xFFFFFFFF
_BITS, _HALF, _SIGN = 16, 0xFFFF, 0x8000
MULTIPLIER, KEY_STEP = tl.constexpr(_MULTIPLIER), tl.constexpr(_KEY_STEP)
BITS = tl.constexpr(_BITS)  # of a pair's random number


# Arguments ------------------------------------------------------------------------------------------------------------


def check_probability(dropout_p: float) -> None:
    """Raises InvalidInput if a probability of dropout is not in [0, 1)."""
    if not 0 <= dropout_p < 1:
        raise InvalidInput(f"dropout_p is {dropout_p}; it must be at least 0 and less than 1, 0 for no dropout")


def check_problem(problem: AttentionProblem) -> None:
    """Raises InvalidInput if no call can have a problem's dropout."""
    check_probability(problem.dropout_p)
    if problem.dropout_p and problem.page_size:
        raise InvalidInput(f"dropout_p is {problem.dropout_p}; calls on a paged cache have no dropout")


def check_seed(seed: Any) -> None:
    """Raises InvalidInput or InvalidType if a seed is not an int64 tensor of two numbers."""
    if not isinstance(seed, torch.Tensor):
        raise InvalidType(f"dropout_seed is a {type(seed).__name__}; it must be an int64 torch.Tensor (seed, offset)")
    if seed.dtype != torch.int64:
        raise InvalidType(f"dropout_seed is {seed.dtype}; it must be torch.int64")
    if tuple(seed.shape) != SEED_SHAPE:
        raise InvalidInput(f"dropout_seed has shape {tuple(seed.shape)}; it must be (2,), a seed and an offset")


def _least_kept(dropout_p: float) -> int:
    """Returns the least random number, as a signed one, that keeps its pair."""
    return min(round(dropout_p * 2**_BITS), 2**_BITS - 1) - _SIGN


def threshold(dropout_p: float) -> int:
    """Returns the signed number of 32 bits below which a random number drops its pair, if it is the high half of such a
    number (`dropout_numbers`)."""
    return _least_kept(dropout_p) << _BITS


def scale(dropout_p: float) -> float:
    """Returns 1 / (1 - p), by which the probabilities that are kept are multiplied; p is rounded as in `threshold`."""
    return 1.0 / (1.0 - (_least_kept(dropout_p) + _SIGN) / 2**_BITS)


def scalars(dropout_p: float) -> tuple[int | None, float | None]:
    """Returns the run-time arguments of a kernel: the threshold and the scale, None without dropout, so that the
    compiled code is that of a kernel that does not have them."""
    return (threshold(dropout_p), scale(dropout_p)) if dropout_p else (None, None)


def draw_seed(device: torch.device) -> torch.Tensor:
    """Returns a new (seed, offset) from torch's default generator of a device, int64 (2,), without reading it on the
    host: under a CUDA graph every replay draws another."""
    return torch.randint(2**63 - 1, SEED_SHAPE, dtype=torch.int64, device=device)


# Host -----------------------------------------------------------------------------------------------------------------


def kept(dropout_p: float, seed: torch.Tensor, batch: range, heads: range, rows: range, keys: range) -> torch.Tensor:
    """Returns which pairs dropout keeps, by the operations of torch on the device of the seed.

    Args:
        dropout_p: the probability of a pair to be dropped.
        seed: int64 (2,), (seed, offset).
        batch, heads, rows, keys: the pairs, by position: sequence, query head, query and key in the sequence.

    Returns:
        bool, (batch, heads, rows, keys).
    """
    # Whole periods of 16 positions, of which half share the calls of the other half.
    spans = [range(r.start // 16, -(-r.stop // 16)) for r in (rows, keys)]
    first = torch.arange(8, device=seed.device)
    row_groups, key_groups = (
        (16 * torch.arange(s.start, s.stop, device=seed.device)[:, None] + first).flatten() for s in spans
    )
    of_call, of_pairs = _key_of(seed)
    of_heads = torch.arange(heads.start, heads.stop, device=seed.device)[:, None, None]
    of_batch = torch.arange(batch.start, batch.stop, device=seed.device)[:, None, None, None]
    u, v = philox(of_call, (of_heads, of_batch))
    words = philox(of_pairs, (u ^ key_groups, v ^ row_groups[:, None]))
    numbers = [number for word in words for number in (word >> _BITS, word & _HALF)]
    kept_of = [number - ((number & _SIGN) << 1) >= _least_kept(dropout_p) for number in numbers]
    # [batch, heads, 16 rows, 8 rows, 16 keys, 8 keys] for each (bit of the row, bit of the key)
    shape = (len(batch), len(heads), len(spans[0]), 8, len(spans[1]), 8)
    kept_of = [each.expand(len(batch), len(heads), len(row_groups), len(key_groups)).reshape(shape) for each in kept_of]
    of_rows = [torch.stack(kept_of[2 * bit : 2 * bit + 2], dim=5).flatten(4) for bit in range(2)]
    whole = torch.stack(of_rows, dim=3).flatten(2, 4)
    first_row, first_key = 16 * spans[0].start, 16 * spans[1].start
    return whole[..., rows.start - first_row : rows.stop - first_row, keys.start - first_key : keys.stop - first_key]


def _key_of(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two keys of a call: of its heads, and of their pairs."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first, second = philox(low[0], (high[0], low[1]))
    return philox(first, (second, high[1]))


def philox(key: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two words of Philox2x32-7, each in an int64 tensor of the shape that the arguments broadcast to."""
    first, second = counter
    for _ in range(_ROUNDS):
        product = _MULTIPLIER * first  # its low 64 bits are those of the unsigned product
        first, second = ((product >> 32) & _WORD) ^ key ^ second, product & _WORD
        key = (key + _KEY_STEP) & _WORD
    return first, second


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _philox(key, first, second):
    """Returns the two words of Philox2x32-7. Each product has 64 bits, which most GPUs compute in one instruction."""
    for _ in tl.static_range(ROUNDS):
        product = first.to(tl.uint64) * MULTIPLIER
        first = (product >> 32).to(tl.uint32) ^ key ^ second
        second = product.to(tl.uint32)
        key += KEY_STEP
    return first, second


@jit
def load_dropout_key(seed_ptr):
    """Returns the two keys of a call from its (seed, offset)."""
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    first, second = _philox(seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32))
    return _philox(first, second, (offset >> 32).to(tl.uint32))


@jit
def dropout_of_head(keys, batch, head):
    """Returns the key of a head's pairs, and what their counters are combined with; `keys` are those of the call."""
    u, v = _philox(keys[0], head.to(tl.uint32), batch.to(tl.uint32))
    return keys[1], u, v


@jit
def dropout_numbers(of_head, row_begin, rows, key_begin, keys):
    """Returns the random numbers of the pairs of a tile, as the high halves of signed ones; arguments as for
    `dropout_keeps`."""
    # Subtracted, because LLVM does not always fold `keys & ~SHARED_BIT` and would then compute each call twice.
    row_bit = rows & SHARED_BIT
    key_bit = keys & SHARED_BIT
    of_keys = (key_begin + (keys - key_bit)).to(tl.uint32)
    of_rows = (row_begin + (rows - row_bit)).to(tl.uint32)
    w0, w1 = _philox(of_head[0], of_head[1] ^ of_keys, of_head[2] ^ of_rows)
    word = tl.where(row_bit != 0, w1, w0)
    return tl.where(key_bit != 0, word << BITS, word).to(tl.int32, bitcast=True)


@jit
def dropout_keeps(of_head, row_begin, rows, key_begin, keys, threshold):
    """Returns which pairs of a tile dropout keeps.

    Args:
        of_head: from `dropout_of_head`.
        row_begin, key_begin: positions in the sequence at which the tile begins, multiples of 16.
        rows, keys: positions in the tile, int32, that broadcast to it. They do not include the tile's begin, so that
            the compiler sees which pairs share a call, and computes the call once.
        threshold: from `threshold`.
    """
    return dropout_numbers(of_head, row_begin, rows, key_begin, keys) >= threshold
