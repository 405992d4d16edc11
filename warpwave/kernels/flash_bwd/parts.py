"""Device code of the launch that adds the parts of gradients that several blocks share."""

from __future__ import annotations

from warpwave.kernels.primitives import rounded
from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=["num_splits", "size", "other_size"])
def flash_bwd_add_parts_kernel(
    parts_ptr, other_parts_ptr, sum_ptr, other_sum_ptr, num_splits, size, other_size, BLOCK: tl.constexpr
):
    """Stores the sums of one or two gradients over `num_splits` parts, in the order of the parts.

    Args:
        parts_ptr, other_parts_ptr: float32 (num_splits, size), contiguous; the second may be None.
        sum_ptr, other_sum_ptr: the gradients, contiguous.
    """
    blocks = tl.cdiv(tl.cast(size, tl.int64), BLOCK)  # in 32 bits, a size near 2^31 would overflow
    block = tl.program_id(0)
    if other_parts_ptr is None:
        _add(parts_ptr, sum_ptr, num_splits, size, block, BLOCK)
    else:
        if block < blocks:
            _add(parts_ptr, sum_ptr, num_splits, size, block, BLOCK)
        else:
            _add(other_parts_ptr, other_sum_ptr, num_splits, other_size, block - blocks, BLOCK)


@jit
def _add(parts_ptr, sum_ptr, num_splits, size, block, BLOCK: tl.constexpr):
    places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        total += tl.load(parts_ptr + tl.cast(split, tl.int64) * size + places, mask=inside, other=0.0)
    tl.store(sum_ptr + places, rounded(total, sum_ptr.dtype.element_ty), mask=inside)
