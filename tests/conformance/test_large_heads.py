"""The kernels for large heads at the widths they are for, and in the ways only they can be configured.

Every test of this folder meets them too, at the widths of its grid; here each width is one small call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call, W
from tests.conformance.gates import (
    forward_references,
    judge_forward,
)
from tests.conformance.harness import DEVICE, GPU, ON_GPU, bits
from tests.conformance.test_probes import check_count, check_retrieval, check_support
from warpwave import attention
from warpwave.kernels import large_head_dim, three_kernel
from warpwave.kernels.three_kernel_plan import least_bytes, plan

MODULES: dict[str, Any] = {"large_head_dim": large_head_dim, "three_kernel": three_kernel}
each_module = pytest.mark.parametrize("name", MODULES)
WIDTHS = (257, 320, 384, 512, 576, 640, 1000, 1024, 2048, 4096, 8192)
DTYPES = ("bfloat16", "float16", "float32:ieee", "float32:default")
LENGTHS = (113, 203) if ON_GPU else (5, 19)


def assert_gates(name: str, call: Call, config: Any = None) -> None:
    out, lse = harness.run(name, call, config)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, f"{name} with {config}: {verdict}"


def widths_and_dtypes() -> list[Any]:
    """All of both on a GPU; where they are interpreted, each width in one dtype, and each dtype at several widths."""
    if ON_GPU:
        return [(width, dtype) for width in WIDTHS for dtype in (*DTYPES, "float32:tf32")]
    found: list[Any] = [(width, DTYPES[i % 3]) for i, width in enumerate(WIDTHS)]
    return [point if point[0] <= 2048 else pytest.param(*point, marks=pytest.mark.full) for point in found]


@each_module
@pytest.mark.parametrize(("width", "dtype"), widths_and_dtypes())
def test_every_width(width: int, dtype: str, name: str) -> None:
    case = replace(PLAIN, dtype=dtype, dims=(width, width), lengths=LENGTHS, heads=(2, 1), causal="bottom_right")
    assert_gates(name, cases.build(case, "normal", DEVICE))


@each_module
@pytest.mark.parametrize("dims", [(576, 512), (300, 1024), (1024, 40), (40, 700)], ids=str)
def test_v_of_another_width(dims: tuple[int, int], name: str) -> None:
    case = replace(PLAIN, dims=dims, lengths=(9, 40), heads=(2, 1), sinks=True, window=(W, 5))
    assert_gates(name, cases.build(case, "sharp", DEVICE))


PROBES: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "window": {"causal": "top_left", "window": (W, 5)},
    "mask and bias": {"mask": "full", "bias": "full"},
    "packed": {"packed": True, "batch": 4, "causal": "bottom_right"},
}


@each_module
@pytest.mark.parametrize("features", PROBES)
def test_probes(features: str, name: str, request: pytest.FixtureRequest) -> None:
    """Count, support and retrieval, at lengths that end inside a tile."""
    case = replace(PLAIN, dims=(320, 272), heads=(2, 1), lengths=(23, 70), **PROBES[features])
    check_count(name, case, request)
    check_support(name, replace(case, lse=False), request)
    check_retrieval(name, replace(case, lse=False), request)


# large_head_dim -------------------------------------------------------------------------------------------------------

DECODING = replace(PLAIN, dtype="bfloat16", dims=(192, 128), lengths=(1, 70), heads=(4, 2))


def with_one_tensor(call: Call) -> Call:
    """The call with v the first columns of k, a view of the same memory."""
    k = call.operands.k
    return call._replace(operands=call.operands._replace(v=k[..., : call.problem.head_dim_v]))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_one_tensor_for_k_and_v(num_splits: int) -> None:
    """Read once or twice, the same bits; and a later call of the same layout with another v reads that."""
    one = with_one_tensor(cases.build(replace(DECODING, sinks=True), "normal", DEVICE))
    config = large_head_dim.Config(16, 16, 64, 1, num_splits, True, 4, 1)
    result = harness.run("large_head_dim", one, config)
    v = (one.operands.k * 2)[..., : one.problem.head_dim_v]
    assert v.stride() == one.operands.v.stride()
    two = one._replace(operands=one.operands._replace(v=v))
    out, lse = harness.run("large_head_dim", two, config)
    assert bits(out, lse) == bits(result[0] * 2, result[1])
    assert_gates("large_head_dim", one, config)


@pytest.mark.parametrize("features", ["plain", *PROBES])
@pytest.mark.parametrize(
    "config",
    [(16, 16, 64, 1, 5, True, 4, 1), pytest.param((16, 32, 32, 2, 3, False, 4, 1), marks=pytest.mark.full)],
    ids=str,
)
def test_keys_split_over_blocks(config: tuple[Any, ...], features: str) -> None:
    """More splits than some sequences have tiles of keys; columns of v shared out as well."""
    case = replace(
        DECODING, dims=(72, 96), lengths=(4, 90), sinks=True, **({} if features == "plain" else PROBES[features])
    )
    assert_gates("large_head_dim", cases.build(case, "low", DEVICE), large_head_dim.Config(*config))


def test_query_heads_of_a_group_share_tiles() -> None:
    """A tile of 16 rows holds queries of three heads each: every row has its own slope, sink and place in out."""
    case = replace(PLAIN, dims=(272, 264), lengths=(9, 33), heads=(6, 2), batch=2, alibi="batch", sinks=True)
    config = large_head_dim.Config(16, 16, 64, 1, 1, False, 4, 1)
    call = cases.build(replace(case, causal="bottom_right"), "normal", DEVICE)
    assert large_head_dim._heads_together(call.problem) == 3
    assert_gates("large_head_dim", call, config)


def test_a_mask_of_its_own_keeps_a_head_to_itself() -> None:
    """A NaN in a value that one head of a group sees does not reach a head that does not see it."""
    call = cases.build(replace(PLAIN, dims=(264, 264), lengths=(5, 20), heads=(2, 1), mask="full"), "normal", DEVICE)
    assert call.operands.mask is not None
    call.operands.mask[:, :, :, 7] = torch.tensor([True, False], device=DEVICE)[None, :, None]
    clean, _ = harness.run("large_head_dim", call)
    call.operands.v[:, 7] = torch.nan
    out, _ = harness.run("large_head_dim", call)
    assert out[:, :, 0].isnan().all()
    assert bits(out[:, :, 1]) == bits(clean[:, :, 1])


# three_kernel ---------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "library": {"scores": "library", "values": "library"},
    "library, ours": {"scores": "library", "values": "triton"},
    "ours": {"scores": "triton", "values": "triton"},
    "fused": {"scores": "fused", "values": "triton"},
    "shared head_dim": {"scores": "triton", "values": "triton", "split_d": 3},
}
SMALL = three_kernel.Config("triton", "triton", 16, 32, 16, 32, 4, 1, 1, 4, 64, 4, 1 << 20)
CUT = replace(PLAIN, dims=(72, 40), lengths=(35, 70), heads=(2, 1))


def way(name: str, **changes: Any) -> three_kernel.Config:
    return replace(SMALL, **(WAYS[name] | changes))


def ways_and_features() -> list[Any]:
    """Each way with each feature; where they are interpreted, in one of the dtypes, and in every run those that do most
    themselves."""
    features, dtypes = ("plain", "window", "mask and bias", "packed"), ("bfloat16", "float32:ieee")
    points = []
    for i, products in enumerate(WAYS):
        for j, name in enumerate(features):
            marks = [] if ON_GPU or products == "fused" or i % 4 == j else [pytest.mark.full]
            for dtype in dtypes if ON_GPU else dtypes[(i + j) % 2 :][:1]:
                points.append(pytest.param(products, name, dtype, marks=marks))
    return points


@pytest.mark.parametrize(("products", "features", "dtype"), ways_and_features())
def test_every_way_in_chunks(products: str, features: str, dtype: str) -> None:
    """Each way of computing the products, in chunks of some rows of one head; what a way cannot, it says."""
    changes = {} if features == "plain" else PROBES[features] | ({"batch": 2} if features == "packed" else {})
    call = cases.build(replace(CUT, dtype=dtype, sinks=True, alibi="heads", **changes), "sharp", DEVICE)
    config = way(products, workspace_bytes=3 * least_bytes(call.problem, way(products)) // 2)
    if reasons := three_kernel._library_cannot(call.problem, GPU, config):
        with pytest.raises(NotImplementedError) as refusal:
            harness.run("three_kernel", call, config)
        assert all(reason in str(refusal.value) for reason in reasons)
        return
    assert len(plan(call.problem, config).chunks) == 3 * call.problem.batch * call.problem.num_heads_q
    assert_gates("three_kernel", call, config)


@pytest.mark.parametrize("products", ["ours", "fused"])
@pytest.mark.parametrize("features", ["causal", "window"])
def test_chunks_do_not_change_a_bit(features: str, products: str) -> None:
    call = cases.build(replace(CUT, sinks=True, **PROBES[features]), "normal", DEVICE)
    results = [
        bits(*harness.run("three_kernel", call, way(products, workspace_bytes=n))) for n in (10_000, 60_000, 1 << 22)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("products", WAYS)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32:ieee", marks=pytest.mark.full)])
def test_the_workspace_is_what_was_said(products: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a call allocates beside its outputs, to the byte; and never more than was allowed."""
    call = cases.build(replace(CUT, dtype=dtype, causal="bottom_right"), "normal", DEVICE)
    config = way(products, workspace_bytes=40_000)
    harness.run("three_kernel", call, config)  # plans, compiles and allocates for that
    allocated, allocate = [], torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        allocated.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    out, lse = harness.run("three_kernel", call, config)
    assert lse is not None
    outputs = out.numel() * out.element_size() + lse.numel() * 4
    said = three_kernel.cost(call.problem, GPU, config).workspace_bytes
    assert sum(allocated) - outputs == said <= config.workspace_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("products", WAYS)
