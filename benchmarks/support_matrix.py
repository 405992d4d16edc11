"""Writes docs/support.md: which kernel supports which call on which architecture, and the evidence for it.

    PYTHONPATH=. python benchmarks/support_matrix.py            # write the page
    PYTHONPATH=. python benchmarks/support_matrix.py --check    # exit code 1 if the page is out of date

Each kernel's `why_not` gives what it accepts and the reasons otherwise. The grids of tests/compile and the records of
docs/support.toml give what was compiled; the grid of tests/conformance and the logs named there give what was run.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.compile import (  # noqa: E402
    test_hopper,
    test_hopper_large_head_dim,
    test_ladder,
    test_large_head_dim,
    test_quantized,
    test_split_kv,
    test_targets,
)
from tests.conformance import cases  # noqa: E402
from warpwave import dispatch  # noqa: E402
from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu  # noqa: E402
from warpwave.problem import AttentionProblem, Causal  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
FACTS = ROOT / "docs" / "support.toml"

DTYPES = (
    *("float16", "bfloat16", "float32", "float32:ieee", "float32:tf32x3", "float32:tf32", "float32:bf16x6"),
    "float32:bf16x3",
)
# Dtypes of q and k, and of v -> the dtype of tests/conformance with them.
QUANTIZED = {name.rpartition(":")[0]: name for name in reversed(cases.QUANTIZED_DTYPES_OF_A_GRID)}
DIMS = (
    *((16, 16), (40, 40), (59, 59), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)),
    *((320, 320), (512, 512)),
)
# Feature -> fields of the problem, the feature of tests/compile that compiles it, the one of tests/conformance with a
# value of it.
FEATURES: dict[str, tuple[dict[str, Any], str, tuple[str, Any] | None]] = {
    "causal, aligned to the last key": ({"causal": Causal()}, "causal", ("causal", "bottom_right")),
    "causal, aligned to the first key": ({"causal": Causal("top_left")}, "", ("causal", "top_left")),
    "sliding window": ({"window_size": (128, 0)}, "window", ("window", (cases.W, cases.W))),
    "boolean mask": ({"mask_shape": (2, 1, 1024, 1024)}, "mask", ("mask", "full")),
    "additive bias": ({"bias_shape": (1, 4, 1024, 1024), "bias_dtype": "float32"}, "bias", ("bias", "heads")),
    "ALiBi": ({"alibi_shape": (4,)}, "alibi", ("alibi", "heads")),
    "softcap": ({"softcap": 15.0}, "softcap and sinks", ("softcap", 15.0)),
    "sinks": ({"has_sinks": True}, "softcap and sinks", ("sinks", True)),
    "packed sequences": ({"packed": True, "total_q": 2048, "total_k": 2048}, "packed", ("packed", True)),
    "grouped heads": ({"num_heads_kv": 2}, "plain", ("heads", (6, 2))),
    "seqlen_q other than seqlen_k": ({"seqlen_q": 1}, "plain", ("lengths", (1, 128))),
    "log-sum-exp": ({"return_lse": True}, "plain", ("lse", True)),
    "dropout": ({"dropout_p": 0.2}, "dropout", ("dropout", 0.2)),
    "gradients": ({"requires_grad": True}, "", None),
}
RUN, INTERPRETED, COMPILED, ACCEPTED = "R", "I", "C", "a"


@dataclass(frozen=True)
class Run:
    """A conformance run on a GPU.

    Args:
        gpu, arch, date, torch, triton, record: from docs/support.toml.
        passed: kernel -> tests passed, over all parts of the log; kernels without a failure only.
        dropout: whether it included the calls with dropout (`cases.DROPOUT`), which are not in the grid.
        quantized: whether it included the grid of quantized calls.
    """

    gpu: str
    arch: str
    date: str
    torch: str
    triton: str
    record: str
    passed: Mapping[str, int]
    dropout: bool
    quantized: bool


@cache
def runs() -> tuple[Run, ...]:
    """Returns the conformance runs, with the results of each kernel from their logs."""
    found = []
    for entry in tomllib.loads(FACTS.read_text(encoding="utf-8"))["run"]:
        log = (ROOT / entry["record"]).read_text(encoding="utf-8")
        lines = re.findall(r"^(\S+): attempted \d+, passed (\d+), refused as documented \d+, failed (\d+)", log, re.M)
        passed: Counter[str] = Counter()
        for name, n, _ in lines:
            passed[name] += int(n)
        wrong = {name for name, _, failed in lines if int(failed)}
        passed = Counter({name: n for name, n in passed.items() if n and name not in wrong})
        fields = {name: str(entry[name]) for name in ("gpu", "arch", "date", "torch", "triton", "record")}
        found.append(
            Run(**fields, passed=passed, dropout=entry.get("dropout", False), quantized=entry.get("quantized", False))
        )
    return tuple(found)


@cache
def compile_records() -> tuple[dict[str, Any], ...]:
    """Returns the lines of all compile records."""
    entries = tomllib.loads(FACTS.read_text(encoding="utf-8")).get("compiled", [])
    texts = [(ROOT / entry["record"]).read_text(encoding="utf-8") for entry in entries]
    return tuple(json.loads(line) for text in texts for line in text.splitlines())


@cache
def compiled_points() -> frozenset[tuple[str, str, int, str]]:
    """Returns each (kernel, dtype, head_dim, feature) that tests/compile compiles for each of its targets."""
    points: set[tuple[str, str, int, str]] = {("flash_fwd", *point) for point in test_targets.FULL} | {
        *test_ladder.FULL
    }
    points |= {*test_large_head_dim.FULL}
    # For sm_90, as its record.
    points |= {("hopper/flash_fwd", "bfloat16", *point) for point in (*test_hopper.FULL, *test_hopper.FULL_OF_WIDE)}
    points |= {("hopper/flash_fwd", "float32", width, feature) for _, width, feature in test_hopper.FULL_OF_PARTS}
    points |= {
        ("hopper/large_head_dim", "bfloat16", width, feature)
        for name, feature, _ in test_hopper_large_head_dim.FULL
        for width in {*test_hopper_large_head_dim.WIDTHS[name]}
    }
    points |= {("flash_fwd", f"{kind[0]}:{kind[1]}", width, feature) for kind, width, feature in test_quantized.FULL}
    points |= _points_of_split_kv()
    points |= {(r["kernel"], r["dtype"], r["head_dim"], r["feature"]) for r in compile_records()}
    return frozenset(points)


def _points_of_split_kv() -> set[tuple[str, str, int, str]]:
    """Returns its calls on dense or packed keys that have at most one feature."""
    of_field = {"causal": "causal", "window_size": "window", "mask_shape": "mask", "bias_shape": "bias"}
    of_field |= {"alibi_shape": "alibi", "softcap": "softcap and sinks", "has_sinks": "softcap and sinks"}
    of_field |= {"packed": "packed"}
    found = set()
    for changes in (*test_split_kv.CASES.values(), *test_split_kv.FEATURES.values()):
        features = {of_field[field] for field in changes if field in of_field}
        head_dim = changes.get("head_dim", 128)
        one_width = changes.get("head_dim_v", 128) == head_dim
        if one_width and len(features) < 2 and not {"page_size", "precision", "batch_invariant"} & changes.keys():
            found.add(("split_kv", changes.get("dtype", "bfloat16"), head_dim, *(features or {"plain"})))
    return found


@cache
def compiled_archs(kernel: str) -> frozenset[str]:
    """Returns the targets that a kernel is compiled for."""
    recorded = {r["arch"] for r in compile_records() if r["kernel"] == kernel}
    return frozenset(recorded | (set(test_targets.TARGETS) if kernel in _in_tests() else set()))


@cache
def _in_tests() -> frozenset[str]:
    in_grids = (*test_ladder.FULL, *test_large_head_dim.FULL)
    return frozenset({"flash_fwd", "split_kv", *(kernel for kernel, *_ in in_grids)})


def problem(dtype: str = "bfloat16", dims: tuple[int, int] = (128, 128), **change: Any) -> AttentionProblem:
    """Returns a call of the matrix."""
    name, _, precision = dtype.partition(":")
    if dtype in QUANTIZED:
        block = 0 if change.get("packed") else 64
        of_v = block if precision not in ("float16", "bfloat16") else 0
        change |= {"dtype_v": precision, "dtype_out": "bfloat16", "descale_blocks": (block, block, of_v)}
        precision = ""
    fields: dict[str, Any] = {
        "batch": 2,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "num_heads_q": 4,
        "num_heads_kv": 4,
        "head_dim": dims[0],
        "head_dim_v": dims[1],
        "dtype": name,
        "softmax_scale": dims[0] ** -0.5,
        "precision": precision or "default",
    }
    return AttentionProblem(**(fields | change))


class Notes:
    """Reasons as numbered notes without duplicates."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, reasons: Sequence[str], gpu: Gpu) -> str:
        """Returns the number of the note with the first reason of a refusal, without the sizes and names of this
        case."""
        text = reasons[0].replace(f"found {gpu.name} ({gpu.arch}); ", "").replace(gpu.arch, "this architecture")
        text = re.sub(r"^(head_dim(_v)?) is \d+; ", r"\1: ", text)
        if text not in self.texts:
            self.texts.append(text)
        return f"no {self.texts.index(text) + 1}"


