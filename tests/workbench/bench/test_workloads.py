import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.draw_model_grid import SUITES
from warpwave.problem import Causal
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.workloads import SuiteError, load_suite, parse_suite, suite_names

ROW = {"batch": 1, "seqlen_q": 8, "num_heads_q": 2, "head_dim": 4, "dtype": "float32"}


def parse(*cases: Any, **table: Any) -> Any:
    return parse_suite("s", {"description": "d", "cases": list(cases), **table}, source="s.toml")


def test_every_shipped_suite_is_valid() -> None:
    assert {"forward", "decode", "prefill", "training", "tiny", "float32", "quick"} <= set(suite_names())
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
        ({**ROW, "softcap": -1}, "softcap must be a finite number >= 0, got -1"),
        ({**ROW, "window_size": [1, 2, 3]}, r"window_size must be \[left, right\], whole numbers from -1"),
        ({**ROW, "window_size": 3}, r"window_size must be \[left, right\]"),
        ({**ROW, "mask": "some"}, "mask must be one of padding, random, got 'some'"),
        ({**ROW, "hot": 1}, "hot must be true or false, got 1"),
        ({**ROW, "gradients": "all"}, "gradients must be true or false, got 'all'"),
        ({**ROW, "gradients": True, "page_size": 16}, "a paged cache takes no mask and no bias, and has no gradients"),
        ({**ROW, "goal": 0}, "goal must be above 0, got 0"),
        ({**ROW, "goal": {"speed": 2}}, "goal must be a number above 0 or { over_launch_us = number }"),
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


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({**ROW, "batch": []}, r"cases\[0\]: batch is an empty list; give at least one value, or leave it out"),
        ({**ROW, "mask": []}, "mask is an empty list"),
        ({**ROW, "batch": 10**15}, "batch must be at most 2,147,483,647, got 1000000000000000"),
        ({**ROW, "batch": 10**5000}, "batch must be at most 2,147,483,647, got too large to be shown"),
        ({**ROW, "batch": 2_000_000}, "batch is 2,000,000; a call can have 1,048,576 sequences at most"),
        ({**ROW, "seqlen_q": 200_000_000}, "seqlen_q is 200,000,000; a sequence can have 134,217,728 tokens at most"),
        ({**ROW, "batch": 1000, "seqlen_q": 100_000_000}, "q would take 3.2 TB, more than any GPU has"),
        ({**ROW, "seqlen_q": 1_000_000, "mask": "random"}, "mask would take 1.0 TB, more than any GPU has"),
        ({**ROW, "softmax_scale": 10**400}, "softmax_scale must be a finite number >= 0"),
        ({**ROW, "softcap": float("inf")}, "softcap must be a finite number >= 0, got inf"),
        ({**ROW, "precision": 1e-320}, "or a relative error between 0 and 1"),
        ({**ROW, "precision": {}}, "precision must be one of"),
        ({**ROW, "cache": {}, "page_size": 16}, "cache must be one of float8_e4m3fn:head, "),
        ({**ROW, "window_size": [10**20, 0]}, r"window_size must be \[left, right\], whole numbers from -1"),
        ({**ROW, "page_size": 2**62}, "page_size must be a power of two"),
        ({**ROW, "goal": {}}, "goal must be a number above 0 or"),
        ({**ROW, "goal": {"ratio": []}}, "goal must be above 0, got"),
        ({**ROW, "goal": float("inf")}, "goal must be above 0, got inf"),
        ({**ROW, "dtype": "\x1b[31m"}, r"got '\\x1b\[31m'"),
        ({"num_heads_q": 2, "head_dim": 4, "dtype": "float32", "lengths": [10**12]}, "each of lengths must be"),
    ],
)  # fmt: skip
def test_what_no_machine_could_measure_is_named_before_it_is_tried(case: Any, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        parse(case)


def test_cases_are_counted_before_they_are_made() -> None:
    """Three lists of 399 values stand for more cases than anybody can wait for, with --only as without."""
    long = list(range(1, 400))
    suite = {"description": "d", "cases": [ROW, {**ROW, "batch": long, "seqlen_q": long, "head_dim": long}]}
    for only in ("", "no such case"):
        started = time.perf_counter()
        with pytest.raises(SuiteError, match=r"its lists stand for 63,521,200 cases; a suite can have 10,000 at most"):
            parse_suite("s", suite, source="s.toml", only=only)
        assert time.perf_counter() - started < 1


def test_only_the_cases_that_are_asked_for_are_kept() -> None:
    suite = {"description": "d", "cases": [{**ROW, "batch": list(range(1, 2001))}]}
    (case,) = parse_suite("s", suite, source="s.toml", only=" 1234x8 ").cases
    assert case.problem.batch == 1234
    with pytest.raises(SuiteError, match="no case of s has '9999x' in its name; the first is 'd4 1x8 h2 fp32'"):
        parse_suite("s", suite, source="s.toml", only="9999x")


def test_a_suite_whose_name_no_record_can_hold(tmp_path: Path) -> None:
    for name in ("e\x1b[31m.toml", "b\udcff.toml"):
        with pytest.raises(SuiteError, match="has characters that cannot be shown; rename it"):
            load_suite(str(tmp_path / name))
    with pytest.raises(SuiteError, match="cannot be read: File name too long"):
        load_suite("x" * 300 + ".toml")


def test_a_mistake_in_a_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"cases\[1\]: the case 'd4 1x8 h2 fp32' appears twice"):
        parse(ROW, {**ROW, "causal": False})
    packed = {"num_heads_q": 2, "head_dim": 4, "dtype": "float32"}
    with pytest.raises(SuiteError, match=r"a name has the sum of packed lengths .* put it in another suite"):
        parse({**packed, "lengths": [100, 300]}, {**packed, "lengths": [200, 200]})
    with pytest.raises(SuiteError, match="cases must be a list of at least one table"):
        parse()
    with pytest.raises(SuiteError, match="description must be a string"):
        parse(ROW, description=1)
    with pytest.raises(SuiteError, match=r"no suite 'fast'; give one of .*, forward, "):
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


