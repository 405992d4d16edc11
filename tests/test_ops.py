"""The operators: what torch's own checks say of them, and that compiled, direct and dispatched calls agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import warpwave
from tests.recalls import forget, recalled
from warpwave import ops, plans
from warpwave.autograd import schema_tensors
from warpwave.dispatch import KERNELS
from warpwave.operands import AnyOperands, DropoutOperands, Operands
from warpwave.options import Options
from warpwave.problem import AttentionProblem
from warpwave.runtime.bounded import Bounded
from warpwave.workbench.bench.peers.peer import OperatorNames
from warpwave.workbench.hardware.catalog import resolve

__all__ = ["recalled"]  # fixture

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv(*, batch: int = 2, seqlen: int = 33, heads: int = 4, head_dim: int = 16) -> Three:
    q, k, v = torch.randn(3, batch, seqlen, heads, head_dim)
    return q, k, v


def packed() -> Operands:
    q, k, v = torch.randn(3, 40, 4, 16)
    offsets = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    return Operands(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def loss_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, lse = warpwave.attention(q, k, v, causal=True, window_size=(8, 0), return_lse=True)
    return out.square().sum() + lse.sin().sum()


def arguments(operands: AnyOperands, options: Options) -> tuple[Any, ...]:
    return (*schema_tensors(operands), *options, "auto", "")


CASES: dict[str, Any] = {
    "plain": lambda: arguments(Operands(*qkv()), Options()),
    "with lse": lambda: arguments(Operands(*qkv()), Options(causal="bottom_right", return_lse=True)),
    "a permuted layout": lambda: arguments(
        Operands(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())), Options(causal="top_left")
    ),
    "everything": lambda: arguments(
        Operands(*qkv())._replace(
            mask=torch.rand(2, 1, 33, 33) > 0.3,
            bias=torch.randn(1, 4, 33, 33),
            alibi_slopes=torch.rand(4),
            sinks=torch.randn(4),
        ),
        Options(window_left=9, softcap=5.0, softmax_scale=0.3, return_lse=True),
    ),
    "packed": lambda: arguments(
        packed(),
        Options(max_seqlen_q=33, max_seqlen_k=33, return_lse=True),
    ),
    "gradients": lambda: arguments(
        Operands(*(t.requires_grad_() for t in qkv()))._replace(sinks=torch.randn(4, requires_grad=True)),
        Options(causal="bottom_right", return_lse=True, needs_grad=True, deterministic=True),
    ),
    "dropout": lambda: arguments(
        DropoutOperands(*Operands(*(t.requires_grad_() for t in qkv())), torch.tensor([1, 2])),
        Options(return_lse=True, needs_grad=True, dropout_p=0.2),
    ),
    "packed, with dropout": lambda: arguments(
        DropoutOperands(*packed(), torch.tensor([1, 2])),
        Options(max_seqlen_q=33, max_seqlen_k=33, dropout_p=0.2, deterministic=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    results = opcheck(torch.ops.warpwave.attention.default, CASES[case]())
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("case", ["plain", "with lse", "everything", "packed", "dropout", "packed, with dropout"])
def test_direct_and_dispatched_calls_agree(case: str) -> None:
    args = CASES[case]()
    torch.manual_seed(0)
    through_torch = torch.ops.warpwave.attention(*args)
    operands, options = ops._split(args)
    out, lse = ops.attend(operands, options, "auto", None)
    torch.testing.assert_close(through_torch[0], out, rtol=0, atol=0)
    if lse is not None:
        torch.testing.assert_close(through_torch[1], lse, rtol=0, atol=0)


def plain_loss_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return warpwave.attention(q, k, v).square().sum()


@pytest.mark.parametrize("loss", [loss_of, plain_loss_of])
def test_full_graph_compiles_forward_and_backward(loss: Callable[..., torch.Tensor]) -> None:
    """The plain call too: inductor takes its backward with arguments by name, and none may be called `kernel` there."""
    plain = qkv()
    compiled = [t.clone().requires_grad_() for t in plain]
    torch.compile(loss, fullgraph=True)(*compiled).backward()
    loss(*(t.requires_grad_() for t in plain)).backward()
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_hundred_lengths_compile_a_few_times() -> None:
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda q, k, v: warpwave.attention(q, k, v, causal=True), fullgraph=True, backend=count)
    for seqlen in range(20, 120):
        compiled(*qkv(seqlen=seqlen))
    assert count.frame_count <= 3, f"{count.frame_count} compilations for 100 lengths"


def test_an_export_keeps_one_node() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return warpwave.attention(q, k, v)

    exported = torch.export.export(Model(), tuple(qkv()))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("warpwave.attention" in target for target in targets) == 1, targets


def test_modes_see_the_call() -> None:
    """A mode (here one that counts operators) must not be by-passed."""
    with OperatorNames() as operators:
        warpwave.attention(*qkv())
    assert "attention" in operators.names


def test_plans_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", Bounded(8))
    for seqlen in range(1, 40):
        warpwave.attention(*qkv(batch=1, seqlen=seqlen, heads=1))
    assert len(plans._plans) <= 8


def test_a_plan_is_not_used_for_another_call() -> None:
    """Whatever changes the result must be part of the plan's key."""
    q, k, v = qkv()
    base = warpwave.attention(q, k, v)
    for change in (
        {"causal": True},
        {"causal": warpwave.Causal("top_left"), "window_size": (3, 3)},
        {"window_size": (2, 1)},
        {"softcap": 1.0},
        {"softmax_scale": 0.5},
        {"mask": torch.eye(33, dtype=torch.bool)[None, None]},
        {"bias": torch.randn(2, 4, 33, 33)},
        {"alibi_slopes": torch.ones(4)},
        {"sinks": torch.ones(4)},
        {"dropout_p": 0.5},
    ):
        changed = warpwave.attention(q, k, v, **change)
        assert not torch.allclose(base, changed), change
        torch.testing.assert_close(warpwave.attention(q, k, v), base, rtol=0, atol=0)


