"""Dropout: one function of the seed and of positions decides which probabilities are dropped, on every device and in
every kernel.

The pair of query i and key j, of query head h in batch item b, has a random word of 32 bits. It is dropped if the word,
as a signed number, is below `threshold(p)`; a pair that is kept counts `scale(p)` times. The words are those of
Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); 7 rounds are the fewest that pass
BigCrush), and a seed is two 64-bit integers (seed, offset):

    key      = words 0 and 1 of Philox(key = seed, counter = (low half of offset, high half of offset, 0, 0))
    counter  = (j without bit 3, i without bit 3, h, b)
    word     = number (bit 3 of j) + 2 * (bit 3 of i) of Philox(key, counter)

i and j count from the beginning of their sequence and b counts sequences, so a packed sequence drops what the same
sequence of a dense batch drops. It does not depend on tiles, configs or kernels. Pairs of equal positions in different
sequences never share a counter, and different offsets have different keys, so neighboring offsets are independent.

Why bit 3: four pairs share one call. In the accumulator of a wgmma instruction, a thread holds rows r and r + 8 and
columns c and c + 8, in a tile of scores and in a transposed one. It uses all four words of a call, and no data is
exchanged. With mma instructions, whose warps share the columns of a tile, a thread uses two words, elsewhere one or
two.
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

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD, _SIGN = 0xFFFFFFFF, 0x80000000
EVEN, ODD = tl.constexpr(_MULTIPLIERS[0]), tl.constexpr(_MULTIPLIERS[1])
STEP_0, STEP_1 = tl.constexpr(_KEY_STEPS[0]), tl.constexpr(_KEY_STEPS[1])


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


def threshold(dropout_p: float) -> int:
    """Returns the signed 32-bit number below which a random word drops its pair: p in units of 2^-32."""
    return min(round(dropout_p * 2**32), 2**32 - 1) - 2**31


def scale(dropout_p: float) -> float:
    """Returns 1 / (1 - p), by which the probabilities that are kept are multiplied."""
    return 1.0 / (1.0 - dropout_p)


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
    key = _key_of(seed)
    counter = (
        key_groups,
        row_groups[:, None],
        torch.arange(heads.start, heads.stop, device=seed.device)[:, None, None],
        torch.arange(batch.start, batch.stop, device=seed.device)[:, None, None, None],
    )
    words = [word - ((word & _SIGN) << 1) >= threshold(dropout_p) for word in philox(key, counter)]
    # [batch, heads, 16 rows, 8 rows, 16 keys, 8 keys] for each (bit of the row, bit of the key)
    shape = (len(batch), len(heads), len(spans[0]), 8, len(spans[1]), 8)
    words = [word.expand(len(batch), len(heads), len(row_groups), len(key_groups)).reshape(shape) for word in words]
    of_rows = [torch.stack(words[2 * bit : 2 * bit + 2], dim=5).flatten(4) for bit in range(2)]
    whole = torch.stack(of_rows, dim=3).flatten(2, 4)
    first_row, first_key = 16 * spans[0].start, 16 * spans[1].start
    return whole[..., rows.start - first_row : rows.stop - first_row, keys.start - first_key : keys.stop - first_key]


def _key_of(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the key of a call."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    zero = torch.zeros_like(low[0])
    words = philox((low[0], high[0]), (low[1], high[1], zero, zero))
    return words[0], words[1]


def philox(key: tuple[torch.Tensor, ...], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the four words of Philox4x32-7, each in an int64 tensor of the shape that the arguments broadcast to."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        # The low 64 bits of an int64 product are those of the unsigned one.
        even, odd = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = ((odd >> 32) & _WORD) ^ c1 ^ k0, odd & _WORD
        c2, c3 = ((even >> 32) & _WORD) ^ c3 ^ k1, even & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


# Device code ----------------------------------------------------------------------------------------------------------


@jit
def _philox(k0, k1, c0, c1, c2, c3):
    """Returns the four words of Philox4x32-7. Each product has 64 bits. `tl.philox` computes both halves separately,
    although most GPUs compute them in one instruction."""
    for _ in tl.static_range(ROUNDS):
        even = c0.to(tl.uint64) * EVEN
        odd = c2.to(tl.uint64) * ODD
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = odd.to(tl.uint32)
        c3 = even.to(tl.uint32)
        k0 += STEP_0
        k1 += STEP_1
    return c0, c1, c2, c3


@jit
def load_dropout_key(seed_ptr):
    """Returns the key of a call, two words, from its (seed, offset)."""
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    zero = offset.to(tl.uint32) * 0
    first, second, _third, _fourth = _philox(
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32), (offset >> 32).to(tl.uint32), zero, zero
    )
    return first, second


@jit
def dropout_words(key, batch, head, row_begin, rows, key_begin, keys):
    """Returns the random words of the pairs of a tile, as signed numbers; arguments as for `dropout_keeps`."""
    # Subtracted, because LLVM does not always fold `keys & ~SHARED_BIT` and would then compute each call twice.
    row_bit = rows & SHARED_BIT
    key_bit = keys & SHARED_BIT
    of_keys = (key_begin + (keys - key_bit)).to(tl.uint32)
    of_rows = (row_begin + (rows - row_bit)).to(tl.uint32)
    w0, w1, w2, w3 = _philox(key[0], key[1], of_keys, of_rows, head.to(tl.uint32), batch.to(tl.uint32))
    word = tl.where(row_bit != 0, tl.where(key_bit != 0, w3, w2), tl.where(key_bit != 0, w1, w0))
    return word.to(tl.int32, bitcast=True)


@jit
def dropout_keeps(key, batch, head, row_begin, rows, key_begin, keys, threshold):
    """Returns which pairs of a tile dropout keeps.

    Args:
        key: from `load_dropout_key`.
        row_begin, key_begin: positions in the sequence at which the tile begins, multiples of 16.
        rows, keys: positions in the tile, int32, that broadcast to it. They do not include the tile's begin, so that
            the compiler sees which pairs share a call, and computes the call once.
        threshold: from `threshold`.
    """
    return dropout_words(key, batch, head, row_begin, rows, key_begin, keys) >= threshold
