"""Device code that measures a device: a read, exponentials, and an empty kernel.

Each kernel has one bound. `read_kernel` is bound by the memory or cache that holds its data, `exponentials_kernel` by
the special function units (it needs one addition per exponential, on other units), and `empty_kernel` by the launch.
`hardware.measure` times them.
"""

from __future__ import annotations

from warpwave.runtime.triton_or_stub import jit, tl


@jit(do_not_specialize=["passes"])
def read_kernel(x_ptr, out_ptr, n, passes, BLOCK: tl.constexpr):
    """Sums all of x, `passes` times over; n is a multiple of BLOCK.

    In each pass a program reads the part of another program, and the loads bypass L1 (.cg), so every load is served by
    L2 or memory.
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
    """Computes `count` exponentials of each element, one after the other; the elements are independent."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = offsets.to(tl.float32) * 1e-6  # [BLOCK]
    for _ in range(count):
        x = tl.math.exp2(-x)  # stays between 1/2 and 1
    tl.store(out_ptr + offsets, x)


@jit
def empty_kernel(ptr):
    """Does nothing."""
