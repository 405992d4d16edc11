"""`hopper/flash_bwd`: warp-specialized gradients for Hopper, in Gluon."""

from warpwave.kernels.hopper.flash_bwd.config import ABLE, config_of_bias, notes
from warpwave.kernels.hopper.flash_bwd.kernel import (
    GRADIENTS,
    NAME,
    NEEDS_GPU,
    Config,
    bind,
    configs,
    cost,
    cost_of_bias,
    default,
    smem_bytes,
    specify,
    why_not,
)

__all__ = [
    "ABLE",
    "GRADIENTS",
    "NAME",
    "NEEDS_GPU",
    "Config",
    "bind",
    "config_of_bias",
    "configs",
    "cost",
    "cost_of_bias",
    "default",
    "notes",
    "smem_bytes",
    "specify",
    "why_not",
]
