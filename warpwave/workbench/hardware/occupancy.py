"""The number of blocks of a kernel that are resident on one multiprocessor, and the resource that limits it.

Registers, shared memory and resident warps each allow some number of blocks; the smallest number is the limit.
Allocations are rounded up to the hardware's granules, so one more register can cost a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.gpu import KIB, Gpu


@dataclass(frozen=True)
class Multiprocessor:
    """The resources that the blocks on one multiprocessor share.

    Args:
        unit: the vendor's name for it: SM, CU, or WGP (two CUs of RDNA that run one block together).
        schedulers: warp schedulers (SIMDs on AMD); a warp stays on one.
        registers_per_lane: vector registers of one scheduler per lane of a warp, over all its warps.
        register_granule: allocation granule of registers per thread.
        warps_per_scheduler: limit of resident warps.
        blocks: limit of resident blocks, whatever their size.
        smem_bytes: shared memory of all blocks together.
        smem_granule: allocation granule of shared memory.
        smem_reserved_bytes: shared memory that the system reserves per block.
        separate_accumulators: whether accumulation registers have a register file of their own, of the same size.
    """

    unit: str
    schedulers: int
    registers_per_lane: int
    register_granule: int
    warps_per_scheduler: int
    blocks: int
    smem_bytes: int
    smem_granule: int
    smem_reserved_bytes: int = 0
    separate_accumulators: bool = False


def _nvidia(smem_kib: int, warps: int, blocks: int) -> Multiprocessor:
    # 65,536 registers in four quarters of 32 lanes. A warp allocates them in units of 256, which is 8 per lane.
    return Multiprocessor("SM", 4, 512, 8, warps // 4, blocks, smem_kib * KIB, 128, 1 * KIB)


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". AMD: LLVM's AMDGPU backend
# (AMDGPUBaseInfo: total vector registers, allocation granule, waves per execution unit), and the instruction set
# manuals.
MULTIPROCESSORS: dict[str, Multiprocessor] = {
    "sm_80": _nvidia(164, 64, 32),
    "sm_86": _nvidia(100, 48, 16),
    "sm_87": _nvidia(164, 48, 16),
    "sm_89": _nvidia(100, 48, 24),
    "sm_90": _nvidia(228, 64, 32),
    "sm_100": _nvidia(228, 64, 32),
    "sm_103": _nvidia(228, 64, 32),
    "sm_120": _nvidia(100, 48, 24),
    "sm_121": _nvidia(100, 48, 24),
    "gfx908": Multiprocessor("CU", 4, 256, 4, 10, 40, 64 * KIB, 512, separate_accumulators=True),
    "gfx90a": Multiprocessor("CU", 4, 512, 8, 8, 32, 64 * KIB, 512),
    "gfx942": Multiprocessor("CU", 4, 512, 8, 8, 32, 64 * KIB, 512),
    "gfx950": Multiprocessor("CU", 4, 512, 8, 8, 32, 160 * KIB, 1280),
    "gfx1100": Multiprocessor("WGP", 4, 1536, 24, 16, 64, 128 * KIB, 1024),
    "gfx1201": Multiprocessor("WGP", 4, 1536, 24, 16, 64, 128 * KIB, 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """The resident blocks of one kernel on one multiprocessor.

    Args:
        unit: SM, CU or WGP.
        blocks: number of resident blocks; 0 if not even one fits.
        limit: the limiting resource: `"registers"`, `"shared memory"`, `"warps"` or `"blocks"`.
        by_registers, by_smem, by_warps: blocks that each resource alone would allow.
        warps, max_warps: resident warps, and the limit.
    """

    unit: str
    blocks: int
    limit: str
    by_registers: int
    by_smem: int
    by_warps: int
    warps: int
    max_warps: int


def occupancy(gpu: Gpu, *, registers: int, accumulators: int, num_warps: int, smem_bytes: int) -> Occupancy | None:
    """Returns the occupancy of a compiled kernel; None for an architecture that is not in the table.

    Args:
        gpu: the architecture and the limit of shared memory per block.
        registers: registers per thread, including accumulation registers if both share one register file.
        accumulators: accumulation registers per thread if they have a register file of their own, else ignored.
        num_warps: warps per block.
        smem_bytes: shared memory per block.
    """
    unit = MULTIPROCESSORS.get(gpu.arch)
    if unit is None:
        return None
    taken = max(registers, accumulators) if unit.separate_accumulators else registers
    rounded = max(unit.register_granule, _round_up(taken, unit.register_granule))
    # A block's warps are distributed over the schedulers, so the limit holds for the warps of all resident blocks.
    by_registers = unit.schedulers * (unit.registers_per_lane // rounded) // num_warps
    max_warps = unit.schedulers * unit.warps_per_scheduler
    by_warps = max_warps // num_warps
    by_smem = unit.blocks
    if smem_bytes > gpu.smem_per_block_bytes:
        by_smem = 0
    elif smem_bytes:
        by_smem = unit.smem_bytes // _round_up(smem_bytes + unit.smem_reserved_bytes, unit.smem_granule)
    # If several resources allow the same number, the first one here is named.
    allowed = {"registers": by_registers, "warps": by_warps, "blocks": unit.blocks, "shared memory": by_smem}
    limit = min(allowed, key=allowed.__getitem__)
    blocks = allowed[limit]
    return Occupancy(unit.unit, blocks, limit, by_registers, by_smem, by_warps, blocks * num_warps, max_warps)


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
