import sys
from dataclasses import replace

import pytest

from warpwave.bench.correctness import Verdict
from warpwave.bench.records import Measurement
from warpwave.bench.table import case_table, plain, print_table, summary_tables
from warpwave.bench.timing import Samples
from warpwave.problem import AttentionProblem

PROBLEM = AttentionProblem(
    batch=1,
    seqlen_q=1000,
    seqlen_k=1000,
    num_heads_q=1,
    num_heads_kv=1,
    head_dim=50,
    head_dim_v=50,
    dtype="float16",
    softmax_scale=0.1,
)


def measured(contender: str, us: float, case: str = "one") -> Measurement:
    return Measurement(
        suite="s",
        case=case,
        problem=PROBLEM,
        contender=contender,
        kernel="k",
        verdict=Verdict(True, "", 1.1e-3, 2e-3, 1e-3, 2e-3, 64),
        timing=Samples((us,) * 9, "events", 20, 1, True),
    )


def refused(contender: str, reason: str) -> Measurement:
    return Measurement(suite="s", case="one", problem=PROBLEM, contender=contender, refusal=reason)


RESULTS = [
    measured("warpwave auto", 200.0),
    measured("fast peer", 190.0),
    measured("slow peer", 1500.0),
    refused("absent a", "not here"),
    refused("absent b", "not here"),
]


def test_a_case_shows_everyone() -> None:
    lines = plain(case_table(RESULTS)).splitlines()
    assert lines[0] == "one (events, L2 flushed, median of 9 rounds)"
    cells = [line.split() for line in lines[2:5]]
    assert cells[0] == ["warpwave", "auto", "k", "1", "2", "200", "1.10"]  # 200e6 operations, 400 kB in 200 us
    assert cells[1][-3:] == ["0.950", "[0.950,", "0.950]"]
    assert cells[2][-5:] == ["1,500", "1.10", "7.500", "[7.500,", "7.500]"]
    assert lines[5:] == ["  absent a, absent b: not here"]
    assert len({len(line) for line in lines[3:5]}) == 1


def test_a_case_nobody_could_run() -> None:
    assert plain(case_table([refused("a", "no"), refused("b", "never")])) == "one\n  a: no\n  b: never\n"


def test_the_summary_is_against_the_best_peer_and_keeps_losses() -> None:
    second = [measured("warpwave auto", 100.0, "two"), measured("slow peer", 200.0, "two")]
    (table,) = summary_tables(RESULTS + second)
    assert table.title == "warpwave auto against the best peer"
    assert [row[:3] for row in table.rows] == [("one", "k", "fast peer"), ("two", "k", "slow peer")]
    assert table.notes == ("geometric mean 1.378 over 2 cases, worst 0.950 (one)",)
    assert summary_tables([measured("warpwave auto", 1.0)]) == []


def test_too_few_rounds_are_said() -> None:
    short = [replace(m, timing=Samples((1.0, 2.0), "events", 20, 1, True)) for m in RESULTS[:2]]
    assert "1.000 [needs 6 rounds]" in plain(case_table(short))


def test_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_table(case_table(RESULTS))
    assert capsys.readouterr().out == plain(case_table(RESULTS)) + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    print_table(case_table(RESULTS))
    drawn = capsys.readouterr().out
    assert "─" in drawn and "0.950 [0.950, 0.950]" in drawn and "absent a, absent b: not here" in drawn
