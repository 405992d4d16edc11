"""`merge_states` against attention over all the keys at once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from warpwave import InvalidInput, InvalidType, attention, attention_varlen, merge_states


def parts_of(n: int, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Any], tuple[torch.Tensor, ...]]:
    """The whole, and the parts of it by n slices of the keys, of which the second is empty."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, s, 3, 16, generator=g).to(dtype) for s in (5, 90, 90))
    ends = [0, *sorted(torch.randint(0, 90, (n - 1,), generator=g).tolist()), 90]
    if n > 2:
        ends[2] = ends[1]
    whole = attention(q, k, v, return_lse=True)
    slices = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return whole, [attention(q, k[:, s], v[:, s], return_lse=True) for s in slices], (q, k, v)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_parts_merge_to_the_whole(n: int) -> None:
    whole, parts, _ = parts_of(n)
    out, lse = merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(out, whole[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1], atol=2e-6, rtol=1e-6)
    assert lse.dtype == torch.float32


def test_packed_parts() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8, generator=g) for n in (7, 20, 20))
    ends_q = torch.tensor([0, 3, 7], dtype=torch.int32)

    def call(begin: int, end: int) -> Any:
        keys = torch.cat([k[begin:end], k[10 + begin : 10 + end]])
        values = torch.cat([v[begin:end], v[10 + begin : 10 + end]])
        ends = torch.tensor([0, end - begin, 2 * (end - begin)], dtype=torch.int32)
        return attention_varlen(
            q, keys, values, cu_seqlens_q=ends_q, cu_seqlens_k=ends, max_seqlen_q=4, max_seqlen_k=10, return_lse=True
        )

    out, lse = merge_states(*zip(call(0, 4), call(4, 10), strict=True), packed=True)
    whole = call(0, 10)
    torch.testing.assert_close(out, whole[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1], atol=2e-6, rtol=1e-6)


def test_a_part_without_keys_adds_nothing_whatever_it_holds() -> None:
    (out, lse), _, _ = parts_of(1)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    got = merge_states([out, nothing[0], out], [lse, nothing[1], nothing[1]])
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    got = merge_states([nothing[0]], [nothing[1]])
    assert not got[0].any() and (got[1] == -math.inf).all()


def test_far_logits_do_not_overflow() -> None:
    (out, lse), _, _ = parts_of(1)
    merged, together = merge_states([out, -out], [lse + 1e4, lse - 1e4])
    assert torch.equal(merged, out) and torch.equal(together, lse + 1e4)


def test_halves_keep_their_dtype() -> None:
    whole, parts, _ = parts_of(3, torch.bfloat16)
    out, _ = merge_states(*zip(*parts, strict=True))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, whole[0], atol=2e-2, rtol=2e-2)


def test_a_part_without_keys_has_gradient_zero_whatever_it_holds() -> None:
    """A part that saw no key may hold NaN; its lse, minus infinity, gets gradient 0 and the others theirs."""
    outs = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 5) for _ in range(3)]
    lses[1][:] = -torch.inf
    lses[2][:, :, 3] = -torch.inf
    lses = [lse.requires_grad_() for lse in lses]
    with torch.no_grad():
        outs[1][:] = torch.nan
        outs[2][:, 3] = torch.nan
    out, lse = merge_states(outs, lses)
    (out.sum() + lse.sum()).backward()
    for tensor in (*outs, *lses):
        assert tensor.grad is not None and tensor.grad.isfinite().all()
    assert lses[1].grad.eq(0).all() and outs[1].grad.eq(0).all()  # type: ignore[union-attr]

    kept = [t.detach().clone().requires_grad_() for t in (outs[0], lses[0])]
    alone, alone_lse = merge_states([kept[0]], [kept[1]])
    (alone.sum() + alone_lse.sum()).backward()
    torch.testing.assert_close(outs[0].grad[:, 3], kept[0].grad[:, 3])  # type: ignore[index]


def test_gradients_reach_every_part() -> None:
    """Through the merge of two halves, the gradients of the whole."""
    _, _, (q, k, v) = parts_of(1)
    grads = []
    for split in (True, False):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        a, b, c = leaves
        if split:
            halves = [attention(a, b[:, s], c[:, s], return_lse=True) for s in (slice(33), slice(33, None))]
            out, lse = merge_states(*zip(*halves, strict=True))
        else:
            out, lse = attention(a, b, c, return_lse=True)
        ((out * torch.cos(out)).sum() + lse.sum()).backward()
        grads.append([t.grad for t in leaves])
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (InvalidInput, "0 outs and 0 lses", lambda o, s: ([], [])),
        (InvalidInput, "2 outs and 1 lses", lambda o, s: ([o, o], [s])),
        (InvalidType, r"outs\[0\] is a int", lambda o, s: ([1], [s])),
        (InvalidType, "outs is a Tensor; it must be a sequence", lambda o, s: (o[0, 0, 0, 0], [s])),
        (InvalidType, r"outs\[0\] is a nested or sparse tensor", lambda o, s: ([o.to_sparse()], [s])),
        (InvalidType, r"lses\[0\] is a nested or sparse tensor", lambda o, s: ([o], [s.to_sparse()])),
        (InvalidType, r"lses\[0\] is torch.float64; it must be torch.float32", lambda o, s: ([o], [s.double()])),
        (InvalidType, r"outs\[1\] is torch.float16", lambda o, s: ([o, o.half()], [s, s])),
        (InvalidInput, r"lses\[0\] has shape \(2, 5, 3\); it must be \(batch, num_heads_q, seqlen_q\)",
         lambda o, s: ([o], [s.transpose(1, 2)])),
        (InvalidInput, r"outs\[1\] has shape", lambda o, s: ([o, o[:, 1:]], [s, s])),
        (InvalidInput, "must be .total_q", lambda o, s: ([o], [s], True)),
    ],
)  # fmt: skip
def test_bad_input(error: type[Exception], words: str, change: Any) -> None:
    (out, lse), _, _ = parts_of(1)
    outs, lses, *packed = change(out, lse)
    with pytest.raises(error, match=words):
        merge_states(outs, lses, packed=bool(packed))


def test_parts_must_be_sequences() -> None:
    with pytest.raises(InvalidType, match="outs is a NoneType"):
        merge_states(None, None)  # type: ignore[arg-type]
