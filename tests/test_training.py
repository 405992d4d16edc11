"""Gradients inside what surrounds them in training: torch.compile, checkpoints, autocast, hooks, accumulation, sharded
parameters and CUDA graphs. Second derivatives, torch.func and modes are in test_derivatives.py."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import warpwave
from warpwave import ops
from warpwave.autograd import schema_tensors
from warpwave.operands import DropoutOperands, Operands
from warpwave.options import Options
from warpwave.workbench.bench.peers.peer import OperatorNames

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEADS_KV, HEAD_DIM = 4, 2, 16
# Of the gradients: eager's own, flash_bwd behind its forward, and three_kernel's, which take nothing of the forward.
each_kernel = pytest.mark.parametrize("kernel", ["auto", "flash_fwd", "three_kernel"])


@pytest.fixture
def example() -> Any:
    """The program that trains a language model."""
    return importlib.import_module("examples.train")


def leaves(*tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v that require gradients, (*tokens, heads, head_dim)."""
    g = torch.Generator().manual_seed(seed)

    def leaf(heads: int) -> Tensor:
        return torch.randn(*tokens, heads, HEAD_DIM, generator=g).to(DEVICE).requires_grad_()

    return leaf(HEADS), leaf(HEADS_KV), leaf(HEADS_KV)


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto") -> Any:
    return warpwave.attention(q, k, v, causal=True, kernel=kernel)


def attend_packed(q: Any, k: Any, v: Any, offsets: Any, longest: int, kernel: str = "auto") -> Any:
    return warpwave.attention_varlen(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
        kernel=kernel,
    )  # fmt: skip


def gradients(out: Tensor, of: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), of)


def assert_same(found: Any, expected: Any, rtol: float | None = None, atol: float | None = None) -> None:
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# torch.compile --------------------------------------------------------------------------------------------------------


class Counting:
    """A backend of torch.compile that counts the forward and backward graphs it gets."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.forward = self.backward = 0
        self.backend = aot_autograd(fw_compiler=self._compile_forward, bw_compiler=self._compile_backward)

    def _compile_forward(self, graph: Any, inputs: Any) -> Any:
        self.forward += 1
        return make_boxed_func(graph.forward)

    def _compile_backward(self, graph: Any, inputs: Any) -> Any:
        self.backward += 1
        return make_boxed_func(graph.forward)


def test_lengths_share_their_compiled_graphs() -> None:
    """The first length gets graphs, the second gets graphs for every length."""
    counting = Counting()
    compiled: Any = torch.compile(attend, fullgraph=True, backend=counting.backend)
    for seqlen in range(8, 28):
        given = leaves(2, seqlen)
        assert_same(gradients(compiled(*given), given), gradients(attend(*given), given))
    assert counting.forward <= 2 and counting.backward <= 2


def test_packed_lengths_share_their_compiled_graphs() -> None:
    """Total, number of sequences and longest sequence all change. The longest sequence is a number of the host."""
    counting = Counting()
    compiled: Any = torch.compile(attend_packed, fullgraph=True, backend=counting.backend)
    with torch._dynamo.config.patch(recompile_limit=99):  # so that the count decides
        for n in range(8, 28):
            lengths = [n, n // 2, 3, 7][: 2 + n % 3]
            offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
            given = leaves(sum(lengths), seed=n)
            found = gradients(compiled(*given, offsets=offsets, longest=max(lengths)), given)
            assert_same(found, gradients(attend_packed(*given, offsets=offsets, longest=max(lengths)), given))
    assert counting.forward <= 2 and counting.backward <= 2


def test_a_longest_sequence_read_from_the_offsets_is_part_of_the_graph() -> None:
    """As programs do that compute max_seqlen on the device. torch.compile then knows nothing about the number."""
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Any:
        return attend_packed(q, k, v, offsets, int(offsets.diff().max().item()))

    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = leaves(12)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for ends in ([0, 5, 12], [0, 1, 3, 12]):
            offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
            assert_same(gradients(compiled(*given, offsets), given), gradients(call(*given, offsets), given))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_probabilities_of_dropout_share_their_compiled_graphs(packed: bool) -> None:
    """The second value gets graphs for every one; 0 has graphs of its own, without dropout."""

    def call(q: Tensor, k: Tensor, v: Tensor, p: float, seed: Tensor | None) -> Any:
        if not packed:
            return warpwave.attention(q, k, v, dropout_p=p, dropout_seed=seed)
        ends = torch.arange(2, dtype=torch.int32, device=q.device) * 9
        return warpwave.attention_varlen(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=9, max_seqlen_k=9, dropout_p=p,
            dropout_seed=seed,
        )  # fmt: skip

    counting = Counting()
    compiled: Any = torch.compile(call, fullgraph=True, backend=counting.backend)
    given, seed = leaves(*((9,) if packed else (1, 9))), torch.tensor([3, 4], device=DEVICE)
    with torch._dynamo.config.patch(recompile_limit=99):  # so that the count decides
        for i in range(10):
            p = 0.05 + i / 16
            assert_same(gradients(compiled(*given, p, seed), given), gradients(call(*given, p, seed), given))
        assert counting.forward <= 2 and counting.backward <= 2
        assert_same(gradients(compiled(*given, 0.0, seed), given), gradients(call(*given, 0.0, None), given))
        assert not torch.equal(compiled(*given, 0.3, None), compiled(*given, 0.3, None))  # a seed for each call


def test_a_probability_that_changes_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph would keep the value that it was captured with."""
    operands = DropoutOperands(*leaves(1, 9), dropout_seed=torch.tensor([3, 4]))
    tensors: list[Any] = [*schema_tensors(operands, torch.tensor(0.3, dtype=torch.float64))]
    tensors[0] = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="dropout_p changed between calls of a compiled function"):
        ops._split((*tensors, *Options()))
    tensors[-1] = None
    assert ops._split((*tensors, *Options(dropout_p=0.3)))[1].dropout_p == 0.3


