"""The persistent tile scheduler: each program draws tiles of queries from a counter in memory.

The grid has as many programs as run at once. Each program starts with the tile of its own number and draws later tiles
from the counter, so a program that got a short tile draws the next one sooner. The producer draws while its consumers
still compute, and passes them the tile through shared memory. This is worth 10 % over a static order on long causal
runs, and 10 % over one tile per program at 16 x 1024.

The counter is 0 before and after every launch. Each tile beyond a program's first is one draw, and each program makes
one more draw to learn that no tile is left. A launch of `num_tiles` tiles therefore makes exactly `num_tiles` draws,
and the program that draws the last number resets the counter to 0.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from warpwave.kernels.groups import Pages
from warpwave.kernels.hopper.pages import length_of, table_row_of
from warpwave.kernels.hopper.parts import barriers
from warpwave.runtime.gluon_or_stub import aggregate, gl, jit, mbarrier

# Words of a message about a tile, in shared memory.
TILE = gl.constexpr(0)
BATCH = gl.constexpr(1)
HEAD = gl.constexpr(2)
Q_BEGIN = gl.constexpr(3)
SEQLEN_Q = gl.constexpr(4)
K_BEGIN = gl.constexpr(5)
SEQLEN_K = gl.constexpr(6)
WORDS = gl.constexpr(7)
# In place of the last words, which dense calls do not need: the steps of a part of a block, and which part it is.
FIRST_STEP = gl.constexpr(3)
END_STEP = gl.constexpr(4)
PART = gl.constexpr(5)
NO_MORE = gl.constexpr(-1)
# These words follow both messages if blocks may be repeated (flash_fwd/mask_bias.py). For each message: its careful
# level, and the level at which its consumers request a repeat, 0 for none.
CAREFUL = gl.constexpr(0)
AGAIN = gl.constexpr(1)
SHOWN = gl.constexpr(2)  # also: which of the last tiles of keys some query of the block sees
WORDS_OF_REPEATS = gl.constexpr(6)


@aggregate
class Mailbox:
    """Two alternating messages: their words, and barriers that signal that one was written or is no longer needed."""

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Work:
    """One tile of queries.

    Args:
        tile: index of the tile in its sequence, -1 if no work is left.
        batch, head: position in a dense tensor; batch is 0 in a packed one. Heads count as in `groups.Schedule`.
        q_begin, k_begin: first row of the sequence in a packed tensor, 0 in a dense one.
        seqlen_q, seqlen_k: lengths of the sequence.
    """

    tile: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    q_begin: gl.tensor
    seqlen_q: gl.tensor
    k_begin: gl.tensor
    seqlen_k: gl.tensor


@jit
def mailbox(READERS: gl.constexpr, REPEATS: gl.constexpr = False):
    """Allocates a mailbox of one writer; REPEATS: with the words of blocks that may be repeated."""
    WORDS_OF_BOX: gl.constexpr = 2 * WORDS + (WORDS_OF_REPEATS if REPEATS else 0)
    words = gl.allocate_shared_memory(gl.int32, [WORDS_OF_BOX, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Mailbox(words, barriers(2, 1), barriers(2, READERS))


@jit
def _write(box, n, WORD: gl.constexpr, value):
    word = box.words.index((n & 1) * WORDS + WORD)
    word.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@jit
def _read(box, n, WORD: gl.constexpr, WARPS: gl.constexpr):
    word = box.words.index((n & 1) * WORDS + WORD)
    return gl.max(word.load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@jit
def post(box, n, work, IS_VARLEN: gl.constexpr):
    """Writes message n once its slot is free."""
    mbarrier.wait(box.empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    _write(box, n, TILE, work.tile)
    _write(box, n, BATCH, work.batch)
    _write(box, n, HEAD, work.head)
    if IS_VARLEN:
        _write(box, n, Q_BEGIN, work.q_begin)
        _write(box, n, SEQLEN_Q, work.seqlen_q)
        _write(box, n, K_BEGIN, work.k_begin)
        _write(box, n, SEQLEN_K, work.seqlen_k)
    mbarrier.arrive(box.full.index(n & 1), count=1)


@jit
def post_end(box, n, IS_VARLEN: gl.constexpr):
    """Writes, as message n, that no work is left."""
    zero = gl.to_tensor(0)
    post(box, n, Work(gl.to_tensor(NO_MORE), zero, zero, zero, zero, zero, zero), IS_VARLEN)


@jit
def post_part(box, n, first_step, end_step, part):
    """Writes which part of a block message n announces, before the message is posted, once its slot is free."""
    mbarrier.wait(box.empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    _write(box, n, FIRST_STEP, first_step)
    _write(box, n, END_STEP, end_step)
    _write(box, n, PART, part)


@jit
def steps_of_part(box, n, WARPS: gl.constexpr = 4):
    """Returns the steps that `post_part` wrote: the first one, and the first one after them."""
    return _read(box, n, FIRST_STEP, WARPS), _read(box, n, END_STEP, WARPS)


@jit
def part(box, n):
    """Returns which part `post_part` wrote."""
    return _read(box, n, PART, 4)


@jit
def wait_posted(box, n):
    """Waits until message n was written."""
    mbarrier.wait(box.full.index(n & 1), (n >> 1) & 1)


@jit
def read(box, n, seqlen_q, seqlen_k, IS_VARLEN: gl.constexpr, WARPS: gl.constexpr = 4):
    """Returns the work of message n, for a role of WARPS warps. Reading it again is cheaper than keeping it in
    registers through a loop over keys."""
    tile = _read(box, n, TILE, WARPS)
    batch = _read(box, n, BATCH, WARPS)
    head = _read(box, n, HEAD, WARPS)
    q_begin = gl.to_tensor(0)
    k_begin = gl.to_tensor(0)
    if IS_VARLEN:
        q_begin = _read(box, n, Q_BEGIN, WARPS)
        seqlen_q = _read(box, n, SEQLEN_Q, WARPS)
        k_begin = _read(box, n, K_BEGIN, WARPS)
        seqlen_k = _read(box, n, SEQLEN_K, WARPS)
    return Work(tile, batch, head, q_begin, seqlen_q, k_begin, seqlen_k)


@jit
def discard(box, n):
    """Signals that message n was read."""
    mbarrier.arrive(box.empty.index(n & 1), count=1)


@jit
def post_how(box, n, level, shown):
    """Writes the careful level of message n and a word of `mask_bias.tiles_shown`, before the message is posted. The
    slot must be known to be free."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _repeat_word(box, n, CAREFUL).store(gl.full([1], level, gl.int32, layout))
    _repeat_word(box, n, AGAIN).store(gl.full([1], 0, gl.int32, layout))
    _repeat_word(box, n, SHOWN).store(gl.full([1], shown, gl.int32, layout))