def test_decode_is_the_table_of_the_goals() -> None:
    suite = load_suite("decode")
    assert suite.modes == ("graph",)
    goals = {(c.problem.batch, c.problem.seqlen_k): (c.hot, c.goal) for c in suite.cases if c.goal is not None}
    assert {shape: round(1 / goal.ratio, 2) for shape, (_, goal) in goals.items() if goal.ratio} == {
        (1, 1024): 0.80,
        (1, 8192): 0.85,
        (1, 65536): 0.97,
        (16, 4096): 1.0,
        (64, 8192): 1.0,
        (128, 2048): 1.0,
    }
    assert [shape for shape, (hot, _) in goals.items() if hot] == [(1, 1024), (1, 8192)]
    for case in suite.cases:
        p = case.problem
        assert (p.seqlen_q, p.num_heads_q, p.num_heads_kv, p.head_dim, p.dtype) == (1, 32, 8, 128, "bfloat16")


def test_case_report_0_has_the_operations_of_the_report() -> None:
    """Time x rate gives 33, 134, 33 and 9 MFLOP, and the last has 16 blocks, one a query."""
    first_four = [c.problem for c in load_suite(SUITES / "case_report_0.toml").cases[:4]]
    assert [(p.head_dim, round(p.flops / 1e6)) for p in first_four] == [(512, 34), (2048, 134), (4096, 34), (8192, 8)]
    assert first_four[3].rows * first_four[3].num_heads_q == 16


def test_varlen_is_a_mix_and_an_even_load() -> None:
    problems = [c.problem for c in load_suite("varlen").cases]
    assert {len(p.lengths or ()) for p in problems} == {64}
    assert min(problems[0].items()) == (38, 38) and problems[0].seqlen_q == 5431
    assert {length for length, _ in problems[-1].items()} == {768}


