"""The tables by which families choose their configs: rows, records, and what `explain` prints of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_dispatch import drawn_problem
from warpwave import dispatch, explain
from warpwave.gpu import ARCHS, INTERPRETER, Gpu
from warpwave.kernels import flash_bwd, flash_fwd, large_head_dim, split_kv, three_kernel
from warpwave.kernels.flash_bwd import choice as flash_bwd_choice
from warpwave.kernels.flash_fwd import config as flash_fwd_configs
from warpwave.kernels.hopper import flash_bwd as hopper_flash_bwd
from warpwave.kernels.hopper import flash_fwd as hopper_flash_fwd
from warpwave.kernels.hopper import large_head_dim as hopper_large_head_dim
from warpwave.kernels.hopper.flash_bwd import config as hopper_flash_bwd_configs
from warpwave.kernels.hopper.flash_fwd import choice as hopper_flash_fwd_choice
from warpwave.kernels.hopper.large_head_dim import config as hopper_large_head_dim_configs
from warpwave.kernels.large_head_dim import choice as large_head_dim_choice
from warpwave.kernels.rules import Rule, by_width, chooser, notes
from warpwave.kernels.split_kv import choice as split_kv_choice
from warpwave.kernels.three_kernel import choice as three_kernel_choice
from warpwave.problem import AttentionProblem, Causal

ROOT = Path(__file__).parents[2]
H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
GPUS = (*(replace(Gpu.for_arch(arch), num_sms=132, memory_bytes=80 << 30) for arch in ARCHS), INTERPRETER)
SHORT = (16, 64, 512)
OF_GRADIENTS = [kernel.NAME for kernel in dispatch.GRADIENT_KERNELS]
RowsOf = Callable[[AttentionProblem, Gpu], list[Rule[Any]]]


def _only(rule_of: Callable[[AttentionProblem, Gpu], Rule[Any]]) -> RowsOf:
    return lambda problem, gpu: [rule_of(problem, gpu)]


# Kernel, its tables, and the function that finds the rows of a call.
TABLES: tuple[tuple[ModuleType, tuple[Rule[Any], ...], RowsOf], ...] = (
    (
        flash_fwd,
        (*flash_fwd_configs.RULES, *flash_fwd_configs.RULES_OF_MASKS, flash_fwd_configs.OF_FACTORS),
        flash_fwd_configs.rows_of,
    ),
    (flash_bwd, (*flash_bwd_choice.RULES, *flash_bwd_choice.RULES_OF_MASKS), flash_bwd_choice.rows_of),
    (
        three_kernel,
        (
            *three_kernel_choice.TILES,
            three_kernel_choice.OF_MASKS,
            three_kernel_choice.OF_STEPS,
            *three_kernel_choice.LAUNCHES,
        ),
        three_kernel_choice.rows_of,
    ),
    (
        hopper_flash_fwd,
        (
            *hopper_flash_fwd_choice.RULES,
            *hopper_flash_fwd_choice.RULES_OF_PARTS,
            *hopper_flash_fwd_choice.RULES_OF_QUANTIZED,
        ),
        _only(hopper_flash_fwd_choice.rule_of),
    ),
    (hopper_flash_bwd, hopper_flash_bwd_configs.RULES, _only(hopper_flash_bwd_configs.rule_of)),
    (
        hopper_large_head_dim,
        (*hopper_large_head_dim_configs.RULES, hopper_large_head_dim_configs.OF_COLUMNS),
        hopper_large_head_dim_configs.rows_of,
    ),
    (large_head_dim, (*large_head_dim_choice.RULES, *large_head_dim_choice.LIGHTER), large_head_dim_choice.rows_of),
    (split_kv, split_kv_choice.RULES, split_kv_choice.rows_of),
)
NAMES = [module.NAME for module, _, _ in TABLES]


FEW = (48, 4096, 300, 128)  # queries of a block of 64, on many keys, more than two blocks an SM
# Seeds that reach every row within 1,100 and 2,400 drawn calls; most others do not within 8,000.
SEEDS = {"large_head_dim": "large_head_dim 5", "hopper/flash_fwd": "hopper/flash_fwd 171"}


def calls_of(module: ModuleType, seed: str, count: int) -> Iterator[tuple[AttentionProblem, Gpu]]:
    """Yields drawn calls that a kernel can run: half of them on Hopper, all if it runs nowhere else, a third of few
    queries and keys."""
    rng, backward = random.Random(seed), module.NAME in OF_GRADIENTS
    for i in range(count):
        problem, gpu = drawn_problem(rng), H200 if i % 2 or module.NAME.startswith("hopper/") else rng.choice(GPUS)
        if i % 3 == 0 and not problem.page_size and not problem.packed:
            few: dict[str, Any] = {"seqlen_q": rng.choice(SHORT[:2]), "seqlen_k": rng.choice(SHORT), "mask_shape": None}
            if module in (flash_fwd, flash_bwd) and i % 2:
                few |= {"seqlen_q": 25, "seqlen_k": 32}
            problem = replace(problem, bias_shape=None, bias_dtype=None, **few)
        if i % 11 == 0 and not problem.page_size and not problem.packed:  # plain calls, rare among the drawn ones
            plain: dict[str, Any] = {"window_size": (-1, -1), "softcap": 0.0, "alibi_shape": None, "mask_shape": None}
            problem = replace(problem, bias_shape=None, bias_dtype=None, head_dim=rng.choice((136, 160, 192)), **plain)
            problem = replace(problem, head_dim_v=rng.choice((128, problem.head_dim)))
        if (
            module is flash_bwd and i % 7 == 0 and not problem.packed
        ):  # few queries or keys, and no sums over the others
            queries, keys = random.Random(i).choice(((20, 500), (50, 500), (100, 500), (500, 10), (500, 30), (500, 77)))
            problem = replace(problem, seqlen_q=queries, seqlen_k=keys, num_heads_kv=problem.num_heads_q)
            alone: dict[str, Any] = {"mask_shape": None, "bias_shape": None, "bias_dtype": None, "alibi_shape": None}
            problem = replace(problem, has_sinks=False, causal=None, window_size=(-1, -1), **alone)
        if module is split_kv and i % 13 == 1 and not problem.page_size and not problem.packed:
            # Decode of many sequences with narrow heads.
            alone = {"mask_shape": None, "bias_shape": None, "bias_dtype": None, "alibi_shape": None, "causal": None}
            problem = replace(problem, window_size=(-1, -1), error_budget=None, precision="default", **alone)
            problem = replace(problem, dtype="bfloat16", batch_invariant=False, batch=40, seqlen_q=1, seqlen_k=3000)
            problem = replace(problem, num_heads_q=8, num_heads_kv=8, head_dim=64, head_dim_v=64)
        if module is hopper_flash_fwd and i % 13 == 0 and not problem.page_size and not problem.packed:
            # A causal mask alone over as many keys as queries, or over a long prompt, or no mask, which no drawn call
            # has.
            queries, keys, heads, width = random.Random(i).choice(
                ((512, 512, 32, 128), (1536, 1536, 8, 128), (2048, 16384, 32, 128), (1024, 1024, 40, 64), FEW)
            )
            alone = {"window_size": (-1, -1), "softcap": 0.0, "alibi_shape": None, "mask_shape": None}
            problem = replace(
                problem, bias_shape=None, bias_dtype=None, seqlen_q=queries, seqlen_k=keys, batch=1, **alone
            )
            causal = Causal() if width == 128 else None
            problem = replace(problem, causal=causal, num_heads_q=heads, num_heads_kv=heads)
            problem = replace(problem, head_dim=width, head_dim_v=width)
        if getattr(module, "QUANTIZED", False) and rng.random() < 0.2:
            blocks = rng.choice(((0, 0, 0), (128, 64, 64), (128, 128, 128)))
            problem = replace(
                problem, dtype="float8_e4m3fn", descale_blocks=blocks, dtype_out="bfloat16", mask_shape=None,
                bias_shape=None, bias_dtype=None, error_budget=None, precision="default", requires_grad=False,
                alibi_shape=None,
            )  # fmt: skip
            if module is hopper_flash_fwd and i % 3 == 1 and not problem.packed:
                problem = replace(problem, seqlen_q=8192, seqlen_k=8192)
            if rng.random() < 1 / 6:
                shape = (1, 1, problem.seqlen_q, problem.seqlen_k)
                problem = replace(problem, bias_shape=shape, bias_dtype="bfloat16")
        if backward:
            problem = replace(problem, requires_grad=False, deterministic=rng.random() < 0.3)
        if module is hopper_flash_fwd and i % 17 == 0 and not problem.page_size:
            problem = replace(problem, dropout_p=0.1)
        if module is hopper_flash_fwd and problem.page_size and problem.kv_factors != "token":
            continue  # no row depends on pages
        if module is hopper_flash_fwd and problem.kv_factors == "token":
            problem = replace(problem, dtype="bfloat16")
        if problem.kv_factors == "token" and i % 3 == 1 and not problem.packed:
            problem = replace(problem, seqlen_q=8192, seqlen_k=8192)
        if not module.why_not(problem, gpu):
            yield problem, gpu


def shared_of(config: Any) -> dict[str, int]:
    """Returns what no row decides: how many heads share a tile."""
    return {"heads": config.heads} if hasattr(config, "heads") else {}


@pytest.mark.parametrize(("module", "rules", "rows_of"), TABLES, ids=NAMES)
def test_every_row_is_reached_and_its_choice_is_the_default(
    module: ModuleType, rules: tuple[Rule[Any], ...], rows_of: RowsOf
) -> None:
    """Draws until every row is reached, and some hundreds of calls at least."""
    named, reached = {rule.where for rule in rules}, set[str]()
    for n, (problem, gpu) in enumerate(calls_of(module, SEEDS.get(module.NAME, module.NAME), 8000)):
        if n >= 300 and reached == named:
            break
        rows = rows_of(problem, gpu)
        if n >= 300 and reached.issuperset(rule.where for rule in rows):
            continue
        reached |= {rule.where for rule in rows}
        config = dispatch.default_config(module, problem, gpu)
        first = rows[0].choices[0]
        if len(rows) == 1 and isinstance(first, module.Config):
            said = " ".join(module.notes(problem, gpu, config))
            changed = any(words in said for words in ("made smaller", "are padded", "num_splits = "))
            choices = [replace(choice, **shared_of(config)) for choice in rows[0].choices]
            assert config in choices or changed, f"{problem.describe()} on {gpu.name}"
    assert reached == named


@pytest.mark.parametrize("rules", [rules for _, rules, _ in TABLES], ids=NAMES)
def test_every_row_has_a_record_or_states_that_it_was_not_measured(rules: tuple[Rule[Any], ...]) -> None:
    for rule in rules:
        assert rule.choices and rule.gain, rule.where
        if rule.record:
            files = [ROOT / "benchmarks" / "records" / rule.record, ROOT / "docs" / "notes" / rule.record]
            assert any(file.is_file() for file in files), rule.where
        else:
            assert rule.gain.startswith("not measured"), rule.where
    assert len({rule.where for rule in rules}) == len(rules)


@pytest.mark.parametrize(("module", "rules", "rows_of"), TABLES, ids=NAMES)
def test_explain_prints_the_rows_that_decided(
    module: ModuleType, rules: tuple[Rule[Any], ...], rows_of: RowsOf
) -> None:
    """For the forward with the kernel's config, and for the backward below its kernel."""
    drawn = calls_of(module, f"explained {module.NAME}", 1000)
    able = [
        (problem, gpu)
        for problem, gpu in drawn
        if problem.flops and gpu is H200 and not (problem.packed or problem.page_size)
    ][:3]
    assert able
    for problem, gpu in able:
        rows = rows_of(problem, gpu)
        if module.NAME in OF_GRADIENTS:
            kernel = next(m for m in dispatch.gradient_kernels(problem, gpu))
            if kernel.NAME != module.NAME:
                rows = next(rows_of(problem, gpu) for m, _, rows_of in TABLES if m.NAME == kernel.NAME)
            said = str(explain(replace(problem, requires_grad=True), gpu=gpu))
            said = said[said.index(f"BACKWARD   {kernel.NAME}") :]
        else:
            said = str(explain(replace(problem, requires_grad=False), gpu=gpu, kernel=module.NAME))
        said = " ".join(said.split())
        for rule in rows:
            assert " ".join(f"{rule.where}: {rule.gain}".split()) in said, rule.where


