"""Device code that measures a device: reading, exponentials, and nothing at all.

Each has one bound and no other: `read_kernel` the memory or the cache that its data lies in, `exponentials_kernel` the
special function units (one addition an exponential, which other units do), `empty_kernel` the launch. They compute no
attention; `hardware.measure` times them.
"""

from __future__ import annotations

from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=["passes"])
def read_kernel(x_ptr, out_ptr, n, passes, BLOCK: tl.constexpr):
    """Sums all of x, `passes` times over; n is a multiple of BLOCK.

    In every pass a program reads what another one read in the pass before, and past L1 (.cg), so nothing but L2 or
    memory can serve it.
    """
    programs = tl.num_programs(0)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(passes):
        place = (tl.program_id(0) + i * 61) % programs
        for start in range(place * BLOCK, n, programs * BLOCK):
            acc += tl.load(x_ptr + start + tl.arange(0, BLOCK), cache_modifier=".cg")  # [BLOCK]
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


@jit(do_not_specialize=["count"])
def exponentials_kernel(out_ptr, count, BLOCK: tl.constexpr):
    """`count` exponentials of each element, one after the other; elements are independent of each other."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = offsets.to(tl.float32) * 1e-6  # [BLOCK]
    for _ in range(count):
        x = tl.math.exp2(-x)  # stays between 1/2 and 1
    tl.store(out_ptr + offsets, x)


@jit
def empty_kernel(ptr):
    """Nothing."""
