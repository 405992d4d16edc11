from dataclasses import replace
from typing import Any

import pytest
import torch

from warpwave.bench.peers import MATH_SCORE_BYTES, PEERS, PeerUnavailable
from warpwave.bench.workloads import make_operands
from warpwave.problem import AttentionProblem, Causal, Operands
from warpwave.reference import oracle

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
ON_CPU = ["sdpa_default", "sdpa_flash", "sdpa_math"]


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


def test_a_forced_backend_is_the_one_that_runs() -> None:
    operands = make_operands(PROBLEM, "cpu")
    assert PEERS["sdpa_flash"](PROBLEM, operands).kernel == "flash_attention_for_cpu"
    assert PEERS["sdpa_math"](PROBLEM, operands).kernel == "math"
    assert PEERS["sdpa_default"](PROBLEM, operands).eager
    assert not PEERS["sdpa_math"](PROBLEM, operands).eager


@pytest.mark.parametrize("peer", PEERS)
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
