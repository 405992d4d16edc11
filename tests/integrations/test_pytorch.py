"""The door to torch: its function's parameter grid agrees or is declined and counted, contexts route and are undone,
and models run under it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import bias as causal_biases

import warpwave
from warpwave.integrations import pytorch

TORCHS: Any = torch._C._nn.scaled_dot_product_attention

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

# The shapes of torch's own samples for this operator, broadcasts that it accepts, and more lengths.
SHAPES: dict[str, Shapes] = {
    "3 axes": ((4, 3, 8), (4, 6, 8), (4, 6, 8)),
    "4 axes": ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8)),
    "head_dim_v": ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 16)),
    "more queries than keys": ((2, 2, 7, 16), (2, 2, 3, 16), (2, 2, 3, 16)),
    "one query": ((2, 2, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16)),
    "odd head_dim": ((1, 3, 17, 5), (1, 3, 17, 5), (1, 3, 17, 5)),
    "one batch of q": ((1, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8)),
    "one batch of k and v": ((4, 4, 3, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
    "one batch of v": ((4, 4, 3, 8), (4, 4, 6, 8), (1, 4, 6, 8)),
    "one head of k and v": ((2, 4, 3, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "one head of k": ((2, 4, 3, 8), (2, 1, 6, 8), (2, 4, 6, 8)),
    "one head of q": ((2, 1, 3, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
}
MASKS: dict[str, Any] = {
    "none": lambda sq, sk: None,
    "additive": lambda sq, sk: torch.randn(sq, sk),
    "boolean": lambda sq, sk: torch.rand(sq, sk) > 0.3,
    "a row of nothing": lambda sq, sk: (torch.arange(sq)[:, None] > 0) & torch.ones(sk, dtype=torch.bool),
    "keys": lambda sq, sk: torch.arange(sk)[None] < sk - 1,
    "minus infinity": lambda sq, sk: torch.zeros(sq, sk).masked_fill(torch.rand(sq, sk) > 0.6, -torch.inf),
}


def tensors(shapes: Shapes, dtype: torch.dtype = torch.float32, grad: bool = False) -> Any:
    torch.manual_seed(1)
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def mine_of(given: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    return pytorch.scaled_dot_product_attention(*(*given, *arguments), **options)


def assert_as_torch(given: Any, *arguments: Any, **options: Any) -> None:
    mine = mine_of(given, *arguments, **options)
    torchs = TORCHS(*given, *arguments, **options)
    assert mine.shape == torchs.shape and mine.dtype == torchs.dtype
    torch.testing.assert_close(mine, torchs)
    if given[0].requires_grad:
        dout = torch.randn_like(torchs)
        torch.testing.assert_close(torch.autograd.grad(mine, given, dout), torch.autograd.grad(torchs, given, dout))


@pytest.fixture
def none_declined() -> Iterator[None]:
    before = pytorch.declined()
    yield
    assert pytorch.declined() == before


def test_the_grid_agrees_with_torch(none_declined: None) -> None:
    """Shapes, masks, causal, scales and gradients; torch refuses a mask together with is_causal."""
    count = 0
    for (name, shapes), (mask, make), is_causal in itertools.product(SHAPES.items(), MASKS.items(), (False, True)):
        if is_causal and mask != "none":
            continue
        # torch's causal mask, minus infinity times the scale, is NaN for scales that are not positive.
        scale = (None, 0.5)[count % 2] if is_causal else (None, 0.5, -0.3, 0.0)[count % 4]
        given = tensors(shapes, grad=count % 2 == 0)
        assert_as_torch(given, make(shapes[0][-2], shapes[1][-2]), 0.0, is_causal, scale=scale)
        count += 1
        del name
    assert count == len(SHAPES) * (len(MASKS) + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_heads_and_dtypes(heads: tuple[int, int], dtype: torch.dtype, none_declined: None) -> None:
    shapes = ((2, heads[0], 5, 8), (2, heads[1], 7, 8), (2, heads[1], 7, 8))
    assert_as_torch(tensors(shapes, dtype), torch.randn(2, 1, 5, 7).to(dtype), enable_gqa=True)
    assert_as_torch(tensors(shapes, dtype), is_causal=True, enable_gqa=True)


def test_masks_broadcast_and_have_gradients(none_declined: None) -> None:
    given = tensors(SHAPES["4 axes"])
    for shape in ((4, 4, 3, 6), (4, 1, 3, 6), (1, 4, 3, 6), (4, 3, 6), (1, 6), (4, 1, 1, 6), (1, 1)):
        mask = torch.randn(shape, requires_grad=True)
        mine, torchs = mine_of(given, mask), TORCHS(*(*given, mask))
        torch.testing.assert_close(mine, torchs)
        dout = torch.randn_like(mine)
        pair = [torch.autograd.grad(out, mask, dout)[0] for out in (mine, torchs)]
        torch.testing.assert_close(*pair)
    wide = tensors(SHAPES["4 axes"], torch.bfloat16)
    assert_as_torch(wide, torch.randn(3, 6))  # float32, beside 16-bit tensors


def drawn(call: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results and gradients of a call that begins with a fixed state of torch's generator."""
    torch.manual_seed(5)
    out = call(*given)
    return out, *torch.autograd.grad(out, given, torch.ones_like(out))


