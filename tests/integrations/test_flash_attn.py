"""The doors to FlashAttention 2, 3 and 4: its documented examples to the letter, and its test grid, against the
definition in its documentation computed in float64."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import warpwave
from warpwave import InvalidInput, UnsupportedProblem
from warpwave.integrations import flash_attn, flash_attn_3, flash_attn_4, pytorch

# Lengths of its tests, and head sizes; `full` runs all of them, `make test` a few.
LENGTHS = [
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (1, 147),
    (64, 128),
    (239, 1),
    (3, 799),
    (129, 128),
]
HEAD_DIMS = [32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256]
FEW = [(113, 203), (1, 147), (239, 1)]


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """The documented mask: keys in [i + seqlen_k - seqlen_q - left, i + seqlen_k - seqlen_q + right], both included."""
    shift = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k)
    shown = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window[0] >= 0:
        shown &= keys >= shift - window[0]
    if window[1] >= 0:
        shown &= keys <= shift + window[1]
    return shown & (keys <= shift) if causal else shown


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of one sequence, (seqlen, heads, head_dim), in a dtype; differentiable."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        distance = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])
        scores = scores - slopes.to(dtype)[:, None, None] * distance.abs().to(q.device)
    shown = visible(q.shape[0], k.shape[0], causal, window).to(q.device)
    some = shown.any(1, keepdim=True)  # a row without keys has no gradients, not NaN
    scores = scores.masked_fill(~shown & some, -torch.inf)
    lse = scores.logsumexp(-1).masked_fill(~some[:, 0], -torch.inf)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(dtype)[:, None])
    probabilities = torch.exp(scores - lse.masked_fill(~some[:, 0], 0.0)[..., None]).masked_fill(~some, 0.0)
    return torch.einsum("hij,jhd->ihd", probabilities, v), lse


def assert_close(mine: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Compares results of inputs of a dtype."""
    allowed: Any = {"rtol": 1.6e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    torch.testing.assert_close(mine, exact.to(mine.dtype), **allowed)


def qkv(lengths: tuple[int, int], heads: tuple[int, int] = (4, 2), head_dim: int = 16, batch: int = 2) -> Any:
    torch.manual_seed(0)
    q = torch.randn(batch, lengths[0], heads[0], head_dim)
    k, v = torch.randn(2, batch, lengths[1], heads[1], head_dim)
    return q, k, v


# Documented examples --------------------------------------------------------------------------------------------------

# "If seqlen_q = 2 and seqlen_k = 5, the causal mask (1 = keep, 0 = masked out) is", and of 5 and 2.
CAUSAL = {
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}
FUNCTIONS: dict[str, Any] = {
    "2": flash_attn.flash_attn_func,
    "3": flash_attn_3.flash_attn_func,
    "4": lambda *given, **said: flash_attn_4.flash_attn_func(*given, **said)[0],
}


@pytest.mark.parametrize("version", FUNCTIONS)
@pytest.mark.parametrize("lengths", CAUSAL)
def test_documented_causal_masks(lengths: tuple[int, int], version: str) -> None:
    """With equal scores, out is the mean of the visible values: of unit vectors, the mask divided by its row's sum."""
    q, k = torch.zeros(1, lengths[0], 1, 8), torch.zeros(1, lengths[1], 1, 8)
    v = torch.eye(lengths[1], 8)[None, :, None]
    mask = torch.tensor(CAUSAL[lengths], dtype=torch.float32)
    out = FUNCTIONS[version](q, k, v, causal=True)[0, :, 0, : lengths[1]]
    torch.testing.assert_close(out, mask / mask.sum(1, keepdim=True).clamp(min=1))
    assert not out[mask.sum(1) == 0].any()  # "If the row of the mask is all zero, the output will be zero."


@pytest.mark.parametrize("version", FUNCTIONS)
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (1, 2), (-1, 1), (3, -1)])
def test_documented_windows(window: tuple[int, int], version: str) -> None:
    for lengths in ((4, 7), (6, 3)):
        q, k = torch.zeros(1, lengths[0], 1, 8), torch.zeros(1, lengths[1], 1, 8)
        v = torch.eye(lengths[1], 8)[None, :, None]
        for causal in (False, True):
            mask = visible(*lengths, causal, window).float()
            said: Any = window if version != "4" else tuple(None if side < 0 else side for side in window)
            out = FUNCTIONS[version](q, k, v, causal=causal, window_size=said)[0, :, 0, : lengths[1]]
            torch.testing.assert_close(out, mask / mask.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, -5), (-3, 2)])
