"""Times of gradients beside SDPA's backends, torch's varlen_attn and FlashAttention-4, paired in one process on a GPU.

    python -m benchmarks.gradients OUT.json [--groups rows drawn models ...] [--rounds 7] [--seed HASH]

Groups of rows (gradient_calls.py); heads * head_dim = 2048 unless stated otherwise:
    rows      backward alone: 64 / 128 / 256 x {16 x 1024, 4 x 4096, 1 x 16384} x full / causal
    both      the same calls, forward and backward together
    between   backward alone, 16 heads, rows of 136 to 192 columns: 192/128, 160, 192, 136 in the same shapes
    grouped   backward alone, grouped heads: causal, 32 on 8 heads and others, and full
    drawn     backward of 40 shapes drawn from a commit's hash: grouped heads, odd lengths, head_dim 80 to 256, 192/128
    features  backward with packed documents, a window, a softcap, a mask, a bias, and in float32
    biases    backward with a bias for each score of a head, without and with its gradient
    models    backward of calls of published models as they are trained, replayed from CUDA graphs
    few       backward of few queries on many keys, or many queries on few keys, replayed from CUDA graphs
    padded    backward under a mask of each batch item's keys, replayed from CUDA graphs
    short     backward of calls with few blocks of keys, replayed from CUDA graphs
    steps     forward and backward of grouped heads; the host's time of a small step; peak memory

Everything goes through the public calls and torch.autograd. Rounds are interleaved; a ratio is the median over rounds
of the best peer's time over ours, of those whose gradients agree with ours. `deterministic` is ours with the same bits
in every run. FlashAttention-4 takes part if `flash_attn.cute` can be imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwave
from benchmarks.gradient_calls import BIASES, GROUPS, Row, drawn
from warpwave.workbench.bench import environment
from warpwave.workbench.output_files import write_whole

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS = ("warpwave", "deterministic")
WRONG = 0.05  # a relative difference from our gradients that no rounding explains; such a peer is timed, not compared
Step = Callable[[], Any]


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The tensors that need gradients (q, k and v first), the gradient of out, and the other arguments of the call."""

    leaves: tuple[torch.Tensor, ...]
    dout: torch.Tensor
    offsets: torch.Tensor | None
    beside: torch.Tensor | None


