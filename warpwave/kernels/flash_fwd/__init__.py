"""`flash_fwd`: the portable one-pass forward, head_dim up to 256."""

from warpwave.kernels.flash_fwd.kernel import (Config as Config, NAME as NAME, NEEDS_GPU as NEEDS_GPU, bind as bind, configs as configs, cost as cost, smem_bytes as smem_bytes, specify as specify, why_not as why_not)
