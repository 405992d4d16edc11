"""three_kernel's products computed by torch: cuBLAS on NVIDIA, on views of the caller's tensors.

    scores = Q K^T        sums = P V        both accumulated in float32, out of 16-bit or float32 operands

One call takes the heads of one batch item, all its query rows of the chunk and all keys that any of them sees. If
query heads share kv heads, there is one call per kv head, and all its query heads read that head's matrix in place. No
operand is copied, except one spread over more than 2^31 elements. Holds no device code.

Bound: tensor cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.kernels.three_kernel.plan import Chunk, Piece, pieces
from warpwave.kernels.torch_products import product_into
from warpwave.operands import Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem


def brought_near(straight: Callable[[Operands], Operands], first: Operands) -> Callable[[Operands], Operands]:
    """Applies `straight`, then copies q, k and v if they are spread with gaps over 2^31 elements or more: cuBLAS uses
    other kernels for those, which give other bits."""
    far = [name for name in ("q", "k", "v") if _is_far(getattr(first, name))]
    if not far:
        return straight

    def near(operands: Operands) -> Operands:
        return straight(operands)._replace(**{name: getattr(operands, name).contiguous() for name in far})

    return near


def _is_far(t: torch.Tensor) -> bool:
    reach = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return reach > max(2**31, t.numel())


class View(NamedTuple):
    """One matrix per head within a tensor: shape, strides, and the offset from the tensor's first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


class Product(NamedTuple):
    """One torch call: views of its two operands and of its output."""

    a: View
    b: View
    out: View


def runs_of_heads(problem: AttentionProblem, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (batch item, query head, kv head, heads) for each torch product, out of heads counted over the batch:
    heads of one batch item, and of one kv head if query heads share kv heads."""
    group = problem.num_heads_q // problem.num_heads_kv
    while begin < end:
        batch, head = divmod(begin, problem.num_heads_q)
        most = problem.num_heads_q - head if group == 1 else group - head % group
        count = min(most, end - begin)
        yield batch, head, head // group, count
        begin += count


def _matrix(tensor: torch.Tensor, batch: int, head: int, heads: int, begin: int, tokens: int, shared: bool) -> View:
    """Returns [heads, tokens, width] of a (batch, seqlen, head, width) tensor; one head for all if it is shared."""
    of_batch, of_token, of_head, of_element = tensor.stride()
    offset = batch * of_batch + head * of_head + begin * of_token
    return View((heads, tokens, tensor.shape[-1]), (0 if shared else of_head, of_token, of_element), offset)


def _transposed(view: View) -> View:
    (h, m, n), (sh, sm, sn) = view.shape, view.strides
    return View((h, n, m), (sh, sn, sm), view.offset)


def score_products(
    problem: AttentionProblem, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, strides: tuple[int, ...]
) -> list[Product]:
    """Returns the products of raw scores for every pair between the chunk's first and last visible key.

    Args:
        strides: of a head and a row of the workspace's scores.
    """
    if chunk.nothing_to_see:
        return []
    keys, shared = chunk.key_end - chunk.key_begin, problem.num_heads_q != problem.num_heads_kv
    found, done = [], 0
    for batch, head, kv_head, heads in runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads):
        a = _matrix(q, batch, head, heads, chunk.row_begin, chunk.rows, False)
        b = _transposed(_matrix(k, batch, kv_head, heads, chunk.key_begin, keys, shared))
        offset = done * strides[0] + chunk.key_begin - chunk.key_base
        found.append(Product(a, b, View((heads, chunk.rows, keys), (*strides, 1), offset)))
        done += heads
    return found


def value_products(
    problem: AttentionProblem,
    chunk: Chunk,
    piece: Piece,
    v: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[int, ...],
    into_sums: bool,
) -> list[Product]:
    """Returns the products P V of a piece of a chunk, into contiguous rows of sums, or into out itself.

    Args:
        strides: of a head and a row of the workspace's probabilities.
    """
    keys, shared = chunk.key_end - chunk.key_begin, problem.num_heads_q != problem.num_heads_kv
    width, first = problem.head_dim_v, chunk.first_head + piece.first_head
    found, done = [], 0
    for batch, head, kv_head, heads in runs_of_heads(problem, first, first + piece.heads):
        offset = (piece.first_head + done) * strides[0] + piece.row_begin * strides[1]
        a = View((heads, piece.rows, keys), (*strides, 1), offset + chunk.key_begin - chunk.key_base)
        b = _matrix(v, batch, kv_head, heads, chunk.key_begin, keys, shared)
        if into_sums:
            into = View((heads, piece.rows, width), (piece.rows * width, width, 1), done * piece.rows * width)
        else:
            into = _matrix(out, batch, head, heads, chunk.row_begin + piece.row_begin, piece.rows, False)
        found.append(Product(a, b, into))
        done += heads
    return found


def zero(problem: AttentionProblem, chunk: Chunk, out: torch.Tensor) -> None:
    """Zeroes the chunk's rows of out, which see no key."""
    for batch, head, _, heads in runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads):
        out[batch, chunk.row_begin : chunk.row_begin + chunk.rows, head : head + heads].zero_()


