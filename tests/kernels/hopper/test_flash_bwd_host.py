"""The host code of `hopper/flash_bwd`, on an H200 that is made up: what a training step launches, copies and keeps."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import warpwave
from tests.test_new_lengths import Card, card, device, known, pytestmark
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_bwd
from warpwave.kernels.hopper.flash_bwd import kernel
from warpwave.kernels.hopper.flash_bwd.config import (
    SMEM_PER_BLOCK,
    ascends,
    config_of_bias,
    divided_tail,
    group_splits,
    steps_of_dq,
)
from warpwave.kernels.hopper.host import bias_bytes
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime import launch, parameters
from warpwave.workbench.bench.peers.peer import OperatorNames

__all__ = ["card", "device", "known", "pytestmark"]  # fixtures
BACKWARD = ["statistics_kernel", "joint_kernel", "finish_dq_kernel"]  # in the order in which they are compiled
APART = ["statistics_kernel", "dkv_kernel", "dq_kernel"]
HIDDEN = ["check_unseen_kernel", "zero_unseen_kernel"]


def compiled(card: Card) -> list[str]:
    return [spec.kernel.__name__ for spec in card.compiled]


def inputs(seqlen: int = 2048) -> list[torch.Tensor]:
    return [torch.randn(2, seqlen, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(
    ("head_dim", "lengths", "change", "kernel"),
    [
        (256, (16, 9), {}, "flash_bwd"),
        (256, (64, 64), {"causal": Causal()}, "flash_bwd"),
        (128, (32, 128), {}, "flash_bwd"),
        (128, (65, 64), {}, "hopper/flash_bwd"),
        (64, (65, 64), {}, "flash_bwd"),
        (64, (128, 64), {}, "flash_bwd"),
        (64, (65, 65), {}, "hopper/flash_bwd"),
        (64, (129, 65), {}, "hopper/flash_bwd"),
        (64, (129, 16), {}, "flash_bwd"),  # a tile holds all keys
        (64, (16, 129), {}, "flash_bwd"),  # a tile holds all queries
        (256, (128, 16), {}, "hopper/flash_bwd"),
        (64, (128, 128), {"mask_shape": (512, 1, 1, 128)}, "flash_bwd"),
        (72, (65, 64), {"mask_shape": (512, 1, 1, 64)}, "hopper/flash_bwd"),
        (256, (64, 64), {"mask_shape": (512, 1, 1, 64)}, "hopper/flash_bwd"),
        (256, (32, 32), {"mask_shape": (512, 1, 1, 32)}, "flash_bwd"),
        (64, (64, 64), {"batch": 1}, "flash_bwd"),
        (64, (64, 64), {"num_heads_q": 64, "num_heads_kv": 1}, "flash_bwd"),
        (64, (64, 64), {"batch": 128, "num_heads_q": 64, "num_heads_kv": 1}, "hopper/flash_bwd"),
        (64, (16, 16), {"mask_shape": (512, 1, 1, 16)}, "flash_bwd"),
        (64, (16, 16), {"bias_shape": (1, 4, 16, 16), "bias_dtype": "bfloat16"}, "flash_bwd"),
        (64, (16, 16), {"bias_shape": (1, 4, 16, 16), "bias_dtype": "bfloat16", "num_heads_kv": 2}, "hopper/flash_bwd"),
        (64, (16, 16), {"packed": True, "total_q": 8192, "total_k": 8192}, "flash_bwd"),
    ],
    ids=str,
)
def test_calls_of_joint_launches_are_left_to_flash_bwd(
    head_dim: int, lengths: tuple[int, int], change: dict[str, Any], kernel: str
) -> None:
    problem = AttentionProblem(
        batch=512, seqlen_q=lengths[0], seqlen_k=lengths[1], num_heads_q=4, num_heads_kv=4, head_dim=head_dim,
        head_dim_v=head_dim, dtype="bfloat16", softmax_scale=0.1, requires_grad=True,
    )  # fmt: skip
    gpu = replace(Gpu.for_arch("sm_90"), num_sms=132)
    assert dispatch.gradients_for(replace(problem, **change), gpu).NAME == kernel


def test_a_step_takes_four_launches(card: Card) -> None:
    q, k, v = inputs()
    for _ in range(2):
        grads = torch.autograd.grad(warpwave.attention(q, k, v, causal=True).sum(), (q, k, v))
    assert compiled(card) == ["hopper_flash_fwd_kernel", *BACKWARD]
    assert [(g.shape, g.dtype, g.is_contiguous()) for g in grads] == [(t.shape, t.dtype, True) for t in (q, k, v)]


def test_a_loss_of_the_log_sum_exp_is_another_launch(card: Card) -> None:
    q, k, v = inputs()
    out, lse = warpwave.attention(q, k, v, return_lse=True)
    torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert compiled(card)[1:] == [*BACKWARD, "statistics_kernel"]


def test_what_arrives_may_lie_anywhere(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches are compiled for multiples of 16 bytes and contiguous rows."""
    q, k, v = inputs()
    out = warpwave.attention(q, k, v)
    taken: list[Any] = []
    specify = kernel.specify

    def spy(*arguments: Any) -> Any:
        taken.append(arguments[2].dout)
        return specify(*arguments)

    monkeypatch.setattr(kernel, "specify", spy)
    shifted = torch.zeros(out.numel() + 1, dtype=out.dtype)[1:].view_as(out)
    for dout in (shifted, torch.zeros(1, dtype=out.dtype).expand(out.shape)):
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert taken[0].data_ptr() % 16 == 0 and taken[0].is_contiguous()


