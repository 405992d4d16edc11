"""Quantizes one tensor: the launch that rounds blocks of tokens and finds their factors, and the same by torch.

A factor is the largest magnitude among the numbers that share it, over the largest number of the dtype. Before it is
rounded, the tensor may be rotated, have a mean subtracted, and have its largest magnitudes clipped (quantize.py).

Bound: memory. The factors of blocks are found by the launch that rounds the blocks, which reads the tensor once. A
factor of a head or of a tensor needs a launch before it.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import descales, reasons
from warpwave.kernels.groups import InUnits, OfHeads
from warpwave.kernels.primitives import in_elements, load_tile, packed_sequence, rounded, tile_pointers
from warpwave.kernels.torch_products import plainly, product
from warpwave.runtime import launch
from warpwave.runtime.triton_or_stub import NO_TRITON, jit, tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
MAX_HEAD_DIM = 256  # of the launch: a block of 128 tokens in registers
MOST_MIXED = 128  # channels of a rotation
LEAST_OF_A_PRODUCT = 16  # columns that a matrix unit sums
TOKENS = 128  # of a program whose factor is not that of a block
SMALLEST = tl.constexpr(2.0**-80)  # a factor; smaller ones of V count as this in hopper/token_factors.py
# The factor of zeros. Values with a larger factor than their neighbors leave these less of the range of probabilities.
# With 1e-30, sums of probabilities divided by it leave the range of float32 beside values of 1e9.
OF_ZEROS = tl.constexpr(2.0**-40)
_draws = random.Random(0)
ROW_SIGNS = [1.0 - 2 * _draws.getrandbits(1) for _ in range(MOST_MIXED)]  # of a rotation

# Device code ----------------------------------------------------------------------------------------------------------


@jit
def clipped_magnitude(magnitudes, allowed):
    """Returns the smallest bfloat16, rounded up, that at most `allowed` of the magnitudes exceed. Magnitudes of float32
    are ordered like their bits, of which the upper 16 are compared: a search of 15 steps."""
    levels = magnitudes.to(tl.int32, bitcast=True) >> 16
    low = 0
    high = 0x7F80
    while low < high:
        middle = (low + high) // 2
        above = tl.sum((levels > middle).to(tl.int32))
        if above <= allowed:
            high = middle
        else:
            low = middle + 1
    return tl.minimum(((high + 1) << 16).to(tl.float32, bitcast=True), tl.max(magnitudes))


@jit
def factor_of(largest, LARGEST: tl.constexpr):
    """Returns the factor with which the largest of some magnitudes becomes LARGEST, at least SMALLEST; OF_ZEROS if all
    are 0."""
    return tl.where(largest > 0.0, tl.maximum(tl.math.div_rn(largest, LARGEST), SMALLEST), OF_ZEROS)


@jit
def eight_bit(y, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """Returns numbers in units of their factor, float32, as the 8-bit DTYPE; NaN becomes 0."""
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), 0.0)
    if DTYPE == tl.int8:
        y = (y + 1.5 * 2.0**23) - 1.5 * 2.0**23  # to the nearest integer, to even
    return rounded(y, DTYPE)


@jit(do_not_specialize=["seqlen", "total", "num_heads", "num_blocks", "share_clipped"])
def quantize_kernel(
    x_tensor: InUnits,
    out_tensor: InUnits,
    factor: OfHeads,
    mean: OfHeads,
    bits_ptr,
    rotation_ptr,
    saturated_ptr,
    cu_seqlens_ptr,
    seqlen,
    total,
    num_heads,
    num_blocks,
    rotation_scale,
    share_clipped,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    MODE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    HAS_CLIPPING: tl.constexpr,
):
    """Rounds TOKENS tokens of one head, or finds their largest magnitude.

    Args:
        factor: written, unless MODE is "magnitude": that of the block if it is "block", that of `bits_ptr` if it is
            "found".
        bits_ptr: the bits of the largest magnitude of each factor's numbers. All that "magnitude" writes.
    """
    pid = tl.program_id(0)
    block = pid // num_heads % num_blocks  # the heads of a token are neighbors in memory
    head = (pid % num_heads).to(tl.int64)
    batch = (pid // num_heads // num_blocks).to(tl.int64)
    # Strides come in units, so that the compiler sees which rows are aligned, and reads and writes 16 bytes at a time.
    x_tensor = in_elements(x_tensor, STRIDE_UNIT)
    out_tensor = in_elements(out_tensor, STRIDE_UNIT)
    x_ptr, out_ptr = x_tensor.ptr, out_tensor.ptr
    of_head = batch * factor.stride_b + head * factor.stride_h
    if MODE == "found":
        unit = factor_of(tl.load(bits_ptr + of_head).to(tl.float32, bitcast=True), LARGEST)
        tl.store(factor.ptr + of_head, unit, mask=block == 0)
    if IS_VARLEN:
        begin, seqlen = packed_sequence(cu_seqlens_ptr, batch, seqlen, total)
        if block * TOKENS >= seqlen:
            return
        x_ptr += begin * x_tensor.stride_m
        out_ptr += begin * out_tensor.stride_m
    rows = block * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < seqlen)[:, None] & (columns < HEAD_DIM)[None, :]
    x_ptr += batch * x_tensor.stride_b + head * x_tensor.stride_h
    x = tile_pointers(x_ptr, rows, columns, x_tensor.stride_m, 1)
    x = load_tile(x, rows, columns, 0, seqlen, HEAD_DIM, HEAD_DIM < BLOCK_D)  # [TOKENS, BLOCK_D]
    if rotation_ptr is not None:
        mixed = tl.arange(0, ROTATED)
        signs = tile_pointers(rotation_ptr, mixed, mixed, ROTATED, 1)
        signs = load_tile(signs, mixed, mixed, 0, ROTATED, ROTATED, False)  # [ROTATED, ROTATED]
        x = tl.reshape(x, [TOKENS * BLOCK_D // ROTATED, ROTATED])
        x = tl.dot(x, signs, input_precision="ieee") * rotation_scale
        x = tl.reshape(x, [TOKENS, BLOCK_D])
    x = x.to(tl.float32)
    if mean.ptr is not None:
        means = mean.ptr + batch * mean.stride_b + head * mean.stride_h + columns
        means = tl.load(means, mask=columns < HEAD_DIM, other=0.0)
        x = tl.where(inside, x - means[None, :], 0.0)

    if MODE != "found":
        magnitudes = tl.abs(x)
        magnitudes = tl.where(magnitudes < float("inf"), magnitudes, float("inf"))  # NaN included
        if HAS_CLIPPING:
            count = tl.minimum(seqlen - block * TOKENS, TOKENS) * HEAD_DIM
            largest = clipped_magnitude(magnitudes, (count * share_clipped).to(tl.int32))
        else:
            largest = tl.max(magnitudes)
        if MODE == "magnitude":
            # The bits of positive numbers are ordered like the numbers.
            tl.atomic_max(bits_ptr + of_head, largest.to(tl.int32, bitcast=True))
            return
        unit = factor_of(largest, LARGEST)
        tl.store(factor.ptr + of_head + block, unit)
    y = x * tl.math.div_rn(1.0, unit)
    if HAS_CLIPPING:
        beyond = tl.sum((tl.abs(y) > LARGEST).to(tl.int32))
        tl.atomic_add(saturated_ptr, beyond.to(tl.int64))
    out_ptr += batch * out_tensor.stride_b + head * out_tensor.stride_h
    out = tile_pointers(out_ptr, rows, columns, out_tensor.stride_m, 1)
    tl.store(out, eight_bit(y, out_ptr.dtype.element_ty, LARGEST), mask=inside)


# One tensor -----------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A tensor to be quantized, and how.

    Attributes:
        x: q, k or v.
        dtype: of the result.
        granularity: one of `GRANULARITIES`.
        mean: float32, (batch, num_heads, head_dim), packed (num_heads, head_dim): subtracted first; None for nothing.
        rotate: whether to rotate.
        percentile: the share of the magnitudes of a block that do not saturate, 1.0 for all.
        cu_seqlens, max_seqlen: of a packed tensor; None and 0 otherwise.
    """

    x: torch.Tensor
    dtype: torch.dtype
    granularity: str | int
    mean: torch.Tensor | None
    rotate: bool
    percentile: float
    cu_seqlens: torch.Tensor | None
    max_seqlen: int

    @property
    def batch(self) -> int:
        return len(self.x) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def seqlen(self) -> int:
        return self.x.shape[1] if self.cu_seqlens is None else self.max_seqlen

    @property
    def is_block(self) -> bool:
        return isinstance(self.granularity, int)


