"""What three_kernel's backward is said to take, against what it asks for: storages that are alive at once, on a device
without memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpwave.gpu import Gpu
from warpwave.kernels.three_kernel import backward as three_kernel_gradients
from warpwave.kernels.three_kernel import backward_memory as three_kernel_gradient_memory
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch
from warpwave.workbench.explain.explanation import explain

H200 = Gpu.for_arch("sm_90")


class Alive(TorchDispatchMode):
    """Bytes of the storages made inside that are alive, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key in given or key in self.seen:
                    continue
                self.seen.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, key, storage.nbytes())
        return result

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


PLAIN = AttentionProblem(batch=2, seqlen_q=300, seqlen_k=400, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=48,
                         dtype="bfloat16", softmax_scale=0.125, requires_grad=True)  # fmt: skip


def problem(**changes: Any) -> AttentionProblem:
    return replace(PLAIN, **changes)


CALLS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head each": {"num_heads_kv": 4, "seqlen_q": 64},
    "causal": {"causal": Causal(), "has_sinks": True},
    "float32": {"dtype": "float32", "causal": Causal("top_left")},
    "one query": {"seqlen_q": 1, "has_sinks": True},
    "rows longer than registers": {"seqlen_k": 9000, "seqlen_q": 70, "batch": 1},
    "no keys": {"seqlen_k": 0, "has_sinks": True},
}


@pytest.mark.parametrize("workspace", [1 << 27, 1 << 21])
@pytest.mark.parametrize("features", CALLS)
def test_a_backward_takes_what_was_said(features: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk and in several."""
    p = problem(**CALLS[features])
    monkeypatch.setattr(three_kernel_gradients, "WORKSPACE_BYTES", workspace)
    for name in ("product_into", "add_product"):  # which take nothing of torch's allocator
        monkeypatch.setattr(three_kernel_gradients, name, lambda *tensors: None)
    monkeypatch.setattr(launch, "bind", lambda spec: lambda *tensors: None)
    three_kernel_gradients._bound.clear()

    def empty(*shape: int, dtype: torch.dtype = getattr(torch, p.dtype)) -> torch.Tensor:  # noqa: B008
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = (empty(p.batch, n, h, p.head_dim) for n, h in ((p.seqlen_q, p.num_heads_q), (p.seqlen_k, p.num_heads_kv)))
    sinks = empty(p.num_heads_q, dtype=torch.float32) if p.has_sinks else None
    operands = Operands(q, k, empty(p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim_v), sinks=sinks)
    dout = empty(p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v)
    wanted = (True, True, True, False, False, p.has_sinks)
    with torch.no_grad(), Alive() as alive:
        three_kernel_gradients.backward(p, operands, dout, None, wanted)
    three_kernel_gradients._bound.clear()
    assert alive.most == three_kernel_gradient_memory.peak_bytes(p)


def test_explain_states_it() -> None:
    """Behind another's forward and behind its own, and not of gradients that are eager's."""
    for p in (problem(num_heads_kv=4, head_dim=320, head_dim_v=320, seqlen_q=2048, seqlen_k=2048),
              problem(num_heads_kv=4, head_dim=512, head_dim_v=512, seqlen_q=2048, seqlen_k=2048)):  # fmt: skip
        said = explain(p, gpu=H200)
        assert said.memory is not None
        gradients = three_kernel_gradient_memory.gradient_bytes(p)
        assert said.memory.gradients == gradients == 2 * 2 * 2048 * 4 * 4 * p.head_dim - 2 * 2 * 2048 * 4 * p.head_dim
        assert said.memory.backward == three_kernel_gradient_memory.peak_bytes(p) - gradients
        assert "of workspace" in str(said)
    by_eager = explain(problem(softcap=30.0, head_dim=320, head_dim_v=320), gpu=H200).memory
    assert by_eager is not None and by_eager.gradients == by_eager.backward == 0