def test_dropout(none_declined: None) -> None:
    """Dropout is that of warpwave, with its gradients, eager and compiled; it drops and scales probabilities."""
    given = tensors(((2, 4, 40, 8), (2, 2, 48, 8), (2, 2, 48, 8)), grad=True)
    mask = torch.rand(2, 1, 40, 48) > 0.2
    options: dict[str, Any] = {"dropout_p": 0.25, "enable_gqa": True, "scale": 0.4}

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tokens = (t.transpose(1, 2) for t in (q, k, v))
        out: torch.Tensor = warpwave.attention(*tokens, mask=mask, dropout_p=0.25, softmax_scale=0.4)
        return out.transpose(1, 2)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    with pytorch.sdpa():
        results = drawn(call, *given)
        compiled = drawn(torch.compile(call, backend="aot_eager", fullgraph=True), *given)
    for found in (results, compiled):
        torch.testing.assert_close(found, drawn(expected, *given))
    q, k = (t.detach() for t in given[:2])
    identity = torch.eye(48).expand(2, 2, 48, 48)
    kept = pytorch.scaled_dot_product_attention(q, k, identity, mask, **options)  # v = 1: out is the probabilities
    full = pytorch.scaled_dot_product_attention(q, k, identity, mask, **(options | {"dropout_p": 0.0}))
    shown = (full > 0) & (kept > 0)
    torch.testing.assert_close(kept[shown], full[shown] / 0.75)
    share = 1 - float(shown.sum() / (full > 0).sum())
    assert abs(share - 0.25) < 0.02  # of 12,000 pairs: five standard deviations


def test_autocast_casts_as_torch_does(none_declined: None) -> None:
    given = tensors(SHAPES["4 axes"])
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_torch(given, torch.randn(3, 6))
        assert pytorch.scaled_dot_product_attention(*given).dtype == torch.bfloat16
        assert_as_torch([t.double() for t in given])
        # Keys that stayed float32, as rotary embeddings leave them, values that a linear layer cast, and another mask.
        q, k, v = given
        assert_as_torch([q, k.half(), v.bfloat16()], torch.randn(3, 6).half())


def test_meta_tensors(none_declined: None) -> None:
    q, k, v = (t.to("meta") for t in tensors(SHAPES["4 axes"]))
    assert pytorch.scaled_dot_product_attention(q, k, v).shape == TORCHS(q, k, v).shape


def test_torch_answers_one_batch_beside_none() -> None:
    """Which of the two batches torch's result has depends on the backend."""
    q, k, v = tensors(SHAPES["4 axes"])
    for given in ((q[:0], k[:1], v[:1]), (q[:1], k[:0], v[:0])):
        assert_as_torch(given)


