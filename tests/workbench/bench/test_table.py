import re
import sys
from dataclasses import replace

import pytest

from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.records import Measurement
from warpwave.workbench.bench.table import case_table, case_tables, plain, print_table, summary_tables
from warpwave.workbench.bench.timing import Samples

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
    # 200e6 operations, 400 kB, 1000 tokens in 200 us
    assert cells[0] == ["warpwave", "auto", "k", "1", "2", "5", "M", "200", "1.10"]
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


def test_no_escape_sequences_where_colour_is_unwanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(case_table(RESULTS))
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(case_table(RESULTS))
    drawn = capsys.readouterr().out
    assert "─" in drawn and "\x1b" not in drawn


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_table(case_table(RESULTS))
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(len(line) for line in drawn.splitlines()) <= 80
    assert "warpwave auto" in drawn and "0.950 [0.950, 0.950]" in drawn and "TFLOP/s" in drawn
    assert "a wider terminal has room for tokens/s, GB/s" in drawn and "tokens/s " not in drawn


def test_what_is_not_accurate_enough_is_marked_and_not_the_peer_to_beat() -> None:
    wrong = replace(measured("three_calls", 50.0), verdict=Verdict(False, "no", 5e-3, 1e-2, 1e-3, 2e-3, 64))
    text = plain(case_table([*RESULTS, wrong]))
    assert "5.00 *" in text and "* three_calls: not accurate enough for our gates" in text
    (table,) = summary_tables([*RESULTS, wrong])
    assert table.rows[0][2] == "fast peer"


def test_goals_met_and_missed_are_counted() -> None:
    goals = [replace(m, goal=Goal(ratio=0.95)) for m in RESULTS]
    second = [replace(measured("warpwave auto", 100.0, "two"), goal=Goal(ratio=2.1)), measured("peer", 200.0, "two")]
    (table,) = summary_tables([*goals, *second])
    assert [row[-1] for row in table.rows] == ["0.95 x: met", "2.1 x: missed"]
    assert table.notes[-1] == "1 of 2 goals met"


def test_what_could_not_be_timed_stays_in_the_summary() -> None:
    lost = replace(refused("warpwave auto", "too large"), case="two", goal=Goal(ratio=1.0))
    (table,) = summary_tables([*RESULTS, lost, measured("peer", 1.0, "two")])
    assert table.rows[1][-2:] == ("not timed: too large", "1 x: missed")


def test_two_streams_stand_beside_one() -> None:
    one = [replace(measured("warpwave auto", 100.0), mode="graph")]
    two = [replace(measured("warpwave auto", 80.0), mode="streams")]
    graph, streams = case_tables([*one, *two])
    assert "in a CUDA graph" in graph.title and "on two streams at once" in streams.title
    assert streams.rows[0][streams.header.index("against one stream")] == "1.250 x"


def test_the_card_and_its_throttling_are_said() -> None:
    before = {"sm_mhz": 1980, "power_w": 120.4, "temperature_c": 35, "throttle": []}
    after = {**before, "power_w": 699.6, "throttle": ["power cap"]}
    text = plain(case_table([replace(RESULTS[0], gpu_before=before, gpu_after=after)]))
    assert "card before: 1980 MHz, 120 W, 35 C; after: 1980 MHz, 700 W, 35 C, THROTTLED by power cap" in text
