import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.bench.test_table import measured, refused
from warpwave.workbench.bench.compare import CompareError, compare, load_run
from warpwave.workbench.bench.comparison_text import main
from warpwave.workbench.bench.records import Measurement, RecordWriter
from warpwave.workbench.bench.timing import Samples

ENVIRONMENT: dict[str, Any] = {
    "date": "2026-11-21",
    "torch": "2.11.0",
    "device": "cuda",
    "gpu": {"name": "NVIDIA H200", "driver": "580"},
    "code": {"commit": "aaaa1111", "source_sha256": "0123abcd"},
}


def run_of(times: dict[tuple[str, str], float], seed: int, warmth: float = 1.0) -> list[Measurement]:
    """Rounds around planted times, all slowed alike by the card, which drifts within the run."""
    rng = random.Random(seed)
    drift = [warmth * (1 + 0.01 * r) for r in range(9)]
    return [
        replace(
            measured(contender, 1.0, case),
            timing=Samples(tuple(us * d * rng.lognormvariate(0, 0.002) for d in drift), "events", 20, 1, True),
        )
        for (case, contender), us in times.items()
    ]


def write(path: Path, measurements: list[Measurement], **changes: Any) -> Path:
    writer = RecordWriter(path, ENVIRONMENT | changes)
    for m in measurements:
        writer.write(m)
    return path


PEERS = {("one", "p"): 90.0, ("one", "q"): 120.0, ("two", "p"): 50.0, ("two", "q"): 80.0}
OLD = {("one", "warpwave auto"): 100.0, ("two", "warpwave auto"): 60.0, **PEERS}


