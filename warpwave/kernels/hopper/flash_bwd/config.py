"""Problems that `hopper/flash_bwd` supports, its configs, and their shared memory. Holds no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warpwave import precision
from warpwave.gpu import Gpu
from warpwave.kernels import flash_bwd, reasons, rules
from warpwave.kernels.hopper.host import NUM_SMS, bias_bytes, pieces
from warpwave.kernels.prepass import scale_ahead
from warpwave.kernels.rules import Rule
from warpwave.problem import DTYPE_BYTES, AttentionProblem

MAX_HEAD_DIM = 256
ONE_TILE = 128  # columns of a row that the joint launch loads as one piece
# The widest row of the joint launch, and its most columns of dK and dV together if a row has more than ONE_TILE, as
# products cover them. Beside more, dQ and scores do not fit the registers of a warpgroup.
MAX_JOINT, MAX_JOINT_SUM = 192, 320
MAX_SPLIT = 128  # in float32: above it, the parts of a block's tiles do not fit shared memory
# In float32. With 3 keys, and at head_dim 1, an H200 was less accurate than the gates allow (docs/notes/float32.md).
MIN_SPLIT = 8
MIN_SPLIT_ROWS = 64
ABLE = ("fp16x3",)  # the arithmetic of float32
NARROW, NARROWEST = 64, 32
GROUP_ROWS = 64  # rows of a warpgroup's product
SMEM_PER_BLOCK = 227 * 1024
# A split of a group (`group_splits`) or a part of a block (`divided_tail`) has a dK and a dV of its own, float32. To
# write one tile of keys of these and to add it up takes STEPS_OF_SUMMAND / block_m steps, which is 3 TB/s if block_m *
# head_dim is 8,192; the launch that adds takes STEPS_OF_SUM. At the end of a launch, multiprocessors are idle for
# IDLE_AT_END of its longest block. More splits must gain SPLIT_GAIN, because they take memory. Fitted to 27 calls with
# splits on an H200 (2026-11-30-h200-splits-of-groups.json), but for STEPS_OF_SUM, which was not varied.
STEPS_OF_SUMMAND, STEPS_OF_SUM = 2.5, 1
IDLE_AT_END, SPLIT_GAIN = 0.15, 1.006
# The most tiles of keys of dK and dV of all splits: 268 MB at head_dim 128, as dQ's sums of 8 heads of 65,536 tokens.
MOST_TILES_OF_SPLITS = 2048
# A part has at least LEAST_STEPS_OF_PART steps (with four, calls are up to 1.11 times as fast as with eight,
# 2026-11-30-h200-few-blocks.json). Beside them it takes STEPS_OF_PART: K and V must arrive, and dK and dV are stored,
# before another part can begin. The latter was not varied.
LEAST_STEPS_OF_PART, STEPS_OF_PART = 4, 3
PART_GAIN = 1.01  # of a launch; times of equal launches differ as much
# The most waves of parts, which bounds their workspace whatever the call's lengths: 5 NUM_SMS tiles of 128 keys, 87 MB
# at head_dim 128. Timed calls have up to 4.6 waves (2026-11-27-h200-parts-of-blocks.json). Not varied.
MOST_WAVES_OF_PARTS = 5
LEAST_WAVES_TO_ASCEND = 4.5  # of blocks that walk their queries from the first tile on (`ascends`)


@dataclass(frozen=True)
class Config:
    """Tile shape, and how the gradients are divided into launches.

    Args:
        block_m: queries of a step, 64 or 128; in a separate launch of dQ, its keys (`steps_of_dq`).
        num_stages: tiles of Q and of dO in flight (of dO in a joint launch: `stages_of_dout`): at least 1; at least 2
            in separate launches, where a step waits for the next tile before it releases its own.
        is_joint: whether one launch computes dQ, dK and dV, with five products per tile, and adds to dQ in memory
            (turns.py). Otherwise one launch computes dK and dV and another dQ: seven products, and nothing is added
            in memory.
    """

    block_m: int
    num_stages: int
    is_joint: bool = True

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128):
            raise ValueError(f"block_m is {self.block_m}; it must be 64 or 128")
        least = 1 if self.is_joint else 2
        if self.num_stages < least:
            raise ValueError(f"num_stages is {self.num_stages}; it must be at least {least}")

    @property
    def block_n(self) -> int:
        """Returns the keys of a block: those of two warpgroups if one launch computes all gradients, else of one."""
        return 2 * GROUP_ROWS if self.is_joint else GROUP_ROWS


def tile_pieces(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the pieces in which the joint launch loads a row of Q or K, and one of V or dO. The copy engine pads them
    with zeros: to 32, 64 or 128 columns, or to 32 or 64 behind the first 128."""
    widest = max(problem.head_dim, problem.head_dim_v)
    assert widest <= MAX_JOINT

    def pieces_of(dim: int) -> tuple[int, ...]:
        first = next(width for width in (NARROWEST, NARROW, ONE_TILE) if min(widest, ONE_TILE) <= width)
        return (first,) if dim <= ONE_TILE else (first, 32 if dim <= ONE_TILE + 32 else 64)

    return pieces_of(problem.head_dim), pieces_of(problem.head_dim_v)


def product_pieces(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the pieces of columns that products with Q and K, and with V and dO, cover in the joint launch. Where a
    quarter or more of 128 columns are padding, or half of 64, they are left out (`dq_shares` for dQ)."""

    def pieces_of(dim: int, loaded: tuple[int, ...]) -> tuple[int, ...]:
        if dim <= NARROWEST:
            return (NARROWEST,)
        if dim > 96 or loaded[0] < ONE_TILE:
            return loaded
        return (64, 32) if dim > 80 else (64, 16) if dim > NARROW else (64,)

    dims = problem.head_dim, problem.head_dim_v
    of_keys, of_values = (pieces_of(dim, loaded) for dim, loaded in zip(dims, tile_pieces(problem), strict=True))
    return of_keys, of_values


def dq_shares(problem: AttentionProblem, config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the pieces of columns of dQ that each warpgroup of the joint launch computes: in steps of 128 queries,
    all columns of 64 queries; in steps of 64, its share of the columns: half of the first 128, and half of the piece
    behind them. At head_dim 65 to 96 padding is left out; at head_dim 64 or less beside a wider V, the second share is
    padding."""
    if config.block_m == 2 * GROUP_ROWS:
        columns, _ = product_pieces(problem)
        return columns, columns
    if problem.head_dim > ONE_TILE:
        half = tile_pieces(problem)[0][1] // 2
        return (NARROW, half), (NARROW, half)
    end = next((end for end in (80, 96) if NARROW < problem.head_dim <= end), ONE_TILE)
    return (NARROW,), (end - NARROW,)


def dq_columns(problem: AttentionProblem, config: Config) -> int:
    """Returns the columns of a row of dQ's sums."""
    return sum(map(sum, dq_shares(problem, config))) * GROUP_ROWS // config.block_m


def stages_of_dout(problem: AttentionProblem, config: Config) -> int:
    """Returns the tiles of dO in flight: those of Q, or one in a joint launch whose rows have a second piece."""
    return config.num_stages if max(map(len, tile_pieces(problem))) == 1 else 1


def is_broad(problem: AttentionProblem) -> bool:
    """Returns whether a row of Q, K, V or dO has more than 128 columns."""
    return max(problem.head_dim, problem.head_dim_v) > ONE_TILE


def fits_joint(problem: AttentionProblem) -> bool:
    """Returns whether a joint launch computes a call with rows of more than 128 columns: dQ, dK and dV of a tile must
    fit the registers. Masks, softcap and dropout, which take registers too, were not tried; a tile of a bias does not
    fit shared memory."""
    if problem.mask_shape is not None or problem.bias_shape is not None or problem.softcap or problem.dropout_p:
        return False
    widest = max(problem.head_dim, problem.head_dim_v)
    return widest <= MAX_JOINT and sum(map(sum, product_pieces(problem))) <= MAX_JOINT_SUM


def widths(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the columns of tiles of Q and K, and of V and dO, of separate launches."""
    return sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))


def has_few_blocks(problem: AttentionProblem) -> bool:
    """Returns whether a dense call has so few blocks that the joint launch leaves many multiprocessors idle. Launches
    apart, whose blocks have half as many keys, occupy more of them.

    Under a causal mask, the longest block sets the time of one wave. Without a mask, at most half a wave of blocks is
    too few, if they are too short to divide (`divided_tail`).
    """
    if problem.packed or problem.num_heads_q != problem.num_heads_kv or problem.window_size != (-1, -1):
        return False
    if problem.seqlen_q != problem.seqlen_k:
        return False
    blocks = key_blocks(problem, 2 * GROUP_ROWS)
    if problem.has_band:
        return blocks <= NUM_SMS
    return 2 * blocks <= NUM_SMS and divided_tail(problem, Config(GROUP_ROWS, 2))[1] == 1


GRADIENTS_LOG = "2026-11-23-h200-gradients.log"
APART = Config(128, 2, is_joint=False)

# A row lists all configs of a call, the default first.
RULES: tuple[Rule[Config], ...] = (
    Rule(
        "float32",
        lambda problem: problem.dtype == "float32",
        (Config(64, 2, is_joint=False),),
        "not measured; parts of wider tiles do not fit shared memory at head_dim 128",
    ),
    Rule(
        "head_dim above 128, dense, as many keys as queries, no groups of heads, no window; a causal mask and at most "
        "132 blocks of 128 keys; or no mask and at most 66 blocks, too short to divide",
        lambda problem: is_broad(problem) and fits_joint(problem) and has_few_blocks(problem),
        (Config(64, 2, is_joint=False), Config(64, 2)),
        "launches apart have blocks of 64 keys: causal 1.14 to 1.18 times as fast in nine calls, full 1.10 to 1.18 in "
        "six; with up to twice as many blocks causal 0.86 to 1.11 in six, full 0.82 to 1.05 in five",
        "2026-11-30-h200-few-blocks.json",
    ),
    Rule(
        "head_dim above 128, dK and dV fit the registers",
        lambda problem: is_broad(problem) and fits_joint(problem),
        (Config(64, 2), Config(64, 2, is_joint=False)),
        "192/128 and 160: 1.05 to 1.28 times as fast as launches apart, with grouped heads under a causal mask 1.08 "
        "to 1.22 (2026-11-27-h200-heads-of-a-tile.json); others, and grouped heads with a window, not measured",
        "2026-11-27-h100-broad-gradients.json",
    ),
    Rule(
        "head_dim above 128",
        is_broad,
        (Config(64, 2, is_joint=False),),
        "not measured; dQ, dK and dV of a tile do not fit the registers of two warpgroups, or were not tried there "
        "with a mask, a softcap or dropout",
    ),
    Rule(
        "a float32 bias of each score",
        lambda problem: bias_bytes(problem) == 4,
        (APART,),
        "not measured; its tiles do not fit shared memory beside those of the joint launch",
    ),
    Rule(
        "head_dim up to 64",
        lambda problem: tile_pieces(problem)[0][0] <= NARROW,
        (Config(128, 2), APART),
        "a third stage fits Q alone: 0.97 to 1.00 times as fast",
        GRADIENTS_LOG,
    ),
    Rule(
        "head_dim 65 to 128, a bias of each score",
        lambda problem: bias_bytes(problem) > 0,
        (Config(64, 2), APART),
        "a tile of the bias takes the place of a third stage; 1.40 times as fast as launches apart",
        "2026-11-26-h200-masks-biases.log",
    ),
    Rule(
        "head_dim 65 to 128",
        lambda problem: True,
        (Config(64, 3), APART),
        "1.02 to 1.05 times as fast as two stages",
        GRADIENTS_LOG,
    ),
)
rule_of = rules.chooser(RULES, lambda problem, gpu: problem)


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """Returns the configs of a call, the default first."""
    return list(rule_of(problem, gpu).choices)


def default(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config with which gradients are computed."""
    return rule_of(problem, gpu).choices[0]


def config_of_bias(problem: AttentionProblem, gpu: Gpu) -> Config:
    """Returns the config that computes the gradient of a bias, or of ALiBi's slopes: launches apart."""
    return next(config for config in rule_of(problem, gpu).choices if not config.is_joint)


def notes(problem: AttentionProblem, gpu: Gpu, config: Config) -> list[str]:
    """Returns what `explain` prints about a config: the row that chose it."""
    return rules.notes([rule_of(problem, gpu)], config == default(problem, gpu))


def why_not(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason the kernel cannot compute the problem's gradients; empty if it can."""
    found = reasons.of_hopper(gpu)
    if problem.dtype == "float32":
        return found + _against_float32(problem, gpu)
    found += reasons.of_widths(problem, MAX_HEAD_DIM, f"dK must fit the registers, {MAX_HEAD_DIM} at most")
    found += _of_empty(problem)
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 8:
            found.append(f"{name} is {size}; rows copied by TMA are a multiple of 16 bytes, so it must be one of 8")
    return found


LARGEST_GROUP = 4  # query heads of a kv head that a block of flash_bwd may walk while other SMs are idle


def outrun(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why `flash_bwd` is faster: one tile of its joint launch holds a sequence, or all of its queries or keys.

    Times of this kernel over those of that launch on an H200, in 40 calls (2026-11-29-h200-joint-gradients.json): 3 to
    18 with up to 16 queries and keys, 2.6 to 6.3 with up to 32, 1.1 to 5 with up to 64, least at head_dim 256, 1.1 to
    2.4 with 16 to 64 queries on 77 to 128 keys, 1.3 with 128 x 128 and padding. Without a mask, 128 x 128 is 0.85 to
    1.6. In float32 1.9 to 2.6 with 64 tokens, in three calls (2026-11-29-h200-float32-masks.json). If the tile holds
    one side, the rows of its table have the times.

    A block of that launch walks all query heads of its kv head. With 8 and 16 of them and 256 blocks or more it is 1.1
    to 5.3 times as fast; 0.6 is predicted for one sequence of 64 with 64 query heads on one kv head.
    """
    config = flash_bwd.default(problem, gpu)
    if config is None or not config.joint:
        return []
    tile = f"{config.dq.block_m} x {config.dq.block_n}"
    if walked := flash_bwd.walked_of(problem, config):
        held = "queries" if walked == "keys" else "keys"
        return [f"a tile of {tile} holds all {held}: flash_bwd's joint launch is 1.05 to 5.8 times as fast"]
    is_wide = problem.num_heads_q > LARGEST_GROUP * problem.num_heads_kv
    is_idle = is_wide and problem.batch * problem.num_heads_kv < NUM_SMS
    if is_idle:
        return []
    return [f"a tile of {tile} holds a sequence: flash_bwd's joint launch is 1.1 to 18 times as fast"]


def _against_float32(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason the kernel cannot compute the gradients of a float32 problem on a Hopper GPU."""
    found = reasons.of_widths(
        problem, MAX_SPLIT, f"in float32, two parts of a tile must fit shared memory, {MAX_SPLIT} at most"
    )
    sizes = (
        *(("head_dim", problem.head_dim, MIN_SPLIT), ("head_dim_v", problem.head_dim_v, MIN_SPLIT)),
        *(("seqlen_q", problem.seqlen_q, MIN_SPLIT_ROWS), ("seqlen_k", problem.seqlen_k, MIN_SPLIT_ROWS)),
    )
    found += [
        f"{name} is {size}; in float32, smaller ones are not accurate enough, {least} at least"
        for name, size, least in sizes
        if 0 < size < least
    ]
    # The log-sum-exp must be that of logits as accurate as its own, whichever forward kernel made it: those of
    # Hopper's own parts differ by 2^-11 with one part, and a named portable kernel's by 2^-16 with bf16x3.
    of_forwards = [precision.arithmetic(problem, gpu, able) for able in (tuple(scale_ahead.PARTS), precision.PORTABLE)]
    bits = {name: precision.ARITHMETICS[name].significant_bits for name in (*of_forwards, *ABLE)}
    if of_forwards[0] not in ABLE or bits[of_forwards[1]] < bits[ABLE[0]]:
        given = problem.precision if problem.error_budget is None else problem.error_budget
        names = " or ".join(dict.fromkeys(of_forwards))
        found.append(f"precision {given!r} is {names} here; its float32 products are {ABLE[0]}")
    found += precision.why_not(problem, gpu, ABLE)
    others = {
        "a bias": problem.bias_shape is not None,
        "softcap": problem.softcap > 0,
        "sinks": problem.has_sinks,
    }
    found += [f"in float32 it does not support {name}" for name, there in others.items() if there]
    found += reasons.of_float32_masks(problem)
    return found + _of_empty(problem)


def _of_empty(problem: AttentionProblem) -> list[str]:
    """Returns the reason of a kernel that launches nothing if there are no queries or no keys."""
    if 0 in (problem.rows, problem.batch, problem.total_k if problem.packed else problem.seqlen_k):
        return ["there are no queries or no keys, so nothing to launch"]
    return []


def has_hidden_rows(problem: AttentionProblem) -> bool:
    """Returns whether a query or key may see nothing, whose gradients no block writes."""
    if problem.packed:
        return True
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    rows = problem.seqlen_q - max(0, -(band.high or 0) if band.high is not None else 0)
    hides_queries = rows < problem.seqlen_q or (
        band.low is not None and problem.seqlen_k - band.low < problem.seqlen_q
    )  # fmt: skip
    return hides_queries or band.keys_seen(problem.seqlen_q, problem.seqlen_k) < problem.seqlen_k


def divided_tail(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Returns how many blocks of a launch that owns keys are whole, and into how many parts each later one is divided:
    all blocks and 1 if none is.

    Without a band all blocks are equally long and run in waves of NUM_SMS, the last of which leaves multiprocessors
    idle. Its blocks are therefore divided: each part walks some of a block's steps, all heads of a tile before the next
    tile. A part has a dK and a dV of its own, float32, as splits have (`group_splits`). Long calls would be divided
    into many parts, so that the last wave of parts is full too, and write more of them than of dK and dV. Parts
    therefore run in at most MOST_WAVES_OF_PARTS waves. Divided are blocks of the joint launch; those of separate
    launches were not tried. The numbers depend on the call alone, as there.
    """
    blocks = scheduled_blocks(problem, config)
    if not divides_steps(problem, config) or blocks % NUM_SMS == 0:
        return blocks, 1
    steps = problem.num_heads_q // problem.num_heads_kv * -(-problem.seqlen_q // config.block_m)
    rest = blocks % NUM_SMS
    whole = blocks - rest

    def time(parts: int) -> float:
        """Of the last wave, in steps."""
        return -(-rest * parts // NUM_SMS) * (steps / parts + STEPS_OF_PART) + steps_of_sums(parts, rest, config)

    most = min(steps // LEAST_STEPS_OF_PART, MOST_WAVES_OF_PARTS * NUM_SMS // rest)
    best = min(range(1, max(1, most) + 1), key=time)
    before = whole // NUM_SMS * (steps + STEPS_OF_PART)
    return (whole, best) if PART_GAIN * (before + time(best)) <= before + time(1) else (blocks, 1)


def steps_of_sums(summands: int, blocks: int, config: Config) -> float:
    """Returns the steps that it takes to write several dK and dV for each of some blocks, and to add them up."""
    return 0.0 if summands == 1 else STEPS_OF_SUM + STEPS_OF_SUMMAND * summands * blocks / config.block_m


def divides_steps(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether blocks that run in an incomplete wave are divided by their steps (`divided_tail`)."""
    return config.is_joint and not (problem.packed or problem.has_band or problem.mask_shape is not None)


def ascends(problem: AttentionProblem, config: Config) -> bool:
    """Returns whether blocks of the joint launch walk their queries from the first tile to the last, those of the last
    keys first, so that none waits for its turn (turns.py).

    One or two blocks may see the first tile; if more do, they begin together, and wait. Under a causal mask the longest
    blocks then come last, and leave multiprocessors idle at the end for half of their time in the mean. With grouped
    heads they are g times as long, and turns cost little, because a block adds to another head's sums before it adds to
    the next tile's. In 19 calls of 4.8 to 11.6 waves this order is 0.97 to 1.10 times as fast as the other, 1.02 in
    the mean, and in four of 3.9 waves 0.95 to 0.96 (2026-11-30-h200-deterministic-waves.json).
    """
    if not problem.deterministic or problem.mask_shape is not None or is_broad(problem):
        return False
    high = problem.band(problem.seqlen_q, problem.seqlen_k).high
    has_groups = problem.num_heads_q > problem.num_heads_kv
    is_long = key_blocks(problem, config.block_n) >= LEAST_WAVES_TO_ASCEND * NUM_SMS
    return high is not None and high < config.block_n and is_long and not has_groups


def group_splits(problem: AttentionProblem, config: Config) -> int:
    """Returns by how many blocks the query heads of a tile of keys are divided.

    A block that walks all heads of a group adds up their dK and dV at once, but few kv heads then make few and long
    blocks: 8 query heads on 1 kv head of 8,192 keys are 64 blocks for 132 multiprocessors. Each split has a dK and a dV
    of its own, float32, because rounding each would make the error up to 1.4 times as large. One launch adds them up
    (sum_splits.py). Splits need not divide the heads (`steps.heads_of`). Under a mask there is one split, because its
    lists of steps are those of whole groups. Where `divides_steps` holds there is one too. The number depends on the
    call alone, not on the GPU, so that bits do not either.

    The splits chosen take 1.010 times as long as the best ones in 26 calls of the fit, in the geometric mean, and 1.09
    times at most, in a window. The number chosen for the last call was not timed.
    """
    group = problem.num_heads_q // problem.num_heads_kv
    if group == 1 or problem.mask_shape is not None or divides_steps(problem, config):
        return 1
    blocks = key_blocks(problem, config.block_n)
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    longest = problem.seqlen_q  # block, in queries of a head
    if band.low is not None and band.high is not None:
        longest = max(1, min(longest, band.high - band.low + config.block_n))
    # The mean block's part of the longest one.
    if problem.packed:
        is_triangle = band.high is not None and band.low is None
        filled = min(1.0, problem.total_q / (problem.batch * longest)) / (2 if is_triangle else 1)
    else:
        filled = band.pairs(problem.seqlen_q, problem.seqlen_k) / (problem.seqlen_k * longest)
    tiles = -(-longest // config.block_m)

    def time(splits: int) -> float:
        """In steps: blocks of one length run in waves, others fill gaps."""
        steps = -(-group // splits) * tiles  # of the longest block
        of_splits = steps_of_sums(splits, blocks, config)
        if filled > 0.99:
            return -(-blocks * splits // NUM_SMS) * steps + of_splits
        mean = blocks * filled * group * tiles / NUM_SMS
        return max(mean + IDLE_AT_END * steps, steps) + of_splits

    most = max(1, MOST_TILES_OF_SPLITS // blocks)
    times = {splits: time(splits) for splits in numbers_of_splits(group) if splits <= most}
    least = min(times.values())
    return next(splits for splits, steps in times.items() if steps <= SPLIT_GAIN * least)


def numbers_of_splits(group: int) -> Iterator[int]:
    """Yields the numbers of splits in whose largest split there are fewer heads than in that of any smaller number."""
    splits = 1
    while True:
        yield splits
        largest = -(-group // splits)
        if largest == 1:
            return
        splits = -(-group // (largest - 1))


def scheduled_blocks(problem: AttentionProblem, config: Config) -> int:
    """Returns the blocks of a launch that owns keys: each tile of keys, as often as its query heads are divided."""
    return group_splits(problem, config) * key_blocks(problem, config.block_n)


def key_blocks(problem: AttentionProblem, block_n: int) -> int:
    """Returns the tiles of keys of all kv heads and sequences."""
    if problem.packed:
        return (problem.total_k // block_n + problem.batch) * problem.num_heads_kv
    return -(-problem.seqlen_k // block_n) * problem.batch * problem.num_heads_kv


def steps_of_dq(problem: AttentionProblem, config: Config, bias_bytes: int) -> tuple[int, int]:
    """Returns the keys of a step in the launch of dQ: block_m, or fewer if tiles of a bias take its shared memory; and
    the number of tiles of V in flight: that of K, or one if no more fit.

    Args:
        bias_bytes: of a score (`host.bias_bytes`).
    """
    # A softcap's derivative and dS of 128 keys do not fit the registers: 792 bytes spilled at head_dim 128.
    keys = GROUP_ROWS if bias_bytes and problem.softcap > 0 else config.block_m
    while smem_of_dq(problem, config, (keys, 1), bias_bytes) > SMEM_PER_BLOCK:
        keys //= 2
    fits = smem_of_dq(problem, config, (keys, config.num_stages), bias_bytes) <= SMEM_PER_BLOCK
    return keys, config.num_stages if fits else 1


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Returns the largest shared memory of a block of any launch."""
    size = DTYPE_BYTES[problem.dtype]
    if config.is_joint:
        of_keys, of_values = map(sum, tile_pieces(problem))
        keys = config.block_n * (of_keys + of_values) * size
        queries = config.num_stages * config.block_m * (of_keys * size + 4)
        dout = stages_of_dout(problem, config) * config.block_m * (of_values * size + 4)
        ds = 2 * config.block_n * config.block_m * size
        dq = 4 * 2 * GROUP_ROWS * sum(dq_shares(problem, config)[0])  # the second group's share may be narrower
        bias = config.block_m * config.block_n * bias_bytes(problem)
        # Barriers and the arguments of warps: up to 992 bytes beside tiles of 128 queries, 1,040 beside 64 (compiled).
        rest = 1024 if config.block_m == 128 else 1152
        return keys + queries + dout + ds + dq + bias + rest
    cell = bias_bytes(problem)
    return max(smem_of_dkv(problem, config), smem_of_dq(problem, config, steps_of_dq(problem, config, cell), cell))


def smem_of_dkv(problem: AttentionProblem, config: Config) -> int:
    """Returns the shared memory of a block of the launch of dK and dV."""
    size, both = DTYPE_BYTES[problem.dtype], sum(widths(problem))
    stream = config.num_stages * config.block_m * (both * size + 8)
    return GROUP_ROWS * both * size + stream + 2 * GROUP_ROWS * config.block_m * 4 + 1024


def smem_of_dq(problem: AttentionProblem, config: Config, steps: tuple[int, int], bias_bytes: int) -> int:
    """Returns the shared memory of a block of the launch of dQ (`steps_of_dq`)."""
    (of_keys, of_values), (keys, stages_v), rows = widths(problem), steps, 2 * GROUP_ROWS
    streamed = keys * (config.num_stages * of_keys + stages_v * of_values)
    of_bias = config.num_stages * rows * keys * bias_bytes
    return (rows * (of_keys + of_values) + streamed) * DTYPE_BYTES[problem.dtype] + of_bias + 1024
