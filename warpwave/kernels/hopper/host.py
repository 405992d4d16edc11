"""Host code that the Hopper kernels share: operands as tensor maps describe them, and run-time arguments. Holds no
kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from warpwave.kernels import arguments
from warpwave.operands import AnyOperands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.runtime.counters import counters_of
from warpwave.runtime.tensor_maps import MapPlan, has_map

NUM_SMS = 132  # for `heads_in_l2` and to divide blocks of gradients, on every GPU: the bits depend on it
# What the heads that run together under a causal mask, or in a packed call, may read again. An H100's L2 has 50 MB; the
# rest is left to tensors that are read or written once.
L2_BYTES = 32 * 1024 * 1024
# Minimum number of blocks per SM in a group of heads, in a dense call and in a packed one. In packed calls, with 4, the
# longest blocks of the last group started so late that the backward had 0.94 of the rate of one group (8,192 to 2,048
# tokens, 32 on 8 heads). In dense calls, groups of 1.1 blocks had 0.95 of the rate of groups of 2.3 (10 heads of
# 9,600 tokens).
LEAST_BLOCKS_DENSE, LEAST_BLOCKS_PACKED = 2, 8
LOG2_E = 1.4426950408889634
MAX_PIECES = 3  # of a tile's width
Described = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def mappable(operands: AnyOperands, mapped: Sequence[str] = ("q", "k", "v")) -> Callable[[Any], Any]:
    """Returns a function that copies the operands of this layout that tensor maps cannot describe, among those that get
    one."""
    straight = arguments.straightener(operands)
    copied = [name for name in mapped if not has_map(getattr(operands, name))]
    if not copied and straight is arguments.as_it_is:
        return arguments.as_it_is

    def made(operands: Any) -> Any:
        aligned = {n: getattr(operands, n).clone(memory_format=torch.contiguous_format) for n in copied}
        return straight(operands)._replace(**aligned)

    return made


@cache
def pieces(head_dim: int, narrowest: int = 16) -> tuple[int, ...]:
    """Returns the powers of two that add up to a row width, widest first: 80 = 64 + 16. A width that is not a sum of at
    most three such powers, each at least `narrowest`, is padded with zeros, which TMA supplies."""
    width = -(-head_dim // narrowest) * narrowest
    while True:
        parts = tuple(1 << bit for bit in range(8, narrowest.bit_length() - 2, -1) if width & 1 << bit)
        if len(parts) <= MAX_PIECES:
            return parts
        width += narrowest


def piece_maps(
    source: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, widths: tuple[int, ...]
) -> list[MapPlan | None]:
    """Returns the maps of a tensor as `seen` or `together` describes it, one for each piece of a tile of `rows`
    rows; MAX_PIECES, absent ones are None."""
    lines = (rows,) if len(shape) == 4 else (rows // shape[3], shape[3])
    maps = [MapPlan(source, shape, strides, (1, 1, *lines, width)) for width in widths]
    return [*maps, *[None] * (MAX_PIECES - len(maps))]


def seen(tensor: torch.Tensor, packed: bool, rows: int | None = None) -> Described:
    """Returns shape and strides of a (batch, seqlen, head, width) or packed (total, head, width) tensor in the axis
    order of tensor maps: batch, head, row, column. A dense tensor is cut to `rows` rows, at least 1."""
    stride = tensor.stride()
    if packed:
        total, heads, width = tensor.shape
        return (1, heads, total, width), (stride[0], stride[1], stride[0], 1)
    batch, length, heads, width = tensor.shape
    return (batch, heads, length if rows is None else max(1, rows), width), (stride[0], stride[2], stride[1], 1)


def together(described: Described, heads: int) -> Described:
    """Returns shape and strides, as `seen` describes them, of a tensor whose tiles `heads` heads share: batch, group of
    these heads, row, head of the group, column."""
    if heads == 1:
        return described
    (batch, many, rows, width), (of_batch, of_head, of_row, of_column) = described
    return (batch, many // heads, rows, heads, width), (of_batch, heads * of_head, of_row, of_head, of_column)


def bias_kind(bias: torch.Tensor | None) -> str:
    """Returns how a bias is read: "" without one, "cells" if each score has its own number, "keys" if it is the same
    for all queries, "rows" if it is the same for all keys."""
    if bias is None:
        return ""
    *_, stride_m, stride_n = arguments.broadcast_strides(bias)
    return "rows" if stride_n == 0 else "keys" if stride_m == 0 else "cells"


def bias_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of a score's bias in shared memory; 0 if it is the same for all queries or for all keys.

    The problem has shapes and no strides. A bias that is expanded along queries or keys therefore counts as one number
    for each score, although `bias_kind` finds that its launch loads none: the result is then an upper bound.
    """
    if problem.bias_shape is None or min(problem.bias_shape[2:]) <= 1:
        return 0
    return DTYPE_BYTES[problem.bias_dtype or problem.dtype]


