"""`large_head_dim`: one pass with head_dim in pieces, for head_dim above 256 and latent caches.

Bound: L2 and shared memory (host.py).
"""

from warpwave.kernels.large_head_dim.host import (
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
