import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.inputs import make_operands
from warpwave.workbench.bench.peers import (
    MATH_SCORE_BYTES,
    PEERS,
    PeerUnavailable,
    ffpa,
    flash_attention_4,
    flex,
    three_calls,
)
from warpwave.workbench.verify.reference import oracle

PROBLEM = AttentionProblem(
    batch=2,
    seqlen_q=33,
    seqlen_k=33,
    num_heads_q=4,
    num_heads_kv=4,
    head_dim=16,
    head_dim_v=16,
    dtype="float32",
    softmax_scale=0.3,
)
SDPA = [name for name in PEERS if name.startswith("sdpa_")]
ON_CPU = ["sdpa_default", "sdpa_flash", "sdpa_math", "three_calls"]


@pytest.mark.parametrize("peer", ON_CPU)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"causal": Causal()},
        {"num_heads_kv": 2},
        {"num_heads_kv": 1, "causal": Causal()},
        {"seqlen_k": 50},
        {"seqlen_k": 50, "causal": Causal("top_left")},
    ],
    ids=str,
)
def test_peers_compute_our_problem(peer: str, change: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **change)
    operands = make_operands(problem, "cpu")
    prepared = PEERS[peer](problem, operands)
    out = prepared.to_out(prepared.call())
    torch.testing.assert_close(out.double(), oracle(problem, operands).out, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"mask_shape": (2, 1, 1, 33)},
        {"mask_shape": (2, 1, 33, 33), "causal": Causal()},
        {"bias_shape": (1, 4, 33, 33)},
        {"bias_shape": (1, 4, 33, 33), "mask_shape": (1, 1, 33, 33), "causal": Causal()},
        {"alibi_shape": (4,), "causal": Causal()},
        {"alibi_shape": (4,), "softcap": 5.0, "seqlen_k": 50},
    ],
    ids=str,
)
@pytest.mark.parametrize("peer", ["sdpa_default", "sdpa_math", "flex_attention"])
def test_peers_take_masks_and_biases(peer: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "refuse_cpu", lambda operands: None)
    monkeypatch.setattr(flex, "_compiled", lambda problem: flex_attention)  # compiling takes half a minute
    problem = replace(PROBLEM, **change)
    operands = make_operands(problem, "cpu")
    if "alibi_shape" in change and peer != "flex_attention":
        with pytest.raises(PeerUnavailable, match="ALiBi"):
            PEERS[peer](problem, operands)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is not compiled
        prepared = PEERS[peer](problem, operands)
        out = prepared.to_out(prepared.call())
    torch.testing.assert_close(out.double(), oracle(problem, operands).out, rtol=0, atol=2e-6)


def test_a_forced_backend_is_the_one_that_runs() -> None:
    operands = make_operands(PROBLEM, "cpu")
    assert PEERS["sdpa_flash"](PROBLEM, operands).kernel == "flash_attention_for_cpu"
    assert PEERS["sdpa_math"](PROBLEM, operands).kernel == "math"
    assert PEERS["sdpa_default"](PROBLEM, operands).eager
    assert not PEERS["sdpa_math"](PROBLEM, operands).eager


@pytest.mark.parametrize("peer", SDPA)
def test_a_different_causal_mask_is_refused(peer: str) -> None:
    problem = replace(PROBLEM, seqlen_k=50, causal=Causal())
    with pytest.raises(
        PeerUnavailable, match="aligned to the first key, ours to the last: they differ at seqlen 33 x 50"
    ):
        PEERS[peer](problem, make_operands(problem, "cpu"))


def test_what_a_peer_lacks_is_named() -> None:
    operands = make_operands(PROBLEM, "cpu")
    with pytest.raises(PeerUnavailable, match="not compared on a sliding window, softcap"):
        PEERS["sdpa_default"](replace(PROBLEM, softcap=5.0, window_size=(3, 0)), operands)
    with pytest.raises(PeerUnavailable, match="it does not run on a CPU"):
        PEERS["sdpa_cudnn"](PROBLEM, operands)