# (x, mean, cu_seqlens, saturated) -> the quantized tensor and its factors, in the shape that a call takes. `saturated`
# is int64 (1,): the number of values that saturate is added to it. It may be None if nothing is clipped.
Rounding = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]
]


def prepare(source: Source, saturated: torch.Tensor | None) -> Rounding:
    """Compiles for the layout of these tensors and returns the function that quantizes tensors of the same layout."""
    if source.x.is_cuda and NO_TRITON is None and has_launch(source, current_gpu(source.x.device)):
        return by_triton(source, saturated)
    options = source[1:3], source[4:6], source.max_seqlen  # without its tensors, which a plan must not keep

    def rounding(
        x: torch.Tensor, mean: torch.Tensor | None, offsets: torch.Tensor | None, saturated: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (to, granularity), (rotate, percentile), longest = options
        return by_torch(Source(x, to, granularity, mean, rotate, percentile, offsets, longest), saturated)

    return rounding


def has_launch(source: Source, gpu: Gpu) -> bool:
    """Returns whether the launch can quantize a tensor on a GPU."""
    x = source.x
    if x.shape[-1] > MAX_HEAD_DIM or (source.dtype != torch.int8 and reasons.of_float8(gpu)):
        return False
    # A matrix unit multiplies 16-bit numbers by 1 and -1 exactly, and float32 numbers not.
    return not source.rotate or (x.dtype != torch.float32 and smem_bytes(source) <= gpu.smem_per_block_bytes)


def smem_bytes(source: Source) -> int:
    """Returns an upper bound on the shared memory of a launch that rotates: its tile, the signs, and barriers."""
    tokens = int(source.granularity) if source.is_block else TOKENS
    side = max(LEAST_OF_A_PRODUCT, rotation_block(source.x.shape[-1]))
    return source.x.element_size() * (tokens * _width(source) + side * side) + 1024


def _width(source: Source) -> int:
    """Returns the channels of a tile."""
    return max(LEAST_OF_A_PRODUCT, 1 << (source.x.shape[-1] - 1).bit_length())


def by_torch(source: Source, saturated: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what a `Rounding` does, by the operations of torch."""
    x, heads = source.x.float(), source.x.shape[-2]
    if source.rotate:
        x = rotated(x)
    if source.mean is not None:
        mean = source.mean if source.cu_seqlens is not None else source.mean[:, None]
        x = x - mean
    magnitudes = x.abs()
    magnitudes = torch.where(magnitudes < torch.inf, magnitudes, torch.inf)
    largest = LARGEST[source.dtype]
    if source.is_block:
        block = int(source.granularity)
        blocks = -(-source.seqlen // block)
        padding = (0, 0, 0, 0, 0, blocks * block - source.seqlen)
        parts = torch.nn.functional.pad(magnitudes, padding).unflatten(1, (blocks, block))
        shares = _clipped(parts.permute(0, 3, 1, 2, 4), source)
    elif source.granularity == "tensor":
        shares = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    elif source.cu_seqlens is None:
        shares = magnitudes.amax((1, 3)) if source.seqlen else magnitudes.new_zeros(source.batch, heads)
    else:
        of_tokens = magnitudes.amax(-1)
        shares = magnitudes.new_zeros(source.batch, heads)
        sequence = descales.sequence_of_tokens(source.cu_seqlens, len(x))
        shares.scatter_reduce_(0, sequence[:, None].expand(of_tokens.shape), of_tokens, "amax")
    factor = factors_of(shares, largest)
    inverse = descales.of_tokens(1 / factor, block if source.is_block else 0, x, source.cu_seqlens)
    y = x * inverse
    if saturated is not None:
        saturated += (y.abs() > largest).sum()
    return eight_bit_by_torch(y, source.dtype), factor


def _clipped(parts: torch.Tensor, source: Source) -> torch.Tensor:
    """Returns the largest magnitude of each block, (batch, num_heads, blocks), after clipping.

    Args:
        parts: magnitudes, (batch, num_heads, blocks, tokens, head_dim), zero past the end of a sequence.
    """
    flat = parts.flatten(3)
    most = flat.amax(-1)
    if source.percentile == 1 or not flat.numel():
        return most
    block = parts.shape[3]
    starts = torch.arange(parts.shape[2], device=parts.device) * block
    counts = (source.seqlen - starts).clamp(max=block) * parts.shape[4]
    allowed = (counts.float() * share_clipped(source)).int()
    levels = (flat.view(torch.int32) >> 16).sort(-1, descending=True).values
    level = levels.gather(-1, allowed.long().expand(most.shape)[..., None])[..., 0]
    return torch.minimum(((level + 1) << 16).view(torch.float32), most)


def eight_bit_by_torch(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers in units of their factor, float32, as an 8-bit dtype; NaN becomes 0."""
    y = torch.where(y == y, y.clamp(-LARGEST[dtype], LARGEST[dtype]), 0.0)
    return (y.round() if dtype == torch.int8 else y).to(dtype)


def factors_of(magnitudes: torch.Tensor, largest: float) -> torch.Tensor:
    """Returns the factors with which the largest magnitudes become the largest number, as `factor_of` does."""
    divisor = magnitudes.new_full((), largest)  # on a GPU, torch divides by a number by multiplying with its reciprocal
    return torch.where(magnitudes > 0, (magnitudes / divisor).clamp(min=SMALLEST.value), OF_ZEROS.value)


def share_clipped(source: Source) -> float:
    """Returns the share of the magnitudes that may saturate, as the float32 that both ways of counting multiply by."""
    return float(torch.tensor(1.0 - source.percentile, dtype=torch.float32, device="cpu"))


def by_triton(source: Source, saturated: torch.Tensor | None) -> Rounding:
    """Does what `prepare` does, with one launch, or two for a factor of a head or a tensor."""
    is_straight, shape_x, dtype, device = source.x.stride(-1) == 1, source.x.shape, source.dtype, source.x.device
    heads, is_block = shape_x[-2], source.is_block
    tokens = int(source.granularity) if is_block else TOKENS
    blocks = -(-source.seqlen // tokens)
    signs = _tile_of_signs(rotation_block(shape_x[-1]), source.x.dtype, device) if source.rotate else None
    shape: tuple[int, ...] = (source.batch, heads, blocks) if is_block else (source.batch, heads)
    if source.granularity == "tensor":
        shape = ()
    is_empty = not blocks * heads * source.batch

    def tensors(x: torch.Tensor, mean: Any, cu_seqlens: Any, saturated: Any) -> tuple[Any, ...]:
        out = torch.empty(shape_x, dtype=dtype, device=device)
        factor = torch.empty(shape, dtype=torch.float32, device=device)
        bits = None if is_block else torch.zeros(shape, dtype=torch.int32, device=device)
        return x if is_straight else x.contiguous(), out, factor, mean, bits, signs, saturated, cu_seqlens

    launchers: list[Callable[..., None]] = []
    if not is_empty:
        example = tensors(source.x, source.mean, source.cu_seqlens, saturated)
        for mode in ("block",) if is_block else ("magnitude", "found"):
            launchers.append(launch.bind(specify(source, mode, example, tokens, blocks)))

    def rounding(
        x: torch.Tensor, mean: torch.Tensor | None, offsets: torch.Tensor | None, saturated: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = tensors(x, mean, offsets, saturated)
        if is_empty:
            given[2].fill_(OF_ZEROS.value)
        for launcher in launchers:
            launcher(*given)
        return given[1], given[2]

    return rounding


def specify(source: Source, mode: str, tensors: tuple[Any, ...], tokens: int, blocks: int) -> launch.Launch:
    """Returns a launch of `quantize_kernel`.

    Args:
        mode: "block", "magnitude" or "found", as the kernel has it.
        tensors: the kernel's, which may be without memory if it is only compiled.
        tokens, blocks: tokens of a program, and programs of a sequence and head.
    """
    x, out, factor, mean, *_ = tensors
    is_packed = source.cu_seqlens is not None
    strides = [(0, *t.stride()) if is_packed else t.stride() for t in (x, out)]
    of_mean = (0, 0) if mean is None else (0, mean.stride(0)) if is_packed else mean.stride()[:2]
    block_d, unit = _width(source), math.gcd(16, *strides[0][:3], *strides[1][:3])
    return launch.Launch(
        kernel=quantize_kernel,
        grid=blocks * x.shape[-2] * source.batch,
        tensors=tensors,
        scalars=[
            *(number for of_tensor in strides for number in (*(stride // unit for stride in of_tensor[:3]), 1)),
            *(factor.stride()[:2] or (0, 0)),
            *of_mean,
            source.seqlen,
            len(x) if is_packed else 0,
            x.shape[-2],
            blocks,
            rotation_block(x.shape[-1]) ** -0.5,
            share_clipped(source),
        ],
        constants={
            "TOKENS": tokens,
            "HEAD_DIM": x.shape[-1],
            "BLOCK_D": block_d,
            "ROTATED": max(LEAST_OF_A_PRODUCT, rotation_block(x.shape[-1])),
            "STRIDE_UNIT": unit,
            "MODE": mode,
            "LARGEST": int(LARGEST[source.dtype]),
            "IS_VARLEN": is_packed,
            "HAS_CLIPPING": source.percentile < 1,
        },
        # Fused multiply-adds round once less, in `x - mean` and before rounding to integers, so bits would differ from
        # torch's.
        options={"num_warps": min(16, max(4, tokens * block_d // 2048)), "num_stages": 1, "enable_fp_fusion": False},
    )


# Rotation -------------------------------------------------------------------------------------------------------------


def rotation_block(head_dim: int) -> int:
    """Returns how many channels a rotation mixes: the largest power of two, up to 128, that divides head_dim."""
    return min(MOST_MIXED, head_dim & -head_dim)


def rotated(x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Returns float32 numbers, (..., head_dim), rotated or rotated back."""
    block = rotation_block(x.shape[-1])
    signs = (_kept_signs if is_eager() else rotation_signs)(block, x.device)
    with plainly(x.device):
        mixed = product(x.unflatten(-1, (-1, block)), signs.T if inverse else signs)
        return mixed.flatten(-2) * block**-0.5


def is_eager() -> bool:
    """Returns whether torch computes at once. Otherwise tensors may have no contents, and must not outlive a call."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def rotation_signs(block: int, device: torch.device) -> torch.Tensor:
    """Returns the rotation of a block of channels times the square root of its size: 1 and -1, (block, block), float32.
    Rows have random signs, the same in every process: without them a constant vector becomes an outlier."""
    hadamard = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(hadamard) < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return torch.tensor(ROW_SIGNS[:block], dtype=torch.float32, device=device)[:, None] * hadamard


_kept_signs = functools.lru_cache(64)(rotation_signs)


def _tile_of_signs(block: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the signs as the launch takes them: several small blocks together make a tile of 16."""
    copies = max(1, LEAST_OF_A_PRODUCT // block)
    return torch.block_diag(*[rotation_signs(block, device)] * copies).to(dtype)
