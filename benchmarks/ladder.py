"""Writes the measured part of docs/kernels/ladder.md from a record of `warpwave bench ladder`.

    PYTHONPATH=. python benchmarks/ladder.py benchmarks/records/RECORD.jsonl

Times are medians of the record's raw samples; gains are medians of the paired ratios of two neighboring rungs. A rung
with a wrong result, or that could not run, shows the reason instead of a time.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from warpwave.workbench.bench.records import Measurement, Records, read_records
from warpwave.workbench.bench.timing import paired_ratio

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "kernels" / "ladder.md"
SUITE = "ladder"
RUNGS = ("naive", "tiled", "flash_fwd", "hopper/flash_fwd")
# The opening marker names the record, so that a test can make the section again.
SECTION = re.compile(r"(<!-- measured from (?P<record>.*?) -->\n)(?P<body>.*?)(<!-- end of measured -->)", re.DOTALL)
NO_RECORD = "no record yet"
NOT_MEASURED = "Not measured yet: the figures come with the first record of `warpwave bench ladder`.\n"
DTYPES = {
    ("float32", "ieee"): 'float32, multiply-adds (`precision="ieee"`)',
    (
        "float32",
        "default",
    ): "float32, by default as it was then (naive: multiply-adds; from tiled on: products of bfloat16 parts, bf16x6)",
    ("bfloat16", "default"): "bfloat16",
}


class NoLadder(ValueError):
    """The record has no measurements of the ladder, or the document has no markers for it."""


def by_rung(records: Records) -> dict[tuple[str, str], dict[int, dict[str, Measurement]]]:
    """Returns (dtype, precision) -> seqlen -> kernel -> its measurement. A measurement of `auto` counts for the kernel
    that it chose, unless that was also measured by name."""
    found: dict[tuple[str, str], dict[int, dict[str, Measurement]]] = {}
    for _, m in records.measurements:
        if m.suite == SUITE and m.is_ours:
            group = found.setdefault((m.problem.dtype, m.problem.precision), {})
            kernel = m.kernel or m.contender.removeprefix("warpwave ")
            if kernel in RUNGS:
                group.setdefault(m.problem.seqlen_k, {}).setdefault(kernel, m)
    if not found:
        raise NoLadder(f"no measurement of the suite {SUITE!r} in this record")
    return found


def cell(m: Measurement | None, before: Measurement | None) -> str:
    """Returns time, gain over the previous rung, rate and peak memory; or the reason why there is no time."""
    if m is None:
        return "-"
    if m.timing is None:
        return m.refusal
    parts = [f"{m.timing.median_us / 1000:.3f} ms"]
    if before is not None and before.timing is not None:
        parts.append(f"x {paired_ratio(before.timing, m.timing).median:.2f}")
    parts.append(f"{m.tflops:.1f} TFLOP/s")
    if m.peak_memory_bytes is not None:
        parts.append(f"{m.peak_memory_bytes / 1e6:,.1f} MB")
    return ", ".join(parts)


def tables(records: Records) -> str:
    """Returns a table for each dtype, with one row per length and one column per rung."""
    blocks = []
    for key, by_seqlen in by_rung(records).items():
        rungs = [rung for rung in RUNGS if any(rung in found for found in by_seqlen.values())]
        lines = [
            f"| {DTYPES.get(key, ', '.join(key))} | " + " | ".join(rungs) + " |",
            "| --- " * (1 + len(rungs)) + "|",
        ]
        for seqlen, found in sorted(by_seqlen.items()):
            before: Measurement | None = None
            cells = []
            for rung in rungs:
                m = found.get(rung)
                cells.append(cell(m, before))
                before = m if m is not None else before
            lines.append(f"| {seqlen} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def section(record: Path) -> str:
    """Returns the text between the markers: the machine and the tables."""
    records = read_records(record)
    where = []
    for environment in records.environments.values():
        device = (environment.get("gpu") or environment.get("cpu") or {}).get("name") or "a CPU"
        code = environment["code"]
        at_commit = code.get("commit") and not code.get("dirty")
        commit = f"commit {code['commit'][:7]}" if at_commit else f"sources {code['source_sha256']}"
        versions = f"torch {environment['torch']}, Triton {environment['triton']}"
        where.append(f"{device}, {versions}, {environment['date'][:10]}, {commit}")
    measured = tables(records)
    problem = next(m.problem for _, m in records.measurements if m.suite == SUITE)
    return (
        f"{'; '.join(dict.fromkeys(where))}. Batch {problem.batch}, {problem.num_heads_q} heads of head_dim "
        f"{problem.head_dim}, full attention; rows are seqlen. A cell: time of a call, how many times as fast as the "
        f"rung before it, operations a second, memory allocated during the call.\n\n{measured}\n"
    )


def written(document: str, record: Path | None) -> str:
    """Returns the document with its measured section made from the record, or stated to be missing."""
    if not SECTION.search(document):
        raise NoLadder(
            "the document has no section between '<!-- measured from ... -->' and '<!-- end of measured -->'"
        )
    name = NO_RECORD if record is None else record.resolve().relative_to(ROOT).as_posix()
    body = NOT_MEASURED if record is None else section(record)
    return SECTION.sub(lambda _: f"<!-- measured from {name} -->\n{body}<!-- end of measured -->", document)


def main() -> None:
    """Reads the record's path and writes the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="a file of benchmarks/records")
    arguments = parser.parse_args()
    try:
        DOC.write_text(written(DOC.read_text(encoding="utf-8"), arguments.record), encoding="utf-8")
    except (OSError, ValueError) as error:  # a missing or damaged record, or one from outside the repository
        parser.error(str(error))


if __name__ == "__main__":
    main()