def multiply(products: list[Product], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Runs the calls, one after another."""
    for product in products:
        product_into(product.out.of(out), product.a.of(a), product.b.of(b))


# cuBLAS's tile sizes, by the names and grids of its kernels on an H200.
LARGEST_TILE = 192 * 192
ODD_TILE = 64  # rows do not start at multiples of 16 bytes: older kernels
STEP_OF_TILE = 64  # elements summed over per step


class Tiles(NamedTuple):
    """Tiles of torch's products, over all launches, and their steps."""

    scores: int
    scores_steps: int
    values: int
    values_steps: int
    values_launches: int


def tiles_of(problem: AttentionProblem, config: Any, chunks: Sequence[Chunk], sms: int, odd: bool) -> Tiles:
    """Returns the tiles of all chunks' products, one launch for each run of heads."""
    scores = scores_steps = values = values_steps = launches = 0
    # Chunks that start at the same head of a batch item have the same runs of heads.
    alike = Counter(
        (chunk.first_head % problem.num_heads_q, chunk.heads, chunk.rows, chunk.key_end - chunk.key_begin)
        for chunk in chunks
        if not chunk.nothing_to_see
    )
    for (first_head, heads_of_chunk, rows, keys), times in alike.items():
        for *_, heads in runs_of_heads(problem, first_head, first_head + heads_of_chunk):
            tiles = times * tiles_of_product(heads, rows, keys, sms, odd)
            scores, scores_steps = scores + tiles, scores_steps + tiles * -(-problem.head_dim // STEP_OF_TILE)
        for piece in pieces(problem, config, heads_of_chunk, rows):
            first = first_head + piece.first_head
            for *_, heads in runs_of_heads(problem, first, first + piece.heads):
                tiles = times * tiles_of_product(heads, piece.rows, problem.head_dim_v, sms, odd)
                values, values_steps = values + tiles, values_steps + tiles * -(-keys // STEP_OF_TILE)
                launches += times
    return Tiles(scores, scores_steps, values, values_steps, launches)


def tiles_of_product(heads: int, rows: int, columns: int, sms: int, odd: bool) -> int:
    """Returns the tiles of one product, with one matrix per head.

    cuBLAS chooses a size out of dozens (64 x 8 to 256 x 128 were seen) such that each SM has one tile, or the same
    number. If rows do not start at multiples of 16 bytes there is no such choice.
    """
    if odd:
        return heads * -(-rows // ODD_TILE) * -(-columns // ODD_TILE)
    most = heads * min(-(-rows // 64) * -(-columns // 8), -(-rows // 8) * -(-columns // 64))
    rounds = -(-heads * rows * columns // (sms * LARGEST_TILE))
    return min(most, sms * max(1, rounds))


def is_odd(problem: AttentionProblem) -> bool:
    """Returns whether rows of K, P or V do not start at multiples of 16 bytes."""
    size = DTYPE_BYTES[problem.dtype]
    return any(width * size % 16 for width in (problem.seqlen_k, problem.head_dim, problem.head_dim_v))


def loop_of(problem: AttentionProblem, scores: str, values: str) -> str:
    """Returns `Cost.loop`: how both products are computed. torch uses one kernel for few rows, and another, up to four
    times slower, for rows of P that do not start at multiples of 16 bytes; heads of 64 fill half of a tile."""
    if scores == "hopper":
        return ""
    rows = ""
    if problem.dtype == "float32":
        rows = " float32" if values in ("triton", "library") else ""
    elif values == "library" and problem.seqlen_q * problem.num_heads_q <= 16 * problem.num_heads_kv:
        rows = " few rows"
    elif values == "library" and is_odd(problem):
        rows = " odd"
    return f"{scores} {values}{rows}"