def test_sides_of_a_negative_sum_are_no_window_in_version_4(window: tuple[int, int], causal: bool) -> None:
    """Version 4 resolves a window after causality has made its right side 0."""
    q, k, v = qkv((6, 9), (2, 2))
    if causal and window[0] >= 0:
        expected = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window)
    else:
        expected = flash_attn.flash_attn_func(q, k, v, causal=causal)
    assert flash_attn_4.flash_attn_func(q, k, v, causal=causal, window_size=window)[0].equal(expected)


@pytest.mark.parametrize("window", [(-2, 5), (3, -1), (-2, None), (None, -1)])
def test_a_negative_side_is_a_distance_in_version_4(window: Any) -> None:
    q, k, v = qkv((6, 9), (2, 2))
    offsets = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedProblem, match="window_size is"):
        flash_attn_4.flash_attn_func(q, k, v, window_size=window)
    with pytest.raises(UnsupportedProblem, match="window_size is"):
        flash_attn_4.flash_attn_varlen_func(
            q[0], k[0, :6], v[0, :6], cu_seqlens_q=offsets, cu_seqlens_k=offsets, window_size=window
        )


def test_a_sink_of_another_number_of_heads_is_named() -> None:
    q, k, v = qkv((6, 9), (2, 2))
    with pytest.raises(InvalidInput, match="learnable_sink has shape"):
        flash_attn_4.flash_attn_func(q, k, v, learnable_sink=torch.zeros(3))


