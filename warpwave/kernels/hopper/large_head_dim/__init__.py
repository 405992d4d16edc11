"""`hopper/large_head_dim`: one pass over wide heads by two consumer warpgroups, in Gluon.

Bound: K and V from L2, then shared memory (kernel.py).
"""

from warpwave.kernels.hopper.large_head_dim.kernel import (
    MEANT_FROM,
    NAME,
    NEEDS_GPU,
    Config,
    bind,
    configs,
    cost,
    outrun,
    smem_bytes,
    specify,
    why_not,
)

__all__ = [
    "MEANT_FROM",
    "NAME",
    "NEEDS_GPU",
    "Config",
    "bind",
    "configs",
    "cost",
    "outrun",
    "smem_bytes",
    "specify",
    "why_not",
]
