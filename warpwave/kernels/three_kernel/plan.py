"""Cuts a three_kernel call into chunks whose scores fit a workspace of bounded size. Holds no kernel.

A chunk is some query rows of some heads: as many heads as fit, and fewer rows if the scores of one head do not fit. A
window limits the width of the workspace.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from warpwave.errors import InvalidInput
from warpwave.kernels import rules
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime import scratch

# Scores times head_dim that take as long as two starts of torch's operations, by bytes of an element: measured with
# causal gradients (2026-11-27-three-kernel-parts.log).
TWO_STARTS = {2: 2**33, 4: 2**30}
MOST_PARTS = 8
PRODUCTS = ("library", "triton", "hopper", "online")


@dataclass(frozen=True)
class Config:
    """The implementations of the products, their tiles, the softmax's launch, and the memory for scores.

    Args:
        scores: the first product: `"library"` (torch's), `"triton"` (ours), `"fused"` (ours, with the softmax in its
            epilogue; the second product must then be ours), or `"hopper"` (Hopper's own, also with the softmax, with
            tiles of 128 x 256; the second must then be `"hopper"` too).
        values: the second product: `"library"`, `"triton"`, `"hopper"`, or `"online"` (ours, including the softmax in
            one launch: for few scores, after a first product that is `"triton"`).
        block_m: queries of a tile of ours, a power of two, at least 16; chunks are whole tiles of queries.
        block_n: keys of a tile of scores, a power of two, at least 16.
        block_k: elements that a step sums over: of head_dim in the first product, of keys in the second; a power of
            two, from 16 to block_n.
        block_v: columns of v of a tile of the output, a power of two, at least 16.
        num_warps, num_stages: for our products: warps of a block, steps in flight.
        split_d: blocks that divide head_dim in the first product, if its tiles alone are too few for the GPU;
            `"triton"` only.
        softmax_rows, softmax_keys: a tile of the softmax, powers of two. If it is as wide as the workspace, a row stays
            in registers, is read once, and 16-bit probabilities overwrite its scores. For `"online"`, the queries and
            keys of its own tile, at least 16 each.
        softmax_warps: warps of a block of the softmax. One is 32 threads, the fewest Triton can launch (64 on AMD's
            CDNA); a block of 16 threads is not possible.
        workspace_bytes: memory for scores, probabilities, row statistics and sums of a chunk together.
        sums_bytes: the part of it for the float32 sums of torch's second product. They are computed and scaled in
            pieces of whole heads, or of rows of one head, so that they are read while still in L2. At least one tile of
            queries.
    """

    scores: str
    values: str
    block_m: int
    block_n: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    split_d: int
    softmax_rows: int
    softmax_keys: int
    softmax_warps: int
    workspace_bytes: int
    sums_bytes: int = 1 << 25

    def __post_init__(self) -> None:
        if self.scores not in ("library", "triton", "hopper", "fused"):
            raise ValueError(f"scores is {self.scores!r}; it must be 'library', 'triton', 'hopper' or 'fused'")
        if self.values not in PRODUCTS:
            raise ValueError(f"values is {self.values!r}; it must be 'library', 'triton', 'hopper' or 'online'")
        if self.values == "online" and (self.scores != "triton" or min(self.softmax_rows, self.softmax_keys) < 16):
            raise ValueError(
                f"values is 'online', scores {self.scores!r}, softmax_rows {self.softmax_rows} and softmax_keys "
                f"{self.softmax_keys}; 'online' needs scores='triton' and at least 16 of both"
            )
        if (self.scores == "hopper") != (self.values == "hopper"):
            raise ValueError(f"scores is {self.scores!r} and values {self.values!r}; both must be 'hopper', or neither")
        if self.scores == "hopper" and (self.block_m, self.block_n) != (128, 256):
            raise ValueError(f"block_m x block_n is {self.block_m} x {self.block_n}; 'hopper' has tiles of 128 x 256")
        if self.scores == "fused" and self.values != "triton":
            raise ValueError(f"values is {self.values!r}; with scores='fused' it must be 'triton'")
        sizes = dict.fromkeys(("block_m", "block_n", "block_k", "block_v", "softmax_keys"), 16)
        sizes |= dict.fromkeys(("num_warps", "softmax_rows", "softmax_warps"), 1)
        rules.check_sizes(self, sizes, ("num_stages", "split_d", "workspace_bytes", "sums_bytes"))
        if self.block_k > self.block_n:
            raise ValueError(f"block_k is {self.block_k}; it must be at most block_n, which is {self.block_n}")
        if self.split_d > 1 and self.scores != "triton":
            raise ValueError(
                f"split_d is {self.split_d} and scores {self.scores!r}; split_d must be 1 unless scores is 'triton'"
            )


# Chunks ---------------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A unit of computation: some rows of some heads, counted over the batch.

    Attributes:
        first_head, heads: of batch * num_heads_q.
        row_begin, rows: queries of each sequence.
        key_base: the key in column 0 of the workspace, a multiple of block_n.
        key_begin, key_end: keys that some row sees; all keys of packed sequences, whose lengths are on the device.
    """

    first_head: int
    heads: int
    row_begin: int
    rows: int
    key_base: int
    key_begin: int
    key_end: int

    @property
    def nothing_to_see(self) -> bool:
        return self.key_begin >= self.key_end


