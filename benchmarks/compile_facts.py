"""Compiles a fixed sample of every kernel, and compares the results of two versions of the source.

    PYTHONPATH=. python benchmarks/compile_facts.py record FACTS.json
    PYTHONPATH=. python benchmarks/compile_facts.py compare BEFORE.json AFTER.json

A change that must not affect device code (a renaming, another order of parameters) passes if no launch of any
variant has more registers, spills, shared memory or instructions than before, beyond 2 %. Both files must be made with
the same Triton. No GPU is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels import append_kv
from warpwave.kernels.three_kernel.choice import own_products
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.inspect.compiled import CompileFacts, compile_launch, compile_launches, toolchain

ALLOWED = 0.02  # by how much a figure may grow
PORTABLE = ("sm_90", "sm_80", "gfx942")
HOPPER = ("sm_90",)
PROBLEM: dict[str, Any] = {
    "batch": 2, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 128,
    "head_dim_v": 128, "dtype": "bfloat16", "return_lse": True,
}  # fmt: skip
CAUSAL: dict[str, Any] = {"causal": Causal("bottom_right")}
MASK: dict[str, Any] = {"mask_shape": (2, 1, 1024, 1024)}
BIAS: dict[str, Any] = {"bias_shape": (1, 4, 1024, 1024), "bias_dtype": "float32"}
PACKED: dict[str, Any] = {"packed": True, "total_q": 2048, "total_k": 2048}
FLOAT32: dict[str, Any] = {"dtype": "float32"}
FLOAT8: dict[str, Any] = {
    "dtype": "float8_e4m3fn",
    "dtype_v": "float8_e4m3fn",
    "dtype_out": "bfloat16",
    "descale_blocks": (0, 0, 0),
}
DECODE: dict[str, Any] = {"seqlen_q": 1, "seqlen_k": 4096, "num_heads_q": 8}
LATENT: dict[str, Any] = {
    "seqlen_q": 1, "seqlen_k": 8192, "num_heads_q": 16, "num_heads_kv": 1, "head_dim": 576, "head_dim_v": 512,
}  # fmt: skip
SPLIT: dict[str, Any] = {"num_splits": 4, "pieces": 0, "roles": False}


def width(head_dim: int) -> dict[str, int]:
    """Returns the fields of a problem whose K and V are equally wide."""
    return {"head_dim": head_dim, "head_dim_v": head_dim}


class Variant(NamedTuple):
    """A call of one kernel, compiled for several targets.

    Args:
        kernel: its name in the dispatcher.
        label: what is particular about the call.
        archs: targets.
        fields: how the problem differs from `PROBLEM`.
        changes: how the config differs from the default one.
    """

    kernel: str
    label: str
    archs: tuple[str, ...]
    fields: dict[str, Any]
    changes: dict[str, Any] = {}  # noqa: RUF012


VARIANTS = (
    Variant("flash_fwd", "plain, one head of keys for each of queries", PORTABLE, {"num_heads_kv": 4}),
    Variant("flash_fwd", "causal", PORTABLE, CAUSAL),
    Variant("flash_fwd", "causal, 64", PORTABLE, CAUSAL | width(64)),
    Variant("flash_fwd", "window, softcap, sinks", HOPPER,
            {"window_size": (128, 0), "softcap": 15.0, "has_sinks": True}),
    Variant("flash_fwd", "mask", PORTABLE, MASK),
    Variant("flash_fwd", "bias", HOPPER, BIAS),
    Variant("flash_fwd", "ALiBi", HOPPER, CAUSAL | {"alibi_shape": (4,)}),
    Variant("flash_fwd", "packed, 80", PORTABLE, CAUSAL | PACKED | width(80)),
    Variant("flash_fwd", "float32", PORTABLE, FLOAT32 | width(64)),
    Variant("flash_fwd", "bf16x3, causal", HOPPER, FLOAT32 | CAUSAL | width(64) | {"precision": "bf16x3"}),
    Variant("flash_fwd", "ieee", HOPPER, FLOAT32 | width(64) | {"precision": "ieee"}),
    Variant("split_kv", "decode, splits", PORTABLE, DECODE, SPLIT),
    Variant("split_kv", "decode by default", HOPPER, DECODE),
    Variant("split_kv", "decode, paged", PORTABLE, DECODE | CAUSAL | {"page_size": 16}),
    Variant("split_kv", "decode, one token a page", HOPPER, DECODE | {"page_size": 1}),
    Variant("split_kv", "decode, mask and bias", HOPPER, DECODE
            | {"mask_shape": (2, 1, 1, 4096), "bias_shape": (1, 8, 1, 4096)}),
    Variant("split_kv", "decode, float32, paged", PORTABLE, DECODE | FLOAT32 | {"page_size": 16}),
    Variant("split_kv", "batch-invariant", HOPPER, DECODE | {"page_size": 16, "batch_invariant": True}),
    Variant("split_kv", "tensor maps", HOPPER, DECODE | {"page_size": 128, "window_size": (512, 0), "has_sinks": True},
            {"roles": False, "by_map": True}),
    Variant("split_kv", "prefill, packed and paged", PORTABLE, DECODE | PACKED | CAUSAL
            | {"seqlen_q": 512, "total_q": 600, "total_k": 0, "page_size": 16}),
    Variant("split_kv", "a short prompt, one step", HOPPER, width(64) | {"seqlen_q": 64, "seqlen_k": 64}),
    Variant("large_head_dim", "512, causal", PORTABLE, CAUSAL | width(512)),
    Variant("large_head_dim", "320, mask", PORTABLE, MASK | width(320)),
    Variant("large_head_dim", "float32", HOPPER, FLOAT32 | width(512)),
    Variant("large_head_dim", "packed", HOPPER, CAUSAL | PACKED | width(512)),
    Variant("large_head_dim", "latent, decode", PORTABLE, LATENT),
    Variant("large_head_dim", "latent, decode, paged", HOPPER, LATENT | {"page_size": 64}),
    Variant("three_kernel", "1024, causal", PORTABLE, CAUSAL | width(1024)),
    Variant("three_kernel", "320, softcap and sinks", HOPPER, width(320) | {"softcap": 15.0, "has_sinks": True}),
    Variant("three_kernel", "float32", HOPPER, FLOAT32 | width(1024)),
    Variant("three_kernel", "Hopper's products", HOPPER, width(1024), {"scores": "hopper", "values": "hopper"}),
    Variant("hopper/flash_fwd", "plain", HOPPER, {}),
    Variant("hopper/flash_fwd", "causal", HOPPER, CAUSAL),
    Variant("hopper/flash_fwd", "window, 64", HOPPER, width(64) | {"window_size": (128, 0)}),
    Variant("hopper/flash_fwd", "causal, 256", HOPPER, CAUSAL | width(256)),
    Variant("hopper/flash_fwd", "packed, 80", HOPPER, CAUSAL | PACKED | width(80)),
    Variant("hopper/flash_fwd", "float8, causal", HOPPER, CAUSAL | FLOAT8),
    Variant("hopper/flash_fwd", "float8, 256, factors of blocks", HOPPER,
            FLOAT8 | width(256) | {"descale_blocks": (128, 128, 128)}),
    Variant("hopper/flash_fwd", "int8, causal", HOPPER, CAUSAL | FLOAT8 | {"dtype": "int8", "dtype_v": "bfloat16"}),
    Variant("hopper/flash_fwd", "mask", HOPPER, MASK),
    Variant("hopper/flash_fwd", "bias, 64", HOPPER, width(64) | BIAS),
    Variant("hopper/flash_fwd", "ALiBi, 192", HOPPER, width(192) | CAUSAL | {"alibi_shape": (4,)}),
    Variant("hopper/flash_fwd", "384, causal", HOPPER, CAUSAL | width(384)),
    *(Variant("hopper/flash_fwd", precision, HOPPER, FLOAT32 | CAUSAL | width(64)
              | {"seqlen_q": 4096, "precision": precision}) for precision in ("fp16x1", "fp16x3", "bf16x6")),
    Variant("hopper/large_head_dim", "512, causal", HOPPER, CAUSAL | width(512)),
    Variant("hopper/large_head_dim", "384, softcap and sinks", HOPPER,
            width(384) | {"softcap": 15.0, "has_sinks": True}),
    Variant("hopper/large_head_dim", "512, packed", HOPPER, CAUSAL | PACKED | width(512)),
    Variant("tiled", "causal", PORTABLE, CAUSAL),
    Variant("tiled", "bias, 64", HOPPER, BIAS | width(64)),
    Variant("naive", "float32, mask, 64", PORTABLE, FLOAT32 | MASK | width(64)),
)  # fmt: skip


def problem_of(fields: dict[str, Any]) -> AttentionProblem:
    """Returns the problem of a variant."""
    merged = PROBLEM | fields
    if merged.get("page_size") and merged.get("packed"):
        merged["total_k"] = 0
    return AttentionProblem(softmax_scale=merged["head_dim"] ** -0.5, **merged)


def config_of(kernel: Any, problem: AttentionProblem, gpu: Gpu, changes: dict[str, Any]) -> Any:
    """Returns the default config with a variant's changes; of `three_kernel` the one whose products are its own."""
    if kernel.NAME != "three_kernel":
        return replace(dispatch.default_config(kernel, problem, gpu), **changes)
    if changes:
        same = (c for c in kernel.configs(problem, gpu) if all(getattr(c, k) == v for k, v in changes.items()))
        return next(same)
    return own_products(problem, gpu)


