"""The launch before float32 gradients: Q, K, V and dO in scaled float16 parts, and the statistics of rows.

The parts of an operand are those of the forward (prepass/scale_ahead.py). K and V of each head of each sequence have
one scale, and Q and dO one for every 64 rows. The main launches walk tiles of 64 rows whose products have accumulators
of their own (split_steps.py), so a tile's scale is undone where its product is added.

Parts lie in whole tiles, as statistics do (rows.py): tile t of a sequence begins at its first query that sees a key, or
its first key that is seen, plus 64 t. Rows behind the last one, queries that see nothing, and keys that a mask hides
from all queries are zeros. A tile thus never holds another sequence's rows, or a NaN that must have no effect.

delta is in units of the tile of dO and of V: the main launches subtract it from a product of parts. `sums` is what dS
of a row adds up to, in the same units: what arrives at the log-sum-exp. `centers` is the mean of the shown keys of
the first tile of K of each head that has one (split_dq.py).

Bound: memory.
"""

from __future__ import annotations

from warpwave.kernels.groups import InUnits, OfHeads, Sequences, Window
from warpwave.kernels.hopper.flash_bwd.rows import place_of
from warpwave.kernels.prepass.in_use import item_of_slot, rows_in_use
from warpwave.kernels.prepass.scale_ahead import (
    MOST_SCALED,
    KeysSeen,
    exponent_for,
    half_part,
    keys_shown,
    largest_of,
    load_keys,
    load_rows,
    power_of_two,
)
from warpwave.kernels.primitives import LOG2_E
from warpwave.runtime.triton_or_stub import jit, tl

ROWS = tl.constexpr(64)  # of a tile
PARTS = tl.constexpr(2)  # of an operand
# The largest exponent of dO's scale: float32 holds its inverse, also times the factor of probabilities, 2^15.
MOST_SCALED_DOUT = tl.constexpr(111)
# What arrives at the log-sum-exp is added to delta. In its units it must stay far below float32's largest number.
LARGEST_DLSE = tl.constexpr(90)
# Numbers of a tile of queries for the main launches (`units`): the factors that undo the scales of its scores, and of
# dO's products with probabilities; and exponents of the scales of dS Q, of dS K and of dS.
UNITS = tl.constexpr(5)
OF_SCORES, OF_VALUES, OF_DK, OF_DQ, OF_DS = map(tl.constexpr, range(5))
UNSPECIALIZED = ["batch", "num_heads_q", "num_heads_kv", "tiles_q", "tiles_k", "tiles_of_maxima"]


@jit
def _exponent_of_head(
    maxima_ptr, item, head, begin, low_row, high_row, heads, tiles, IS_VARLEN: tl.constexpr
):  # fmt: skip
    """Returns the exponent of the scale of one head of K or V, from the maxima of its tiles
    (`scale_ahead.maxima_kernel`). `tiles`: of one head, without packed sequences."""
    if IS_VARLEN:
        maxima_ptr += (begin // ROWS + item) * heads + head
        step = heads
    else:
        maxima_ptr += (item * heads + head) * tiles
        step = 1
    largest = tl.full((), 0.0, tl.float32)
    first, last = low_row // ROWS, (high_row - 1) // ROWS
    for i in range(first, last + 1, 128):
        lanes = i + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.max(tl.load(maxima_ptr + lanes * step, mask=lanes <= last, other=0.0), 0))
    return exponent_for(largest, MOST_SCALED)


