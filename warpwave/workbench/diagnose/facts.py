"""The work, bytes and blocks of a table's row, computed from its call, its grid and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warpwave.workbench.diagnose.parse import DTYPES, Call, Device, Document, Kernel, Row

HALF_A_DIGIT = 0.5
AGREE = 0.06  # allowed relative difference of two figures for the same quantity, on top of their rounding
MORE_THAN_ALL = 1.05  # a share above this is no share: a stated figure is wrong
MOST_THREADS = 2048  # that a multiprocessor holds; some hold fewer
OFFERS = 6.0  # with matrix units at least this many times as fast, the scalar units' rate is suspicious
BINDS = 0.5  # a resource counts as binding from this share of its rate on


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: one of `rules.KINDS`.
        text: the sentence.
        arithmetic: the figures that it follows from, checkable by hand.
        series: the series of its rows; empty if there are several.
        factor: the factor of time that it explains; 1 if none.
        is_cause: whether it explains why the series is slow.
        of_author: whether it answers a claim of the author.
    """

    kind: str
    text: str
    arithmetic: str
    series: str = ""
    factor: float = 1.0
    is_cause: bool = False
    of_author: bool = False


FLOPS = {"forward": 4, "backward": 10, "both": 14}  # of a visible pair, for each column of a head
ROWS = {"forward": 2, "backward": 3, "both": 5}  # q, out; q, dO, dQ
KEYS = {"forward": 2, "backward": 4, "both": 6}  # K, V; K, V, dK, dV


def flops(call: Call) -> float | None:
    """Returns the operations of the products: two of the forward, five of the backward; None if a size is missing."""
    pairs = visible_pairs(call)
    return None if pairs is None or call.head_dim is None else float(FLOPS[call.passes] * pairs * call.head_dim)


def visible_pairs(call: Call) -> float | None:
    """Returns the visible pairs of all heads and sequences; the causal mask is aligned to the last key."""
    if call.heads is None or call.seqlen is None:
        return None
    keys = call.seqlen_k or call.seqlen
    pairs = call.seqlen * keys
    if call.causal and call.seqlen <= keys:
        pairs -= call.seqlen * (call.seqlen - 1) // 2
    elif call.causal:
        pairs = keys * (keys + 1) // 2  # the first queries have no key
    return float(call.batch * call.heads * pairs)


def tensor_bytes(call: Call) -> float | None:
    """Returns the bytes of q, k, v and out, or of q, k, v and the gradients, each counted once."""
    if call.heads is None or call.seqlen is None or call.head_dim is None:
        return None
    keys, size = call.seqlen_k or call.seqlen, DTYPES[call.dtype]
    heads_kv = call.heads_kv or call.heads
    rows, columns = ROWS[call.passes] * call.heads * call.seqlen, KEYS[call.passes] * heads_kv * keys
    wider = max(size, 2) - size  # of out, where q, k and v have 8 bits
    return float(call.batch * call.head_dim * (size * (rows + columns) + wider * call.heads * call.seqlen))


def work(row: Row) -> float | None:
    """Returns the operations of a row: those of its call or, if a size is not stated, its time times its rate."""
    of_call, time = flops(row.call), time_us(row)
    if of_call is None and time is not None and row.tflops is not None:
        return time * row.tflops * 1e6
    return of_call


def busy_sms(row: Row, device: Device) -> float:
    """Returns the share of the multiprocessors that have a block; 1 if the blocks are unknown."""
    count = blocks(row) if row.kernel.launch_heads != "" else None
    return 1.0 if count is None or device.num_sms is None else min(1.0, count / device.num_sms[0])


def balance(row: Row, device: Device) -> float:
    """Returns the mean block's work over the longest block's if every block has its own multiprocessor; else 1.

    Under a causal mask the last query tile of a head has all keys, and nothing follows the shorter ones.
    """
    call, count, pairs = row.call, blocks(row), visible_pairs(row.call)
    alone = count is not None and device.num_sms is not None and count <= device.num_sms[0]
    if not (call.causal and alone and row.kernel.grid == "query tiles" and pairs and call.seqlen and call.heads):
        return 1.0
    if row.kernel.block_m is not None and row.kernel.block_m >= call.seqlen:
        return 1.0
    return pairs / (call.batch * call.heads * call.seqlen * (call.seqlen_k or call.seqlen))


def busy_threads(row: Row) -> float:
    """Returns the share of a block's threads that compute; 1 if the threads are unknown."""
    kernel = row.kernel
    return kernel.busy_threads / kernel.threads if kernel.busy_threads and kernel.threads else 1.0


def special_functions(call: Call) -> float | None:
    """Returns the exponentials of a call: one for each visible pair and pass, and a tanh more with a softcap."""
    pairs = visible_pairs(call)
    return None if pairs is None else pairs * (1 + call.softcap) * (2 if call.passes == "both" else 1)


def score_bytes(call: Call, kernel: Kernel) -> float | None:
    """Returns the bytes of a matrix of all scores."""
    if call.heads is None or call.seqlen is None:
        return None
    return float(kernel.score_bytes * call.batch * call.heads * call.seqlen * (call.seqlen_k or call.seqlen))


def kv_bytes_of_head(call: Call) -> float | None:
    """Returns the bytes of K and V that a block reads."""
    if call.seqlen is None or call.head_dim is None:
        return None
    return 2.0 * (call.seqlen_k or call.seqlen) * call.head_dim * DTYPES[call.dtype]


