"""What `explain` advises to change: each sentence where its cause is, with figures, and none where it is not."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import warpwave
from tests.workbench.explain.test_explanation import PLAIN, nothing_measured, on, tensors
from warpwave import Causal, Explanation, dispatch
from warpwave.workbench.explain.advice import MOST
from warpwave.workbench.hardware.catalog import resolve
from warpwave.workbench.model.roofline import us

__all__ = ["nothing_measured"]  # fixture


def advice(said: Explanation) -> str:
    assert 1 <= len(said.advice) <= MOST
    return " | ".join(said.advice)


def test_a_call_without_fault_is_told_so() -> None:
    said = on("h200")
    assert len(said.advice) == 1 and said.advice[0].startswith("Nothing about the call")
    assert said.near_misses == ()
    for options, change in (
        ({}, "a causal mask or a window"),
        ({"causal": Causal()}, "(a window,"),
        ({"causal": Causal(), "window_size": (8192, 0)}, "(a narrower window,"),
    ):
        said = on("h200", seqlen_q=16384, seqlen_k=16384, **options)
        assert change in advice(said), "a call that has a mask is not advised to use the same mask"


@pytest.mark.parametrize("lengths", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_a_call_without_work_is_advised_nothing(head_dim: int, dtype: str, lengths: dict[str, int]) -> None:
    said = on(
        "h200", head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, **({"seqlen_q": 64, "seqlen_k": 64} | lengths)
    )
    assert said.advice == ("Nothing: no key is visible to any query, so this call has no work.",)
    assert str(said)


def test_idle_sms_are_counted() -> None:
    said = warpwave.explain(
        replace(PLAIN, batch=1, num_heads_q=2, num_heads_kv=2, seqlen_q=256), gpu=resolve("h200"), kernel="flash_fwd"
    )
    blocks = said.cost.blocks if said.cost else 0
    assert f"The grid has {blocks} blocks, so {132 - blocks} of 132 SMs are idle" in advice(said)


def test_the_kernel_that_auto_takes_is_advised_as_such() -> None:
    """A chunk of few rows on many keys, by a kernel that does not split keys."""
    chunk = replace(
        PLAIN, batch=1, num_heads_q=8, num_heads_kv=1, seqlen_q=64, seqlen_k=32768, head_dim=128, head_dim_v=128
    )
    said = advice(warpwave.explain(chunk, gpu=resolve("h200"), kernel="flash_fwd"))
    assert 'kernel="hopper/flash_fwd" is predicted' in said and '"auto" chooses it' in said


def test_splits_of_keys_are_advised_by_the_kernel_that_splits_this_call() -> None:
    """Few tiles of rows on many keys, and a kernel that has no other tiles: the kernel of `auto` is named if it splits
    keys, else another."""
    few = replace(
        PLAIN, batch=1, num_heads_q=8, num_heads_kv=1, seqlen_q=64, seqlen_k=16384, head_dim=128, head_dim_v=128
    )
    for seqlen_q, name in ((64, "hopper/flash_fwd"), (1, "split_kv")):
        said = warpwave.explain(replace(few, seqlen_q=seqlen_q), gpu=resolve("h200"), kernel="hopper/large_head_dim")
        assert f'kernel="{name}" splits the keys of a head over blocks' in advice(said)


def test_a_config_named_in_advice_exists_and_does_what_is_said() -> None:
    said = on("mi300x", batch=1, num_heads_q=8, num_heads_kv=8, seqlen_q=1000, seqlen_k=1000)
    found = re.search(r"Time Config\((.*?)\) of [\w.]+: ([\d,]+) blocks.*?, at least ([\d.,]+) us", advice(said))
    assert found is not None
    kernel = next(kernel for kernel in dispatch.KERNELS if kernel.NAME == said.kernel)
    config = kernel.Config(**{k: ast.literal_eval(v) for k, v in (pair.split("=") for pair in found[1].split(", "))})
    again = warpwave.explain(said.problem, gpu=said.gpu, kernel=said.kernel or "", config=config)
    assert again.cost is not None and again.cost.blocks == int(found[2].replace(",", ""))
    assert again.bounds is not None and again.bounds.time_us == pytest.approx(float(found[3]), rel=0.01)
    assert again.bounds.time_us < said.bounds.time_us if said.bounds else False


@pytest.mark.parametrize(
    ("card", "sizes"),
    [
        ("b200", {"batch": 2, "seqlen_q": 1024, "seqlen_k": 4096}),
        ("l4", {"batch": 2, "seqlen_q": 2048, "seqlen_k": 4096}),
    ],
)
def test_no_config_is_advised_that_is_predicted_to_be_slower(card: str, sizes: dict[str, int]) -> None:
    """Tiles of 16 queries lower the bound of one head's grid, and take up to 2.6 times as long by the model."""
    said = on(card, num_heads_q=1, num_heads_kv=1, **sizes)
    assert said.prediction is not None
    found = re.search(r"Time Config.*?predicted: ([\d,.]+ us) instead of ([\d,.]+ us)\.", advice(said))
    if found is None:
        assert "Time Config" not in advice(said)
    else:
        after, now = (float(text.removesuffix(" us").replace(",", "")) for text in found.groups())
        assert after < now == pytest.approx(said.prediction.time_us, rel=0.01)


