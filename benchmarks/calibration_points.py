"""Measured points for `benchmarks.calibrate_model`, from records and from the logs of sweeps.

`.jsonl` files are records of `warpwave bench --out`. `.log` files have older formats of the H200: lines of
`head_dim batch seqlen mask 64x64w4s3:354 ...` in TFLOP/s (sweeps of flash_fwd; `B` marks a line with a variant that was
not kept), the tuning log of hopper/flash_fwd with ratios to cuDNN, three_kernel's sweep of product implementations, and
latent caches by numbers of splits.
Gradients are in lines of `benchmarks.time_gradients`, and in the `.json` of `benchmarks.gradients` and
`benchmarks.two_trees`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import decode_large_heads, gradient_calls, portable
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels import flash_bwd, flash_fwd, large_head_dim, three_kernel
from warpwave.kernels.hopper import flash_bwd as hopper_flash_bwd
from warpwave.kernels.hopper import flash_fwd as hopper_flash_fwd
from warpwave.kernels.hopper import large_head_dim as hopper_large_head_dim
from warpwave.kernels.hopper.flash_bwd.config import divided_tail, group_splits
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.record_schema import problem_of as problem_of_record
from warpwave.workbench.bench.records import read_records
from warpwave.workbench.explain.backward import saving_of
from warpwave.workbench.explain.recorded_time import config_of, in_graph, is_hot

# (kernel, dtype, "one query", "joint" or "16 bits") -> the date before which measurements are of an older kernel.
# hopper/flash_fwd used bfloat16 parts for float32 and now uses float16; large_head_dim now has twice as many blocks per
# SM with one query; the joint launch of hopper/flash_bwd has become faster, most of all under a causal mask; flash_bwd
# has other loops and tiles.
ANOTHER_BEFORE = {
    ("hopper/flash_fwd", "float32"): "2026-11-21T22:00",
    ("hopper/flash_fwd", "bfloat16"): "2026-11-21T15:30",
    ("flash_fwd", "float32"): "2026-11-21T15:30",
    ("large_head_dim", "one query"): "2026-11-21T23:00",
    ("hopper/flash_bwd", "joint"): "2026-11-27",
    ("flash_bwd", "16 bits"): "2026-11-27T14:00",
    ("three_kernel backward", "all"): "2026-11-28",
}
DIVIDED_SINCE = "2026-11-30T13:00"  # blocks of hopper/flash_bwd, as they are now
# Of that loop: new over old time, by the head_dim up to which, for calls longer than `SHORT_US`; shorter ones gained
# half as much.
REWRITTEN, FASTER, SHORT_US = "2026-11-22T01:48", {64: 0.92, 128: 0.93, 512: 0.985}, 40.0
LOOPS_SHOW_US = 30.0
_H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
NEAR_BEST = 1.3  # slower configs of a sweep, relative to the problem's best, are not fitted: nobody runs them


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        kernel, config, problem: the call.
        time_us: median time.
        hot: whether the same inputs were used repeatedly, without flushing L2.
        name: a readable name.
        graph: whether a CUDA graph replayed the calls.
    """

    kernel: Any
    config: Any
    problem: AttentionProblem
    time_us: float
    hot: bool
    name: str
    graph: bool = False


