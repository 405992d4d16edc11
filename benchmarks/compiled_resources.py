"""Records what the default configs of kernels compile to on every target, for the occupancy that `explain` prints.

    python -m benchmarks.compiled_resources            writes warpwave/workbench/model/compiled.json (minutes)
    python -m benchmarks.compiled_resources --check    exit code 1 if an entry compiles to another number of blocks

Registers and shared memory decide how many blocks share an SM, and no formula foresees what a compiler uses. An entry
holds the launch with the products of one call; `model.compiled` looks it up by kernel, target, config and tile widths.
No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from warpwave import dispatch
from warpwave.gpu import ARCHS, Gpu
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.hardware.occupancy import occupancy
from warpwave.workbench.inspect.compiled import CompileFacts, compile_launches, toolchain
from warpwave.workbench.model import compiled

TARGETS = tuple(arch for arch in ARCHS if arch not in compiled.SAME_CODE)
PREFILL: dict[str, Any] = {"batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "num_heads_q": 32, "num_heads_kv": 32}
DECODE: dict[str, Any] = {"batch": 8, "seqlen_q": 1, "seqlen_k": 8192, "num_heads_q": 32, "num_heads_kv": 8}
# kernel -> (sizes, widths of heads). Kernels of one architecture state their blocks an SM themselves.
CALLS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "flash_fwd": (PREFILL, (48, 64, 80, 96, 128, 160, 192, 256)),
    "split_kv": (DECODE, (64, 128)),
    "large_head_dim": (PREFILL, (320, 512, 1024)),
}


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the entries that are there, write nothing")
    asked = parser.parse_args()
    if asked.check:
        wrong = list(differences())
        print("\n".join(wrong) or f"{len(compiled.table())} entries compile to the same number of blocks")
        return bool(wrong)
    entries = [entry_of(*call) for call in calls()]
    versions = {arch: toolchain(Gpu.for_arch(arch)) for arch in ("sm_90", "gfx942")}
    data = {"schema": compiled.SCHEMA, "toolchain": versions, "entries": entries}
    compiled.FILE.write_text(dumped(data), encoding="utf-8")
    print(f"{len(entries)} entries in {compiled.FILE}")
    return 0


def dumped(data: dict[str, Any]) -> str:
    """Returns the file's text, one entry a line."""
    head = json.dumps({key: value for key, value in data.items() if key != "entries"})[:-1]
    return f'{head}, "entries": [\n' + ",\n".join(json.dumps(entry) for entry in data["entries"]) + "\n]}\n"


def calls() -> Iterator[tuple[Any, AttentionProblem, Gpu, Any]]:
    """Yields each (kernel, call, target, config) of the table. Of head sizes that a target pads to one width, it yields
    the last."""
    modules = {module.NAME: module for module in dispatch.KERNELS}
    found: dict[compiled.Key, tuple[Any, AttentionProblem, Gpu, Any]] = {}
    for name, (sizes, widths) in CALLS.items():
        for arch in TARGETS:
            gpu = Gpu.for_arch(arch)
            for dtype in ("bfloat16", "float32"):
                for width in widths:
                    for causal in (False, True):
                        problem = AttentionProblem(
                            **sizes,
                            head_dim=width,
                            head_dim_v=width,
                            dtype=dtype,
                            softmax_scale=width**-0.5,
                            causal=Causal("bottom_right") if causal else None,
                        )
                        if not dispatch.why_not(modules[name], problem, gpu):
                            config = dispatch.default_config(modules[name], problem, gpu)
                            call = (modules[name], problem, gpu, config)
                            found[compiled.key(name, problem, gpu, config)] = call
    yield from found.values()


def entry_of(kernel: Any, problem: AttentionProblem, gpu: Gpu, config: Any) -> dict[str, Any]:
    """Compiles one call and returns its entry."""
    facts = with_products([launch.facts for launch in compile_launches(kernel, problem, gpu, config)])
    found = compiled.Resources(max(facts.registers, facts.accumulators), facts.smem_bytes)
    return compiled.key(kernel.NAME, problem, gpu, config)._asdict() | found._asdict()


def with_products(launches: list[CompileFacts]) -> CompileFacts:
    """Returns the launch that computes the products: the one with most matrix instructions, or multiply-adds."""
    names = ("HMMA", "HGMMA", "UTCHMMA", "v_mfma", "v_wmma", "FFMA", "v_fma", "v_pk_fma", "v_dot", "v_fmac")
    return max(launches, key=lambda f: sum(n for name, n in f.instructions.items() if name.startswith(names)))


def blocks(arch: str, num_warps: int, registers: int, accumulators: int, smem_bytes: int) -> int:
    """Returns the resident blocks of such a launch on an SM."""
    found = occupancy(
        Gpu.for_arch(arch), registers=registers, accumulators=accumulators, num_warps=num_warps, smem_bytes=smem_bytes
    )
    assert found is not None
    return found.blocks


def differences() -> Iterator[str]:
    """Compiles every call again, and yields a line for each whose number of blocks is another one than in the table."""
    for kernel, problem, gpu, config in calls():
        key = compiled.key(kernel.NAME, problem, gpu, config)
        then = compiled.table().get(key)
        if then is None:
            yield f"{key}: not in the table"
            continue
        facts = with_products([launch.facts for launch in compile_launches(kernel, problem, gpu, config)])
        now = blocks(gpu.arch, facts.num_warps, facts.registers, facts.accumulators, facts.smem_bytes)
        of_table = blocks(gpu.arch, facts.num_warps, then.registers, 0, then.smem_bytes)
        if now != of_table:
            yield f"{key}: {now} blocks an SM, {of_table} in the table"


if __name__ == "__main__":
    sys.exit(main())
