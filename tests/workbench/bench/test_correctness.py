from dataclasses import replace

import pytest
import torch

from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.verify.reference import oracle

PROBLEM = AttentionProblem(
    batch=3,
    seqlen_q=100,
    seqlen_k=130,
    num_heads_q=6,
    num_heads_kv=2,
    head_dim=16,
    head_dim_v=24,
    dtype="float32",
    softmax_scale=0.25,
    causal=Causal(),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("causal", [None, Causal(), Causal("top_left")])
def test_the_sample_is_part_of_the_whole_result(dtype: str, causal: Causal | None) -> None:
    """The sample is cut out as a problem of its own; its exact result must be the whole one's."""
    problem = replace(PROBLEM, dtype=dtype, causal=causal)
    operands = make_operands(problem, "cpu")
    exact = oracle(problem, operands).out
    verdict = Sample(problem, operands).judge(exact.to(operands.q.dtype))
    assert verdict.passed and verdict.reason == ""
    assert verdict.error_ratio is not None and verdict.error_ratio <= 1.0  # rounded once: no kernel can be nearer
    assert verdict.rows == 2 * 64 * 4


def test_wrong_results_fail() -> None:
    problem = replace(PROBLEM, dtype="bfloat16")
    operands = make_operands(problem, "cpu")
    sample = Sample(problem, operands)
    right = oracle(problem, operands).out.bfloat16()
    top_left = oracle(replace(problem, causal=Causal("top_left")), operands).out.bfloat16()
    one_key_more = oracle(replace(problem, causal=None, window_size=(-1, 1)), operands).out.bfloat16()
    coarser = (right.float() + 0.01 * torch.randn_like(right.float())).bfloat16()
    for wrong in (top_left, one_key_more, coarser, torch.zeros_like(right)):
        verdict = sample.judge(wrong)
        assert not verdict.passed and "error" in verdict.reason and "rounding model" in verdict.reason


def test_the_last_row_is_always_seen() -> None:
    operands = make_operands(PROBLEM, "cpu")
    out = oracle(PROBLEM, operands).out.float()
    out[-1, -1, -1] += 1e-3
    verdict = Sample(PROBLEM, operands).judge(out)
    assert not verdict.passed and verdict.max_error == pytest.approx(1e-3, rel=0.01)


def test_what_cannot_be_compared_fails_with_its_reason() -> None:
    operands = make_operands(PROBLEM, "cpu")
    sample = Sample(PROBLEM, operands)
    out = oracle(PROBLEM, operands).out.float()
    assert "expected (3, 100, 6, 24) torch.float32" in sample.judge(out.transpose(1, 2)).reason
    assert "torch.float64" in sample.judge(out.double()).reason
    out[0, 0, 0, 0] = torch.nan
    verdict = sample.judge(out)
    assert not verdict.passed and "NaN" in verdict.reason and verdict.rms_error is None
