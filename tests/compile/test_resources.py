"""explain states as many blocks an SM, and as much shared memory, as inspect compiles, on every target."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest

from benchmarks.compiled_resources import blocks, calls, with_products
from tests.compile.test_targets import TARGETS, compile_all, job
from tests.compile.worker import problem_of
from tests.marks import one_in
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.workbench.hardware.catalog import catalog, gpu_of, of_arch
from warpwave.workbench.hardware.occupancy import occupancy
from warpwave.workbench.inspect.compiled import CompileFacts
from warpwave.workbench.model import compiled
from warpwave.workbench.model.predict import predict

SHARED_MEMORY, REGISTERS = "shared memory", "registers"


@one_in(3)
@pytest.mark.parametrize("arch", TARGETS)
def test_the_table_is_what_the_target_compiles_to(arch: str) -> None:
    """The call is one of those of test_targets, so that it is compiled once."""
    asked = [job(arch, "bfloat16", 128, "causal")]
    for a_job, facts in zip(asked, compile_all(asked), strict=True):
        problem = problem_of(a_job["problem"])
        kernel = next(kernel for kernel in dispatch.KERNELS if kernel.NAME == "flash_fwd")
        found = compiled.resources("flash_fwd", problem, Gpu.for_arch(arch), kernel.Config(**facts["config"]))
        assert found is not None, "no entry of the default config; run python -m benchmarks.compiled_resources"
        assert found.smem_bytes == facts["smem_bytes"]
        now = blocks(arch, facts["num_warps"], facts["registers"], facts["accumulators"], facts["smem_bytes"])
        then = blocks(arch, facts["num_warps"], found.registers, 0, found.smem_bytes)
        assert now == then


def test_a_prediction_has_the_blocks_and_the_memory_of_the_table() -> None:
    """For every entry with a card: also what limits the blocks, where one resource does."""
    cards = {arch: of_arch(arch)[0] for arch in {sheet.arch for sheet in catalog().values()}}
    seen = set()
    for kernel, problem, bare, config in calls():
        gpu = gpu_of(cards[bare.arch])
        found = compiled.resources(kernel.NAME, problem, gpu, config)
        assert found is not None
        p = predict(problem, kernel, kernel.configs(problem, bare)[0], gpu)
        assert p is not None and kernel.configs(problem, bare)[0] == config
        if p.limit == "launch":  # the kernel launches as many as it wants
            continue
        cost = kernel.cost(problem, gpu, config)
        threads = max(cost.parts or (cost,), key=lambda part: part.flops).threads
        fits = occupancy(
            gpu,
            registers=found.registers,
            accumulators=0,
            num_warps=threads // gpu.warp_size,
            smem_bytes=found.smem_bytes,
        )
        assert fits is not None and p.blocks_per_sm == max(1, fits.blocks), (kernel.NAME, gpu.arch, config)
        smem = next((t for t in p.traffic if t.level == SHARED_MEMORY), None)
        regs = next(t for t in p.traffic if t.level == REGISTERS)
        assert smem is not None and smem.bytes == found.smem_bytes
        if fits.blocks:
            assert smem.working_set <= smem.capacity and regs.working_set <= regs.capacity, (kernel.NAME, gpu.arch)
        seen.add((kernel.NAME, gpu.arch))
    assert {arch for _, arch in seen} == set(TARGETS)


def test_a_config_that_the_table_lacks_is_estimated_without_the_queries_in_shared_memory() -> None:
    kernel = next(kernel for kernel in dispatch.KERNELS if kernel.NAME == "flash_fwd")
    problem = problem_of(job("sm_89", "float16", 64, "plain")["problem"])
    gpu = gpu_of(catalog()["rtx4090"])
    other = kernel.Config(64, 64, 4, 2)
    assert compiled.resources("flash_fwd", problem, gpu, other) is None
    p = predict(problem, kernel, other, gpu)
    assert p is not None
    smem = next(t for t in p.traffic if t.level == SHARED_MEMORY)
    assert smem.bytes < kernel.smem_bytes(problem, gpu, other) and smem.working_set <= smem.capacity


@pytest.mark.full
@pytest.mark.parametrize("arch", TARGETS)
def test_every_entry_compiles_to_as_many_blocks(arch: str) -> None:
    asked = [(kernel, problem, config) for kernel, problem, gpu, config in calls() if gpu.arch == arch]
    jobs = []
    for kernel, problem, _ in asked:
        sizes = {
            name: getattr(problem, name) for name in ("seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "batch")
        }
        fields = job(arch, problem.dtype, problem.head_dim, "causal" if problem.causal else "plain")["problem"]
        jobs.append({"kernel": kernel.NAME, "arch": arch, "problem": fields | sizes | {"return_lse": False}})
    seen = set()
    for (kernel, problem, config), facts in zip(asked, compile_all(jobs), strict=True):
        assert facts["config"] == asdict(config)
        f = with_products(
            [
                CompileFacts(**{**launch, "instructions": Counter(launch["instructions"])})
                for launch in facts["launches"]
            ]
        )
        found = compiled.resources(kernel.NAME, problem, Gpu.for_arch(arch), config)
        assert found is not None
        key = compiled.key(kernel.NAME, problem, Gpu.for_arch(arch), config)
        seen.add(key)
        now = blocks(arch, f.num_warps, f.registers, f.accumulators, f.smem_bytes)
        assert now == blocks(arch, f.num_warps, found.registers, 0, found.smem_bytes), key
    assert seen == {key for key in compiled.table() if key.arch == arch}
