"""Times configs of `flash_fwd` and `flash_bwd` in the code of an NVIDIA GPU with `mma` instructions, on a Hopper GPU.

    PYTHONPATH=. python -m benchmarks.portable_configs RECORD [--arch sm_80 sm_89] [--calls plain mask]
        [--head-dims 64 128] [--seconds 480]

`benchmarks.card_code` explains the method and the meaning of the times. With `--arch sm_90` the code is Hopper's own.

Calls are 2 x 4096, heads * head_dim about 2048, at head_dim 64, 128 and 256 unless others are named: bfloat16 full and
causal, full with a boolean mask or a bias for all heads, and float32 full, by default and in tf32. Results are compared
with those of Hopper's default configs. The record has, for each call and launch, the default first and then every
candidate. It also has the times of SDPA's flash backend, and of its efficient backend for masks, biases and float32:
PyTorch compiles both with `mma` instructions for every GPU, so their times on Hopper can be compared with those of our
code for Ampere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.card_code import CARD, SMEM_OF_SM, compile_for
from warpwave import dispatch
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import flash_bwd, flash_fwd
from warpwave.kernels.arguments import total_widths
from warpwave.kernels.flash_bwd import host
from warpwave.kernels.flash_bwd.choice import fitting as fitting_tiles
from warpwave.kernels.flash_fwd.config import fitting
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.timing import time_interleaved
from warpwave.workbench.output_files import write_whole

OF_QKV = (True, True, True, False, False, False)
MOST_ERROR = 1e-2  # relative RMS; a wrong tile gives 0.1 or more
CALLS = {"plain": ("full", "causal"), **{name: (name,) for name in ("full", "mask", "bias", "float32", "tf32")}}
HEAD_DIMS = (64, 128, 256)
ARCHS = (*SMEM_OF_SM, "sm_90")


@dataclass(frozen=True)
class Job:
    """One launch, or the two of keys, with one config.

    Attributes:
        launch: "forward", "dq" or "dkv".
        call: of `CALLS`.
        config: of `flash_fwd`, or of `flash_bwd`.
    """

    arch: str
    launch: str
    head_dim: int
    call: str
    config: Any

    @property
    def name_of_config(self) -> str:
        """Returns the part of the config that the launch reads."""
        if self.launch == "forward":
            return str(self.config)
        split = ", dk and dv apart" if self.launch == "dkv" and self.config.split_dkv else ""
        return f"{getattr(self.config, self.launch)}{split}"


def problem_of(head_dim: int, call: str) -> AttentionProblem:
    """Returns the problem of a call."""
    heads, scores = 2048 // head_dim, (1, 1, 4096, 4096)
    return AttentionProblem(
        batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=heads, num_heads_kv=heads, head_dim=head_dim,
        head_dim_v=head_dim, dtype="float32" if call in ("float32", "tf32") else "bfloat16",
        precision="tf32" if call == "tf32" else "default", softmax_scale=head_dim**-0.5, return_lse=True,
        causal=Causal() if call == "causal" else None, mask_shape=scores if call == "mask" else None,
        bias_shape=scores if call == "bias" else None,
    )  # fmt: skip


def jobs(arch: str, head_dims: Sequence[int], calls: Sequence[str], defaults: bool) -> Iterator[Job]:
    """Returns the configs for a GPU, for each call and launch the default first, then the other candidates."""
    gpu = Gpu.for_arch(arch)
    for head_dim in head_dims:
        for call in calls:
            problem = problem_of(head_dim, call)
            default = flash_bwd.default(problem, gpu)
            assert default is not None
            splits = (True, False) if 128 < head_dim < 256 else (default.split_dkv,)
            found: dict[str, list[Any]] = {
                "forward": [dispatch.default_config(flash_fwd, problem, gpu), *fitting(problem, gpu)],
                "dq": [default, *(replace(default, dq=tile) for tile in fitting_tiles(problem, gpu, False))],
                "dkv": [
                    default,
                    *(
                        replace(default, dkv=tile, split_dkv=split)
                        for split in splits
                        for tile in fitting_tiles(problem, gpu, True)
                    ),
                ],
            }
            for name, configs in found.items():
                kept = [Job(arch, name, head_dim, call, config) for config in configs]
                kept = kept[:1] + [job for job in kept[1:] if not defaults and is_candidate(job, gpu)]
                yield from dict.fromkeys(kept)


def is_candidate(job: Job, gpu: Gpu) -> bool:
    """Returns whether a config may be fast: its accumulators fit the registers, and a step is not too short."""
    tile = job.config if job.launch == "forward" else getattr(job.config, job.launch)
    owned, walked = (tile.block_n, tile.block_m) if job.launch == "dkv" else (tile.block_m, tile.block_n)
    width, _ = total_widths(problem_of(job.head_dim, job.call), gpu, owned)
    threads = 32 * tile.num_warps
    accumulators = owned * width / threads * (2 if job.launch == "dkv" and not job.config.split_dkv else 1)
    scores, stages = owned * walked / threads, tile.num_stages
    # Parts of float32 operands take registers too.
    is_plain, is_float32 = job.call in ("full", "causal"), job.call in ("float32", "tf32")
    most_scores, most_stages = (32, 2) if is_float32 else (64, 3)
    is_tile = owned >= walked and walked <= 64 and owned >= (32 if is_float32 or job.head_dim > 128 else 64)
    has_stages = (2 if is_plain and job.head_dim <= 128 else 1) <= stages <= most_stages
    return is_tile and 4 <= scores <= most_scores and accumulators <= (160 if width > 128 else 128) and has_stages


# Compilation ----------------------------------------------------------------------------------------------------------


@lru_cache(1)
def tensors_of(head_dim: int, call: str) -> tuple[Operands, torch.Tensor]:
    """Returns the operands and the gradient of out."""
    problem = problem_of(head_dim, call)
    seeded, dtype = torch.Generator("cuda").manual_seed(0), getattr(torch, problem.dtype)
    shape = (problem.batch, problem.seqlen_q, problem.num_heads_q, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype, generator=seeded) for _ in range(4))
    given = problem.mask_shape or problem.bias_shape
    scores = None if given is None else torch.randn(given, device="cuda", dtype=dtype, generator=seeded)
    mask = scores > 0 if call == "mask" and scores is not None else None
    return Operands(q, k, v, mask, scores if call == "bias" else None), dout


Prepared = tuple[list[Callable[[], Any]], Any, torch.Tensor]  # the launches, what they write, and out


def prepared(job: Job, gpu: Gpu, results: tuple[torch.Tensor, ...] | None) -> Prepared:
    """Returns the launches of a job. Args: results: out and the log-sum-exp, for gradients."""
    problem = problem_of(job.head_dim, job.call)
    operands, dout = tensors_of(job.head_dim, job.call)
    if job.launch == "forward":
        out = torch.empty_like(dout)
        lse = torch.empty(problem.batch, problem.num_heads_q, problem.seqlen_q, device="cuda")
        spec = flash_fwd.specify(problem, gpu, operands, out, lse, job.config)
        forward = (spec,) if isinstance(spec, launch.Launch) else spec
        return [partial(launch.bind(one), *one.tensors) for one in forward], (out, lse), out
    assert results is not None
    outputs = host._allocator(problem, gpu, operands, OF_QKV, job.config)()
    specs = flash_bwd.specify(problem, gpu, operands, (results[0], results[1]), dout, None, outputs, job.config)
    bound = [launch.bind(spec) for spec in specs]
    calls: list[Callable[[], Any]] = [partial(run, *spec.tensors) for run, spec in zip(bound, specs, strict=True)]
    return calls, outputs, results[0]


def reference(place: Path, head_dims: Sequence[int], calls: Sequence[str]) -> None:
    """Writes the results of Hopper's own code, for each call. Called in a process of its own."""
    gpu = current_gpu(torch.device("cuda"))
    for head_dim in head_dims:
        for call in calls:
            problem = problem_of(head_dim, call)
            config = dispatch.default_config(flash_fwd, problem, gpu)
            launches, results, _ = prepared(Job(gpu.arch, "forward", head_dim, call, config), gpu, None)
            for one in launches:
                one()
            tiles = flash_bwd.default(problem, gpu)
            launches, outputs, _ = prepared(Job(gpu.arch, "dq", head_dim, call, tiles), gpu, results)
            for one in launches:
                one()
            kept = {"results": results, "gradients": outputs[:3], "statistics": outputs.statistics}
            torch.save(kept, place / f"{head_dim}-{call}.pt")


