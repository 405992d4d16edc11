"""`flash_fwd`: the portable one-pass forward, head_dim up to 256.

Bound: tensor cores for long sequences, exponentials at head_dim 64 and below, launch latency for small grids.
"""

from warpwave.kernels.flash_fwd.config import Config, configs, default, notes, smem_bytes
from warpwave.kernels.flash_fwd.costs import cost
from warpwave.kernels.flash_fwd.kernel import NAME, NEEDS_GPU, QUANTIZED, STRIDED_OUT, bind, specify, why_not