def evidence(
    kernel: Any, gpu: Gpu, *, conformance: Sequence[tuple[str, Any]], point: tuple[str, int, str] | None
) -> str:
    """Returns the strongest evidence that a call that the kernel accepts is right on a GPU.

    Args:
        kernel: the module.
        gpu: the GPU.
        conformance: (feature, value) pairs of the call; the grids of tests/conformance must hold all of them.
        point: (dtype, head_dim, feature) of tests/compile, or None if it compiles no such call.
    """
    is_quantized = dict(conformance).get("dtype") in QUANTIZED.values()
    small, full = (cases.QUANTIZED_SMALL, cases.QUANTIZED_FULL) if is_quantized else (cases.SMALL, cases.FULL)
    if gpu.vendor in ("cpu", "interpreter"):
        if not all(value in _values(small, feature) for feature, value in conformance):
            return ACCEPTED
        return INTERPRETED if gpu.vendor == "interpreter" and kernel.NEEDS_GPU else RUN
    has_dropout = "dropout" in dict(conformance)
    ran = any(
        run.arch == gpu.arch
        and kernel.NAME in run.passed
        and run.dropout >= has_dropout
        and run.quantized >= is_quantized
        for run in runs()
    )
    if ran and all(value in _values(full, feature) for feature, value in conformance):
        return RUN
    compiled = point is not None and (kernel.NAME, *point) in compiled_points()
    return COMPILED if compiled and gpu.arch in compiled_archs(kernel.NAME) else ACCEPTED


