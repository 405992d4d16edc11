"""`hopper/flash_bwd`: warp-specialized gradients for Hopper, in Gluon."""

from warpwave.kernels.hopper.flash_bwd.config import (
    ABLE,
    Config,
    config_of_bias,
    configs,
    default,
    notes,
    outrun,
    smem_bytes,
    why_not,
)
from warpwave.kernels.hopper.flash_bwd.costs import cost, cost_of_bias
from warpwave.kernels.hopper.flash_bwd.kernel import GRADIENTS, NAME, NEEDS_GPU, bind, specify
