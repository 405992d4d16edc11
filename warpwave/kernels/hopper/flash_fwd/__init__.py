"""`hopper/flash_fwd`: the warp-specialized forward for Hopper, in Gluon."""

from warpwave.kernels.hopper.flash_fwd.config import default
from warpwave.kernels.hopper.flash_fwd.kernel import (
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
    "NAME",
    "NEEDS_GPU",
    "Config",
    "bind",
    "configs",
    "cost",
    "default",
    "outrun",
    "smem_bytes",
    "specify",
    "why_not",
]
