"""States what hopper/flash_fwd can run, where another kernel is faster, and what a launch costs. Holds no kernel."""

from __future__ import annotations

import math
from dataclasses import replace

from warpwave import precision
from warpwave.gpu import WGMMA_ROWS, Gpu
from warpwave.kernels import partials, reasons
from warpwave.kernels.cost import ODD_ROWS, Cost, launch_order, line_bytes, merging, odd_rows, walk, with_merge
from warpwave.kernels.hopper.flash_fwd.call import reach
from warpwave.kernels.hopper.flash_fwd.choice import always_fits, default
from warpwave.kernels.hopper.flash_fwd.config import (
    ABLE,
    PARTS,
    Config,
    has_bias_cells,
    has_widener,
    num_parts,
    row_pieces,
    smem_bytes,
    widens_values,
)
from warpwave.kernels.hopper.shared_tiles import heads_of_tile, query_tiles
from warpwave.kernels.hopper.split_tiles import LEAST_SHARE_OF_SMS, outruns_split_kv
from warpwave.kernels.prepass import mask_bits, scale_ahead
from warpwave.problem import DTYPE_BYTES, AttentionProblem, by_kind

MAX_HEAD_DIM = {"float16": 384, "bfloat16": 384, "float32": 256, "int8": 256, "float8_e4m3fn": 256, "float8_e5m2": 256}
SIXTEEN_BIT = ("float16", "bfloat16")
DECODE_QUERIES, MANY_KEYS = 32, 2048  # of a sequence, if keys that are not split leave SMs idle
LEAST_PAGE, MAX_HEAD_DIM_OF_PAGES = 16, 256  # tokens that a copy takes at least; wider rows were not tried
# Time for an element of an 8-bit cache that a widener converts, and for each score of the same step, by what shares a
# factor. Fitted to calls of 8,192 tokens at head_dim 64, 128 and 256 on an H200
# (record 2026-11-29-h200-factors-of-tokens.json).
WIDENER_NS = {"float8_e4m3fn": 0.052, "int8": 0.058}
WIDENER_NS_OF_SCORE = {"head": 0.04, "token": 0.07}
FEWEST_QUERIES = 128  # that share a kv head, to amortize writing a V of 8 bits in float16


@by_kind
def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = reasons.of_hopper(gpu)
    if problem.is_quantized and problem.dtype_of_out not in SIXTEEN_BIT:
        found.append(f"out is {problem.dtype_of_out}; it writes float16 and bfloat16")
    if problem.dtype == "float32":
        if gpu.arch == "sm_90" and num_parts(problem, gpu) == 0:
            found.append(f"precision is {problem.precision!r}; its float32 products are {', '.join(ABLE)}")
        found += precision.why_not(problem, gpu, ABLE)
    found += [*reasons.of_gradients(problem), *_against_pages(problem), *reasons.of_float32_masks(problem)]
    is_wide = max(problem.head_dim, problem.head_dim_v) > reasons.MAX_HEAD_DIM_WITH_DROPOUT
    if problem.dropout_p and (problem.dtype == "float32" or is_wide):
        found.append(f"it has dropout only in 16-bit types and up to head_dim {reasons.MAX_HEAD_DIM_WITH_DROPOUT}")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        dtype = problem.dtype_of_k if name == "head_dim" else problem.dtype_kv or "float16"  # v as the launch reads it
        if size > MAX_HEAD_DIM[problem.dtype]:
            found.append(
                f"{name} is {size}; rows of K and V must fit a tile and rows of out must fit the registers: "
                f"at most {MAX_HEAD_DIM[problem.dtype]} in {problem.dtype}"
            )
        multiple = 16 // DTYPE_BYTES[dtype]
        if size % multiple and problem.dtype != "float32":
            found.append(
                f"{name} is {size}; it must be a multiple of {multiple}, because TMA copies multiples of 16 bytes"
            )
    for name, shape in (("boolean mask", problem.mask_shape), ("bias", problem.bias_shape)):
        if name == "bias" and shape is not None and problem.dtype == "float32":
            found.append("it takes a bias only in 16-bit types")
        elif shape is not None and max(problem.head_dim, problem.head_dim_v) > 256:
            found.append(f"it takes a {name} only up to head_dim 256: above, registers do not suffice")
    if problem.bias_shape is not None and problem.descale_blocks is not None and problem.descale_blocks[2]:
        # Factors are added to scores in bits (softmax.FromOffset), where a bias of -1e9 would leave nothing of them.
        found.append("it takes no bias beside factors of blocks of v")
    # Without one bias per score, some tile always fits.
    if not found and has_bias_cells(problem) and not always_fits(problem, gpu):
        found.append("no tile fits shared memory and registers together with its tile of the bias")
    return found


