"""Times of the portable kernels, `flash_fwd` and `flash_bwd`, beside SDPA's flash backend and another tree, on one GPU.

    PYTHONPATH=. python -m benchmarks.portable RECORD [--tree FOLDER] [--rounds 7] [--seconds 300]

`auto` takes other kernels on Hopper for most of these calls, so this names the portable ones. Rows: head_dim 64, 128
and 256 in three sizes, full and causal, forward and backward; head_dim 80 and 160; and calls with grouped heads, a
window, a softcap, a mask, and in float32. Results of one kv head are compared with eager arithmetic in float32 first.
"x flash" is the time of SDPA's flash backend over ours, "x tree" that of the other tree, medians of interleaved rounds.
The record is written after each row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import warpwave
from benchmarks import gradient_calls, gradients, two_trees
from benchmarks.gradient_calls import Row
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.timing import paired_ratio, time_interleaved
from warpwave.workbench.output_files import write_whole

Call = Callable[[], Any]
MOST_ERROR = {"bfloat16": 2e-2, "float32": 1e-5}  # relative RMS; a wrong tile gives 0.1 or more


def rows() -> list[Row]:
    """Returns the calls."""
    found = [*gradient_calls.table()]
    found += [Row(d, 4, 4096, True, heads=16) for d in (80, 160)]
    found += [
        Row(128, 4, 4096, True, heads=32, kv_heads=8),
        Row(128, 1, 16384, True, window=1024),
        Row(128, 4, 4096, True, softcap=30.0),
        Row(64, 4, 2048, beside="mask"),
        Row(64, 4, 2048, True, dtype="float32"),
        Row(128, 4, 2048, dtype="float32"),
    ]
    return found


def forward_of(row: Row, given: gradients.Inputs, package: Any) -> Call:
    """Returns the forward of a tree's package by `flash_fwd`; out and the log-sum-exp."""
    q, k, v = (t.detach() for t in given.leaves[:3])
    window = (row.window, 0) if row.window >= 0 else (-1, -1)
    return partial(
        package.attention, q, k, v, causal=row.causal, window_size=window, softcap=row.softcap, mask=given.beside,
        kernel="flash_fwd", return_lse=True,
    )  # fmt: skip


def backward_of(row: Row, given: gradients.Inputs, package: Any) -> Call:
    """Returns the backward alone of a tree's package by `flash_bwd`, which autograd would not take on Hopper."""
    q, k, v = (t.detach() for t in given.leaves[:3])
    room, kernel = (importlib.import_module(f"{package.__name__}.{name}") for name in ("problem", "kernels.flash_bwd"))
    problem = room.AttentionProblem(
        batch=row.batch, seqlen_q=row.seqlen, seqlen_k=row.seqlen, num_heads_q=row.num_heads[0],
        num_heads_kv=row.num_heads[1], head_dim=row.head_dim, head_dim_v=row.dim_v, dtype=row.dtype,
        softmax_scale=row.head_dim**-0.5, return_lse=True, causal=room.Causal() if row.causal else None,
        window_size=(row.window, 0) if row.window >= 0 else (-1, -1), softcap=row.softcap,
        mask_shape=None if given.beside is None else tuple(given.beside.shape),
    )  # fmt: skip
    operands = room.Operands(q, k, v, given.beside)
    gpu = importlib.import_module(f"{package.__name__}.gpu").current_gpu(q.device)
    run = kernel.bind(problem, gpu, operands, (True,) * 3 + (False,) * 3, kernel.default(problem, gpu))
    results = forward_of(row, given, package)()
    return lambda: run(operands, results, given.dout, None)[:3]


def calls_of(row: Row, is_backward: bool, packages: dict[str, Any]) -> tuple[dict[str, Call], gradients.Inputs]:
    """Returns the calls to time, and their tensors."""
    torch.manual_seed(0)
    given = gradients.inputs(row)
    make = backward_of if is_backward else forward_of
    calls: dict[str, Call] = {name: make(row, given, package) for name, package in packages.items()}
    flash = dict(gradients.peers(row, given)).get("flash")
    if flash is not None and row.dtype != "float32" and not row.beside:  # it refuses these
        calls["flash"] = gradients.backward(flash, given) if is_backward else torch.no_grad()(flash)
    return calls, given


