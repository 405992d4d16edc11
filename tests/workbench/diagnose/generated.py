"""Tables with a planted cause, from a formula that knows nothing of the rules: work over rates, and one thing wrong."""

from __future__ import annotations

import random
from typing import Any

from warpwave.workbench.diagnose.facts import blocks, flops, memory_bytes, peak_tflops
from warpwave.workbench.diagnose.parse import Document, Row, parse
from warpwave.workbench.hardware.catalog import catalog

CARDS = ("t4", "a100-80gb", "l4", "rtx3090", "h100", "h200", "mi210", "mi300x")
CAUSES = ("idle SMs", "idle threads", "memory", "arithmetic", "launch", "latency")
LAUNCH_US = 3.0


def table(cause: str, seed: int) -> Document:
    """A table whose times follow from its grid and card, with one cause planted.

    Times: work over the rate of the busy SMs and threads, or bytes over bandwidth, the longer of them, plus a launch.
    """
    draw = random.Random(f"{cause} {seed}")
    card = draw.choice(CARDS)
    sheet = catalog()[card]
    block_m, head_dim = draw.choice((32, 64, 128)), draw.choice((64, 128))
    lengths = [2 ** (draw.randint(10, 12) + i) for i in range(3)]
    kernel: dict[str, Any] = {"block_m": block_m, "block_n": 64, "threads": 128, "unit": "scalar"}
    dtype = "float16" if cause == "memory" else "float32"
    heads, slower, fixed_us, efficiency = 64, 1.0, LAUNCH_US, draw.uniform(0.6, 0.85)
    if cause == "idle SMs":
        kernel["grid"], heads = "heads", draw.randint(1, max(1, sheet.num_sms // 12))
    elif cause == "idle threads":
        kernel |= {"threads": 256, "busy_threads": draw.choice((8, 16, 32))}
    elif cause == "memory":
        kernel |= {"scores": "memory", "grid": "output tiles", "unit": "matrix"}
        lengths = [4096, 8192, 16384]
    elif cause == "launch":
        lengths, heads, fixed_us = [16, 32, 64], 8, draw.uniform(10.0, 35.0)
        kernel |= {"block_m": 16, "block_n": 16, "grid": "output tiles"}
        heads = 8 * sheet.num_sms
        head_dim = 8
    elif cause == "latency":
        slower = draw.uniform(6.0, 40.0)
    rows = [[length, 1.0] for length in lengths]
    data = {
        "title": f"{cause} {seed}",
        "gpu": card,
        "call": {"batch": 1, "heads": heads, "head_dim": head_dim, "dtype": dtype},
        "kernels": {"theirs": kernel},
        "tables": [{"name": "seqlen", "columns": ["seqlen", "time_us"], "rows": rows}],
    }
    document = parse(data, source="generated")
    for line, row in zip(rows, document.rows, strict=True):
        line[1] = fixed_us + slower * _work_us(row, document, efficiency)
    return parse(data, source="generated")


def _work_us(row: Row, document: Document, efficiency: float) -> float:
    device, work, peak, count = document.device, flops(row.call), peak_tflops(row, document.device), blocks(row)
    assert work and peak and count and device.num_sms and device.bandwidth_gbps
    busy = min(1.0, count / device.num_sms[0])
    threads = (row.kernel.busy_threads or 1) / (row.kernel.threads or 1) if row.kernel.busy_threads else 1.0
    arithmetic = work / (peak * efficiency * busy * threads * 1e6)
    moved = memory_bytes(row, device)
    assert moved is not None
    return max(arithmetic, moved / (device.bandwidth_gbps * 0.8 * 1e3))