@jit
def _store_parts(
    x, parts_ptr, batch_head, tile, tiles, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Stores a scaled tile as parts: (batch * heads, PARTS, tiles * ROWS, WIDTH)."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    for i in tl.static_range(PARTS):
        part, x = half_part(x, IS_NVIDIA)
        row = (batch_head.to(tl.int64) * PARTS + i) * (tiles * ROWS) + rows
        tl.store(parts_ptr + row[:, None] * WIDTH + dims[None, :], part, mask=(dims < WIDTH)[None, :])


@jit
def _count_shown(seen: KeysSeen, item, head, first, low_row, high_row):
    """Returns how many of 64 keys from `first` on are in use and, if there is a mask, seen by some query."""
    rows = first + tl.arange(0, ROWS)
    return tl.sum(keys_shown(seen, item, head, rows, (rows >= low_row) & (rows < high_row)).to(tl.int32), 0)


@jit
def _split_keys(
    pid, tensor: InUnits, seen: KeysSeen, parts_ptr, centers_ptr, maxima_ptr, sequences: Sequences, window: Window,
    heads, tiles, batch, UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr, IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Writes one tile of K or of V in parts, and the mean of the shown keys of the first tile of a head with any.
    `tiles`: of one head, of all packed sequences together."""
    slot, batch_head = pid % tiles, pid // tiles
    item, head, tile = batch_head // heads, batch_head % heads, slot
    if sequences.IS_VARLEN:
        item, first_slot = item_of_slot(slot, sequences.cu_seqlens_k_ptr, sequences.total_k, batch, ROWS)
        tile = slot - first_slot
    begin, low_row, high_row = rows_in_use(item, sequences, window, True)
    first = low_row // ALIGN * ALIGN + tile * ROWS
    # The list of a mask has whole tiles of ALIGN keys.
    if (tile >= 0) & (first < tl.cdiv(high_row, ALIGN) * ALIGN):
        x = load_keys(tensor, seen, item, head, begin, first, low_row, high_row, UNIT, HEAD_DIM, ROWS, BLOCK_D)
        exponent = _exponent_of_head(
            maxima_ptr, item, head, begin, low_row, high_row, heads, tiles, sequences.IS_VARLEN
        )
        x *= power_of_two(exponent)
        _store_parts(x, parts_ptr, batch_head, slot, tiles, WIDTH, BLOCK_D, IS_NVIDIA)
        if centers_ptr is not None:  # noqa: SIM102 (known when compiled, and the other is not)
            if tile == 0:
                count = _count_shown(seen, item, head, first, low_row, high_row)
                if seen.ptr is not None:  # padding at the left fills whole tiles
                    while (count == 0) & (first + ROWS < high_row):
                        first += ROWS
                        count = _count_shown(seen, item, head, first, low_row, high_row)
                    x = load_keys(
                        tensor, seen, item, head, begin, first, low_row, high_row, UNIT, HEAD_DIM, ROWS, BLOCK_D
                    ) * power_of_two(exponent)
                count = tl.maximum(count, 1)
                center = tl.sum(tl.where(tl.abs(x) < float("inf"), x, 0.0), 0) / count * power_of_two(-exponent)
                dims = tl.arange(0, BLOCK_D)
                tl.store(centers_ptr + (item * heads + head).to(tl.int64) * WIDTH + dims, center, mask=dims < WIDTH)


@jit(do_not_specialize=UNSPECIALIZED)
def split_rows_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    dout_tensor: InUnits,
    out_tensor: InUnits,
    lse_tensor: OfHeads,
    dlse_ptr,
    sequences: Sequences,
    window: Window,
    seen: KeysSeen,
    maxima_ptr,
    q_parts_ptr,
    k_parts_ptr,
    v_parts_ptr,
    dout_parts_ptr,
    lse_log2_ptr,
    delta_ptr,
    sums_ptr,
    units_ptr,
    centers_ptr,
    batch,
    num_heads_q,
    num_heads_kv,
    tiles_q,
    tiles_k,
    tiles_of_maxima,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
):
    """Splits one tile of K, of V, or of Q and dO of one head, the latter with its statistics and units.

    Args:
        maxima_ptr: of each tile of K, then of V (`scale_ahead.maxima_kernel`), `tiles_of_maxima` of each.
        units_ptr: (batch * num_heads_q, tiles_q, UNITS) float32.
        centers_ptr: (batch * num_heads_kv, WIDTH) float32, of each packed sequence.
        tiles_q, tiles_k: of one head, of all packed sequences together.
    """
    heads_of_keys = num_heads_kv if sequences.IS_VARLEN else batch * num_heads_kv
    of_keys = tiles_k * heads_of_keys
    pid = tl.program_id(0)
    if pid < of_keys:
        _split_keys(
            pid, k_tensor, seen, k_parts_ptr, centers_ptr, maxima_ptr, sequences, window, num_heads_kv, tiles_k, batch,
            UNIT, HEAD_DIM, WIDTH, BLOCK_D, ALIGN, IS_NVIDIA,
        )  # fmt: skip
    elif pid < 2 * of_keys:
        _split_keys(
            pid - of_keys, v_tensor, seen, v_parts_ptr, None, maxima_ptr + tiles_of_maxima, sequences, window,
            num_heads_kv, tiles_k, batch, UNIT, HEAD_DIM_V, WIDTH_V, BLOCK_DV, ALIGN, IS_NVIDIA,
        )  # fmt: skip
    else:
        pid -= 2 * of_keys
        place, batch_head = pid % tiles_q, pid // tiles_q
        head = batch_head % num_heads_q
        begin, _, q_begin, q_end, tile, item, _ = place_of(place, sequences, batch, window, ROWS, ALIGN)
        line = head.to(tl.int64) * lse_tensor.stride_h
        if not sequences.IS_VARLEN:
            item = batch_head // num_heads_q
            line += item.to(tl.int64) * lse_tensor.stride_b
        first = q_begin + tile * ROWS
        lanes = first + tl.arange(0, ROWS)
        inside = (lanes < q_end) & (tile >= 0)
        rows = (begin + lanes).to(tl.int64)
        lse = tl.load(lse_tensor.ptr + line + rows, mask=inside, other=float("-inf"))
        sees = lse != float("-inf")
        high_row = tl.where(tile >= 0, q_end, 0)

        k_begin, low_key, high_key = rows_in_use(item, sequences, window, True)
        kv_head = head // (num_heads_q // num_heads_kv)
        k_exponent = _exponent_of_head(
            maxima_ptr, item, kv_head, k_begin, low_key, high_key, num_heads_kv, tiles_k, sequences.IS_VARLEN
        )
        v_exponent = _exponent_of_head(
            maxima_ptr + tiles_of_maxima, item, kv_head, k_begin, low_key, high_key, num_heads_kv, tiles_k,
            sequences.IS_VARLEN,
        )  # fmt: skip

        q = load_rows(q_tensor, item, head, begin, first, 0, high_row, UNIT, HEAD_DIM, ROWS, BLOCK_D)
        q = tl.where(sees[:, None], q, 0.0)
        q_exponent = exponent_for(largest_of(q), MOST_SCALED)
        _store_parts(q * power_of_two(q_exponent), q_parts_ptr, batch_head, place, tiles_q, WIDTH, BLOCK_D, IS_NVIDIA)

        dout = load_rows(dout_tensor, item, head, begin, first, 0, high_row, UNIT, HEAD_DIM_V, ROWS, BLOCK_DV)
        dout = tl.where(sees[:, None], dout, 0.0)
        exponent = exponent_for(largest_of(dout), MOST_SCALED_DOUT)
        sums = tl.zeros([ROWS], tl.float32)
        if dlse_ptr is not None:
            dlse = tl.where(sees, tl.load(dlse_ptr + line + rows, mask=inside, other=0.0), 0.0)
            magnitudes = tl.abs(dlse)
            largest = tl.max(tl.where(magnitudes < float("inf"), magnitudes, 0.0), 0)
            bits = (largest.to(tl.int32, bitcast=True) >> 23) - 127
            most = LARGEST_DLSE - bits - v_exponent
            exponent = tl.maximum(tl.minimum(exponent, most), -126)
        dout *= power_of_two(exponent)
        _store_parts(dout, dout_parts_ptr, batch_head, place, tiles_q, WIDTH_V, BLOCK_DV, IS_NVIDIA)

        out = load_rows(out_tensor, item, head, begin, first, 0, high_row, UNIT, HEAD_DIM_V, ROWS, BLOCK_DV)
        # Scaled before they are multiplied: |out| is at most the largest |V|, so nothing overflows.
        delta = tl.sum(dout * (out * power_of_two(v_exponent)), 1)
        if dlse_ptr is not None:
            # By halves, because either exponent alone may overflow where their sum does not.
            unit = exponent + v_exponent
            sums = dlse * power_of_two(unit >> 1) * power_of_two(unit - (unit >> 1))
        at = (batch_head.to(tl.int64) * tiles_q + place) * ROWS + tl.arange(0, ROWS)
        tl.store(lse_log2_ptr + at, tl.where(sees, lse * LOG2_E, float("inf")))
        tl.store(delta_ptr + at, tl.where(sees, delta - sums, 0.0))
        tl.store(sums_ptr + at, sums)

        # Where scores exceed float32 anyway, 0 times an infinite factor would turn a score of 0 into NaN.
        of_scores = tl.minimum(tl.maximum(-(q_exponent + k_exponent), -126), 100)
        units_ptr += (batch_head.to(tl.int64) * tiles_q + place) * UNITS
        tl.store(units_ptr + OF_SCORES, power_of_two(of_scores))
        tl.store(units_ptr + OF_VALUES, power_of_two(-15 - exponent))
        tl.store(units_ptr + OF_DK, (-(exponent + v_exponent + q_exponent)).to(tl.float32))
        tl.store(units_ptr + OF_DQ, (-(exponent + v_exponent + k_exponent)).to(tl.float32))
        tl.store(units_ptr + OF_DS, (-(exponent + v_exponent)).to(tl.float32))
