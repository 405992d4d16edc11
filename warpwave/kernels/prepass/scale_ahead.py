"""Launches before `hopper/flash_fwd` in float32 that convert Q, K and V to float16, scaled by powers of two, in one or
two parts.

float16 has the 11 significant bits of tf32, but only 30 binades of normal numbers. K and V of each head of each
sequence, and every 64 rows of Q, are therefore multiplied by the power of two that brings their largest finite
magnitude to [2^14, 2^15). Numbers less than 2^28 below it keep all bits; smaller ones are off by at most 2^-39 of it. A
second part holds the remainder of the first, also rounded to 11 bits: Ootomo and Yokota, "Recovering single precision
accuracy from Tensor Cores" (2022), whose parts are not scaled.

Only rows in use determine a scale: those of a sequence, and of K and V those that some query sees. NaN and Inf are
ignored, and stay what they are. Keys and values that a boolean mask hides from all queries become zeros.

Bound: memory: 4 bytes per element are read, of K and V twice, and 2 or 4 written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warpwave.gpu import Gpu
from warpwave.kernels import arguments
from warpwave.kernels.arguments import padded
from warpwave.kernels.groups import InUnits, Sequences, Window
from warpwave.kernels.prepass.in_use import item_of_slot, rows_in_use
from warpwave.kernels.prepass.mask_bits import TILE_KEYS
from warpwave.kernels.prepass.split_ahead import operand_strides
from warpwave.kernels.primitives import IN_INTERPRETER
from warpwave.operands import AnyOperands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch
from warpwave.runtime.parameters import Pointer
from warpwave.runtime.triton_or_stub import INTERPRETED, jit, tl

PARTS = {"fp16x1": 1, "fp16x3": 2}  # parts of an operand
LARGEST_EXPONENT = tl.constexpr(14)  # of a scaled magnitude: 2^15 and the rounding of a sum stay below 65,504
# Largest exponent of a scale: float32 holds its inverse, also times the factor of probabilities
# (hopper/split_float32.py).
MOST_SCALED = tl.constexpr(115)
BLOCK_ROWS = tl.constexpr(64)  # rows of a tile; for Q, those of a consumer of the forward, which have one scale
ALIGNED_KEYS = tl.constexpr(TILE_KEYS)
UNSPECIALIZED = ["batch", "num_heads_q", "num_heads_kv", "tiles_q", "tiles_k"]


# Device code ----------------------------------------------------------------------------------------------------------


class KeysSeen(NamedTuple):
    """Flags of the keys that a boolean mask shows to some query (`mask_bits.keys_seen_kernel`), or None.

    Attributes:
        stride_b, stride_h: 0 along broadcast axes. Heads of a group have one mask (`reasons.of_float32_masks`).
    """

    ptr: Pointer
    stride_b: int
    stride_h: int


@jit
def _place(tile, sequences: Sequences, heads, batch, IS_KEYS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Returns the position of tile number `tile` of an operand.

    Returns:
        item, head: sequence (dense: batch item) and head.
        first: its first row within the sequence, possibly past the end.
        number, step: the number of the head's first tile, and the distance between its tiles.
    """
    cu_seqlens_ptr, seqlen, total = sequences.cu_seqlens_q_ptr, sequences.seqlen_q, sequences.total_q
    if IS_KEYS:
        cu_seqlens_ptr, seqlen, total = sequences.cu_seqlens_k_ptr, sequences.seqlen_k, sequences.total_k
    if sequences.IS_VARLEN:
        slot = tile // heads
        head = tile % heads
        item, first_slot = item_of_slot(slot, cu_seqlens_ptr, total, batch, BLOCK_ROWS)
        return item, head, (slot - first_slot) * BLOCK_ROWS, first_slot * heads + head, heads
    else:
        tiles = (seqlen + BLOCK_ROWS - 1) // BLOCK_ROWS
        batch_head = tile // tiles
        return batch_head // heads, batch_head % heads, tile % tiles * BLOCK_ROWS, batch_head * tiles, 1


