"""`hopper/flash_fwd_fp8`: the warp-specialized forward for Hopper with 8-bit products, in Gluon.

Bound: no single unit (kernel.py).
"""

from warpwave.kernels.hopper.flash_fwd_fp8.claims import cost, outrun, why_not
from warpwave.kernels.hopper.flash_fwd_fp8.config import Config, configs, default, notes, smem_bytes
from warpwave.kernels.hopper.flash_fwd_fp8.kernel import NAME, NEEDS_GPU, QUANTIZED, bind, specify

__all__ = [
    "NAME",
    "NEEDS_GPU",
    "QUANTIZED",
    "Config",
    "bind",
    "configs",
    "cost",
    "default",
    "notes",
    "outrun",
    "smem_bytes",
    "specify",
    "why_not",
]
