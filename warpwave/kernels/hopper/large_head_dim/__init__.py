"""`hopper/large_head_dim`: one pass over wide heads by two consumer warpgroups, in Gluon.

Bound: K and V from L2, then shared memory (kernel.py).
"""

from warpwave.kernels.hopper.large_head_dim.config import Config, configs, default, notes, smem_bytes
from warpwave.kernels.hopper.large_head_dim.kernel import NAME, NEEDS_GPU, bind, cost, outrun, specify, why_not
from warpwave.kernels.reasons import MEANT_FROM