@jit
def load_rows(
    tensor: InUnits, item, head, begin, first, low_row, high_row, UNIT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads ROWS rows of one head from `first` on, zero outside the rows in use and past WIDTH."""
    rows = first + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    # Strides come in units, so that the compiler sees that rows are aligned, and reads 16 bytes at a time.
    base = item.to(tl.int64) * tensor.stride_b + head.to(tl.int64) * tensor.stride_h
    offsets = (base + (begin + rows).to(tl.int64) * tensor.stride_m)[:, None] * UNIT
    offsets += dims.to(tl.int64)[None, :] * tensor.stride_d
    inside = ((rows >= low_row) & (rows < high_row))[:, None] & (dims < WIDTH)[None, :]
    return tl.load(tensor.ptr + offsets, mask=inside, other=0.0)


@jit
def keys_shown(seen: KeysSeen, item, head, rows, inside):
    """Returns which keys are `inside` and, if there is a mask, seen by some query of a kv head."""
    if seen.ptr is None:
        return inside
    else:
        of_head = item.to(tl.int64) * seen.stride_b + head.to(tl.int64) * seen.stride_h
        return tl.load(seen.ptr + of_head + rows, mask=inside, other=0) != 0


@jit
def load_keys(
    tensor: InUnits, seen: KeysSeen, item, head, begin, first, low_row, high_row, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads rows of K or V as `load_rows` does, zero also where a mask hides a key from all queries."""
    x = load_rows(tensor, item, head, begin, first, low_row, high_row, UNIT, WIDTH, ROWS, BLOCK_D)
    if seen.ptr is not None:
        rows = first + tl.arange(0, ROWS)
        x = tl.where(keys_shown(seen, item, head, rows, (rows >= low_row) & (rows < high_row))[:, None], x, 0.0)
    return x


@jit
def largest_of(x):
    """Returns the largest finite magnitude of a tile."""
    magnitudes = tl.abs(x)
    return tl.max(tl.max(tl.where(magnitudes < float("inf"), magnitudes, 0.0), 1), 0)


@jit
def power_of_two(exponent):
    """Returns 2^exponent, a normal number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def exponent_for(largest, MOST: tl.constexpr):
    """Returns the exponent, at most MOST, of the scale that brings the largest magnitude to [2^14, 2^15)."""
    exponent = LARGEST_EXPONENT + 127 - (largest.to(tl.int32, bitcast=True) >> 23)
    return tl.minimum(exponent, MOST)


@jit
def half_part(x, IS_NVIDIA: tl.constexpr):
    """Returns the float16 nearest to x, 11 of its 24 bits, and the remainder of x; NaN if x is not finite."""
    if IS_NVIDIA and not IN_INTERPRETER:
        # The numbers are used again as float32, so the compiler would convert them one by one, at a quarter of the
        # rate.
        part = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        part = x.to(tl.float16)
    return part, x - part.to(tl.float32)


@jit
def _maximum_of_tile(
    tile, tensor: InUnits, seen: KeysSeen, maxima_ptr, sequences: Sequences, window: Window, heads, batch,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Returns the largest finite magnitude of one tile's rows in use."""
    item, head, first, _, _ = _place(tile, sequences, heads, batch, True, BLOCK_ROWS)
    begin, low_row, high_row = rows_in_use(item, sequences, window, True)
    x = load_keys(tensor, seen, item, head, begin, first, low_row, high_row, UNIT, WIDTH, BLOCK_ROWS, BLOCK_D)
    tl.store(maxima_ptr + tile, largest_of(x))


@jit
def _scale_tile(
    tile, tensor: InUnits, seen: KeysSeen, parts_ptr, maxima_ptr, inverse_ptr, sequences: Sequences, window: Window,
    heads, batch, IS_KEYS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, OWN_MAXIMUM: tl.constexpr,
    OWN_ROWS: tl.constexpr, IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Writes one tile in parts: rows of ROW elements, zero past WIDTH, the parts of a head adjacent. A tile of Q has
    its own scale and writes its inverse; the inverse of a head of K or V is written by the tile with the first row in
    use. Rows not in use are not written, except that zeros precede the first key in use under a mask, where the
    forward's first tile of keys begins at a multiple of ALIGNED_KEYS. A second part that is not finite beside a finite
    first one would make the output wrong and finite, which no block notices (hopper/split_float32.number)."""
    item, head, first, number, step = _place(tile, sequences, heads, batch, IS_KEYS, BLOCK_ROWS)
    begin, low_row, high_row = rows_in_use(item, sequences, window, IS_KEYS)
    first_written = low_row
    if IS_KEYS:  # noqa: SIM102 (both are known when compiled)
        if seen.ptr is not None:
            first_written = low_row // ALIGNED_KEYS * ALIGNED_KEYS
    if (first < high_row) & (first + BLOCK_ROWS > first_written):
        if IS_KEYS:
            x = load_keys(tensor, seen, item, head, begin, first, low_row, high_row, UNIT, WIDTH, BLOCK_ROWS, BLOCK_D)
        else:
            x = load_rows(tensor, item, head, begin, first, low_row, high_row, UNIT, WIDTH, BLOCK_ROWS, BLOCK_D)
        largest = tl.full((), 0.0, tl.float32)
        if not IS_KEYS:
            largest = largest_of(x)
        elif OWN_MAXIMUM:
            for row in range(low_row, high_row, OWN_ROWS):
                others = load_keys(
                    tensor, seen, item, head, begin, row, low_row, high_row, UNIT, WIDTH, OWN_ROWS, BLOCK_D
                )
                largest = tl.maximum(largest, largest_of(others))
        else:
            first_tile, last_tile = low_row // BLOCK_ROWS, (high_row - 1) // BLOCK_ROWS
            for i in range(first_tile, last_tile + 1, 128):
                tiles = i + tl.arange(0, 128)
                found = tl.load(maxima_ptr + number + tiles * step, mask=tiles <= last_tile, other=0.0)
                largest = tl.maximum(largest, tl.max(found, 0))
        exponent = exponent_for(largest, MOST_SCALED)
        if not IS_KEYS:
            tl.store(inverse_ptr + tile, power_of_two(-exponent))
        elif first <= low_row:
            tl.store(inverse_ptr + (item * heads + head) * 2, power_of_two(-exponent))
        x *= power_of_two(exponent)
        rows = first + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_D)
        batch_head = head.to(tl.int64)
        if sequences.IS_VARLEN:
            rows_of_head = sequences.total_k if IS_KEYS else sequences.total_q
        else:
            batch_head += item.to(tl.int64) * heads
            rows_of_head = sequences.seqlen_k if IS_KEYS else sequences.seqlen_q
        inside = ((rows >= first_written) & (rows < high_row))[:, None] & (dims < ROW)[None, :]
        for i in tl.static_range(PARTS):
            part, x = half_part(x, IS_NVIDIA)
            row = (batch_head * PARTS + i) * rows_of_head + begin + rows
            tl.store(parts_ptr + row[:, None] * ROW + dims[None, :], part, mask=inside)


@jit(do_not_specialize=UNSPECIALIZED)
def maxima_kernel(
    k_tensor: InUnits,
    v_tensor: InUnits,
    sequences: Sequences,
    window: Window,
    seen: KeysSeen,
    maxima_ptr,
    batch,
    num_heads_kv,
    tiles_k,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
):
    """Computes the largest finite magnitude of every tile of K, then of V, one number per program."""
    if LAUNCHED_AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid < tiles_k:
        _maximum_of_tile(
            pid, k_tensor, seen, maxima_ptr, sequences, window, num_heads_kv, batch, UNIT, HEAD_DIM, BLOCK_ROWS,
            BLOCK_D,
        )  # fmt: skip
    else:
        _maximum_of_tile(
            pid - tiles_k, v_tensor, seen, maxima_ptr + tiles_k, sequences, window, num_heads_kv, batch, UNIT,
            HEAD_DIM_V, BLOCK_ROWS, BLOCK_DV,
        )  # fmt: skip


@jit(do_not_specialize=UNSPECIALIZED)
def scale_kernel(
    q_tensor: InUnits,
    k_tensor: InUnits,
    v_tensor: InUnits,
    sequences: Sequences,
    window: Window,
    seen: KeysSeen,
    q_parts_ptr,
    k_parts_ptr,
    v_parts_ptr,
    inverses_ptr,
    maxima_ptr,
    batch,
    num_heads_q,
    num_heads_kv,
    tiles_q,
    tiles_k,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROW: tl.constexpr,
    ROW_V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OWN_MAXIMUM: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    IS_NVIDIA: tl.constexpr,
    LAUNCHED_AHEAD: tl.constexpr,
):
    """Writes Q, K and V in scaled float16 parts, and the inverses of the scales: (sequence, num_heads_kv, 2), of k and
    v, then one for each tile of Q. With OWN_MAXIMUM every program scans its whole head."""
    if LAUNCHED_AHEAD:  # the next launch starts when all programs have started, and waits for their end
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # In reverse order: the data that the preceding launch read last may still be in L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if pid < tiles_q:
        _scale_tile(
            pid, q_tensor, seen, q_parts_ptr, maxima_ptr, inverses_ptr + batch * num_heads_kv * 2, sequences, window,
            num_heads_q, batch, False, UNIT, HEAD_DIM, ROW, PARTS, BLOCK_ROWS, BLOCK_D, OWN_MAXIMUM, OWN_ROWS,
            IS_NVIDIA,
        )  # fmt: skip
    elif pid < tiles_q + tiles_k:
        _scale_tile(
            pid - tiles_q, k_tensor, seen, k_parts_ptr, maxima_ptr, inverses_ptr, sequences, window, num_heads_kv,
            batch, True, UNIT, HEAD_DIM, ROW, PARTS, BLOCK_ROWS, BLOCK_D, OWN_MAXIMUM, OWN_ROWS, IS_NVIDIA,
        )  # fmt: skip
    else:
        _scale_tile(
            pid - tiles_q - tiles_k, v_tensor, seen, v_parts_ptr, maxima_ptr + tiles_k, inverses_ptr + 1, sequences,
            window, num_heads_kv, batch, True, UNIT, HEAD_DIM_V, ROW_V, PARTS, BLOCK_ROWS, BLOCK_DV, OWN_MAXIMUM,
            OWN_ROWS, IS_NVIDIA,
        )  # fmt: skip


# Host -----------------------------------------------------------------------------------------------------------------

# A separate launch for the maxima costs some 2 us. Instead every program may scan its whole head of K or V, if the head
# has at most OWN_MAXIMUM_BYTES and all programs together read at most ALL_OWN_BYTES.
OWN_MAXIMUM_BYTES, ALL_OWN_BYTES = 128 * 1024, 8 * 1024 * 1024


class Scaling(NamedTuple):
    """The launches that scale, in order, and their output tensors.

    Args:
        launches: [maxima,] parts.
        parts: q, k and v, float16 (`split_ahead.part_shapes`).
        inverses: float32, flat: (sequences, num_heads_kv, 2), of k and v, then one for each tile of q.
        maxima: float32 (2, tiles of k), None if no launch finds them.
    """

    launches: tuple[launch.Launch, ...]
    parts: tuple[torch.Tensor, ...]
    inverses: torch.Tensor
    maxima: torch.Tensor | None


def num_tiles(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the numbers of tiles of q, and of k or v."""
    p, rows = problem, BLOCK_ROWS.value
    if p.packed:
        return (p.total_q // rows + p.batch) * p.num_heads_q, (p.total_k // rows + p.batch) * p.num_heads_kv
    return -(-p.seqlen_q // rows) * p.batch * p.num_heads_q, -(-p.seqlen_k // rows) * p.batch * p.num_heads_kv


def own_maximum(problem: AttentionProblem) -> bool:
    """Returns whether every program finds the maximum of its head itself."""
    head_bytes = 4 * problem.seqlen_k * padded(max(problem.head_dim, problem.head_dim_v))
    return head_bytes <= OWN_MAXIMUM_BYTES and 2 * num_tiles(problem)[1] * head_bytes <= ALL_OWN_BYTES


def workspace_floats(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the numbers of inverses and of maxima."""
    tiles_q, tiles_k = num_tiles(problem)
    return problem.batch * 2 * problem.num_heads_kv + tiles_q, 0 if own_maximum(problem) else 2 * tiles_k


def _constants_and_options(
    problem: AttentionProblem, gpu: Gpu, widths: tuple[int, int]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Returns the compile-time arguments and the options that the launches share. `widths`: elements of a row of parts
    of k, and of v."""
    ahead = gpu.arch == "sm_90" and not INTERPRETED  # programmatic dependent launch
    blocks = {"BLOCK_D": padded(widths[0]), "BLOCK_DV": padded(widths[1])}
    band = {"IS_VARLEN": problem.packed, **arguments.band_constants(problem), "LAUNCHED_AHEAD": ahead}
    # 32 elements a thread, or 64 if every program scans its head, which it reads at once.
    options = {"num_warps": max(4, max(blocks.values()) // 16), "num_stages": 1, "enable_fp_fusion": False}
    options |= {"launch_pdl": True} if ahead else {}
    return {"HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v} | blocks | band, options


def seen_scalars(seen: torch.Tensor | None) -> list[int]:
    """Returns the run-time numbers of `KeysSeen`."""
    if seen is None:
        return [0, 0]
    batch, heads, keys = seen.shape
    return [heads * keys if batch > 1 else 0, keys if heads > 1 else 0]


def specify_maxima(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    maxima: torch.Tensor,
    widths: tuple[int, int],
    seen: torch.Tensor | None = None,
) -> launch.Launch:
    """Returns the launch that finds the largest magnitude of each tile of k and v in use.

    Args:
        maxima: float32 (2, tiles of k), to be written.
        widths: elements of a row of parts of k, and of v.
        seen: flags of the keys that a boolean mask shows to some query (`mask_bits.specify_keys_seen`).
    """
    strides, unit = operand_strides(operands[:3])
    constants, options = _constants_and_options(problem, gpu, widths)
    tiles_k = num_tiles(problem)[1]
    return launch.Launch(
        kernel=maxima_kernel,
        grid=2 * tiles_k,
        tensors=(*operands[1:3], operands.cu_seqlens_q, operands.cu_seqlens_k, seen, maxima),
        scalars=[
            *strides[4:],
            *arguments.lengths(problem),
            *seen_scalars(seen),
            problem.batch,
            problem.num_heads_kv,
            tiles_k,
        ],
        constants={"UNIT": unit} | constants,
        options=options,
    )


def specify(
    problem: AttentionProblem,
    gpu: Gpu,
    operands: AnyOperands,
    arithmetic: str,
    shapes: tuple[tuple[int, ...], ...],
    seen: torch.Tensor | None = None,
) -> Scaling:
    """Returns the launches that convert q, k and v to the float16 parts of an arithmetic.

    Args:
        shapes: of the parts (`split_ahead.part_shapes`): rows are multiples of 16 elements, zero past head_dim.
        seen: as `specify_maxima` takes it.
    """
    device = operands.q.device
    parts = tuple(torch.empty(shape, dtype=torch.float16, device=device) for shape in shapes)
    many_inverses, many_maxima = workspace_floats(problem)
    inverses = torch.empty(many_inverses, dtype=torch.float32, device=device)
    maxima = torch.empty(many_maxima, dtype=torch.float32, device=device) if many_maxima else None
    tiles_q, tiles_k = num_tiles(problem)
    strides, unit = operand_strides(operands[:3])
    cu_seqlens = (operands.cu_seqlens_q, operands.cu_seqlens_k)
    constants, options = _constants_and_options(problem, gpu, (shapes[0][-1], shapes[2][-1]))
    widest = max(constants["BLOCK_D"], constants["BLOCK_DV"])
    launches = []
    if maxima is not None:
        launches.append(specify_maxima(problem, gpu, operands, maxima, (shapes[0][-1], shapes[2][-1]), seen))
    else:
        options["num_warps"] = 16
    of_parts = {"ROW": shapes[0][-1], "ROW_V": shapes[2][-1], "PARTS": PARTS[arithmetic]}
    how = {
        "OWN_MAXIMUM": maxima is None,
        "OWN_ROWS": 512 * 64 // widest if maxima is None else BLOCK_ROWS.value,
        "IS_NVIDIA": gpu.vendor == "nvidia",
    }
    launches.append(
        launch.Launch(
            kernel=scale_kernel,
            grid=tiles_q + 2 * tiles_k,
            # A pointer with arithmetic on it must not be absent: the inverses replace maxima that are never read.
            tensors=(*operands[:3], *cu_seqlens, seen, *parts, inverses, inverses if maxima is None else maxima),
            scalars=[
                *strides,
                *arguments.lengths(problem),
                *seen_scalars(seen),
                problem.batch,
                problem.num_heads_q,
                problem.num_heads_kv,
                tiles_q,
                tiles_k,
            ],
            constants={"UNIT": unit} | constants | of_parts | how,
            options=options,
        )
    )
    return Scaling(tuple(launches), parts, inverses, maxima)
