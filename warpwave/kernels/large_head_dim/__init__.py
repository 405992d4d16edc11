"""`large_head_dim`: one pass with head_dim in pieces, for head_dim above 256 and latent caches.

Bound: L2 and shared memory (host.py).
"""

from warpwave.kernels.large_head_dim.choice import configs, notes
from warpwave.kernels.large_head_dim.claims import outrun, why_not
from warpwave.kernels.large_head_dim.config import Config, smem_bytes
from warpwave.kernels.large_head_dim.host import NAME, NEEDS_GPU, SHARES_TILES, bind, cost, specify
from warpwave.kernels.reasons import MEANT_FROM
