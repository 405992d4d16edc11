"""`flash_fwd`: the portable one-pass forward, head_dim up to 256.

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency for small grids.
"""

from warpwave.kernels.flash_fwd.config import default, notes
from warpwave.kernels.flash_fwd.kernel import (
    NAME,
    NEEDS_GPU,
    QUANTIZED,
    STRIDED_OUT,
    Config,
    bind,
    configs,
    cost,
    smem_bytes,
    specify,
    why_not,
)

__all__ = [
    "NAME",
    "NEEDS_GPU",
    "QUANTIZED",
    "STRIDED_OUT",
    "Config",
    "bind",
    "configs",
    "cost",
    "default",
    "notes",
    "smem_bytes",
    "specify",
    "why_not",
]
