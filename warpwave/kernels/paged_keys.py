"""Device code for keys in pages of a pool: which row of the table is a sequence's, and where the keys of a tile are.

A length, row or page id that is none is clamped: what lies there is not what was meant, but it is inside the tensor.
Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023).
"""

from __future__ import annotations

from warpwave.runtime.triton_or_stub import jit, tl


@jit
def cached_sequence(page_table_ptr, seqused_k_ptr, rows_ptr, batch, stride_table, seqlen_k, num_rows,
                    HAS_ROWS: tl.constexpr):  # fmt: skip
    """A sequence's row of the page table, and how many keys it has, `seqlen_k` at the most."""
    row = batch
    if HAS_ROWS:
        row = tl.minimum(tl.maximum(tl.load(rows_ptr + batch), 0), num_rows - 1).to(tl.int64)
    # Clamped, so that a length beyond the table's reads no page id behind it.
    used = tl.minimum(tl.maximum(tl.load(seqused_k_ptr + row), 0), seqlen_k)
    return page_table_ptr + row * stride_table, used


@jit
def page_ids(page_table_ptr, key_tile, keys, inside, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """What the table says of the pages that hold a tile's keys, [BLOCK_N], or of the one page that holds them all."""
    if PAGE_SIZE % BLOCK_N == 0:
        ids = tl.load(page_table_ptr + key_tile // PAGE_SIZE)
    else:
        ids = tl.load(page_table_ptr + keys // PAGE_SIZE, mask=inside, other=0)
    return ids


@jit
def pages_named(ids, num_pages):
    """The pages that ids name, as 64-bit numbers."""
    return tl.minimum(tl.maximum(ids, 0), num_pages - 1).to(tl.int64)


@jit
def pages_of(page_table_ptr, key_tile, keys, inside, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages that hold a tile's keys, [BLOCK_N], or the one page that holds them all."""
    return pages_named(page_ids(page_table_ptr, key_tile, keys, inside, PAGE_SIZE, BLOCK_N), num_pages)