def inputs(row: Row) -> Inputs:
    """Returns the tensors of a call."""
    dtype = getattr(torch, row.dtype)
    lead = (sum(row.documents),) if row.documents else (row.batch, row.seqlen)
    heads, kv_heads = row.num_heads
    lead_kv = (row.batch, row.keys) if row.keys else lead
    shapes = ((*lead, heads, row.head_dim), (*lead_kv, kv_heads, row.head_dim), (*lead_kv, kv_heads, row.dim_v),
              (*lead, heads, row.dim_v))  # fmt: skip
    q, k, v, dout = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes)
    offsets = None
    if row.documents:
        ends = torch.tensor((0, *row.documents), device="cuda").cumsum(0)
        offsets = ends.to(torch.int32)
    beside = None
    keys = row.keys or row.seqlen
    if row.beside == "mask":
        beside = torch.rand(1, heads, row.seqlen, keys, device="cuda") < 0.9
    elif row.beside == "padding":
        lengths = torch.linspace(keys // 2, keys, row.batch, device="cuda")
        beside = (torch.arange(keys, device="cuda") < lengths[:, None])[:, None, None]
    elif row.beside in BIASES:
        beside = torch.randn(1, heads, row.seqlen, keys, device="cuda", dtype=dtype)
    leaves = (q, k, v) if beside is None or row.beside != "trained bias" else (q, k, v, beside)
    return Inputs(tuple(t.requires_grad_() for t in leaves), dout, offsets, beside)


def ours(row: Row, given: Inputs, deterministic: bool = False, package: Any = warpwave) -> Callable[[], torch.Tensor]:
    """Returns our forward; `package` may be that of another tree."""
    q, k, v = given.leaves[:3]
    options: dict[str, Any] = {"causal": row.causal, "softcap": row.softcap, "precision": row.precision}
    options["deterministic"] = deterministic
    if row.window >= 0:
        options["window_size"] = (row.window, 0 if row.causal else row.window)
    if given.offsets is not None:
        ends, longest = given.offsets, max(row.documents)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: package.attention_varlen(q, k, v, **options)
    if row.beside:
        options["bias" if row.beside in BIASES else "mask"] = given.beside
    return lambda: package.attention(q, k, v, **options)


def peers(row: Row, given: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Returns the forwards of peers with the features of the row; each may still refuse."""
    q, k, v = given.leaves[:3]
    if not row.documents and row.window < 0 and not row.softcap:

        def sdpa() -> torch.Tensor:
            a, b, c = (t.transpose(1, 2) for t in (q, k, v))
            grouped = row.num_heads[0] != row.num_heads[1]
            return F.scaled_dot_product_attention(
                a, b, c, given.beside, is_causal=row.causal, enable_gqa=grouped
            ).transpose(1, 2)

        for name, backend in SDPA.items():
            yield name, partial(_forced, backend, sdpa)
    if row.documents:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        longest, grouped = max(row.documents), row.num_heads[0] != row.num_heads[1]
        of = (given.offsets, given.offsets, longest, longest)
        window = (-1, 0) if row.causal else (-1, -1)
        more = {"enable_gqa": True} if grouped else {}  # torch 2.11 has no such argument
        yield "varlen_attn", lambda: varlen(q, k, v, *of, window_size=window, **more)
    try:
        cute = importlib.import_module("flash_attn.cute")
    except ImportError:
        return
    options: dict[str, Any] = {"causal": row.causal, "softcap": row.softcap}
    if row.window >= 0:
        options["window_size"] = (row.window, 0 if row.causal else row.window)
    if row.beside or row.dtype == "float32":
        return
    if row.documents:
        of_varlen = {"cu_seqlens_q": given.offsets, "cu_seqlens_k": given.offsets, "max_seqlen_q": max(row.documents),
                     "max_seqlen_k": max(row.documents)}  # fmt: skip
        yield "flash_attention_4", lambda: _first(cute.flash_attn_varlen_func(q, k, v, **of_varlen, **options))
    else:
        yield "flash_attention_4", lambda: _first(cute.flash_attn_func(q, k, v, **options))


def _forced(backend: SDPBackend, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(backend):
        return call()


def _first(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def backward(forward: Callable[[], torch.Tensor], given: Inputs) -> Step:
    """Returns the backward alone, from kept results of the forward."""
    out = forward()
    return lambda: torch.autograd.grad(out, given.leaves, given.dout, retain_graph=True)


def both(forward: Callable[[], torch.Tensor], given: Inputs) -> Step:
    """Returns forward and backward together."""
    return lambda: torch.autograd.grad(forward(), given.leaves, given.dout)


def captured(forward: Callable[[], torch.Tensor], given: Inputs) -> Step:
    """Returns a replay of the backward alone, so that short calls do not wait for the host."""
    # The backward runs on the stream of its forward, so both take the stream of the capture.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = backward(forward, given)
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = step()

    def replay(kept: Step = step) -> Any:  # the graph reads what `step` keeps of the forward
        graph.replay()
        return results

    return replay


# Timing ---------------------------------------------------------------------------------------------------------------


def elapsed(step: Step, repeats: int) -> float:
    """Returns milliseconds a call, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def paired(steps: dict[str, Step], rounds: int, budget_ms: float = 8.0) -> dict[str, list[float]]:
    """Returns the times of each step. Rounds alternate between both directions, and begin at another step each
    time, because a call is a little slower behind a hotter one."""
    for step in steps.values():
        step()
        step()
    repeats = {name: max(2, min(100, int(budget_ms / elapsed(step, 2)))) for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        names = list(steps)[:: 1 if i % 2 else -1]
        first = i // 2 % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(elapsed(steps[name], repeats[name]))
    return found


def measured(row: Row, made: Callable[..., Step], rounds: int) -> dict[str, Any]:
    """Returns one row of the record."""
    given = inputs(row)
    steps = {"warpwave": made(ours(row, given), given)}
    steps["deterministic"] = made(ours(row, given, deterministic=True), given)
    expected, errors, refused = steps["warpwave"](), {}, {}
    for name, forward in peers(row, given):
        try:
            step = made(forward, given)
            errors[name] = largest_difference(expected, step())
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        steps[name] = step
    if not row.beside and "flash" in steps:
        steps.pop("efficient", None)  # it is here for what the others refuse
    times = paired(steps, rounds)
    median = {n: statistics.median(t) for n, t in times.items()}
    ratio = ratios(times, errors)
    tflops = {n: row.flops() * (1.0 if made is not both else 1.4) / t / 1e9 for n, t in median.items()}
    shown = {n: round(x, 3) for n, x in ratio.items()}
    print(row.name, {n: round(x) for n, x in tflops.items()}, shown, flush=True)
    return {
        "case": row.name, "ms": times, "tflops": tflops, "ratio": ratio, "difference": errors, "refused": refused,
    }  # fmt: skip


def ratios(times: dict[str, list[float]], errors: dict[str, float]) -> dict[str, float]:
    """Returns the median of the best peer's time over ours, in all rounds; empty without a peer that is right."""
    of_peers = [n for n in times if n not in OURS and errors.get(n, 0.0) <= WRONG]
    if not of_peers:
        return {}
    best = min(of_peers, key=lambda n: statistics.median(times[n]))
    return {n: statistics.median(b / t for b, t in zip(times[best], times[n], strict=True)) for n in OURS}


def largest_difference(ours: Any, theirs: Any) -> float:
    """Returns the largest relative difference of dq, dk and dv."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def whole_steps(rounds: int) -> list[dict[str, Any]]:
    """Returns forward and backward of grouped heads, the host's time of a small step, and peak memory."""
    found = []
    for row in (Row(128, 1, 8192, causal=True, heads=32, kv_heads=8), Row(128, 1, 128, causal=True)):
        record = measured(row, both, rounds)
        given = inputs(row)
        forwards = {"warpwave": ours(row, given), **dict(peers(row, given))}
        for name in record["ms"]:
            if name == "deterministic":
                continue
            step = both(forwards[name], given)
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            record.setdefault("peak_mib", {})[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            samples = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(50):
                    step()
                samples.append((time.perf_counter() - begin) / 50 * 1e6)
                torch.cuda.synchronize()
            record.setdefault("host_us", {})[name] = samples
        host = {n: round(statistics.median(s)) for n, s in record["host_us"].items()}
        print("  host us", host, "peak MiB", {n: round(x) for n, x in record["peak_mib"].items()}, flush=True)
        found.append(record)
    return found


CAPTURED = ("models", "few", "padded", "short")  # groups whose calls are replayed from CUDA graphs


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    names = (*GROUPS, "steps")
    parser.add_argument("--groups", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", help="a commit's hash; default: HEAD's")
    asked = parser.parse_args()
    seed = asked.seed or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record: dict[str, Any] = {"seed": seed, "environment": environment.describe("cuda")}
    for name in asked.groups:
        if name == "steps":
            record[name] = whole_steps(asked.rounds)
        else:
            made = captured if name in CAPTURED else both if name == "both" else backward
            record[name] = []
            for row in drawn(seed) if name == "drawn" else GROUPS[name]():
                record[name].append(measured(row, made, asked.rounds))
                write_whole(asked.out, json.dumps(record, indent=1) + "\n")  # the clock may end a run
        ratios = [r["ratio"] for r in record[name] if r["ratio"]]
        mean = {n: statistics.geometric_mean([r[n] for r in ratios]) for n in OURS}
        record[f"geometric_mean_of_{name}"] = mean
        print(f"{name}: best peer's time over ours, geometric mean", {n: round(x, 3) for n, x in mean.items()})
        write_whole(asked.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
