"""`three_kernel`: scores, softmax and values as separate kernels, for very large heads; and gradients.

Bound: tensor cores; below head_dim 1024 the traffic of the scores.
"""

from warpwave.kernels.reasons import MEANT_FROM
from warpwave.kernels.three_kernel.choice import configs, default
from warpwave.kernels.three_kernel.config import smem_bytes
from warpwave.kernels.three_kernel.host import NAME, NEEDS_GPU, bind, cost, notes, outrun, specify, why_not
from warpwave.kernels.three_kernel.plan import Config
