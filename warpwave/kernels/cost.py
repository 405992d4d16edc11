"""`Cost`: the bytes that a kernel moves and the operations that it computes for one problem, per resource."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from warpwave import precision
from warpwave.gpu import Gpu, reads_shared_memory
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Band


@dataclass(frozen=True)
class Cost:
    """Work of one launch, padding and re-reads included; `AttentionProblem` has the compulsory part.

    Args:
        blocks: thread blocks (programs) launched.
        flops: multiplications and additions of the products over every tile computed.
        exponentials: over every tile computed.
        read_bytes: bytes requested from L2 or memory, each tile counted each time it is read.
        write_bytes: bytes written.
        smem_bytes: shared memory one block needs, an upper bound before compiling; 0 if the kernel uses none.
        workspace_bytes: device memory allocated in addition to the outputs.

    The other fields are for `warpwave.workbench.model.predict`; 0 if a kernel does not state them.
        loop: name of the loop, if a kernel has several; each has its own constants.
        smem_margin: the part of `smem_bytes` that the compiler may use, but mostly does not.
        operand_bytes: read from shared memory by multiply-adds; operands of matrix units are not counted.
        conversions: elements of operands that a loop converts to parts of float32 numbers; each part is counted, once
            for every thread that holds the same element.
        widener_us: time of all SMs together for which a role of blocks converts 8-bit tiles beside the products.
        items: tiles of the output that blocks process, if a block draws several; 0: one a block.
        steps: tiles of keys processed, over all blocks.
        longest: steps of the longest item; 0: all items have the same number.
        divided, last_parts: how many items, the last ones, are divided, and into how many parts each.
        order: for items that differ and are not in longest-first order: for each sequence, the steps of consecutive
            items, and how often that repeats (`launch_order`).
        cut: the part of `steps` whose scores are masked, because an edge of the mask or the end of the keys cuts the
            tile.
        trips: dependent loads and stores of a block without steps; of other blocks, those before the first step.
        far: fraction of the additional latency of memory that each step waits for, because few tiles are in flight.
        block_us: time of an SM for each block without steps, if blocks are many and small.
        threads: threads of a block.
        registers: registers of a thread, as estimated before compiling.
        compiled: whether `registers` and `smem_bytes` are the compiler's figures instead.
        chains: independent instruction streams of a block that hide each other's latency.
        blocks_per_sm: as the kernel launches them; 0: as many as fit.
        scratch_bytes: the part of `read_bytes` and `write_bytes` that accesses the workspace.
        repeated_flops, repeated_exponentials: the part of `flops` and `exponentials` that computes scores again, which
            another launch or an earlier walk has computed.
        added_bytes: the part of `write_bytes` that blocks add to sums in L2.
        first_bytes: of one of several launches: inputs and outputs that it touches, each byte once; 0: its share of the
            call's compulsory bytes.
        walked_bytes, walked_heads: bytes that all blocks of a head walk, and the number of such heads; 0: K and V.
        launches: kernels launched, one after another.
        ahead: whether they start while the preceding launch in the stream ends.
        parts: the costs of the launches, if they differ.
    """

    blocks: int
    flops: int
    exponentials: int
    read_bytes: int
    write_bytes: int
    smem_bytes: int = 0
    workspace_bytes: int = 0
    loop: str = ""
    smem_margin: int = 0
    operand_bytes: int = 0
    conversions: int = 0
    widener_us: float = 0.0
    items: int = 0
    steps: int = 0
    longest: int = 0
    divided: int = 0
    last_parts: int = 1
    order: tuple[tuple[tuple[int, ...], int], ...] = ()
    cut: int = 0
    trips: int = 0
    far: float = 0.0
    block_us: float = 0.0
    threads: int = 0
    registers: int = 0
    compiled: bool = False
    chains: int = 1
    blocks_per_sm: int = 0
    scratch_bytes: int = 0
    repeated_flops: int = 0
    repeated_exponentials: int = 0
    added_bytes: int = 0
    first_bytes: int = 0
    walked_bytes: int = 0
    walked_heads: int = 0
    launches: int = 1
    ahead: bool = False
    parts: tuple[Cost, ...] = ()


def in_turn(parts: Sequence[Cost], workspace_bytes: int, loop: str = "") -> Cost:
    """Returns the total cost of launches that run one after another.

    Args:
        loop: that of the first part that has one, if empty.
    """
    return Cost(
        **{name: sum(getattr(part, name) for part in parts) for name in SUMMED},
        smem_bytes=max(part.smem_bytes for part in parts),
        workspace_bytes=workspace_bytes,
        loop=loop or next((part.loop for part in parts if part.loop), ""),
        launches=sum(part.launches for part in parts),
        parts=tuple(parts),
    )


SUMMED = (
    *("blocks", "flops", "exponentials", "read_bytes", "write_bytes", "steps", "scratch_bytes"),
    *("repeated_flops", "repeated_exponentials", "added_bytes"),
)

# Parts of an operand, by the arithmetic's name in warpwave.precision; other arithmetic uses operands unchanged.
PARTS = {"tf32": 1, "tf32x3": 2, "bf16x3": 2, "bf16x6": 3}


def conversions(problem: AttentionProblem, gpu: Gpu, elements: int, block_m: int, num_warps: int) -> int:
    """Returns `Cost.conversions` of a loop that splits `elements` elements of operands, with tiles of `block_m` rows.

    In registers, warps that share rows or columns of a product hold the same elements: half of the warps split each
    element (F2FP counted on sm_90).
    """
    parts = PARTS.get(precision.arithmetic(problem, gpu), 0) if problem.dtype == "float32" else 0
    return parts * elements * (1 if reads_shared_memory(gpu, block_m) else max(1, num_warps // 2))


def multiply_add_bytes(products: Iterable[tuple[int, int, int]], threads: int) -> float:
    """Returns the bytes that multiply-adds of one step read from shared memory, for `Cost.operand_bytes`: a thread with
    n elements of a roughly square tile reads two operands of sqrt(n) each for every n multiply-adds.

    Args:
        products: (rows, columns, length of the sum) of each product of the step.
        threads: threads of the block.
    """
    total = 0.0
    for rows, columns, length in products:
        elements = rows * columns
        total += elements * length * 4 * 2 / math.sqrt(max(1, elements // threads))
    return total


# Time of an SM for each warp of many small blocks, whatever they do: 0.080 to 0.083 for blocks of 1, 2 and 4 warps
# (H200).
WARP_US = 0.08


def merging(
    rows: int, parts: int, read_bytes: int, write_bytes: int, ahead: bool = False, column_blocks: int = 1
) -> Cost:
    """Returns the cost of the launch that merges partial results (`partials.merge_partials_kernel`), `column_blocks`
    blocks for each row of each head. Blocks this small take a fixed time of an SM each, whatever they read: measured
    for 512 to 12,288 rows of 2 to 8 parts on an H200. Blocks that divide the columns of a row divide that time."""
    return Cost(
        blocks=rows * column_blocks,
        flops=0,
        exponentials=rows * column_blocks * parts,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        threads=64,
        registers=32,
        scratch_bytes=read_bytes,
        trips=1,
        block_us=max(2 * WARP_US, (0.05 + 0.035 * parts) / column_blocks),
        ahead=ahead,
    )


def with_merge(main: Cost, merge: Cost) -> Cost:
    """Returns the cost of two launches, the second of which merges what the first writes (`merging`)."""
    return replace(
        main,
        exponentials=main.exponentials + merge.exponentials,
        read_bytes=main.read_bytes + merge.read_bytes,
        write_bytes=main.write_bytes + merge.write_bytes,
        scratch_bytes=main.scratch_bytes + merge.scratch_bytes,
        launches=2,
        parts=(main, merge),
    )


ODD_ROWS = "odd rows"


def bytes_per_score(problem: AttentionProblem) -> int:
    """Returns the bytes of mask and bias that a kernel reads for each score."""
    mask = 0 if problem.mask_shape is None else 1
    return mask + (0 if problem.bias_shape is None else DTYPE_BYTES[problem.bias_dtype or problem.dtype])


def odd_rows(problem: AttentionProblem) -> bool:
    """Returns whether some rows of a 16-bit or 8-bit tensor do not start at multiples of 32 bytes, so that pointer
    loads are narrower."""
    widths = ((problem.head_dim, problem.dtype), (problem.head_dim_v, problem.dtype_of_v))
    return problem.dtype != "float32" and any(width * DTYPE_BYTES[dtype] % 32 for width, dtype in widths)


def waits_for_memory(num_stages: int) -> float:
    """Returns `Cost.far` of a loop that prefetches tiles of keys: with two stages each step waits (0.3 to 0.5 us on an
    H200, for head sizes of 128 to 1024), with three hardly any."""
    return 1 / max(1, num_stages - 1) ** 2


class Walk(NamedTuple):
    """The tiles of a problem that kernels visit, counted on the host.

    Attributes:
        tiles: (query tile, key tile) pairs that position does not hide entirely, over all heads and sequences.
        longest: key tiles of the query tile that has most.
        items: query tiles that have any, over all heads and sequences.
        cut: the pairs in which position or the end of the keys hides something.
    """

    tiles: int
    longest: int
    items: int
    cut: int


def walk_by_keys(problem: AttentionProblem, block_m: int, block_n: int) -> Walk:
    """Counts the tiles that blocks visit which own `block_n` keys of a kv head and walk queries, `block_m` a step.

    Returns:
        A `Walk` with rows and keys exchanged: items are tiles of keys, and the longest walks the queries of all heads
        that read its keys. Where splits stand for kv heads (hopper/flash_bwd/costs.py), some may have one query head
        fewer than others; the longest has the most.
    """
    tiles = longest = items = cut = 0
    for (seqlen_q, seqlen_k), times in problem.counted_items().items():
        found = _count(_by_keys(problem, seqlen_q, seqlen_k, block_m, block_n))
        tiles, cut, items = tiles + times * found.tiles, cut + times * found.cut, items + times * found.items
        longest = max(longest, found.longest)
    group = -(-problem.num_heads_q // problem.num_heads_kv)
    return Walk(tiles * problem.num_heads_q, longest * group, items * problem.num_heads_kv, cut * problem.num_heads_q)


def visited_tiles(problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """Returns the number of (query tile, key tile) pairs that position does not hide entirely, over all heads and
    sequences."""
    return walk(problem, block_m, block_n).tiles


def walk(problem: AttentionProblem, block_m: int, block_n: int, heads: int = 1, from_first: bool = False) -> Walk:
    """Counts the tiles that a tile shape visits.

    The rows of a tile of queries are counted in lines: `heads` heads are adjacent, so that a tile spans `block_m /
    heads` queries. Tiles are not enumerated. Except near the rows where an edge of the mask enters or leaves the keys,
    the counts of every `period`-th tile of queries are an arithmetic progression, because each count is the floor of an
    expression that is linear in the tile's first row. 10^8 tokens take no longer than 10^4.

    Args:
        heads: heads whose rows a tile holds.
        from_first: whether tiles of keys begin at the first key that any query sees, and each tile of queries visits at
            least one, as in Hopper's kernels (`visible.tiles_of_block`); otherwise they begin at key 0.
    """
    tiles = longest = items = cut = 0
    for (seqlen_q, seqlen_k), times in problem.counted_items().items():
        band = problem.band(seqlen_q, seqlen_k)
        found = _count(_Sequence(band, seqlen_q, seqlen_k, block_m, block_n, heads, from_first))
        tiles, cut, items = tiles + times * found.tiles, cut + times * found.cut, items + times * found.items
        longest = max(longest, found.longest)
    units = problem.num_heads_q // heads
    return Walk(tiles * units, longest, items * units, cut * units)


def _count(sequence: _Sequence) -> Walk:
    """Returns the tiles of one head, or group of heads, of one sequence."""
    tiles = longest = items = cut = 0
    for first, last, length in progressions(sequence.tiles(), sequence.period(), sequence.irregular()):
        (count, edges), (last_count, last_edges) = sequence.visited(first), sequence.visited(last)
        tiles += length * (count + last_count) // 2
        cut += length * (edges + last_edges) // 2
        items += length * (count > 0)
        longest = max(longest, count, last_count)
    return Walk(tiles, longest, items, cut)


MOST_ORDERED = 1 << 18  # blocks; the model simulates fewer (schedule.lateness)


def launch_order(
    problem: AttentionProblem, block_m: int, block_n: int, heads: int = 1, splits: int = 1, last_first: bool = False
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Returns `Cost.order` of blocks that come sequence by sequence, head by head, tile by tile.

    It is empty if there are more than `MOST_ORDERED` blocks.

    Args:
        heads: as in `walk`.
        splits: splits of the keys, each a block.
        last_first: whether the last queries come first.
    """
    units = problem.num_heads_q // heads * splits
    if units * problem.rows * heads > MOST_ORDERED * block_m:
        return ()
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for seqlen_q, seqlen_k in problem.items():
        if (seqlen_q, seqlen_k) not in found:
            sequence = _Sequence(problem.band(seqlen_q, seqlen_k), seqlen_q, seqlen_k, block_m, block_n, heads)
            tiles = range(sequence.tiles())
            steps = [-(-sequence.visited(i)[0] // splits) for i in (reversed(tiles) if last_first else tiles)]
            found[seqlen_q, seqlen_k] = tuple(steps)
    return tuple((found[item], units) for item in problem.items())


def launch_order_by_keys(
    problem: AttentionProblem, block_m: int, block_n: int, all_heads: bool = False
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Returns `Cost.order` of blocks that own keys, in the terms of `walk_by_keys`; empty if there are more than
    `MOST_ORDERED` blocks.

    Args:
        all_heads: whether all heads of a tile follow one another, and the last sequence comes first, as in Hopper's
            packed calls if all heads are one group; otherwise blocks come sequence by sequence, head by head, tile by
            tile.
    """
    heads = problem.num_heads_kv
    # As hopper/flash_bwd/steps.heads_of divides them.
    firsts = [head * problem.num_heads_q // heads for head in range(heads + 1)]
    groups = [end - first for first, end in pairwise(firsts)]
    if heads * (problem.total_k if problem.packed else problem.batch * problem.seqlen_k) > MOST_ORDERED * block_n:
        return ()
    found: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
    for seqlen_q, seqlen_k in problem.items():
        if (seqlen_q, seqlen_k) not in found:
            sequence = _by_keys(problem, seqlen_q, seqlen_k, block_m, block_n)
            steps = [sequence.visited(tile)[0] for tile in range(sequence.tiles())]
            if all_heads:
                found[seqlen_q, seqlen_k] = (tuple(step * group for step in steps for group in groups), 1)
            else:
                assert len(set(groups)) == 1
                found[seqlen_q, seqlen_k] = (tuple(step * groups[0] for step in steps), heads)
    order = tuple(found[item] for item in problem.items())
    return order[::-1] if all_heads else order


def _by_keys(problem: AttentionProblem, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> _Sequence:
    """Returns the tiles of one sequence with rows and keys exchanged."""
    low, high = problem.band(seqlen_q, seqlen_k)
    band = Band(None if high is None else -high, None if low is None else -low)
    return _Sequence(band, seqlen_k, seqlen_q, block_n, block_m, 1)


def progressions(tiles: int, period: int, irregular: Iterable[range]) -> Iterator[tuple[int, int, int]]:
    """Yields (first, last, length) of arithmetic progressions of tile numbers, with a common difference of `period`,
    that cover every tile once; a tile of an irregular range has a progression to itself."""
    begin = 0
    alone = {tile for some in irregular for tile in range(max(0, some.start), min(tiles, some.stop))}
    for end in (*sorted(alone), tiles):
        for first in range(begin, min(end, begin + period)):
            length = -(-(end - first) // period)
            yield first, first + (length - 1) * period, length
        if end < tiles:
            yield end, end, 1
        begin = end + 1


class _Sequence(NamedTuple):
    """The tiles of one head, or group of heads, of one sequence; the fields are `walk`'s arguments."""

    band: Band
    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int
    heads: int
    from_first: bool = False

    def tiles(self) -> int:
        """Returns the number of tiles of queries; 0 if the band shows no pair at all."""
        low, high = self.band
        if low is not None and high is not None and low > high and not self.from_first:
            return 0
        return -(-self.seqlen_q * self.heads // self.block_m)

    def period(self) -> int:
        """Returns the number of tiles after which first rows differ by a multiple of `block_n`."""
        if self.band == (None, None):
            return 1
        lines = self.block_n * self.heads
        return lines // math.gcd(self.block_m, lines)

    def irregular(self) -> list[range]:
        """Returns the tiles of queries near which an edge of the band meets the first or the last key, and the last."""
        low, high = self.band
        rows = []
        if low is not None:
            rows += [-low, self.seqlen_k - low]
        if high is not None:
            rows += [-high, self.seqlen_k - high]
        span = -(-self.block_m // self.heads)
        around = 2 * self.block_n + 2 * span
        last = self.tiles() - 1
        zones = [
            range((row - around) * self.heads // self.block_m, (row + around) * self.heads // self.block_m + 1)
            for row in rows
        ]
        return [*zones, range(last, last + 1)]

    def visited(self, tile: int) -> tuple[int, int]:
        """Returns the number of key tiles that a tile of queries visits, and of those that are masked."""
        low, high = self.band
        line = tile * self.block_m
        row_begin, row_last = line // self.heads, min((line + self.block_m - 1) // self.heads, self.seqlen_q - 1)
        origin = min(max(low, 0), self.seqlen_k) if self.from_first and low is not None else 0
        begin = 0 if low is None else max(0, row_begin + low - origin) // self.block_n
        end = self.seqlen_k if high is None else min(self.seqlen_k, row_last + high + 1)
        count = max(int(self.from_first), -(-(end - origin) // self.block_n) - begin)
        cut = cut_tiles(self.band, (row_begin, row_last), (begin, begin + count), self.block_n, self.seqlen_k)
        return count, cut


def cut_tiles(
    band: tuple[int | None, int | None], rows: tuple[int, int], tiles: tuple[int, int], block_n: int, seqlen_k: int
) -> int:
    """Returns how many of the key tiles that some queries visit are masked.

    Args:
        band: as in `AttentionProblem.band`.
        rows: the first query and the last.
        tiles: the first key tile and the one after the last.
        block_n: keys of a tile.
        seqlen_k: number of keys.
    """
    (low, high), (row_first, row_last), (begin, end) = band, rows, tiles
    whole = seqlen_k // block_n if high is None else min(seqlen_k, row_first + high + 1) // block_n
    behind = max(0, end - max(begin, whole))
    before = 0 if low is None else max(0, min(end, -(-(row_last + low) // block_n)) - begin)
    return min(end - begin, behind + before)


LINE_BYTES = 128


def line_bytes(row_bytes: int) -> int:
    """Returns the bytes of the whole L2 lines that TMA requests to copy a row in boxes of 128 bytes, if rows are
    contiguous: the mean over a row's possible alignments. A line that two boxes overlap is requested twice."""
    step = math.gcd(row_bytes, LINE_BYTES)
    lines = 0
    for offset in range(0, LINE_BYTES, step):
        for begin in range(offset, offset + row_bytes, LINE_BYTES):
            end = min(begin + LINE_BYTES, offset + row_bytes)
            lines += (end - 1) // LINE_BYTES - begin // LINE_BYTES + 1
    return lines * step