def test_packed_lengths() -> None:
    packed = {"num_heads_q": 2, "head_dim": 4, "dtype": "float32"}
    (case,) = parse({**packed, "lengths": [5, [1, 7], 5]}).cases
    p = case.problem
    assert p.packed and (p.batch, p.seqlen_q, p.seqlen_k, p.total_q, p.total_k) == (3, 5, 7, 11, 17)
    assert p.lengths == ((5, 5), (1, 7), (5, 5)) and case.name == "d4 3 packed 11/17 h2 fp32"
    assert p.visible_pairs == 2 * (25 + 7 + 25)
    assert len(parse({**packed, "lengths": [[5, [1, 7]], [[2, 2], 4, 4]]}).cases) == 2
    with pytest.raises(SuiteError, match="batch follows from lengths; leave it out"):
        parse({**packed, "batch": 3, "lengths": [5]})
    with pytest.raises(SuiteError, match="packed sequences take no mask and no bias"):
        parse({**packed, "lengths": [5], "bias": True})


def test_options_of_a_case() -> None:
    (case,) = parse(
        {
            **ROW,
            "window_size": [5, 0],
            "softcap": 3.0,
            "sinks": True,
            "alibi": True,
            "bias": True,
            "mask": "random",
            "hot": True,
            "goal": {"over_launch_us": 2},
        }
    ).cases
    assert case.name == "d4 1x8 h2 fp32 window5,0 softcap3 sinks alibi random-mask bias hot"
    assert case.hot is True and case.goal == Goal(over_launch_us=2.0)
    p = case.problem
    assert (p.window_size, p.softcap, p.has_sinks, p.alibi_shape) == ((5, 0), 3.0, True, (2,))
    assert (p.mask_shape, p.bias_shape, p.bias_dtype) == ((1, 1, 8, 8), (1, 2, 8, 8), "float32")
    trained, plain = parse({**ROW, "gradients": [True, False]}).cases
    assert (trained.name, trained.problem.requires_grad) == (f"{plain.name} gradients", True)
    assert not plain.problem.requires_grad
    windows = parse({**ROW, "window_size": [[5, 0], [-1, 3]]}).cases
    assert [c.problem.window_size for c in windows] == [(5, 0), (-1, 3)]
    assert [c.hot for c in parse({**ROW, "hot": [True, False]}).cases] == [True, False]


def test_padding_is_counted() -> None:
    p = parse({**ROW, "batch": 3, "causal": True, "mask": "padding"}).cases[0].problem
    mask = make_operands(p, "cpu").mask
    assert mask.shape == (3, 1, 1, 8) and mask.sum(-1).flatten().tolist() == [8, 6, 4]
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    assert p.visible_pairs == 2 * int((mask & causal).sum())


def test_modes_and_kernels_of_a_suite() -> None:
    suite = parse(ROW, modes=["graph", "streams"], kernels=["eager"])
    assert suite.modes == ("graph", "streams") and suite.kernels == ("eager",)
    assert parse(ROW).modes == ("auto",) and parse(ROW).kernels == ("auto",)
    with pytest.raises(SuiteError, match="modes must be a list of auto, eager, graph, streams, got \\['fast'\\]"):
        parse(ROW, modes=["fast"])


def test_a_case_may_name_its_own_kernels() -> None:
    suite = parse(ROW | {"kernels": ["eager", "naive"], "head_dim": [64, 128]}, kernels=["tiled"])
    assert [case.kernels for case in suite.cases] == [("eager", "naive")] * 2 and suite.kernels == ("tiled",)
    assert parse(ROW).cases[0].kernels == ()
    with pytest.raises(SuiteError, match=r"cases\[0\]: kernels must be a list of names, got 'eager'"):
        parse(ROW | {"kernels": "eager"})
