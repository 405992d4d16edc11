"""Derivatives: what eager calls by-pass, what torch.func's transforms get, and what is refused in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map_only

import warpwave
from warpwave.operands import DropoutOperands
from warpwave.options import Options
from warpwave.workbench.bench.peers.peer import OperatorNames

SEQLEN, HEADS, HEAD_DIM = 9, 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def qkv(seed: int = 0, heads_kv: int = HEADS) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, SEQLEN, heads, HEAD_DIM, generator=g).to(DEVICE) for heads in (HEADS, heads_kv, heads_kv)]


def by_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.warpwave.attention(*DropoutOperands(q, k, v), None, *Options(), "auto", "")[0]
    return out


# Forward mode ---------------------------------------------------------------------------------------------------------


def in_a_dual_level(f: Callable[..., Any], q: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q, torch.ones_like(q)))


FORWARD_MODE: dict[str, Callable[..., Any]] = {
    "dual tensors": in_a_dual_level,
    "dual tensors that want gradients": lambda f, q: in_a_dual_level(f, q.requires_grad_()),
    "jvp": lambda f, q: jvp(f, (q,), (torch.ones_like(q),)),
    "jvp of vmap": lambda f, q: jvp(vmap(f), (torch.stack([q, q]),), (torch.stack([q, q]),)),
    "jacfwd": lambda f, q: jacfwd(f)(q),
    "hessian": lambda f, q: hessian(lambda q: f(q).sum())(q),
    "compiled jvp": lambda f, q: torch.compile(lambda q: jvp(f, (q,), (q,))[1], backend="aot_eager")(q),
}


# torch.library's own gradient refuses torch.func's transforms, of which a hessian is one.
@pytest.mark.parametrize(
    ("how", "door"),
    [(how, "attention") for how in FORWARD_MODE] + [(how, "operator") for how in FORWARD_MODE if how != "hessian"],
)
def test_tangents_are_refused_and_never_lost(how: str, door: str) -> None:
    """torch.library knows no forward mode: a tangent would come out as none, or as zeros."""
    call = warpwave.attention if door == "attention" else by_operator
    q, k, v = qkv()
    known = call(q, k, v)  # a call that is known is refused all the same
    with pytest.raises(Exception, match="no forward-mode derivatives") as caught:
        FORWARD_MODE[how](lambda q: call(q, k, v), q)
    if how != "compiled jvp":  # which wraps it
        assert isinstance(caught.value, warpwave.UnsupportedProblem)
        assert "reverse mode" in str(caught.value)
    else:
        torch._dynamo.reset()  # Dynamo skips a function whose compilation raised an error
    torch.testing.assert_close(call(q.detach(), k, v), known, rtol=0, atol=0)


def test_a_call_on_a_cache_refuses_tangents() -> None:
    cache = warpwave.PagedKVCache(
        num_pages=2, page_size=16, num_heads_kv=HEADS, head_dim=HEAD_DIM, max_batch=1, max_seqlen=32,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    q, k, v = qkv()
    row = cache.add()
    cache.append([row], k, v)
    for _ in range(2):
        warpwave.attention_with_kv_cache(q, cache)
    with forward_ad.dual_level(), pytest.raises(warpwave.InvalidInput, match="carries a tangent"):
        warpwave.attention_with_kv_cache(forward_ad.make_dual(q, q), cache)


def test_a_tangent_elsewhere_is_nobody_s_concern() -> None:
    q, k, v = qkv()
    expected = warpwave.attention(q, k, v)
    with forward_ad.dual_level():
        other = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        torch.testing.assert_close(warpwave.attention(q, k, v), expected)
        assert forward_ad.unpack_dual(other * 2).tangent is not None
        with forward_ad._set_fwd_grad_enabled(False):
            dual = forward_ad.make_dual(q, q)
            torch.testing.assert_close(warpwave.attention(dual, k, v), expected)
    one = (torch.ones((), device=DEVICE),)
    found: Any = jvp(lambda x: warpwave.attention(q, k, v) * x, one, one)
    out, tangent = found
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(tangent, expected)


# torch.func's transforms in reverse mode ------------------------------------------------------------------------------


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out, lse = warpwave.attention(q, k, v, causal=True, return_lse=True, **options)
    return out.square().sum() + lse.sin().sum()


def test_grad_vjp_and_jacrev_are_what_backward_gives() -> None:
    q, k, v = qkv(heads_kv=1)
    sinks = torch.randn(HEADS, device=DEVICE)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    expected = torch.autograd.grad(loss(leaves[0], leaves[1], leaves[2], sinks=leaves[3]), leaves)
    found = grad(lambda q, k, v, sinks: loss(q, k, v, sinks=sinks), argnums=(0, 1, 2, 3))(q, k, v, sinks)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    pulled: Any = vjp(lambda v: warpwave.attention(q, k, v), v)
    out, pull = pulled
    torch.testing.assert_close(out, warpwave.attention(q, k, v))
    dout = torch.randn_like(out)
    leaf = v.clone().requires_grad_()
    torch.testing.assert_close(pull(dout)[0], torch.autograd.grad(warpwave.attention(q, k, leaf), leaf, dout)[0])
    whole = jacrev(lambda v: warpwave.attention(q, k, v)[0, 0, 0, :2])(v)
    rows = torch.autograd.functional.jacobian(lambda v: warpwave.attention(q, k, v)[0, 0, 0, :2], v)
    torch.testing.assert_close(whole, rows)


def test_vmap_of_grad_and_grad_of_vmap() -> None:
    q, k, v = qkv()
    stacked = torch.stack([q, 2 * q])
    singly = torch.stack([grad(loss)(one, k, v) for one in stacked])
    torch.testing.assert_close(vmap(grad(loss), (0, None, None))(stacked, k, v), singly)
    together = grad(lambda stacked: vmap(loss, (0, None, None))(stacked, k, v).sum())(stacked)
    torch.testing.assert_close(together, singly)


@pytest.mark.parametrize("upstream_of", ["out", "lse", "both"])
def test_batches_of_upstream_gradients(upstream_of: str) -> None:
    """What `is_grads_batched` and vectorised jacobians hand over says of itself that it is an ordinary tensor."""
    q, k, v = qkv()
    q.requires_grad_()
    out, lse = warpwave.attention(q, k, v, return_lse=True)
    results = {"out": (out,), "lse": (lse,), "both": (out, lse)}[upstream_of]
    upstream = [torch.randn(3, *t.shape, device=DEVICE) for t in results]
    (together,) = torch.autograd.grad(results, q, upstream, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(results, q, one, retain_graph=True)[0] for one in zip(*upstream, strict=True)]
    torch.testing.assert_close(together, torch.stack(singly))


class Wrapped(torch.Tensor):
    """A tensor without storage: what it holds is reached by the dispatcher alone."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        self: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.held = inner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("kernel", ["eager", "flash_fwd"])
