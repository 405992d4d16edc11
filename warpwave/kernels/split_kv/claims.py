"""What `split_kv` can run, and for which calls `auto` leaves it to another kernel."""

from __future__ import annotations

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import reasons
from warpwave.kernels.arguments import padded
from warpwave.kernels.hopper.split_tiles import FEWEST_ROWS, can_split, hides_keys, outruns_split_kv
from warpwave.kernels.split_kv.choice import (
    LARGEST_TILE,
    default,
    fitting,
    smallest_smem_bytes,
    tile_of_sequence,
)
from warpwave.kernels.split_kv.config import Config, is_launched_ahead, longest_steps
from warpwave.kernels.split_kv.splits import blocks_with_rows
from warpwave.problem import AttentionProblem, by_kind

MAX_HEAD_DIM = 256


@by_kind
def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason this kernel cannot run the problem on this GPU; empty if it can."""
    found = [*reasons.of_device(gpu), *reasons.of_gradients(problem), *reasons.of_dropout(problem)]
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"a row of K or V must fit one tile: at most {MAX_HEAD_DIM}")
    found += reasons.of_pages(problem)
    found += reasons.of_float8(gpu) if problem.dtype_of_k == "float8_e4m3fn" else []
    found += precision.why_not(problem, gpu)
    if not found and not fitting(problem, gpu):
        found.append(reasons.of_shared_memory(smallest_smem_bytes(problem, gpu), gpu))
    return found


FEW_QUERIES = 16  # of a sequence: a tile of queries would be mostly empty
FEWEST_KEYS = 64  # one tile of keys: nothing to split, and no bandwidth needed
# Of a prompt: the fewest at which splitting was measured to be faster, and the most in float32. In 16 bits, with more
# only few tiles of rows are split.
KEYS = (256, 1024)
MOST_ROWS = 64  # of a tile
OF_HOPPER = "hopper/flash_fwd is faster with enough rows and keys: it splits keys too, and its products are faster"
TINY = (1, 128)  # of a prompt whose tiles of rows all run at once: the fewest and the most
# Fewest splits, and SMs for each tile of rows, with which prefill gains: with fewer, tiles of queries alone nearly fill
# the GPU. In float32 smaller tiles lose more against a kernel that makes parts ahead; measured with 16.
FEWEST_SPLITS, FEWEST_SPLITS_FLOAT32 = 4, 8
# Two splits gain too, if a tile of rows sees LONG keys, with up to so many tiles an SM: measured on Hopper up to
# head_dim 128, and predicted on other cards, where tiles of flash_fwd have 128 rows (docs/notes/serving.md).
MOST_TILES_ON_HOPPER, MOST_TILES, LONG = 1 / 2, 2 / 3, 2048


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why kernels with one block per tile of queries are faster; empty if `auto` should split keys instead.

    On Hopper, `auto` leaves calls of enough rows and keys to hopper/flash_fwd (`split_tiles.outruns_split_kv` has the
    figures). The records below are older than its splits.

    Measured in CUDA graphs on an H200 (2026-11-21): decode is 2.0 to 7.6 times as fast as with hopper/flash_fwd; one
    head of 512 queries and keys in 8 splits is 1.41 times as fast as with flash_fwd, of 256 in 4 splits 1.07.

    Of 44 calls with 4 splits or more of 256 to 1,024 keys, those with at most 33 tiles of rows, a quarter of the SMs,
    were 1.35 times as fast as with hopper/flash_fwd in the geometric mean (0.77 to 2.57), and those with more 0.57
    times (0.24 to 1.08; 2026-11-26-h100-splits-of-prompts.log). On more keys, 36 calls with few tiles were 1.00 to 8.4
    times as fast, 1.95 in the geometric mean, with masks, biases and packed sequences too; at head_dim 192 and 256,
    tiles for half of the SMs 0.88 to 1.14 times (2026-11-29-h200-few-tiles-of-rows.json). Other cards are predicted.

    Prompts of 128 and 64 keys, and 32 heads of 128, head_dim 64, are not worth splitting; they were 1.30, 1.18 and 1.15
    times as fast (a day later), because one step covers all keys and launches start before the preceding ones end;
    otherwise 0.89 to 0.95. One head of 4, 16, 32 and 48: 1.24, 1.38, 1.48 and 1.83 us, with flash_fwd 2.13, 2.43, 2.47
    and 2.53.

    Many sequences that fit one tile of 16 x 16 or 32 x 32 were 1.07 to 3.2 times as fast as with tiles of 64 x 64 by
    hopper/flash_fwd in 17 calls (2026-11-29-h200-short-sequences.jsonl). Packed ones of up to 64 tokens, of different
    lengths, were 1.36 to 1.93 times as fast in eleven, and of up to 16 tokens 3.9 and 5.3 times
    (2026-11-29-h200-packed-short-sequences.json).

    In float32, one head of 512 takes 11.2 us by default, 8.1 as tf32 and 11.6 as ieee; with hopper/flash_fwd, which
    makes parts first, 14.6 and 10.2; with flash_fwd 26.5, 20.9 and 110.
    """
    if problem.page_size:  # no later kernel is faster from pages; hopper/flash_fwd comes before this one
        return []
    if problem.seqlen_q <= FEW_QUERIES and problem.seqlen_k > FEWEST_KEYS:
        if problem.seqlen_q * problem.num_heads_q < FEWEST_ROWS * problem.num_heads_kv:
            return []  # most calls of few queries end here
        return [OF_HOPPER] if _is_of_hopper(problem, gpu) else []
    if problem.seqlen_k <= LARGEST_TILE and tile_of_sequence(problem, gpu) is not None:
        return []
    queries = "1 query" if problem.seqlen_q == 1 else f"{problem.seqlen_q} queries"
    asked = f"{queries} and {problem.seqlen_k} key{'s' * (problem.seqlen_k != 1)} a sequence"
    keys = f"{KEYS[0]} to {KEYS[1]} keys" if problem.dtype == "float32" else f"{KEYS[0]} keys or more"
    outside = [f"{asked}; faster at {FEW_QUERIES} queries or fewer, and if few tiles of rows see {keys}"]
    if problem.seqlen_q <= FEW_QUERIES:
        outside = [f"{asked}: a tile has up to {FEWEST_KEYS} keys, so there is nothing to split"]
    is_long, sms = problem.seqlen_k > KEYS[1], gpu.assumed_sms
    if is_long:
        rows = (problem.total_q if problem.packed else problem.batch * problem.seqlen_q) * problem.num_heads_q
        if rows > MOST_TILES * MOST_ROWS * sms or problem.dtype == "float32" or problem.is_quantized:
            return outside  # most long prompts end here, without computing a config
    if problem.seqlen_k < TINY[0]:
        return outside
    if _is_of_hopper(problem, gpu):
        return [OF_HOPPER]
    config = default(problem, gpu)
    if _tiny(problem, gpu, config):
        return []
    if problem.seqlen_k < KEYS[0]:
        return [] if _between(problem, gpu, config) else outside
    fewest = FEWEST_SPLITS_FLOAT32 if problem.dtype == "float32" else FEWEST_SPLITS
    tiles = blocks_with_rows(problem, config)
    splits = min(config.num_splits, sms // tiles)
    if splits >= fewest or (is_long and _gains_by_two(problem, gpu, config, tiles)):
        return []
    given = f"num_splits = {config.num_splits}, and {tiles} tiles of rows leave each {sms // tiles} of {sms} SMs"
    return [f"{asked} would give {given}; splitting is faster if both are at least {fewest}"]


def _is_of_hopper(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Returns whether hopper/flash_fwd runs a call and is faster. The rule does not know which keys position hides, so
    such calls stay here."""
    is_able = (
        gpu.vendor == "nvidia"
        and gpu.capability == 90
        and can_split(problem)
        and problem.head_dim % 8 == problem.head_dim_v % 8 == 0
    )
    return is_able and not hides_keys(problem) and outruns_split_kv(problem, gpu)


def _gains_by_two(problem: AttentionProblem, gpu: Gpu, config: Config, tiles: int) -> bool:
    """Returns whether two splits of a prompt's keys suffice to gain, with so many tiles of rows."""
    is_plain = problem.mask_shape is None and problem.bias_shape is None
    if not is_plain or config.num_splits < 2 or longest_steps(problem, config) * config.block_n < LONG:
        return False
    if gpu.capability != 90:
        return tiles <= MOST_TILES * gpu.assumed_sms
    return (
        tiles <= MOST_TILES_ON_HOPPER * gpu.assumed_sms
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 128
    )


def _between(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a prompt, longer than one step and too short to split, is bound by how soon its launch starts.

    Measured: one head of 160, 192 and 224 keys 1.12 to 1.21 times as fast as with flash_fwd, 32 heads 1.12, 64 heads
    1.08, 128 heads 0.91; 16 heads of 128 columns 1.08 (H200, 2026-11-22).
    """
    return (
        TINY[1] < problem.seqlen_k == problem.seqlen_q
        and problem.dtype != "float32"
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 128
        and problem.mask_shape is None
        and problem.bias_shape is None
        and not problem.packed
        and gpu.capability == 90
        and is_launched_ahead(gpu, config)
        and blocks_with_rows(problem, config) <= 1.5 * gpu.assumed_sms
    )


def _tiny(problem: AttentionProblem, gpu: Gpu, config: Config) -> bool:
    """Returns whether a prompt is bound by how soon its one wave of blocks starts, within the measured range."""
    return (
        problem.seqlen_q <= problem.seqlen_k
        and (problem.seqlen_q > FEW_QUERIES or problem.seqlen_q == problem.seqlen_k)
        and TINY[0] <= problem.seqlen_k <= TINY[1]
        and problem.dtype != "float32"
        and max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 64
        and problem.mask_shape is None
        and problem.bias_shape is None
        and gpu.capability == 90
        and is_launched_ahead(gpu, config)
        and blocks_with_rows(problem, config) <= gpu.assumed_sms
    )
