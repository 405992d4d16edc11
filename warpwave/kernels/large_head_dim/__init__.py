"""`large_head_dim`: one pass with head_dim in pieces, for head_dim above 256 and latent caches."""

from warpwave.kernels.large_head_dim.host import (Config as Config, NAME as NAME, NEEDS_GPU as NEEDS_GPU, bind as bind, configs as configs, cost as cost, outrun as outrun, smem_bytes as smem_bytes, specify as specify, why_not as why_not)
