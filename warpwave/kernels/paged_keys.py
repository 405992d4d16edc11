"""Device code for keys in pages of a pool: finds a sequence's row of the page table, and the pages of a tile's keys. An
invalid length, row or page id is clamped: the wrong data is read, but inside the tensor. Kwon et al., "Efficient memory
management for large language model serving with PagedAttention" (2023).
"""

from __future__ import annotations

from warpwave.kernels.groups import DescalesOfPool, Pages
from warpwave.runtime.triton_or_stub import jit, tl


@jit
def cached_sequence(pages: Pages, batch, seqlen_k):
    """Returns a sequence's row of the page table, and its number of keys, at most `seqlen_k`."""
    row = batch
    if pages.HAS_ROWS:
        row = tl.minimum(tl.maximum(tl.load(pages.rows_ptr + batch), 0), pages.num_rows - 1).to(tl.int64)
    # Clamped, so that a length beyond the table reads no page id past its end.
    used = tl.minimum(tl.maximum(tl.load(pages.seqused_k_ptr + row), 0), seqlen_k)
    return pages.table_ptr + row * pages.stride_table, used


@jit
def page_ids(page_table_ptr, key_tile, keys, inside, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the page ids of a tile's keys from the table, [BLOCK_N], or the id of the one page that holds them
    all."""
    if PAGE_SIZE % BLOCK_N == 0:
        ids = tl.load(page_table_ptr + key_tile // PAGE_SIZE)
    else:
        ids = tl.load(page_table_ptr + keys // PAGE_SIZE, mask=inside, other=0)
    return ids


@jit
def pages_named(ids, num_pages):
    """Returns the pages for ids, clamped to valid ones, as 64-bit numbers."""
    return tl.minimum(tl.maximum(ids, 0), num_pages - 1).to(tl.int64)


@jit
def pages_of(page_table_ptr, key_tile, keys, inside, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the pages that hold a tile's keys, [BLOCK_N], or the one page that holds them all."""
    return pages_named(page_ids(page_table_ptr, key_tile, keys, inside, PAGE_SIZE, BLOCK_N), num_pages)


@jit
def factors_of_cells(pool: DescalesOfPool, page, cells, head):
    """Returns pointers to the factors of cells of a page, of one head."""
    return pool.ptr + (page * pool.stride_p + cells * pool.stride_t + head * pool.stride_h)