def points(path: Path) -> list[Point]:
    """Returns our measurements in a file of any of the formats."""
    if "joint-gradients" in path.name:
        return list(_of_joint_launch(json.loads(path.read_text(encoding="utf-8"))["short sequences"]))
    if "few-gradients" in path.name:
        return list(_of_one_side(json.loads(path.read_text(encoding="utf-8"))["few"]))
    if "float32-masks" in path.name:
        return list(_of_float32_tiles(json.loads(path.read_text(encoding="utf-8"))))
    if path.suffix == ".json":
        return list(_of_paired_gradients(json.loads(path.read_text(encoding="utf-8"))))
    if "decode-large-heads" in path.name:
        return list(_of_latents_of_many_rows(path))
    if path.suffix == ".jsonl":
        return list(_of_gradients(path) if is_of_gradients(path) else _of_records(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    if "three-kernel" in path.name:
        return list(_of_three_kernel(lines))
    if "hopper-large" in path.name:
        return list(_of_hopper_large(lines))
    if "latents" in path.name:
        return list(_of_latents(lines))
    if "float32-fp16" in path.name:
        return list(_of_float32(lines))
    if "tiles-of-192" in path.name:
        return list(_of_tiles(lines))
    return list(_of_tuning(lines) if "hopper" in path.name else _of_sweep(lines, path.name))


def near_best(points: Sequence[Point]) -> list[Point]:
    """Returns the points without configs that nobody would run."""
    best: dict[tuple[str, str], float] = {}
    for point in points:
        key = (point.kernel.NAME, point.problem.cache_key())
        best[key] = min(best.get(key, point.time_us), point.time_us)
    return [p for p in points if p.time_us <= NEAR_BEST * best[p.kernel.NAME, p.problem.cache_key()]]


def _of_records(path: Path) -> Iterator[Point]:
    kernels, records = {kernel.NAME: kernel for kernel in dispatch.KERNELS}, read_records(path)
    for environment, m in records.measurements:
        if not m.is_ours or m.timing is None or m.kernel not in kernels or m.config is None or m.mode == "eager":
            continue
        kernel, date = kernels[m.kernel], str(records.environments[environment].get("date", ""))
        what = "one query" if m.problem.seqlen_q == 1 else m.problem.dtype
        if date < ANOTHER_BEFORE.get((kernel.NAME, what), ""):
            continue
        config, name = config_of(kernel, m.config), f"{m.case} {m.kernel}"
        us = m.timing.median_us * _since(m.kernel, m.problem, date, m.timing.median_us)
        yield Point(kernel, config, m.problem, us, is_hot(m), name, in_graph(m))


def is_of_gradients(path: Path) -> bool:
    """Returns whether `benchmarks.time_gradients` wrote a file, rather than `warpwave bench`."""
    with path.open(encoding="utf-8") as lines:
        return '"schema_version"' not in (first := lines.readline()) and '"environment"' in first


def environment_of_gradients(path: Path) -> dict[str, Any]:
    """Returns the environment of a file of `benchmarks.time_gradients`."""
    with path.open(encoding="utf-8") as lines:
        found: dict[str, Any] = json.loads(lines.readline())
    return found


def gradient_kernels() -> dict[str, Any]:
    """Returns the modules that compute gradients, by the name of the kernel in a record."""
    named = {"three_kernel": dispatch.three_kernel_backward, "eager": dispatch.eager_backward}
    return {m.NAME: m for m in dispatch.GRADIENT_KERNELS if m not in named.values()} | named


def _of_gradients(path: Path) -> Iterator[Point]:
    """Reads the backward times of `benchmarks.time_gradients`, except those with a bias's gradient and those of the
    joint launch before it was changed."""
    date = str(environment_of_gradients(path).get("date", ""))
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        if data["kind"] != "measurement" or "median_us" not in data or not data["kernel"] or data["of_bias"]:
            continue
        module, problem = gradient_kernels()[data["kernel"]], saving_of(problem_of_record(data["problem"]))
        given = data["config"]
        config = module.default(problem, _H200) if given is None else config_of(module, given)
        if _is_replaced(module, problem, config, date, data["median_us"]):
            continue
        graph = data["method"] == "graph"
        hot = not data["l2_flushed"] and data["input_sets"] == 1
        yield Point(module, config, problem, data["median_us"], hot, f"{data['case']} {module.NAME}", graph)


def _of_paired_gradients(data: Mapping[str, Any]) -> Iterator[Point]:
    """Reads the backward of calls back to back, without a flush in between: of `benchmarks.two_trees` in this tree, of
    `benchmarks.portable`, and of `benchmarks.gradients`."""
    modules = {module.NAME: module for module in dispatch.GRADIENT_KERNELS}
    rows = [
        *gradient_calls.table(),
        *gradient_calls.between(),
        *gradient_calls.grouped(),
        *gradient_calls.short(),
        *portable.rows(),
    ]
    measured: list[tuple[str, str, float]]  # case, kernel, us
    if "seed" in data:
        rows += gradient_calls.drawn(data["seed"])
        lines = [m for group in ("rows", "grouped", "drawn") for m in data.get(group, ())]
        measured = [(m["case"], hopper_flash_bwd.NAME, 1e3 * median(m["ms"]["warpwave"])) for m in lines]
    elif "direction" in data["rows"][0]:
        plain = [m for m in data["rows"] if m["direction"] == "backward" and "flash" in m["us"]]
        measured = [(m["case"], flash_bwd.NAME, median(m["us"]["warpwave"])) for m in plain]
    else:
        backwards = [m for m in data["rows"] if m["suite"] == "gradients"]
        measured = [(m["case"], hopper_flash_bwd.NAME, median(m["us"]["this tree"])) for m in backwards]
    by_name, date = {row.name: row for row in rows}, data["environment"]["date"]
    for case, kernel, us in measured:
        row = by_name[case]
        problem = replace(
            problem_of(row.head_dim, row.batch, row.seqlen, row.num_heads[0], row.dtype, None),
            causal=Causal() if row.causal else None, num_heads_kv=row.num_heads[1], head_dim_v=row.dim_v,
        )  # fmt: skip
        problem = saving_of(problem)
        config = modules[kernel].default(problem, _H200)
        if not _is_replaced(modules[kernel], problem, config, date, us):
            yield Point(modules[kernel], config, problem, us, True, f"{case} {kernel}", True)


def _of_joint_launch(lines: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """Reads the joint launch of flash_bwd with its default config, of calls that take it, without documents and without
    a gradient of a bias."""
    for m in lines:
        row = gradient_calls.Row(**m["row"])
        problem = _of_row(row)
        config = flash_bwd.default(problem, _H200)
        if row.documents or row.beside == "trained bias" or config is None or not config.joint:
            continue
        tile = config.dq
        us = 1e3 * median(m["configs"][f"joint {tile.block_m}x{tile.block_n}w{tile.num_warps}"])
        yield Point(flash_bwd, config, problem, us, True, m["case"], True)


def _of_one_side(lines: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """Reads the joint launch of flash_bwd that walks keys or queries, of calls that take it."""
    rows = {row.name: row for row in gradient_calls.few()}
    for m in lines:
        problem = _of_row(rows[m["case"]])
        config = flash_bwd.default(problem, _H200)
        if config is not None and flash_bwd.walked_of(problem, config):
            yield Point(flash_bwd, config, problem, 1e3 * median(m["ms"]["warpwave"]), True, m["case"], True)


def _of_row(row: gradient_calls.Row) -> AttentionProblem:
    """Returns the problem of a row of gradient_calls.py without documents."""
    keys, (heads, kv_heads) = row.keys or row.seqlen, row.num_heads
    of_mask = {"padding": (row.batch, 1, 1, keys), "mask": (1, heads, row.seqlen, keys)}
    return saving_of(AttentionProblem(
        batch=row.batch, seqlen_q=row.seqlen, seqlen_k=keys, num_heads_q=heads, num_heads_kv=kv_heads,
        head_dim=row.head_dim, head_dim_v=row.dim_v, dtype=row.dtype, softmax_scale=row.head_dim**-0.5,
        causal=Causal() if row.causal else None, mask_shape=of_mask.get(row.beside),
        bias_shape=(1, heads, row.seqlen, keys) if row.beside == "bias" else None,
        bias_dtype=row.dtype if row.beside == "bias" else None,
    ))  # fmt: skip


def _of_float32_tiles(data: Mapping[str, Any]) -> Iterator[Point]:
    """Reads tiles of flash_fwd and of launches apart of flash_bwd in float32, which are named in full."""
    for row in (*data["rows"], *data["a later run"]):
        call = row["call"]
        heads, keys = call["h"], call["nk"] or call["nq"]
        has_bias, has_rows = call["beside"] == "bias1", call["beside"] == "hmask"
        of_mask = (call["b"], 1, call["nq"] if has_rows else 1, keys)
        problem = AttentionProblem(
            batch=call["b"], seqlen_q=call["nq"], seqlen_k=keys, num_heads_q=heads, num_heads_kv=heads,
            head_dim=call["d"], head_dim_v=call["d"], dtype=call["dtype"], softmax_scale=call["d"] ** -0.5,
            causal=Causal() if call["causal"] else None, softcap=call["softcap"],
            mask_shape=of_mask if call["beside"] and not has_bias else None,
            bias_shape=(1, heads, call["nq"], keys) if has_bias else None,
            bias_dtype=call["dtype"] if has_bias else None,
        )  # fmt: skip
        for name, ms in row["ms"].items():
            numbers = [int(n) for n in re.findall(r"=(\d+)", name)]
            us, what = 1e3 * median(ms), f"{row['case']} {name}"
            if name.startswith("flash_fwd"):
                block_m, block_n, num_warps, num_stages = numbers
                forward = flash_fwd.Config(block_m, block_n, num_warps, num_stages, "split_ahead=True" in name)
                yield Point(flash_fwd, forward, problem, us, True, what, True)
            elif name.startswith("flash_bwd") and "joint=False" in name:
                backward = flash_bwd.Config(flash_bwd.Tile(*numbers[:4]), flash_bwd.Tile(*numbers[4:]))
                yield Point(flash_bwd, backward, saving_of(problem), us, True, what, True)


def _is_replaced(module: Any, problem: AttentionProblem, config: Any, date: str, us: float) -> bool:
    """Returns whether a time is of `three_kernel` before its gradients were changed, of `flash_bwd` in 16 bits before
    its loops and tiles were, of `hopper/flash_bwd` before blocks were divided as they are now, or of its joint launch
    before its loops were changed, which shorter calls hardly show."""
    if date < ANOTHER_BEFORE.get((module.NAME, "all"), ""):
        return True
    if problem.dtype != "float32" and date < ANOTHER_BEFORE.get((module.NAME, "16 bits"), ""):
        return True
    is_former = module is hopper_flash_bwd and date < DIVIDED_SINCE
    if is_former and max(divided_tail(problem, config)[1], group_splits(problem, config)) > 1:
        return True
    if not getattr(config, "is_joint", False) or us < LOOPS_SHOW_US:
        return False
    return date < ANOTHER_BEFORE.get((module.NAME, "joint"), "")


def _since(kernel: str, problem: AttentionProblem, date: str, us: float) -> float:
    """Converts a time to the present kernel. hopper/flash_fwd's overlapped loop was rewritten, and old and new were
    timed in one process (records/2026-11-22-h200-hopper-softmax-of-threads.log)."""
    if kernel != "hopper/flash_fwd" or problem.dtype == "float32" or date > REWRITTEN or problem.head_dim > 256:
        return 1.0
    ratio = next(ratio for width, ratio in FASTER.items() if max(problem.head_dim, problem.head_dim_v) <= width)
    return ratio if us > SHORT_US else (1 + ratio) / 2


def _of_sweep(lines: Sequence[str], name: str) -> Iterator[Point]:
    """Reads TFLOP/s per config, of inputs larger than half of L2; sweep 1's 16-bit lines are of an older loop."""
    for line in lines:
        if found := re.match(r"fp32 (\d+) (\[.*\])$", line):
            head_dim = int(found[1])
            for row in ast.literal_eval(found[2]):
                if row[0] in ("ieee", "tf32x3", "tf32") and len(row) == 6:
                    problem = problem_of(head_dim, 4, 2048, 16, "float32", None, row[0])
                    config = flash_fwd.Config(*row[1:5])
                    us = problem.flops / row[5] * 1e-6
                    yield Point(flash_fwd, config, problem, us, False, f"{row[0]} d{head_dim} {row[1:5]}")
        if "sweep-1" in name or not (found := re.match(r"(\d+) (\d+) (\d+) (full|causal) (.*)$", line)):
            continue
        head_dim, batch, seqlen, causal = int(found[1]), int(found[2]), int(found[3]), found[4] == "causal"
        problem = problem_of(head_dim, batch, seqlen, 2048 // head_dim, "bfloat16", Causal() if causal else None)
        counted = 4 * batch * seqlen * seqlen * 2048 * (0.5 if causal else 1.0)  # how the sweep counted
        for tile in found[5].split():
            if m := re.match(r"B(\d+)x(\d+)w(\d)s(\d):(\d+)$", tile):
                block_m, block_n, num_warps, num_stages = (int(m[i]) for i in range(1, 5))
                config = flash_fwd.Config(block_m, block_n, num_warps, num_stages)
                us = counted / int(m[5]) * 1e-6
                yield Point(flash_fwd, config, problem, us, False, f"d{head_dim} {batch}x{seqlen} {found[4]} {tile}")


def _of_three_kernel(lines: Sequence[str]) -> Iterator[Point]:
    """Reads whole calls with the default products: 16 heads, one workspace per call."""
    for line in lines:
        if found := re.match(r"new d(\d+) (\d+) (full|causal): hopper ([\d.]+) us", line):
            causal = Causal() if found[3] == "causal" else None
            problem = problem_of(int(found[1]), 1, int(found[2]), 16, "bfloat16", causal)
            config = three_kernel.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
            name = f"d{found[1]} {found[2]} {found[3]} three_kernel"
            yield Point(three_kernel, config, problem, float(found[4]), False, name)


def _of_hopper_large(lines: Sequence[str]) -> Iterator[Point]:
    """Reads the last section, which has the present hopper/large_head_dim: scores before the products, and after
    them."""
    last = max(i for i, line in enumerate(lines) if line.startswith("#"))
    for line in lines[last:]:
        if found := re.match(r"time (\d+)x(\d+) (full|causal) +1(a?): (\d+) TFLOP/s", line):
            causal = Causal() if found[3] == "causal" else None
            problem = problem_of(int(found[2]), 1, int(found[1]), 16, "bfloat16", causal)
            config = hopper_large_head_dim.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
            config = replace(config, scores_ahead=bool(found[4]))
            us = problem.flops / int(found[5]) * 1e-6
            name = f"d{found[2]} 1x{found[1]} {found[3]} hopper/large_head_dim"
            yield Point(hopper_large_head_dim, config, problem, us, False, name)


def _of_latents(lines: Sequence[str]) -> Iterator[Point]:
    """Reads the launch for latents by its number of splits, timed in a CUDA graph that reads one cache."""
    for line in lines:
        found = re.match(r"(\d+)/(\d+), one tensor, (\d+) x (\d+)(?:, pages of (\d+))?:", line)
        if not found:
            continue
        head_dim, head_dim_v, batch, keys, page_size = (int(x or 0) for x in found.groups())
        sizes: dict[str, Any] = {"seqlen_k": keys, "num_heads_kv": 1, "head_dim_v": head_dim_v, "page_size": page_size}
        problem = replace(problem_of(head_dim, batch, 1, 16, "bfloat16", None), **sizes, v_in_k=True)
        config = large_head_dim.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
        for splits, us in re.findall(r"[,;:] (?:map )?x(\d+) (?:p8 w4 pdl )?([\d.]+) us", line):
            name = f"latents {batch}x{keys} pages of {page_size} x{splits}"
            yield Point(large_head_dim, replace(config, num_splits=int(splits)), problem, float(us), True, name, True)


def _of_latents_of_many_rows(path: Path) -> Iterator[Point]:
    """Reads the times of `benchmarks.decode_large_heads` for the launch for latents with blocks of 64 rows, each with
    its number of splits. They are of CUDA graphs over sets of inputs in turn."""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        call = decode_large_heads.Point(*(found[name] for name in decode_large_heads.Point._fields))
        if call.rows <= 16:
            continue
        problem = call.problem
        config = large_head_dim.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
        times = {found["num_splits"]: found["us"]}
        times |= {int(name[1:]): us for name, us in found["us_beside"].items() if name.startswith("x")}
        for splits, us in times.items():
            name = f"{found['case']} x{splits}"
            yield Point(large_head_dim, replace(config, num_splits=splits), problem, us, False, name, True)


def _of_float32(lines: Sequence[str]) -> Iterator[Point]:
    """Reads arithmetics and configs of hopper/flash_fwd in float32: long calls, and short calls in a graph. Calls in
    between are left out, because their times include the host."""
    made: tuple[int, int, int, int, Causal | None] | None = None
    for line in lines:
        if found := re.match(r"== ieee d(\d+) (\d+)x(\d+) h(\d+), ", line):  # flash_fwd's multiply-adds
            head_dim, batch, seqlen, heads = (int(found[i]) for i in range(1, 5))
            problem = problem_of(head_dim, batch, seqlen, heads, "float32", None, "ieee")
            for m, n, warps, stages, us in re.findall(r"(\d+)x(\d+)x(\d)x(\d) (\d+)", line):
                plain = flash_fwd.Config(int(m), int(n), int(warps), int(stages))
                said = f"d{head_dim} {batch}x{seqlen} h{heads} ieee flash_fwd"
                yield Point(flash_fwd, plain, problem, float(us), False, said)
        graph = line.startswith("== graph")
        if found := re.match(r"== (?:graph )?d(\d+) (\d+)x(\d+) h(\d+)(?: (full|causal):| us:)", line):
            head_dim, batch, seqlen, heads = (int(found[i]) for i in range(1, 5))
            made = (head_dim, batch, seqlen, heads, Causal() if found[5] == "causal" else None)
        elif line.startswith("=="):
            made = None
        if made is None or (not graph and made[1] * made[2] < 4096):
            continue
        for name, *tile, us in re.findall(r"(fp16x1|fp16x3|bf16x6) (\d+)x(\d+)x(\d)x(\d)\*?\s+([\d.]+)", line):
            head_dim, batch, seqlen, heads, causal = made
            problem = problem_of(head_dim, batch, seqlen, heads, "float32", causal, name)
            config = hopper_flash_fwd.Config(*map(int, tile))
            said = f"d{head_dim} {batch}x{seqlen} h{heads} {name} hopper/flash_fwd"
            yield Point(hopper_flash_fwd, config, problem, float(us), graph, said, graph)


def _of_tiles(lines: Sequence[str]) -> Iterator[Point]:
    """Reads us of several configs at head_dim 65 to 128, without masks and windows."""
    for line in lines:
        found = re.match(r"d(\d+) (\d+)x(\d+)x(\d+) (full|causal)( fp16)?  rows", line)
        if not found or not 64 < int(found[1]) <= 128:
            continue
        head_dim, batch, seqlen, heads = (int(found[i]) for i in range(1, 5))
        causal = Causal() if found[5] == "causal" else None
        problem = problem_of(head_dim, batch, seqlen, heads, "float16" if found[6] else "bfloat16", causal)
        for m, n, stages, us in re.findall(r"(\d+)x(\d+)s(\d) (\d+)us", line):
            config = hopper_flash_fwd.Config(int(m), int(n), int(stages), 1)
            said = f"d{head_dim} {batch}x{seqlen} h{heads} {found[5]} {m}x{n}"
            yield Point(hopper_flash_fwd, config, problem, float(us), False, said)


def _of_tuning(lines: Sequence[str]) -> Iterator[Point]:
    """Reads the log up to the part about an earlier version: cuDNN's TFLOP/s times the ratio, and tiny calls in us."""
    named = {"192": (192, 128, 3, 1), "64x3": (64, 64, 3, 3), "64x2": (64, 128, 2, 2)}
    for line in lines:
        if line.startswith("# earlier"):
            return
        if found := re.match(r"tiny (\d+) (\d+) (\d+) (\d+) (\{.*\})$", line):
            batch, seqlen, heads, head_dim = (int(found[i]) for i in range(1, 5))
            problem = problem_of(head_dim, batch, seqlen, heads, "float16", None)
            for key, kernel in (("hopper", hopper_flash_fwd), ("portable", flash_fwd)):
                gpu = Gpu.for_arch("sm_90")
                config = kernel.configs(problem, replace(gpu, num_sms=132))[0]
                us = float(ast.literal_eval(found[5])[key])
                yield Point(kernel, config, problem, us, True, f"tiny {batch}x{seqlen} h{heads} d{head_dim} {key}")
            continue
        found = re.match(r"\s*(\d+)\s+(\d+)x(\d+)\s+(full|causal)\s+cudnn (\d+) \| (.*)$", line)
        if not found:
            continue
        head_dim, batch, seqlen, causal = int(found[1]), int(found[2]), int(found[3]), found[4] == "causal"
        problem = problem_of(head_dim, batch, seqlen, 2048 // head_dim, "bfloat16", Causal() if causal else None)
        counted = 4 * batch * seqlen * seqlen * 2048 * (0.5 if causal else 1.0)
        for label, ratio in re.findall(r"(\w+) ([\d.]+)", found[6]):
            if label == "auto":  # the default at that time
                config = hopper_flash_fwd.Config(128, 128, 2, 1)
                if head_dim != 128:
                    config = hopper_flash_fwd.configs(problem, replace(Gpu.for_arch("sm_90"), num_sms=132))[0]
            elif label in named and head_dim == 64:
                config = hopper_flash_fwd.Config(*named[label])
            else:  # tiles of 128 queries; the log does not give the number of keys
                continue
            us = counted / (int(found[5]) * float(ratio)) * 1e-6
            us *= _since("hopper/flash_fwd", problem, "2026-11-21", us)
            yield Point(
                hopper_flash_fwd, config, problem, us, False, f"d{head_dim} {batch}x{seqlen} {found[4]} {label}"
            )


def problem_of(
    head_dim: int, batch: int, seqlen: int, heads: int, dtype: str, causal: Causal | None, precision: str = "default"
) -> AttentionProblem:
    """Returns a dense problem with equal numbers of queries and keys, and without grouped heads."""
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=heads,
        num_heads_kv=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        softmax_scale=head_dim**-0.5,
        causal=causal,
        precision=precision,
    )
