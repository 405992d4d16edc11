"""What `hopper/flash_bwd` can run, how, and at what cost. No kernel by itself."""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.problem import DTYPE_BYTES, AttentionProblem

MAX_HEAD_DIM = 128  # above it, dQ, dK and dV of a tile do not fit the registers of two warpgroups
NARROW = 64
BLOCK_N = 128


@dataclass(frozen=True)
class Config:
    """Tile shape.

    Args:
        block_m: queries a step walks: 128 up to head_dim 64, else 64.
        num_stages: tiles of Q and of dO in flight: at least 1.
    """

    block_m: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128):
            raise ValueError(f"block_m is {self.block_m}; it must be 64 or 128")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}; it must be at least 1")


def width(problem: AttentionProblem) -> int:
    """Returns the columns of a tile: head_dim and head_dim_v padded to 64 or 128 with zeros by the copy engine."""
    return NARROW if max(problem.head_dim, problem.head_dim_v) <= NARROW else MAX_HEAD_DIM


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the one config of a head size."""
    return [Config(128 if width(problem) == NARROW else 64, 2)]


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config with which gradients are computed."""
    return configs(problem, gpu)[0]


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason the kernel cannot compute the problem's gradients there; empty when it can."""
    found = reasons.of_hopper(gpu)
    if problem.dtype == "float32":
        found.append("dtype is float32; it multiplies float16 and bfloat16")
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"dQ, dK and dV must fit the registers, {MAX_HEAD_DIM} at most")
    if 0 in (problem.rows, problem.batch, problem.total_k if problem.packed else problem.seqlen_k):
        found.append("there are no queries or no keys, so nothing to launch")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 8:
            found.append(f"{name} is {size}; rows copied by TMA are a multiple of 16 bytes, so it must be one of 8")
    for name, shape in (("boolean mask", problem.mask_shape), ("bias", problem.bias_shape)):
        if shape is not None:
            found.append(f"it takes no {name}")
    return found


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Returns the shared memory of a block."""
    size, columns = DTYPE_BYTES[problem.dtype], width(problem)
    keys = 2 * BLOCK_N * columns * size
    stream = 2 * config.num_stages * config.block_m * (columns * size + 4)
    return keys + stream + 2 * BLOCK_N * config.block_m * size + config.block_m * columns * 4 + 1024