def test_head_padding_is_named_where_the_kernel_pads() -> None:
    said = warpwave.explain(replace(PLAIN, head_dim=200, head_dim_v=200), gpu=resolve("a100"))
    assert "computes head_dim 200 as 256: 512 / 400 = 1.28 x the products" in advice(said)
    between = replace(PLAIN, head_dim=80, head_dim_v=80)
    masked = replace(between, mask_shape=(1, 1, 4096, 4096))
    plain, of_masked = (advice(warpwave.explain(p, gpu=resolve("a100"))) for p in (between, masked))
    assert "computes head_dim" not in plain and "computes head_dim 80 as 128" in of_masked


def test_rows_of_a_tile_that_are_no_queries_are_counted() -> None:
    said = warpwave.explain(
        replace(PLAIN, batch=64, seqlen_q=3, seqlen_k=64, num_heads_kv=2), gpu=resolve("h200"), kernel="flash_fwd"
    )
    assert re.search(r"3 of the \d+ rows are queries\. The 8 query heads that share a kv head", advice(said))


def test_heads_that_share_tiles_are_not_advised_to() -> None:
    """96 rows of 24 heads are one tile and a half."""
    of_latents = {"num_heads_q": 24, "num_heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True}
    said = on("h200", batch=8, seqlen_q=4, seqlen_k=4096, **of_latents)
    assert said.kernel == "large_head_dim" and "compute 1.33 x the visible pairs" in advice(said)
    assert "could share a tile" not in advice(said)


def test_precision_is_advised_by_what_the_card_has() -> None:
    geforce = advice(on("rtx3060", dtype="float32"))
    assert "Products run as tf32x3, 15.01 / 3 = 5.003 TFLOP/s; precision='ieee'" in geforce
    assert "tf32'" not in geforce, "which is no faster there than float32"
    hopper = advice(on("h200", dtype="float32"))
    assert "precision='tf32' (operands of 11 significant bits" in hopper and "precision='ieee'" not in hopper
    assert "bfloat16 inputs" in hopper


def test_memory_bound_calls_hear_of_bytes() -> None:
    said = advice(warpwave.explain(replace(PLAIN, seqlen_q=1, batch=64, num_heads_kv=4), gpu=resolve("h200")))
    assert "Memory binds, and k and v are 100% of the bytes" in said
    assert "GQA" not in said, "they share already"
    assert "queries per sequence in one call would take no longer than 1." in said
    heads = {"num_heads_q": 128, "num_heads_kv": 1, "head_dim": 576, "head_dim_v": 512}
    many = advice(on("h200", batch=64, seqlen_q=1, **heads))
    assert "Memory binds" in many and "no longer than" not in many, "products bind from two queries on"
    assert "GQA" in advice(on("h200", batch=1024, seqlen_q=32, seqlen_k=32))


def test_longer_sequences_are_no_way_out_under_a_window() -> None:
    said = advice(on("l4", batch=1, seqlen_q=4096, seqlen_k=4096, num_heads_kv=4, window_size=(127, 0)))
    assert "longer sequences do not reach under a window" in said


def test_memory_does_not_bind_where_the_kernels_own_products_take_longer() -> None:
    for window, is_memory in ((511, True), (900, False)):  # 150 and 244 us of tiles against 224 us of memory
        said = on("l4", batch=1, seqlen_q=4096, seqlen_k=4096, num_heads_kv=16, window_size=(window, 0))
        binding = said.bounds.of_problem.binding if said.bounds is not None else None
        assert binding is not None and binding.resource == "memory"
        assert ("Memory binds" in advice(said)) == is_memory


def test_exponentials_are_named_at_small_heads() -> None:
    assert "so a head_dim up to" in advice(on("h200", head_dim=32, head_dim_v=32))


def test_a_mask_that_is_causal_is_replaced() -> None:
    q, k, v = tensors(64, 64)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    said = warpwave.explain(q, k, v, mask=mask, gpu=resolve("h200"), kernel="flash_fwd")
    assert said.advice[0].startswith("Pass causal=True instead of the mask") and "4.096 kB" in said.advice[0]
    wide = torch.randn(3, 1, 600, 2, 320, dtype=torch.float16)  # above head_dim 256 the kernel takes no mask
    long = torch.ones(600, 600, dtype=torch.bool).tril()[None, None]
    hopper = " ".join(str(warpwave.explain(*wide, mask=long, gpu=resolve("h200"))).split())
    assert hopper.count("ass causal=True instead of the mask") == 1
    assert "hopper/flash_fwd would then serve it." in hopper
    nothing = warpwave.explain(q, k, v, mask=torch.ones_like(mask), gpu=resolve("h200"))
    assert "rop the mask: it hides nothing" in str(nothing)
    random = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    kept = advice(warpwave.explain(q, k, v, mask=random, gpu=resolve("h200"), kernel="flash_fwd"))
    assert "place of the mask" not in kept and "rop the mask" not in kept


def test_a_mask_nobody_looked_at_is_asked_about() -> None:
    assert "If it is causal or a window" in advice(on("h200", mask_shape=(1, 1, 4096, 4096)))


@pytest.mark.parametrize("shape", [(4, 1, 1, 4096), (4, 1, 4096, 1)])
def test_a_mask_of_tokens_is_not_taken_for_a_causal_one(shape: tuple[int, ...]) -> None:
    text = advice(on("h200", mask_shape=shape))
    assert "attention_varlen computes the other tokens alone" in text and "causal" not in text
    with_bias = on("h200", mask_shape=shape, bias_shape=(1, 1, 4096, 4096), bias_dtype="float32")
    assert "boolean mask is read" not in advice(with_bias), "attention_varlen has no bias"


def test_the_loss_of_the_backward_is_the_largest_that_the_card_does_not_set() -> None:
    said = on("h200", batch=256, seqlen_q=96, seqlen_k=96, head_dim=64, head_dim_v=64, dtype="float32", softcap=5.0,
              num_heads_q=4, num_heads_kv=4, requires_grad=True)  # fmt: skip
    assert said.backward is not None and said.backward.prediction is not None
    factors = said.backward.prediction.factors
    assert max(factors, key=factors.__getitem__) == "clocks"
    factor = factors["recomputation"]
    assert f"Its largest loss that the card does not set is recomputation, x {factor:.2f}" in advice(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t[..., ::2], "You pass k with stride 2 along head_dim"),
        (lambda t: t[..., :15], "You pass k and v with rows of 15 x 4 = 60 bytes"),
        (lambda t: t[:, 1:, 1:, 4:20], ""),
        (lambda t: torch.randn(2, 64, 4, 18)[..., :16], "You pass k with rows that do not start at multiples of 16"),
    ],
)
def test_strides_that_cost_something_are_named(change: Any, said: str) -> None:
    wide = torch.randn(2, 64, 4, 32)
    k = change(wide)
    q, v = torch.randn(*k.shape), torch.randn(*k.shape)
    if k.shape[-1] == 15:
        k = k.contiguous()
        q = torch.randn(2, 64, 4, 16)[..., :15]
    found = advice(warpwave.explain(q, k, v, gpu=resolve("h200"), kernel="flash_fwd"))
    assert said in found and bool(said) == ("You pass" in found)