def test_the_model_of_the_example_is_one_graph(example: Any) -> None:
    """Packed documents, whose number differs from step to step, in a whole model with rotary positions."""
    counting = Counting()
    data = example.Data(3, 64, True, torch.device(DEVICE))
    data.starts = torch.cat((torch.arange(0, 192, 48), torch.arange(192, 384, 32), torch.arange(384, 600, 12)))
    batches = [data.batch(step) for step in range(3)]
    assert len({len(batch.offsets) for batch in batches}) == 3
    model = example.Decoder(example.SMALL, 64, example.warpwave_attention).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend=counting.backend)
    for batch in batches:
        expected = torch.autograd.grad(model(batch), list(model.parameters()))
        found = torch.autograd.grad(compiled(batch), list(model.parameters()))
        assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert counting.forward == counting.backward == 1


def test_a_compiled_backward_is_one_graph() -> None:
    """Compiled autograd traces the eager call's node."""
    torch._dynamo.reset()
    given = leaves(1, 9)
    expected = gradients(attend(*given), given)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        attend(*given).square().sum().backward()
    assert_same([t.grad for t in given], expected)


def test_compiled_gradients_by_torch_func() -> None:
    """They break the graph; where it must be whole, the error names the way out."""
    torch._dynamo.reset()
    q, k, v = (t.detach() for t in leaves(1, 9))
    gradient = torch.func.grad(lambda q: attend(q, k, v).square().sum())
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(q), gradient(q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="outside of the compiled function"):
        torch.compile(gradient, backend="aot_eager", fullgraph=True)(q)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(use_reentrant: bool, kernel: str) -> None:
    given, offsets = leaves(12), torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    expected = gradients(attend_packed(*given, offsets=offsets, longest=7, kernel=kernel), given)
    call = partial(attend_packed, kernel=kernel)
    checkpoint(call, *given, offsets, 7, use_reentrant=use_reentrant).square().sum().backward()
    assert_same([t.grad for t in given], expected)