def all_kv_bytes(call: Call) -> float | None:
    """Returns the bytes of K and V of all heads and sequences."""
    each, heads = kv_bytes_of_head(call), call.heads_kv or call.heads
    return None if each is None or heads is None else each * call.batch * heads


def blocks(row: Row, heads: int | None = None) -> int | None:
    """Returns the blocks of the largest launch; None if the given facts do not determine it.

    Args:
        heads: heads per launch, instead of the call's batch times heads.
    """
    call, kernel = row.call, row.kernel
    if kernel.blocks is not None and heads is None:
        return kernel.blocks
    count = heads if heads is not None else None if call.heads is None else call.batch * call.heads
    if count is None or kernel.is_peer:
        return None
    if kernel.grid == "heads":
        return count
    if call.seqlen is None or kernel.block_m is None:
        return None
    tiles = -(-call.seqlen // kernel.block_m)
    if kernel.grid == "output tiles":
        if kernel.block_n is None:
            return None
        tiles *= -(-(call.seqlen_k or call.seqlen) // kernel.block_n)
    return count * tiles


def steps_of_block(row: Row) -> int | None:
    """Returns the key tiles that a block processes one after another, over all query tiles if a block has a head."""
    call, kernel = row.call, row.kernel
    if call.seqlen is None or kernel.grid == "output tiles" or kernel.block_n is None:
        return None
    steps = -(-(call.seqlen_k or call.seqlen) // kernel.block_n)
    if kernel.grid == "heads":
        steps *= -(-call.seqlen // (kernel.block_m or 1))
    return steps


def most_resident(kernel: Kernel, device: Device) -> int | None:
    """Returns the most blocks that an SM can hold by their threads and shared memory; None if neither is stated."""
    limits = []
    if kernel.threads is not None:
        limits.append(MOST_THREADS // kernel.threads)
    if kernel.smem_bytes is not None and device.smem_per_sm_bytes is not None:
        limits.append(device.smem_per_sm_bytes // kernel.smem_bytes)
    return max(1, min(limits)) if limits else None


def time_us(row: Row) -> float | None:
    """Returns the time of the whole call; a row with a rate alone takes its work over that rate."""
    if row.time_us is None:
        of_call = flops(row.call)
        return None if row.tflops is None or of_call is None else of_call / row.tflops * 1e-6
    heads = row.call.batch * (row.call.heads or 1)
    return row.time_us * heads if row.per_head else row.time_us


def peak_tflops(row: Row, device: Device) -> float | None:
    """Returns the peak rate of the unit that computes the row's products."""
    if row.kernel.unit == "scalar":
        return device.tflops.get("scalar")
    if row.call.dtype == "float32":
        return device.tflops.get("tf32", device.tflops.get("float32_matrix", device.tflops.get("scalar")))
    return matrix_tflops(row.call.dtype, device) or device.tflops.get("scalar")


def matrix_tflops(dtype: str, device: Device) -> float | None:
    """Returns the rate of the matrix units for a dtype; that of float16 for 8-bit floats on a card without fp8."""
    if dtype == "fp8":
        return device.tflops.get("fp8", device.tflops.get("float16"))
    return device.tflops.get("tf32" if dtype == "float32" else dtype)


def loads_of_a_key(row: Row) -> int | None:
    """Returns how many blocks of one head read each key."""
    call, kernel = row.call, row.kernel
    if call.seqlen is None or kernel.is_peer or kernel.block_m is None:
        return None
    return -(-call.seqlen // kernel.block_m)


def loaded_bytes(row: Row) -> float | None:
    """Returns the bytes loaded through L2: K and V once per query tile; scores in memory are written and read twice."""
    kv, least, loads = kv_bytes_of_head(row.call), tensor_bytes(row.call), loads_of_a_key(row)
    if kv is None or least is None or row.call.heads is None:
        return least
    again = kv * (max(1, loads or 1) - 1) * row.call.batch * row.call.heads
    scores = score_bytes(row.call, row.kernel) if row.kernel.scores == "memory" else 0.0
    return least + again + 4 * (scores or 0.0)


def memory_bytes(row: Row, device: Device) -> float | None:
    """Returns the bytes that cross the memory bus: repeated reads and scores count only as far as they exceed L2."""
    least, asked, kv = tensor_bytes(row.call), loaded_bytes(row), kv_bytes_of_head(row.call)
    if least is None or asked is None or device.l2_bytes is None or kv is None:
        return least
    scores = (score_bytes(row.call, row.kernel) or 0.0) if row.kernel.scores == "memory" else 0.0
    again = asked - least - 4 * scores
    return least + again * _missing(kv, device.l2_bytes) + 4 * scores * _missing(scores, device.l2_bytes)


def _missing(wanted: float, capacity: float) -> float:
    return 0.0 if wanted <= capacity else 1 - capacity / wanted


def spread(row: Row, *figures: str) -> float:
    """Returns how far a product of figures may be off by their rounding alone: 0.1 is 10 %."""
    return sum(HALF_A_DIGIT * 10.0 ** (1 - row.digits[name]) for name in figures if name in row.digits)


def groups(document: Document) -> dict[tuple[str, str], list[Row]]:
    """Returns the rows of each table and series, in order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in document.rows:
        found.setdefault((row.table, row.series), []).append(row)
    return found


SIZES = ("batch", "heads", "heads_kv", "seqlen", "seqlen_k", "head_dim", "dtype", "causal", "passes", "softcap")


def varying(rows: Sequence[Row]) -> list[str]:
    """Returns the sizes of the call that differ between rows."""
    return [name for name in SIZES if len({getattr(row.call, name) for row in rows}) > 1]
