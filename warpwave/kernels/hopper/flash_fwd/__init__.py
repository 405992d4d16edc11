"""`hopper/flash_fwd`: the warp-specialized forward for Hopper, in Gluon."""

from warpwave.kernels.hopper.flash_fwd.kernel import (Config as Config, NAME as NAME, NEEDS_GPU as NEEDS_GPU, bind as bind, configs as configs, cost as cost, outrun as outrun, smem_bytes as smem_bytes, specify as specify, why_not as why_not)