def _against_pages(problem: AttentionProblem) -> list[str]:
    """Returns why it cannot read a cache."""
    if not problem.page_size:
        return []
    others = {
        "float32": problem.dtype == "float32",
        f"pages of {problem.page_size}": problem.page_size < LEAST_PAGE,
        "results that do not depend on the batch": problem.batch_invariant,
        "a mask": problem.mask_shape is not None,
        "a bias": problem.bias_shape is not None,
        f"head sizes above {MAX_HEAD_DIM_OF_PAGES}": max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM_OF_PAGES,
    }
    found = [f"from pages it does not support {name}" for name, is_there in others.items() if is_there]
    return found + reasons.of_pages(problem)


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why another kernel is faster: on a cache `split_kv`, else `flash_fwd`. Very short calls do not amortize
    setting up the ring and the warp roles, and few queries do not amortize a launch that widens V."""
    if problem.page_size:
        return _outrun_from_pages(problem, gpu)
    if widens_values(problem):
        shared = problem.rows * problem.num_heads_q // max(1, problem.batch * problem.num_heads_kv)
        if shared < FEWEST_QUERIES:
            # By bytes and peaks; not measured.
            return [
                f"{shared} queries share a kv head; with fewer than {FEWEST_QUERIES}, writing V in float16 takes as "
                "long as the attention"
            ]
    if max(problem.head_dim, problem.head_dim_v) > 256 and problem.seqlen_q <= DECODE_QUERIES:
        rows = problem.seqlen_q * problem.num_heads_q // max(1, problem.num_heads_kv)
        tiles, fewest = -(-rows // 64) * problem.batch * problem.num_heads_kv, 2 if rows <= 16 else 4
        # Record 2026-11-28-h200-decode-above-256.json: about level at 80 and 128 tiles of at most 16 rows.
        if tiles < gpu.assumed_sms // fewest and reach(problem) >= MANY_KEYS:
            return [
                f"{tiles} tiles of rows leave most SMs idle, and by default it splits no such keys: large_head_dim or "
                "three_kernel is 1.3 to 29 x as fast (H200)"
            ]
    tiles = -(-problem.seqlen_q // 64) * problem.batch * problem.num_heads_q
    short = problem.seqlen_k <= 512 and max(problem.head_dim, problem.head_dim_v) <= 64
    if problem.mask_shape is not None or problem.bias_shape is not None:
        if problem.dtype == "float32":
            return _outrun_by_masked_float32(problem, gpu, tiles)
        return []  # 16 heads x 512 with a key mask: 10.8 us against 31.3 (graph replays, an H200)
    if not (short and tiles <= gpu.assumed_sms) or problem.dtype == "float32":
        return []  # in float32 this kernel is faster from 1 head x 512 on: 10 to 17 us against 28 (graphs, an H200)
    # Graph replays on an H200, hot, in us, this kernel / flash_fwd (the shipped record, suite tiny): 1 head x 64 3.99 /
    # 2.58, x 128 3.96 / 3.11, x 512 6.59 / 6.22; 8 x 4 heads x 128 4.11 / 3.35. Beyond: 16 heads x 1024 13.1 / 13.8.
    return [
        "at most 512 keys of head_dim 64 and one tile an SM: flash_fwd, with lighter blocks, is up to 1.5 x as fast"
    ]


def _outrun_by_masked_float32(problem: AttentionProblem, gpu: Gpu, tiles: int) -> list[str]:
    """Returns why `flash_fwd` is faster in float32 with a mask: launches that pack the mask and make parts precede
    this kernel.

    Measured on an H200 (record 2026-12-01-h200-masked-float32.json), time of `flash_fwd` over this kernel's: 0.25 to
    1.05 in 13 calls that this rule leaves to `flash_fwd`, 0.88 to 8.4 in 36 others, 1.69 in the geometric mean; as
    `tf32` 0.20 to 1.06 in eight and 1.2 to 5.6 in 21.
    """
    width, few = max(problem.head_dim, problem.head_dim_v), tiles <= gpu.assumed_sms
    if not ((width <= 128 and problem.seqlen_k <= 96) or (width <= 64 and problem.seqlen_k <= 128 and few)):
        return []
    return [
        "a mask in float32 and at most 96 keys up to head_dim 128, or at most 128 keys up to head_dim 64 and one tile "
        "an SM: the launches before this kernel take longer than they save, and flash_fwd is up to 4 x as fast (H200)"
    ]


def _outrun_from_pages(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why `split_kv` is faster on a cache.

    Measured on an H200 (record 2026-11-28-h200-prefill-from-pages.json), time of `split_kv` over this kernel's, whose
    blocks then did not split keys: 1.02 to 3.26 in 66 calls with tiles for 0.75 of the SMs, 1.69 in the geometric
    mean; 0.84 to 0.98 in 4 short ones; 0.80 to 1.15 with tiles for half of the SMs, and 0.18 to 0.74 with fewer. On
    8-bit caches 1.01 to 2.38 in 46 calls with factors of heads (record 2026-11-28-h200-prefill-from-8-bit-pages.json),
    and 1.23 to 5.52 in 32 with factors of tokens (record 2026-11-29-h200-factors-of-tokens.json).
    """
    heads = heads_of_tile(problem)
    rows, tiles = problem.rows * heads // max(1, problem.batch), query_tiles(problem, WGMMA_ROWS, heads)
    if outruns_split_kv(problem, gpu):
        # The conversion of 8-bit keys binds a block, so idle SMs cost more: 0.46 to 0.95 times as fast as split_kv in
        # four calls (2026-12-01-h200-packed-and-8-bit.json).
        is_slow = has_widener(problem) and tiles < LEAST_SHARE_OF_SMS * gpu.assumed_sms
        config = default(problem, gpu) if is_slow else None
        if not is_slow or (config is not None and config.num_splits > 1):
            return []
    return [
        f"{tiles} tiles of {WGMMA_ROWS} rows, {rows} a sequence on average, on {problem.seqlen_k} keys and "
        f"{gpu.assumed_sms} SMs: split_kv is faster with few rows a sequence, with few keys an SM, and with few tiles "
        "whose keys this kernel does not split"
    ]


def cost(problem: AttentionProblem, gpu: Gpu, config: Config) -> Cost:
    """Returns what one call moves and computes: whole tiles, padding included; K and V once for each query tile, and Q
    once for each split. In float32 it includes what the preceding launches read, and the parts that they write; with
    splits, the merge."""
    dtypes = problem.dtype, problem.dtype_of_k, problem.dtype_of_v, problem.dtype_of_out
    size, size_k, size_v, size_out = (DTYPE_BYTES[x] for x in dtypes)
    size_v = 2 if widens_values(problem) else size_v
    width, width_v = map(sum, row_pieces(problem, config))
    visited = walk(problem, config.block_m, config.block_n, config.heads, from_first=True).tiles
    # A warpgroup skips its tiles when all its rows lie past the end of the sequence.
    of_groups = config.block_m // config.groups
    rows = [q * config.heads for q, _ in problem.items()]
    busy = sum(-(-many // of_groups) for many in rows)
    busy_share = busy / max(1, config.groups * sum(-(-many // config.block_m) for many in rows))
    scores = int(visited * config.block_m * config.block_n * busy_share)
    of_heads = problem.rows * problem.num_heads_q
    q_bytes, k_bytes = size * problem.head_dim, size * (problem.head_dim + problem.head_dim_v)
    workspace = split_reads = 0
    launches = 1
    if problem.dtype == "float32":
        arithmetic = precision.arithmetic(problem, gpu, ABLE)
        keys = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
        split_reads = of_heads * q_bytes + keys * k_bytes
        q_bytes, k_bytes = 2 * PARTS.get(arithmetic, 1) * width, 2 * PARTS.get(arithmetic, 1) * (width + width_v)
        workspace = of_heads * q_bytes + keys * k_bytes
        launches = 2
        if arithmetic in scale_ahead.PARTS:
            many_inverses, many_maxima = scale_ahead.workspace_floats(problem)
            workspace += 4 * (many_inverses + many_maxima)
            if many_maxima:
                launches = 3
                split_reads += keys * size * (problem.head_dim + problem.head_dim_v)
    if problem.dtype != "float32":  # as TMA copies them: 80 columns of 16 bits take as long as 176
        k_bytes = line_bytes(size_k * problem.head_dim) + line_bytes(size_v * problem.head_dim_v)
    reads = of_heads * q_bytes * config.num_splits + visited * config.block_n * k_bytes
    if problem.mask_shape is not None:  # a preceding launch packs the mask into bits
        split_reads += math.prod(problem.mask_shape)
        workspace += 4 * mask_bits.packed(problem).size
        launches += 1
        reads += scores // 8
        if problem.dtype == "float32" and precision.arithmetic(problem, gpu, ABLE) in scale_ahead.PARTS:
            # Another flags the keys that it shows.
            split_reads += 4 * mask_bits.packed(problem).size
            workspace += math.prod(mask_bits.keys_seen_shape(problem))
            launches += 1
    if has_bias_cells(problem):
        reads += scores * DTYPE_BYTES[problem.bias_dtype or problem.dtype]
    if widens_values(problem):
        values = (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) * problem.num_heads_kv
        split_reads += values * problem.head_dim_v
        workspace += 2 * values * problem.head_dim_v
        launches += 1
    of_tiles, splits = walk(problem, config.block_m, config.block_n, config.heads), config.num_splits
    outputs = of_heads * (problem.head_dim_v * size_out + (4 if problem.return_lse else 0))
    partial = partials.workspace_bytes(problem, splits) if splits > 1 else 0
    attend = Cost(
        blocks=min(query_tiles(problem, config.block_m, config.heads) * splits, gpu.assumed_sms * config.blocks_per_sm),
        flops=2 * scores * (width + width_v),
        exponentials=scores,
        read_bytes=reads,
        write_bytes=partial or outputs,
        smem_bytes=smem_bytes(problem, gpu, config),
        workspace_bytes=workspace + partial,
        scratch_bytes=reads if workspace else partial,
        items=max(1, of_tiles.items) * splits,
        widener_us=_widener_us(problem, config, visited, scores),
        steps=visited,
        longest=-(-max(1, of_tiles.longest) // splits),
        order=launch_order(problem, config.block_m, config.block_n, config.heads, splits) if problem.packed else (),
        cut=of_tiles.cut,
        # Each role loads the sequence offsets, then those of its tile.
        trips=5 if problem.packed or problem.page_size else 0,
        threads=128 * (config.groups + 1),
        chains=1 if _in_step(problem, gpu, config) else max(1, round(config.groups * busy_share)),
        blocks_per_sm=config.blocks_per_sm,
        loop=_loop(problem, width_v, num_parts(problem, gpu)),
    )
    if splits > 1:
        columns = partials.column_blocks(problem, splits)
        return with_merge(attend, merging(of_heads, splits, partial, outputs, ahead=True, column_blocks=columns))
    if not workspace:
        return attend
    ahead = Cost(0, 0, 0, split_reads, workspace, scratch_bytes=workspace, launches=launches - 1)
    return replace(
        attend,
        read_bytes=reads + split_reads,
        write_bytes=attend.write_bytes + workspace,
        scratch_bytes=reads + workspace,
        launches=launches,
        parts=(ahead, replace(attend, workspace_bytes=0)),
    )


def _widener_us(problem: AttentionProblem, config: Config, steps: int, scores: int) -> float:
    """Returns `Cost.widener_us`. Its warps wait for instructions of their own and for those of the softmax."""
    if problem.dtype_kv is None:
        return 0.0
    elements = steps * config.block_n * sum(map(sum, row_pieces(problem, config)))
    of_all = WIDENER_NS[problem.dtype_kv] * elements + WIDENER_NS_OF_SCORE[problem.kv_factors or "head"] * scores
    return of_all * 1e-3 / math.sqrt(config.blocks_per_sm)  # their wideners share issue slots


def _in_step(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether three warpgroups multiply together and take exponentials together instead of alternating. This
    happens with one tile a block, at head sizes where both take equally long: the warpgroups start together, and only
    later tiles would shift them apart (H200: 7 to 20 steps of 1.8 us each; long runs of tiles take 1.3)."""
    tiles = query_tiles(problem, config.block_m, config.heads)
    return config.groups == 3 and problem.head_dim <= 64 and tiles <= gpu.assumed_sms * config.blocks_per_sm


def _loop(problem: AttentionProblem, width_v: int, parts: int) -> str:
    """Returns the name of the loop over key tiles: for several parts, for serial tiles, or for overlapped tiles.
    Overlapped tiles have separate entries for float32 in one part, for masks or biases, and for odd row sizes."""
    if problem.dtype == "float32":
        return "parts" if parts > 1 else "one part"
    if problem.mask_shape is not None or problem.bias_shape is not None:
        return "cells"
    if odd_rows(problem):
        return ODD_ROWS
    return "serial" if width_v > 320 else ""
