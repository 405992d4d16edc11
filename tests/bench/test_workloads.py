from pathlib import Path
from typing import Any

import pytest
import torch

from warpwave.bench.workloads import SuiteError, load_suite, make_operands, parse_suite, suite_names
from warpwave.problem import Causal

ROW = {"batch": 1, "seqlen_q": 8, "num_heads_q": 2, "head_dim": 4, "dtype": "float32"}


def parse(*cases: Any, **table: Any) -> Any:
    return parse_suite("s", {"description": "d", "cases": list(cases), **table}, source="s.toml")


def test_every_shipped_suite_is_valid() -> None:
    assert suite_names() == ["float32", "forward", "host", "quick"]
    for name in suite_names():
        suite = load_suite(name)
        assert suite.name == name and suite.description and suite.cases


def test_forward_is_the_table_of_the_goals() -> None:
    cases = load_suite("forward").cases
    rows = {(c.problem.head_dim, c.problem.batch, c.problem.seqlen_q, c.problem.causal) for c in cases}
    shapes = [(16, 1024), (4, 4096), (1, 16384)]
    assert rows == {(d, b, s, c) for d in (64, 128, 256) for b, s in shapes for c in (None, Causal())}
    assert len(cases) == 18
    for case in cases:
        assert case.problem.num_heads_q * case.problem.head_dim == 2048
        assert case.problem.dtype == "bfloat16"


def test_lists_expand_and_defaults_follow() -> None:
    suite = parse({**ROW, "seqlen_q": [8, 16], "causal": [False, True]})
    assert [(c.problem.seqlen_q, c.problem.causal) for c in suite.cases] == [
        (8, None),
        (8, Causal()),
        (16, None),
        (16, Causal()),
    ]
    problem = suite.cases[2].problem
    assert (problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v, problem.softmax_scale) == (16, 2, 4, 0.5)


def test_precisions_are_cases_of_their_own() -> None:
    suite = parse({**ROW, "precision": ["default", "ieee"]})
    assert [c.problem.precision for c in suite.cases] == ["default", "ieee"]
    assert suite.cases[1].name.endswith("ieee")
    with pytest.raises(SuiteError, match=r"precision must be one of .* and is for float32, got 'ieee'"):
        parse({**ROW, "dtype": "float16", "precision": "ieee"})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({**ROW, "batch": 0}, r"s\.toml: cases\[0\]: batch must be a positive integer, got 0"),
        ({**ROW, "batch": True}, "batch must be a positive integer, got True"),
        ({**ROW, "head_dim": "64"}, "head_dim must be a positive integer, got '64'"),
        ({**ROW, "head_dim": [4, 2.5]}, "head_dim must be a positive integer, got 2.5"),
        ({**ROW, "dtype": "fp8"}, "dtype must be one of float16, bfloat16, float32, got 'fp8'"),
        ({**ROW, "dtype": {}}, "dtype must be one of"),
        ({**ROW, "causal": "left"}, "causal must be true, false, 'bottom_right' or 'top_left', got 'left'"),
        ({**ROW, "causal": 1}, "causal must be true, false"),
        ({**ROW, "softmax_scale": -1.0}, "softmax_scale must be a finite number >= 0, got -1.0"),
        ({**ROW, "softmax_scale": float("nan")}, "softmax_scale must be a finite number >= 0, got nan"),
        ({**ROW, "num_heads_kv": 3}, "num_heads_q must be a multiple of num_heads_kv, got 2 and 3"),
        ({**ROW, "seqlen": 8}, "unknown key 'seqlen'; did you mean seqlen_q"),
        ({**ROW, "zzz": 8}, "unknown key 'zzz'; allowed are batch, "),
        ({"batch": 1, "seqlen_q": 8}, "num_heads_q, head_dim, dtype must be given"),
        (3, r"cases\[0\] must be a table, got 3"),
    ],
)
def test_a_mistake_in_a_case_is_named(case: Any, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        parse(case)


def test_a_mistake_in_a_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"cases\[1\]: the case 'd4 1x8 h2 fp32' is there already"):
        parse(ROW, {**ROW, "causal": False})
    with pytest.raises(SuiteError, match="cases must be a list of at least one table"):
        parse()
    with pytest.raises(SuiteError, match="description must be a string"):
        parse(ROW, description=1)
    with pytest.raises(SuiteError, match="no suite 'fast'; give one of float32, forward, host, quick"):
        load_suite("fast")
    (tmp_path / "bad.toml").write_text("cases = = 1")
    with pytest.raises(SuiteError, match=r"bad\.toml is not TOML: .*line 1"):
        load_suite(str(tmp_path / "bad.toml"))


def test_a_suite_may_be_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'description = "d"\n[[cases]]\nbatch = 1\nseqlen_q = 5\nnum_heads_q = 4\nnum_heads_kv = 2\n'
        'head_dim = 8\nhead_dim_v = 16\ndtype = "float16"\ncausal = "top_left"\n'
    )
    (case,) = load_suite(str(tmp_path / "mine.toml")).cases
    assert case.name == "d8/16 1x5 h4/2 fp16 causal-top-left"
    q, k, v = make_operands(case.problem, "cpu")[:3]
    assert (q.shape, k.shape, v.shape) == ((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 16))
    assert q.dtype == torch.float16


def test_operands_are_seeded_and_normal() -> None:
    problem = parse({**ROW, "seqlen_q": 1000}).cases[0].problem
    q, k, _ = make_operands(problem, "cpu", seed=1)[:3]
    assert torch.equal(q, make_operands(problem, "cpu", seed=1).q)
    assert not torch.equal(q, make_operands(problem, "cpu", seed=2).q)
    assert not torch.equal(q, k)
    assert q.mean().abs() < 0.05 and (q.std() - 1).abs() < 0.05
