"""What default configs compile to on each target: registers and shared memory, read from `compiled.json`.

They decide how many blocks share an SM. A kernel's `cost` estimates both before compiling, and the estimate is used for
configs that the table does not have. `benchmarks/compiled_resources.py` writes the table. Imports no torch.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem

FILE = Path(__file__).with_name("compiled.json")
SCHEMA = "warpwave compiled resources 1"
SAME_CODE = {"sm_87": "sm_80", "sm_103": "sm_100", "sm_121": "sm_120"}  # targets whose code is another target's


class Key(NamedTuple):
    """What decides the code of a launch.

    Args:
        kernel, arch: its name and target.
        size: bytes of an element.
        widths: of the tiles that hold a row of K, and a row of V.
        banded: whether a causal mask or a window hides pairs by position.
        config: the config's values in words.
    """

    kernel: str
    arch: str
    size: int
    widths: str
    banded: bool
    config: str


class Resources(NamedTuple):
    """What the compiler uses of one launch.

    Args:
        registers: registers per thread, in the fuller register file if accumulators have one of their own.
        smem_bytes: shared memory per block.
    """

    registers: int
    smem_bytes: int


def key(kernel: str, problem: AttentionProblem, gpu: Gpu, config: Any) -> Key:
    """Returns the key of a call's launch with products."""
    return Key(
        kernel,
        SAME_CODE.get(gpu.arch, gpu.arch),
        4 if problem.dtype == "float32" else 2,
        "{} {}".format(*_widths(kernel, problem, gpu, config)),
        problem.has_band,
        ", ".join(f"{name}={value}" for name, value in asdict(config).items()),
    )


def _widths(kernel: str, problem: AttentionProblem, gpu: Gpu, config: Any) -> tuple[int, int]:
    """Returns the columns of the tiles that hold a row of K, and a row of V. Larger heads are cut into pieces, each in
    another way."""
    from warpwave.kernels.arguments import padded, total_widths  # which imports torch

    if kernel == "flash_fwd":
        return total_widths(problem, gpu, config.block_m)
    width, width_v = (d if d > 256 else padded(d) for d in (problem.head_dim, problem.head_dim_v))
    return width, width_v


@functools.cache
def table() -> dict[Key, Resources]:
    """Returns every entry by its key."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"{FILE.name}: schema is {data['schema']!r}; it must be {SCHEMA!r}")
    return {
        Key(*(entry[name] for name in Key._fields)): Resources(*(entry[name] for name in Resources._fields))
        for entry in data["entries"]
    }


def resources(kernel: str, problem: AttentionProblem, gpu: Gpu, config: Any) -> Resources | None:
    """Returns what a call's launch with products compiles to; None if the table does not have its config, or if a mask,
    a bias, packing or quantized operands change its code."""
    if problem.mask_shape is not None or problem.bias_shape is not None or problem.packed or problem.page_size:
        return None
    if problem.is_quantized:
        return None
    return table().get(key(kernel, problem, gpu, config))
