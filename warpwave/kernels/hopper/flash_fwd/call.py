"""The properties of a call that the rows of `hopper/flash_fwd`'s tables read."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels.hopper.flash_fwd.config import num_parts, tile_width
from warpwave.kernels.hopper.host import bias_bytes, pieces
from warpwave.kernels.hopper.shared_tiles import heads_of_tile, query_tiles
from warpwave.problem import AttentionProblem, by_kind

SHORT_KEYS = 2048
# Widths of V whose narrow pieces are padded: products with 16 or 32 columns last about as long as with 64.
PADDED_VALUES = (48, 112, 176)


class _Facts(NamedTuple):
    """The properties of a call that do not depend on its sizes.

    Attributes:
        width, width_v: the width of a tile, and that of V.
        parts: of an operand.
        bias_bytes: of a score.
        heads: that share a tile.
        is_unmasked: whether values are in 16 bits and the call has no mask or bias.
        is_masked: whether it has a mask or a bias in 16 bits.
        is_plain: whether the call is also dense.
        is_bare: whether scores also need no more work than a causal mask.
        is_causal: whether position hides keys by a causal mask alone, operands are in 16 bits, and there is no mask or
            bias.
    """

    width: int
    width_v: int
    parts: int
    bias_bytes: int
    heads: int
    is_unmasked: bool
    is_masked: bool
    is_plain: bool
    is_bare: bool
    is_causal: bool


@by_kind
def _facts(problem: AttentionProblem, gpu: Gpu) -> _Facts:
    has_none = problem.mask_shape is problem.bias_shape is None
    is_unmasked = problem.dtype != "float32" and has_none
    is_plain = is_unmasked and not problem.packed
    has_no_window = problem.window_size == (-1, -1)
    is_bare = problem.alibi_shape is None and problem.softcap == 0.0 and has_no_window and is_plain
    return _Facts(
        width=tile_width(problem),
        width_v=sum(pieces(problem.head_dim_v)),
        parts=num_parts(problem, gpu),
        bias_bytes=bias_bytes(problem),
        heads=heads_of_tile(problem),
        is_unmasked=is_unmasked,
        is_masked=not has_none and bias_bytes(problem) <= 2,
        is_plain=is_plain,
        is_bare=is_bare,
        is_causal=is_unmasked and has_no_window and problem.causal is not None and not problem.is_quantized,
    )


def reach(problem: AttentionProblem) -> int:
    """Returns the largest number of keys that a query sees, by position."""
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    upper = problem.seqlen_k if high is None else min(problem.seqlen_k, problem.seqlen_q + high)
    if low is None:
        return max(0, upper)
    return max(0, min(upper, problem.seqlen_k - low if high is None else high - low + 1))


class Call:
    """The properties of a call that the rows of `RULES` read. Sizes are computed when a row reads them."""

    def __init__(self, problem: AttentionProblem, gpu: Gpu) -> None:
        self.problem, self.gpu, self.num_sms = problem, gpu, gpu.assumed_sms
        (
            self.width, self.width_v, self.parts, self.bias_bytes, self.heads, self.is_unmasked, self.is_masked,
            self.is_plain, self.is_bare, is_causal,
        ) = _facts(problem, gpu)  # fmt: skip
        # The longest blocks take twice as long as the mean. With more keys than queries, blocks are more alike.
        self.is_triangle = is_causal and problem.seqlen_q == problem.seqlen_k

    def rows_per_sm(self, block_m: int) -> int:
        """Returns the rows that the busiest SM processes if all blocks take equally long."""
        return -(-query_tiles(self.problem, block_m, self.heads) // self.num_sms) * block_m

    @property
    def has_few_tiles(self) -> bool:
        """Returns whether no SM gets more than one block of 64 queries, in a dense call without mask or bias."""
        return self.is_plain and query_tiles(self.problem, 64, self.heads) <= self.num_sms

    @property
    def is_one_wave(self) -> bool:
        """Returns whether blocks of 128 queries all run at once."""
        return query_tiles(self.problem, 128, self.heads) <= self.num_sms

    def is_unbalanced(self, block_m: int) -> bool:
        """Returns whether the busiest SM gets over a fifth more rows from blocks of this size than from blocks of 64,
        or the longest of one wave of blocks sets the time."""
        rows = self.rows_per_sm(block_m)
        return (self.is_triangle and rows <= block_m) or rows > 1.2 * self.rows_per_sm(64)

    @property
    def has_rows_between_sectors(self) -> bool:
        """Returns whether a row of K or V has 48, 80, 112 or more bytes in 16 bits, so that not all rows start at a
        sector of 32 bytes. Their tiles probably take longer to load (not measured apart), and blocks of 64 queries load
        most often."""
        p = self.problem
        return any(d > 16 and d % 16 for d in (p.head_dim, p.head_dim_v))

    @property
    def fills_64_once(self) -> bool:
        """Returns whether all rows of a sequence, of all heads that share a tile, fit one block of 64, with more such
        blocks than SMs, in 16 bits without mask or bias."""
        p = self.problem
        is_short = p.seqlen_q * self.heads <= 64 and query_tiles(p, 64, self.heads) > self.num_sms
        return self.is_unmasked and is_short

    @cached_property
    def reach(self) -> int:
        """Returns the largest number of keys that a query sees, by position."""
        return reach(self.problem)

    @property
    def sees_few_keys(self) -> bool:
        """Returns whether position hides keys, by a causal mask or a window, and no query sees more than 2,048."""
        return self.problem.has_band and self.reach <= SHORT_KEYS

    @property
    def has_few_keys(self) -> bool:
        """Returns whether position hides keys, by a causal mask or a window, and a sequence has at most 2,048 keys. A
        short window over more keys does not count, unlike in `sees_few_keys`."""
        return self.problem.has_band and self.problem.seqlen_k <= SHORT_KEYS

    @property
    def is_chunk(self) -> bool:
        """Returns whether there are more than twice as many keys as queries and position hides few of them, in 16 bits
        without mask or bias."""
        p = self.problem
        hides_few = p.window_size == (-1, -1) and (p.causal is None or p.causal.alignment == "bottom_right")
        return self.is_unmasked and hides_few and 2 * p.seqlen_q < p.seqlen_k

    @property
    def has_token_factors(self) -> bool:
        """Returns whether keys and values have 8 bits and each token its factors."""
        return self.problem.kv_factors == "token"

    @property
    def pads_values(self) -> bool:
        """Returns whether narrow pieces of V are padded."""
        return self.is_plain and self.width_v in PADDED_VALUES

    @property
    def suits_192(self) -> bool:
        """Returns whether blocks of 192 rows balance over the SMs, and a tile has at most two pieces or V is padded.

        They balance if the busiest SM gets at most 1.13 times as many rows as from blocks of 128. The ratios of
        measured calls: 1.125 at 16 x 1024, 1.03 at 4 x 4096 and 1 x 16384. Up to head_dim 96 and above a ratio of 1.06,
        blocks of 192 are 0.93 to 1.05 times as fast in nine calls, 1.00 in the mean
        (2026-11-30-h200-special-cases.json). In one wave under a causal mask, blocks of 128 are 1.06 to 1.27 times as
        fast in 11 calls (ONE_WAVE).
        """
        rows = self.rows_per_sm(192)
        if self.is_triangle and rows <= 192:
            return False
        more = rows / max(1, self.rows_per_sm(128))
        return (len(pieces(self.width)) < 3 or self.pads_values) and more <= 1.13