def _values(grid: Mapping[str, Sequence[Any]], feature: str) -> Sequence[Any]:
    if feature == "dropout":
        return [case.dropout for case in cases.DROPOUT]
    return (*grid[feature], "float32") if feature == "dtype" else grid[feature]  # where "float32:default" is meant


def devices(kernel: Any) -> list[Gpu]:
    """Returns the devices of a kernel's rows: every architecture, CPUs, and the interpreter for a Triton kernel."""
    found = [CPU, *(Gpu.for_arch(arch) for arch in ARCHS)]
    return [INTERPRETER, *found] if kernel.NEEDS_GPU else found


def cell(kernel: Any, gpu: Gpu, call: AttentionProblem, notes: Notes, **shown: Any) -> str:
    """Returns the cell of one call."""
    _, behind = dispatch.forward_of(call, gpu, kernel.NAME)
    if behind and not kernel.why_not(replace(call, requires_grad=False, return_lse=True), gpu):
        return f"by `{behind}`"
    reasons = dispatch.why_not(kernel, call, gpu)
    return notes.mark(reasons, gpu) if reasons else evidence(kernel, gpu, **shown)


def dims_rows(kernel: Any, notes: Notes, dtypes: Sequence[str] = DTYPES) -> list[list[str]]:
    """Returns rows of devices and dtypes with a cell for each head_dim; equal rows are merged."""
    by_device: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for gpu in devices(kernel):
        rows: dict[tuple[str, ...], list[str]] = {}
        for dtype in dtypes:
            cells = tuple(
                cell(
                    kernel,
                    gpu,
                    problem(dtype, dims),
                    notes,
                    conformance=(("dtype", QUANTIZED.get(dtype, dtype)), ("dims", dims)),
                    point=(dtype, dims[0], "plain") if dims[0] == dims[1] else None,
                )
                for dims in DIMS
            )
            rows.setdefault(cells, []).append(dtype)
        by_device[_name(gpu)] = rows
    merged: dict[Any, list[str]] = {}
    for name, rows in by_device.items():
        merged.setdefault(tuple((cells, tuple(alike)) for cells, alike in rows.items()), []).append(name)
    return [
        [", ".join(names), "all" if len(alike) == len(dtypes) else ", ".join(alike), *cells]
        for rows, names in merged.items()
        for cells, alike in rows
    ]