def test_scores_that_would_fill_the_memory_are_refused() -> None:
    seqlen = 1 << 16
    problem = replace(PROBLEM, seqlen_q=seqlen, seqlen_k=seqlen)
    x = torch.empty(1).expand(2, seqlen, 4, 16)
    assert problem.batch * problem.num_heads_q * seqlen**2 * 4 > MATH_SCORE_BYTES
    with pytest.raises(PeerUnavailable, match=r"its scores in memory would take 128\.0 GiB"):
        PEERS["sdpa_math"](problem, Operands(x, x, x))


def test_the_reason_a_backend_gives_is_passed_on() -> None:
    problem = replace(PROBLEM, head_dim_v=24)  # torch's CPU flash attention needs equal sizes
    with pytest.raises(PeerUnavailable, match="requires q,k,v to have the same last dimension"):
        PEERS["sdpa_flash"](problem, make_operands(problem, "cpu"))


# Peers whose packages are not here: modules that record how they were called, and CPU tensors in place of a GPU's ----


@pytest.fixture
def gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the peers take CPU tensors."""
    for module in (flash_attention_4, ffpa, flex):
        monkeypatch.setattr(module, "refuse_cpu", lambda operands: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, name, module)


def by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)


def fake_flash_attention_4(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        assert not fails(options["num_splits"]), "SplitKV not supported\nmore"
        return by_torch(q, k, v, options["causal"], options["softmax_scale"]), None

    cute = ModuleType("flash_attn.cute")
    cute.__dict__.update(flash_attn_func=flash_attn_func)
    install(monkeypatch, "flash_attn", cute=cute)
    return calls


HALF = replace(PROBLEM, dtype="bfloat16", causal=Causal())


@pytest.mark.parametrize(("broken", "num_splits"), [(None, 0), (0, 1)])
def test_flash_attention_4_chooses_its_splits_where_it_can(
    broken: int | None, num_splits: int, gpu_tensors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_flash_attention_4(monkeypatch, lambda splits: splits == broken)
    problem = replace(HALF, window_size=(7, -1))
    operands = make_operands(HALF, "cpu")
    prepared = PEERS["flash_attention_4"](problem, operands)
    assert prepared.config == {"num_splits": num_splits} and prepared.eager
    assert calls[-1]["window_size"] == (7, None) and calls[-1]["softmax_scale"] == 0.3
    out = prepared.to_out(prepared.call())
    torch.testing.assert_close(out.double(), oracle(HALF, operands).out, rtol=0, atol=0.05)


def test_flash_attention_4_says_why_not(gpu_tensors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = make_operands(HALF, "cpu")
    with pytest.raises(PeerUnavailable, match="flash-attn-4 is not installed"):
        PEERS["flash_attention_4"](HALF, operands)
    with pytest.raises(PeerUnavailable, match="it takes float16 and bfloat16"):
        PEERS["flash_attention_4"](PROBLEM, make_operands(PROBLEM, "cpu"))
    fake_flash_attention_4(monkeypatch, lambda splits: True)
    with pytest.raises(PeerUnavailable, match=r"^AssertionError: SplitKV not supported$"):
        PEERS["flash_attention_4"](HALF, operands)
    install(monkeypatch, "flash_attn")  # as FlashAttention-2 has it: no `cute` in it
    with pytest.raises(PeerUnavailable, match=r"flash_attn\.cute cannot be imported"):
        PEERS["flash_attention_4"](HALF, operands)


@pytest.mark.parametrize("honest", [True, False])
def test_ffpa_has_to_run_what_it_was_asked_for(
    honest: bool, gpu_tensors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It swallows the failure of its own imports and runs something else: the operators that ran decide."""
    library = torch.library.Library("warpwave_test_ffpa", "FRAGMENT")
    library.define("_fwd_cute(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> Tensor")
    library.impl(
        "_fwd_cute",
        lambda q, k, v, causal, scale: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale
        ),
        "CompositeExplicitAutograd",
    )

    def ffpa_attn_func(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, **_: Any) -> Tensor:
        attend = torch.ops.warpwave_test_ffpa._fwd_cute if honest else sdpa
        return attend(q, k, v, is_causal, scale)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    install(monkeypatch, "ffpa_attn", ffpa_attn_func=ffpa_attn_func, CuTeDSLBackend=lambda **_: None)
    problem = replace(HALF, head_dim=264, head_dim_v=264)
    operands = make_operands(problem, "cpu")
    if not honest:
        with pytest.raises(PeerUnavailable, match="asked for _fwd_cute, and it ran "):
            PEERS["ffpa_cute"](problem, operands)
        return
    prepared = PEERS["ffpa_cute"](problem, operands)
    assert prepared.kernel == "ffpa_fwd_cute"
    out = prepared.to_out(prepared.call())
    torch.testing.assert_close(out.double(), oracle(problem, operands).out, rtol=0, atol=0.05)


