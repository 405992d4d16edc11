"""The same call on other cards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from warpwave.errors import InvalidInput
from warpwave.problem import AttentionProblem
from warpwave.workbench.cli import app
from warpwave.workbench.explain.other_cards import cards, explain_on, text
from warpwave.workbench.hardware.catalog import catalog

PROBLEM = AttentionProblem(
    batch=1, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip
ASKED = "mi100,l4,rtx3060,a100,h100,h200,b200,mi300x"


def test_cards_by_name_prefix_and_all() -> None:
    assert [sheet.key for sheet in cards(ASKED)] == [
        "mi100", "l4", "rtx3060", "a100-80gb", "h100", "h200", "b200", "mi300x",
    ]  # fmt: skip
    assert len(cards("all")) == len(catalog()) and len(cards("h200, H200,")) == 1
    for wrong in ("h200,h900", ",", "x"):
        with pytest.raises(InvalidInput, match="explain --gpu all"):
            cards(wrong)
    with pytest.raises(InvalidInput, match="'cpu' is not in the catalog, and a list has only cards"):
        cards("h200,cpu")


def test_each_card_has_a_bar_and_says_what_was_validated() -> None:
    rows = explain_on(PROBLEM, cards(ASKED))
    assert all(row.prediction is not None for row in rows)
    for row in rows:
        p = row.prediction
        assert p is not None and row.bounds.time_us <= p.low_us < p.time_us < p.high_us
    assert [row.card for row in rows if row.prediction and row.prediction.points] == [
        *("a100-80gb", "h100", "h200", "b200", "mi300x")
    ]
    said = text(PROBLEM, rows)
    assert "checked    h200: 9 measurements" in said and "checked    mi300x: Predicted over published" in said
    (last,) = (line for line in said.splitlines() if line.startswith("* few or no times are known there"))
    assert last.endswith(": mi100, l4, rtx3060")
    slow, fast = (next(r.prediction for r in rows if r.card == c) for c in ("rtx3060", "h100"))
    assert slow is not None and fast is not None and slow.time_us > 10 * fast.time_us


def test_no_two_cells_of_the_table_touch() -> None:
    rows = explain_on(PROBLEM, cards("all"))
    _, _, header, *lines = text(PROBLEM, rows).splitlines()
    begin = header.index("kernel")
    for row, line in zip(rows, lines, strict=False):
        assert line.startswith(f"{row.card} * " if row.prediction and not row.prediction.points else f"{row.card} ")
        assert line[begin - 2 : begin] == "  " and line[begin:].split()[0] == (row.kernel or "-")


def test_a_card_that_no_kernel_of_ours_serves_is_not_given_a_time_of_one() -> None:
    rows = explain_on(PROBLEM, cards("t4"), kernel="auto")
    assert rows[0].kernel != "flash_fwd"
    refused = explain_on(PROBLEM, cards("l4"), kernel="hopper/flash_fwd")
    assert refused[0].prediction is None and "sm_90" in refused[0].refusal
    assert "no kernel serves it" in text(PROBLEM, refused)


def test_the_command() -> None:
    said = CliRunner().invoke(app, ["explain", "--gpu", "l4,h200", "--seqlen-q", "512"])
    assert said.exit_code == 0 and "l4 *" in said.output and "nine in ten" in said.output
    data = json.loads(CliRunner().invoke(app, ["explain", "--gpu", "l4,h200", "--json"]).output)
    assert [row["card"] for row in data] == ["l4", "h200"]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises, as where it is not installed
from tests.workbench.explain.test_other_cards import CALLS, cards, explain_on, text
for problem in CALLS:
    print(text(problem, explain_on(problem, cards("all"))))
"""
CALLS = (  # their kernels are chosen by rules, tables and constants of every family
    replace(PROBLEM, requires_grad=True),
    replace(PROBLEM, dtype="float32", precision="default", requires_grad=True),
    replace(PROBLEM, head_dim=512, head_dim_v=512),
    replace(PROBLEM, seqlen_q=1, num_heads_kv=2),
    replace(PROBLEM, mask_shape=(1, 1, 4096, 4096)),
)


def test_a_cards_kernels_do_not_depend_on_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text(problem, explain_on(problem, cards('all')))}\n" for problem in CALLS)


def test_estimated_bounds_are_called_so() -> None:
    masked = replace(PROBLEM, mask_shape=(1, 1, 4096, 4096))
    assert "the mask was not read" in text(masked, explain_on(masked, cards("l4,h200")))
    assert "estimate" not in text(PROBLEM, explain_on(PROBLEM, cards("l4,h200")))
    latent = replace(PROBLEM, seqlen_q=1, num_heads_kv=1, head_dim=576, head_dim_v=512)
    assert text(latent, explain_on(latent, cards("l4,h200"))).count("Bounds are estimates: k and v count as two") == 1


def test_a_span_of_times_has_the_unit_of_each_end() -> None:
    """Two ends in one unit name it once."""
    long = replace(PROBLEM, seqlen_q=65536, seqlen_k=65536)
    said = text(long, explain_on(long, cards("l4,h200")))
    assert re.search(r"[\d,.]+ to [\d,.]+ (us|ms)", said) and not re.search(
        r"\d us to [\d,.]+ us|ms to [\d,.]+ ms", said
    )