def figures(facts: CompileFacts) -> dict[str, Any]:
    """Returns what is compared of one launch, by name."""
    return {
        "launch": facts.name,
        "registers": facts.registers + facts.accumulators,
        "spill_bytes": facts.spill_bytes,
        "smem_bytes": facts.smem_bytes,
        "instructions": facts.instructions.total(),
    }


def of_kernels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name of a variant on a target, its config and launches)."""
    kernels = {kernel.NAME: kernel for kernel in dispatch.KERNELS}
    for variant in VARIANTS:
        problem, kernel = problem_of(variant.fields), kernels[variant.kernel]
        for arch in variant.archs:
            gpu, name = Gpu.for_arch(arch), f"{variant.kernel}, {variant.label}, {arch}"
            if reasons := kernel.why_not(problem, gpu):
                yield name, {"refused": reasons}
                continue
            config = config_of(kernel, problem, gpu, variant.changes)
            launches = [figures(done.facts) for done in compile_launches(kernel, problem, gpu, config)]
            yield name, {"config": asdict(config), "launches": launches}


def of_appending() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name of a variant, its launch) of writing new keys into a cache and rotating queries."""
    for arch in PORTABLE:
        for packed in (False, True):
            lead = (9,) if packed else (2, 1)

            def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device="meta")

            kv, q, angles = empty(*lead, 2, 128), empty(*lead, 8, 128), empty(99, 64, dtype=torch.float32)
            pool, table = empty(9, 16, 2, 128), empty(4, 8, dtype=torch.int32)
            lengths = empty(4, dtype=torch.int32)
            rows = None if packed else empty(2, dtype=torch.int32)
            offsets = empty(3, dtype=torch.int32) if packed else None
            new = append_kv.New(kv, kv, q, q, pool, pool, table, lengths, rows, offsets, angles, angles)
            done = compile_launch(append_kv.specify(new, 5, True), Gpu.for_arch(arch))
            yield f"append_kv, {'packed' if packed else 'padded'}, {arch}", {"launches": [figures(done.facts)]}