@pytest.mark.parametrize("masked", [False, True])
def test_tensors_of_a_call_are_not_kept(card: Card, masked: bool) -> None:
    q, k, v = inputs()
    mask = torch.ones(1, 4, 2048, 2048, dtype=torch.bool)
    warpwave.attention(q, k, v, mask=mask if masked else None).sum().backward()
    kept = [weakref.ref(t) for t in (q, k, v, mask)]
    card.compiled.clear()
    card.launched.clear()
    del q, k, v, mask
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_a_mask_of_other_strides_is_packed_by_them(card: Card) -> None:
    """Though its shape is the same: nothing that a call bound is used for another layout."""
    q, k, v = inputs(256)
    mask = torch.ones(1, 4, 256, 512, dtype=torch.bool)
    for given in (mask[..., :256], mask[..., :256].contiguous(), mask[..., :256]):
        torch.autograd.grad(warpwave.attention(q, k, v, mask=given).sum(), (q, k, v))
    packing = {i for i, name in enumerate(compiled(card), 1) if name == "pack_mask_kernel"}
    strides = [numbers[2:4] for function, _, _, numbers in card.bound if function in packing]
    assert strides == [[512 // 4, 1], [256 // 4, 1]], "in units of four keys, once for each layout"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mask_takes_the_joint_launch(card: Card, deterministic: bool) -> None:
    q, k, v = inputs(256)
    mask = torch.ones(1, 4, 256, 256, dtype=torch.bool)
    torch.autograd.grad(warpwave.attention(q, k, v, mask=mask, deterministic=deterministic).sum(), (q, k, v))
    packing = [spec.constants["TRANSPOSED"] for spec in card.compiled if spec.kernel.__name__ == "pack_mask_kernel"]
    assert packing == [True]
    assert compiled(card)[-5:] == [*HIDDEN, *BACKWARD]


PARTS = ["maxima_kernel", "split_rows_kernel", "split_dq_kernel", "split_dkv_kernel"]


def in_float32(packed: bool = False) -> list[torch.Tensor]:
    """Views of one tensor, whose rows are no multiple of 16 bytes."""
    shape = (512, 2, 3 * 59) if packed else (2, 256, 2, 3 * 59)
    return list(torch.randn(shape).requires_grad_().split(59, -1))


def test_float32_takes_parts(card: Card) -> None:
    q, k, v = in_float32()
    for _ in range(2):
        grads = torch.autograd.grad(warpwave.attention(q, k, v, causal=True).sum(), (q, k, v))
    assert compiled(card)[-4:] == PARTS and compiled(card).count("split_dq_kernel") == 1
    assert [(g.shape, g.dtype, g.is_contiguous()) for g in grads] == [(t.shape, t.dtype, True) for t in (q, k, v)]
    out, lse = warpwave.attention(q, k, v, causal=True, return_lse=True)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    parts = [spec for spec in card.compiled if spec.kernel.__name__ == "split_rows_kernel"]
    assert [spec.tensors[6] is None for spec in parts] == [True, False], "what arrives at the log-sum-exp"


def test_packed_float32_takes_parts(card: Card) -> None:
    q, k, v = in_float32(packed=True)
    ends = torch.tensor([0, 200, 512], dtype=torch.int32)
    out = warpwave.attention_varlen(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=312, max_seqlen_k=312, alibi_slopes=torch.rand(2)
    )
    torch.autograd.grad(out.sum(), (q, k, v))
    assert compiled(card)[-4:] == PARTS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "bf16x6"}, "precision 'bf16x6' is ieee or bf16x6 here; its float32 products are fp16x3"),
        ({"precision": "tf32"}, "precision 'tf32' is fp16x1 or"),
        ({"precision": "ieee"}, "precision 'ieee' is ieee here"),
        ({"error_budget": 1e-2}, "precision 0.01 is fp16x1 or"),
        ({"head_dim": 192}, "head_dim is 192; in float32, two parts of a tile must fit shared memory, 128 at most"),
        ({"head_dim": 7}, "head_dim is 7; in float32, smaller ones are not accurate enough, 8 at least"),
        ({"head_dim_v": 1}, "head_dim_v is 1; in float32, smaller ones are not accurate enough, 8 at least"),
        ({"precision": "bf16x3"}, "precision 'bf16x3' is fp16x3 or bf16x3 here"),
        ({"seqlen_q": 63}, "seqlen_q is 63; in float32, smaller ones are not accurate enough, 64 at least"),
        ({"seqlen_k": 63}, "seqlen_k is 63; in float32, smaller ones are not accurate enough, 64 at least"),
        (
            {"packed": True, "total_q": 512, "total_k": 512, "batch": 9, "seqlen_k": 63},
            "seqlen_k is 63; in float32, smaller ones are not accurate enough, 64 at least",
        ),
        ({"softcap": 15.0}, "in float32 it does not support softcap"),
        ({"has_sinks": True}, "in float32 it does not support sinks"),
        ({"bias_shape": (1, 1, 512, 512), "bias_dtype": "float32"}, "in float32 it does not support a bias"),
        ({"mask_shape": (1, 2, 1, 512), "num_heads_q": 2}, "the mask differs between query heads of a kv head"),
        ({"error_budget": 1e-7}, "no float32 arithmetic it has"),
        ({"seqlen_q": 0}, "there are no queries or no keys"),
    ],
    ids=str,
)
def test_float32_is_refused_for_a_reason(changes: dict[str, Any], reason: str) -> None:
    gpu = Gpu.for_arch("sm_90")
    problem = AttentionProblem(
        batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64,
        dtype="float32", softmax_scale=0.125,
    )  # fmt: skip
    for precision in ("default", "fp16x3", "tf32x3"):
        assert not flash_bwd.why_not(replace(problem, precision=precision), gpu)
    (found,) = flash_bwd.why_not(replace(problem, **changes), gpu)
    assert found.startswith(reason)
    serving = [module.NAME for module in dispatch.gradient_kernels(replace(problem, **changes), gpu)]
    assert serving[:1] == ["flash_bwd" if changes != {"error_budget": 1e-7} else "three_kernel backward"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_heads_kv": 8}, 1),
        ({"causal": Causal()}, 8),  # 64 blocks for 132 multiprocessors
        ({"causal": Causal(), "num_heads_kv": 2}, 4),
        ({"causal": Causal(), "seqlen_q": 65536, "seqlen_k": 65536}, 4),  # 2,048 tiles
        ({"causal": Causal(), "num_heads_q": 32, "seqlen_q": 262144, "seqlen_k": 262144}, 1),
        ({"num_heads_kv": 4, "batch": 4}, 1),
        # Blocks of 1 and 2 heads, of 2 and 3.
        ({"causal": Causal(), "num_heads_q": 28, "num_heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096}, 4),
        ({"causal": Causal(), "num_heads_q": 71, "seqlen_q": 2048, "seqlen_k": 2048}, 24),
        ({"causal": Causal(), "batch": 16}, 1),
        ({"causal": Causal(), "num_heads_kv": 4, "seqlen_q": 64, "seqlen_k": 64}, 1),  # too short to gain
        ({"mask_shape": (1, 1, 8192, 8192)}, 1),
        ({"packed": True, "total_q": 20_000, "total_k": 20_000, "batch": 3, "causal": Causal()}, 4),
        ({"window_size": (5, 3), "seqlen_q": 9000}, 4),
        ({"causal": Causal("top_left"), "window_size": (3, -1), "seqlen_q": 37}, 1),
    ],
    ids=str,
)
def test_query_heads_are_divided_where_blocks_are_few(fields: dict[str, Any], expected: int) -> None:
    problem = AttentionProblem(
        **{
            "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_q": 8, "num_heads_kv": 1, "head_dim": 128,
            "head_dim_v": 128, "dtype": "bfloat16", "softmax_scale": 0.1, **fields,
        }
    )  # fmt: skip
    config = flash_bwd.configs(problem, Gpu.for_arch("sm_90"))[0]
    assert group_splits(problem, config) == expected


@pytest.mark.parametrize(
    ("fields", "is_joint"),
    [
        ({"seqlen_q": 512, "seqlen_k": 512, "batch": 2}, False),  # 64 blocks
        ({"seqlen_q": 512, "seqlen_k": 512, "batch": 3}, True),
        ({"seqlen_q": 512, "seqlen_k": 512}, True),  # in two parts
        ({"seqlen_q": 1024, "seqlen_k": 1024}, True),  # in two parts
        ({"seqlen_q": 512, "seqlen_k": 8448, "num_heads_q": 1, "num_heads_kv": 1}, True),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "causal": Causal()}, False),  # 128 blocks
        ({"seqlen_q": 2048, "seqlen_k": 2176, "causal": Causal()}, True),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "causal": Causal(), "batch": 2}, True),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "causal": Causal(), "num_heads_kv": 4}, True),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "window_size": (64, 0)}, True),
        ({"seqlen_q": 512, "seqlen_k": 512, "batch": 2, "head_dim": 128, "head_dim_v": 128}, True),
    ],
    ids=str,
)
def test_wide_rows_of_few_blocks_take_launches_apart(fields: dict[str, Any], is_joint: bool) -> None:
    sizes = {"batch": 1, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 160, "head_dim_v": 160}
    problem = AttentionProblem(**{**sizes, **fields}, dtype="bfloat16", softmax_scale=0.1)
    gpu = Gpu.for_arch("sm_90")
    assert flash_bwd.default(problem, gpu).is_joint == is_joint
    assert not config_of_bias(problem, gpu).is_joint


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # 68 of 2,048 blocks. At 4 x 4096 parts gained nothing.
        ({"seqlen_q": 16384, "seqlen_k": 16384, "num_heads_q": 16, "num_heads_kv": 16}, (1980, 5)),
        ({"seqlen_q": 4096, "seqlen_k": 4096, "num_heads_q": 64, "num_heads_kv": 64}, (2048, 1)),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "num_heads_q": 4, "num_heads_kv": 4}, (0, 4)),
        # 67 of 199 blocks: 65 parts would fill their waves, with a workspace seven times as large.
        ({"seqlen_q": 50789, "seqlen_k": 25395, "num_heads_q": 16, "head_dim": 160, "head_dim_v": 160}, (132, 9)),
        # 130 of 3,694 blocks: no few parts gain.
        ({"seqlen_q": 236365, "seqlen_k": 236365, "num_heads_q": 8, "num_heads_kv": 2}, (3694, 1)),
    ],
)
def test_the_workspace_of_parts_is_bounded(fields: dict[str, Any], expected: tuple[int, int]) -> None:
    sizes = {"batch": 1, "num_heads_kv": 1, "head_dim": 128, "head_dim_v": 128}
    problem = AttentionProblem(**{**sizes, **fields}, dtype="bfloat16", softmax_scale=0.1)
    config = flash_bwd.default(problem, Gpu.for_arch("sm_90"))
    assert divided_tail(problem, config) == expected
    splits = [t for t in kernel.example(problem, config, "meta")[0][-3:-1] if isinstance(t, torch.Tensor)]
    assert sum(t.nbytes for t in splits) <= 5 * 132 * 128 * 4 * (problem.head_dim + problem.head_dim_v)


