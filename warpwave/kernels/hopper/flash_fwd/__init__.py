"""`hopper/flash_fwd`: the warp-specialized forward for Hopper, in Gluon.

Bound: tensor cores from head_dim 128 on, exponentials and instruction issue at 64 (kernel.py).
"""

from warpwave.kernels.hopper.flash_fwd.choice import configs, default, notes
from warpwave.kernels.hopper.flash_fwd.claims import cost, outrun, why_not
from warpwave.kernels.hopper.flash_fwd.config import ABLE, Config, smem_bytes
from warpwave.kernels.hopper.flash_fwd.host import (
    NEEDS_GPU,
    QUANTIZED,
    QUANTIZED_CACHE,
    SKIPS_HIDDEN_TILES,
    WIDENS_VALUES,
    Binder,
    bind,
    refuses,
)
from warpwave.kernels.hopper.flash_fwd.launches import NAME, specify
