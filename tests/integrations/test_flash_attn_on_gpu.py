"""FlashAttention's test grid on a GPU, all 110 points of lengths and head sizes, and its real packages where they are
installed: out, log-sum-exp and gradients are no further from float64 than theirs, or than torch's.

    python -m pytest -m gpu -n 14 tests/integrations/test_flash_attn_on_gpu.py

Compilation takes most of the time: about four minutes with 14 processes on 16 cores, by estimate.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

import pytest
import torch

from tests.integrations.test_flash_attn import HEAD_DIMS, LENGTHS, definition, offsets
from tests.integrations.test_on_gpu import assert_no_worse
from warpwave.integrations import flash_attn, flash_attn_3, flash_attn_4

pytestmark = pytest.mark.gpu
LSE: Any = {"rtol": 1e-3, "atol": 2e-3}


def made(lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = ((lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1]))
    tensors = [torch.randn(2, length, count, head_dim, device="cuda").to(dtype) for length, count in sizes]
    return [t.requires_grad_() for t in tensors]


def by_definition(given: list[torch.Tensor], dtype: torch.dtype, slopes: Any = None, **said: Any) -> tuple[Any, Any]:
    """out and lse of a batch, computed in a dtype."""
    q, k, v = given
    pairs = [
        definition(q[b], k[b], v[b], dtype=dtype, slopes=None if slopes is None else slopes[b], **said)
        for b in range(len(q))
    ]
    return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])


def differentiated(out: torch.Tensor, given: list[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (out, *torch.autograd.grad(out, given, dout.to(out.dtype)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_grid(lengths: tuple[int, int], head_dim: int) -> None:
    """Two calls a point; five lengths of each dtype go through masks, caps, slopes and groups of heads."""
    i, j = LENGTHS.index(lengths), HEAD_DIMS.index(head_dim)
    dtype = (torch.bfloat16, torch.float16)[i % 2]
    for number in ((3 * (i // 2) + j) % 8, (3 * (i // 2) + j) % 8 + 8):
        heads = [(4, 4), (4, 2), (4, 1)][number % 3]
        causal, local, capped, alibi = (bool(number >> bit & 1) for bit in range(4))
        given = made(lengths, heads, head_dim, dtype)
        window = (min(20, lengths[1]), min(9, lengths[1])) if local else (-1, -1)
        slopes = torch.rand(2, heads[0], device="cuda") * 0.3 if alibi else None
        said: Any = {"causal": causal, "window": window, "softcap": 5.0 if capped else 0.0, "slopes": slopes}
        wide = [t.detach().double().requires_grad_() for t in given]
        exact, exact_lse = by_definition(wide, torch.float64, **said)
        dout = torch.randn_like(exact)
        q, k, v = given
        out, lse, _ = flash_attn.flash_attn_func(
            q, k, v, 0.0, None, causal, window, said["softcap"], slopes, False, True
        )
        assert out.dtype == dtype and lse.shape == exact_lse.shape
        torch.testing.assert_close(lse, exact_lse.float(), **LSE)
        assert_no_worse(
            differentiated(out, given, dout),
            differentiated(by_definition(given, dtype, **said)[0], given, dout),
            differentiated(exact, wide, dout),
            least=1.0 if lengths[1] == 1 else 0.0,  # one key: the gradients of q and k cancel
        )


# The real packages ----------------------------------------------------------------------------------------------------

PACKAGES = {"flash_attn": flash_attn, "flash_attn_interface": flash_attn_3, "flash_attn.cute": flash_attn_4}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "window": {"window_size": (20, 9)},
    "causal window": {"causal": True, "window_size": (20, 0)}, "softcap": {"softcap": 5.0},
    "scale": {"softmax_scale": 0.3},
}  # fmt: skip


def package(name: str) -> Any:
    try:
        found: Any = importlib.import_module(name)
        assert found.flash_attn_func
    except Exception as error:  # whatever the libraries below it raise
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return found


def with_lse(function: Any, *given: Any, **said: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of any version's function."""
    name = "return_lse" if "return_lse" in inspect.signature(function).parameters else "return_attn_probs"
    found = function(*given, **said, **{name: True})
    return found[0], found[1]


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dense_calls_beside_the_package(name: str, call: str, head_dim: int) -> None:
    theirs = package(name)
    for lengths, heads in itertools.product([(113, 203), (1, 147), (256, 256)], [(4, 4), (4, 1)]):
        given = made(lengths, heads, head_dim, torch.bfloat16)
        said = CALLS[call]
        wide = [t.detach().double().requires_grad_() for t in given]
        kinds = {"window_size": "window", "softmax_scale": "scale"}
        exact, exact_lse = by_definition(wide, torch.float64, **{kinds.get(key, key): x for key, x in said.items()})
        dout = torch.randn_like(exact)
        pair = [with_lse(module.flash_attn_func, *given, **said) for module in (PACKAGES[name], theirs)]
        for _, lse in pair:
            torch.testing.assert_close(lse, exact_lse.float(), **LSE)
        mine, other = (differentiated(out, given, dout) for out, _ in pair)
        assert_no_worse(mine, other, differentiated(exact, wide, dout))


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_calls_beside_the_package(name: str, causal: bool) -> None:
    theirs = package(name)
    torch.manual_seed(1)
    cu_q, cu_k = offsets([50, 1, 120, 64]).cuda(), offsets([90, 60, 130, 64]).cuda()
    q = torch.randn(int(cu_q[-1]), 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, int(cu_k[-1]), 2, 64, device="cuda", dtype=torch.bfloat16)
    said: Any = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 120, "max_seqlen_k": 130}
    given = [t.requires_grad_() for t in (q, k, v)]
    pair = [
        with_lse(module.flash_attn_varlen_func, *given, **said, causal=causal) for module in (PACKAGES[name], theirs)
    ]
    assert pair[0][1].shape == pair[1][1].shape
    torch.testing.assert_close(pair[0][1], pair[1][1], **LSE)
    dout = torch.randn_like(q)
    for one, two in zip(*(differentiated(out, given, dout) for out, _ in pair), strict=True):
        torch.testing.assert_close(one, two, rtol=1.6e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
@pytest.mark.parametrize("paged", [False, True])
def test_caches_beside_the_package(name: str, paged: bool) -> None:
    """Both write the same cells and read the same tokens."""
    theirs = package(name)
    torch.manual_seed(2)
    q = torch.randn(2, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    k_new, v_new = torch.randn(2, 2, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
    shape = (6, 256, 2, 64) if paged else (2, 768, 2, 64)
    caches = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    said: Any = {"cache_seqlens": torch.tensor([300, 17], dtype=torch.int32, device="cuda"), "causal": True}
    if paged:
        table = "block_table" if name == "flash_attn" else "page_table"
        said[table] = torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32, device="cuda")
    results = []
    for module in (PACKAGES[name], theirs):
        k_cache, v_cache = caches.clone()
        out = module.flash_attn_with_kvcache(q, k_cache, v_cache, k_new, v_new, **said)
        results.append((out, k_cache, v_cache))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1.6e-2, atol=2e-2)
    assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][2], results[1][2])