@pytest.mark.parametrize(("head_dim", "biased"), [(64, False), (128, True), (256, False), (256, True)])
def test_splits_are_float32_and_stored_without_maps(card: Card, head_dim: int, biased: bool) -> None:
    """Their sums are gradients of the call's type and shape."""
    q, k, v = (torch.randn(1, 2048, n, head_dim, dtype=torch.bfloat16).requires_grad_() for n in (8, 1, 1))
    bias = torch.randn(1, 8, 2048, 2048, dtype=torch.bfloat16) if biased else None
    for _ in range(2):
        grads = torch.autograd.grad(warpwave.attention(q, k, v, causal=True, bias=bias).sum(), (q, k, v))
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (q, k, v)]
    (of_keys,) = (s for s in card.compiled if s.kernel.__name__ in ("joint_kernel", "dkv_kernel"))
    names = [parameter.name for parameter in parameters.parameters(of_keys.kernel) if parameter.kind == "tensor"]
    given = dict(zip(names, of_keys.tensors, strict=True))
    assert given["dk_map"] is given["dv_map"] is None and given["dk_ptr"].dtype == torch.float32
    assert given["dk_ptr"].shape[2] == given["dv_ptr"].shape[2] > 1
    launched = [maps for function, _, maps, _ in card.launched if function == 1 + card.compiled.index(of_keys)]
    mapped = [t for t in of_keys.tensors if isinstance(t, launch.Mapped)]
    assert [len(maps) for maps in launched] == [len(mapped)] * 2


