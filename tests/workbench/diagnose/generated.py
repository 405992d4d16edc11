"""Tables with a planted cause, from a small simulator of a card that shares no code with the rules.

Blocks run on multiprocessors in waves, several at once where they fit; each block takes steps over key tiles. A step
takes its arithmetic, or a latency that other resident blocks hide. Device memory works at the same time. Every printed
time has 3 % noise and the digits that people print.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from warpwave.workbench.diagnose.parse import Document, parse
from warpwave.workbench.hardware.catalog import DataSheet, catalog

NOISE = 0.03
CARDS = ("t4", "a100-80gb", "l4", "rtx3090", "h100", "h200", "mi210", "mi300x")
SMALL_L2 = ("t4", "a10", "rtx3060", "rtx3090", "mi100", "mi210")
MANY_MATRIX = ("t4", "a100-80gb", "h100", "h200", "mi210")  # matrix units at least 8 x as fast as the scalar ones

# A planted cause -> the kinds that name it.
NAMES = {
    "idle SMs": ("idle SMs",),
    "idle threads": ("idle threads",),
    "staircase": ("waves",),
    "scores leave L2": ("memory",),
    "constant factor": ("latency",),
    "one warp": ("few warps",),
    "K and V leave L2": ("cache", "re-reads"),
    "scalar for matrix": ("scalar unit",),
    "launch": ("launch",),
    "re-reads": ("re-reads",),
    "latency loop": ("latency",),
    "arithmetic": ("arithmetic",),
}


@dataclass(frozen=True)
class Planted:
    """A table, and what the simulator knows about it.

    Attributes:
        document: the table.
        cause: a key of `NAMES`.
        resident: blocks that a multiprocessor held at once.
    """

    document: Document
    cause: str
    resident: int


@dataclass
class _Code:
    """The simulated kernel.

    Attributes:
        block_m, block_n: the tile.
        grid: as in the format.
        tflops: what the whole card sustains on this loop.
        step_us: the least time of a step, however few its operations.
        resident: blocks that a multiprocessor holds at once.
        launch_us: the fixed cost.
        in_memory: whether scores are in memory, 4 bytes each.
        reloads: whether repeated loads of K and V come from memory once `working_set` exceeds L2.
        one_head: whether the working set is K and V of one head, instead of all heads.
    """

    block_m: int
    block_n: int
    tflops: float
    grid: str = "query tiles"
    step_us: float = 0.0
    resident: int = 1
    launch_us: float = 3.0
    in_memory: bool = False
    reloads: bool = False
    one_head: bool = False


def _time_us(sheet: DataSheet, code: _Code, heads: int, seqlen: int, head_dim: int, size: int) -> float:
    tiles, steps = math.ceil(seqlen / code.block_m), math.ceil(seqlen / code.block_n)
    count = {"query tiles": heads * tiles, "heads": heads, "output tiles": heads * tiles * steps}[code.grid]
    in_turn = {"query tiles": steps, "heads": tiles * steps, "output tiles": 1}[code.grid]
    step = 4 * code.block_m * code.block_n * head_dim / (code.tflops / sheet.num_sms * 1e6)
    at_once = sheet.num_sms * code.resident
    full, rest = divmod(count, at_once)
    sm_us = full * in_turn * max(step * code.resident, code.step_us)
    if rest:
        sm_us += in_turn * max(step * math.ceil(rest / sheet.num_sms), code.step_us)
    kv = 2 * seqlen * head_dim * size
    moved = 2 * heads * (seqlen * head_dim * size) + heads * kv
    capacity = sheet.l2_bytes + sheet.last_level_cache_bytes
    if code.in_memory and heads * seqlen**2 * 4 > capacity:
        moved += 4 * heads * seqlen**2 * 4
    if code.reloads and (kv if code.one_head else heads * kv) > capacity:
        moved += heads * (tiles - 1) * kv
    return code.launch_us + max(sm_us, moved / (0.85 * sheet.bandwidth_gbps * 1e3))


def table(cause: str, seed: int) -> Planted:
    """Returns a table with one cause planted; everything else about it is drawn."""
    draw = random.Random(f"{cause} {seed}")
    cards = SMALL_L2 if cause == "re-reads" else MANY_MATRIX if cause == "scalar for matrix" else CARDS
    card = draw.choice(cards)
    sheet = catalog()[card]
    peaks = sheet.peak_tflops
    head_dim, dtype, unit = draw.choice((64, 128)), "float32", "scalar"
    lengths = [2 ** (draw.randint(10, 12) + i) for i in range(3)]
    code = _Code(draw.choice((32, 64, 128)), 64, draw.uniform(0.6, 0.85) * peaks["float32"])
    heads: list[int] = [64]
    known: dict[str, Any] = {}
    if cause == "idle SMs":
        code.grid, heads = "heads", [draw.randint(1, max(1, sheet.num_sms // 12))]
    elif cause == "idle threads":
        busy = draw.choice((8, 16, 32))
        code.tflops *= busy / 256
        known = {"threads": 256, "busy_threads": busy}
    elif cause == "staircase":
        sms, waves = sheet.num_sms, draw.choice((1, 1, 2))
        tiles = 4
        code.block_m, lengths, code.tflops = 128, [128 * tiles], 0.85 * peaks["float32"]
        over = waves * sms // tiles + draw.randint(1, max(1, sms // 16))
        heads = sorted({max(1, sms // tiles), waves * sms // tiles, over, 2 * waves * sms // tiles})
        known = {"threads": draw.choice((256, 512))}
    elif cause == "scores leave L2":
        dtype, unit, code.in_memory, code.grid = "float16", "matrix", True, "output tiles"
        code.tflops = draw.uniform(0.3, 0.5) * peaks["float16"]
        edge = math.sqrt((sheet.l2_bytes + sheet.last_level_cache_bytes) / (4 * heads[0]))
        first = 2 ** round(math.log2(edge) - 1)
        lengths = [first * 2**i for i in range(draw.choice((4, 5)))]
    elif cause == "constant factor":
        if draw.random() < 0.5 and "float16" in peaks:
            dtype, unit, code.tflops = "float16", "matrix", 0.7 * peaks["float16"]
        code.tflops /= draw.uniform(6, 30)
        if unit == "matrix" and 0.5 < code.tflops / peaks["float32"] < 1.2:
            code.tflops = 0.4 * peaks["float32"]  # at the scalar units' rate a table cannot tell the two apart
    elif cause == "one warp":
        code.resident = draw.choice((1, 2, 4))
        code.block_m = code.block_n = 32
        code.step_us = (
            draw.uniform(5, 15) * code.resident * 4 * 32 * 32 * head_dim / (code.tflops / sheet.num_sms * 1e6)
        )
        known = {"threads": 64 if sheet.vendor == "amd" else 32}
    elif cause == "K and V leave L2":
        dtype, unit, code.reloads = "float16", "matrix", True
        code.tflops = draw.uniform(0.5, 0.7) * peaks["float16"]
        # Rows of a tile so few that the loads take twice the arithmetic or more.
        code.block_m = min((16, 32, 64, 128), key=lambda m: abs(m - 0.4 * code.tflops * 1e3 / sheet.bandwidth_gbps))
        edge = (sheet.l2_bytes + sheet.last_level_cache_bytes) / (4 * head_dim * heads[0])
        lengths = [max(128, 2 ** math.floor(math.log2(edge) - 1)) * 2**i for i in range(4)]
    elif cause == "scalar for matrix":
        dtype, unit = "float16", draw.choice(("matrix", "scalar"))
        code.tflops = draw.uniform(0.68, 0.9) * peaks["float32"]
    elif cause == "launch":
        code.launch_us, code.block_m, code.block_n, head_dim = draw.uniform(10, 35), 32, 32, 32
        lengths, heads = draw.choice(([16, 24, 32, 48], [32, 64, 128], [8, 16, 32])), [draw.choice((1, 4, 8))]
    elif cause == "re-reads":
        code.reloads = code.one_head = True
        code.block_m, heads, head_dim = 16, [draw.choice((1, 2, 4))], 128
        longest = (sheet.l2_bytes + sheet.last_level_cache_bytes) / (8 * head_dim)
        lengths = [2 ** math.ceil(math.log2(longest) + 0.2) * 2**i for i in range(3)]
        code.tflops = max(code.tflops, 16 / 2 * sheet.bandwidth_gbps * 1e-3 * 2.5)
        if code.tflops > 0.9 * peaks["float32"]:
            dtype, unit, code.block_m = "float16", "matrix", 32
            code.tflops = 0.6 * peaks["float16"]
    elif cause == "latency loop":
        code.resident, lengths = 4, [128]
        code.block_m = 128
        step = 4 * 128 * 64 * head_dim / (code.tflops / sheet.num_sms * 1e6)
        code.step_us = draw.uniform(8, 20) * step
        heads = sorted({max(1, round(sheet.num_sms * share)) for share in (0.25, 0.5, 1, 2, 4)})
        known = {"threads": 128}
    size = 2 if dtype == "float16" else 4
    in_ms, peer, batch = draw.random() < 0.5, draw.random() < 0.3, draw.choice((1, 2, 4))
    if any(count % batch for count in heads):
        batch = 1
    rows = []
    for count in heads:
        for length in lengths:
            time = _time_us(sheet, code, count, length, head_dim, size) * draw.gauss(1, NOISE)
            best = 0.7 * peaks[dtype]
            fast = _time_us(sheet, _Code(128, 64, best, resident=2), count, length, head_dim, size)
            times = [time, fast][: 1 + peer]
            rows.append([count // batch, length, *(float(f"{t * (1e-3 if in_ms else 1):.4g}") for t in times)])
    kernel = {"block_m": code.block_m, "block_n": code.block_n, "unit": unit, "grid": code.grid, **known}
    if code.in_memory:
        kernel["scores"] = "memory"
    unit_of_time = "time_ms" if in_ms else "time_us"
    columns = ["heads", "seqlen", unit_of_time, f"PyTorch.{unit_of_time}"][: 3 + peer]
    data = {
        "title": f"{cause} {seed}",
        "gpu": card,
        "call": {"batch": batch, "head_dim": head_dim, "dtype": dtype},
        "kernels": {"theirs": kernel},
        "tables": [{"name": "times", "columns": columns, "rows": rows}],
    }
    return Planted(parse(data, source="generated"), cause, code.resident)