def mappable_bias(bias: torch.Tensor) -> torch.Tensor:
    """Returns a bias with one number for each score in a form that a tensor map can describe: broadcast axes have size
    1, and rows are a multiple of 16 bytes, copied if they are not."""
    for axis in (0, 1):
        if bias.stride(axis) == 0:
            bias = bias.narrow(axis, 0, 1)
    if has_map(bias[0, 0]) and all(
        bias.stride(axis) * bias.element_size() % 16 == 0 for axis in (0, 1) if bias.shape[axis] > 1
    ):
        return bias
    return padded_rows(bias, bias.shape).copy_(bias)


def padded_rows(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns new memory of a shape, of the type and device of `like`, whose rows are a multiple of 16 bytes apart."""
    *outer, columns = shape
    return like.new_empty(*outer, -(-columns // 8) * 8)[..., :columns]


def bias_plan(source: int, bias: torch.Tensor, block: tuple[int, int]) -> MapPlan:
    """Returns the tensor map of a bias that has one number for each score, for tiles of (queries, keys)."""
    # An axis of size 1 may have any stride, so it takes one that a map can have.
    strides = tuple(bias.stride(2) if size == 1 else bias.stride(axis) for axis, size in enumerate(bias.shape))
    return MapPlan(source, tuple(bias.shape), strides, (1, 1, *block))


def keys_end(problem: AttentionProblem) -> int:
    """Returns the number of keys of a dense call up to the last one that some query sees. Keys after it must have no
    effect."""
    high = problem.band(problem.seqlen_q, problem.seqlen_k).high
    return problem.seqlen_k if high is None else min(problem.seqlen_k, problem.seqlen_q + high)


def counter(out: torch.Tensor) -> torch.Tensor:
    """Returns a tile counter for compilation; `tensor_maps.bind` passes the stream's own counter at each launch."""
    if out.device.type != "cuda":
        return torch.empty(1, dtype=torch.int32, device="meta")
    return counters_of(out.device).for_graphs


def score_units(problem: AttentionProblem) -> tuple[float, float]:
    """Returns the factor of raw scores and the factor of the softcap's tanh; both convert to bits."""
    if problem.softcap > 0:
        return problem.softmax_scale / problem.softcap, problem.softcap * LOG2_E
    return problem.softmax_scale * LOG2_E, 0.0


def options_of(problem: AttentionProblem) -> dict[str, int | bool]:
    """Returns the compile-time constants of `visible.Options` that follow from the call, by name."""
    features = arguments.feature_constants(problem)
    return {
        **arguments.band_constants(problem),
        **{name: features[name] for name in ("HAS_ALIBI", "HAS_SOFTCAP", "HAS_SINKS")},
        "IS_VARLEN": problem.packed,
        "WRITE_LSE": problem.return_lse,
    }


def heads_in_l2(
    problem: AttentionProblem, heads: int, tiles: int, bytes_of_head: int, sharing: int = 1, bytes_beside: int = 0
) -> int:
    """Returns how many heads are scheduled together: as many as fit L2 together with `bytes_beside`. The group grows
    until it has LEAST_BLOCKS_PACKED blocks for each of NUM_SMS SMs; in a dense call LEAST_BLOCKS_DENSE, and only while
    `bytes_of_head` of all its heads fit L2. It has at most all heads, so that tiles times heads does not overflow.

    Args:
        heads, tiles: of the schedule, in a dense call the heads of a batch item.
        bytes_of_head: what the tiles of a head read again, of the longest sequence.
        sharing: heads that read the same bytes.
        bytes_beside: what the tiles of these heads read or write once, in a dense call.
    """
    most = heads if problem.packed else problem.batch * heads
    least_blocks = LEAST_BLOCKS_PACKED if problem.packed else LEAST_BLOCKS_DENSE
    enough = -(-least_blocks * NUM_SMS * most // max(1, tiles))
    enough = -(-enough // sharing) * sharing
    held = max(1, L2_BYTES // max(1, bytes_of_head)) * sharing
    if problem.packed:
        return min(most, max(held, enough))
    return min(most, max(max(1, L2_BYTES // max(1, bytes_of_head + bytes_beside)) * sharing, min(held, enough)))


def of_schedule(
    problem: AttentionProblem, operands: AnyOperands, tiles: int, parts: int, block_m: int, size: int, together: int = 1
) -> list[int]:
    """Returns the numbers of `groups.Queries` and `groups.Schedule`, and the window, in their order. `parts` blocks
    share a head, or `together` heads share a tile of `block_m` rows; an element has `size` bytes."""
    group_size = problem.num_heads_q // problem.num_heads_kv // together
    heads = problem.num_heads_q * parts // together
    of_keys = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size
    of_query = problem.head_dim * size + problem.head_dim_v * DTYPE_BYTES[problem.dtype_of_out]
    of_queries = problem.seqlen_q * of_query * (problem.num_heads_q // problem.num_heads_kv)
    return [
        arguments.slope_strides(operands.alibi_slopes)[0],
        *arguments.lse_strides(problem),
        tiles,
        heads,
        group_size,
        problem.batch,
        -(-problem.seqlen_q * together // block_m),
        heads_in_l2(problem, heads, tiles, of_keys, group_size * parts, of_queries),
        *arguments.lengths(problem),
    ]
