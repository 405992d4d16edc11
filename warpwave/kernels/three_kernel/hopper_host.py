"""three_kernel's launches on Hopper: two products (hopper_products.py) and the row statistics between them; their
tensor maps, arguments and limits. Holds no device code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.kernels.arguments import lse_strides
from warpwave.kernels.hopper import host
from warpwave.kernels.three_kernel.hopper_products import hopper_scores_kernel, hopper_values_kernel
from warpwave.kernels.three_kernel.plan import Chunk, Plan, Workspace, key_tiles_before
from warpwave.kernels.three_kernel.statistics import MOST_TILES, ROWS, chunk_statistics_kernel
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch, tensor_maps
from warpwave.runtime.tensor_maps import MapPlan

TILE = (128, 256, 64)  # queries; keys, or columns of v; elements that a step sums over
PIECE = 64  # columns of a tile that are stored together
SMEM_BYTES = 4 * 2 * (128 + 256) * 64 + 2 * 2 * 128 * PIECE + 1024  # the ring, two pieces being stored, barriers
TOGETHER = 16  # blocks of rows traversed together: with 8 columns they are as many as an H200's SMs
LEAST_SCALE = 2.0**-126  # replaces 0, because a score of minus infinity cannot be multiplied by 0
FAR = 2**30  # a key after all others; adding a row to it does not overflow


def cannot(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why these launches cannot compute a problem on this GPU."""
    if gpu.capability != 90:
        return [f"'hopper' products need Hopper, sm_90, and this is {gpu.name}"]
    found = []
    if problem.dtype == "float32":
        found.append("'hopper' products take 16-bit operands only")
    others = {"a left side of a window": problem.window_size[0] >= 0}
    found += reasons.of_features(problem, "'hopper' products do not support", others)
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 8:
            found.append(f"{name} is {size}; it must be a multiple of 8 for TMA")
    return found


def _of_tokens(source: int, tensor: torch.Tensor, tokens: int, rows: int, columns: int) -> MapPlan:
    """Returns the map of a (batch, seqlen, head, width) tensor, of which `tokens` are read."""
    shape, strides = host.seen(tensor, False, tokens)
    return MapPlan(source, shape, strides, (1, 1, rows, columns))


def _of_p(p: torch.Tensor, columns: int) -> MapPlan:
    heads, rows, width = p.shape
    return MapPlan(2, (1, heads, rows, width), (heads * rows * width, rows * width, width, 1), (1, 1, 64, columns))


class Described(NamedTuple):
    """A launch, the four tensors that it describes by maps (`sources`), and their maps; none if it has no maps."""

    launch: launch.Launch
    maps: list[MapPlan | None]
    sources: tuple[torch.Tensor, ...]


def launches(
    problem: AttentionProblem, gpu: Gpu, operands: Operands, out: Any, lse: Any, cut: Plan, chunk: Chunk,
    workspace: Workspace, *, described: bool = True,
) -> tuple[Described, Described, Described]:  # fmt: skip
    """Returns the scores, statistics and values launches of a chunk. A test that runs them without Triton's compiler
    passes no maps."""
    q, k, v = operands[:3]
    p, reference, top, sums = workspace.p, workspace.tile_max, workspace.tile_top, workspace.tile_sum
    lowered, row_scale = workspace.lowered, workspace.row_scale
    assert p is not None
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    high = FAR if band.high is None else band.high
    keys_end = host.keys_end(problem)
    sms, blocks, columns = gpu.assumed_sms, -(-chunk.rows // TILE[0]), -(-problem.head_dim_v // TILE[1])
    key_tiles, has_high = cut.width // TILE[1], band.high is not None
    # A block sees the tiles up to its last row's last key: half a tile more than the previous block.
    diagonal = (chunk.row_begin + TILE[0] - 1 + high) // TILE[0] + 2 if has_high else 2 * key_tiles
    all_tiles = key_tiles_before(blocks, diagonal, key_tiles)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    group = problem.num_heads_q // problem.num_heads_kv
    row_end = chunk.row_begin + chunk.rows

    def described_by(maps: list[MapPlan | None], of: tuple[torch.Tensor, ...]) -> list[Any]:
        return [launch.Mapped(plan, of[plan.source]) if described else plan for plan in maps if plan is not None]

    def scalars(columns: int, together: int) -> list[int]:
        return [chunk.first_head, chunk.row_begin, row_end, problem.num_heads_q, group, chunk.heads, blocks, columns,
                together, diagonal, key_tiles, cut.rows]  # fmt: skip

    of_scores: list[MapPlan | None] = [
        _of_tokens(0, q, problem.seqlen_q, 64, TILE[2]),
        _of_tokens(1, k, keys_end, TILE[1], TILE[2]),
        _of_p(p, PIECE),
    ]
    of_values: list[MapPlan | None] = [
        _of_p(p, TILE[2]),
        _of_tokens(1, v, keys_end, TILE[2], TILE[1]),
        _of_tokens(3, out, problem.seqlen_q, 64, PIECE),
    ]
    sources = ((q, k, p, p), (p, v, p, out))
    scores = launch.Launch(
        kernel=hopper_scores_kernel,
        grid=min(sms, chunk.heads * all_tiles),
        tensors=(*described_by(of_scores, sources[0]), reference, top, sums),
        scalars=[*scalars(key_tiles, TOGETHER), problem.seqlen_k, high, all_tiles, -(-problem.head_dim // TILE[2]),
                 max(problem.softmax_scale * math.log2(math.e), LEAST_SCALE)],
        constants={"HAS_HIGH": has_high},
        options=options,
    )  # fmt: skip
    groups = 2 * -(-cut.rows // TILE[0])
    statistics = launch.Launch(
        kernel=chunk_statistics_kernel,
        grid=chunk.heads * groups,
        tensors=(p, reference, top, sums, lowered, row_scale, lse, operands.sinks),
        scalars=[*lse_strides(problem), problem.num_heads_q, chunk.first_head, chunk.row_begin, row_end, diagonal,
                 key_tiles, cut.rows, groups],
        constants={"ROWS": ROWS, "TILES": min(MOST_TILES, 1 << (key_tiles - 1).bit_length()),
                   "HAS_SINKS": problem.has_sinks, "WRITE_LSE": problem.return_lse, "LAUNCHED_AHEAD": described},
        options={"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False, "launch_pdl": described},
    )  # fmt: skip
    # If blocks differ in length, small groups balance better; wide heads need V shared in any case.
    together = min(TOGETHER, max(1, columns // 2)) if has_high else TOGETHER
    values = launch.Launch(
        kernel=hopper_values_kernel,
        grid=min(sms, chunk.heads * blocks * columns),
        tensors=(*described_by(of_values, sources[1]), top, lowered, row_scale),
        scalars=scalars(columns, together),
        constants={"HAS_HIGH": has_high},
        options=options | {"launch_pdl": True},
    )
    return (
        Described(scores, of_scores, sources[0]),
        Described(statistics, [], ()),
        Described(values, of_values, sources[1]),
    )


def bind(*arguments: Any) -> Sequence[tuple[launch.Launcher, str]]:
    """Returns the compiled launches, each with the names of its arguments."""
    of_scores, of_statistics, of_values = launches(*arguments)
    return (
        (tensor_maps.bind(*of_scores, has_counter=False), "q k p p tile_max tile_top tile_sum"),
        (launch.bind(of_statistics.launch), "p tile_max tile_top tile_sum lowered row_scale lse sinks"),
        (tensor_maps.bind(*of_values, has_counter=False), "p v p out tile_top lowered row_scale"),
    )
