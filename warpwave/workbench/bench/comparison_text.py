"""The command `warpwave compare`: reads two runs, compares them, and prints the result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from warpwave.workbench.bench.compare import CompareError, Comparison, RecordError, compare, load_run
from warpwave.workbench.bench.table import Table, print_table
from warpwave.workbench.terminal import complain, say

FAIL_ON = ("slower", "unclear", "never")


def main(
    a: str,
    b: str | None,
    *,
    contenders: Sequence[str] = (),
    margin: float = 0.02,
    fail_on: str = "slower",
    json_output: bool = False,
) -> int:
    """Compares two runs and prints the result.

    Args:
        a, b: record files, each `FILE` or `FILE@COMMIT`; b is a if None or if both hold the same measurements.
        contenders: see `compare.compare`.
        margin: largest distance of a ratio from 1 that counts as the same.
        fail_on: one of `FAIL_ON`.
        json_output: print one JSON object instead of the table.

    Returns:
        The exit code: 0; 1 if a case is as bad as `fail_on`; 2 if the request is invalid.
    """
    try:
        if fail_on not in FAIL_ON:
            raise CompareError(f"--fail-on is {fail_on!r}; use {', '.join(FAIL_ON)}")
        if not 0 <= margin < 1:
            raise CompareError(f"--margin is {margin}; it is a share from 0 to 1")
        run_a = load_run(a)
        run_b = run_a if b is None else load_run(b)
        if run_b.measurements == run_a.measurements:  # the same file under another name, or a copy of it
            run_b = run_a
        comparison = compare(run_a, run_b, contenders, margin)
    except (CompareError, RecordError, OSError) as error:
        complain(error)
        return 2
    if json_output:
        say(json.dumps({**asdict(comparison), "margin": margin}, indent=2))
    else:
        print_table(comparison_table(comparison, margin))
    return 1 if comparison.failed(fail_on) else 0


def comparison_table(comparison: Comparison, margin: float) -> Table:
    """Returns a table with one row per case, and notes: the count of each outcome, differences, and missing cases."""
    several = len({c.contender_b for c in comparison.cases}) > 1
    told = any(c.moved for c in comparison.cases)
    rows = []
    for c in comparison.cases:
        ratio = c.ratio
        figures = "" if ratio is None else f"{ratio.median:.3f}"
        if ratio is not None and ratio.low95 is not None:
            figures += f" [{ratio.low95:.3f}, {ratio.high95:.3f}]"
        case = c.case if c.mode == "auto" else f"{c.case} ({c.mode})"
        rows.append(
            (
                *((c.contender_b,) if several else ()),
                case,
                _us(c.a_us),
                _us(c.b_us),
                figures,
                c.outcome,
                c.how,
                *((c.moved,) if told else ()),
            )
        )
    header = (
        *(("contender",) if several else ()),
        "case",
        "A us",
        "B us",
        "B is x as fast [95 %]",
        "B is",
        "how",
        *(("term that moved",) if told else ()),
    )
    counts = Counter(c.outcome for c in comparison.cases)
    notes = [", ".join(f"{count} {name}" for name, count in counts.most_common())]
    notes.append(f"SAME is within {margin:.1%}; UNCLEAR is an interval that more rounds would narrow")
    if comparison.spread.degrees:
        notes.append(
            f"from A to B the peers moved against each other by {comparison.spread.sigma:.1%} although they did "
            "not change; the intervals allow for it"
        )
    for name, (in_a, in_b) in comparison.differences.items():
        notes.append(f"{name} differs: {in_a} in A, {in_b} in B")
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            notes.append(f"only in {side}: {'; '.join(names)}")
    return Table(f"A {comparison.a}, B {comparison.b}", header, rows, tuple(notes))


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"