def test_rows_that_read_no_size_are_decided_once_per_kind() -> None:
    """And a row that reads a size is decided anew for each call."""
    read = list[int]()

    def holds(problem: AttentionProblem) -> bool:
        read.append(problem.seqlen_q)
        return problem.seqlen_q > 100

    rules = (
        Rule("never", lambda problem: problem.head_dim == 1, (0,), "not measured"),
        Rule("long", holds, (1,), "not measured"),
        Rule("else", lambda problem: True, (2,), "not measured"),
    )
    rule_of = chooser(rules, lambda problem, gpu: problem)
    problem = replace(drawn_problem(random.Random(0)), head_dim=64, error_budget=None)
    found = [rule_of(replace(problem, seqlen_q=n), H200).where for n in (7, 300, 7)]
    assert found == ["else", "long", "else"] and len(read) == 4, "once without sizes, then once a call"


def test_the_sentence_of_a_row() -> None:
    rules = by_width("here", lambda call: True, ("a", "b", "c"), "1.1 times as fast", "some.log")
    assert [rule.choices for rule in rules] == [("a",), ("b",), ("c",)]
    assert notes(rules[:1], True) == ["here, head_dim up to 64: 1.1 times as fast (some.log)"]
    assert notes(rules[:1], False)[0].endswith("; the table would choose another config")
    assert "made smaller to fit shared memory" in notes(rules[:1], True, False)[0]
