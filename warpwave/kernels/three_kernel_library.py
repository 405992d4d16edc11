"""three_kernel's products where torch computes them: cuBLAS on NVIDIA, on views of the caller's tensors.

    scores = Q K^T        sums = P V        both accumulated in float32, out of 16-bit or float32 operands

One call takes the heads of one batch item, all its query rows of the chunk and all keys that some of them sees. Query
heads that share a kv head are one call for each kv head, whose matrix all of them read where it stands. No operand is
copied but one spread over more than 2^31 elements. Host code alone.

Bound: tensor cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from warpwave.kernels.three_kernel_plan import Chunk, Piece
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Operands


@contextlib.contextmanager
def products_in(arithmetic: str) -> Iterator[None]:
    """torch's float32 products in the precision asked for, whatever the process allows elsewhere.

    torch has no argument for it: the process's setting is changed and set back around the calls, which returns before
    they run. Another thread that multiplies in between may meet it.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if arithmetic == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def brought_near(straight: Callable[[Operands], Operands], first: Operands) -> Callable[[Operands], Operands]:
    """`straight`, then q, k and v copied where they are spread over 2^31 elements and more, with gaps between: cuBLAS
    has other kernels for those, with other bits."""
    far = [name for name in ("q", "k", "v") if _is_far(getattr(first, name))]
    if not far:
        return straight

    def near(operands: Operands) -> Operands:
        return straight(operands)._replace(**{name: getattr(operands, name).contiguous() for name in far})

    return near


def _is_far(t: torch.Tensor) -> bool:
    reach = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return reach > max(2**31, t.numel())


def multiply_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out = a b for each head, accumulated in float32; out is float32 unless a and b are of its dtype."""
    if not a.is_cuda:
        out.copy_(a.float() @ b.float())
    elif a.dtype != torch.float32:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a, b, out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b for each head, total float32."""
    if not a.is_cuda:
        total += a.float() @ b.float()
    elif a.dtype != torch.float32:
        torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        torch.baddbmm(total, a, b, out=total)


class View(NamedTuple):
    """A matrix for each head within a tensor: shape, strides, and the offset from the tensor's first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


class Product(NamedTuple):
    """One call of torch: views of its two operands and of what it writes."""

    a: View
    b: View
    out: View


def runs_of_heads(problem: AttentionProblem, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(batch item, query head, kv head, heads) that one product of torch can take, out of heads counted over the batch:
    those of one batch item, and where query heads share kv heads, of one kv head."""
    group = problem.num_heads_q // problem.num_heads_kv
    while begin < end:
        batch, head = divmod(begin, problem.num_heads_q)
        most = problem.num_heads_q - head if group == 1 else group - head % group
        count = min(most, end - begin)
        yield batch, head, head // group, count
        begin += count


def _matrix(tensor: torch.Tensor, batch: int, head: int, heads: int, begin: int, tokens: int, shared: bool) -> View:
    """[heads, tokens, width] of a (batch, seqlen, head, width) tensor; one head for all where it is shared."""
    of_batch, of_token, of_head, of_element = tensor.stride()
    offset = batch * of_batch + head * of_head + begin * of_token
    return View((heads, tokens, tensor.shape[-1]), (0 if shared else of_head, of_token, of_element), offset)


def _transposed(view: View) -> View:
    (h, m, n), (sh, sm, sn) = view.shape, view.strides
    return View((h, n, m), (sh, sn, sm), view.offset)


def score_products(
    problem: AttentionProblem, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, strides: tuple[int, ...]
) -> list[Product]:
    """Raw scores of every pair between the chunk's first and last visible key.

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
    """P V of a piece of a chunk, into sums that stand one row behind another, or into out itself.

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
    """The chunk's rows of out, which see no key."""
    for batch, head, _, heads in runs_of_heads(problem, chunk.first_head, chunk.first_head + chunk.heads):
        out[batch, chunk.row_begin : chunk.row_begin + chunk.rows, head : head + heads].zero_()


def multiply(products: list[Product], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The calls, one after another."""
    for product in products:
        multiply_into(product.out.of(out), product.a.of(a), product.b.of(b))


class Tiles(NamedTuple):
    """Tiles of torch's products, and what they walk: it does not say how it tiles, and 128 x 128 by 64 is assumed."""

    scores: int
    scores_steps: int
    values: int
    values_steps: int


def tiles_of(chunks: Sequence[Chunk], problem: AttentionProblem) -> Tiles:
    """Those of all chunks' products."""
    scores = values = values_steps = 0
    for chunk in chunks:
        keys = max(0, chunk.key_end - chunk.key_begin)
        row_tiles = chunk.heads * -(-chunk.rows // 128)
        scores += row_tiles * -(-keys // 128)
        values += row_tiles * -(-problem.head_dim_v // 128)
        values_steps += row_tiles * -(-problem.head_dim_v // 128) * -(-keys // 64)
    return Tiles(scores, scores * -(-problem.head_dim // 64), values, values_steps)


def loop_of(problem: AttentionProblem, scores: str, values: str) -> str:
    """`Cost.loop`: how both products are computed. Torch's take another kernel for few rows, and another, up to four
    times slower, for rows of P that do not begin at multiples of 16 bytes; heads of 64 fill half of a tile."""
    if scores == "hopper":
        return ""
    rows = ""
    if values == "library" and problem.seqlen_q * problem.num_heads_q <= 16 * problem.num_heads_kv:
        rows = " few rows"
    elif values == "library" and problem.seqlen_k * DTYPE_BYTES[problem.dtype] % 16:
        rows = " odd"
    elif values == "library" and problem.head_dim_v <= 64:
        rows = " narrow"
    elif values == "triton" and problem.dtype == "float32":
        rows = " float32"
    return f"{scores} {values}{rows}"