def test_device_memory_is_what_was_said(products: str) -> None:
    """What the allocator hands out, torch's products included; it rounds each tensor up to 512 bytes."""
    case = replace(PLAIN, dtype="bfloat16", dims=(1024, 1024), lengths=(2048, 2048), heads=(4, 4))
    call = cases.build(case, "normal", DEVICE)
    config = replace(three_kernel.configs(call.problem, GPU)[0], **(WAYS[products] | {"workspace_bytes": 1 << 26}))
    harness.run("three_kernel", call, config)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = harness.run("three_kernel", call, config)
    torch.cuda.synchronize()
    assert lse is not None
    taken = torch.cuda.max_memory_allocated() - before - out.numel() * 2 - lse.numel() * 4
    assert abs(taken - three_kernel.cost(call.problem, GPU, config).workspace_bytes) <= 8 * 512


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("products", ["library, ours", "ours", "fused"])
def test_scores_past_32_bits(products: str) -> None:
    """A workspace of more than 2^31 scores gives the bits of a small one."""
    case = replace(PLAIN, dtype="bfloat16", dims=(64, 64), lengths=(33_000, 66_000), heads=(1, 1))
    call = cases.build(case, "normal", DEVICE)
    default = replace(three_kernel.configs(call.problem, GPU)[0], **WAYS[products])
    results = []
    for size in (16 << 30, 1 << 28):
        config = replace(default, workspace_bytes=size)
        results.append(bits(*harness.run("three_kernel", call, config)))
    cut = plan(call.problem, replace(default, workspace_bytes=16 << 30))
    assert cut.rows * cut.width > 2**31
    assert results[0] == results[1] or products.startswith("library")  # whose sums may run in another order


def test_a_model_of_two_head_sizes() -> None:
    """Layers of 256 with a window and of 512 without, as models mix them, each on its own kernel."""
    g = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(1, 24, 512, generator=g, device=DEVICE, dtype=torch.float32)

    def model(x: torch.Tensor, narrow: str, wide: str) -> torch.Tensor:
        a = x.unflatten(-1, (2, 256))
        x = x + attention(a, a, a, causal=True, window_size=(7, 0), kernel=narrow).flatten(-2)
        a = x.unflatten(-1, (1, 512))
        return x + attention(a, a, a, causal=True, kernel=wide).flatten(-2)

    expected = model(x, "eager", "eager")
    for wide in ("three_kernel", "large_head_dim"):
        torch.testing.assert_close(model(x, "auto", wide), expected, rtol=1e-4, atol=1e-4)
