"""Compiles what it is told on standard input and prints the facts: a process of its own, because Triton's interpreter,
which the rest of the suite needs on a machine without a GPU, replaces the compiler for a whole process."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels.three_kernel import host as three_kernel
from warpwave.kernels.three_kernel.choice import own_products
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.inspect.compiled import compile_launches, mixed_descriptors, worst


def main() -> None:
    kernels = {module.NAME: module for module in dispatch.KERNELS}
    for line in sys.stdin:
        job = json.loads(line)
        fields = job["problem"]
        if fields.get("causal"):
            fields["causal"] = Causal(fields["causal"])
        for name in ("mask_shape", "bias_shape", "alibi_shape", "window_size", "descale_blocks"):
            if name in fields:
                fields[name] = tuple(fields[name])
        problem, gpu, kernel = AttentionProblem(**fields), Gpu.for_arch(job["arch"]), kernels[job["kernel"]]
        config = kernel.Config(**job["config"]) if "config" in job else kernel.configs(problem, gpu)[0]
        if job.get("own_products"):
            config = own_products(problem, gpu)
        if "changes" in job:
            config = three_kernel.with_workspace(problem, gpu, replace(config, **job["changes"]))
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
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
