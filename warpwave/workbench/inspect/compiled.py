"""Compiles a kernel for any target, without a GPU, and reads the result.

Triton compiles for every architecture it supports on any Linux machine. The result gives registers, spills, shared
memory and the instruction mix. They decide whether a config is worth running, and tests assert them, so that a change
of the kernel or the compiler cannot lose a matrix instruction unnoticed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.runtime import parameters
from warpwave.runtime.launch import Launch
from warpwave.runtime.triton_or_stub import INTERPRETED, NO_TRITON, triton

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class CannotCompile(RuntimeError):
    """Nothing can be compiled here, or the kernel has no code of its own. The message gives the reason and the fix."""


@dataclass(frozen=True)
class CompileFacts:
    """Resources and instructions of one compiled launch.

    Args:
        name: the device function.
        arch: the target.
        registers: vector registers per thread, including accumulation registers if both share one register file.
        accumulators: accumulation registers per thread, on AMD CDNA only. On gfx908, where they have a register file of
            their own, they come on top of `registers`.
        spill_bytes: local memory per thread: spilled registers and anything else that did not fit.
        smem_bytes: shared memory per block.
        num_warps: warps per block, including the warps that warp specialization adds.
        instructions: number of machine instructions by opcode (`HGMMA`, `v_mfma_f32_32x32x8_bf16`; those of the special
            function unit with their suffix, `MUFU.EX2`), in the listing, loops not unrolled.
        compile_s: seconds to compile, or to load from Triton's cache.
        cached: whether it came from Triton's cache.
    """

    name: str
    arch: str
    registers: int
    accumulators: int
    spill_bytes: int
    smem_bytes: int
    num_warps: int
    instructions: Counter[str]
    compile_s: float
    cached: bool


class Compiled(NamedTuple):
    """One compiled launch.

    Args:
        facts: its resources and instructions.
        texts: the compiler's stages by Triton's names: ttir, ttgir, llir, ptx and sass, or amdgcn.
    """

    facts: CompileFacts
    texts: dict[str, str]


def compile_launches(kernel: Any, problem: AttentionProblem, gpu: Gpu, config: Any) -> tuple[Compiled, ...]:
    """Compiles each launch that a kernel makes for a call.

    Args:
        kernel: a kernel module with `specify`, which returns one `Launch` or several.
        problem: the call; operands are taken as contiguous and 16-byte aligned.
        gpu: the target, `Gpu.for_arch("sm_90")`.
        config: one of the kernel's configs.

    Raises:
        CannotCompile: Triton is missing, its interpreter is on, or the kernel is not written in Triton.
    """
    if NO_TRITON is not None:
        raise CannotCompile(NO_TRITON)
    if INTERPRETED:
        raise CannotCompile("TRITON_INTERPRET is set: the interpreter replaces the compiler; unset it to compile")
    if not hasattr(kernel, "specify"):
        raise CannotCompile(
            f"kernel {kernel.NAME!r} is made of torch's operations: there is no code of ours to compile"
        )
    operands = operands_without_memory(problem)
    q = operands.q
    out = q.new_empty((*q.shape[:-1], problem.head_dim_v), dtype=getattr(torch, problem.dtype_of_out))
    lse = torch.empty(1, dtype=torch.float32, device="meta") if problem.return_lse else None
    specified = kernel.specify(problem, gpu, operands, out, lse, config)
    launches = (specified,) if isinstance(specified, Launch) else specified
    return tuple(compile_launch(launch, gpu) for launch in launches)


def worst(facts: Sequence[CompileFacts]) -> CompileFacts:
    """Returns the worst of each figure of several launches, and the sums of their instructions and times."""
    return replace(
        facts[0],
        name=", ".join(dict.fromkeys(f.name for f in facts)),
        registers=max(f.registers for f in facts),
        accumulators=max(f.accumulators for f in facts),
        spill_bytes=max(f.spill_bytes for f in facts),
        smem_bytes=max(f.smem_bytes for f in facts),
        num_warps=max(f.num_warps for f in facts),
        instructions=sum((f.instructions for f in facts), Counter()),
        compile_s=sum(f.compile_s for f in facts),
        cached=all(f.cached for f in facts),
    )


def mixed_descriptors(ptx: str) -> dict[str, list[str]]:
    """Returns the shared-memory addresses that matrix descriptors of more than one layout start from.

    A wgmma descriptor is an address with its layout in the upper 32 bits, combined by `or` or `+`. If one address has
    two layouts, ptxas 12.8, which ships with Triton 3.6 and 3.7, computes some of the descriptors from registers that
    nothing has written (docs/notes/descriptors.md). Tiles that share a buffer therefore have one layout in our kernels;
    `arguments.tile_widths` sees to it.

    Args:
        ptx: the PTX of one kernel, for sm_90.

    Returns:
        The register of each such address, mapped to the upper halves of its descriptors in hexadecimal; empty if no
        address has two layouts.
    """
    taken = set(re.findall(r"%rd\d+", " ".join(re.findall(r"wgmma\.mma_async.*", ptx))))
    layouts: dict[str, set[int]] = {}
    for descriptor, address, constant in re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), (%rd\d+), (-?\d+);", ptx):
        if descriptor in taken:
            layouts.setdefault(address, set()).add((int(constant) & (2**64 - 1)) >> 32)
    return {address: sorted(map(hex, found)) for address, found in layouts.items() if len(found) > 1}


def unwritten_registers(sass: str) -> list[str]:
    """Returns the uniform registers that instructions read before any instruction writes them, in the order of the
    listing. In correct code there are none: see `mixed_descriptors` for the compiler that leaves some. A write in any
    earlier line counts, also one that a branch skips.

    Args:
        sass: the listing of one kernel for sm_90.

    Raises:
        ValueError: no line of the listing is an instruction.
    """
    written: set[int] = set()
    found: dict[str, None] = {}
    lines = [(line, _INSTRUCTION.match(line)) for line in sass.splitlines()]
    if not any(instruction for _, instruction in lines):
        raise ValueError("no instruction in the listing: nvdisasm prints another format")
    for line, instruction in lines:
        if instruction is None:
            continue
        opcode, operands = instruction[1], [operand.strip() for operand in instruction[2].split(",")]
        destination: set[int] = set()
        while operands and re.fullmatch(r"UP\w+", operands[0]):
            operands.pop(0)  # predicates come before the register that is written, or after it
        if opcode.startswith(_WRITE_UNIFORM) and operands and (register := re.fullmatch(r"UR(\d+)", operands[0])):
            operands.pop(0)
            first = int(register[1])
            destination = {first, first + 1} if ".64" in opcode or ".WIDE" in opcode else {first}
        for operand in operands:
            for kind, number, pair in re.findall(r"(g?desc\[)?\bUR(\d+)(\.64)?", operand):
                first = int(number)
                read = {first, first + 1} if kind or pair or opcode == "UIADD3.64" else {first}
                if kind == "gdesc[":  # of A and of B; A may come from vector registers
                    has_vectors = re.fullmatch(r"R\d+", operands[1].removesuffix(".reuse")) is not None
                    read = {first + 2, first + 3} if has_vectors else read | {first + 2, first + 3}
                found |= dict.fromkeys(f"UR{r} at {line.strip()}" for r in sorted(read - written))
        written |= destination
    return list(found)


# The opcode and the operands of a line of nvdisasm, without the predicate that may precede them.
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
# Instructions whose first operand is a uniform register that they write.
_WRITE_UNIFORM = (
    *("UIADD", "UIMAD", "UIABS", "ULEA", "ULOP", "UMOV", "UPRMT", "USEL", "USHF", "USGXT", "UFLO", "UPOPC", "UBREV"),
    *("UBMSK", "UF2F", "UI2F", "ULDC", "ULEPC", "UP2UR", "UR2UR", "UVIADD", "UVIMNMX"),
    *("R2UR", "S2UR", "CS2UR", "REDUX", "VOTEU"),
)


def toolchain(gpu: Gpu) -> dict[str, str]:
    """Returns the versions of Triton and of the assembler, if the target has one."""
    versions = {"triton": triton.__version__}
    if gpu.vendor == "nvidia":
        from triton.backends.nvidia.compiler import get_ptxas

        versions["ptxas"] = get_ptxas(gpu.capability).version  # Triton ships two and picks one by capability
    return versions


def compile_launch(spec: Launch, gpu: Gpu) -> Compiled:
    """Compiles one launch for a target. Its tensors may have no storage (device "meta")."""
    _listen()
    start = time.perf_counter()
    _heard.cached, _heard.compile_s = False, None
    compiled = _compile(spec, gpu)
    # Triton's own figure omits that it hashes its own sources once per process.
    compile_s = _heard.compile_s or time.perf_counter() - start
    return _read(compiled, gpu, compile_s, _heard.cached)


def _compile(spec: Launch, gpu: Gpu) -> Any:
    from triton.backends.compiler import GPUTarget

    kernel = spec.kernel
    types: list[str] = []
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    divisible = [["tt.divisibility", 16]]
    for (_, path, kind, specialized), value in zip(parameters.parameters(kernel), spec.values(), strict=True):
        # These are the rules by which Triton specializes a launch.
        if kind == "constant" or value is None or (type(value) is int and value == 1 and specialized):
            types.append("constexpr")
            constants[path] = value
        elif isinstance(value, torch.Tensor):
            types.append(_POINTERS[value.dtype])
            attributes[path] = divisible
        elif hasattr(value, "block_shape"):  # a tensor descriptor
            types.append(triton.runtime.jit.mangle_type(value))
        elif isinstance(value, float):
            types.append("fp32")
        else:
            types.append("i32" if -(2**31) <= value < 2**31 else "i64")
            if value % 16 == 0 and specialized:
                attributes[path] = divisible
    signature = dict(zip(kernel.arg_names, parameters.grouped(kernel, types), strict=True))
    backend = "hip" if gpu.vendor == "amd" else "cuda"
    target = GPUTarget(backend, gpu.arch if gpu.vendor == "amd" else gpu.capability, gpu.warp_size)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    source = Source(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=dict(spec.options))


_heard = threading.local()  # what Triton reported about the last compilation in this thread


def _listen() -> None:
    """Registers a listener with Triton, the only way to learn whether a kernel came from its cache."""
    earlier = triton.knobs.compilation.listener
    if getattr(earlier, "is_ours", False):
        return

    def listener(**said: Any) -> None:
        _heard.cached = said["cache_hit"]
        _heard.compile_s = None if said["cache_hit"] else said["times"].total * 1e-6
        if earlier is not None:
            earlier(**said)

    listener.is_ours = True  # type: ignore[attr-defined]
    triton.knobs.compilation.listener = listener


def _read(compiled: Any, gpu: Gpu, compile_s: float, cached: bool) -> Compiled:
    metadata, asm = compiled.metadata, compiled.asm
    texts = {name: asm[name] for name in ("ttir", "ttgir", "llir", "ptx", "amdgcn") if name in asm}
    if gpu.vendor == "amd":
        text = texts["amdgcn"]

        def note(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", text)
            return int(found.group(1)) if found else 0

        registers, spill_bytes, accumulators = map(note, ("vgpr_count", "private_segment_fixed_size", "agpr_count"))
        instructions = Counter(re.findall(r"^\t([a-z]\w+)", text, re.MULTILINE))
    else:
        usage, texts["sass"] = _disassemble(asm["cubin"])
        registers, spill_bytes = (int(re.search(rf"\b{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))  # type: ignore[union-attr]
        accumulators, instructions = 0, _opcodes(texts["sass"])
    facts = CompileFacts(
        metadata.name,
        gpu.arch,
        registers,
        accumulators,
        spill_bytes,
        metadata.shared,
        metadata.num_warps,
        instructions,
        compile_s,
        cached,
    )
    return Compiled(facts, texts)


def _opcodes(sass: str) -> Counter[str]:
    words = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?(MUFU\.\w+|[A-Z][A-Z0-9_]*)", sass, re.MULTILINE
    )
    return Counter(words)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Returns (resource usage, listing) of a cubin, by the tools that ship with Triton. Disassembling takes half a
    second, so the listing is kept in Triton's cache beside the cubin."""
    cache = triton.runtime.cache.get_cache_manager(hashlib.sha256(cubin).hexdigest())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "--dump-resource-usage", path)
        if kept := cache.get_file("kernel.sass"):
            return usage, Path(kept).read_text()
        listing = _tool("nvdisasm", "-c", path)
    cache.put(listing, "kernel.sass", binary=False)
    return usage, listing


def _tool(name: str, *arguments: Any) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout
