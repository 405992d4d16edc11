"""The format: what is read, and what a mistake in it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from warpwave.errors import InvalidInput
from warpwave.workbench.cli import app
from warpwave.workbench.diagnose.facts import flops, tensor_bytes, visible_pairs
from warpwave.workbench.diagnose.parse import Call, TableError, load, parse
from warpwave.workbench.diagnose.rules import diagnose
from warpwave.workbench.diagnose.text import run

TEMPLATE = Path(__file__).parents[3] / "docs" / "table-template.toml"


def _table(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "title": "t",
        "gpu": "l4",
        "call": {"heads": 2, "head_dim": 64},
        "tables": [{"columns": ["seqlen", "time_ms", "SDPA.time_us"], "rows": [[128, 0.5, 20], [256, 1.0, "-"]]}],
    }
    return data | changes


def test_columns_describe_calls_and_series() -> None:
    document = parse(_table(), source="here")
    assert [(r.series, r.call.seqlen, r.time_us) for r in document.rows] == [
        ("theirs", 128, 500.0), ("SDPA", 128, 20), ("theirs", 256, 1000.0),
    ]  # fmt: skip
    assert document.device.num_sms == (58, 58)


def test_a_backward_is_held_against_its_own_work() -> None:
    """5 products of 256 x 256 pairs and 64 columns, 2 heads: 83.89 MFLOP."""
    row = {"columns": ["seqlen", "passes", "time_us", "tflops"], "rows": [[256, "backward", 10.0, 8.389]]}
    call = {"heads": 2, "head_dim": 64, "dtype": "float16"}
    right = diagnose(parse(_table(tables=[row], call=call), source="here"))
    assert not any(finding.kind == "contradiction" for finding in right)
    row["rows"] = [[256, "forward", 10.0, 8.389]]
    wrong = next(
        f for f in diagnose(parse(_table(tables=[row], call=call), source="here")) if f.kind == "contradiction"
    )
    assert "2.50 x the work of the call" in wrong.text and "4 x pairs x head_dim = 33.55 MFLOP" in wrong.arithmetic
    document = parse(_table(call=call | {"passes": "both"}), source="here")
    assert flops(document.rows[0].call) == 14 * 2 * 128 * 128 * 64
    # q, k, v and out; then q, k, v, dO and three gradients.
    assert tensor_bytes(document.rows[0].call) == 2 * 2 * 128 * 64 * (4 + 7)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 2), (2, 4), (1, 5), (5, 1)])
def test_the_causal_mask_is_aligned_to_the_last_key(queries: int, keys: int) -> None:
    seen = sum(key <= query + keys - queries for query in range(queries) for key in range(keys))
    assert visible_pairs(Call(heads=1, seqlen=queries, seqlen_k=keys, causal=True)) == seen


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "l5"}, "not in the catalog"),
        ({"cal": {}}, "did you mean call?"),
        ({"call": {"heads": 0}}, "positive whole number"),
        ({"call": {"dtype": "int8"}}, "dtype must be one of"),
        ({"device": {"num_sms": [5, 2]}}, "num_sms"),
        ({"device": {"num_sms": "many"}}, "num_sms"),
        ({"kernels": {"theirs": {"grid": "rows"}}}, "grid must be one of"),
        ({"kernels": {"theirs": {"unit": "tensor"}}}, "scalar or matrix"),
        ({"tables": []}, "at least one"),
        ({"tables": [{"columns": ["time_ms"], "rows": [[1, 2]]}]}, "one a column"),
        ({"tables": [{"columns": ["time_s"], "rows": [[1]]}]}, "unknown column"),
        ({"tables": [{"columns": ["time_ms"], "rows": [[-1]]}]}, "above 0"),
        ({"tables": [{"columns": ["time_ms"], "rows": [["fast"]]}]}, "above 0"),
        ({"tables": [{"columns": "time_ms", "rows": [[1]]}]}, "list of names"),
        ({"tables": [{"columns": ["time_ms"], "rows": [[float("inf")]]}]}, "above 0"),
        ({"tables": [{"columns": ["time_ms"], "rows": [[1]], "per_head": "no"}]}, "per_head must be true or false"),
        ({"call": {"dtype": ["float16"]}}, "dtype must be one of"),
        ({"call": {"heads": 10**25}}, "positive whole number"),
        ({"call": {"passes": "gradients"}}, "passes must be one of forward, backward, both"),
        ({"kernels": {"theirs": {"launch_heads": 256}}}, "launch_heads must be one, all"),
        ({"device": {"bandwidth_gbps": 0}}, "bandwidth_gbps must be a number above 0"),
        ({"parts": {"QK": float("nan")}}, "QK must be a number above 0"),
        ({"title": 7}, "title must be text"),
        ({"claims": [{"less": 0.1}]}, "each with what it says"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TableError, match=words.replace("?", r"\?")):
        parse(_table(**changes), source="here")


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"grid_dimensions": float("inf")}, "cannot convert float infinity"),
        ({"part": "QK", "part_us": 0}, "0 is no number above 0"),
        ({"less": 0.1, "of": [1, 2]}, "of is [1, 2]; it must be one of time_us, tflops"),
        ({"times_faster": [0, 2], "of": ["PyTorch", "theirs"]}, "0 is no number above 0"),
    ],
)
def test_a_claim_that_makes_no_sense_is_named(claim: dict[str, Any], words: str) -> None:
    with pytest.raises(TableError, match=re.escape(f"the claim 'so' cannot be read: {words}")):
        diagnose(parse(_table(claims=[{"says": "so", **claim}]), source="here"))


def test_a_row_that_leaves_its_size_out_is_no_point_of_a_law() -> None:
    rows = [[64, 1.0], [128, 2.0], ["-", 3.0], [256, 4.0], [512, 8.0]]
    table = {"columns": ["seqlen", "time_ms"], "rows": rows}
    assert any("seqlen" in f.text for f in diagnose(parse(_table(tables=[table]), source="here")))


def test_a_claim_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('title = "t"\nclaims = [{says = "fast"}]\n[[tables]]\ncolumns = ["time_ms"]\nrows = [[1]]\n')
    with pytest.raises(InvalidInput, match="must have one of"):
        run(file, False)


def test_no_such_file_lists_what_there_is() -> None:
    with pytest.raises(TableError, match="case_report_0"):
        load("nowhere.toml")


def test_not_toml(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("title = ")
    with pytest.raises(TableError, match="not TOML"):
        load(file)


def test_the_template_of_the_docs_is_a_table() -> None:
    assert "WHY" in run(TEMPLATE, False)


def test_the_command_prints_verdicts_and_json() -> None:
    said = CliRunner().invoke(app, ["explain", "--from-table", "case_report_3"])
    assert said.exit_code == 0 and "1 block on 28 SMs" in said.output
    data = json.loads(CliRunner().invoke(app, ["explain", "--from-table", "case_report_3", "--json"]).output)
    assert any(f["kind"] == "idle SMs" and f["factor"] == 28 for f in data["findings"])