def test_documented_groups_of_heads() -> None:
    """Of 6 query heads and 2 of keys, heads 0 to 2 read head 0."""
    q, k, v = qkv((5, 7), (6, 2))
    out = flash_attn.flash_attn_func(q, k, v)
    for head in range(6):
        one = flash_attn.flash_attn_func(q[:, :, head : head + 1], k[:, :, [head // 3]], v[:, :, [head // 3]])
        torch.testing.assert_close(out[:, :, head : head + 1], one)


# Signatures -----------------------------------------------------------------------------------------------------------

SOURCES: dict[str, tuple[str, Any]] = {  # distribution -> the file of its functions
    "flash-attn": ("flash_attn/flash_attn_interface.py", flash_attn),
    "flash-attn-3": ("flash_attn_interface.py", flash_attn_3),
    "flash-attn-4": ("flash_attn/cute/interface.py", flash_attn_4),
}


@pytest.mark.parametrize("distribution", SOURCES)
def test_signatures_are_those_of_the_installed_package(distribution: str) -> None:
    """Read in the package's source, which needs no GPU; a new version of it may add arguments at the end."""
    path, module = SOURCES[distribution]
    try:
        source = Path(str(importlib.metadata.distribution(distribution).locate_file(path))).read_text()
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
        pytest.skip(f"{distribution} is not installed")
    functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name in module.__all__:
        theirs = [*functions[name].args, *functions[name].kwonlyargs]
        mine = inspect.signature(getattr(module, name)).parameters
        assert [arg.arg for arg in theirs][: len(mine)] == list(mine), name
        defaults = [ast.literal_eval(default) for default in functions[name].defaults]
        given = [p.default for p in mine.values() if p.default is not inspect.Parameter.empty]
        assert defaults[: len(given)] == given, name


# The grid -------------------------------------------------------------------------------------------------------------


def check_dense(lengths: tuple[int, int], head_dim: int, number: int) -> None:
    heads = [(4, 4), (4, 2), (4, 1)][number % 3]
    causal, local, capped, alibi = (bool(number >> bit & 1) for bit in range(4))
    q, k, v = qkv(lengths, heads, head_dim)
    window = (min(20, lengths[1]), min(9, lengths[1])) if local else (-1, -1)
    slopes = torch.rand(2, heads[0]) * 0.3 if alibi else None
    softcap = 5.0 if capped else 0.0
    out, lse, empty = flash_attn.flash_attn_func(q, k, v, 0.0, None, causal, window, softcap, slopes, False, True)
    assert lse.shape == (2, heads[0], lengths[0]) and lse.dtype == torch.float32 and not empty.numel()
    for b in range(2):
        exact, exact_lse = definition(q[b], k[b], v[b], causal, window, softcap, None if slopes is None else slopes[b])
        assert_close(out[b], exact)
        assert_close(lse[b], exact_lse)


def test_the_grid_in_part() -> None:
    for number, (lengths, head_dim) in enumerate(itertools.product(FEW, (40, 59, 128))):
        check_dense(lengths, head_dim, number)
    for number in range(9, 16):
        check_dense((31, 45), 32, number)


@pytest.mark.full
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_grid(lengths: tuple[int, int], head_dim: int) -> None:
    for number in range(16):
        check_dense(lengths, head_dim, number)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_as_warpwave_rounds_them(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv((17, 29)))
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert out.dtype == dtype and torch.equal(out, warpwave.attention(q, k, v, causal=True))


def test_packed_tensors_are_the_same_calls_and_have_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in qkv((9, 9), (4, 4)))
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    stacked = torch.stack([q, k, v], 2).detach().requires_grad_()
    functions: list[Any] = [flash_attn.flash_attn_qkvpacked_func, flash_attn_3.flash_attn_qkvpacked_func]
    for function in functions:
        out = function(stacked, causal=True)
        assert torch.equal(out, expected)
        assert torch.equal(torch.autograd.grad(out, stacked, dout)[0], torch.stack(gradients, 2))
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, stacked[:, :, 1:], causal=True), expected)
    joint = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    grouped = flash_attn_3.flash_attn_qkvpacked_func(joint, num_heads_q=4)
    assert torch.equal(grouped, flash_attn.flash_attn_func(q, k[:, :, :2], v[:, :, :2]))
    for wrong in (stacked[0], stacked[:, :, :2]):
        with pytest.raises(warpwave.InvalidInput, match="qkv has shape"):
            flash_attn.flash_attn_qkvpacked_func(wrong)
        with pytest.raises(warpwave.InvalidInput, match="qkv has shape"):
            flash_attn_3.flash_attn_qkvpacked_func(wrong)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal: bool) -> None:
    lengths_q, lengths_k = [5, 1, 12, 0], [9, 6, 3, 4]
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    q, k, v = torch.randn(18, 4, 16), *torch.randn(2, 22, 2, 16)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 12, 9, 0.0, 0.3, causal, (4, -1), 0.0, None, False, True
    )
    assert lse.shape == (4, 18)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        exact, exact_lse = definition(q[rows], k[keys], v[keys], causal, (4, -1), scale=0.3)
        assert_close(out[rows], exact)
        assert_close(lse[:, rows], exact_lse)
    said: Any = {"softmax_scale": 0.3, "causal": causal}
    third = flash_attn_3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9, window_size=(4, -1), **said)
    torch.testing.assert_close(third, out)
    both: Any = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    fourth = flash_attn_4.flash_attn_varlen_func(q, k, v, **both, window_size=(4, None), return_lse=True, **said)
    torch.testing.assert_close(fourth, (out, lse))
    assert flash_attn_4.flash_attn_varlen_func(q, k, v, None, cu_q, cu_k, 12, 9, **said)[1] is None
    kv = torch.stack([k, v], 1)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 12, 9, 0.0, 0.3, causal, (4, -1))
    torch.testing.assert_close(packed, out)
    square = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([k, k, v], 1), cu_k, 9, causal=causal)
    assert torch.equal(square, flash_attn.flash_attn_varlen_func(k, k, v, cu_k, cu_k, 9, 9, causal=causal))


