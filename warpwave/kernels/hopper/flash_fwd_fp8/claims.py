"""States what hopper/flash_fwd_fp8 can run, and what a launch costs. Holds no kernel."""

from __future__ import annotations

import math
from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.kernels.cost import Cost, launch_order, walk
from warpwave.kernels.hopper.flash_fwd.config import query_tiles
from warpwave.kernels.hopper.flash_fwd_fp8.config import Config, pieces, smem_bytes
from warpwave.kernels.hopper.host import NUM_SMS
from warpwave.kernels.prepass import transpose_values
from warpwave.problem import AttentionProblem

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MAX_HEAD_DIM = 256
FEWEST_QUERIES = 128  # of a sequence that share a kv head


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = reasons.of_hopper(gpu) + reasons.of_gradients(problem) + reasons.of_dropout(problem)
    for name, dtype in (("q", problem.dtype), ("v", problem.dtype_of_v)):
        if dtype not in FLOAT8:
            found.append(f"{name} is {dtype}; q, k and v must be float8")
    if problem.dtype_of_out not in ("float16", "bfloat16"):
        found.append(f"out is {problem.dtype_of_out}; it writes float16 and bfloat16")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            found.append(f"{name} is {size}; rows of K and V must fit a tile: at most {MAX_HEAD_DIM}")
        if size % 16:
            found.append(f"{name} is {size}; it must be a multiple of 16, because TMA copies multiples of 16 bytes")
    for name, shape in (("boolean mask", problem.mask_shape), ("bias", problem.bias_shape)):
        if shape is not None:
            found.append(f"it takes no {name}; flash_fwd does")
    return found


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why `flash_fwd` is faster: few queries do not amortize writing V transposed, which takes 100 / (queries
    that share a kv head) of the attention's time."""
    shared = problem.rows * problem.num_heads_q // max(1, problem.batch * problem.num_heads_kv)
    if shared >= FEWEST_QUERIES:
        return []
    # By bytes and peaks; not measured.
    return [
        f"{shared} queries share a kv head; with fewer than {FEWEST_QUERIES}, writing V transposed takes 0.8 of the "
        "attention's time or more"
    ]


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what both launches move and compute: V read and written once, then whole tiles, padding included, with K
    and V once for each query tile."""
    width, width_v = sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))
    of_tiles = walk(problem, config.block_m, config.block_n)
    scores = of_tiles.tiles * config.block_m * config.block_n
    rows = problem.rows * problem.num_heads_q
    of_values = of_tiles.tiles * config.block_n * problem.head_dim_v
    attend = Cost(
        blocks=min(query_tiles(problem, config.block_m), gpu.num_sms or NUM_SMS),
        flops=2 * scores * (width + width_v),
        exponentials=scores,
        read_bytes=rows * problem.head_dim + of_tiles.tiles * config.block_n * problem.head_dim + of_values,
        write_bytes=rows * (2 * problem.head_dim_v + (4 if problem.return_lse else 0)),
        smem_bytes=smem_bytes(problem, gpu, config),
        scratch_bytes=of_values,
        items=max(1, of_tiles.items),
        steps=of_tiles.tiles,
        longest=max(1, of_tiles.longest),
        order=launch_order(problem, config.block_m, config.block_n) if problem.packed else (),
        cut=of_tiles.cut,
        trips=5 if problem.packed else 0,  # each role loads the sequence offsets, then those of its tile
        threads=128 * (config.groups + 1),
        chains=config.groups,
        blocks_per_sm=1,
        ahead=True,
    )
    values = problem.keys_needed * problem.head_dim_v
    ahead = Cost(0, 0, 0, values, values, scratch_bytes=values)
    return replace(
        attend,
        read_bytes=attend.read_bytes + values,
        write_bytes=attend.write_bytes + values,
        workspace_bytes=math.prod(transpose_values.shape(problem)),
        scratch_bytes=of_values + values,
        launches=2,
        ahead=False,
        parts=(ahead, attend),
    )
