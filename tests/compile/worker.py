"""Compiles what it is told on standard input and prints the facts: a process of its own, because Triton's interpreter,
which the rest of the suite needs on a machine without a GPU, replaces the compiler for a whole process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from warpwave import dispatch
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.kernels import flash_bwd
from warpwave.kernels.flash_bwd.launches import Outputs
from warpwave.kernels.hopper import flash_bwd as hopper_flash_bwd
from warpwave.kernels.hopper.flash_bwd import kernel as hopper_kernel
from warpwave.kernels.hopper.flash_bwd import launches as hopper_launches
from warpwave.kernels.three_kernel.choice import own_products
from warpwave.kernels.three_kernel.config import with_workspace
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.inspect.compiled import (
    Compiled,
    compile_launch,
    compile_launches,
    mixed_descriptors,
    unwritten_registers,
    worst,
)

KERNELS = {module.NAME: module for module in dispatch.KERNELS}


def problem_of(fields: dict[str, Any]) -> AttentionProblem:
    fields = dict(fields)
    if fields.get("causal"):
        fields["causal"] = Causal(fields["causal"])
    for name in ("mask_shape", "bias_shape", "alibi_shape", "window_size", "descale_blocks"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return AttentionProblem(**fields)


def forward(job: dict[str, Any], problem: AttentionProblem, gpu: Gpu) -> dict[str, Any]:
    kernel = KERNELS[job["kernel"]]
    config = kernel.Config(**job["config"]) if "config" in job else kernel.configs(problem, gpu)[0]
    if job.get("own_products"):
        config = own_products(problem, gpu)
    if "changes" in job:
        config = with_workspace(problem, gpu, replace(config, **job["changes"]))
    results = compile_launches(kernel, problem, gpu, config)
    launches = [compiled.facts for compiled in results]
    facts = vars(worst(launches)) | {
        "launches": [vars(launch) for launch in launches],
        "config": asdict(config),
        "smem_bound": kernel.smem_bytes(problem, gpu, config),
        "smem_limit": gpu.smem_per_block_bytes,
    }
    if job.get("listing"):
        facts["listing"] = results[-1].texts["sass"]
    if job.get("ptx"):
        facts["ptx"] = results[-1].texts["ptx"]
    if job["arch"] == "sm_90":
        facts["mixed_descriptors"] = [mixed_descriptors(result.texts["ptx"]) for result in results]
        facts["unwritten_registers"] = unwritten(results)
    return facts


def unwritten(results: Iterable[Compiled]) -> list[str]:
    return [read for result in results for read in unwritten_registers(result.texts["sass"])]


def portable_gradients(job: dict[str, Any], problem: AttentionProblem, gpu: Gpu) -> dict[str, Any]:
    config, given = flash_bwd.default(problem, gpu), operands_without_memory(problem)
    assert config is not None

    def like(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta")

    out = torch.empty((*given.q.shape[:-1], problem.head_dim_v), dtype=given.q.dtype, device="meta")
    rows = torch.empty(16, dtype=torch.float32, device="meta")

    def parts(t: torch.Tensor, walked: str) -> torch.Tensor | None:
        shared = config.splits > 1 and walked == flash_bwd.walked_of(problem, config)
        return torch.empty((config.splits, *t.shape), dtype=torch.float32, device="meta") if shared else None

    outputs = Outputs(
        like(given.q), like(given.k), like(given.v), like(given.bias), rows.to(torch.int64),
        None if given.alibi_slopes is None else rows, None if given.sinks is None else rows, None,
        parts(given.q, "keys"), parts(given.k, "queries"), parts(given.v, "queries"),
    )  # fmt: skip
    specs = flash_bwd.specify(problem, gpu, given, (out, rows), out, rows, outputs, config)
    results, is_hopper = [compile_launch(spec, gpu) for spec in specs], job["arch"] == "sm_90"
    found = []
    for compiled in results:
        mixed = mixed_descriptors(compiled.texts["ptx"]) if is_hopper else {}
        listing = {"listing": compiled.texts["sass"]} if job.get("listing") else {}
        found.append(vars(compiled.facts) | {"mixed_descriptors": mixed} | listing)
    return {
        "launches": found,
        "config": str(config),
        "bound": flash_bwd.smem_bytes(problem, gpu, config),
        "limit": gpu.smem_per_block_bytes,
        "unwritten_registers": unwritten(results) if is_hopper else [],
    }


def hopper_gradients(job: dict[str, Any], problem: AttentionProblem, gpu: Gpu) -> dict[str, Any]:
    """Every config of the call, with the launches of each by name."""
    given = operands_without_memory(problem)
    out = torch.empty(*given.q.shape[:-1], problem.head_dim_v, dtype=given.q.dtype, device="meta")
    rows = torch.empty(16, dtype=torch.float32, device="meta")
    configs, results = [], []
    for config in hopper_flash_bwd.configs(problem, gpu):
        workspace, grads = hopper_kernel.example(problem, config, "meta")
        tensors = hopper_launches.Tensors(given, out, rows, out, rows, workspace, *grads)
        tensors = hopper_kernel.with_bias(problem, tensors, is_wanted=job.get("of_bias", True))
        found = {}
        for step in hopper_flash_bwd.specify(problem, gpu, tensors, config):
            compiled = compile_launch(step.launch, gpu)
            results.append(compiled)
            mixed = mixed_descriptors(compiled.texts["ptx"])
            found[step.launch.kernel.__name__] = vars(compiled.facts) | {"mixed_descriptors": mixed}
        configs.append({"launches": found, "bound": hopper_flash_bwd.smem_bytes(problem, config)})
    return {"configs": configs, "unwritten_registers": unwritten(results)}


WAYS: dict[str, Callable[[dict[str, Any], AttentionProblem, Gpu], dict[str, Any]]] = {
    "flash_bwd": portable_gradients,
    "hopper/flash_bwd": hopper_gradients,
}


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        way = WAYS.get(job["kernel"], forward)
        print(json.dumps(way(job, problem_of(job["problem"]), Gpu.for_arch(job["arch"]))), flush=True)


if __name__ == "__main__":
    main()