def test_varlen_on_pages_and_with_used_lengths() -> None:
    lengths_k, used = [9, 6], torch.tensor([7, 6], dtype=torch.int32)
    cu_q, cu_k = offsets([4, 2]), offsets(lengths_k)
    q, k, v = torch.randn(6, 4, 16), *torch.randn(2, 15, 2, 16)
    cut = flash_attn_3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 9, seqused_k=used, causal=True)
    for b, rows in enumerate((slice(0, 4), slice(4, 6))):
        keys = slice(int(cu_k[b]), int(cu_k[b] + used[b]))
        assert_close(cut[rows], definition(q[rows], k[keys], v[keys], True)[0])
    pool = torch.randn(2, 5, 4, 2, 16)
    table = torch.tensor([[3, 0, 2], [4, 1, 1]], dtype=torch.int32)
    for b, i in itertools.product(range(2), range(9)):
        if i < lengths_k[b]:
            pool[0, table[b, i // 4], i % 4], pool[1, table[b, i // 4], i % 4] = k[cu_k[b] + i], v[cu_k[b] + i]
    plain = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 9, causal=True)
    paged = flash_attn.flash_attn_varlen_func(q, pool[0], pool[1], cu_q, cu_k, 4, 9, causal=True, block_table=table)
    torch.testing.assert_close(paged, plain)
    lengths = cu_k.diff()
    of_4 = flash_attn_4.flash_attn_varlen_func(
        q, pool[0], pool[1], None, cu_q, seqused_k=lengths, page_table=table, causal=True
    )
    torch.testing.assert_close(of_4[0], plain)
    dense_q = q[[0, 1, 4, 5]].view(2, 2, 4, 16)  # the last two queries of each
    both = flash_attn_4.flash_attn_varlen_func(
        dense_q, pool[0], pool[1], seqused_k=lengths, page_table=table, causal=True
    )[0]
    torch.testing.assert_close(both[1], plain[4:])


def test_arguments_that_programs_pass_besides_those_declared() -> None:
    """transformers passes the longest sequences as tensors of one integer."""
    q, k, v = (t.flatten(0, 1) for t in qkv((5, 7)))
    cu_q, cu_k = offsets([5, 5]), offsets([7, 7])
    longest: Any = (cu_q.diff().max(), cu_k.diff().max())
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, causal=True)
    loose: dict[str, Any] = {"causal": 1}
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **loose), expected)
    most_q, most_k = longest
    assert torch.equal(flash_attn_3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, causal=True), expected)
    out, _ = flash_attn_4.flash_attn_varlen_func(q, k, v, None, cu_q, cu_k, most_q, most_k, causal=True)
    assert torch.equal(out, expected)
    wrong: Any = 3.7
    with pytest.raises(warpwave.InvalidType, match="max_seqlen_q"):
        flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, wrong, 7)
    with pytest.raises(warpwave.InvalidType, match="num_splits"):
        flash_attn_4.flash_attn_varlen_func(q[None], k[None], v[None], num_splits=wrong)


def test_dense_sequences_of_version_4_have_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in qkv((5, 7)))
    out, _ = flash_attn_4.flash_attn_varlen_func(q, k, v, causal=True)
    assert_close(out, flash_attn.flash_attn_func(q, k, v, causal=True))
    out.sum().backward()
    assert k.grad is not None and k.grad.any()


def test_no_softcap_is_none_too() -> None:
    q, k, v = qkv((5, 7))
    none: Any = None
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, softcap=none), flash_attn.flash_attn_func(q, k, v))


# What is refused ------------------------------------------------------------------------------------------------------


