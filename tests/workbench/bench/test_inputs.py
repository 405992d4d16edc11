from typing import Any

import pytest
import torch

import warpwave
from tests.workbench.bench.test_workloads import ROW, parse
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.correctness import Sample
from warpwave.workbench.bench.inputs import MOST_INPUT_SETS, call_arguments, make_operands, sets_for_cold_cache
from warpwave.workbench.bench.workloads import SuiteError

PACKED = {"lengths": [7, [3, 12], 1, 100], "num_heads_q": 4, "head_dim": 16, "dtype": "float32"}
DENSE = {"batch": 3, "seqlen_q": 40, "seqlen_k": 90, "num_heads_q": 4, "head_dim": 16, "dtype": "float32"}


def problem_of(case: dict[str, Any]) -> AttentionProblem:
    problem: AttentionProblem = parse(case).cases[0].problem
    return problem


def test_operands_are_seeded_and_normal() -> None:
    problem = problem_of({**ROW, "seqlen_q": 1000})
    q, k, _ = make_operands(problem, "cpu", seed=1)[:3]
    assert torch.equal(q, make_operands(problem, "cpu", seed=1).q)
    assert not torch.equal(q, make_operands(problem, "cpu", seed=2).q)
    assert not torch.equal(q, k)
    assert q.mean().abs() < 0.05 and (q.std() - 1).abs() < 0.05


OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": "top_left", "window_size": [9, 3]},
    {"window_size": [5, 0], "sinks": True},
    {"softcap": 2.0, "softmax_scale": 0.5},
    {"alibi": True, "causal": True},
    {"num_heads_kv": 2, "head_dim_v": 24},
]


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS,
        {"mask": "padding"},
        {"mask": "random", "causal": True},
        {"bias": True},
        {"bias": True, "alibi": True, "mask": "padding"},
    ],
    ids=str,
)
def test_a_dense_case_is_what_the_public_call_computes(options: dict[str, Any]) -> None:
    agrees_with_the_public_call({**DENSE, **options})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_packed_case_is_what_the_public_call_computes(options: dict[str, Any]) -> None:
    agrees_with_the_public_call({**PACKED, **options})


def agrees_with_the_public_call(case: dict[str, Any]) -> None:
    """The call passes the verdict, and with any single option left out it does not."""
    problem = problem_of(case)
    operands = make_operands(problem, "cpu")
    arguments = call_arguments(problem, operands)
    function = warpwave.attention_varlen if problem.packed else warpwave.attention
    sample = Sample(problem, operands)
    verdict = sample.judge(function(*operands[:3], **arguments))
    assert verdict.passed, verdict.reason
    for name in set(arguments) - {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}:
        fewer = {key: value for key, value in arguments.items() if key != name}
        assert not sample.judge(function(*operands[:3], **fewer)).passed, name


def test_the_call_describes_the_same_problem() -> None:
    case = {**DENSE, "causal": True, "mask": "padding", "bias": True, "alibi": True, "sinks": True, "softcap": 3.0}
    for problem in (problem_of(case), problem_of({**PACKED, "causal": True, "window_size": [9, -1]})):
        operands = make_operands(problem, "cpu")
        assert warpwave.explain(*operands[:3], **call_arguments(problem, operands)).problem == problem


def test_random_masks_hide_half() -> None:
    mask = make_operands(problem_of({**DENSE, "mask": "random"}), "cpu").mask
    assert mask.shape == (1, 1, 40, 90) and mask.float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_enough_sets_to_leave_the_cache_cold() -> None:
    problem = problem_of({**ROW, "seqlen_q": 4096, "num_heads_q": 16, "head_dim": 64})
    sets = sets_for_cold_cache(problem, 50 << 20)
    assert (sets - 1) * problem.compulsory_bytes < 4 * (50 << 20) <= sets * problem.compulsory_bytes
    assert sets_for_cold_cache(problem, 1) == 2
    assert sets_for_cold_cache(problem_of(ROW), 50 << 20) == MOST_INPUT_SETS


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
def test_a_paged_cache_is_called_as_its_users_do_and_judged(case: dict[str, Any], page_size: int) -> None:
    """The pages hold what the dense call reads, so both get the same result, which passes; another fails."""
    from warpwave.workbench.bench.contenders import ours

    problem = problem_of({**case, "causal": True, "page_size": page_size})
    assert problem.page_size == page_size
    operands = make_operands(problem, "cpu")
    prepared = ours("eager", problem, operands)
    out = prepared.to_out(prepared.call())
    assert prepared.kernel == "eager"
    sample = Sample(problem, operands)
    assert sample.judge(out).passed
    assert not sample.judge(out.roll(1, 0)).passed


@pytest.mark.parametrize("cache", ["float8_e4m3fn:head", "int8:token"])
@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
def test_a_cache_of_8_bits_is_judged_by_its_own_numbers(case: dict[str, Any], cache: str) -> None:
    from warpwave.workbench.bench.contenders import ours

    suite = parse({**case, "dtype": "bfloat16", "causal": True, "page_size": 16, "cache": cache})
    assert suite.cases[0].name.endswith(f"page16 {cache}")
    problem = suite.cases[0].problem
    operands = make_operands(problem, "cpu")
    assert f"{problem.dtype_kv}:{problem.kv_factors}" == cache and str(operands.k.dtype)[6:] == problem.dtype_kv
    prepared = ours("eager", problem, operands)
    sample = Sample(problem, operands)
    assert sample.judge(prepared.to_out(prepared.call())).passed
    other = operands._replace(v_descale=operands.v_descale * 1.1)
    assert not sample.judge(ours("eager", problem, other).call()).passed
    for changes in ({"cache": "int8"}, {"cache": cache, "dtype": "float32"}, {"cache": ["int8:token"], "page_size": 0}):
        with pytest.raises(SuiteError):
            parse({**case, "dtype": "bfloat16", "page_size": 16, **changes})


def test_the_factors_of_cells_beyond_a_sequence_are_positive() -> None:
    suite = parse({**DENSE, "dtype": "float16", "page_size": 256, "cache": "int8:token"})
    operands = make_operands(suite.cases[0].problem, "cpu")
    for numbers, factor in ((operands.k, operands.k_descale), (operands.v, operands.v_descale)):
        assert numbers.eq(0).all(-1).any() and factor.dtype == torch.float32 and (factor > 0).all()


def test_paged_cases_have_names_and_are_checked() -> None:
    suite = parse({**DENSE, "page_size": [16, 64]})
    assert [c.name.endswith(f"page{n}") for c, n in zip(suite.cases, (16, 64), strict=True)] == [True, True]
    for page_size in (0, 48, 2.5, True):
        with pytest.raises(SuiteError, match="page_size must be a power of two"):
            parse({**DENSE, "page_size": page_size})
    with pytest.raises(SuiteError, match="a paged cache takes no mask"):
        parse({**DENSE, "page_size": 16, "bias": True})