@pytest.mark.parametrize("which", ["dout", "dlse", "saved q", "saved out", "saved lse"])
def test_a_backward_takes_tensors_that_only_the_dispatcher_can_read(which: str, kernel: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    saved = [f"saved {name}" for name in ("q", "k", "v", "out", "lse")]
    numbers = itertools.count()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved[next(numbers)], t), lambda kept: Wrapped(kept[1]) if kept[0] == which else kept[1]
    ):
        results = step(kernel, q, k, v, return_lse=True)
    upstream = [torch.randn_like(t) for t in results]
    expected = torch.autograd.grad(step(kernel, q, k, v, return_lse=True), (q, k, v), upstream)
    given = [Wrapped(t) if name == which else t for name, t in zip(("dout", "dlse"), upstream, strict=True)]
    for found, one in zip(torch.autograd.grad(results, (q, k, v), given), expected, strict=True):
        torch.testing.assert_close(found.held if isinstance(found, Wrapped) else found, one)


@pytest.mark.parametrize("how", ["backward", "torch.func", "vmap of torch.func"])
def test_second_derivatives_are_refused(how: str) -> None:
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        if how == "backward":
            q.requires_grad_()
            (first,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
            first.sum().backward()
        elif how == "torch.func":
            grad(lambda q: grad(loss)(q, k, v).sum())(q)
        else:
            vmap(grad(lambda q: grad(loss)(q, k, v).sum()))(torch.stack([q, q]))


# What is kept and handed on -------------------------------------------------------------------------------------------

# three_kernel's gradients take nothing of its forward; eager's take out and the log-sum-exp.
KERNELS = ("three_kernel", "eager", "flash_fwd")


def step(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return warpwave.attention(q, k, v, kernel=kernel, **options)


@pytest.mark.parametrize("whose", KERNELS)
def test_a_backward_by_other_ways_gives_the_same(whose: str) -> None:
    """Twice on one graph, after hooks that change what was saved or its layout, in a checkpoint, and through views."""
    q, k, v = (t.requires_grad_() for t in qkv())
    out = step(whose, q, k, v, causal=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    ways: dict[str, Callable[[], Any]] = {
        "again": lambda: torch.autograd.grad(out, (q, k, v), dout),
        "strided": lambda: torch.autograd.grad(
            step(whose, q, k, v, causal=True), (q, k, v), dout.transpose(1, 2).contiguous().transpose(1, 2)
        ),
        "views": lambda: torch.autograd.grad(
            step(whose, *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)), causal=True).flatten(2),
            (q, k, v),
            dout.flatten(2),
        ),
        "checkpoint": lambda: torch.autograd.grad(
            torch.utils.checkpoint.checkpoint(step, whose, q, k, v, causal=True, use_reentrant=False), (q, k, v), dout
        ),
    }
    for name, way in ways.items():
        for a, b in zip(way(), expected, strict=True):
            torch.testing.assert_close(a, b, msg=name)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.detach().transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() == 4 else t
    ):
        out = step(whose, q, k, v, causal=True)
        found = torch.autograd.grad(out, (q, k, v), dout)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("whose", KERNELS)