def test_what_is_unsupported_raises_with_the_reason() -> None:
    q, k, v = qkv((5, 7))
    one, angles = torch.ones(1), torch.ones(8, 1)
    cu = offsets([5])
    first: Any = (q[0], k[0, :5], v[0, :5], cu, cu, 5, 5)
    mask: Any = lambda *given: True  # noqa: E731
    cache: Any = (q, *torch.zeros(2, 2, 8, 2, 16))
    two: Any = flash_attn.flash_attn_with_kvcache
    three: Any = flash_attn_3.flash_attn_with_kvcache
    varlen: Any = flash_attn.flash_attn_varlen_func
    varlen_3: Any = flash_attn_3.flash_attn_varlen_func
    varlen_4: Any = flash_attn_4.flash_attn_varlen_func
    four: Any = flash_attn_4.flash_attn_func
    new: Any = {"k": k[:, :5], "v": v[:, :5], "cache_seqlens": 2}
    table = torch.zeros(2, 1, dtype=torch.int32)
    calls: list[tuple[str, Any]] = [
        ("return_attn_probs", lambda: flash_attn.flash_attn_func(q, k, v, 0.1, return_attn_probs=True)),
        ("return_attn_probs", lambda: varlen(*first, 0.1, return_attn_probs=True)),
        ("dropout_p is 0.5; calls on a cache", lambda: varlen(*first, 0.5, block_table=table)),
        ("qv", lambda: flash_attn_3.flash_attn_func(q, k, v, qv=q)),
        ("k_descale is not supported", lambda: flash_attn_3.flash_attn_func(q, k, v, k_descale=one)),
        ("attention_chunk", lambda: flash_attn_3.flash_attn_func(q, k, v, attention_chunk=4)),
        ("seqused_q", lambda: varlen_3(*first, seqused_q=one)),
        ("rotary_seqlens", lambda: three(*cache, rotary_seqlens=one)),
        ("cu_seqlens_k_new", lambda: three(*cache, cu_seqlens_k_new=cu)),
        ("mask_mod", lambda: flash_attn_4.flash_attn_func(q, k, v, mask_mod=mask)),
        ("qv", lambda: four(q, k, v, 0.5)),
        ("block_sparse_tensors", lambda: flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=(one,))),
        ("gather_kv_indices", lambda: flash_attn_4.flash_attn_func(q, k, v, None, one)),
        ("score_mod", lambda: varlen_4(*first[:3], None, *first[3:], score_mod=mask)),
        ("cu_seqlens_k", lambda: varlen_4(q, k, v, cu_seqlens_k=cu)),
        ("cache_batch_idx or cache_leftpad", lambda: two(*cache, block_table=table, cache_leftpad=table[:, 0])),
        ("rotary_cos was given with cache_leftpad", lambda: two(*cache, **new, rotary_cos=angles, rotary_sin=angles,
         cache_leftpad=table[:, 0], causal=True)),
        ("5 tokens and k 1", lambda: two(*cache, k[:, :1], v[:, :1], angles, angles, 2, causal=True)),
        ("one position", lambda: two(*cache, **new, rotary_cos=angles, rotary_sin=angles)),
    ]  # fmt: skip
    for reason, call in calls:
        with pytest.raises(UnsupportedProblem, match=reason):
            call()
    wrong: list[tuple[str, Any]] = [
        ("one of k and v", lambda: two(*cache, k)),
        ("without k and v", lambda: two(*cache, rotary_cos=angles, rotary_sin=angles)),
        ("one of rotary_cos and rotary_sin", lambda: two(*cache, **new, rotary_cos=angles)),
        ("cu_seqlens_k is None", lambda: varlen(*first[:4], None, 5, 5, block_table=table)),
    ]
    for reason, call in wrong:
        with pytest.raises(warpwave.InvalidInput, match=reason):
            call()
    with pytest.raises(warpwave.InvalidType, match=r"cache_seqlens is .*int64"):
        two(*cache, cache_seqlens=torch.tensor([1, 2]))
    assert not cache[1].any()  # nothing was written