def test_a_boolean_is_a_number_as_in_torch() -> None:
    """torch takes booleans for its numbers, warpwave does not: torch answers."""
    q, k, v = tensors(SHAPES["4 axes"])
    calls: list[dict[str, Any]] = [{"dropout_p": False}, {"scale": True}]
    for options in calls:
        assert torch.equal(pytorch.scaled_dot_product_attention(q, k, v, **options), TORCHS(q, k, v, **options))


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:There is a performance drop")
def test_what_is_declined_is_counted_said_once_and_answered_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors(SHAPES["4 axes"])
    cases: list[tuple[str, Any]] = [
        ("dropout_p", lambda f: f(q, k, v, None, 1.0)),  # warpwave's probabilities are less than 1
        ("the number of axes", lambda f: f(q[None], k[None], v[None])),
        ("the number of axes", lambda f: f(q[0], k, v)),
        ("a tensor subclass", lambda f: f(q.as_subclass(Subclass), k, v)),
        ("a nested or sparse tensor", lambda f: f(*[torch.nested.nested_tensor([t[0], t[1]]) for t in (q, k, v)])),
        ("attn_mask together with is_causal", lambda f: f(q, k, v, torch.ones(3, 6, dtype=torch.bool), 0.0, True)),
        ("the scale", lambda f: f(q, k, v, scale=float("inf"))),
        (
            "a transform of torch.func, or forward-mode derivatives",
            lambda f: torch.func.vmap(f)(q[None], k[None], v[None]),
        ),
        (
            "a transform of torch.func, or forward-mode derivatives",
            lambda f: torch.func.grad(lambda t: f(t, k, v).square().sum())(q),
        ),
    ]
    for reason, call in cases:
        before = pytorch.declined().get(reason, 0)
        mine, torchs = call(pytorch.scaled_dot_product_attention), call(TORCHS)
        pair = [t.to_padded_tensor(0.0) if t.is_nested else t for t in (mine, torchs)]
        torch.testing.assert_close(*pair, equal_nan=True)
        assert pytorch.declined()[reason] == before + 1
        said = caplog.text.count(f"not warpwave: {reason}\n")
        assert said == (1 if before == 0 else said)


def test_an_invalid_call_gets_torchs_error() -> None:
    q, k, v = tensors(SHAPES["4 axes"])
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((q, k[:, :2], v[:, :2]), {}),
        ((q, k, v.double()), {}),
        ((q, k, v), {"attn_mask": torch.ones(3, 6, dtype=torch.int32)}),
        ((q, k, v), {"attn_mask": torch.ones(5, 6)}),
        ((q, [1.0], v), {}),
    ]
    for given, options in calls:
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            TORCHS(*given, **options)
        with pytest.raises(type(theirs.value)) as mine:
            pytorch.scaled_dot_product_attention(*given, **options)
        assert str(mine.value) == str(theirs.value)
    numbers: list[dict[str, Any]] = [{"is_causal": 1}, {"enable_gqa": 1}]
    for number in numbers:
        with pytest.raises(TypeError, match="must be bool, not int"):
            pytorch.scaled_dot_product_attention(q, k, v, **number)


# Routing --------------------------------------------------------------------------------------------------------------


def served(call: Any) -> bool:
    """Returns whether a causal call reaches warpwave, where the values of a key that no query sees have no effect, NaN
    included."""
    q = torch.ones(1, 1, 1, 4)
    v = torch.tensor([1.0, torch.nan])[None, None, :, None].expand(1, 1, 2, 4)
    return not call(q, v.nan_to_num(0.0), v).isnan().any()


def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_context_routes_and_restores() -> None:
    assert F.scaled_dot_product_attention is TORCHS and not served(by_name)
    with pytorch.sdpa():
        kept = F.scaled_dot_product_attention
        assert served(by_name)
        with pytorch.sdpa():
            assert served(by_name)
        assert served(by_name)
        with pytest.raises(ZeroDivisionError), pytorch.sdpa():
            raise ZeroDivisionError
        assert served(by_name)
        with torch.device("cpu"):  # a mode of torch's functions, which is no reason to decline
            assert served(by_name)
        assert torch.equal(
            F.scaled_dot_product_attention(*(*tensors(SHAPES["4 axes"]), None, 1.0)), torch.zeros(4, 4, 3, 8)
        )
    assert F.scaled_dot_product_attention is TORCHS and not served(lambda q, k, v: kept(q, k, v, is_causal=True))

    @pytorch.sdpa()
    def decorated(depth: int) -> bool:
        return served(by_name) and (depth == 0 or decorated(depth - 1))

    assert decorated(2) and F.scaled_dot_product_attention is TORCHS


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH", "EFFICIENT_ATTENTION"])
def test_a_selected_backend_of_torch_changes_nothing(backend: str, none_declined: None) -> None:
    """torch itself has no EFFICIENT_ATTENTION on a CPU, and FLASH_ATTENTION only if q and v have one width."""
    q, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 24)
    with pytorch.sdpa(), sdpa_kernel(getattr(SDPBackend, backend)):
        found = F.scaled_dot_product_attention(q, q, v)
    torch.testing.assert_close(found, TORCHS(q, q, v))


