"""Steps that both of Hopper's backward kernels are built from: probabilities, rings of queries, stores of dK and dV."""

from warpwave.kernels.hopper.flash_bwd.band import visible
from warpwave.kernels.hopper.parts import LOG2_E, exp2, matrix, tanh
from warpwave.kernels.hopper.rows import zero_rows
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_load,
)


@aggregate
class Stream:
    """A ring of row tiles, Q or dO, each with one float32 statistic a row: the log-sum-exp or delta.

    Tile n, counted over the whole launch, lies in stage `n % stages`; see parts.Ring.
    """

    tiles: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @constexpr_function
    def __init__(self, tiles, statistics, full, empty, stages):
        self.tiles = tiles
        self.statistics = statistics
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)


@jit
def stream_init(stream, CONSUMERS: gl.constexpr):
    """Prepares the barriers; `CONSUMERS` groups hand each tile back."""
    for i in gl.static_range(stream.stages):
        mbarrier.init(stream.full.index(i), count=1)
        mbarrier.init(stream.empty.index(i), count=CONSUMERS)


@jit
def load_rows(stream, row_map, statistic_map, n, place, statistic_place):
    """Loads tile n by TMA, with its statistics, as soon as its stage is free. Rows outside the tensor come as zeros."""
    stage = n % stream.stages
    full = stream.full.index(stage)
    mbarrier.wait(stream.empty.index(stage), ((n // stream.stages) & 1) ^ 1)
    mbarrier.expect(full, row_map.block_type.nbytes + statistic_map.block_type.nbytes)
    tma_load(row_map, place, full, stream.tiles.index(stage))
    tma_load(statistic_map, statistic_place, full, stream.statistics.index(stage))


@jit
def wait_rows(stream, n, rows_used, BLOCK_M: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Waits for tile n. Zeroes its rows from `rows_used` on, which belong to the next packed sequence."""
    stage = n % stream.stages
    mbarrier.wait(stream.full.index(stage), (n // stream.stages) & 1)
    if IS_VARLEN:
        if rows_used < BLOCK_M:
            zero_tail(matrix(stream.tiles.index(stage)), rows_used, BLOCK_M)


@jit
def zero_tail(x, rows_used, ROWS: gl.constexpr):
    """Zeroes the rows of x, in shared memory, from `rows_used` on, for wgmma to read."""
    for first in gl.static_range(0, ROWS, 16):  # few rows at a time, for the sake of registers
        if first + 16 > rows_used:
            zero_rows(x.slice(first, 16, dim=0), rows_used - first)
    fence_async_shared()


@jit
def rows_of(stream, n):
    """Returns tile n as a matrix."""
    return matrix(stream.tiles.index(n % stream.stages))


@jit
def statistics_of(stream, n, FIRST: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Returns the statistics of ROWS rows of tile n, from row FIRST on."""
    line = stream.statistics.index(n % stream.stages)
    return line.reshape([line.shape[-1]]).slice(FIRST, ROWS, dim=0).load(layout)


@jit
def probabilities(
    x, lse_log2, band, row_first, key_first, slope_log2, KEYS_FIRST: gl.constexpr, IS_CUT: gl.constexpr, rules
):  # fmt: skip
    """Returns P and 1 - tanh^2 of a tile of raw scores; the latter is P itself, unused, without a softcap.

    Args:
        x: scores before the scale, float32: [keys, queries] if KEYS_FIRST, else [queries, keys].
        lse_log2: of the queries, in bits, as a row or a column beside x; +inf for a query that sees nothing.
        IS_CUT: whether an edge of the band passes through the tile, or its keys end within.
    """
    cap = x
    if rules.HAS_SOFTCAP:
        t = tanh(x * rules.scale)
        cap = 1.0 - t * t
        exponent = t * rules.softcap_log2 - lse_log2
    else:
        exponent = x * rules.scale - lse_log2
    if rules.HAS_ALIBI:
        rows, keys = places(x, row_first, key_first, KEYS_FIRST)
        exponent -= slope_log2 * gl.abs(rows + band.offset - keys).to(gl.float32)
    p = exp2(exponent)
    if IS_CUT:
        rows, keys = places(x, row_first, key_first, KEYS_FIRST)
        p = gl.where(visible(band, rows, keys, rules), p, 0.0)
    return p, cap


@jit
def hidden_to_zero(ds, band, row_first, key_first, KEYS_FIRST: gl.constexpr, rules):
    """Zeroes dS of hidden pairs: their P is 0, but 0 times the NaN of a hidden value is NaN."""
    rows, keys = places(ds, row_first, key_first, KEYS_FIRST)
    return gl.where(visible(band, rows, keys, rules), ds, 0.0)


@jit
def places(x, row_first, key_first, KEYS_FIRST: gl.constexpr):
    """Returns the query and the key of each score of a tile, to be broadcast against each other."""
    upright = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    across = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    if KEYS_FIRST:
        return row_first + across, key_first + upright
    else:
        return row_first + upright, key_first + across


@jit
def slope_of(slopes_ptr, stride_alibi_b, work, head, rules):
    """Returns a head's ALiBi slope in bits, 0 without ALiBi."""
    slope = gl.to_tensor(0.0)
    if rules.HAS_ALIBI:
        slope = gl.load(slopes_ptr + work.batch.to(gl.int64) * stride_alibi_b + head) * LOG2_E
    return slope


@jit
def store_rows(x, ptr, stride_b, stride_h, stride_m, batch, head, row, row_end, WIDTH: gl.constexpr):
    """Stores rows of x, [64, padded width], as rows `row` to `row_end` of a head; the last stride is 1."""
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    ptr += batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    inside = (rows < row_end)[:, None] & (columns < WIDTH)[None, :]
    offsets = rows.to(gl.int64)[:, None] * stride_m + columns[None, :]
    gl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=inside)