def test_a_selective_checkpoint_keeps_what_attention_gave() -> None:
    """torch's policies know the call by its operator: it is not computed again."""
    given, found = leaves(1, 9), {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(2.0 * q, k, v)

    expected = gradients(call(*given), given)
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.warpwave.attention.default])
    ways: dict[str, Any] = {"kept": {"context_fn": keep}, "computed again": {}}
    for name, contexts in ways.items():
        with OperatorNames() as operators:
            assert_same(gradients(checkpoint(call, *given, use_reentrant=False, **contexts), given), expected)
        found[name] = [name for name in operators.names if name.startswith("attention")]
    assert found["kept"] == ["attention", "attention_backward"]
    assert found["computed again"] == ["attention", "attention", "attention_backward"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpointed_layer_under_autocast(compiled: bool) -> None:
    """As models train: weights in float32, attention in bfloat16, gradients of weights in float32 again."""
    torch.manual_seed(0)
    project = torch.nn.Linear(32, (HEADS + 2 * HEADS_KV) * HEAD_DIM, device=DEVICE)

    def layer(x: Tensor) -> Tensor:
        q, k, v = project(x).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, HEADS_KV, HEADS_KV), dim=-2)
        out = attend(q, k, v)
        assert out.dtype == (torch.bfloat16 if torch.is_autocast_enabled(DEVICE) else torch.float32)
        return out.float().square().mean()

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            out: Tensor = checkpoint(layer, x, use_reentrant=False)
            return out

    x = torch.randn(2, 9, 32, device=DEVICE)
    (exact,) = torch.autograd.grad(layer(x), project.weight)
    counting = Counting()
    run = torch.compile(loss, fullgraph=True, backend=counting.backend) if compiled else loss
    (found,) = torch.autograd.grad(run(x), project.weight)
    assert found.dtype == torch.float32
    assert (found - exact).norm() / exact.norm() < 0.02
    assert (counting.forward, counting.backward) == ((1, 1) if compiled else (0, 0))


# Hooks, repeats, accumulation -----------------------------------------------------------------------------------------


@each_kernel
def test_saved_tensors_may_wait_on_the_host(kernel: str) -> None:
    given = leaves(1, 9)
    expected = gradients(attend(*given, kernel=kernel), given)
    with torch.autograd.graph.save_on_cpu():
        out = attend(*given, kernel=kernel)
    assert_same(gradients(out, given), expected, rtol=0, atol=0)


@each_kernel
def test_gradients_accumulate(kernel: str) -> None:
    """Over micro-batches, over two backwards of one graph, and over two uses of the same keys."""
    q, k, v = leaves(2, 5)
    whole = gradients(attend(q, k, v, kernel=kernel), [q, k, v])
    for part in range(2):
        mine = slice(part, part + 1)
        attend(q[mine], k[mine], v[mine], kernel=kernel).square().sum().backward()
    assert_same([t.grad for t in (q, k, v)], whole, rtol=1e-5, atol=1e-5)
    out = attend(q, k, v, kernel=kernel).square().sum()
    out.backward(retain_graph=True)
    out.backward()
    assert_same([t.grad for t in (q, k, v)], [3 * g for g in whole], rtol=1e-5, atol=1e-5)
    (twice,) = gradients(2 * attend(q, k, v, kernel=kernel), [k])
    (shared,) = gradients(attend(q, k, v, kernel=kernel) + attend(q, k, v, kernel=kernel), [k])
    torch.testing.assert_close(shared, twice)


@each_kernel
def test_keys_that_are_values_get_both_gradients(kernel: str) -> None:
    q, k, v = leaves(1, 9)
    with torch.no_grad():
        v.copy_(k)
    of_k, of_v = gradients(attend(q, k, v, kernel=kernel), [k, v])
    (both,) = gradients(attend(q, k, k, kernel=kernel), [k])
    torch.testing.assert_close(both, of_k + of_v)


# Operators ------------------------------------------------------------------------------------------------------------