def test_errors_name_the_arguments_of_the_caller() -> None:
    """Also where warpwave's own call has the argument under another name, or torch would fail or broadcast first."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    q, cu = torch.randn(2, 3, 4, 16), ints(0, 3, 6)
    stored, new, pool = torch.zeros(2, 2, 16, 2, 16), torch.randn(2, 3, 2, 16), torch.zeros(4, 8, 2, 16)
    flat, keys, table = q.flatten(0, 1), torch.randn(8, 2, 16), ints(0, 1, 2, 3).view(2, 2)
    cache: dict[str, Any] = {"q": q, "k_cache": stored[0], "v_cache": stored[1], "cache_seqlens": ints(5, 9)}
    appended = cache | {"k": new, "v": new}
    turned = appended | dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(16, 4)) | {"causal": True}
    paged = {"q": q, "k_cache": pool, "v_cache": pool, "cache_seqlens": ints(5, 9)}
    packed = appended | {"q": flat, "k": new.flatten(0, 1), "v": new.flatten(0, 1), "cu_seqlens_q": cu}
    varlen = {"q": flat, "k": keys, "v": keys, "cu_seqlens_q": cu, "cu_seqlens_k": ints(0, 4, 8), "max_seqlen_q": 3,
              "max_seqlen_k": 4}  # fmt: skip
    pages = varlen | {"k": pool, "v": pool}
    torchs = {"query": flat, "key": keys, "value": keys, "cu_seq_q": cu, "cu_seq_k": ints(0, 4, 8), "max_q": 3,
              "max_k": 4, "enable_gqa": True, "seqused_k": ints(4, 4)}  # fmt: skip
    two, three = flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache
    varlen_2, varlen_3 = flash_attn.flash_attn_varlen_func, flash_attn_3.flash_attn_varlen_func
    varlen_4, varlen_of_torch = flash_attn_4.flash_attn_varlen_func, pytorch.varlen_attn
    wrong: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [  # a call, what is changed, the message
        (two, cache, {"k_cache": None}, "k_cache is a NoneType"),
        (two, cache, {"v_cache": stored[1, :, :8]}, "v_cache has .* so its length is 8"),
        (two, cache, {"cache_seqlens": ints(5)}, r"cache_seqlens has .* so its batch is 1; q has batch 2"),
        (two, cache, {"cache_leftpad": ints(1, 1, 1)}, "cache_leftpad has .* so its batch is 3"),
        (two, cache, {"cache_seqlens": ints(5), "cache_leftpad": ints(1, 1)}, "cache_seqlens has .* batch is 1"),
        (two, cache, {"cache_batch_idx": ints(1)}, "cache_batch_idx has .* batch is 1"),
        (two, cache, {"k_cache": stored[0, :1], "v_cache": stored[1, :1]}, "q has 2 sequences and k_cache 1 rows"),
        (two, appended, {"v": new.half()}, "v is torch.float16 and q torch.float32"),
        (two, appended, {"k": new[:, :, :1]}, "k has .* so its num_heads_kv is 1; k_cache has num_heads_kv 2"),
        (two, appended, {"v": new.to("meta")}, "v is on meta"),
        (two, turned, {"rotary_cos": torch.ones(16, 4).long()}, "rotary_cos is torch.int64"),
        (two, turned, {"rotary_sin": torch.ones(16, 3)}, "rotary_sin has .* so its rotary_dim/2 is 3"),
        (two, paged, {"block_table": table[:1]}, "block_table has .* so its batch is 1"),
        (two, paged, {"block_table": table.long()}, "block_table is torch.int64"),
        (three, paged, {"page_table": torch.cat([table, table])}, "page_table has .* so its batch is 4"),
        (three, packed, {"cu_seqlens_q": cu[:0]}, r"cu_seqlens_q is empty; it must hold batch \+ 1 offsets"),
        (three, packed, {"cache_seqlens": ints(5)}, "cache_seqlens has .* so its batch is 1; cu_seqlens_q has batch 2"),
        (three, packed, {"q": None}, "q is a NoneType"),
        (varlen_2, pages, {"block_table": table[:1]}, "block_table has .* so its batch is 1"),
        (varlen_2, pages, {"block_table": table, "cu_seqlens_q": cu[:2]}, r"cu_seqlens_k has .* batch\+1 is 3"),
        (varlen_2, pages, {"block_table": table, "cu_seqlens_k": cu.long()}, "cu_seqlens_k is torch.int64"),
        (varlen_3, varlen, {"seqused_k": ints(4)}, "seqused_k has .* so its batch is 1"),
        (varlen_3, varlen, {"seqused_k": ints(4, 4), "cu_seqlens_k": ints(0, 1, 1).bool()}, "cu_seqlens_k is torch.bo"),
        (varlen_3, varlen, {"seqused_k": ints(4, 4), "v": None}, "v is a NoneType"),
        (varlen_4, varlen, {"k": None, "max_seqlen_k": None}, "k is a NoneType"),
        (varlen_4, pages, {"page_table": "x"}, "page_table is a str"),
        (varlen_4, {"q": q, "k": stored[0], "v": stored[1]}, {"seqused_k": ints(4)}, "seqused_k has .* batch is 1"),
        (varlen_of_torch, torchs, {"key": None}, "key is a NoneType"),
        (varlen_of_torch, torchs, {"value": keys.half()}, "value is torch.float16 and query torch.float32"),
        (varlen_of_torch, torchs, {"cu_seq_k": None}, "cu_seq_k is None"),
        (varlen_of_torch, torchs, {"max_k": "x"}, "max_k is 'x'"),
        (flash_attn.flash_attn_qkvpacked_func, {}, {"qkv": None}, "qkv is a NoneType"),
        (flash_attn.flash_attn_kvpacked_func, {"q": q}, {"kv": [1]}, "kv is a list"),
        (flash_attn_3.flash_attn_qkvpacked_func, {"qkv": q}, {"num_heads_q": "x"}, "num_heads_q is 'x'"),
        (varlen_2, varlen, {"causal": cu}, "causal is tensor"),
        (varlen_3, varlen, {"deterministic": cu}, "deterministic is tensor"),
    ]  # fmt: skip
    for function, good, change, text in wrong:
        with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType), match=text):
            function(**good | change)
    assert not stored.any()


def test_dropout_of_every_training_function() -> None:
    """All of FlashAttention-2's functions for training drop the pairs that warpwave drops, forward and backward."""
    q, k, v = (t.requires_grad_() for t in qkv((9, 9), (4, 4)))
    stacked = torch.stack([q, k, v], 2)
    cu = offsets([9, 9])
    flat: Any = [t.flatten(0, 1) for t in (q, k, v, stacked)]
    varlen: Any = flash_attn.flash_attn_varlen_func
    calls: list[Any] = [
        lambda: flash_attn.flash_attn_func(q, k, v, 0.3, causal=True),
        lambda: flash_attn.flash_attn_qkvpacked_func(stacked, 0.3, causal=True),
        lambda: flash_attn.flash_attn_kvpacked_func(q, stacked[:, :, 1:], 0.3, causal=True),
        lambda: varlen(*flat[:3], cu, cu, 9, 9, 0.3, causal=True),
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(flat[3], cu, 9, 0.3, causal=True),
        lambda: flash_attn.flash_attn_varlen_kvpacked_func(flat[0], flat[3][:, 1:], cu, cu, 9, 9, 0.3, causal=True),
    ]
    results = []
    for call in (lambda: warpwave.attention(q, k, v, causal=True, dropout_p=0.3), *calls):
        torch.manual_seed(3)
        out = call().view(q.shape)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
        results.append((out, *gradients))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])
    assert not torch.equal(flash_attn.flash_attn_func(q, k, v, 0.3, causal=True), results[0][0])  # a new seed


