"""three_kernel's gradients (backward.py) as a gradient kernel for the calls of any forward kernel, and its costs for
`explain`. It reads neither out nor the log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost, in_turn
from warpwave.kernels.gradient_costs import keys_of
from warpwave.kernels.three_kernel.backward import WHOLE_ROW, backward, by_sight, plan_of, runs_of_heads
from warpwave.kernels.three_kernel.backward import why_not as why_not
from warpwave.kernels.three_kernel.backward_memory import gradient_bytes, peak_bytes
from warpwave.operands import AnyOperands
from warpwave.problem import DTYPE_BYTES, AttentionProblem

NAME = "three_kernel backward"
NEEDS_GPU = True
READS_RESULTS = False
GRADIENTS = ("q", "k", "v", "sinks")
PRODUCTS_OF_RUN = 5  # launches of torch's products: S, dP, dQ, dV, dK
ROUND_OF_RUN = 1  # dQ scaled and rounded


@dataclass(frozen=True)
class Config:
    """Empty: the chunks follow from the problem."""


def bind(
    problem: AttentionProblem, gpu: Gpu, operands: AnyOperands, wanted: Sequence[bool], config: Config
) -> Callable[..., tuple[Any, ...]]:
    """Returns `run(operands, results, dout, dlse)`: `backward` of a problem; `results` are not read."""
    return lambda operands, results, dout, dlse: backward(problem, operands, dout, dlse, wanted)


def arithmetic_of(problem: AttentionProblem, gpu: Gpu) -> str:
    """Returns the arithmetic of float32 products, which are torch's."""
    return "ieee"


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the only config."""
    return Config()


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the only config."""
    return [Config()]


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute over all chunks: torch's products of everything between a chunk's
    first and last visible key, and P and dS from S and dP between them."""
    cut, size = plan_of(problem), DTYPE_BYTES[problem.dtype]
    chunks = [part for whole in cut.chunks for part in by_sight(problem, whole) if not part.nothing_to_see]
    scores = sum(chunk.heads * chunk.rows * (chunk.key_end - chunk.key_begin) for chunk in chunks)
    of_rows = sum(chunk.heads * chunk.rows for chunk in chunks)
    group = problem.num_heads_q // problem.num_heads_kv
    of_keys = sum(-(-chunk.heads // group) * (chunk.key_end - chunk.key_begin) for chunk in chunks)
    runs = sum(len(list(runs_of_heads(problem, c.first_head, c.first_head + c.heads))) for c in chunks)
    width, total = problem.head_dim + problem.head_dim_v, keys_of(problem)
    products = Cost(
        blocks=0,
        flops=2 * scores * (3 * problem.head_dim + 2 * problem.head_dim_v),
        exponentials=0,
        # P once and dS twice; the rows and keys of each product; the sums of dK and dV.
        read_bytes=3 * size * scores + size * (2 * of_rows + 2 * of_keys) * width + 4 * of_keys * width,
        write_bytes=8 * scores + 4 * (of_rows * problem.head_dim + of_keys * width),
        scratch_bytes=(8 + 3 * size) * scores,
        launches=PRODUCTS_OF_RUN * runs,
    )
    sweeps = 1 if cut.width <= WHOLE_ROW else 2
    between = Cost(
        blocks=0,
        flops=0,
        exponentials=sweeps * scores,
        read_bytes=8 * sweeps * scores,
        write_bytes=2 * size * scores,
        scratch_bytes=(8 * sweeps + 2 * size) * scores,
        launches=len(chunks),
    )
    rounding = Cost(
        blocks=0,
        flops=0,
        exponentials=0,
        read_bytes=4 * (of_rows * problem.head_dim + total * width),
        write_bytes=size * of_rows * problem.head_dim + (4 + size) * total * width,
        launches=ROUND_OF_RUN * runs + 4,  # dK and dV begin as zeros, and are rounded
    )
    return in_turn((products, between, rounding), peak_bytes(problem) - gradient_bytes(problem))
