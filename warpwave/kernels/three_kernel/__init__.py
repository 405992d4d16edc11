"""`three_kernel`: scores, softmax and values as separate kernels, for very large heads; and gradients."""

from warpwave.kernels.three_kernel.host import (Config as Config, NAME as NAME, NEEDS_GPU as NEEDS_GPU, bind as bind, configs as configs, cost as cost, default as default, gradients as gradients, gradients_why_not as gradients_why_not, notes as notes, outrun as outrun, smem_bytes as smem_bytes, specify as specify, why_not as why_not)
