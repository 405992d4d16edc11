"""The five reports' tables: the verdicts that their own numbers give, and how verdicts follow when a number changes."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest

from warpwave.workbench.diagnose.parse import CASES, Document, load, names, parse
from warpwave.workbench.diagnose.rules import diagnose, main_cause, notes


def _data(number: int) -> dict[str, Any]:
    return copy.deepcopy(tomllib.loads((CASES / f"case_report_{number}.toml").read_text(encoding="utf-8")))


def _said(document: Document, kind: str, *words: str) -> bool:
    """Whether some finding of a kind has every one of these words, its arithmetic counted."""
    return any(
        f.kind == kind and all(word in f"{f.text} = {f.arithmetic}" for word in words) for f in diagnose(document)
    )


EXPECTED = [
    # 0: rows not comparable, neither bandwidth nor L2 binds, idle SMs in the last row alone, a latency-bound loop
    (0, "claim", ("93 GB/s", "4.7%", "so bandwidth does not bind")),
    (0, "claim", ("256 blocks on 80 to 140 SMs leave none idle",)),
    (0, "claim", ("beyond the caches", "fits L2")),
    (0, "not comparable", ("33.4", "134.2 MFLOP", "9.15 MFLOP")),
    (0, "idle SMs", ("16 blocks on 80 to 140 SMs",)),
    (0, "latency", ("no unit is busy",)),
    (0, "intensity", ("0.47 FLOP a byte", "0.50")),
    (0, "working set", ("shared memory and L1", "fits L2")),
    (0, "shared memory", ("384 bytes", "48 KB")),
    (0, "re-reads", ("16 to 64 times",)),
    # 1: the grid is under-filled; the rest is inside the loop; threads idle; a peer on a slow path
    (1, "idle SMs", ("flat from 2 to 32 blocks", "a step at 64", "58 SMs")),
    (1, "idle SMs", ("8 blocks on 58 SMs", "7.25 x", "the other 9.2 x is inside", "takes 267 us")),
    (1, "idle threads", ("192 of 256", "25%")),
    (1, "claim", ("under-use is disproven", "it is not")),
    (1, "claim", ("200 x the time", "square of the length")),
    (1, "claim", ("bit-exact", "0.00195")),
    (1, "claim", ("fourth grid dimension", "three dimensions")),
    (1, "claim", ("loaded 64 times", "loaded 2 times", "other heads")),
    (1, "peer", ("seqlen 4", "slow path")),
    # 2: 16 % of peak, not launches, both readings of the tile sweep, QK twice, rows left out, scores in L2, the cliff
    (2, "share of peak", ("162.7 TFLOP/s", "16.4")),
    (2, "launch", ("launching is not the cause", "graph")),
    (2, "idle SMs", ("heads one at a time", "32 blocks against 128", "at most 4 x of the 7.8 x", "1.9 x remain")),
    (2, "grid fills", ("heads in one launch", "the whole 7.8 x remains")),
    (2, "figure explained", ("heads were batched",)),
    (2, "contradiction", ("QK is given as 0.6 and, alone, as 1.54",)),
    (2, "unverified", ("1,024 of 16,384 rows",)),
    (2, "unverified", ("no accuracy is given",)),
    (2, "scores in memory", ("8.389 MB a head", "2.50 us", "16 heads x 2.097 MB stay in L2")),
    (2, "scores in memory", ("a cliff near seqlen 1,280",)),
    # 3: one block on 28 SMs, ratios that must agree, tokens counted twice, memory that says nothing
    (3, "idle SMs", ("1 block on 28 SMs", "28 x")),
    (3, "contradiction", ("15.0 x by latency and 7.5 x by throughput",)),
    (3, "contradiction", ("1,024 tokens where the call has 512",)),
    (3, "claim", ("16% less, not 5%",)),
    (3, "figure explained", ("1.5 MB together", "says nothing about the kernel")),
    # 4: the naive kernel grows as it must, flash does not; 256 MB are 16 heads; 16 x and not 3 to 5
    (4, "scaling", ("naive grows 3.9 x", "as the work does")),
    (4, "scaling", ("flash grows 2.2 x", "where the work grows 4 x")),
    (4, "figure explained", ("256 MB at 2048 are the scores of 16 heads",)),
    (4, "claim", ("3 to 5 x faster", "16 x at seqlen 8192")),
]


@pytest.mark.parametrize(("number", "kind", "words"), EXPECTED)
def test_the_verdict_of_the_numbers(number: int, kind: str, words: tuple[str, ...]) -> None:
    document = load(f"case_report_{number}")
    assert _said(document, kind, *words), [f.text for f in diagnose(document) if f.kind == kind]


def test_knowledge_is_printed_apart() -> None:
    assert any("FlashAttention-3" in note for note in notes(load("case_report_2")))
    assert any("tf32" in note for note in notes(load("case_report_3")))
    assert any("multiple of 8" in note for note in notes(load("case_report_1")))
    assert not notes(load("case_report_4"))


@pytest.mark.parametrize("name", names())
def test_every_finding_names_what_it_follows_from(name: str) -> None:
    for finding in diagnose(load(name)):
        assert finding.arithmetic and finding.factor >= 1.0, finding


# The same tables with a number changed: what followed from it must follow no longer ----------------------------------


def test_0_with_256_blocks_in_the_last_row_has_no_idle_sms() -> None:
    data = _data(0)
    data["tables"][0]["rows"] = [[d, 4, 64, 384, f, t] for d, _, _, _, f, t in data["tables"][0]["rows"]]
    document = parse(data, source="changed")
    assert not _said(document, "idle SMs") and _said(document, "grid fills", "256 blocks")
    # and then 0.05 TFLOP/s at 0.183 ms is not the work of that call
    assert _said(document, "contradiction", "time times rate")


def test_0_with_a_bandwidth_near_the_cards_is_bound_by_it() -> None:
    data = _data(0)
    data["claims"][0]["bandwidth_gbps"] = 1500
    assert _said(parse(data, source="changed"), "claim", "may bind")


def test_1_whose_times_grow_with_blocks_is_not_called_under_filled_by_its_plateau() -> None:
    data = _data(1)
    rows = data["tables"][1]["rows"]
    data["tables"][1]["rows"] = [[b, h, p, 0.27 * b * h] for b, h, p, _ in rows]
    document = parse(data, source="changed")
    assert not _said(document, "idle SMs", "flat from")
    assert _said(document, "contradiction", "as if they ran one after another")


def test_1_with_all_threads_busy_has_no_idle_threads() -> None:
    data = _data(1)
    data["kernels"]["theirs"]["busy_threads"] = 256
    assert not _said(parse(data, source="changed"), "idle threads")


def test_1_on_a_card_of_8_sms_is_not_under_filled_at_512() -> None:
    data = _data(1)
    data["device"] = {"num_sms": 8}
    document = parse(data, source="changed")
    assert not _said(document, "idle SMs", "seqlen 512")


def test_2_on_an_h200_has_its_cliff_further_out() -> None:
    data = _data(2)
    data["gpu"] = "h200"
    assert _said(parse(data, source="changed"), "scores in memory", "a cliff near seqlen 1,402")


def test_2_whose_graphs_help_is_bound_by_launching() -> None:
    data = _data(2)
    data["tables"][0]["rows"][6][4] = 5.0
    document = parse(data, source="changed")
    assert _said(document, "launch", "launching is 61% of it")


def test_2_with_every_row_covered_and_an_accuracy_is_verified() -> None:
    data = _data(2)
    data["kernels"]["theirs"] |= {"softmax_rows": 16384, "max_difference": 0.001}
    assert not _said(parse(data, source="changed"), "unverified")


def test_2_launched_head_by_head_leaves_one_reading() -> None:
    data = _data(2)
    data["kernels"]["theirs"]["launch_heads"] = "one"
    document = parse(data, source="changed")
    assert _said(document, "idle SMs", "heads one at a time") and not _said(document, "grid fills", "in one launch")


def test_3_with_corrected_tokens_has_one_ratio() -> None:
    data = _data(3)
    data["tables"][0]["rows"][0][2] = 308574 / 2
    document = parse(data, source="changed")
    assert not _said(document, "contradiction")


def test_3_with_a_block_for_each_tile_of_queries_has_16() -> None:
    data = _data(3)
    data["kernels"]["theirs"]["grid"] = "query tiles"
    assert _said(parse(data, source="changed"), "idle SMs", "16 blocks on 28 SMs", "1.75 x")


def test_3_with_the_memory_that_was_claimed() -> None:
    data = _data(3)
    data["tables"][0]["rows"][0][3] = 22.8
    assert not _said(parse(data, source="changed"), "claim", "less")


def test_4_whose_flash_is_quadratic_scales_as_it_must() -> None:
    data = _data(4)
    data["tables"][1]["rows"] = [[s, n, 3 * (s / 1024) ** 2] for s, n, _ in data["tables"][1]["rows"]]
    document = parse(data, source="changed")
    assert _said(document, "scaling", "flash grows 4 x", "as the work does")
    assert _said(document, "claim", "its table agrees")


def test_4_with_half_the_memory_has_half_the_heads() -> None:
    data = _data(4)
    for row in data["tables"][0]["rows"][:2]:
        row[2] = 128
    assert _said(parse(data, source="changed"), "figure explained", "8 heads")


def test_a_cubic_time_is_more_than_the_work() -> None:
    data = _data(4)
    data["tables"][1]["rows"] = [[s, n, 4 * (s / 1024) ** 3] for s, n, _ in data["tables"][1]["rows"]]
    assert _said(parse(data, source="changed"), "scaling", "flash", "more than its work")


def test_a_time_faster_than_the_card_is_called_impossible() -> None:
    data = _data(3)
    data["tables"][0]["rows"][0][1] = 0.0001
    assert _said(parse(data, source="changed"), "contradiction", "more than the card has")


def test_the_main_cause_of_each_report() -> None:
    causes = {n: main_cause(load(f"case_report_{n}"), "theirs") for n in (0, 1, 2, 3)}
    assert {n: cause.kind for n, cause in causes.items() if cause is not None} == {
        0: "latency", 1: "latency", 2: "latency", 3: "idle SMs",
    }  # fmt: skip
