"""`flash_bwd`: the portable gradients of exact attention, head_dim up to 256.

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency for small grids.
"""

from warpwave.kernels.flash_bwd.choice import configs, default, notes
from warpwave.kernels.flash_bwd.config import Config, Tile, arithmetic_of, smem_bytes, walked_of
from warpwave.kernels.flash_bwd.costs import cost, cost_of_bias
from warpwave.kernels.flash_bwd.host import GRADIENTS, NAME, NEEDS_GPU, bind, outrun, why_not
from warpwave.kernels.flash_bwd.launches import specify