def test_ffpa_is_for_large_head_dims() -> None:
    with pytest.raises(PeerUnavailable, match="it is for head_dim 257 to 1024"):
        PEERS["ffpa_cute"](HALF, make_operands(HALF, "cpu"))


@pytest.mark.parametrize(
    "change",
    [
        {"causal": Causal()},
        {"seqlen_k": 50, "causal": Causal()},
        {"seqlen_q": 50, "causal": Causal("top_left")},
        {"window_size": (5, 2)},
        {"window_size": (5, -1), "causal": Causal()},
    ],
    ids=str,
)
def test_flex_masks_show_what_the_problem_shows(change: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **change)
    visible = flex.visible_pairs(problem, make_operands(problem, "cpu"))
    assert visible is not None
    rows, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)
    none = torch.tensor(0)
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    expected = torch.tensor([[k in band.keys(q, problem.seqlen_k) for k in keys] for q in range(problem.seqlen_q)])
    assert torch.equal(visible(none, none, rows, keys), expected)


def test_flex_masks_of_packed_sequences() -> None:
    lengths = ((3, 3), (5, 5), (1, 1))
    problem = replace(
        PROBLEM,
        batch=3,
        seqlen_q=5,
        seqlen_k=5,
        packed=True,
        total_q=9,
        total_k=9,
        lengths=lengths,
        causal=Causal(),
    )
    visible = flex.visible_pairs(problem, make_operands(problem, "cpu"))
    assert visible is not None
    shown = visible(torch.tensor(0), torch.tensor(0), torch.arange(9)[:, None], torch.arange(9))
    assert torch.equal(shown, torch.block_diag(*(torch.ones(n, n).tril() for n, _ in lengths)).bool())


def test_three_calls_are_timed_even_if_wrong() -> None:
    prepared = PEERS["three_calls"](HALF, make_operands(HALF, "cpu"))
    assert prepared.timed_if_wrong
    with pytest.raises(PeerUnavailable, match="not compared on softcap"):
        PEERS["three_calls"](replace(HALF, softcap=3.0), make_operands(HALF, "cpu"))


def test_three_calls_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(three_calls, "CHUNK_SCORE_BYTES", 3 * 33 * 33 * 4)  # 8 heads, three at a time
    problem = replace(PROBLEM, window_size=(9, 0), num_heads_kv=2)
    operands = make_operands(problem, "cpu")
    prepared = PEERS["three_calls"](problem, operands)
    out = prepared.to_out(prepared.call())
    torch.testing.assert_close(out.double(), oracle(problem, operands).out, rtol=0, atol=2e-6)
    monkeypatch.setattr(three_calls, "CHUNK_SCORE_BYTES", 33 * 33 * 4 - 1)
    with pytest.raises(PeerUnavailable, match="the scores of one head alone would take"):
        PEERS["three_calls"](problem, operands)
