"""Makes this process choose and compile as for another NVIDIA GPU, one with `mma` instructions, on a Hopper GPU.

    CARD=sm_80 python -m benchmarks.card_code benchmarks.draw_decode OUT.toml --time RECORD.jsonl
    CARD=sm_89 python -m benchmarks.card_code warpwave.workbench.cli bench decode_8_bit
    CARD=sm_89 python -m pytest -p benchmarks.card_code -m gpu tests/conformance -k "flash_fwd and not hopper"
    CARD=sm_80 python -m tests.conformance.drawn --minutes 2

No Ampere, Ada or consumer Blackwell GPU is at hand. Kernels see the shared memory and the capability of the card, so
they choose its configs. Triton compiles for it, to `mma.sync` and `cp.async`, and ptxas assembles its PTX for Hopper,
which executes these instructions too. Shared memory is padded so that an SM holds as many blocks as on the card, whose
SM has less. What differs from the card: the number of SMs, the rate of its matrix units and memory, clocks, and ptxas'
schedule. So times are compared with each other, and with those of PyTorch's kernels that have `mma` instructions too.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.backends.nvidia.compiler as compiler

from benchmarks.measured_rows import WITH_CODE_OF
from warpwave import gpu
from warpwave.gpu import KIB, Gpu
from warpwave.workbench.bench import environment

SMEM_OF_SM = {"sm_80": 164 * KIB, "sm_86": 100 * KIB, "sm_89": 100 * KIB, "sm_120": 100 * KIB}
SMEM_OF_HOPPER, LARGEST_BLOCK, RESERVED = 228 * KIB, 227 * KIB, KIB


def compile_for(arch: str) -> None:
    """Makes Triton compile for a GPU in this process, and ptxas assemble for Hopper. A process keeps to one GPU."""
    name = None if arch == "sm_90" else arch.replace("_", "")
    if (present := triton.knobs.runtime.override_arch) == name:
        return
    if present is not None or name is None:
        raise RuntimeError(f"Triton compiles for {present} in this process already, so it cannot for {arch}")
    triton.knobs.runtime.override_arch = name
    make_cubin, name_of = compiler.CUDABackend.make_cubin, compiler.sm_arch_from_capability

    def for_hopper(self: Any, src: Any, metadata: dict[str, Any], *options: Any) -> bytes:
        blocks = max(1, SMEM_OF_SM[arch] // (metadata["shared"] + RESERVED))
        padded = SMEM_OF_HOPPER // blocks - RESERVED
        metadata["shared"] = max(metadata["shared"], min(LARGEST_BLOCK, padded // 128 * 128))
        compiler.sm_arch_from_capability = lambda capability: "sm_90a"
        try:
            return make_cubin(self, src, metadata, *options)
        finally:
            compiler.sm_arch_from_capability = name_of

    compiler.CUDABackend.make_cubin = for_hopper


def _choose_for(arch: str) -> None:
    """Makes `current_gpu` return a GPU of `arch` with the SMs and the memory of the real one."""
    real_gpu = gpu._cuda_gpu

    @functools.cache
    def card(index: int) -> Gpu:
        real = real_gpu(index)
        return replace(Gpu.for_arch(arch), num_sms=real.num_sms, memory_bytes=real.memory_bytes)

    gpu._cuda_gpu = card


def _describe_as(arch: str) -> None:
    """Makes records name the code beside the GPU."""
    describe = environment.describe

    def described(device: Any) -> dict[str, Any]:
        found = describe(device)
        if found["gpu"]:
            found["gpu"]["name"] += f"{WITH_CODE_OF}{arch}"
        return found

    environment.describe = described


def pytest_configure() -> None:
    """Is called by pytest if this module is its plugin."""
    if not CARD:
        raise pytest.UsageError(f"CARD is not set; it must be one of {', '.join(SMEM_OF_SM)}")


def main() -> int:
    """Runs the function `main()` of the module that the first argument names, which must not start an interpreter."""
    if len(sys.argv) < 2 or not CARD:
        print(f"usage: CARD={'|'.join(SMEM_OF_SM)} python -m benchmarks.card_code MODULE [ARGUMENT ...]")
        return 2
    sys.argv = sys.argv[1:]
    return int(importlib.import_module(sys.argv[0]).main() or 0)


CARD = os.environ.get("CARD", "")
if __name__ in ("__main__", "__mp_main__"):  # the command, or a process that it started
    from benchmarks import card_code

    if __name__ == "__main__":
        sys.exit(card_code.main())
elif CARD:
    if CARD not in SMEM_OF_SM:
        raise ValueError(f"CARD is {CARD!r}; it must be one of {', '.join(SMEM_OF_SM)}")
    compile_for(CARD)
    _choose_for(CARD)
    _describe_as(CARD)
