"""The arithmetic of `AttentionProblem` against counting pair by pair, on thousands of generated problems."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpwave import dispatch
from warpwave import problem as problem_module
from warpwave.gpu import Gpu
from warpwave.problem import SIZES, AttentionProblem, Band, Causal, by_kind

LENGTH = st.integers(0, 9)
EDGE = st.none() | st.integers(-11, 11)
SIDE = st.integers(-1, 9)
CAUSAL = st.sampled_from([None, Causal(), Causal("top_left")])

PLAIN = AttentionProblem(
    batch=2,
    seqlen_q=5,
    seqlen_k=7,
    num_heads_q=4,
    num_heads_kv=2,
    head_dim=8,
    head_dim_v=6,
    dtype="float16",
    softmax_scale=0.5,
)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    """Problems with any positional mask, dense or packed with known lengths."""
    group, heads_kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lengths = tuple(draw(st.lists(st.tuples(LENGTH, LENGTH), max_size=4)))
    packed = draw(st.booleans())
    batch = len(lengths) if packed else draw(st.integers(0, 3))
    return AttentionProblem(
        batch=batch,
        seqlen_q=max((q for q, _ in lengths), default=0) if packed else draw(LENGTH),
        seqlen_k=max((k for _, k in lengths), default=0) if packed else draw(LENGTH),
        num_heads_q=group * heads_kv,
        num_heads_kv=heads_kv,
        head_dim=draw(st.integers(1, 5)),
        head_dim_v=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        softmax_scale=1.0,
        causal=draw(CAUSAL),
        window_size=(draw(SIDE), draw(SIDE)),
        has_sinks=draw(st.booleans()),
        return_lse=draw(st.booleans()),
        packed=packed,
        total_q=sum(q for q, _ in lengths) if packed else 0,
        total_k=sum(k for _, k in lengths) if packed else 0,
        lengths=lengths if packed else None,
    )


def sees(problem: AttentionProblem, seqlen_q: int, seqlen_k: int, i: int, j: int) -> bool:
    """Whether query i sees key j, from the words of the documentation."""
    left, right = problem.window_size
    position = i + seqlen_k - seqlen_q
    if left >= 0 and j < position - left:
        return False
    if right >= 0 and j > position + right:
        return False
    if problem.causal is None:
        return True
    return j <= (i if problem.causal.alignment == "top_left" else position)


def visible_cells(problem: AttentionProblem) -> list[tuple[int, int, int]]:
    """(sequence, query, key) of every visible pair of one head."""
    return [
        (b, i, j)
        for b, (seqlen_q, seqlen_k) in enumerate(problem.items())
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
        if sees(problem, seqlen_q, seqlen_k, i, j)
    ]


@given(LENGTH, LENGTH, EDGE, EDGE)
def test_band_counts_what_it_shows(seqlen_q: int, seqlen_k: int, low: int | None, high: int | None) -> None:
    band = Band(low, high)
    cells = [
        (i, j)
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
        if (low is None or j - i >= low) and (high is None or j - i <= high)
    ]
    assert [(i, j) for i in range(seqlen_q) for j in band.keys(i, seqlen_k)] == cells
    assert band.pairs(seqlen_q, seqlen_k) == len(cells)
    assert band.keys_seen(seqlen_q, seqlen_k) == len({j for _, j in cells})
    assert band.rows_that_see(seqlen_q, seqlen_k) == len({i for i, _ in cells})


@given(problems())
def test_visible_pairs_flops_and_exponentials(problem: AttentionProblem) -> None:
    pairs = len(visible_cells(problem)) * problem.num_heads_q
    rows = sum(seqlen_q for seqlen_q, _ in problem.items())
    assert problem.rows == rows
    assert problem.visible_pairs == pairs
    assert problem.flops == pairs * 2 * (problem.head_dim + problem.head_dim_v)
    assert problem.exponentials == pairs + problem.has_sinks * rows * problem.num_heads_q
    assert problem.pairs_are_exact


@given(problems())
def test_compulsory_bytes_are_each_needed_cell_once(problem: AttentionProblem) -> None:
    size = {"float16": 2, "bfloat16": 2, "float32": 4}[problem.dtype]
    rows = sum(seqlen_q for seqlen_q, _ in problem.items()) * problem.num_heads_q
    keys = len({(b, j) for b, _, j in visible_cells(problem)}) * problem.num_heads_kv
    queries = len({(b, i) for b, i, _ in visible_cells(problem)}) * problem.num_heads_q
    assert problem.queries_needed == queries
    expected = ((queries + keys) * problem.head_dim + (rows + keys) * problem.head_dim_v) * size
    expected += 4 * problem.num_heads_q * problem.has_sinks
    expected += 4 * rows * problem.return_lse
    expected += 8 * (problem.batch + 1) * problem.packed
    assert problem.compulsory_bytes == expected
    assert problem.intensity * max(1, expected) == pytest.approx(problem.flops)


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"mask_shape": (1, 1, 5, 7)}, 35),
        ({"mask_shape": (2, 4, 1, 7)}, 56),
        ({"bias_shape": (1, 4, 5, 7), "bias_dtype": "float16"}, 280),
        ({"bias_shape": (1, 4, 5, 7), "bias_dtype": "float32"}, 560),
        ({"alibi_shape": (4,)}, 16),
        ({"alibi_shape": (2, 4)}, 32),
    ],
)
def test_options_cost_the_bytes_of_their_tensors(options: dict[str, Any], extra: int) -> None:
    assert replace(PLAIN, **options).compulsory_bytes - PLAIN.compulsory_bytes == extra


@given(problems(), st.sampled_from([(1, 1), (1, 0), (0, 1), (0, 0)]))
def test_cells_behind_the_band_are_not_compulsory(problem: AttentionProblem, axes: tuple[int, int]) -> None:
    if problem.packed or not problem.batch:
        return
    rows, keys = (size if axis else 1 for axis, size in zip(axes, (problem.seqlen_q, problem.seqlen_k), strict=True))
    shape = (1, problem.num_heads_q, rows, keys)
    cells = {(i if rows > 1 else 0, j if keys > 1 else 0) for b, i, j in visible_cells(problem) if b == 0}
    if (rows, keys) == (1, 1):
        cells = {(0, 0)}
    extra = replace(problem, mask_shape=shape).compulsory_bytes - problem.compulsory_bytes
    assert extra == problem.num_heads_q * len(cells)


def test_keys_that_a_counted_mask_must_need() -> None:
    padding = replace(PLAIN, mask_shape=(2, 1, 1, 7), mask_visible_pairs=2 * 4 * 5 * 3)  # 3 of 7 keys are real
    assert PLAIN.keys_needed == 2 * 7 * PLAIN.num_heads_kv
    assert padding.keys_needed == 2 * 3 * PLAIN.num_heads_kv
    few = replace(PLAIN, mask_shape=(2, 4, 5, 7), mask_visible_pairs=1)
    assert few.keys_needed == 1, "one pair needs one key, which is all that the count tells"


def test_a_counted_mask_replaces_the_count_by_position() -> None:
    masked = replace(PLAIN, mask_shape=(2, 4, 5, 7), causal=Causal())
    assert not masked.pairs_are_exact
    assert masked.visible_pairs == replace(PLAIN, causal=Causal()).visible_pairs
    counted = replace(masked, mask_visible_pairs=11)
    assert counted.pairs_are_exact
    assert counted.visible_pairs == 11


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5))
def test_unknown_packed_lengths_are_equal_shares(total_q: int, total_k: int, batch: int) -> None:
    packed = replace(PLAIN, packed=True, batch=batch, total_q=total_q, total_k=total_k)
    shares_q, shares_k = zip(*packed.items(), strict=True)
    assert not packed.pairs_are_exact
    for total, shares in ((total_q, shares_q), (total_k, shares_k)):
        assert sum(shares) == total
        assert max(shares) - min(shares) <= 1


def test_window_hides_the_same_keys_whatever_the_causal_alignment() -> None:
    window = replace(PLAIN, window_size=(1, 1))
    seen = {name: set(visible_cells(replace(window, causal=Causal(name)))) for name in ("bottom_right", "top_left")}
    for causal_cells in seen.values():
        assert causal_cells < set(visible_cells(window))


CHANGED: dict[str, Any] = {
    "batch": 3,
    "seqlen_q": 6,
    "seqlen_k": 8,
    "num_heads_q": 6,
    "num_heads_kv": 1,
    "head_dim": 9,
    "head_dim_v": 8,
    "dtype": "bfloat16",
    "softmax_scale": 0.25,
    "causal": Causal(),
    "window_size": (1, -1),
    "mask_shape": (1, 1, 5, 7),
    "bias_shape": (1, 1, 5, 7),
    "bias_dtype": "float32",
    "alibi_shape": (4,),
    "softcap": 1.0,
    "has_sinks": True,
    "precision": "ieee",
    "packed": True,
    "total_q": 1,
    "total_k": 1,
    "lengths": ((1, 1),),
    "mask_visible_pairs": 3,
    "return_lse": True,
    "requires_grad": True,
    "page_size": 16,
    "batch_invariant": True,
    "error_budget": 1e-4,
    "dropout_p": 0.1,
    "deterministic": True,
    "dtype_v": "float8_e5m2",
    "dtype_out": "float16",
    "descale_blocks": (0, 64, 0),
    "dtype_kv": "int8",
    "kv_factors": "token",
    "v_in_k": True,
}


def test_cache_key_changes_with_every_field() -> None:
    assert set(CHANGED) == {f.name for f in fields(AttentionProblem)}
    keys = [PLAIN.cache_key()] + [replace(PLAIN, **{name: value}).cache_key() for name, value in CHANGED.items()]
    keys.append(replace(PLAIN, causal=Causal("top_left")).cache_key())
    assert len(set(keys)) == len(keys)


@given(problems())
def test_equal_problems_have_equal_keys(problem: AttentionProblem) -> None:
    same = AttentionProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)})
    assert hash(same) == hash(problem)
    assert same.cache_key() == problem.cache_key()


def test_cache_key_is_the_same_in_another_process() -> None:
    code = f"from warpwave.problem import *; print({PLAIN!r}.cache_key())"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60
        )
        assert run.stdout.strip() == PLAIN.cache_key()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["seqlen 5 x 7", "heads 4/2", "head_dim 8/6", "float16"]),
        ({"causal": Causal()}, ["causal"]),
        ({"causal": Causal("top_left")}, ["causal top-left"]),
        ({"window_size": (2, -1)}, ["window (2, -1)"]),
        ({"mask_shape": (1, 1, 5, 7)}, ["mask (1, 1, 5, 7)"]),
        ({"bias_shape": (1, 1, 5, 7), "bias_dtype": "float32"}, ["bias (1, 1, 5, 7) float32"]),
        ({"alibi_shape": (4,)}, ["ALiBi"]),
        ({"softcap": 15.0}, ["softcap 15"]),
        ({"has_sinks": True}, ["sinks"]),
        ({"dtype": "float32", "precision": "tf32"}, ["precision tf32"]),
        ({"packed": True, "total_q": 9, "total_k": 11}, ["packed, 9 and 11 tokens, at most 5 x 7"]),
        ({"return_lse": True, "requires_grad": True}, ["with lse", "with gradients"]),
        ({"dropout_p": 0.25}, ["dropout 0.25"]),
        ({"requires_grad": True, "deterministic": True}, ["with deterministic gradients"]),
    ],
)
def test_describe_names_what_is_out_of_the_ordinary(options: dict[str, Any], words: list[str]) -> None:
    text = replace(PLAIN, **options).describe()
    assert all(word in text for word in words)
    assert all(word not in PLAIN.describe() for word in words if options)


def test_causal_refuses_an_unknown_corner() -> None:
    with pytest.raises(ValueError, match="must be 'bottom_right' or 'top_left'"):
        Causal("diagonal")  # type: ignore[arg-type]


# Kinds ----------------------------------------------------------------------------------------------------------------


def test_a_kind_leaves_sizes_out_and_nothing_else() -> None:
    for name, value in CHANGED.items():
        assert (replace(PLAIN, **{name: value}).kind is PLAIN.kind) == (name in (*SIZES, "softmax_scale")), name
    assert replace(PLAIN, softcap=1.0).kind is replace(PLAIN, softcap=2.0).kind
    assert replace(PLAIN, dropout_p=0.1).kind is replace(PLAIN, dropout_p=0.2).kind
    masks = [replace(PLAIN, mask_shape=shape) for shape in ((2, 1, 5, 7), (3, 1, 9, 8), (2, 4, 5, 7), (2, 1, 1, 7))]
    assert masks[0].kind is masks[1].kind and len({m.kind for m in masks}) == 3


def test_a_rule_is_evaluated_once_a_kind() -> None:
    seen = []

    @by_kind
    def rule(problem: AttentionProblem, factor: int) -> int:
        seen.append(factor)
        return factor * problem.head_dim

    for seqlen in range(1, 20):
        assert rule(replace(PLAIN, seqlen_q=seqlen, batch=seqlen), 3) == 24
    assert seen == [3]
    assert rule(replace(PLAIN, head_dim=16), 3) == 48 and rule(PLAIN, 4) == 32


def test_kinds_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "MAX_KINDS", 8)
    for head_dim in range(1, 40):
        assert replace(PLAIN, head_dim=head_dim).kind
    assert len(problem_module._kinds) <= 8


@pytest.mark.parametrize("size", ["batch", "seqlen_q", "seqlen_k", "total_q", "total_k"])
def test_a_rule_that_computes_with_a_size_raises(size: str) -> None:
    @by_kind
    def rule(problem: AttentionProblem) -> bool:
        return bool(getattr(problem, size) > 100)

    with pytest.raises(TypeError):
        rule(PLAIN)


def test_with_an_error_budget_rules_may_read_sizes() -> None:
    @by_kind
    def rule(problem: AttentionProblem) -> int:
        return problem.seqlen_k

    for seqlen in (7, 8):
        assert rule(replace(PLAIN, dtype="float32", error_budget=1e-3, seqlen_k=seqlen)) == seqlen


@pytest.mark.parametrize(
    "kernel", [m for m in dispatch.KERNELS if hasattr(m.why_not, "__wrapped__")], ids=lambda m: m.NAME
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_rules_of_kernels_say_the_same_of_every_length(kernel: Any, arch: str) -> None:
    gpu = Gpu.for_arch(arch)
    kinds: list[dict[str, Any]] = [
        {},
        {"dtype": "float32"},
        {"head_dim": 300},
        {"requires_grad": True},
        {"page_size": 48},
        {"dropout_p": 0.1},
    ]
    others: list[dict[str, Any]] = [{}, {"batch": 1, "seqlen_q": 1}, {"seqlen_q": 70_000, "seqlen_k": 90_000}]
    for kind in kinds:
        for sizes in others:
            problem = replace(PLAIN, **kind, **sizes)
            assert kernel.why_not(problem, gpu) == kernel.why_not.__wrapped__(problem, gpu)
