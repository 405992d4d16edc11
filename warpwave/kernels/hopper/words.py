"""Boolean masks as words of bits (prepass/mask_bits.py), in the thread order of wgmma's accumulators."""

from warpwave.kernels.hopper.parts import ROWS, zero_accumulator
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit

TILE_KEYS = gl.constexpr(128)  # columns covered by four words of a row


@jit
def beside_an_accumulator(x):
    """Reshapes [64, BLOCK_N] to [64, BLOCK_N / 8, 4, 2]: in each group of 8 columns, four threads hold two columns
    each."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@jit
def lines_of_rows(words_ptr, stride_row, row_first, rows_end, WIDTH: gl.constexpr):
    """Returns the addresses of the first words of 64 rows from row_first on, for an accumulator of WIDTH columns. Rows
    from rows_end on have the last one's."""
    layout: gl.constexpr = beside_an_accumulator(zero_accumulator(WIDTH)).type.layout
    of_words: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    rows = gl.minimum(row_first + gl.arange(0, ROWS, gl.SliceLayout(1, of_words)), rows_end - 1)
    begins = rows.to(gl.int64) * stride_row
    return words_ptr + begins[:, None] + gl.arange(0, 4, gl.SliceLayout(0, of_words))[None, :]


@jit
def load_words(lines, stride_tile, column_first, WIDTH: gl.constexpr):
    """Returns the words of WIDTH columns from column_first on, a multiple of WIDTH."""
    words = gl.load(lines + (column_first // TILE_KEYS).to(gl.int64) * stride_tile)
    if WIDTH < TILE_KEYS:
        words = words >> (column_first % TILE_KEYS // 4)
    return words


@jit
def hide_words(scores, words, BLOCK_N: gl.constexpr):
    """Returns scores, minus infinity where the bit of words [64, 4] is 0."""
    apart = hide(beside_an_accumulator(scores), words[:, None, :][:, :, :, None])
    return gl.convert_layout(gl.reshape(apart, [ROWS, BLOCK_N]), scores.type.layout, assert_trivial=True)


@constexpr_function
def _hide_asm(n):
    # A thread holds two rows, alternating every two columns: element i is in row i / 2 % 2, at bit 2 (i / 4) + i % 2.
    shown = (1 << (n // 2)) - 1
    selects = " ".join(
        f"and.b32 t, ${2 * n + (i & 2)}, {1 << ((i >> 2) * 2 + (i & 1))}; setp.ne.u32 q, t, 0; "
        f"selp.b32 ${i}, ${i}, 0fFF800000, q;"
        for i in range(n)
    )
    return (
        f"{{ .reg .pred p, q; .reg .b32 t; and.b32 t, ${2 * n}, ${2 * n + 2}; and.b32 t, t, {shown}; "
        f"setp.ne.u32 p, t, {shown}; vote.sync.any.pred p, p, 0xffffffff; @!p bra SHOWN; {selects} SHOWN: }}"
    )


@constexpr_function
def _hide_constraints(n):
    return ",".join(["=r"] * n + [str(i) for i in range(n)] + ["r"] * n)


@jit
def hide(x, words):
    """Sets x [64, BLOCK_N / 8, 4, 2] to minus infinity where the bit of words [64, 1, 4, 1] is 0. A warp skips a tile
    that all of its rows see."""
    each: gl.constexpr = x.shape[1] * 4
    return gl.inline_asm_elementwise(
        _hide_asm(each), _hide_constraints(each), [x, words], dtype=gl.float32, is_pure=False, pack=each
    )