def test_parts_of_every_head_size_fit_shared_memory() -> None:
    gpu = Gpu.for_arch("sm_90")
    for head_dim, head_dim_v in itertools.product(range(8, 129, 10), repeat=2):
        problem = AttentionProblem(
            batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1, head_dim=head_dim,
            head_dim_v=head_dim_v, dtype="float32", softmax_scale=0.1,
        )  # fmt: skip
        (config,) = flash_bwd.configs(problem, gpu)
        assert flash_bwd.smem_bytes(problem, config) <= SMEM_PER_BLOCK


@pytest.mark.parametrize(("fields", "text"), [((32, 2, True), "block_m is 32"), ((64, 0, True), "at least 1"),
                                              ((128, 1, False), "at least 2")])  # fmt: skip
def test_a_config_checks_itself(fields: tuple[int, int, bool], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        flash_bwd.Config(*fields)


def orders(card: Card) -> list[bool]:
    """Whether the sums of dQ have an order, in each compiled launch that adds to them."""
    return [s.constants["IS_DETERMINISTIC"] for s in card.compiled if s.kernel.__name__ == "joint_kernel"]


@pytest.fixture
def in_deterministic_mode() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("in_deterministic_mode")
@pytest.mark.parametrize("asked", [None, True, False])
def test_deterministic_mode_orders_sums_unless_the_argument_refuses(card: Card, asked: bool | None) -> None:
    q, k, v = inputs()
    torch.autograd.grad(warpwave.attention(q, k, v, deterministic=asked).sum(), (q, k, v))
    assert compiled(card)[1:] == BACKWARD and orders(card) == [asked is not False]


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_argument_orders_sums(card: Card, asked: bool | None) -> None:
    q, k, v = inputs()
    for _ in range(2):
        torch.autograd.grad(warpwave.attention(q, k, v, deterministic=asked).sum(), (q, k, v))
    assert compiled(card)[1:] == BACKWARD and orders(card) == [asked is True]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"deterministic": False}, False),
        ({"causal": None}, False),
        ({"causal": None, "window_size": (-1, 5)}, True),
        ({"causal": None, "window_size": (-1, 128)}, False),  # several blocks begin at the first tile
        ({"seqlen_k": 2048}, False),
        ({"batch": 1}, True),
        ({"batch": 1, "num_heads_q": 66, "num_heads_kv": 66}, False),  # four waves of blocks
        ({"num_heads_kv": 66, "batch": 4}, False),
        ({"head_dim": 136}, False),
        ({"mask_shape": (1, 1, 1024, 1024)}, False),
        ({"packed": True, "total_q": 2048, "total_k": 2048}, True),
    ],
    ids=str,
)
def test_long_calls_take_the_last_keys_first_if_their_sums_have_an_order(
    change: dict[str, Any], expected: bool
) -> None:
    problem = AttentionProblem(
        batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_q=132, num_heads_kv=132, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.1, causal=Causal(), deterministic=True,
    )  # fmt: skip
    assert ascends(replace(problem, **change), flash_bwd.Config(64, 3)) is expected


