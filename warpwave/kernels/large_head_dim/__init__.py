"""`large_head_dim`: one pass with head_dim in pieces, for head_dim above 256 and latent caches.

Bound: L2 and shared memory (host.py).
"""

from warpwave.kernels.large_head_dim.choice import configs, notes
from warpwave.kernels.large_head_dim.claims import MEANT_FROM, outrun, why_not
from warpwave.kernels.large_head_dim.config import Config, smem_bytes
from warpwave.kernels.large_head_dim.host import NAME, NEEDS_GPU, bind, cost, specify

__all__ = [
    "MEANT_FROM",
    "NAME",
    "NEEDS_GPU",
    "Config",
    "bind",
    "configs",
    "cost",
    "notes",
    "outrun",
    "smem_bytes",
    "specify",
    "why_not",
]
