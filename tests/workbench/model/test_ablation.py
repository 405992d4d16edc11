"""Ablations: each edit takes out of the compiled code what it says, and the model says what that would save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.marks import needs_triton
from warpwave.errors import InvalidInput
from warpwave.kernels import flash_fwd
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.cli import app
from warpwave.workbench.hardware.catalog import resolve
from warpwave.workbench.model.ablation import AGREES, EDITS, SOURCE, Ablation, ablate, predicted
from warpwave.workbench.model.steps import ABLATIONS

H200 = resolve("h200")


def _problem(**changes: Any) -> AttentionProblem:
    sizes: dict[str, Any] = {
        "batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "num_heads_q": 16, "num_heads_kv": 16, "head_dim": 64,
        "head_dim_v": 64, "dtype": "bfloat16", "softmax_scale": 0.1, "causal": Causal(),
    }  # fmt: skip
    return AttentionProblem(**(sizes | changes))


COMPILE = """
import json, sys, torch
from tests.workbench.model.test_ablation import H200, _problem
from warpwave.workbench.model.ablation import variants
from warpwave.cached_calls import operands_without_memory
from warpwave.workbench.inspect.compiled import compile_launch
from warpwave.kernels import flash_fwd
problem = _problem()
operands = operands_without_memory(problem)
out = torch.empty_like(operands.q)
config = flash_fwd.configs(problem, H200)[0]
specs = variants(problem, H200, operands, out, config)
assert specs[""] == flash_fwd.specify(problem, H200, operands, out, None, config)
for name in sys.argv[1:]:
    facts = compile_launch(specs[name], H200).facts
    print(json.dumps([name, facts.smem_bytes, facts.instructions]))
"""


def _compiled(*names: str) -> dict[str, tuple[int, Counter[str]]]:
    """Variant -> shared memory and instructions; in a process of its own, where the interpreter is off."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", COMPILE, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (smem, Counter(count)) for name, smem, count in map(json.loads, done.stdout.splitlines())}


def test_each_edit_changes_one_place_of_the_source() -> None:
    text = SOURCE.read_text()
    assert EDITS.keys() == ABLATIONS.keys()
    for name, (old, _) in EDITS.items():
        assert text.count(old) == 1, name


@needs_triton
def test_edits_take_the_exponentials_and_the_second_product_out_of_the_code() -> None:
    facts = _compiled("", "exponentials", "values")
    (smem, whole), (_, without), (less_smem, no_values) = (facts[n] for n in ("", "exponentials", "values"))
    assert without["MUFU.EX2"] < whole["MUFU.EX2"] / 4 and without["HGMMA"] == whole["HGMMA"]
    assert no_values["HGMMA"] < whole["HGMMA"] and no_values["LDGSTS"] < whole["LDGSTS"] and less_smem < smem


@pytest.mark.full
@needs_triton
def test_edits_keep_the_products_and_take_out_mask_loads_and_store() -> None:
    facts = {name: count for name, (_, count) in _compiled("", "mask", "loads", "store").items()}
    assert facts["mask"]["FSEL"] < facts[""]["FSEL"] / 2
    assert facts["loads"]["LDGSTS"] == facts[""]["LDGSTS"]  # the same loads, of one tile
    assert facts["store"]["STG"] == facts[""]["STG"]  # behind a condition that never holds
    assert len({count["HGMMA"] for count in facts.values()}) == 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_model_saves_in_each_ablation_and_never_loses(head_dim: int) -> None:
    problem = _problem(head_dim=head_dim, head_dim_v=head_dim)
    config = flash_fwd.configs(problem, H200)[0]
    ratios = predicted(problem, H200, config)
    assert set(ratios) == set(ABLATIONS) and all(ratio >= 1 for ratio in ratios.values())
    assert ratios["values"] > 1.2 > ratios["store"] and 1.1 > ratios["mask"] > 1  # the diagonal's tiles are masked
    wide = predicted(_problem(head_dim=256, head_dim_v=256), H200, flash_fwd.Config(128, 64, 8, 2))
    assert wide["exponentials"] < predicted(_problem(), H200, flash_fwd.Config(64, 64, 4, 3))["exponentials"]


def test_agreement_is_of_direction_and_size() -> None:
    assert Ablation("values", 1.5, 1.4).agrees and Ablation("store", 1.0, 1.01).agrees
    assert Ablation("loads", 1.1, 0.9).agrees is False  # one saves, the other costs
    assert Ablation("values", 2.0, 2.0 / AGREES - 0.01).agrees is False
    assert Ablation("values", None, 1.0).agrees is None and Ablation("values", 1.0).agrees is None


def test_without_a_gpu_predictions_stand_alone_and_mistakes_are_sentences() -> None:
    found = ablate(_problem(), resolve("l4"))
    if found.whole_us is None:
        assert all(a.measured is None for a in found.found) and "Nothing was timed" in str(found)
    with pytest.raises(InvalidInput, match="does not take this call"):
        ablate(_problem(head_dim=512, head_dim_v=512), H200)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="timed on a GPU"):
            ablate(_problem())
    said = CliRunner().invoke(app, ["explain", "--ablate", "--gpu", "h200", "--causal"])
    assert said.exit_code == 0 and "no second product" in said.output


@pytest.mark.gpu
def test_seven_of_eight_ablations_are_as_the_model_says() -> None:
    found = [a for d in (64, 128) for a in ablate(_problem(head_dim=d, head_dim_v=d)).found if a.name != "mask"]
    assert len(found) == 8 and sum(bool(a.agrees) for a in found) >= 7, [
        (a.name, a.measured, a.predicted) for a in found
    ]
