"""pytest's plugin for conformance in the code of an NVIDIA GPU with `mma` instructions, executed on a Hopper GPU.

    CARD=sm_89 python -m pytest -p tests.conformance.mma_card -m gpu tests/conformance -k "flash_fwd and not hopper"

Kernels see the shared memory and the capability of the card, so they choose its configs, and Triton compiles its code.
See `benchmarks.portable_configs`.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

from benchmarks.portable_configs import compile_for
from warpwave import gpu

CARD = os.environ.get("CARD", "sm_80")
compile_for(CARD)
_real = gpu._cuda_gpu


@functools.cache
def _card(index: int) -> gpu.Gpu:
    real = _real(index)
    return replace(gpu.Gpu.for_arch(CARD), num_sms=real.num_sms, memory_bytes=real.memory_bytes)


gpu._cuda_gpu = _card
