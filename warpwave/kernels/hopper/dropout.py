"""Dropout in the Hopper kernels: which probabilities a warpgroup drops (../dropout.py has the definition).

A thread of a wgmma accumulator holds pairs that share a call of Philox, four by four, if its tile begins at multiples
of 16 queries and keys. With dropout, tiles therefore begin at such multiples: a sequence's first tile may begin up to
15 rows before the first visible one, and these rows are zeroed in shared memory (`rows.zero_head`).
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.dropout import dropout_numbers, dropout_of_head, load_dropout_key
from warpwave.kernels.hopper import groups
from warpwave.kernels.hopper.parts import accumulator_layout, is_a
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit

PERIOD = gl.constexpr(16)  # tiles begin at multiples of it


@aggregate
class OfCall:
    """Dropout of a call."""

    dropout: groups.Dropout


@aggregate
class HeadDropout:
    """Dropout of one query head of a sequence.

    Args:
        key: from `dropout_of_head`.
        threshold, scale: see `groups.Dropout`.
    """

    key: gl.tuple
    threshold: gl.tensor
    scale: gl.tensor


@constexpr_function
def has_dropout(dropout):
    """Returns whether the call has dropout; `dropout` is an `OfCall`, a `HeadDropout`, or () for none."""
    return is_a(dropout, "threshold")


@jit
def of_call(dropout: groups.Dropout):
    """Returns the dropout of a call as an aggregate, () without dropout."""
    if dropout.seed_ptr is not None:
        return OfCall(dropout)
    else:
        return ()


@jit
def key_of(dropout):
    """Returns the keys of a call, () without dropout."""
    if has_dropout(dropout):
        return load_dropout_key(dropout.seed_ptr)
    else:
        return ()


@jit
def of_head(dropout, key, batch, head):
    """Returns the dropout of a head, () without dropout."""
    if has_dropout(dropout):
        return HeadDropout(dropout_of_head(key, batch, head), dropout.threshold, dropout.scale)
    else:
        return ()


@jit
def drop(p, dropout, row_first, key_first, KEYS_FIRST: gl.constexpr, NEGATE: gl.constexpr):
    """Returns p, at least 0, with zeros where dropout drops a pair; with its negative if NEGATE.

    The sign marks dropped pairs until dP is computed, without further registers. Sixteen columns are processed at a
    time, because ptxas keeps the state of all Philox calls that stand side by side.

    Args:
        p: [keys, queries] if KEYS_FIRST, else [queries, keys].
        row_first, key_first: the first query and key, multiples of PERIOD.
    """
    half: gl.constexpr = p.shape[1] // 2
    if p.shape[1] > PERIOD:
        first, second = gl.split(gl.permute(gl.reshape(p, [p.shape[0], 2, half]), (0, 2, 1)))
        first = gl.convert_layout(first, accumulator_layout(half), assert_trivial=True)
        second = gl.convert_layout(second, accumulator_layout(half), assert_trivial=True)
        first = drop(first, dropout, row_first, key_first, KEYS_FIRST, NEGATE)
        if KEYS_FIRST:
            second = drop(second, dropout, row_first + half, key_first, KEYS_FIRST, NEGATE)
        else:
            second = drop(second, dropout, row_first, key_first + half, KEYS_FIRST, NEGATE)
        both = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [p.shape[0], p.shape[1]])
        return gl.convert_layout(both, p.type.layout, assert_trivial=True)
    else:
        upright = gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))[:, None]
        across = gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
        if KEYS_FIRST:
            rows = across
            keys = upright
        else:
            rows = upright
            keys = across
        numbers = dropout_numbers(dropout.key, row_first, rows, key_first, keys)
        threshold = gl.full(p.shape, dropout.threshold, gl.int32, p.type.layout)
        if NEGATE:
            return negate_below(p, numbers, threshold)
        else:
            return zero_below(p, numbers, threshold)


@jit
def zero_below(p, numbers, threshold):
    """Returns p, or 0 where its number is below the threshold. Without inline PTX, LLVM selects after the conversion
    to 16 bits, at three instructions a pair instead of two."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ge.s32 q, $2, $3; selp.b32 $0, $1, 0, q; }", "=r,r,r,r", [p, numbers, threshold],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@jit
def negate_below(p, numbers, threshold):
    """Returns p, or its negative where its number is below the threshold."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; .reg .f32 t; neg.f32 t, $1; setp.ge.s32 q, $2, $3; selp.b32 $0, $1, t, q; }",
        "=r,r,r,r", [p, numbers, threshold], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