@pytest.mark.parametrize(
    ("speed_up", "expected", "code"), [(1.0, "SAME", 0), (1.1, "FASTER", 0), (0.9, "SLOWER", 1), (0.95, "SLOWER", 1)]
)
def test_a_planted_ratio_is_found_on_a_warmer_card(
    speed_up: float, expected: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = {key: us / (speed_up if key[1] == "warpwave auto" else 1) for key, us in OLD.items()}
    a = write(tmp_path / "a.jsonl", run_of(OLD, 1))
    b = write(tmp_path / "b.jsonl", run_of(new, 2, warmth=1.15), date="later")
    assert main(str(a), str(b), json_output=True) == code
    found = json.loads(capsys.readouterr().out)
    assert [c["outcome"] for c in found["cases"]] == [expected] * 2
    for case in found["cases"]:
        assert case["ratio"]["median"] == pytest.approx(speed_up, rel=0.01)
        assert case["ratio"]["low95"] < speed_up < case["ratio"]["high95"]
        assert case["how"] == "normalized by 2 common peers"


def test_peers_that_moved_make_it_unclear(tmp_path: Path) -> None:
    """Ours 4 % faster, but one unchanged peer 6 % slower and one 4 % faster: such a run shows nothing."""
    moved = {**OLD, ("one", "warpwave auto"): 96.0, ("one", "p"): 95.4, ("one", "q"): 115.2}
    a = load_run(str(write(tmp_path / "a.jsonl", run_of(OLD, 1))))
    b = load_run(str(write(tmp_path / "b.jsonl", run_of(moved, 2), date="later")))
    comparison = compare(a, b)
    assert comparison.cases[0].outcome == "UNCLEAR"
    assert comparison.spread.degrees == 2 and comparison.spread.sigma > 0.02


def test_other_peers_or_another_card_normalize_nothing(tmp_path: Path) -> None:
    a = load_run(str(write(tmp_path / "a.jsonl", run_of(OLD, 1))))
    b = load_run(str(write(tmp_path / "b.jsonl", run_of(OLD, 2, warmth=1.2), torch="2.12.0", gpu={"name": "H100"})))
    comparison = compare(a, b)
    assert {c.how for c in comparison.cases} == {"as measured: torch, gpu.name differ"}
    assert {c.outcome for c in comparison.cases} == {"SLOWER"}
    assert comparison.differences["torch"] == ("2.11.0", "2.12.0")
    assert comparison.differences["gpu.name"] == ("NVIDIA H200", "H100")
    assert "gpu.driver" not in comparison.differences  # b does not say


def test_two_contenders_of_one_run_are_paired(tmp_path: Path) -> None:
    run = load_run(str(write(tmp_path / "a.jsonl", run_of(OLD, 1))))
    comparison = compare(run, run, ("q", "warpwave auto"))
    assert [c.outcome for c in comparison.cases] == ["FASTER", "FASTER"]
    assert comparison.cases[0].ratio is not None
    assert comparison.cases[0].ratio.median == pytest.approx(1.2, rel=0.01)
    assert comparison.cases[0].how == "paired within rounds"


def test_a_file_under_two_names_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.jsonl", run_of(OLD, 1))
    (tmp_path / "link.jsonl").symlink_to(path)
    for other in ("./a.jsonl", "link.jsonl", "a.jsonl@aaaa"):
        assert main("a.jsonl", other) == 2
        assert "to compare a run with itself, name two contenders of warpwave auto, p, q" in capsys.readouterr().err
        assert main("a.jsonl", other, contenders=("q", "warpwave auto"), json_output=True) == 0
        assert json.loads(capsys.readouterr().out)["cases"][0]["how"] == "paired within rounds"


def test_two_commits_of_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", run_of(OLD, 1))
    new = {**OLD, ("one", "warpwave auto"): 80.0}
    write(path, run_of(new, 2), code={"commit": "bbbb2222", "source_sha256": "f"})
    comparison = compare(load_run(f"{path}@aaaa"), load_run(f"{path}@bbbb"))
    assert [c.outcome for c in comparison.cases] == ["FASTER", "SAME"]
    assert comparison.differences["code.commit"] == ("aaaa1111", "bbbb2222")
    with pytest.raises(CompareError, match="'cccc'; it has aaaa1111, bbbb2222"):
        load_run(f"{path}@cccc")


def test_what_only_one_has_is_listed_and_what_was_lost_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.jsonl", [*run_of(OLD, 1), *run_of({("gone", "warpwave auto"): 1.0}, 1)])
    lost = [m for m in run_of(OLD, 2) if (m.case, m.contender) != ("one", "warpwave auto")]
    b = write(tmp_path / "b.jsonl", [*lost, refused("warpwave auto", "wrong, so not timed")], date="later")
    assert main(str(a), str(b)) == 1
    out = capsys.readouterr().out
    assert "LOST" in out and "not timed: wrong, so not timed" in out and "only in A: gone" in out
    assert main(str(a), str(b), fail_on="never") == 0


def test_modes_and_methods_do_not_mix(tmp_path: Path) -> None:
    graph = [replace(m, mode="graph") for m in run_of(OLD, 3)]
    a = load_run(str(write(tmp_path / "a.jsonl", [*run_of(OLD, 1), *graph])))
    hot = [replace(m, timing=replace(m.timing, l2_flushed=False)) for m in run_of(OLD, 2) if m.timing]
    b = load_run(str(write(tmp_path / "b.jsonl", hot, date="later")))
    comparison = compare(a, b)
    assert {(c.mode, c.outcome, c.how) for c in comparison.cases} == {("auto", "UNCLEAR", "timed by different methods")}
    assert comparison.only_a == ("one (graph)", "two (graph)")


def test_a_record_of_nothing_measured_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", run_of(OLD, 1))
    lines = a.read_text().splitlines()
    timed = json.loads(lines[1])
    timed["timing"]["samples_us"][0] = 0.0
    (tmp_path / "b.jsonl").write_text("\n".join([lines[0], json.dumps(timed)]) + "\n")
    assert main(str(a), str(tmp_path / "b.jsonl")) == 2
    assert "b.jsonl:2: timing.samples_us[0] is 0.0; it must be a number from" in capsys.readouterr().err


def test_unclear_can_fail(tmp_path: Path) -> None:
    few = [replace(m, timing=replace(m.timing, samples_us=m.timing.samples_us[:3])) for m in run_of(OLD, 1) if m.timing]
    a = write(tmp_path / "a.jsonl", few)
    b = write(tmp_path / "b.jsonl", few, date="later")
    assert main(str(a), str(b)) == 0
    assert main(str(a), str(b), fail_on="unclear") == 1


def test_nothing_compared_is_no_success(tmp_path: Path) -> None:
    refused = [replace(m, timing=None, host=None, refusal="not here") for m in run_of(OLD, 1)]
    a = write(tmp_path / "a.jsonl", refused)
    b = write(tmp_path / "b.jsonl", refused, date="later")
    assert main(str(a), str(b)) == main(str(a), str(b), fail_on="unclear") == 1
    assert main(str(a), str(b), fail_on="never") == 0


def test_peers_with_other_rounds_are_no_common_peers(tmp_path: Path) -> None:
    """As where a record was cut together: there is no round to divide by."""

    def cut(m: Measurement, rounds: int) -> Measurement:
        return m if m.timing is None else replace(m, timing=replace(m.timing, samples_us=m.timing.samples_us[:rounds]))

    whole = run_of(OLD, 1)
    a = write(tmp_path / "a.jsonl", whole)
    b = write(tmp_path / "b.jsonl", [m if m.is_ours else cut(m, 4) for m in whole], date="later")
    (first, *_) = compare(load_run(str(a)), load_run(str(b))).cases
    assert first.how == "as measured: no common peer" and first.ratio is not None


def test_many_rounds_compare_in_no_time(tmp_path: Path) -> None:
    long = [
        replace(m, timing=replace(m.timing, samples_us=tuple(100 + i % 7 for i in range(1000))))
        for m in run_of(OLD, 1)[:1]
        if m.timing
    ]
    a = write(tmp_path / "a.jsonl", long)
    b = write(tmp_path / "b.jsonl", long, date="later")
    started = time.perf_counter()
    assert main(str(a), str(b)) == 0
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("nowhere.jsonl", None), {}, "there is no record file nowhere.jsonl"),
        (("a", "a"), {}, "name two contenders of warpwave auto, p, q"),
        (("a", None), {"contenders": ("p", "z")}, "has no contender 'z'; it has warpwave auto, p, q"),
        (("a", None), {"contenders": ("p", "q", "p")}, "at most two contenders"),
        (("a", "other"), {}, "no kernel of warpwave in common"),
        (("a", "elsewhere"), {}, "have no case in common; they have one, two and three"),
        (("a", "a"), {"fail_on": "late"}, "--fail-on is 'late'; use slower, unclear, never"),
        (("a", "a"), {"margin": -0.1}, "--margin is -0.1"),
        (("broken", "a"), {}, "broken.jsonl:1: not JSON"),
    ],
)
def test_a_request_that_makes_no_sense(
    arguments: tuple[str, str | None],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "a.jsonl", run_of(OLD, 1))
    write(tmp_path / "other.jsonl", run_of(PEERS, 1))
    write(tmp_path / "elsewhere.jsonl", run_of({("three", "warpwave auto"): 1.0}, 1))
    (tmp_path / "broken.jsonl").write_text("{\n")
    paths = [None if x is None else x if "." in x else str(tmp_path / f"{x}.jsonl") for x in arguments]
    assert paths[0] is not None
    assert main(paths[0], paths[1], **options) == 2
    error = capsys.readouterr().err
    assert error.startswith("warpwave: ") and message in error