@jit
def careful_level(box, n):
    """Returns the careful level of the block of message n: 0 unless it is repeated."""
    return gl.max(_repeat_word(box, n, CAREFUL).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@jit
def is_careful(box, n):
    """Returns whether message n announces a repeated block."""
    return careful_level(box, n) != 0


@jit
def shown_last(box, n):
    """Returns the word of `tiles_shown` that `post_how` wrote."""
    return gl.max(_repeat_word(box, n, SHOWN).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@jit
def request_repeat(box, n, level):
    """Requests, as a consumer, a repeat of the block of message n at a higher level. Of two requests at once, either
    one takes effect; the other consumer finds on that pass that it must request another."""
    _repeat_word(box, n, AGAIN).store(gl.full([1], level, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))


@jit
def wait_for_request(box, n):
    """Waits, as the producer, until all consumers have discarded message n. Returns the level that one of them
    requested, 0 for none, and the tile, batch and head of the message."""
    mbarrier.wait(box.empty.index(n & 1), (n >> 1) & 1)
    level = _value(_repeat_word(box, n, AGAIN))
    return level, _value(_word(box, n, TILE)), _value(_word(box, n, BATCH)), _value(_word(box, n, HEAD))


@jit
def _word(box, n, WORD: gl.constexpr):
    return box.words.index((n & 1) * WORDS + WORD)


@jit
def _repeat_word(box, n, WORD: gl.constexpr):
    return box.words.index(2 * WORDS + (n & 1) * 3 + WORD)


@jit
def _value(word):
    """Returns a word in the layout of the producer's single warp."""
    return gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), axis=0)