def exact(row: Row, given: gradients.Inputs, is_backward: bool) -> torch.Tensor:
    """Returns the results for the first batch item and kv head by eager arithmetic in float32, flat."""
    group = row.num_heads[0] // row.num_heads[1]
    widths = (group, 1, 1, group)
    tensors = (*given.leaves[:3], given.dout)
    q, k, v, dout = (t[:1, :, :n].detach().float().requires_grad_() for t, n in zip(tensors, widths, strict=True))
    beside = None if given.beside is None else given.beside[:, :group]
    window = (row.window, 0) if row.window >= 0 else (-1, -1)
    out = warpwave.attention(
        q, k, v, causal=row.causal, softcap=row.softcap, mask=beside, window_size=window, kernel="eager"
    )
    return two_trees.flat(torch.autograd.grad(out, (q, k, v), dout) if is_backward else out.detach())


def part(row: Row, result: Any, is_backward: bool) -> torch.Tensor:
    """Returns the first batch item and kv head of a call's results, flat."""
    group = row.num_heads[0] // row.num_heads[1]
    tensors = result if isinstance(result, tuple) else (result,)
    if not is_backward:
        return two_trees.flat(tensors[0][:1, :, :group])
    return two_trees.flat(tuple(t[:1, :, :n] for t, n in zip(tensors, (group, 1, 1), strict=True)))


def compile_one(row: Row) -> str:
    """Calls a row once, which leaves its code in Triton's cache. Returns what failed, or ""."""
    try:
        for is_backward in (False, True):
            for call in calls_of(row, is_backward, packages())[0].values():
                call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def packages() -> dict[str, Any]:
    """Returns the packages to time: this tree's, and the other one's if there is one."""
    found = {"warpwave": warpwave}
    if any((Path(place) / two_trees.OTHER).is_dir() for place in sys.path):
        found["tree"] = importlib.import_module(two_trees.OTHER)
    return found


def measure(row: Row, is_backward: bool, rounds: int) -> dict[str, Any]:
    """Returns the measurement of a row."""
    calls, given = calls_of(row, is_backward, packages())
    wanted = exact(row, given, is_backward)
    errors = {}
    for name, call in calls.items():
        difference = part(row, call(), is_backward) - wanted
        errors[name] = (difference.square().mean() / wanted.square().mean()).sqrt().item()
    timed = time_interleaved(calls, device="cuda", rounds=rounds, warmup_s=0.05)
    ours = timed["warpwave"]
    return {
        "direction": "backward" if is_backward else "forward",
        "case": row.name,
        "x": {name: round(paired_ratio(s, ours).median, 4) for name, s in timed.items() if name != "warpwave"},
        "errors": errors,
        "us": {name: [round(us, 3) for us in samples.samples_us] for name, samples in timed.items()},
    }


def is_wrong(row: Row, found: dict[str, Any]) -> bool:
    """Returns whether our error is more than any rounding explains."""
    return not found["errors"]["warpwave"] <= MOST_ERROR[row.dtype]


def main() -> int:
    """Times all rows; returns 1 if a result is wrong or a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--tree", type=Path, help="another tree of the package")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        if args.tree is not None:
            two_trees.copied(args.tree, Path(place))
            sys.path.insert(0, place)
        all_rows = rows()
        # Forked before this process has a context of the GPU.
        with multiprocessing.get_context("fork").Pool(min(14, os.cpu_count() or 1)) as pool:
            failures = dict(zip(all_rows, pool.map(compile_one, all_rows, chunksize=1), strict=True))
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
        found: list[dict[str, Any]] = []
        wrong = [f"{row.name}: {failure}" for row, failure in failures.items() if failure]
        for is_backward in (False, True):
            for row in all_rows:
                if failures[row] or time.monotonic() - begin > args.seconds:
                    continue
                found.append(measure(row, is_backward, args.rounds))
                if is_wrong(row, found[-1]):
                    wrong.append(f"{row.name}: error {found[-1]['errors']}")
                print("{direction} {case}: {x}".format(**found[-1]), flush=True)
                whole = {"environment": environment.describe("cuda"), "rows": found, "wrong": wrong}
                write_whole(args.record, json.dumps(whole, indent=1) + "\n")
        for direction in ("forward", "backward"):
            for name in ("flash", "tree"):
                ratios = [f["x"][name] for f in found if f["direction"] == direction and name in f["x"]]
                if ratios:
                    mean = geometric_mean(ratios)
                    print(f"{direction} x {name}: {mean:.3f} in {len(ratios)} rows, least {min(ratios):.3f}")
        print("\n".join(wrong), f"{2 * len(all_rows) - len(found)} rows were not timed", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