class Plan(NamedTuple):
    """How a call is cut.

    Attributes:
        chunks: in the order they run, one after another in the same workspace.
        heads, rows, width: of the workspace; width counts keys, in whole tiles.
    """

    chunks: tuple[Chunk, ...]
    heads: int
    rows: int
    width: int


def up(value: int, step: int) -> int:
    """Returns the value rounded up to a multiple of a step."""
    return -(-value // step) * step


def plan(problem: AttentionProblem, config: Config) -> Plan:
    """Cuts a call into chunks that fit the workspace: as many heads as fit, and fewer rows if one head does not fit.

    Raises:
        InvalidInput: not even one tile of queries of one head fits.
    """
    total_rows = up(max(1, problem.seqlen_q), config.block_m)
    rows = total_rows
    if problem.has_band and config.scores == "library" and not problem.packed:
        rows = min(rows, up(-(-total_rows // _parts_of_rows(problem)), config.block_m))
    while (one := _chunk_bytes(problem, config, 1, rows)) > config.workspace_bytes:
        if rows <= config.block_m:
            raise InvalidInput(
                f"workspace_bytes is {config.workspace_bytes}; one tile of {config.block_m} queries of one head takes "
                f"{one} bytes"
            )
        rows = max(config.block_m, up(rows // 2, config.block_m))
    all_heads = problem.batch * problem.num_heads_q
    heads = max(
        1, bisect_right(range(1, all_heads + 1), config.workspace_bytes, key=partial(_bytes_of, problem, config, rows))
    )
    many = max(1, -(-all_heads // heads))  # 0 heads in an empty batch
    heads = max(1, -(-all_heads // many))  # equal chunks instead of a small last one
    chunks = []
    for first_head in range(0, all_heads, heads):
        for row_begin in range(0, problem.seqlen_q, rows):
            chunk_rows = min(rows, problem.seqlen_q - row_begin)
            begin, end = _visible(problem, row_begin, chunk_rows)
            base = begin // config.block_n * config.block_n if begin < end else 0
            chunks.append(
                Chunk(first_head, min(heads, all_heads - first_head), row_begin, chunk_rows, base, begin, end)
            )
    return Plan(tuple(chunks), heads, rows, _width(problem, config, rows))


def _parts_of_rows(problem: AttentionProblem) -> int:
    """Returns into how many parts the rows of a call with a band are cut, so that torch's products compute less of what
    it hides: they compute everything between the first and the last visible key of a part.

    Of a causal square that takes the time t, c parts compute t / 2c in vain, and each starts torch's operations again
    for each batch item. With a time of s for a start, both take least time together at c = sqrt(t / 2s) parts. With
    eight parts, less than a tenth of a causal square is computed in vain. Of a window more is, so it gets all eight.
    """
    if problem.window_size != (-1, -1):
        return MOST_PARTS
    scores = problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    work = scores * max(problem.head_dim, problem.head_dim_v)
    return min(MOST_PARTS, max(1, math.isqrt(work // TWO_STARTS[DTYPE_BYTES[problem.dtype]])))


def _bytes_of(problem: AttentionProblem, config: Config, rows: int, heads: int) -> int:
    return _chunk_bytes(problem, config, heads, rows)


class Piece(NamedTuple):
    """Part of a chunk whose sums of P V are in memory together: heads counted from the chunk's first, rows from its
    first row."""

    first_head: int
    heads: int
    row_begin: int
    rows: int


def pieces(problem: AttentionProblem, config: Config, heads: int, rows: int) -> list[Piece]:
    """Returns the pieces in which rows of heads are summed: as many whole heads as fit `sums_bytes`, or rows of one
    head."""
    fitting = _rows_that_fit(problem, config)
    if fitting >= rows:
        step = max(1, min(heads, fitting // max(1, rows)))
        return [Piece(head, min(step, heads - head), 0, rows) for head in range(0, heads, step)]
    step = up(-(-rows // -(-rows // (fitting // config.block_m * config.block_m))), config.block_m)  # equal pieces
    return [Piece(h, 1, row, min(step, rows - row)) for h in range(heads) for row in range(0, rows, step)]


def _rows_that_fit(problem: AttentionProblem, config: Config) -> int:
    """Returns the rows, counted over heads, whose sums may be in memory together."""
    return max(config.block_m, config.sums_bytes // (4 * max(1, problem.head_dim_v)))


def _visible(problem: AttentionProblem, row_begin: int, rows: int) -> tuple[int, int]:
    """Returns begin and end of the keys that some of these rows sees by position."""
    if problem.packed:
        return 0, problem.seqlen_k
    low, high = problem.band(problem.seqlen_q, problem.seqlen_k)
    begin = 0 if low is None else max(0, row_begin + low)
    end = problem.seqlen_k if high is None else min(problem.seqlen_k, row_begin + rows + high)
    return (0, 0) if low is not None and high is not None and low > high else (begin, end)


def _width(problem: AttentionProblem, config: Config, rows: int) -> int:
    """Returns the keys of a row of the workspace: all of them, or as many as a window shows to these rows."""
    low, high = (None, None) if problem.packed else problem.band(problem.seqlen_q, problem.seqlen_k)
    keys = problem.seqlen_k
    if low is not None and high is not None:
        keys = min(keys, max(0, high - low) + rows + config.block_n)  # a window may begin inside a tile
    return up(max(1, keys), config.block_n)


def key_tiles_before(blocks: int, diagonal: int, key_tiles: int) -> int:
    """Returns the key tiles that `blocks` blocks of queries see together; block b sees (diagonal + b) / 2, at least 1
    and at most `key_tiles`."""
    single = min(blocks, max(2 - diagonal, 0))
    whole = min(blocks, max(2 * key_tiles - diagonal, single))
    rising = ((diagonal + whole - 1) ** 2 >> 2) - ((diagonal + single - 1) ** 2 >> 2)
    return single + rising + (blocks - whole) * key_tiles


def _sizes(problem: AttentionProblem, config: Config, heads: int, rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of each tensor of the workspace, by name."""
    width = _width(problem, config, rows)
    statistics = ((heads, width // config.block_n, rows), "float32")
    if config.scores == "hopper":
        return {
            "p": ((heads, rows, width), problem.dtype),
            "tile_max": statistics,
            "tile_top": statistics,
            "tile_sum": statistics,
            "lowered": ((heads, width // config.block_n, 2 * -(-rows // config.block_m)), "float32"),
            "row_scale": ((heads, rows), "float32"),
        }
    if config.scores == "fused":
        return {"p": ((heads, rows, width), problem.dtype), "tile_max": statistics, "tile_sum": statistics}
    sizes: dict[str, tuple[tuple[int, ...], str]] = {"scores": ((config.split_d, heads, rows, width), "float32")}
    if config.values == "online":
        return sizes
    if not in_place(problem, config, width):
        sizes["p"] = ((heads, rows, width), problem.dtype)
    if not normalizes(problem, config):
        sizes["row_scale"] = ((heads, rows), "float32")
    if config.values == "library" and problem.dtype != "float32":
        most = min(heads * rows, _rows_that_fit(problem, config))
        sizes["sums"] = ((most, problem.head_dim_v), "float32")
    return sizes


def whole_rows(config: Config, width: int) -> bool:
    """Returns whether a row of a workspace of this width is one tile of the softmax."""
    return config.softmax_keys >= width


def in_place(problem: AttentionProblem, config: Config, width: int) -> bool:
    """Returns whether probabilities overwrite their scores: if both are float32, or if a row is in registers before any
    of its probabilities is written."""
    return config.split_d == 1 and (problem.dtype == "float32" or whole_rows(config, width))


def normalizes(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether the softmax divides by the sum: before a product that cannot, and if that costs no accuracy."""
    return problem.dtype == "float32" and config.values == "library"


def _chunk_bytes(problem: AttentionProblem, config: Config, heads: int, rows: int) -> int:
    sizes = _sizes(problem, config, heads, rows).values()
    return sum(DTYPE_BYTES[dtype] * math.prod(shape) for shape, dtype in sizes)


def workspace_bytes(problem: AttentionProblem, config: Config) -> int:
    """Returns the exact bytes that a call allocates in addition to its outputs."""
    cut = plan(problem, config)
    return _chunk_bytes(problem, config, cut.heads, cut.rows)


class Workspace(NamedTuple):
    """Tensors that the launches of a chunk pass to one another; None for those that do not exist."""

    scores: torch.Tensor | None = None
    p: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    tile_max: torch.Tensor | None = None
    tile_top: torch.Tensor | None = None
    tile_sum: torch.Tensor | None = None
    lowered: torch.Tensor | None = None
    sums: torch.Tensor | None = None


def needs(problem: AttentionProblem, config: Config, cut: Plan) -> list[scratch.Need]:
    """Returns shapes and dtypes of the tensors in memory."""
    sizes = _sizes(problem, config, cut.heads, cut.rows).values()
    return [(shape, getattr(torch, dtype)) for shape, dtype in sizes]


def named(problem: AttentionProblem, config: Config, cut: Plan, tensors: Iterable[torch.Tensor]) -> Workspace:
    """Returns the workspace made of tensors as listed by `needs`."""
    made = Workspace(**dict(zip(_sizes(problem, config, cut.heads, cut.rows), tensors, strict=True)))
    if made.p is None and made.scores is not None and config.values != "online":
        # In 16 bits a row of P is the first half of its row of scores.
        made = made._replace(p=made.scores[0].view(getattr(torch, problem.dtype)))
    return made


def allocate_workspace(problem: AttentionProblem, config: Config, cut: Plan, device: torch.device) -> Workspace:
    """Allocates a workspace."""
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in needs(problem, config, cut)]
    return named(problem, config, cut, tensors)


def least_bytes(problem: AttentionProblem, config: Config) -> int:
    """Returns the bytes of one tile of queries of one head, the minimum for a workspace."""
    return _chunk_bytes(problem, config, 1, config.block_m)
