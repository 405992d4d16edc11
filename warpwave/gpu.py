"""`Gpu`: the facts about a device by which a kernel and its config are chosen."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warpwave.errors import InvalidInput

if TYPE_CHECKING:
    import torch

KIB = 1024

# Shared memory one block may use, and registers a thread may hold, per architecture.
# NVIDIA: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", minus the 1 KiB per block
# that the driver keeps. AMD: LDS per workgroup, from the CDNA and RDNA instruction set manuals; on CDNA a wave can
# hold 256 vector and 256 accumulation registers a lane.
ARCHS: dict[str, tuple[str, int, int]] = {
    "sm_80": ("nvidia", 163 * KIB, 255),
    "sm_86": ("nvidia", 99 * KIB, 255),
    "sm_87": ("nvidia", 163 * KIB, 255),
    "sm_89": ("nvidia", 99 * KIB, 255),
    "sm_90": ("nvidia", 227 * KIB, 255),
    "sm_100": ("nvidia", 227 * KIB, 255),
    "sm_103": ("nvidia", 227 * KIB, 255),
    "sm_120": ("nvidia", 99 * KIB, 255),
    "sm_121": ("nvidia", 99 * KIB, 255),
    "gfx908": ("amd", 64 * KIB, 512),
    "gfx90a": ("amd", 64 * KIB, 512),
    "gfx942": ("amd", 64 * KIB, 512),
    "gfx950": ("amd", 160 * KIB, 512),
    "gfx1100": ("amd", 64 * KIB, 256),
    "gfx1201": ("amd", 64 * KIB, 256),
}

TCGEN05 = (100, 103)  # compute capabilities whose matrix unit accumulates in a memory of its own
WGMMA_OR_TCGEN05 = (90, *TCGEN05)  # compute capabilities whose matrix unit reads operands from shared memory
ASSUMED_SMS = 132
WGMMA_ROWS = 64  # rows of a tile: products of fewer rows take their operands from registers


@dataclass(frozen=True)
class Gpu:
    """The properties of a device that choosing and describing kernels needs.

    Args:
        name: the driver's name, or the architecture if no device was given.
        vendor: `"nvidia"`, `"amd"`, `"cpu"`, or `"interpreter"` for CPU tensors while Triton's interpreter is on.
        arch: `"sm_90"`, `"gfx942"`, `"cpu"`.
        smem_per_block_bytes: shared memory one block may use; 0 on a CPU.
        registers_per_thread: the most a thread may hold; 0 on a CPU.
        num_sms: streaming multiprocessors or compute units, 0 if unknown.
        warp_size: lanes of a warp (a wave on AMD).
        memory_bytes: memory of the device, 0 if unknown.
        no_triton: why this machine cannot compile Triton kernels for it; empty if it can, or if the GPU is only
            described, because the choice of a kernel for another machine's GPU does not depend on this machine.
    """

    name: str
    vendor: str
    arch: str
    smem_per_block_bytes: int
    registers_per_thread: int
    num_sms: int
    warp_size: int
    memory_bytes: int = 0
    no_triton: str = ""

    @functools.cached_property
    def assumed_sms(self) -> int:
        """`num_sms`, or the number of an H100 and an H200 if it is unknown."""
        return self.num_sms or ASSUMED_SMS

    @property
    def is_cpu(self) -> bool:
        return self.vendor in ("cpu", "interpreter")

    @functools.cached_property
    def is_cdna(self) -> bool:
        """Whether it is an AMD data center GPU (gfx9), whose waves have 64 lanes."""
        return self.vendor == "amd" and self.arch.startswith("gfx9")

    @functools.cached_property
    def is_rdna(self) -> bool:
        """Whether it is an AMD GPU of the RDNA family (gfx11, gfx12), whose waves have 32 lanes."""
        return self.vendor == "amd" and not self.is_cdna

    @functools.cached_property
    def capability(self) -> int:
        """NVIDIA's compute capability as one number (90 for sm_90); 0 elsewhere."""
        return int(self.arch.removeprefix("sm_")) if self.vendor == "nvidia" else 0

    @functools.cached_property
    def has_mma(self) -> bool:
        """Whether its matrix instructions are NVIDIA's `mma`, whose operands are in registers."""
        return self.vendor == "nvidia" and self.capability not in WGMMA_OR_TCGEN05

    @functools.cached_property
    def has_163_kib(self) -> bool:
        """Whether a block may use 163 KiB of shared memory. NVIDIA GPUs with less have 99."""
        return self.smem_per_block_bytes >= 163 * KIB

    @staticmethod
    def for_arch(arch: str) -> Gpu:
        """Returns the description of an architecture without a device, for compiling and explaining.

        Raises:
            ValueError: the architecture is not in `ARCHS`.
        """
        if arch == "cpu":
            return CPU
        if arch not in ARCHS:
            raise ValueError(f"GPU architecture {arch!r} is not known; known are cpu, {', '.join(ARCHS)}")
        vendor, smem, registers = ARCHS[arch]
        warp_size = 64 if vendor == "amd" and arch.startswith("gfx9") else 32
        return Gpu(arch, vendor, arch, smem, registers, 0, warp_size)


CPU = Gpu("CPU", "cpu", "cpu", 0, 0, 0, 1)
INTERPRETER = Gpu("Triton interpreter", "interpreter", "cpu", 227 * KIB, 255, 0, 32)


def current_gpu(device: torch.device) -> Gpu:
    """Returns the description of the device a tensor is on."""
    if device.type != "cuda":
        from warpwave.runtime.triton_or_stub import INTERPRETED

        return INTERPRETER if INTERPRETED else CPU
    import torch

    return _cuda_gpu(device.index if device.index is not None else torch.cuda.current_device())


def present_device(device: torch.device | str) -> torch.device:
    """Returns a device on which tensors will be allocated.

    Raises:
        InvalidInput: it is a GPU, and there is none.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device is {device}, and there is no GPU; pass device='cpu'")
    return device


@functools.cache
def _cuda_gpu(index: int) -> Gpu:
    import torch

    from warpwave.runtime.triton_or_stub import NO_TRITON

    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        vendor, arch = "amd", props.gcnArchName.split(":")[0]
        default_smem, registers = 64 * KIB, 256
    else:
        vendor, arch = "nvidia", f"sm_{props.major}{props.minor}"
        default_smem, registers = 99 * KIB, 255
    # The driver's value if torch reports it, else the table's. An architecture that the table does not list gets the
    # vendor's smallest size.
    smem = getattr(props, "shared_memory_per_block_optin", 0) or ARCHS.get(arch, (vendor, default_smem, registers))[1]
    registers = ARCHS.get(arch, (vendor, smem, registers))[2]
    num_sms, memory = props.multi_processor_count, props.total_memory
    return Gpu(props.name, vendor, arch, smem, registers, num_sms, props.warp_size, memory, NO_TRITON or "")


def reads_shared_memory(gpu: Gpu, block_m: int) -> bool:
    """Returns whether products of `block_m` rows read their operands from shared memory (wgmma on Hopper, tcgen05 on
    Blackwell), not from registers."""
    return gpu.capability in WGMMA_OR_TCGEN05 and block_m >= WGMMA_ROWS
