"""Descriptions of devices."""

from __future__ import annotations

import pytest
import torch

from warpwave.gpu import ARCHS, CPU, Gpu, current_gpu


@pytest.mark.parametrize("arch", ARCHS)
def test_every_known_architecture_describes_itself(arch: str) -> None:
    gpu = Gpu.for_arch(arch)
    assert gpu.arch == arch and gpu.smem_per_block_bytes >= 64 * 1024 and not gpu.is_cpu
    assert gpu.warp_size == (64 if arch.startswith("gfx9") else 32)
    assert (gpu.capability > 0) == (gpu.vendor == "nvidia")


def test_an_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'sm_1' is not known; known are cpu, sm_80"):
        Gpu.for_arch("sm_1")


def test_the_cpu() -> None:
    assert Gpu.for_arch("cpu") is CPU
    assert current_gpu(torch.device("cpu")).is_cpu


@pytest.mark.gpu
def test_the_driver_and_the_table_agree() -> None:
    gpu = current_gpu(torch.device("cuda"))
    assert gpu.num_sms > 0
    if gpu.arch in ARCHS:
        assert gpu.smem_per_block_bytes == ARCHS[gpu.arch][1], f"{gpu.name}: {gpu.smem_per_block_bytes}"