@pytest.mark.parametrize("version", FUNCTIONS)
def test_deterministic(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """deterministic=True reaches the call; False leaves torch's setting in force."""
    asked: list[Any] = []
    modules = {"2": flash_attn, "3": flash_attn_3, "4": flash_attn_4}

    def watching(*given: Any, **said: Any) -> Any:
        asked.append(said["deterministic"])
        return warpwave.attention(*given, **said)

    monkeypatch.setattr(modules[version], "attention", watching)
    q, k, v = (t.requires_grad_() for t in qkv((5, 7)))
    results = [FUNCTIONS[version](q, k, v, deterministic=value) for value in (True, False)]
    assert asked == [True, None] and torch.equal(*results)
    pair = [torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) for out in results]
    torch.testing.assert_close(*pair)
    lengths: Any = (*(t.flatten(0, 1) for t in (q, k, v)), offsets([5, 5]), offsets([7, 7]), 5, 7)
    asked.clear()

    def watching_varlen(*given: Any, **said: Any) -> Any:
        asked.append(said["deterministic"])
        return warpwave.attention_varlen(*given, **said)

    monkeypatch.setattr(flash_attn, "attention_varlen", watching_varlen)
    for value in (True, False):
        after_v = (None,) if version == "4" else ()  # qv
        modules[version].flash_attn_varlen_func(*lengths[:3], *after_v, *lengths[3:], deterministic=value)
    assert asked == [True, None]
