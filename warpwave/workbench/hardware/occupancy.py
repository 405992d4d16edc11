"""How many blocks of a kernel run together on one multiprocessor, and which resource sets the limit.

Registers, shared memory and resident warps each allow some number of blocks; the least of them counts. What is
allocated is rounded up to the hardware's granules, so one register more can cost a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.gpu import KIB, Gpu


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks of one multiprocessor share.

    Args:
        unit: what the vendor calls it: SM, CU, or WGP (two CUs of RDNA that share a block).
        schedulers: warp schedulers (SIMDs on AMD); a warp stays on one.
        registers_per_lane: vector registers that one scheduler has for each lane of a warp, over all its warps.
        register_granule: a warp's registers a lane are rounded up to this.
        warps_per_scheduler: the most that are resident.
        blocks: the most that are resident, whatever they need.
        smem_bytes: shared memory of all blocks together.
        smem_granule: a block's is rounded up to this.
        smem_reserved_bytes: what the system takes of each block's.
        separate_accumulators: whether accumulation registers are a file of their own, of the same size.
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
    # 65,536 registers in four quarters of 32 lanes; a warp's come in units of 256, which is 8 a lane.
    return Multiprocessor("SM", 4, 512, 8, warps // 4, blocks, smem_kib * KIB, 128, 1 * KIB)


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". AMD: LLVM's AMDGPU backend
# (AMDGPUBaseInfo: total vector registers, allocation granule, waves an execution unit) and the instruction set manuals.
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
    """Blocks of one kernel on one multiprocessor.

    Args:
        unit: SM, CU or WGP.
        blocks: how many run together; 0 where not even one fits.
        limit: what allows no more: `"registers"`, `"shared memory"`, `"warps"` or `"blocks"`.
        by_registers, by_smem, by_warps: blocks that each resource alone would allow.
        warps, max_warps: resident warps, of how many.
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
    """The occupancy of a compiled kernel, or None for an architecture whose multiprocessor is not in the table.

    Args:
        gpu: the architecture, and the shared memory that one block may have.
        registers: of a thread, accumulation registers included where both share one file.
        accumulators: accumulation registers of a thread where they have a file of their own, else ignored.
        num_warps: warps of a block.
        smem_bytes: shared memory of a block.
    """
    unit = MULTIPROCESSORS.get(gpu.arch)
    if unit is None:
        return None
    taken = max(registers, accumulators) if unit.separate_accumulators else registers
    rounded = max(unit.register_granule, _round_up(taken, unit.register_granule))
    # A block's warps are dealt out to the schedulers, so those of all resident blocks together have to fit.
    by_registers = unit.schedulers * (unit.registers_per_lane // rounded) // num_warps
    max_warps = unit.schedulers * unit.warps_per_scheduler
    by_warps = max_warps // num_warps
    by_smem = unit.blocks
    if smem_bytes > gpu.smem_per_block_bytes:
        by_smem = 0
    elif smem_bytes:
        by_smem = unit.smem_bytes // _round_up(smem_bytes + unit.smem_reserved_bytes, unit.smem_granule)
    # In the order in which they are named where several allow the same.
    allowed = {"registers": by_registers, "warps": by_warps, "blocks": unit.blocks, "shared memory": by_smem}
    limit = min(allowed, key=allowed.__getitem__)
    blocks = allowed[limit]
    return Occupancy(unit.unit, blocks, limit, by_registers, by_smem, by_warps, blocks * num_warps, max_warps)


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