def test_a_plan_found_again_forgives_nothing() -> None:
    """1 equals True, and a list has no hash: neither may change what a call means the second time."""
    q, k, v = qkv()
    for _ in range(2):
        causal = warpwave.attention(q, k, v, causal=True)
        with pytest.raises(warpwave.InvalidType, match="causal is 1"):
            warpwave.attention(q, k, v, causal=1)  # type: ignore[arg-type]
        windowed = warpwave.attention(q, k, v, window_size=[2, 0])  # type: ignore[arg-type]
        torch.testing.assert_close(windowed, warpwave.attention(q, k, v, window_size=(2, 0)), rtol=0, atol=0)
        assert not torch.allclose(causal, windowed)
        with pytest.raises(warpwave.InvalidType, match="config is a list"):
            warpwave.attention(q, k, v, kernel="eager", config=[64, 64])


@pytest.mark.parametrize("which", range(3))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_sizes_or_memory_are_refused_behind_a_known_call(which: int) -> None:
    """torch's guard, asked about a nested tensor, ends the process."""
    for _ in range(2):
        warpwave.attention(*qkv())
    for odd in (torch.nested.nested_tensor(list(qkv()[which])), qkv()[which].to_sparse()):
        operands = [*qkv()]
        operands[which] = odd
        with pytest.raises(warpwave.InvalidType, match=f"{'qkv'[which]} is a (nested|sparse)"):
            warpwave.attention(*operands)


def test_a_call_is_recalled_only_for_tensors_laid_out_alike(recalled: list[bool]) -> None:
    q, k, v = qkv()
    expected = warpwave.attention(q, k, v)
    torch.testing.assert_close(warpwave.attention(q.clone(), k, v), expected, rtol=0, atol=0)
    assert recalled == [False, plans.guard(q, k, v) is not None]
    shifted = torch.cat([torch.zeros(1), q.flatten()])[1:].view(q.shape)  # 4 bytes off
    others = {
        "strides": (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        "alignment": (shifted, k, v),
        "heads of k": (q, k[:, :, :2], v[:, :, :2]),
        "a subclass": (q, k, torch.nn.Parameter(v, requires_grad=False)),
    }
    for what, changed in others.items():
        recalled.clear()
        out = warpwave.attention(*changed)
        assert recalled == [False], what
        exact = warpwave.attention(*(t.contiguous().clone() for t in changed))
        torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)
    recalled.clear()
    assert warpwave.attention(q, k, v.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(warpwave.attention(q.clone(), k, v), expected, rtol=0, atol=0)
    assert recalled == [False, False]


@pytest.mark.parametrize("what", ["packed", "packed, offsets shared", "mask and bias", "slopes and sinks"])
def test_calls_with_more_tensors_are_recalled_as_well(what: str, recalled: list[bool]) -> None:
    q, k, v = qkv()
    seqlen, heads = q.shape[1], q.shape[2]
    others: dict[str, torch.Tensor] = {
        "mask and bias": {
            "mask": torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool),
            "bias": torch.ones(1, heads, 1, seqlen),
        },
        "slopes and sinks": {"alibi_slopes": torch.ones(heads), "sinks": torch.ones(heads)},
    }.get(what, {})

    def call(scale: float) -> torch.Tensor:
        if what.startswith("packed"):
            offsets = torch.tensor([0, int(scale * 4), seqlen], dtype=torch.int32)  # contents are nobody's plan
            return warpwave.attention_varlen(
                *(t[0] for t in (q, k, v)),
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets if "shared" in what else offsets.clone(),
                max_seqlen_q=seqlen,
                max_seqlen_k=seqlen,
            )
        changed: dict[str, Any] = {name: t if t.dtype is torch.bool else t * scale for name, t in others.items()}
        return warpwave.attention(q, k, v, **changed)

    def fresh(scale: float) -> torch.Tensor:
        forget()
        return call(scale)

    first, second = call(1.0), call(2.0)
    assert recalled == [False, plans.guard(q) is not None]
    torch.testing.assert_close(first, fresh(1.0), rtol=0, atol=0)
    torch.testing.assert_close(second, fresh(2.0), rtol=0, atol=0)
    recalled.clear()
    assert call(1.0) is not warpwave.attention(q, k, v)
    assert recalled == [plans.guard(q) is not None, False], "a call without these tensors is another one"


