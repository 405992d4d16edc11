"""The pages of a sequence in a pool, and copies of their keys into a tile by TMA.

Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023).
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.groups import Pages
from warpwave.kernels.hopper.parts import first_column, make_room, tile_bytes
from warpwave.runtime.gluon_or_stub import aggregate, constexpr_function, gl, jit, tma_load


@jit
def table_row_of(pages: Pages, batch):
    """Returns the row of the page table of a sequence, clamped to a valid one."""
    row = batch
    if pages.HAS_ROWS:
        row = gl.minimum(gl.maximum(gl.load(pages.rows_ptr + batch), 0), pages.num_rows - 1).to(gl.int32)
    return row


@jit
def length_of(pages: Pages, table_row, capacity):
    """Returns the number of keys of a sequence, at most `capacity`."""
    return gl.minimum(gl.maximum(gl.load(pages.seqused_k_ptr + table_row), 0), capacity).to(gl.int32)


@aggregate
class OfSequence:
    """The pages of one sequence.

    Args:
        table_ptr: its row of the page table.
        last_key: the last key that the row has a page for.
    """

    table_ptr: gl.tensor
    last_key: gl.tensor
    num_pages: gl.tensor
    PAGE_SIZE: gl.constexpr


@constexpr_function
def in_pages(source):
    """Returns whether keys are loaded from pages; `source` is an `OfSequence`, or a batch item."""
    return hasattr(source, "PAGE_SIZE")


@jit
def of_sequence(pages: Pages, batch, capacity):
    """Returns the pages of the sequence of a batch item."""
    row = pages.table_ptr + table_row_of(pages, batch).to(gl.int64) * pages.stride_table
    return OfSequence(row, capacity - 1, pages.num_pages, pages.PAGE_SIZE)


@jit
def load_tile_of_pages(ring, maps, n, of_sequence, head, key, MORE: gl.constexpr = 0):
    """Loads tile n of the ring, like `parts.load_tile`, from key `key` on, a multiple of a tile's keys. A tile has
    several pages, or is part of one. Page ids are clamped, so that ids after the sequence's end load some page."""
    COPY: gl.constexpr = maps[0].block_type.shape[2]
    COPIES: gl.constexpr = ring.pieces[0].shape[3] // COPY
    found = ()
    for j in gl.static_range(COPIES):
        place = gl.minimum(key + j * COPY, of_sequence.last_key) // of_sequence.PAGE_SIZE
        page = gl.load(of_sequence.table_ptr + place)
        found = found + (gl.minimum(gl.maximum(page, 0), of_sequence.num_pages - 1).to(gl.int32),)
    make_room(ring, n, COPIES * tile_bytes(maps) + MORE)
    stage = n % ring.stages
    row = key % of_sequence.PAGE_SIZE  # 0 if a tile has several pages
    for j in gl.static_range(COPIES):
        for i in gl.static_range(len(maps)):
            tile = ring.pieces[i].index(stage)
            if COPIES > 1:
                tile = tile.slice(j * COPY, COPY, dim=2)
            tma_load(maps[i], [found[j], head, row, first_column(maps, i)], ring.full.index(stage), tile)