def feature_rows(kernel: Any, notes: Notes) -> tuple[list[str], list[list[str]]]:
    """Returns (groups of devices, rows of features): each feature added to a plain call with head_dim 128."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for gpu in devices(kernel):
        dtype = "float32" if gpu is CPU else "bfloat16"
        if kernel.why_not(problem(dtype), gpu):
            continue  # the table above says why
        cells = tuple(
            cell(
                kernel,
                gpu,
                problem(dtype, **change),
                notes,
                conformance=() if grid is None else (grid,),
                point=(dtype, 128, compiled) if compiled else None,
            )
            for change, compiled, grid in FEATURES.values()
        )
        columns.setdefault(cells, []).append(_name(gpu))
    rows = [[name, *(cells[i] for cells in columns)] for i, name in enumerate(FEATURES)]
    return [", ".join(names) for names in columns.values()], rows


def _name(gpu: Gpu) -> str:
    return "interpreter" if gpu is INTERPRETER else gpu.arch


def overview() -> list[list[str]]:
    """Returns a row for each device: whether each kernel accepts a plain call, and its strongest evidence."""
    rows = []
    for gpu in (CPU, INTERPRETER, *(Gpu.for_arch(arch) for arch in ARCHS)):
        row = [_name(gpu)]
        for kernel in dispatch.KERNELS:
            dtype = "float32" if gpu is CPU else "bfloat16"
            if gpu is INTERPRETER and not kernel.NEEDS_GPU:
                row.append("-")
            elif kernel.why_not(problem(dtype), gpu):
                row.append("no")
            else:
                row.append(_in_words(kernel, gpu))
        rows.append(row)
    return rows


def _in_words(kernel: Any, gpu: Gpu) -> str:
    """Returns the strongest evidence of a kernel on a device, over all calls."""
    if gpu.is_cpu:
        return "interpreted by the tests" if gpu is INTERPRETER else "run by the tests"
    there = [run for run in runs() if run.arch == gpu.arch and kernel.NAME in run.passed]
    if there:
        cards = dict.fromkeys(run.gpu for run in there)
        return f"run on {' and '.join(cards)}, {max(run.date for run in there)}"
    if gpu.arch in compiled_archs(kernel.NAME):
        recorded = (r for r in compile_records() if (r["kernel"], r["arch"]) == (kernel.NAME, gpu.arch))
        versions = ", ".join(sorted({r["triton"] for r in recorded}))
        return f"compiled, never run (Triton {versions})" if versions else "compiled, never run"
    return "accepted, never tried" if hasattr(kernel, "specify") else "torch's operations, never tried"


def _cards_of_archs() -> dict[str, str]:
    """Returns architecture -> the cards on which something was run."""
    archs = dict.fromkeys(run.arch for run in runs())
    return {arch: ", ".join(dict.fromkeys(run.gpu for run in runs() if run.arch == arch)) for arch in archs}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """Returns the whole page."""
    names = [kernel.NAME for kernel in dispatch.KERNELS]
    parts = [
        "# Support matrix",
        "This page is generated by `PYTHONPATH=. python benchmarks/support_matrix.py` from each kernel's `why_not`,\n"
        "the grids of `tests/compile` and `tests/conformance`, and the records in `docs/support.toml`.\n"
        "A test compares the page with these sources.",
        "**Kernels for AMD GPUs are compiled and inspected, and have never been run.** The same is true of every\n"
        f"NVIDIA architecture except {', '.join(f'{arch} ({cards})' for arch, cards in _cards_of_archs().items())}.",
        "The first table is of plain calls.",
        markdown(["architecture", *names], overview()),
        "Entries of the tables below:",
        markdown(
            ["entry", "meaning"],
            [
                [
                    f"`{RUN}`",
                    "run there; passed the gates and exact probes of a sample of `tests/conformance`",
                ],
                [f"`{INTERPRETED}`", "run there in Triton's interpreter: the kernel's logic, without compiler and GPU"],
                [f"`{COMPILED}`", "compiled by `tests/compile`, with bounds on registers and shared memory; never run"],
                [f"`{ACCEPTED}`", "accepted by the kernel; no test tries exactly this combination"],
                ["by `flash_bwd`", "gradients by that kernel, after this forward ([gradients](kernels/gradients.md))"],
                ["`no 1`", "refused, for the reason with that number below the tables; a call by name raises it"],
            ],
        ),
        "Conformance runs:",
        markdown(
            ["GPU", "date", "torch", "Triton", "tests passed", "record"],
            [
                [
                    f"{run.gpu} ({run.arch})",
                    f"{run.date}",
                    run.torch,
                    run.triton,
                    ", ".join(f"{name}: {n:,}" for name, n in run.passed.items()),
                    f"[record](../{run.record})",
                ]
                for run in runs()
            ],
        ),
    ]
    for kernel in dispatch.KERNELS:
        notes = Notes()
        dims = [f"{a}" if a == b else f"{a}/{b}" for a, b in DIMS]
        parts += [f"## {kernel.NAME}", markdown(["architecture", "dtype", *dims], dims_rows(kernel, notes))]
        groups, rows = feature_rows(kernel, notes)
        if groups:
            parts.append(markdown(["with", *groups], rows))
        if getattr(kernel, "QUANTIZED", False):
            header = ["quantized calls", "dtype of q and k : of v", *dims]
            parts.append(markdown(header, dims_rows(kernel, notes, tuple(QUANTIZED))))
        if notes.texts:
            parts.append("\n".join(f"{i}. {text}" for i, text in enumerate(notes.texts, start=1)))
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Writes the page, or checks it."""
    made = page()
    if "--check" in arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == made:
            return 0
        print(f"{PAGE.name} is out of date: PYTHONPATH=. python benchmarks/support_matrix.py", file=sys.stderr)
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