def test_contexts_of_threads_overlap() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with pytorch.sdpa():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    with pytorch.sdpa():
        pass
    assert served(by_name)  # the other thread's is open
    leave.set()
    thread.join()
    assert F.scaled_dot_product_attention is TORCHS


def test_a_replacement_by_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **b: pytorch.scaled_dot_product_attention(*a, **b)
    )
    theirs = F.scaled_dot_product_attention
    q, k, v = tensors(SHAPES["4 axes"])
    theirs(q, k, v, None, 1.0)  # declined: no recursion
    with pytorch.sdpa():
        assert F.scaled_dot_product_attention is not theirs
    assert F.scaled_dot_product_attention is theirs
    with pytorch.sdpa():
        monkeypatch.setattr(F, "scaled_dot_product_attention", TORCHS)
    assert F.scaled_dot_product_attention is TORCHS


@pytest.mark.parametrize("lengths", [(5, 5), (5, 8), (8, 5)])
@pytest.mark.parametrize("kind", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_torchs_causal_biases(kind: str, lengths: tuple[int, int], none_declined: None) -> None:
    """Torch's class has no contents: it computes the call in its `__torch_function__`, which looks for torch's name."""
    bias = getattr(causal_biases, kind)(*lengths)
    q, k, v = (torch.randn(2, 3, length, 16) for length in (lengths[0], lengths[1], lengths[1]))
    expected = F.scaled_dot_product_attention(q, k, v, bias)
    with pytorch.sdpa():
        out = F.scaled_dot_product_attention(q, k, v, bias)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, expected.nan_to_num())  # torch gives NaN where no key is visible
    with pytest.raises(ValueError, match="is_causal"):
        pytorch.scaled_dot_product_attention(q, k, v, bias, is_causal=True)


# Modules and compilation ----------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return by_name(q, k, v) * 2


def test_compiled_before_or_after() -> None:
    given = tensors(SHAPES["4 axes"], grad=True)
    compiled = torch.compile(Block(), backend="aot_eager", fullgraph=True)
    expected = compiled(*given)
    with pytorch.sdpa():
        assert served(compiled)
        mine = compiled(*given)
    assert not served(compiled)
    torch.testing.assert_close(mine, expected)
    dout = torch.randn_like(mine)
    torch.testing.assert_close(torch.autograd.grad(mine, given, dout), torch.autograd.grad(expected, given, dout))


def test_an_exported_graph_holds_our_operator() -> None:
    with pytorch.sdpa():
        graph = torch.export.export(Block(), tuple(tensors(SHAPES["4 axes"]))).graph
    assert torch.ops.warpwave.attention.default in [node.target for node in graph.nodes]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("num_heads_kv", [4, 1])
def test_an_exported_graph_takes_other_sizes(num_heads_kv: int, strict: bool) -> None:
    q, k, v = (torch.randn(2, heads, 5, 16) for heads in (4, num_heads_kv, num_heads_kv))
    batch, seqlen = torch.export.Dim("batch"), torch.export.Dim("seqlen")
    with pytorch.sdpa():
        exported = torch.export.export(Block(), (q, k, v), dynamic_shapes=({0: batch, 2: seqlen},) * 3, strict=strict)
    assert torch.ops.warpwave.attention.default in [node.target for node in exported.graph.nodes]
    other = [torch.randn(3, t.shape[1], 9, 16) for t in (q, k, v)]
    torch.testing.assert_close(exported.module()(*other), Block()(*other))


def of_module(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    x, y = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(7)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    if name == "MultiheadAttention":
        module: torch.nn.Module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        return module, (x, y, y), {"need_weights": False}
    if name == "TransformerEncoder":
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2), (x,), {"src_key_padding_mask": padding}
    module = torch.nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    return module, (y, x), {"tgt_mask": causal, "tgt_is_causal": True}


@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerEncoder", "Transformer"])
def test_torchs_modules(name: str, none_declined: None) -> None:
    torch.manual_seed(0)
    module, given, options = of_module(name)
    results, gradients = [], []
    for context in (torch.enable_grad(), pytorch.sdpa()):
        with context:
            out = module(*given, **options)
            out = out[0] if isinstance(out, tuple) else out
            # With padding, rows of padding differ: torch's additive mask has no effect on them.
            loss = out.square().mean()
            gradients.append(torch.autograd.grad(loss, list(module.parameters()), allow_unused=True))
            results.append(out)
    torch.testing.assert_close(results[1], results[0])
    for mine, torchs in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, torchs)
