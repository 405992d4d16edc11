"""Converts a call to a Triton kernel's arguments: strides, window, padding, precision, outputs. Holds no device code.

Every kernel treats a dense and a packed call alike: a packed tensor is one whose batch stride is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from warpwave import precision
from warpwave.gpu import TCGEN05, WGMMA_ROWS, Gpu
from warpwave.operands import AnyOperands
from warpwave.problem import AttentionProblem, by_kind
from warpwave.runtime.scratch import maker

UNLIMITED = 2**30  # a window side larger than any sequence, small enough that adding a length does not overflow


@cache
def padded(head_dim: int) -> int:
    """Returns the tile width for head_dim: a power of two, at least 16, the minimum of a matrix instruction."""
    return max(16, 1 << (head_dim - 1).bit_length())


EIGHT_BIT_WIDTH = 32  # summed columns of a matrix instruction of 8-bit operands
SWIZZLE_WIDTH = 64  # 16-bit elements of a row of 128 bytes, the widest swizzle of shared memory


@by_kind
def tile_widths(problem: AttentionProblem, gpu: Gpu, block_m: int) -> tuple[int, int]:
    """Returns the widths, in elements, of a tile of K and of a tile of V for `block_m` queries.

    On Hopper both tiles get the same swizzle of shared memory. If tiles of two swizzles share a buffer, their matrix
    descriptors are one address plus two different constants. ptxas 12.8, which Triton 3.6 and 3.7 ship, then computes
    the second descriptor from uninitialized registers, and the product reads arbitrary shared memory
    (docs/notes/descriptors.md). Beside a K of 8 bits, a V that is multiplied in 16 bits gets at least K's swizzle. K
    keeps its own: wider, it would double the products of head_dim 64, where none was wrong. A float8 V is exempt: none
    was wrong, whatever the sizes.
    """
    width, width_v = padded(problem.head_dim), padded(problem.head_dim_v)
    if problem.is_quantized:
        width = max(width, EIGHT_BIT_WIDTH)
        is_float8_v = problem.dtype_of_v.startswith("float8")
        if not is_float8_v and gpu.capability == 90 and block_m >= WGMMA_ROWS:
            width_v = max(width_v, min(SWIZZLE_WIDTH, width // 2))
        return width, width_v
    if problem.dtype_kv:  # the even columns of a tile and the odd ones may be two operands, of at least 16
        width, width_v = max(width, 32), max(width_v, 32)
    if gpu.capability == 90 and block_m >= WGMMA_ROWS:
        least = min(SWIZZLE_WIDTH, max(width, width_v))
        width, width_v = max(width, least), max(width_v, least)
    return width, width_v


@by_kind
def column_widths(problem: AttentionProblem, gpu: Gpu, block_m: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the widths of the two tiles that hold the columns of K, and of those for V, if a kernel can have two
    (`column_tiles`). The second width is 0 where one tile holds them.

    Two have fewer columns than one from 33 to 48, 65 to 96 and 129 to 192: on Hopper in the last range only, on AMD in
    the last two. A step of `flash_fwd` in code of sm_80 has 0.82 of the instructions at head_dim 80 and 0.65 at 160.
    One tile remains with a mask or a bias, where dK and dV spill at 80 and 96 (above, two were not tried); in 8 bits;
    for float32 in bfloat16 parts, which a launch may have written before; and with tcgen05, whose accumulators are not
    in registers.
    """
    one_tile = problem.mask_shape is not None or problem.bias_shape is not None or problem.is_quantized
    one_tile |= gpu.capability in TCGEN05 or dot_precision(problem, gpu).startswith("bf16")
    found = []
    for head_dim, width in zip((problem.head_dim, problem.head_dim_v), tile_widths(problem, gpu, block_m), strict=True):
        first = width // 2
        # On Hopper tiles of all operands have one swizzle (`tile_widths`). On AMD 16 columns were not tried. At
        # 128 + 16 columns ptxas gives a thread of dK and dV 32 registers.
        least = SWIZZLE_WIDTH if gpu.capability == 90 else 32 if gpu.vendor == "amd" else max(16, first // 4)
        rest = max(least, padded(head_dim - first)) if head_dim > first else width
        found.append((width, 0) if one_tile or first < least or first + rest >= width else (first, rest))
    return found[0], found[1]


def total_widths(problem: AttentionProblem, gpu: Gpu, block_m: int) -> tuple[int, int]:
    """Returns the sum of the two `column_widths` of K, and that of V."""
    of_k, of_v = column_widths(problem, gpu, block_m)
    return sum(of_k), sum(of_v)


@by_kind
def dot_precision(problem: AttentionProblem, gpu: Gpu) -> str:
    """Returns the arithmetic of float32 products: "ieee", "tf32", "tf32x3", "bf16x3" or "bf16x6"
    (warpwave.precision)."""
    return precision.arithmetic(problem, gpu)


def split_operand(problem: AttentionProblem, gpu: Gpu) -> int:
    """Returns the largest number of copies of a float32 operand in shared memory: itself, and its parts if the matrix
    unit reads them from shared memory. An mma instruction reads them from registers."""
    if problem.dtype != "float32" or gpu.has_mma:
        return 1
    return {"ieee": 1, "bf16x6": 3}.get(dot_precision(problem, gpu), 2)


def matrix_options(problem: AttentionProblem, gpu: Gpu, block_m: int, block_n: int, num_warps: int) -> dict[str, int]:
    """Returns Triton's option for matrix instructions of 16 x 16 on AMD CDNA, if a wave has less than 32 x 32 scores.

    Triton 3.6 to 3.9 prefers instructions of 32 x 32, and gives each wave at least one. A tile with fewer of them than
    waves is then computed several times: 64 x 32 scores on eight waves four times (docs/notes/other_cards.md).
    """
    if gpu.is_cdna and not problem.is_quantized and block_m * block_n < 32 * 32 * num_warps:
        return {"matrix_instr_nonkdim": 16}
    return {}


def two_loops(gpu: Gpu, owned: int, width: int) -> bool:
    """Returns whether `mma` instructions are faster if whole tiles and tiles at an edge have a loop each
    (`primitives.steps_of`).

    Without the branch around the mask, Triton 3.6 to 3.9 sees that one product reads the result of another. It then
    lays all warps along the rows of scores, so that probabilities stay in registers; but along the columns if the later
    product has more columns than rows, and each row is spread over all warps. On AMD two loops take up to twice the
    registers, and nobody timed them.

    Args:
        owned, width: rows and columns of the later product.
    """
    return gpu.vendor != "amd" and owned >= width


def token_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of q, k, v or out, (batch, token, head, element), or of a pool of pages, (page, token, head,
    element). A packed tensor has a batch stride of 0."""
    return (0, *tensor.stride())[-4:]


def stride_unit(*tensors: torch.Tensor | None) -> int:
    """Returns the largest power of two, up to 16, that divides every stride between rows, heads, and batches or pages
    (`groups.InUnits`)."""
    return math.gcd(16, *(stride for tensor in tensors if tensor is not None for stride in tensor.stride()[:-1]))


def strides_in(unit: int, *tensors: torch.Tensor) -> list[int]:
    """Returns the `token_strides` of tensors, in units except along head_dim."""
    strides: list[int] = []
    for tensor in tensors:
        outer, token, head, element = token_strides(tensor)
        strides += (outer // unit, token // unit, head // unit, element)
    return strides


def lse_strides(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the strides of lse: (batch, head)."""
    rows = problem.total_q if problem.packed else problem.seqlen_q
    return (0, rows) if problem.packed else (problem.num_heads_q * rows, rows)


def broadcast_strides(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Returns the strides of mask or bias: (batch, head, query, key), 0 along broadcast axes."""
    if tensor is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


PAIR_GROUP = 16


def pair_group(mask: torch.Tensor | None, bias: torch.Tensor | None) -> int:
    """Returns how many neighboring keys of a mask and a bias a thread may load together: 16 if keys are adjacent in
    memory, and the number of keys and all other strides are multiples of 16; else 1."""
    given = [t for t in (mask, bias) if t is not None]
    are_adjacent = all(t.stride(-1) == 1 for t in given)
    multiples = [n for t in given for n in (t.shape[-1], *broadcast_strides(t)[:-1])]
    return PAIR_GROUP if given and are_adjacent and math.gcd(*multiples) % PAIR_GROUP == 0 else 1


def slope_strides(slopes: torch.Tensor | None) -> tuple[int, ...]:
    """Returns the strides of ALiBi slopes: (batch, head)."""
    if slopes is None:
        return (0, 0)
    return (0, *slopes.stride()) if slopes.dim() == 1 else slopes.stride()


def score_rules(
    problem: AttentionProblem, mask: torch.Tensor | None, bias: torch.Tensor | None, slopes: torch.Tensor | None
) -> list[int | float]:
    """Returns the run-time numbers of `groups.ScoreRules`, in their order."""
    strides = (*broadcast_strides(mask), *broadcast_strides(bias), *slope_strides(slopes))
    return [*strides, problem.softmax_scale, problem.softcap]


def window(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the window's sides, left and right. A causal mask aligned to the last key is a window with right side
    0."""
    left, right = problem.window_size
    if problem.causal is not None and problem.causal.alignment == "bottom_right":
        right = 0
    return (
        min(left, UNLIMITED) if left >= 0 else UNLIMITED,
        min(right, UNLIMITED) if right >= 0 else UNLIMITED,
    )


def lengths(problem: AttentionProblem) -> list[int]:
    """Returns the run-time numbers of `groups.Sequences` and `groups.Window`, in their order."""
    return [problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k, *window(problem)]


def band_constants(problem: AttentionProblem) -> dict[str, bool]:
    """Returns the compile-time constants of the positional mask: which of its edges exist."""
    return {
        "HAS_LOW": problem.window_size[0] >= 0,
        "HAS_HIGH": problem.window_size[1] >= 0 or problem.causal is not None,
        "TOP_LEFT": problem.causal is not None and problem.causal.alignment == "top_left",
    }


def feature_constants(problem: AttentionProblem) -> dict[str, bool]:
    """Returns the compile-time constants of the score transforms after the product."""
    return {
        "HAS_MASK": problem.mask_shape is not None,
        "HAS_BIAS": problem.bias_shape is not None,
        "HAS_ALIBI": problem.alibi_shape is not None,
        "HAS_SOFTCAP": problem.softcap > 0,
        "HAS_SINKS": problem.has_sinks,
    }


Results = tuple[torch.Tensor, torch.Tensor | None]
Run = Callable[..., Results]  # run(operands, out=None) -> (out, lse); given an out, it stores to that one
Allocate = Callable[[torch.Tensor | None], Results]


def allocator(problem: AttentionProblem, q: torch.Tensor) -> Allocate:
    """Returns `allocate(out) -> (out, lse)` on the device of q: the caller's out, or a contiguous one if it is None.
    lse is None unless requested."""
    rows = (problem.total_q,) if problem.packed else (problem.batch, problem.seqlen_q)
    make_out = maker((*q.shape[:-1], problem.head_dim_v), getattr(torch, problem.dtype_of_out), q.device)
    if not problem.return_lse:
        return lambda out: (make_out() if out is None else out, None)
    make_lse = maker((*rows[:-1], problem.num_heads_q, rows[-1]), torch.float32, q.device)
    return lambda out: (make_out() if out is None else out, make_lse())


def straightener(operands: AnyOperands, in_groups: bool = False) -> Callable[[Any], Any]:
    """Returns `straight(operands)`: mask and bias with stride 1 (or 0, along a broadcast axis), all others with
    stride 1. Otherwise the layout would add kernel variants, with different bits. A tensor of other strides is copied,
    once along an axis of stride 0. The factors of quantized tensors are read one by one, by any strides.

    Args:
        in_groups: also copy masks and biases whose keys could be loaded in groups (`pair_group`) if their address and
            strides were multiples of 16. The sums of a row depend on how a thread loads its keys, so the bits would
            depend on the address. A copy costs as much memory as the tensor.
    """
    pairs = [t for t in operands[3:5] if t is not None]
    in_groups &= all(t.shape[-1] % PAIR_GROUP == 0 and t.stride(-1) != 0 for t in pairs)
    copied = []
    for name in operands._fields[3:]:
        tensor = getattr(operands, name)
        if tensor is None or name.endswith("_descale") or tensor.shape[-1] <= 1:
            continue
        is_pairs = name in ("mask", "bias")
        is_straight = tensor.stride(-1) == 1 or (tensor.stride(-1) == 0 and is_pairs)
        if in_groups and is_pairs and is_straight:
            is_aligned = tensor.device.type == "meta" or tensor.data_ptr() % 16 == 0
            is_straight = is_aligned and not any(n % PAIR_GROUP for n in broadcast_strides(tensor)[:-1])
        if not is_straight:
            copied.append(name)
    if not copied:
        return as_it_is
    return lambda operands: operands._replace(**{name: _copy(getattr(operands, name)) for name in copied})


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy, expanded along the axes of stride 0 before the last."""
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()[:-1])]
    return once.clone(memory_format=torch.contiguous_format).expand(tensor.shape)


def as_it_is(operands: Any) -> Any:
    """Returns operands unchanged."""
    return operands


def behind(change: Callable[[Any], Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs `run` on changed operands, or `run` itself if nothing changes, which saves a
    call."""
    return run if change is as_it_is else lambda operands, out=None: run(change(operands), out)
