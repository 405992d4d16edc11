"""What a kernel compiles to, for any target, without a GPU.

Triton compiles for every architecture it knows on any Linux machine. The result tells registers, spills, shared
memory and the instruction mix: the facts that decide whether a config is worth running at all, and that tests assert
so that a change of kernel or compiler cannot quietly lose a matrix instruction.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpwave.hardware.gpu import Gpu
from warpwave.kernels.triton_or_stub import triton
from warpwave.launch import Launch
from warpwave.problem import AttentionProblem, Operands

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class CompileFacts:
    """What the compiler made of one launch.

    Args:
        arch: the target.
        registers: a thread's vector registers (on AMD those of the vector file alone).
        spill_bytes: a thread's local memory: spilled registers and anything else that did not fit.
        smem_bytes: shared memory of a block.
        instructions: machine instructions by their first word (`HGMMA`, `v_mfma`), as they stand, loops not unrolled.
    """

    arch: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    instructions: Counter[str]


def operands_without_memory(problem: AttentionProblem) -> Operands:
    """Contiguous operands of a problem on device "meta": shapes and strides, no storage."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    p, dtype = problem, getattr(torch, problem.dtype)
    rows = (p.total_q,) if p.packed else (p.batch, p.seqlen_q)
    keys = (p.total_k,) if p.packed else (p.batch, p.seqlen_k)
    offsets = empty(p.batch + 1, dtype=torch.int32) if p.packed else None
    return Operands(
        empty(*rows, p.num_heads_q, p.head_dim, dtype=dtype),
        empty(*keys, p.num_heads_kv, p.head_dim, dtype=dtype),
        empty(*keys, p.num_heads_kv, p.head_dim_v, dtype=dtype),
        None if p.mask_shape is None else empty(*p.mask_shape, dtype=torch.bool),
        None if p.bias_shape is None else empty(*p.bias_shape, dtype=getattr(torch, p.bias_dtype or p.dtype)),
        None if p.alibi_shape is None else empty(*p.alibi_shape, dtype=torch.float32),
        empty(p.num_heads_q, dtype=torch.float32) if p.has_sinks else None,
        offsets,
        offsets,
    )


def compile_facts(kernel: Any, problem: AttentionProblem, gpu: Gpu, config: Any) -> CompileFacts:
    """Compiles a kernel of ours for a problem, a target and a config, and reads what came out.

    Args:
        kernel: a kernel module with `specify`.
        problem: the call; operands are taken as contiguous and 16-byte aligned.
        gpu: the target, `Gpu.for_arch("sm_90")`.
        config: one of the kernel's configs.

    Raises:
        RuntimeError: Triton's interpreter is on, which replaces the compiler.
    """
    operands = operands_without_memory(problem)
    q = operands.q
    out = torch.empty((*q.shape[:-1], problem.head_dim_v), dtype=q.dtype, device="meta")
    lse = torch.empty(1, dtype=torch.float32, device="meta") if problem.return_lse else None
    return _read(_compile(kernel.specify(problem, gpu, operands, out, lse, config), gpu), gpu)


def _compile(spec: Launch, gpu: Gpu) -> Any:
    kernel = spec.kernel
    if not hasattr(kernel, "params"):
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter replaces the compiler; unset it to compile")
    from triton.backends.compiler import GPUTarget

    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    values = (*spec.tensors, *spec.scalars, *spec.constants.values())
    divisible = [["tt.divisibility", 16]]
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        # The rules by which Triton specialises a launch.
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[i,] = divisible
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[i,] = divisible
    backend = "hip" if gpu.vendor == "amd" else "cuda"
    target = GPUTarget(backend, gpu.arch if gpu.vendor == "amd" else gpu.capability, gpu.warp_size)
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=dict(spec.options))


def _read(compiled: Any, gpu: Gpu) -> CompileFacts:
    smem = compiled.metadata.shared
    if gpu.vendor == "amd":
        text = compiled.asm["amdgcn"]

        def note(name: str) -> int:
            return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))  # type: ignore[union-attr]

        instructions = Counter(re.findall(r"^\t([a-z]\w+)", text, re.MULTILINE))
        return CompileFacts(gpu.arch, note("vgpr_count"), note("private_segment_fixed_size"), smem, instructions)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
        listing = _tool("nvdisasm", "-c", cubin)
    registers, stack = (int(re.search(rf"\b{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))  # type: ignore[union-attr]
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", listing, re.MULTILINE)
    return CompileFacts(gpu.arch, registers, stack, smem, Counter(opcodes))


def _tool(name: str, *arguments: Any) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout
