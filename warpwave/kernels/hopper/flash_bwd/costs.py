"""What the launches of `hopper/flash_bwd` move and compute for one problem."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost, in_turn, launch_order_by_keys
from warpwave.kernels.gradient_costs import STATISTICS_BYTES, ZEROS, keys_of, of_keys, of_queries, of_rows
from warpwave.kernels.hopper.flash_bwd import hidden, split_launch, split_rows, sum_splits
from warpwave.kernels.hopper.flash_bwd.config import (
    GROUP_ROWS,
    Config,
    ascends,
    divided_tail,
    dq_columns,
    group_splits,
    has_hidden_rows,
    is_broad,
    product_pieces,
    scheduled_blocks,
    smem_bytes,
    smem_of_dkv,
    smem_of_dq,
    steps_of_dq,
    widths,
)
from warpwave.kernels.hopper.flash_bwd.launches import heads_of, query_tiles
from warpwave.kernels.hopper.host import bias_bytes
from warpwave.kernels.prepass import bias_seen, mask_bits
from warpwave.problem import DTYPE_BYTES, AttentionProblem

THREADS = 384  # two consumer warpgroups, and one that loads and adds
APART, BROAD = "apart", "broad"  # `Cost.loop`: of launches apart, and of the joint launch above head_dim 128


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what the launches move and compute, whole tiles and padding included, in the order in which they run."""
    if problem.dtype == "float32":
        return _in_parts(problem, gpu, config)
    rows, size = problem.rows * problem.num_heads_q, DTYPE_BYTES[problem.dtype]
    # whole tiles
    tiles = heads_of(problem) * query_tiles(problem, config.block_m)
    sums = 4 * tiles * config.block_m * dq_columns(problem, config) if config.is_joint else 0
    statistics = tiles * (config.block_m * STATISTICS_BYTES + 4 * config.is_joint)  # and counts of turns
    workspace = sums + statistics + 4 * tiles * problem.has_sinks
    threads = 128 if problem.head_dim_v <= 128 else 256  # `launches.statistics`
    first = of_rows(tiles, rows * (2 * size * problem.head_dim_v + 4), statistics, statistics, threads)
    divided, added, ends = _of_splits(problem, config)
    workspace += added
    zeros = (ZEROS,) if has_hidden_rows(problem) else ()
    if problem.bias_shape is not None:
        zeros = (*zeros, _of_hidden_by_bias(problem))
    if problem.mask_shape is not None:
        zeros = (*zeros, _of_mask(problem, config))
    if problem.bias_shape is not None or problem.mask_shape is not None:
        zeros = (*zeros, Cost(0, 0, 0, 0, 0, launches=2))  # prepass/zero_unseen.py, which is taken to copy nothing
        workspace += _hidden_bytes(problem, config)
    if not config.is_joint:
        walk = _storing_splits(problem, divided, _of_keys(divided, gpu, config))
        return in_turn((*zeros, first, walk, _of_queries(problem, gpu, config), *ends), workspace)
    finish = of_rows(tiles, sums, rows * size * problem.head_dim, sums, 128)
    walk = _storing_splits(problem, divided, _joint(divided, gpu, config, sums))
    return in_turn((*zeros, first, walk, finish, *ends), workspace)


def _of_splits(problem: AttentionProblem, config: Config) -> tuple[AttentionProblem, int, tuple[Cost, ...]]:
    """Returns the problem whose kv heads are the splits of the call's (`config.group_splits`), the bytes of their dK
    and dV or of those of parts of blocks (`config.divided_tail`), and the cost of adding these up."""
    splits = group_splits(problem, config)
    tail = _tail(problem, config)
    if tail.blocks:
        programs = 2 * tail.blocks * (config.block_n // sum_splits.BLOCK)
        return problem, tail.written, (of_rows(programs, tail.written, tail.added_up, tail.written, 128),)
    if splits == 1:
        return problem, 0, ()
    divided = replace(problem, num_heads_kv=splits * problem.num_heads_kv)
    numbers = (problem.head_dim + problem.head_dim_v) * keys_of(problem)
    read, added = 4 * splits * numbers, DTYPE_BYTES[problem.dtype] * numbers
    return divided, read, (of_rows(2 * -(-keys_of(problem) // sum_splits.BLOCK), read, added, read, 128),)


def _storing_splits(problem: AttentionProblem, divided: AttentionProblem, walk: Cost) -> Cost:
    """Returns the cost of a walk by keys of the problem that `_of_splits` returns: dK and dV of splits are float32, and
    the launch that adds them up reads them."""
    if divided is problem:
        return walk
    numbers = (problem.head_dim + problem.head_dim_v) * keys_of(divided)
    given = DTYPE_BYTES[problem.dtype] * numbers
    return replace(
        walk,
        write_bytes=walk.write_bytes - given + 4 * numbers,
        first_bytes=walk.first_bytes - given,
        scratch_bytes=walk.scratch_bytes + 4 * numbers,
    )


class _Tail(NamedTuple):
    """The divided blocks of the last wave (`config.divided_tail`): their number, that of the parts of all of them, the
    bytes that the parts write, float32, and those of these blocks' dK and dV."""

    blocks: int = 0
    parts: int = 0
    written: int = 0
    added_up: int = 0


def _tail(problem: AttentionProblem, config: Config) -> _Tail:
    whole, parts = divided_tail(problem, config)
    if parts == 1:
        return _Tail()
    blocks, width = scheduled_blocks(problem, config), problem.head_dim + problem.head_dim_v
    divided = blocks - whole
    written = 4 * parts * divided * config.block_n * width  # a part's tile is whole
    return _Tail(
        divided, parts * divided, written, DTYPE_BYTES[problem.dtype] * width * keys_of(problem) * divided // blocks
    )


def _in_parts(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of float32 gradients: two launches that read the operands and write their parts, and the main
    ones, which read the parts alone."""
    rows, keys, size = problem.rows * problem.num_heads_q, keys_of(problem), DTYPE_BYTES[problem.dtype]
    both, shapes = problem.head_dim + problem.head_dim_v, split_launch.workspace_shapes(problem)
    parts, rest = (sum(map(math.prod, found)) for found in (shapes[:4], shapes[4:]))
    query_blocks = heads_of(problem) * query_tiles(problem, GROUP_ROWS)
    key_blocks = 2 * math.prod(shapes[1][:2]) // split_rows.PARTS.value * split_launch.key_tiles(problem)
    statistics = query_blocks * GROUP_ROWS * STATISTICS_BYTES
    workspace = 2 * parts + 4 * rest + statistics
    tiles = math.prod(shapes[-1])
    maxima = of_rows(tiles, size * keys * both, 4 * tiles, 4 * tiles, 128)
    read = size * (rows * (both + problem.head_dim_v) + keys * both)
    split = of_rows(query_blocks + key_blocks, read, workspace, workspace, 256)
    divided, added, ends = _of_splits(problem, config)
    zeros = (ZEROS,) if has_hidden_rows(problem) else ()
    if problem.mask_shape is not None:
        of_words, flags = mask_bits.packed(problem), math.prod(mask_bits.keys_seen_shape(problem))
        flagging = of_rows(of_words.batch * of_words.heads * of_words.tiles, 4 * of_words.size, flags, flags, 128)
        zeros = (*zeros, _of_mask(problem, config), flagging)
        added += _hidden_bytes(problem, config)
    main = (
        replace(walk, scratch_bytes=walk.read_bytes)
        for walk in (_of_queries(problem, gpu, config), _of_keys(divided, gpu, config))
    )
    return in_turn((*zeros, maxima, split, *main, *ends), workspace + added)


def cost_of_bias(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what a bias's gradient adds: dS of each score, which the launch of dQ writes, and its sum over the axes
    along which the bias is broadcast."""
    assert problem.bias_shape is not None
    size, cells = DTYPE_BYTES[problem.bias_dtype or problem.dtype], math.prod(problem.bias_shape)
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    of_sum = size * (scores + cells) if cells < scores else 0
    written = size * scores
    return Cost(0, 0, 0, of_sum, written, first_bytes=of_sum + written, launches=int(cells < scores))


def _hidden_bytes(problem: AttentionProblem, config: Config) -> int:
    """Returns the bytes of workspace of the launches that read a mask or a bias."""
    needs = hidden.needs(problem, config, steps_of_dq(problem, config, bias_bytes(problem))[0])
    return sum(math.prod(need[0]) * need[1].itemsize for need in needs if need is not None)


def _of_hidden_by_bias(problem: AttentionProblem) -> Cost:
    """Returns the cost of finding the queries and keys that a bias, with a mask, hides entirely."""
    assert problem.bias_shape is not None
    shapes = bias_seen.shapes(problem)
    blocks = math.prod(shapes[0][:2]) * math.prod(-(-shape[2] // bias_seen.BLOCK) for shape in shapes)
    read = math.prod(problem.bias_shape) * DTYPE_BYTES[problem.bias_dtype or problem.dtype]
    flags = sum(map(math.prod, shapes))
    return of_rows(blocks, read + math.prod(problem.mask_shape or (0,)), flags, flags, 128)


def _of_mask(problem: AttentionProblem, config: Config) -> Cost:
    """Returns the cost of packing a mask's transpose and, for launches apart, the mask, and of listing steps."""
    assert problem.mask_shape is not None
    packed = [mask_bits.packed(problem, transposed) for transposed in ((True,) if config.is_joint else (False, True))]
    words = 4 * sum(p.size for p in packed)
    blocks = sum(p.batch * p.heads * p.tiles * p.row_blocks for p in packed)
    packing = of_rows(blocks, len(packed) * math.prod(problem.mask_shape), words, words, 32)
    return replace(packing, launches=2 * len(packed))


def _joint(problem: AttentionProblem, gpu: Gpu, config: Config, sums: int) -> Cost:
    """Returns the cost of the launch with all five products. It adds a tile of dQ to the sums at every step. Parts of
    blocks are drawn as blocks are, and what they write is in the workspace."""
    columns = dq_columns(problem, config)
    columns_k, columns_v = map(sum, product_pieces(problem))
    walk = _walk_of_keys(_without_mask(problem), config, (columns_k, columns_v), ascends(problem, config))
    scores = walk.steps * config.block_m * config.block_n
    walk, tail = _with_words(walk, problem, scores), _tail(problem, config)
    drawn = replace(walk, blocks=walk.blocks - tail.blocks + tail.parts)
    added = 4 * walk.steps * config.block_m * columns
    group = -(-problem.num_heads_q // problem.num_heads_kv)
    return replace(
        _persistent(drawn, gpu, smem_bytes(problem, config)),
        flops=walk.flops + 2 * scores * columns,
        write_bytes=walk.write_bytes - tail.added_up + tail.written + added,
        first_bytes=walk.first_bytes - tail.added_up,
        added_bytes=added,
        # The sums enter and leave L2 once if those of all heads do not fit.
        scratch_bytes=walk.scratch_bytes + tail.written + 2 * min(added, sums),
        walked_bytes=walk.walked_bytes + 4 * group * problem.seqlen_q * columns,
        loop=BROAD if is_broad(problem) else "",
        divided=tail.blocks,
        last_parts=divided_tail(problem, config)[1],
    )


def _walk_of_keys(
    problem: AttentionProblem, config: Config, columns: tuple[int, int], last_first: bool = False
) -> Cost:
    """Returns the cost of blocks that own keys, those of a head from the first keys to the last or the other way."""
    walk = of_keys(problem, config.block_m, config.block_n, columns)
    if not (problem.packed or last_first):  # under a mask the longest come first
        return walk
    order = launch_order_by_keys(problem, config.block_m, config.block_n, all_heads=True)
    if last_first:
        order = tuple((lengths[::-1], times) for lengths, times in order)
    return replace(walk, order=order)


def _of_keys(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of the launch of dK and dV."""
    walk = _walk_of_keys(_without_mask(problem), config, widths(problem))
    walk = _with_words(walk, problem, walk.steps * config.block_m * config.block_n)
    return replace(_persistent(walk, gpu, smem_of_dkv(problem, config)), loop=APART)


def _of_queries(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns the cost of the launch of dQ, which walks keys by `steps_of_dq`."""
    steps, cell = steps_of_dq(problem, config, bias_bytes(problem)), bias_bytes(problem)
    keys = steps[0]
    walk = of_queries(_without_mask(problem), 2 * GROUP_ROWS, keys, widths(problem))
    walk = _with_words(walk, problem, walk.steps * 2 * GROUP_ROWS * keys)
    return replace(_persistent(walk, gpu, smem_of_dq(problem, config, steps, cell)), loop=APART)


def _without_mask(problem: AttentionProblem) -> AttentionProblem:
    """Returns the problem without its mask, whose bytes only the packing launches read. Tiles that the mask hides are
    counted although no block walks them: their number depends on the mask's values."""
    return replace(problem, mask_shape=None, mask_visible_pairs=None)


def _with_words(walk: Cost, problem: AttentionProblem, scores: int) -> Cost:
    """Returns the cost of a walk over `scores` scores with the mask bits that it reads."""
    words = 0 if problem.mask_shape is None else scores // 8
    return replace(walk, read_bytes=walk.read_bytes + words, scratch_bytes=walk.scratch_bytes + words)


def _persistent(walk: Cost, gpu: Gpu, smem: int) -> Cost:
    """Returns the cost of a launch of one block an SM, which draws its tiles, the longest first."""
    return replace(walk, blocks=min(walk.blocks, gpu.assumed_sms), smem_bytes=smem, threads=THREADS, blocks_per_sm=1)