@pytest.mark.parametrize(("seqlen", "expected"), [(9_600, True), (9_472, False)])
def test_a_call_of_enough_waves_walks_from_the_first_tile_on(card: Card, seqlen: int, expected: bool) -> None:
    q, k, v = inputs(seqlen)
    out = warpwave.attention(q, k, v, causal=True, deterministic=True)
    torch.autograd.grad(out, (q, k, v), torch.ones(()).expand(out.shape).to(out.dtype))
    (joint,) = (spec for spec in card.compiled if spec.kernel.__name__ == "joint_kernel")
    assert joint.constants["ASCENDS"] is expected


def test_packed_sequences_take_the_argument_as_well(card: Card) -> None:
    q, k, v = (torch.randn(2048, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    ends = torch.tensor([0, 2048], dtype=torch.int32)
    for asked in (False, True):
        out = warpwave.attention_varlen(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=2048, max_seqlen_k=2048,
            deterministic=asked,
        )  # fmt: skip
        torch.autograd.grad(out.sum(), (q, k, v))
    assert orders(card) == [False, True]


def test_without_the_argument_torchs_mode_is_read_when_gradients_are_computed(card: Card) -> None:
    """So one graph may be walked in both modes; the argument of a call takes precedence."""
    q, k, v = inputs()
    outs = [warpwave.attention(q, k, v, deterministic=asked) for asked in (None, False)]
    try:
        torch.use_deterministic_algorithms(True)
        for out in outs:
            torch.autograd.grad(out.sum(), (q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert orders(card) == [True, False]


def test_the_operator_takes_the_argument_as_well(card: Card) -> None:
    """A call that a mode sees goes through the operator, and so does its backward."""
    q, k, v = inputs()
    with OperatorNames():
        torch.autograd.grad(warpwave.attention(q, k, v, deterministic=True).sum(), (q, k, v))
    assert orders(card) == [True]


def test_dropout_takes_the_same_kernels(card: Card) -> None:
    """They are compiled once for every probability and seed."""
    q, k, v = inputs(256)
    for p in (0.1, 0.5, 0.9):
        torch.autograd.grad(warpwave.attention(q, k, v, dropout_p=p).sum(), (q, k, v))
    assert compiled(card)[1:] == BACKWARD


def test_layouts_that_hooks_bring_back_are_bound_anew(card: Card) -> None:
    """Views of one tensor that come back contiguous, as from the CPU, are another layout of the same plan."""
    qkv = torch.randn(2, 256, 12, 64, dtype=torch.bfloat16).requires_grad_()
    parts = qkv.split(4, 2)
    out = warpwave.attention(*parts)
    torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    strides = [maps for name, maps in zip(compiled(card), card.launched, strict=False) if name == "joint_kernel"]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
        other = warpwave.attention(*parts)
        torch.autograd.grad(other.sum(), qkv)
    launched = [maps for _, _, maps, _ in card.launched if len(maps) == 9]
    assert strides and launched[0][0][1] != launched[1][0][1], "the strides of q in its tensor map"


@pytest.mark.parametrize("keys", [256, 249], ids=["whole", "odd"])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (1, 1)], ids=str)
def test_a_bias_takes_launches_apart(card: Card, shape: tuple[int, int], keys: int) -> None:
    """Its gradient is contiguous, also where rows of dS are padded to whole vectors."""
    q, k, v = inputs(256)
    k, v = (t.detach()[:, :keys].contiguous().requires_grad_() for t in (k, v))
    bias = torch.randn(*shape, 256, keys).requires_grad_()
    *_, dbias = torch.autograd.grad(warpwave.attention(q, k, v, bias=bias).sum(), (q, k, v, bias))
    assert dbias.shape == bias.shape and dbias.dtype == bias.dtype and dbias.is_contiguous()
    assert compiled(card)[-6:] == ["bias_seen_kernel", *HIDDEN, *APART]
    torch.autograd.grad(warpwave.attention(q, k, v, bias=bias.detach()).sum(), (q, k, v))
    writes = [spec.constants["WRITE_DBIAS"] for spec in card.compiled if spec.kernel.__name__ == "dq_kernel"]
    assert writes == [True, False], "dS is written only where it is wanted"


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (64, "float32")])
def test_a_bias_whose_gradient_is_not_wanted_takes_the_joint_launch(card: Card, head_dim: int, dtype: str) -> None:
    """Unless its tiles are too large."""
    of_call = torch.bfloat16 if dtype == "float32" else getattr(torch, dtype)
    q, k, v = (torch.randn(2, 256, 4, head_dim, dtype=of_call).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 4, 256, 256).to(getattr(torch, dtype))
    torch.autograd.grad(warpwave.attention(q, k, v, bias=bias).sum(), (q, k, v))
    launches = APART if dtype == "float32" else BACKWARD
    assert compiled(card)[-6:] == ["bias_seen_kernel", *HIDDEN, *launches]


