"""`hopper/large_head_dim`: one pass over wide heads by two consumer warpgroups, in Gluon."""

from warpwave.kernels.hopper.large_head_dim.kernel import (Config as Config, NAME as NAME, NEEDS_GPU as NEEDS_GPU, bind as bind, configs as configs, cost as cost, outrun as outrun, smem_bytes as smem_bytes, specify as specify, why_not as why_not)