def test_autograd_s_own_errors_stand(whose: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    out = step(whose, q, k, v)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    scaled = q * 1.0
    out = step(whose, scaled, k, v)
    with torch.no_grad():
        scaled.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("return_lse", [False, True])
def test_autograd_s_errors_and_profiles_name_the_call(return_lse: bool) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    results = warpwave.attention(q, k, v, return_lse=return_lse)
    for result in results if return_lse else (results,):
        assert result.grad_fn.name().startswith("WarpwaveAttention")
        result.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"output \d of WarpwaveAttention"):
            result.sum().backward(retain_graph=True)


@pytest.mark.parametrize(("whose", "kept"), [("three_kernel", 3), ("eager", 5), ("flash_fwd", 5)])
def test_nothing_is_kept_that_no_gradient_takes(whose: str, kept: int) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step(whose, q, k, v)
    assert len(saved) == kept


def test_one_of_two_results_may_go_unused() -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    for kernel in KERNELS:
        out, lse = step(kernel, q, k, v, return_lse=True)
        (of_lse,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
        (of_out,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        (of_both,) = torch.autograd.grad((out.sum(), lse.sum()), q)
        torch.testing.assert_close(of_both, of_lse + of_out)


def test_a_mode_sees_a_backward() -> None:
    """A backward under a mode goes through the operator, which the mode sees."""
    q, k, v = (t.requires_grad_() for t in qkv())
    for kernel in KERNELS:
        out = step(kernel, q, k, v)
        (expected,) = torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
        with OperatorNames() as operators:
            (found,) = torch.autograd.grad(out, q, torch.ones_like(out))
        assert "attention_backward" in operators.names
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("whose", ["flash_fwd", "eager"])
def test_one_sink_or_slope_for_all_heads(whose: str) -> None:
    """Broadcast over heads, as `expand` makes it, a sink or slope is every head's."""
    q, k, v = qkv()
    found = []
    for expanded in (False, True):
        sinks, slopes = (torch.full((1,), x, device=DEVICE).expand(HEADS) for x in (0.5, 0.25))
        if not expanded:
            sinks, slopes = sinks.contiguous(), slopes.contiguous()
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = step(whose, *leaves, sinks=sinks, alibi_slopes=slopes)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
