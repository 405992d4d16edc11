"""`varlen_attn` and the flash operators compute what torch's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpwave
from tests.integrations.test_pytorch import SHAPES, TORCHS, tensors
from warpwave.integrations import pytorch, pytorch_flash


@pytest.fixture
def overridden() -> Iterator[None]:
    handle = pytorch_flash.override("CPU")  # where torch has no kernel of its own for them
    yield
    handle.remove()
    handle.remove()
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(*tensors(SHAPES["4 axes"]))


def packed() -> tuple[Any, torch.Tensor, torch.Tensor]:
    q, k, v = tensors(((9, 4, 16), (12, 2, 16), (12, 2, 16)))
    return [q, k, v], torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 7, 12], dtype=torch.int32)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn(window: tuple[int, int], overridden: None) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    (q, k, v), cu_q, cu_k = packed()
    options: Any = {"window_size": window, "enable_gqa": True, "scale": 0.2}
    aux = varlen.AuxRequest(lse=True)
    out, lse = pytorch.varlen_attn(q, k, v, cu_q, cu_k, 5, 7, return_aux=aux, **options)
    for begin_q, end_q, begin_k, end_k in ((0, 4, 0, 7), (4, 9, 7, 12)):
        one, one_lse = warpwave.attention(
            q[None, begin_q:end_q], k[None, begin_k:end_k], v[None, begin_k:end_k],
            window_size=window, softmax_scale=0.2, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[begin_q:end_q], one[0])
        torch.testing.assert_close(lse[:, begin_q:end_q], one_lse[0])
    through_torch, its_lse = varlen.varlen_attn(q, k, v, cu_q, cu_k, 5, 7, return_aux=aux, **options)
    assert torch.equal(through_torch, out) and torch.equal(its_lse, lse)


def test_varlen_attn_on_a_cache(overridden: None) -> None:
    (q, k, v), cu_q, cu_k = packed()
    used = torch.tensor([6, 5], dtype=torch.int32)
    expected = pytorch.varlen_attn(
        q, k[[*range(6), *range(7, 12)]], v[[*range(6), *range(7, 12)]], cu_q, torch.tensor([0, 6, 11]).int(), 5, 6,
        window_size=(-1, 0), enable_gqa=True,
    )  # fmt: skip
    cut = pytorch.varlen_attn(q, k, v, cu_q, cu_k, 5, 7, window_size=(-1, 0), enable_gqa=True, seqused_k=used)
    torch.testing.assert_close(cut, expected)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    pool = torch.randn(2, 4, 4, 2, 16)
    for b, (begin, length) in enumerate(((0, 6), (7, 5))):
        for of, rows in zip(pool, (k, v), strict=True):
            of[table[b].long()] = F.pad(rows[begin : begin + length], (0, 0, 0, 0, 0, 8 - length)).view(2, 4, 2, 16)
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": used, "block_table": table}
    paged = pytorch.varlen_attn(q, pool[0], pool[1], cu_q, None, 5, 8, num_splits=1, **options)
    torch.testing.assert_close(paged, expected)
    with pytest.raises(warpwave.InvalidInput, match="seqused_k"):
        pytorch.varlen_attn(q, pool[0], pool[1], cu_q, None, 5, 8, enable_gqa=True, block_table=table)
    with pytest.raises(warpwave.InvalidInput, match="enable_gqa"):
        pytorch.varlen_attn(q, k, v, cu_q, cu_k, 5, 7)
    with_other_offsets = pytorch.varlen_attn(q, pool[0], pool[1], cu_q, cu_k.long()[:1], 5, 8, num_splits=1, **options)
    assert with_other_offsets.equal(paged)  # cu_seq_k is not read with block_table


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "cu_seq_q", "cu_seq_k", "scale", "window_size", "return_aux"]
)
def test_errors_of_varlen_attn_name_its_arguments(name: str) -> None:
    (q, k, v), cu_q, cu_k = packed()
    given = {"query": q, "key": k, "value": v, "cu_seq_q": cu_q, "cu_seq_k": cu_k, "max_q": 5, "max_k": 7}
    wrong = {"scale": "1", "window_size": (1,), "return_aux": True}
    change = {name: wrong[name] if name in wrong else given[name].int().long()}
    named = "key" if name == "query" else name  # the others are compared with query
    with pytest.raises(warpwave.InvalidType, match=rf"\b{named} is"):
        pytorch.varlen_attn(**(given | change), enable_gqa=True)


@pytest.mark.parametrize(("is_causal", "scale"), [(False, 0.3), (True, 0.3), (False, -0.3)])
def test_the_flash_operators_of_sdpa(is_causal: bool, scale: float, overridden: None) -> None:
    given = tensors(((2, 4, 9, 16),) * 3, grad=True)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, False, scale=scale)
    torchs = TORCHS(*(*given, None, 0.0, is_causal), scale=scale)
    torch.testing.assert_close(out, torchs)
    assert out.stride() == given[0].stride() and lse.shape == (2, 4, 9)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, given, dout), torch.autograd.grad(torchs, given, dout))


def same_pairs_dropped(flash: Any, mine: Any, given: Any) -> None:
    """Asserts that a flash operator and a call of warpwave that draw the same seed have the same results and gradients,
    and that another seed has others."""
    results: list[Any] = []
    for call in (flash, mine, flash):
        if call is not flash or not results:
            torch.manual_seed(5)
        out, lse = call()
        results.append((out, lse, *torch.autograd.grad(out, given, torch.ones_like(out))))
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0][0], results[2][0]) and torch.equal(results[0][1], results[2][1])


def test_the_flash_operators_keep_the_seed_of_dropout(overridden: None) -> None:
    aten = torch.ops.aten
    q, k, v = tensors(((2, 4, 9, 16),) * 3, grad=True)
    same_pairs_dropped(
        lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.3, True)[:2],
        lambda: (
            lambda out, lse: (out.transpose(1, 2), lse)
        )(*warpwave.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, dropout_p=0.3, return_lse=True)),
        (q, k, v),
    )  # fmt: skip
    (q, k, v), cu_q, cu_k = packed()
    given = [t.requires_grad_() for t in (q, k, v)]
    said: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 7}
    same_pairs_dropped(
        lambda: aten._flash_attention_forward(*given, cu_q, cu_k, 5, 7, 0.3, True, False)[:2],
        lambda: warpwave.attention_varlen(*given, causal=True, dropout_p=0.3, return_lse=True, **said),
        given,
    )
    dense = [t[None] for t in (q[:5], k[:7], v[:7])]
    same_pairs_dropped(
        lambda: aten._flash_attention_forward(*dense, None, None, 5, 7, 0.3, False, False, window_size_left=2)[:2],
        lambda: warpwave.attention(*dense, window_size=(2, -1), dropout_p=0.3, return_lse=True),
        given,
    )
    # What goes to the previous kernels would get gradients of other pairs, or has no dropout.
    with pytest.raises(warpwave.UnsupportedProblem, match="return_debug_mask with dropout_p"):
        aten._scaled_dot_product_flash_attention(*given, 0.3, True, True)
    with pytest.raises(warpwave.UnsupportedProblem, match="seqused_k or block_table with dropout_p"):
        aten._flash_attention_forward(*given, cu_q, cu_k, 5, 7, 0.3, True, False, seqused_k=cu_k.diff())
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        with torch.no_grad(), pytest.raises(warpwave.InvalidInput, match=r"dropout_p is 0\.3"):
            aten._flash_attention_forward_no_dropout_inplace(
                torch.empty_like(q), *given, cu_q, cu_k, 5, 7, 0.3, True, False
            )


def test_the_flash_operator_of_dense_calls(overridden: None) -> None:
    """Tensors by token; a causal mask, and a window, each aligned to the last key."""
    q, k, v = tensors(((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)), grad=True)
    dout = torch.randn(2, 5, 4, 16)
    for is_causal, window in ((True, {}), (False, {"window_size_left": 3}), (True, {"window_size_left": 3})):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 5, 9, 0.0, is_causal, False, scale=0.3, **window
        )
        expected, expected_lse = warpwave.attention(
            q, k, v, causal=is_causal, window_size=(window.get("window_size_left", -1), -1), softmax_scale=0.3,
            return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close((out, lse), (expected, expected_lse))
        pair = [torch.autograd.grad(found, (q, k, v), dout) for found in (out, expected)]
        torch.testing.assert_close(*pair)


def test_the_flash_operators_of_packed_calls_have_gradients(overridden: None) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    given, cu_q, cu_k = packed()
    given = [t.requires_grad_() for t in given]
    pair = [
        f(*(*given, cu_q, cu_k, 5, 7), window_size=(-1, 0), enable_gqa=True)
        for f in (varlen.varlen_attn, pytorch.varlen_attn)
    ]
    dout = torch.randn_like(pair[0])
    torch.testing.assert_close(*[torch.autograd.grad(out, given, dout) for out in pair])
    with torch.no_grad():
        into = torch.empty_like(pair[0])
        varlen.varlen_attn_out(into, *given, cu_q, cu_k, 5, 7, window_size=(-1, 0), enable_gqa=True)
    assert torch.equal(into, pair[0])


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch 2.10 finds no previous kernels")
def test_a_debug_mask_goes_to_the_kernel_before() -> None:
    given = tensors(SHAPES["4 axes"])
    before = torch.library.Library("aten", "IMPL", "CPU")
    said: list[Any] = []

    def previous(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, scale: float | None = None) -> Any:
        said.append((rest, scale))
        state = torch.zeros(2, dtype=torch.uint64)
        return torch.full_like(q, 7.0), q[..., 0], None, None, 3, 6, state, state[0], q.new_empty(0)

    before.impl("_scaled_dot_product_flash_attention", previous, "CPU")
    handle = pytorch_flash.override("CPU")
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    assert operator(*given, 0.0, True, True, scale=0.3)[0].unique().tolist() == [7.0]
    assert said == [((0.0, True, True), 0.3)]
    torch.testing.assert_close(operator(*given, 0.0, False)[0], TORCHS(*given))
    assert len(said) == 1
    handle.remove()
    assert operator(*given, 0.0, False)[0].unique().tolist() == [7.0]
    del before


def test_registering_changes_nothing_until_it_is_activated() -> None:
    attention: Any = torch.nn.attention
    pytorch.register()
    assert "warpwave" in attention.list_flash_attention_impls() and attention.current_flash_attention_impl() is None
    if hasattr(attention, "restore_flash_attention_impl"):  # from torch 2.11
        attention.activate_flash_attention_impl("warpwave")
        assert attention.current_flash_attention_impl() == "warpwave"
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
    assert F.scaled_dot_product_attention is TORCHS