def test_kernels_that_copy_by_tensor_maps_copy_other_layouts_first() -> None:
    q, v = (torch.randn(1, 2048, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    k = torch.randn(1, 2048, 4, 128, dtype=torch.bfloat16)[..., ::2]
    said = warpwave.explain(q, k, v, gpu=resolve("h200"))
    assert said.kernel == "hopper/flash_fwd" and said.memory is not None
    assert said.memory.workspace == k.numel() * 2
    assert said.advice[0].startswith("You pass k with stride 2 along head_dim: every call copies them first, 1.049 MB.")
    portable = warpwave.explain(q, k, v, gpu=resolve("h200"), kernel="flash_fwd")
    assert portable.memory is not None and portable.memory.workspace == 0
    assert "rows are read one element at a time" in portable.advice[0]


def test_an_expanded_bias_is_named() -> None:
    """Its copies take no memory, and the call's description does not say that they are copies."""
    q, k, v = tensors(64, 64)
    bias = torch.zeros(1, 1, 1, 64).expand(2, 1, 64, 64)
    text = advice(warpwave.explain(q, k, v, bias=bias, gpu=resolve("h200"), kernel="flash_fwd"))
    assert "The bias is expanded along batch and seqlen_q. Pass it with size 1 there" in text
    whole = warpwave.explain(q, k, v, bias=bias.contiguous(), gpu=resolve("h200"), kernel="flash_fwd")
    assert "expanded" not in advice(whole)


def test_an_expanded_mask_is_counted_without_its_copies() -> None:
    q, k, v = tensors(64, 64)
    mask = torch.ones(1, 1, 1, 64, dtype=torch.bool).expand(2, 1, 64, 64)
    said = warpwave.explain(q, k, v, mask=mask, gpu=resolve("h200"), kernel="flash_fwd")
    assert said.problem.mask_shape == (1, 1, 1, 64) and "expanded" not in advice(said)


def test_a_copy_made_of_a_strided_mask_is_workspace() -> None:
    q, k, v = tensors(64, 64)
    mask = (torch.rand(1, 1, 64, 128) < 0.5)[..., ::2]
    said = warpwave.explain(q, k, v, mask=mask, gpu=resolve("h200"), kernel="flash_fwd")
    assert said.memory is not None and said.memory.workspace == 64 * 64
    assert "The mask is not contiguous along the keys" in advice(said)


def test_the_nearest_fast_path_is_said_first() -> None:
    said = on("h200", head_dim=300, head_dim_v=300, requires_grad=True, softcap=1.0)
    assert said.kernel == "eager" and said.near_misses
    text = str(said)
    assert text.index("would serve this call") < text.index(said.advice[0][:20])


# Advice that the model decides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", ["t4", "v100", "rtx2080ti"])
def test_float16_is_advised_on_cards_without_bfloat16(card: str) -> None:
    said = on(card, dtype="bfloat16")
    least = on(card, dtype="float16").bounds
    assert least is not None and said.bounds is not None
    text = advice(said)
    assert "float16 inputs" in text and us(least.of_problem.time_us) in text
    assert us(said.bounds.of_problem.time_us) in text and "float16 inputs" not in advice(on("a100-80gb"))


def test_no_precision_is_advised_that_is_predicted_to_be_slower() -> None:
    for card in ("l4", "h200", "a100-80gb", "mi300x", "rtx4090"):
        said = on(card, dtype="float32")
        assert said.prediction is not None
        for name in re.findall(r"precision='(\w+)'", advice(said)):
            other = on(card, dtype="float32", precision=name).prediction
            assert other is not None and other.time_us < said.prediction.time_us, (card, name)
    assert "'ieee'" not in advice(on("l4", dtype="float32", head_dim=128, head_dim_v=128))


@pytest.mark.parametrize(("head_dim", "padded"), [(385, 392), (515, 520)])
def test_padding_to_whole_16_bytes_is_advised(head_dim: int, padded: int) -> None:
    options = {"num_heads_q": 16, "num_heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096}
    said = on("h200", head_dim=head_dim, head_dim_v=head_dim, **options)
    after = on("h200", head_dim=padded, head_dim_v=padded, **options).prediction
    assert after is not None and f"from head_dim {head_dim} to {padded}" in advice(said)
    assert us(after.time_us) in advice(said) and "softmax_scale=" in advice(said)
    assert "Pad q" not in advice(on("h200", head_dim=padded, head_dim_v=padded, **options))


def test_the_padding_of_v_is_named_where_it_is_alone() -> None:
    said = on("h200", head_dim=320, head_dim_v=320, mask_shape=(1, 1, PLAIN.seqlen_q, PLAIN.seqlen_k))
    found = re.search(r"computes head_dim 320 as (\d+) and head_dim_v 320 as (\d+): (\d+) / 640", advice(said))
    assert found is not None and int(found[1]) + int(found[2]) == int(found[3]) > 640


def test_configs_are_advised_where_they_can_help() -> None:
    assert "bench" not in advice(on("t4", dtype="float16")) and "config" not in advice(on("t4", dtype="float16"))
    eight = on("h200", dtype="float8_e4m3fn", dtype_v="float8_e4m3fn", dtype_out="bfloat16", descale_blocks=(0, 0, 0))
    assert eight.prediction is not None and eight.prediction.factors["arithmetic"] > 1.2
    assert "config" not in advice(eight)


def test_a_backward_that_takes_longer_is_named() -> None:
    said = on("h200", head_dim=512, head_dim_v=512, seqlen_q=2048, seqlen_k=2048, requires_grad=True)
    assert said.backward is not None and said.backward.prediction is not None and said.both is not None
    assert said.both.prediction is not None
    share = said.backward.prediction.time_us / said.both.prediction.time_us
    assert share > 0.5 and f"{share:.0%}" in advice(said) and said.backward.kernel in advice(said)


def test_a_cpu_is_told_once_to_move() -> None:
    said = on("cpu")
    assert len(said.near_misses) == 1 and "Nothing" not in advice(said)