def record(path: Path) -> None:
    """Compiles the sample and writes its facts."""
    found: dict[str, Any] = {}
    for name, facts in chain(of_kernels(), of_appending()):
        found[name] = facts
        print(f"{len(found)}: {name}", file=sys.stderr, flush=True)
    path.write_text(json.dumps({"toolchain": toolchain(Gpu.for_arch("sm_90")), "variants": found}, indent=1) + "\n")


def compare(before: Path, after: Path) -> int:
    """Prints every difference, and how many figures grew by more than `ALLOWED`.

    Returns:
        1 if one did, or if variants or launches are missing; else 0.
    """
    old, new = (json.loads(path.read_text()) for path in (before, after))
    if old["toolchain"] != new["toolchain"]:
        print(f"compiled with {old['toolchain']} and with {new['toolchain']}: nothing to compare")
        return 1
    worse, compared, largest = 0, 0, 0.0
    for name in dict.fromkeys((*old["variants"], *new["variants"])):
        was, now = old["variants"].get(name, {}), new["variants"].get(name, {})
        shared = was.get("config", {}).keys() & now.get("config", {}).keys()
        if changed := [field for field in sorted(shared) if was["config"][field] != now["config"][field]]:
            print(f"{name}: another config: {', '.join(changed)}")
        if was.get("refused") != now.get("refused") or len(was.get("launches", ())) != len(now.get("launches", ())):
            worse += 1
            print(f"{name}: {was} became {now}")
            continue
        for one, other in zip(was.get("launches", ()), now.get("launches", ()), strict=True):
            compared += 1
            for figure in ("registers", "spill_bytes", "smem_bytes", "instructions"):
                if one[figure] == other[figure]:
                    continue
                growth = (other[figure] - one[figure]) / max(1, one[figure])
                largest = max(largest, growth)
                worse += growth > ALLOWED
                print(f"{name}, {other['launch']}: {figure} {one[figure]} -> {other[figure]} ({growth:+.1%})")
    variants = sum("launches" in facts for facts in new["variants"].values())
    print(f"{variants} variants, {compared} launches: {worse} worse than allowed; the largest growth is {largest:.2%}")
    return int(worse > 0)


def main(arguments: list[str]) -> int:
    """Runs the command that the first argument names."""
    match arguments:
        case ["record", path]:
            record(Path(path))
            return 0
        case ["compare", before, after]:
            return compare(Path(before), Path(after))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