@jit
def draw(counter_ptr, num_tiles):
    """Returns the number of a program's next tile, after its first; `num_tiles` or more if none is left."""
    step = gl.num_programs(0)
    following = num_tiles
    if step < num_tiles:
        drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if drawn == num_tiles - 1:
            gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
        following = drawn + step
    return following


@jit
def draw_in_order(counter_ptr, num_tiles):
    """Returns the number of a program's next tile, the first included; `num_tiles` or more if none is left. If a
    program has a tile, running programs have taken all tiles before it, so it may wait for these tiles. There is one
    extra draw per program."""
    drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if drawn == num_tiles + gl.num_programs(0) - 1:
        gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return drawn


@jit
def tile_of(s, offsets, t, BLOCK_M: gl.constexpr, HAS_HIGH: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Returns tile t of the schedule; in a packed call it may be empty (`is_work`).

    Args:
        s: `groups.Schedule`, or `groups.KeySchedule`.
        offsets: a group with `cu_seqlens_q_ptr` and `cu_seqlens_k_ptr`.
    """
    if IS_VARLEN:
        return packed_tile(s, offsets, t, BLOCK_M)
    else:
        return dense_tile(s, t, HAS_HIGH)


@jit
def is_work(work, BLOCK_M: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Returns whether the tile holds queries; in a packed call it may hold none."""
    if IS_VARLEN:
        return (work.tile >= 0) & (work.tile * BLOCK_M < work.seqlen_q)
    else:
        return work.tile >= 0


@jit
def dense_tile(s, t, HAS_HIGH: gl.constexpr):
    """Returns tile t of a dense call.

    If the mask makes later tiles longer, the order is longest first within groups of heads that fit L2
    (host.heads_in_l2). Compared with one group of all heads, that took causal 16 x 1024 at head_dim 128 from 320 to 378
    TFLOP/s. Groups are counted back from the last tile, so the incomplete group is the first. As the last, its longest
    tiles would start when most SMs have nothing left to do: 1.18 times as long at 10 heads in groups of 3, 75 tiles
    each.
    """
    if HAS_HIGH:
        tile, batch_head = _last_first(s, t, s.tiles_per_head, s.batch * s.num_heads)
    else:
        tile = t % s.tiles_per_head
        batch_head = t // s.tiles_per_head
    zero = gl.to_tensor(0)
    return Work(tile, batch_head // s.num_heads, batch_head % s.num_heads, zero, s.seqlen_q, zero, s.seqlen_k)


@jit
def _last_first(s, t, tiles_per_head, num_heads):
    """Returns tile and head of tile t, if the last tiles of all heads of a group come first, group after group."""
    later = s.num_tiles - 1 - t
    group = later // (s.heads_in_l2 * tiles_per_head)
    place = later - group * (s.heads_in_l2 * tiles_per_head)
    heads = gl.minimum(s.heads_in_l2, num_heads - group * s.heads_in_l2)
    return place // heads, group * s.heads_in_l2 + place % heads


@jit
def packed_tile(s, offsets, t, BLOCK_M: gl.constexpr):
    """Returns tile t of a packed call: the last tiles of a sequence first, within groups of heads (host.heads_in_l2).
    Rows of a tile may lie past the sequence's end.

    Sequence b owns the slots from `cu_seqlens_q[b] // BLOCK_M + b` on: at least as many as it has tiles, and at most
    one more. A slot thus determines its sequence without a sum over earlier sequences, and the host needs no lengths.
    If there are as many slots as sequences, each has one: all are short, or all offsets are less than BLOCK_M. The
    search for a slot's owner, which reads all offsets, would take as long as the tile (1,000 sequences of 10 to 54).
    Offsets are clamped, so invalid offsets still read and write inside the tensors.
    """
    slots = s.num_tiles // s.num_heads
    slot, head = _last_first(s, t, slots, s.num_heads)
    # Producers that draw in order look up tiles past the last one too, whose slots are negative.
    b = gl.maximum(slot, 0)
    if slots != s.batch:
        b = owner_of(s, offsets.cu_seqlens_q_ptr, slot, BLOCK_M, 1)
    q_begin, seqlen_q = queries_of(s, offsets.cu_seqlens_q_ptr, b)
    k_begin = gl.minimum(gl.maximum(gl.load(offsets.cu_seqlens_k_ptr + b), 0), s.total_k)
    # Both ends are clamped before the subtraction, which must not overflow.
    seqlen_k = gl.minimum(gl.maximum(gl.load(offsets.cu_seqlens_k_ptr + b + 1), k_begin), s.total_k) - k_begin
    tile = 0
    if slots != s.batch:
        tile = slot - (q_begin // BLOCK_M + b)
    return Work(tile, b, head, q_begin, seqlen_q, k_begin, seqlen_k)


@jit
def paged_tile(s, offsets, pages: Pages, t, BLOCK_M: gl.constexpr):
    """Returns tile t of a call whose keys are in pages; -1 stands for no tile. Without offsets of queries, each
    sequence has `s.seqlen_q` of them.

    The order is that of `packed_tile`, but sequences with a single tile come first: they decode, so their tiles may
    have the most keys of all, wherever they are in the batch. Begun last, they took up to 1.3 times as long. The last
    `batch` slots are for them. Sequence b owns the slots from `cu_seqlens_q[b] // BLOCK_M` on: as many as it has tiles,
    or one fewer. In that case its first tile, which has the fewest keys, is among the last slots too.
    """
    slots = s.num_tiles // s.num_heads
    slot, head = _last_first(s, t, slots, s.num_heads)
    b = slot - (slots - s.batch)
    is_apart = b >= 0
    if not is_apart:
        b = owner_of(s, offsets.cu_seqlens_q_ptr, slot, BLOCK_M, 0)
    q_begin, seqlen_q = queries_of(s, offsets.cu_seqlens_q_ptr, b)
    tiles = gl.cdiv(seqlen_q, BLOCK_M)
    before = q_begin // BLOCK_M
    missing = tiles - ((q_begin + seqlen_q) // BLOCK_M - before)  # slots
    has_one_apart = (tiles == 1) | (missing > 0)
    others = gl.where(tiles == 1, NO_MORE, slot - before + missing)
    tile = gl.where(is_apart, gl.where(has_one_apart, 0, NO_MORE), others)
    seqlen_k = length_of(pages, table_row_of(pages, b), s.seqlen_k)
    return Work(tile, b, head, q_begin, seqlen_q, gl.to_tensor(0), seqlen_k)


@jit
def owner_of(s, cu_seqlens_q_ptr, slot, BLOCK_M: gl.constexpr, SPARE: gl.constexpr, rows=1, WARPS: gl.constexpr = 1):
    """Returns the last sequence whose slots begin at `slot` or before. The slots of sequence b begin at
    `cu_seqlens_q[b] * rows // BLOCK_M + SPARE * b`; each query has `rows` rows. WARPS warps execute this."""
    lanes = gl.arange(0, 128, gl.BlockedLayout([4 // WARPS], [32], [WARPS], [0]))
    before = gl.to_tensor(0)
    for first in range(0, s.batch, 128):
        b = first + lanes
        if cu_seqlens_q_ptr is None:
            begin = b * s.seqlen_q
        else:
            begin = gl.load(cu_seqlens_q_ptr + b, mask=b < s.batch, other=0)
        begin = gl.minimum(gl.maximum(begin, 0), s.total_q) * rows
        before += gl.sum(((begin // BLOCK_M + SPARE * b <= slot) & (b < s.batch)).to(gl.int32), axis=0)
    return gl.maximum(before - 1, 0)


@jit
def queries_of(s, cu_seqlens_q_ptr, b):
    """Returns the first query of a sequence and the number of its queries."""
    q_begin = b * s.seqlen_q
    seqlen_q = s.seqlen_q
    if cu_seqlens_q_ptr is not None:
        q_begin = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr + b), 0), s.total_q)
        seqlen_q = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr + b + 1), q_begin), s.total_q) - q_begin
    return q_begin, seqlen_q