BACKWARDS: dict[str, tuple[dict[str, Any], dict[str, Any], str, bool]] = {  # operands, options, wanted, dlse
    "q, k and v": ({}, {}, "q k v", False),
    "k alone, of both results": ({}, {}, "k", True),
    "every gradient": ({"bias": (1, HEADS, 9, 9), "alibi_slopes": (HEADS,), "sinks": (HEADS,)}, {},
                       "q k v bias alibi_slopes sinks", True),
    "packed": ({"cu_seqlens_q": [0, 4, 9]}, {"max_seqlen_q": 5, "max_seqlen_k": 5}, "q k v", False),
}  # fmt: skip


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", BACKWARDS)
def test_opcheck_of_the_backward(case: str, strided: bool) -> None:
    """Schema, fake implementation, dispatch and dynamic shapes, as torch checks them."""
    extra, said, names, with_dlse = BACKWARDS[case]

    def laid_out(t: Tensor) -> Tensor:
        return t.transpose(-2, -3).contiguous().transpose(-2, -3) if strided else t

    torch.manual_seed(0)
    packed = "cu_seqlens_q" in extra
    operands = Operands(*(laid_out(t.detach()) for t in leaves(*((9,) if packed else (1, 9)))))
    if packed:
        offsets = torch.tensor(extra["cu_seqlens_q"], dtype=torch.int32, device=DEVICE)
        operands = operands._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    else:
        operands = operands._replace(**{name: torch.rand(shape, device=DEVICE) for name, shape in extra.items()})
    options = Options(causal="bottom_right", return_lse=True, needs_grad=True)._replace(**said)
    wanted = [name in names.split() for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks")]
    out, lse = ops.attend(operands, options, "auto", None)
    assert lse is not None
    dout = laid_out(torch.randn_like(out))
    results = (dout, torch.randn_like(lse) if with_dlse else None, out, lse)
    arguments = (*results, wanted, *schema_tensors(operands), *options, "auto")
    found = opcheck(torch.ops.warpwave.attention_backward.default, arguments, raise_exception=False)
    assert all(outcome == "SUCCESS" for outcome in found.values()), found


# Sharded parameters ---------------------------------------------------------------------------------------------------


def model_and_batches() -> tuple[Any, list[Any]]:
    example = importlib.import_module("examples.train")
    data = example.Data(2, 32, True, torch.device("cpu"))
    torch.manual_seed(0)
    return example.Decoder(example.SMALL, 32, example.warpwave_attention), [data.batch(0), data.batch(1)]


def sharded_gradients(rank: int, store: str, found: str) -> None:
    """Of one of two processes: a step on its batch, with every layer's parameters sharded; rank 0 saves."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        model, batches = model_and_batches()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(batches[rank]).backward()
        whole = {}
        for name, parameter in model.named_parameters():
            assert parameter.to_local().numel() < parameter.numel(), f"{name} is not sharded"
            whole[name] = parameter.grad.full_tensor()
        if rank == 0:
            torch.save(whole, found)
    finally:
        dist.destroy_process_group()


@pytest.mark.full  # two processes import torch: above five seconds
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_sharded_parameters_get_the_gradients_of_whole_ones(tmp_path: Path) -> None:
    """FSDP2 with two processes: the mean over their batches, equal to the unsharded model's."""
    found = tmp_path / "gradients.pt"
    torch.multiprocessing.spawn(sharded_gradients, (str(tmp_path / "store"), str(found)), nprocs=2)
    model, batches = model_and_batches()
    torch.stack([model(batch) for batch in batches]).mean().backward()
    sharded = torch.load(found)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert sharded.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-5, atol=1e-7)


# CUDA graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_replays_as_a_cuda_graph(packed: bool) -> None:
    """Forward and backward in one graph; replayed on new numbers, it gives their gradients."""
    offsets = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device=DEVICE)
    call: Callable[..., Tensor] = partial(attend_packed, offsets=offsets, longest=200) if packed else attend
    shape = (300,) if packed else (2, 150)
    given = [
        torch.randn(*shape, n, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for n in (HEADS, HEADS_KV, HEADS_KV)
    ]
    dout = torch.randn_like(given[0])

    def step() -> tuple[Tensor, ...]:
        out = call(*given)
        return (out, *torch.autograd.grad(out, given, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for t in (*given, dout):
                t.normal_()
        graph.replay()
        found = [t.clone() for t in captured]
        for a, b in zip(found, step(), strict=True):
            assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()
        assert torch.equal(found[0], call(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["default", "reduce-overhead"])
def test_the_example_s_model_trains_compiled_as_eager(how: str, example: Any) -> None:
    """Inductor's graphs, and CUDA graphs of them, follow the eager losses. Sizes that CUDA graphs need are fixed."""
    torch._dynamo.reset()
    data = example.Data(4, 256, False, torch.device(DEVICE))
    losses = []
    for compiled in (False, True):
        trainer = example.Trainer(example.SMALL, 256, example.warpwave_attention, torch.device(DEVICE), False, False)
        if compiled:
            trainer.model = torch.compile(trainer.model, fullgraph=True, mode=how)
        losses.append([trainer.step(data.batch(step)).item() for step in range(8)])
    assert losses[0][-1] < losses[0][0] - 0.3
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.05
    assert math.isfinite(sum(losses[1]))
