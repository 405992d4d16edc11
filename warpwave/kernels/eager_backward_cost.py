"""The bytes that `eager`'s gradients move and the operations that they compute, for `explain`; eager.py runs them."""

from __future__ import annotations

from dataclasses import replace

from warpwave.gpu import Gpu
from warpwave.kernels import eager
from warpwave.kernels.cost import Cost, in_turn
from warpwave.kernels.eager import Config, configs
from warpwave.kernels.eager_cost import PASSES_OF_EDGE, tiles_of_sequence
from warpwave.operands import DIFFERENTIABLE
from warpwave.problem import DTYPE_BYTES, AttentionProblem

NAME = "eager backward"
NEEDS_GPU = False
GRADIENTS = DIFFERENTIABLE
why_not = eager.why_not
PRODUCTS_OF_TILE = 5
# Scale, subtract the log-sum-exp, exponential; delta from dP, times P, compare and select.
PASSES_OF_TILE = 7
STEPS_OF_TILE = 5  # dQ and dK scaled; dQ, dK and dV added
STEPS_OF_BLOCK = 8  # delta: compare, select, two casts, multiply, sum; the log-sum-exp: compare and select


def arithmetic_of(problem: AttentionProblem, gpu: Gpu) -> str:
    """Returns the arithmetic of float32 products, which are torch's."""
    return "ieee"


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config that gradients run with."""
    return configs(problem, gpu)[0]


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of the operations, each one launch: products, passes over all scores of a tile, and additional
    launches per tile and per block of rows."""
    scores = keys = tiles = blocks = cut = cut_tiles = rows = 0
    for (seqlen_q, seqlen_k), times in problem.counted_items().items():
        band = problem.band(seqlen_q, seqlen_k)
        each = times if problem.packed else 1  # a dense call processes its sequences together
        found = tiles_of_sequence(band, seqlen_q, seqlen_k, config.block_m, config.block_n)
        blocks, tiles, cut_tiles = (
            blocks + each * found.blocks,
            tiles + each * found.tiles,
            cut_tiles + each * found.cut,
        )
        scores += times * problem.num_heads_q * found.scores
        cut += times * problem.num_heads_q * found.cut_scores
        rows += times * problem.num_heads_q * found.rows
        keys += times * problem.num_heads_kv * found.keys
    size, width, group = DTYPE_BYTES[problem.dtype], problem.head_dim + problem.head_dim_v, 1
    if problem.num_heads_kv:
        group = problem.num_heads_q // problem.num_heads_kv
    narrow = size < 4
    # A product needs one batch stride: heads of several sequences, and rows of a group, are copied.
    copies = 6 if (problem.batch > 1 and not problem.packed) or group > 1 else 0
    operands = size * (3 * rows + 2 * keys) * width
    products = Cost(
        blocks=0,
        flops=2 * scores * (3 * problem.head_dim + 2 * problem.head_dim_v),
        exponentials=0,
        read_bytes=operands * (2 if copies else 1) + 3 * size * scores,
        write_bytes=8 * scores + 4 * (rows * problem.head_dim + keys * width) + (operands if copies else 0),
        scratch_bytes=(8 + 3 * size) * scores,
        launches=(PRODUCTS_OF_TILE + copies) * tiles,
    )
    # Bytes of a score: 4 for each operand and result, 1 for what a comparison finds; 16 bits of P, and of dS twice.
    passes = Cost(
        blocks=0,
        flops=0,
        exponentials=scores,
        read_bytes=(45 if narrow else 33) * scores + 14 * cut,
        write_bytes=(31 if narrow else 25) * scores + 9 * cut,
        launches=(PASSES_OF_TILE + 3 * narrow) * tiles
        + (PASSES_OF_EDGE + 2 * (problem.window_size[0] >= 0)) * cut_tiles,
    )
    passes = replace(passes, scratch_bytes=passes.read_bytes + passes.write_bytes)
    sums = rows * problem.head_dim + keys * width
    beside = Cost(
        blocks=0,
        flops=0,
        exponentials=0,
        read_bytes=12 * sums,
        write_bytes=8 * sums,
        launches=STEPS_OF_TILE * tiles + STEPS_OF_BLOCK * blocks,
    )
    workspace = 5 * 4 * min(scores, problem.batch * problem.num_heads_q * config.block_m * config.block_n)
    return in_turn((products, passes, beside), workspace, "float32" if problem.dtype == "float32" else "")
