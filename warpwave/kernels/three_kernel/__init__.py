"""`three_kernel`: scores, softmax and values as separate kernels, for very large heads; and gradients.

Bound: tensor cores; below head_dim 1024 the traffic of the scores.
"""

from warpwave.kernels.three_kernel.host import (
    MEANT_FROM,
    NAME,
    NEEDS_GPU,
    Config,
    bind,
    configs,
    cost,
    default,
    notes,
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
    "default",
    "notes",
    "outrun",
    "smem_bytes",
    "specify",
    "why_not",
]