def test_no_mode_is_by_passed_once_a_call_is_known() -> None:
    """torch's guard does not see every mode: fake tensors and make_fx must meet the operator all the same."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = qkv()
    for _ in range(2):
        warpwave.attention(q, k, v)
    graph = make_fx(lambda q, k, v: warpwave.attention(q, k, v))(q, k, v).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [target.startswith("warpwave.attention") for target in targets if "getitem" not in target] == [True]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(warpwave.attention(q, k, v), FakeTensor)
    stacked = [torch.stack([t, 2 * t]) for t in (q, k, v)]
    singly = torch.stack([warpwave.attention(*one) for one in zip(*stacked, strict=True)])
    torch.testing.assert_close(torch.vmap(warpwave.attention)(*stacked), singly)


def test_recalled_plans_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_classes", Bounded(8))
    monkeypatch.setattr(plans, "_plans", Bounded(8))
    forget()
    for seqlen in range(1, 20):
        warpwave.attention(*qkv(batch=1, seqlen=seqlen, heads=1))
    q, k, v = qkv()
    for stride in range(1, 2 * plans.MOST_LAYOUTS):  # of one shape
        warpwave.attention(q, k, torch.randn(*v.shape, stride)[..., 0])
    assert len(plans._classes) <= 8 and len(plans._plans) <= 8
    assert max(len(classes) for classes, _ in plans._classes._entries.values()) <= plans.MOST_LAYOUTS


def test_without_a_guard_of_torch_s_calls_are_found_all_the_same(
    monkeypatch: pytest.MonkeyPatch, recalled: list[bool]
) -> None:
    monkeypatch.setattr(plans, "tensor_guards", lambda: None)
    q, k, v = qkv()
    torch.testing.assert_close(warpwave.attention(q, k, v), warpwave.attention(q, k, v), rtol=0, atol=0)
    assert recalled == [False, False]


def test_sixteen_threads_start_cold_together() -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs = [qkv(seqlen=17 + i % 4) for i in range(16)]
    plans._plans.clear()
    with ThreadPoolExecutor(16) as pool:
        outs = list(pool.map(lambda qkv: warpwave.attention(*qkv, causal=True), inputs))
    for (q, k, v), out in zip(inputs, outs, strict=True):
        torch.testing.assert_close(out, warpwave.attention(q, k, v, causal=True), rtol=0, atol=0)


def test_calls_of_several_shapes_are_each_recalled(recalled: list[bool]) -> None:
    """One after the other, as the layers of a model call: the last plan is tried first, and it is not the only one."""
    shapes = [qkv(seqlen=n) for n in (9, 17, 33)]
    expected = [warpwave.attention(*three) for three in shapes]
    recalled.clear()
    for _ in range(2):
        for three, out in zip(shapes, expected, strict=True):
            torch.testing.assert_close(warpwave.attention(*three), out, rtol=0, atol=0)
    assert recalled == [plans.guard(*shapes[0]) is not None] * 6


GRADIENTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "q, k and v": (("q", "k", "v"), {}),
    "v alone": (("v",), {}),
    "sinks and bias": (("sinks", "bias"), {"causal": True}),
    "a config": (("q",), {"kernel": "eager"}),
}


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", GRADIENTS)
def test_eager_gradients_are_the_operators(case: str, with_lse: bool, recalled: list[bool]) -> None:
    """By-passing torch's dispatcher changes nothing, the first time and when the call is known."""
    wanted, options = GRADIENTS[case]
    q, k, v = qkv(seqlen=9)
    tensors = {"q": q, "k": k, "v": v, "sinks": torch.randn(4), "bias": torch.randn(1, 4, 9, 9)}
    if not {"sinks", "bias"} & set(wanted):
        del tensors["sinks"], tensors["bias"]

    def gradients(through_torch: bool) -> list[torch.Tensor]:
        given: dict[str, Any] = {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}
        if through_torch:
            alignment = "bottom_right" if options.get("causal") else ""
            said = Options(causal=alignment, return_lse=with_lse, needs_grad=True)
            args = (*schema_tensors(Operands(**given)), *said, options.get("kernel", "auto"), "")
            out, lse = torch.ops.warpwave.attention(*args)
        else:
            found = warpwave.attention(**given, **options, return_lse=with_lse)
            out, lse = found if with_lse else (found, None)
        loss = out.square().sum() + (lse.sin().sum() if with_lse else 0.0)
        assert out.requires_grad
        loss.backward()
        assert all((given[name].grad is not None) == (name in wanted) for name in given)
        return [out.detach(), *(given[name].grad for name in wanted)]

    expected = gradients(True)
    for _ in range(2):
        for a, b in zip(gradients(False), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert recalled == [False, plans.guard(q) is not None]


def test_who_wants_gradients_is_part_of_what_is_recalled(recalled: list[bool]) -> None:
    q, k, v = qkv(seqlen=9)
    known = plans.guard(q) is not None
    wanting = q.clone().requires_grad_()
    for _ in range(2):
        assert warpwave.attention(wanting, k, v).requires_grad
        assert not warpwave.attention(q, k, v).requires_grad
        with torch.no_grad():
            assert not warpwave.attention(wanting, k, v).requires_grad
        with torch.inference_mode():
            assert warpwave.attention(q.clone(), k, v).is_inference()
        assert warpwave.attention(q, k, v.clone().requires_grad_()).requires_grad
    assert recalled[5:] == [known] * 5
    with pytest.raises(RuntimeError, match="first derivatives only"):
        out = warpwave.attention(wanting, k, v)
        (first,) = torch.autograd.grad(out.square().sum(), wanting, create_graph=True)
        first.sum().backward()


@pytest.mark.parametrize("first", ["no_grad", "enable_grad"])
def test_a_call_known_without_gradients_has_them_all_the_same(first: str, recalled: list[bool]) -> None:
    """torch's guard compares what tensors want, and under `no_grad` they do not get it."""
    modes = {"no_grad": torch.no_grad, "enable_grad": torch.enable_grad}
    second = next(name for name in modes if name != first)
    q, k, v = qkv(seqlen=9)
    q.requires_grad_()
    for mode in (first, first, second, second, first):
        with modes[mode]():
            assert warpwave.attention(q, k, v).requires_grad == (mode == "enable_grad")
    known = plans.guard(q) is not None
    assert recalled == [False, known, False, known, known]


def test_a_mode_sees_a_call_with_gradients_that_is_known() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (t.requires_grad_() for t in qkv(seqlen=9))
    for _ in range(2):
        warpwave.attention(q, k, v)
    graph = make_fx(lambda q, k, v: warpwave.attention(q, k, v))(q, k, v).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert any(target.startswith("warpwave.attention") for target in targets), targets
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = warpwave.attention(q, k, v)
    out.sum().backward()
    assert q.grad is not None
    again = torch.utils.checkpoint.checkpoint(warpwave.attention, q, k, v, use_reentrant=False)
    torch.testing.assert_close(again, out)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_calls_without_memory_have_shapes(softcap: float) -> None:
    q, packed = torch.empty(2, 4, 2, 8, device="meta"), torch.empty(10, 2, 8, device="meta")
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = warpwave.attention(q, q, q, softcap=softcap, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 2, 4)
    out, lse = warpwave.attention_varlen(
        packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=5, max_seqlen_k=5,
        softcap=softcap, return_lse=True,
    )  # fmt: skip
    assert out.is_meta and out.shape == packed.shape and lse.shape == (2, 10)


@pytest.mark.parametrize("is_packed", [False, True])
def test_calls_without_memory_have_gradients_without_memory(is_packed: bool) -> None:
    """As a step on device "meta" takes them, which plans memory."""
    q = torch.empty(*((10,) if is_packed else (2, 5)), 4, 8, device="meta", requires_grad=True)
    k, v = (torch.empty(*q.shape[:-2], 2, 8, device="meta", requires_grad=True) for _ in range(2))
    sinks, offsets = torch.empty(4, device="meta", requires_grad=True), torch.empty(3, dtype=torch.int32, device="meta")
    for _ in range(2):
        if is_packed:
            out, lse = warpwave.attention_varlen(
                q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=5, max_seqlen_k=5, sinks=sinks,
                dropout_p=0.1, return_lse=True,
            )  # fmt: skip
        else:
            out, lse = warpwave.attention(q, k, v, sinks=sinks, dropout_p=0.1, return_lse=True)
        for t, grad in zip((k, sinks), torch.autograd.grad(out.sum() + lse.sum(), (k, sinks)), strict=True):
            assert grad.is_meta and grad.shape == t.shape and grad.dtype == t.dtype


def test_a_config_is_part_of_a_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled once; sizes of a config never become dynamic."""
    eager: Any = next(kernel for kernel in KERNELS if kernel.NAME == "eager")
    decoded: list[Any] = []

    def decode(kernel: str, config: str) -> Any:
        decoded.append(real(kernel, config))
        return decoded[-1]

    real = ops._decode_config
    monkeypatch.setattr(ops, "_decode_config", decode)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, config: Any) -> torch.Tensor:
        out: torch.Tensor = warpwave.attention(q, q, q, kernel="eager", config=config)
        return out

    compiled, q = torch.compile(call, fullgraph=True, backend=counter), qkv()[0].requires_grad_()
    for block_m, block_n in ((16, 16), (4, 8), (32, 8), (16, 16)):
        config = eager.Config(block_m, block_n)
        found = compiled(q, config)
        assert decoded[-1] == config
        torch.testing.assert_close(found, call(q, config))
        found.sum().backward()
    assert counter.frame_count == 3


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.NAME)
def test_configs_survive_the_operators_schema(kernel: Any) -> None:
    problem = AttentionProblem(
        batch=2, seqlen_q=64, seqlen_k=64, num_heads_q=2, num_heads_kv=2, head_dim=64, head_dim_v=64,
        dtype="float16", softmax_scale=0.125,
    )  # fmt: skip
    for config in kernel.configs(problem, resolve("h200")):
        assert ops._decode_config(kernel.NAME, ops.encode_config(config)) == config


# FLOP -----------------------------------------------------------------------------------------------------------------


def counted(call: Callable[[], Any]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        call()
    found = counter.get_flop_counts().get("Global", {})
    return {str(operator).removeprefix("warpwave."): flops for operator, flops in found.items()}


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_the_flop_counter_counts_as_for_sdpa(heads_kv: int) -> None:
    q = torch.randn(2, 33, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 21, heads_kv, width, requires_grad=True) for width in (16, 24))
    shapes: Any = [(2, 4, 33, 16), (2, heads_kv, 21, 16), (2, heads_kv, 21, 24)]
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count((2, 4, 33, 24), *shapes)
    both = {"attention": forward, "attention_backward": backward}
    assert counted(lambda: warpwave.attention(q, k, v, causal=True).sum().backward()) == both
    with torch.no_grad():
        assert counted(lambda: warpwave.attention(q, k, v, out=torch.empty(2, 33, 4, 24))) == {"attention_out": forward}


def test_the_flop_counter_counts_each_packed_sequence() -> None:
    given = packed()
    said: dict[str, Any] = {"cu_seqlens_q": given.cu_seqlens_q, "cu_seqlens_k": given.cu_seqlens_k}
    q, k, v = (t.requires_grad_() for t in given[:3])
    found = counted(
        lambda: warpwave.attention_varlen(q, k, v, max_seqlen_q=35, max_seqlen_k=35, **said).sum().backward()
    )
    pairs = 4 * (7 * 7 + 33 * 33)
    assert found == {"attention": 2 * pairs * 32, "attention_backward": 2 * pairs * 80}
    meta = [t.detach().to("meta") for t in given[:3]]
    said = {name: t.to("meta") for name, t in said.items()}
    found = counted(lambda: warpwave.attention_varlen(*meta, max_seqlen_q=35, max_seqlen_k=35, **said))
    assert found == {"attention": 2 * 3 * 4 * 35 * 35 * 32}, "lengths without contents are the greatest"


def test_the_flop_counter_counts_quantized_calls() -> None:
    x = warpwave.quantize(*qkv())
    said: Any = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
    found = counted(lambda: warpwave.attention(x.q, x.k, x.v, **said))
    assert found == {"quantized_attention": 2 * 2 * 4 * 33 * 33 * 32}
