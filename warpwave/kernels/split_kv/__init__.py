"""`split_kv`: keys split over thread blocks, for decode, paged caches and prompts of few rows.

Bound: memory at decode, latency if the cache is short (host.py).
"""

from warpwave.kernels.split_kv.choice import configs, default
from warpwave.kernels.split_kv.claims import outrun, why_not
from warpwave.kernels.split_kv.config import Config, smem_bytes
from warpwave.kernels.split_kv.costs import cost, notes
from warpwave.kernels.split_kv.host import (
    NAME,
    NEEDS_GPU,
    QUANTIZED_CACHE,
    SHARES_TILES,
    Binder,
    bind,
    bind_with_prefix,
    specify,
)