def test_lists_of_steps_count_the_tiles_that_are_walked(card: Card) -> None:
    """If a bias has a number for each score, tiles are shorter than if it is the same for all queries. Both are copied
    here, because keys are not adjacent, and the copy of the second is still the same for all queries."""
    q, k, v = (torch.randn(2, 256, 4, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 4, 256, 256, dtype=torch.bool)
    for rows in (1, 256):
        bias = torch.randn(1, 4, rows, 512)[..., ::2].expand(-1, -1, 256, -1)
        torch.autograd.grad(warpwave.attention(q, k, v, bias=bias, mask=mask).sum(), (q, k, v))
    named = {name: [s for s in card.compiled if s.kernel.__name__ == name] for name in set(compiled(card))}
    walked = [s.constants["BLOCK_N"] for s in named["dq_kernel"]]
    lists = [128 // s.constants["REPEAT"] for s in named["list_steps_kernel"] if s.constants["PER_BLOCK"] == 2]
    assert walked == lists == [128, 64]


def test_gradients_of_slopes_take_launches_apart(card: Card) -> None:
    q, k, v = inputs()
    slopes = torch.rand(4).requires_grad_()
    torch.autograd.grad(warpwave.attention(q, k, v, alibi_slopes=slopes.detach()).sum(), (q, k, v))
    assert compiled(card)[1:] == BACKWARD
    (dslopes,) = torch.autograd.grad(warpwave.attention(q, k, v, alibi_slopes=slopes).sum(), (slopes,))
    assert dslopes.shape == slopes.shape and compiled(card)[4:] == APART


def test_every_head_size_has_room_with_and_without_a_bias() -> None:
    joint = set()
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        plain = AttentionProblem(
            batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1, head_dim=head_dim,
            head_dim_v=head_dim_v, dtype="bfloat16", softmax_scale=0.1,
        )  # fmt: skip
        configs = flash_bwd.configs(plain, Gpu.for_arch("sm_90"))
        assert all(flash_bwd.smem_bytes(plain, config) <= SMEM_PER_BLOCK for config in configs)
        joint |= {(head_dim, head_dim_v)} if any(config.is_joint for config in configs) else set()
        for dtype in ("bfloat16", "float32"):
            problem = replace(plain, bias_shape=(1, 1, 512, 512), bias_dtype=dtype)
            configs = flash_bwd.configs(problem, Gpu.for_arch("sm_90"))
            assert all(flash_bwd.smem_bytes(problem, config) <= SMEM_PER_BLOCK for config in configs)
            keys, _ = steps_of_dq(problem, configs[-1], bias_bytes(problem))
            assert not configs[-1].is_joint and keys >= 32
    assert {(192, 128), (128, 192), (160, 160), (24, 168), (128, 128)} <= joint
    assert not joint & {(168, 144), (192, 136), (192, 192), (200, 8), (64, 256)}