@lru_cache(1)
def expected(place: Path, head_dim: int, call: str) -> dict[str, Any]:
    """Returns what `reference` wrote for a call."""
    return torch.load(place / f"{head_dim}-{call}.pt", map_location="cuda")


def peers(head_dims: Sequence[int], calls: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the times of SDPA. Called in a process of its own."""
    found = []
    for head_dim in head_dims:
        for call in calls:
            operands, dout = tensors_of(head_dim, call)
            q, k, v, dout = (t.transpose(1, 2) for t in (*operands[:3], dout))
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            is_plain, given = call in ("full", "causal"), operands.mask if operands.mask is not None else operands.bias
            backend = SDPBackend.FLASH_ATTENTION if is_plain else SDPBackend.EFFICIENT_ATTENTION

            forward = partial(scaled_dot_product_attention, q, k, v, attn_mask=given, is_causal=call == "causal")
            with sdpa_kernel(backend):
                backward = partial(torch.autograd.grad, forward(), (q, k, v), dout, retain_graph=True)
                both: dict[str, Callable[[], object]] = {"forward": forward, "backward": backward}
                samples = time_interleaved(both, device="cuda", rounds=3)
            for name, sample in samples.items():
                row = {"peer": backend.name, "launch": name, "head_dim": head_dim, "call": call}
                found.append(row | {"us": [round(us, 1) for us in sample.samples_us]})
    return found


def timed_part(job: Job, place: Path) -> tuple[Callable[[], None], Callable[[], float]]:
    """Returns the launches that a job is about, and `error()`: their error relative to Hopper's own code."""
    wanted = expected(place, job.head_dim, job.call)
    calls, outputs, out = prepared(job, Gpu.for_arch(job.arch), wanted["results"])
    if job.launch == "forward":
        pairs = [(out, wanted["results"][0])]
    else:
        outputs.statistics.copy_(wanted["statistics"])
        pairs = list(zip(outputs[:3], wanted["gradients"], strict=True))
        calls, pairs = (calls[:1], pairs[:1]) if job.launch == "dq" else (calls[1:], pairs[1:])

    def run() -> None:
        for call in calls:
            call()

    def error() -> float:
        differences = [((a.float() - b.float()).square().mean() / b.float().square().mean()).sqrt() for a, b in pairs]
        return max(difference.item() for difference in differences)

    return run, error


def compile_one(arguments: tuple[Job, Path]) -> str:
    """Runs a job once, which leaves its code in Triton's cache. Returns what failed, or ""."""
    job, place = arguments
    try:
        compile_for(job.arch)
        timed_part(job, place)[0]()
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


# Timing ---------------------------------------------------------------------------------------------------------------


def of_arch(arch: str, all_jobs: Sequence[Job], place: Path, deadline: float) -> list[dict[str, Any]]:
    """Returns the measurements for a GPU. Args: deadline: of `time.monotonic`, which all processes share."""
    begin, found = time.monotonic(), []
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        failures = list(pool.map(compile_one, [(job, place) for job in all_jobs]))
    print(f"{arch}: {len(all_jobs)} configs compiled after {time.monotonic() - begin:.0f} s", flush=True)
    compile_for(arch)
    for job, failure in zip(all_jobs, failures, strict=True):
        row: dict[str, Any] = {
            "arch": arch, "launch": job.launch, "head_dim": job.head_dim, "call": job.call,
            "config": job.name_of_config,
        }  # fmt: skip
        if failure or time.monotonic() > deadline:
            found.append(row | {"failure": failure or "no time left"})
            continue
        run, error = timed_part(job, place)
        samples = time_interleaved({"": run}, device="cuda", rounds=3, warmup_s=0.01)[""].samples_us
        found.append(row | {"error": error(), "us": [round(us, 1) for us in samples]})
    return found


def main() -> int:
    """Times all candidates; returns 1 if a result is wrong or a config failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--arch", nargs="*", choices=ARCHS, default=["sm_80", "sm_89"])
    parser.add_argument("--calls", nargs="*", choices=tuple(CALLS), default=["plain"])
    parser.add_argument("--head-dims", nargs="*", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--defaults", action="store_true", help="no other candidates")
    parser.add_argument("--seconds", type=float, default=480.0, help="configs are timed until then")
    args = parser.parse_args()
    if CARD:
        parser.error(f"CARD is {CARD}; unset it, because --arch names the GPUs")
    deadline = time.monotonic() + args.seconds
    place = args.record.parent / "references"
    place.mkdir(parents=True, exist_ok=True)
    context, found = multiprocessing.get_context("spawn"), []
    calls = [call for name in args.calls for call in CALLS[name]]
    with ProcessPoolExecutor(1, context) as alone:
        alone.submit(reference, place, args.head_dims, calls).result()
        found += alone.submit(peers, args.head_dims, calls).result()
    for arch in args.arch:
        with ProcessPoolExecutor(1, context) as alone:
            all_jobs = list(jobs(arch, args.head_dims, calls, args.defaults))
            found += alone.submit(of_arch, arch, all_jobs, place, deadline).result()
        whole = {"environment": environment.describe("cuda"), "rows": found}
        write_whole(args.record, json.dumps(whole, indent=1) + "\n")
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    wrong = [row for row in found if "failure" in row or not row.get("error", 0.0) <= MOST_ERROR]
    print(f"{len(found)} configs, {len(wrong)} wrong or failed", *wrong[:3])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
