"""`explain` says what `attention` does, what binds it and what to change, with figures a reader can check by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import warpwave
from warpwave import AttentionProblem, Explanation, Gpu, InvalidInput, dispatch
from warpwave.problem import Causal
from warpwave.workbench.cli import app
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.catalog import catalog, resolve
from warpwave.workbench.hardware.measure import Ceilings

PLAIN = AttentionProblem(
    batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=128**-0.5,
)  # fmt: skip
WINDOWED = replace(
    PLAIN, batch=1, seqlen_q=2048, seqlen_k=2048, num_heads_q=8, num_heads_kv=8, head_dim=64, head_dim_v=64,
    dtype="float16", window_size=(256, 0),
)  # fmt: skip
KERNEL_NAMES = [kernel.NAME for kernel in dispatch.KERNELS]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept on this machine or shipped has no say in these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "SHIPPED", tmp_path)


def tensors(seqlen_q: int = 8, seqlen_k: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, n, 4, 16) for n in (seqlen_q, seqlen_k, seqlen_k)]


def test_a_quantized_call_is_explained_from_its_tensors() -> None:
    found = warpwave.quantize(*tensors(1024, 1024), granularity="head")
    explanation = warpwave.explain(**found.arguments(), out_dtype=torch.float16, gpu=resolve("h200"))
    problem = explanation.problem
    assert (problem.dtype, problem.dtype_out, problem.descale_blocks) == ("float8_e4m3fn", "float16", (0, 0, 0))
    assert explanation.kernel == "hopper/flash_fwd"
    with pytest.raises(warpwave.InvalidInput, match="an AttentionProblem, which holds all options of its call"):
        warpwave.explain(problem, out_dtype=torch.float16)
    with pytest.raises(warpwave.InvalidInput, match="an AttentionProblem, which holds all options of its call"):
        warpwave.explain(problem, k_descale=found.k_descale)


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_a_v_that_is_part_of_k_is_read_once(device: str) -> None:
    with FakeTensorMode() if device == "fake" else contextlib.nullcontext():
        where = "cpu" if device == "fake" else device
        q, k, v = (torch.zeros(2, n, h, 576, device=where).bfloat16() for n, h in ((1, 16), (300, 1), (300, 1)))
        views = {"one tensor": k[..., :512], "k itself": k, "a copy": v[..., :512], "later columns": k[..., 64:]}
        said = {name: warpwave.explain(q, k, of_v, gpu="h200") for name, of_v in views.items()}
    assert {name: of.problem.v_in_k for name, of in said.items()} == {
        "one tensor": True, "k itself": True, "a copy": False, "later columns": False,
    }  # fmt: skip
    of_k = 2 * 300 * 576 * 2
    assert said["a copy"].compulsory_bytes - said["one tensor"].compulsory_bytes == of_k * 512 // 576


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_masks_and_offsets_without_contents_are_estimated(device: str) -> None:
    where = "cpu" if device == "fake" else device
    with FakeTensorMode() if device == "fake" else contextlib.nullcontext():
        q = torch.zeros(4, 16, 2, 64, device=where, dtype=torch.bfloat16)
        padding = torch.ones(4, 1, 1, 16, dtype=torch.bool, device=where)
        offsets = torch.zeros(5, dtype=torch.int32, device=where)
        masked = warpwave.explain(q, q, q, mask=padding, causal=True, gpu="h200")
        packed = warpwave.explain(
            *3 * [q.flatten(0, 1)], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=16, max_seqlen_k=16,
            gpu="h200",
        )  # fmt: skip
    for said in (masked, packed):
        assert not said.problem.pairs_are_exact and "estimated" in str(said)


def test_the_command_takes_a_v_that_is_part_of_k() -> None:
    command = "explain --gpu h200 --batch 64 --seqlen-q 1 --seqlen-k 4096 --heads-kv 1 --head-dim 576 --head-dim-v"
    result = CliRunner().invoke(app, [*command.split(), "512", "--v-in-k"])
    assert result.exit_code == 0 and "v in k" in result.output and "v 0 B" in result.output, result.output
    result = CliRunner().invoke(app, [*command.split(), "640", "--v-in-k"])
    assert result.exit_code == 2 and "v_in_k is True, and v has head_dim 640" in " ".join(result.output.split())


def on(card: str, **options: Any) -> Explanation:
    return warpwave.explain(replace(PLAIN, **options), gpu=resolve(card))


# The call and its kernel ----------------------------------------------------------------------------------------------


def test_it_names_the_kernel_the_call_takes_and_every_other_reason() -> None:
    said = warpwave.explain(*tensors())
    assert said.kernel == "torch_sdpa"
    assert list(said.reasons) == KERNEL_NAMES
    text = str(said)
    assert re.search(r"^kernel +torch_sdpa", text, re.MULTILINE)
    assert re.search(r"able, after torch_sdpa: eager", text)


def test_flops_and_bytes_are_the_problem_s() -> None:
    said = warpwave.explain(*tensors(), causal=True)
    assert said.flops == 2 * 2 * 4 * (8 * 9 // 2) * (16 + 16)
    assert said.compulsory_bytes == 4 * 2 * 8 * 4 * 16 * 4
    assert "288 of 512 (query, key) pairs are visible" in str(said)


def test_a_boolean_mask_is_counted() -> None:
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., :3] = True
    q, k, v = tensors()
    assert warpwave.explain(q, k, v, mask=mask).problem.visible_pairs == 2 * 4 * 8 * 3
    both = warpwave.explain(q, k, v, mask=mask, causal=True).problem
    assert both.visible_pairs == 2 * 4 * (1 + 2 + 6 * 3) and both.pairs_are_exact


def test_packed_lengths_are_read() -> None:
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    said = warpwave.explain(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=7, max_seqlen_k=7)
    assert said.problem.visible_pairs == 2 * (25 + 49)


def test_gradients_are_served_by_eager_and_it_says_so() -> None:
    q, k, v = tensors()
    said = warpwave.explain(q.requires_grad_(), k, v)
    assert said.kernel == "eager"
    assert any("gradients" in reason for reason in said.reasons["flash_fwd"])


def test_a_refused_kernel_is_explained_not_raised() -> None:
    wide: dict[str, Any] = {"head_dim": 300, "head_dim_v": 300, "requires_grad": True, "softcap": 1.0}
    assert on("h200", **wide).kernel == "eager"
    refused = warpwave.explain(replace(PLAIN, head_dim=300), gpu=resolve("h200"), kernel="flash_fwd")
    assert refused.kernel is None and refused.cost is None and refused.memory is None
    assert next(iter(refused.reasons)) == "flash_fwd" and refused.reasons["flash_fwd"]
    text = str(refused)
    assert re.search(r"^kernel +none", text, re.MULTILINE) and "not flash_fwd: head_dim is 300" in text
    assert refused.bounds is not None, "what the call takes at the least does not depend on a kernel"
    mended = warpwave.explain(replace(PLAIN, **wide), gpu=resolve("h200"), kernel="large_head_dim")
    assert mended.kernel is None and "torch.no_grad()" in str(mended)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_a_problem_needs_no_tensors_and_no_gpu(arch: str) -> None:
    said = warpwave.explain(PLAIN, gpu=Gpu.for_arch(arch), kernel="flash_fwd")
    assert said.kernel == "flash_fwd"
    assert said.cost is not None and said.cost.flops == PLAIN.flops, "every tile is whole: no padding"


def test_a_gpu_may_be_given_by_its_name() -> None:
    assert str(warpwave.explain(PLAIN, gpu="h200")) == str(warpwave.explain(PLAIN, gpu=resolve("h200")))
    with pytest.raises(warpwave.InvalidInput, match="GPU 'h201' is not known"):
        warpwave.explain(PLAIN, gpu="h201")
    with pytest.raises(warpwave.InvalidType, match="gpu is a int"):
        warpwave.explain(PLAIN, gpu=90)  # type: ignore[arg-type]


def test_hot_must_be_a_boolean() -> None:
    with pytest.raises(warpwave.InvalidType, match="hot is 0; it must be True or False"):
        warpwave.explain(PLAIN, gpu="h200", hot=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"softmax_scale": math.nan}, "softmax_scale is nan"),
        ({"softmax_scale": "1"}, "softmax_scale is '1'"),
        ({"softcap": -1.0}, r"softcap is -1\.0"),
        ({"window_size": (-5, 3)}, r"window_size is \(-5, 3\)"),
        ({"window_size": 3}, "window_size is 3"),
        ({"mask_shape": (7, 7, 7, 7)}, "mask_shape is"),
        ({"bias_shape": (1, 1)}, "bias_shape is"),
        ({"mask_shape": (1, 1, 1, 1), "packed": True}, "packed calls"),
        ({"alibi_shape": (5,)}, "alibi_shape is"),
        ({"bias_dtype": "int8"}, "bias_dtype is 'int8'"),
        ({"error_budget": 5.0}, "error_budget is 5.0"),
        ({"packed": True, "total_q": -3}, "total_q is -3"),
    ],
)
def test_problems_that_no_call_can_have(changes: dict[str, Any], text: str) -> None:
    problem = replace(PLAIN, **changes)
    with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType), match=text):
        warpwave.explain(problem, gpu="h200")
    with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType), match=text):
        warpwave.warmup([problem], "cpu")


def test_wrong_arguments_raise_as_the_call_does() -> None:
    q, k, v = tensors()
    with pytest.raises(warpwave.InvalidInput, match="softcap is -1"):
        warpwave.explain(q, k, v, softcap=-1.0)
    with pytest.raises(warpwave.InvalidInput, match="kernel is 'nonsense'"):
        warpwave.explain(q, k, v, kernel="nonsense")


# What binds it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "options", "binding"),
    [
        ("h200", {}, "tensor cores"),
        ("h200", {"seqlen_q": 1, "num_heads_kv": 4}, "memory"),
        ("h200", {"head_dim": 32, "head_dim_v": 32}, "exponentials"),
        ("rtx3060", {"dtype": "float32"}, "float32 units"),
        ("mi300x", {}, "tensor cores"),
    ],
)
def test_the_binding_resource_is_named_with_its_time(card: str, options: dict[str, Any], binding: str) -> None:
    said = on(card, **options)
    known = said.roofline
    assert known is not None and known.of_problem.binding is not None
    assert known.of_problem.binding.resource == binding
    line = next(line for line in str(said).splitlines() if line.startswith("bound by"))
    precise = {
        "float32 units": " with this accuracy",
        "exponentials": " that computes every exponential on the special function units",
    }.get(binding, "")
    printed = binding.replace("tensor", "matrix") if card.startswith("mi") else binding
    assert f"{printed}: no implementation{precise} takes" in line
    data = said.to_dict()
    assert data["binding"] == binding
    assert data["least_us"] == known.of_problem.time_us <= data["least_us_by_this_kernel"] == known.time_us


def test_every_bound_is_printed_with_arithmetic_that_holds() -> None:
    """Reads the text as a person with a calculator would."""
    checked = 0
    units = {"TFLOP": 1e12, "GFLOP": 1e9, "GB": 1e9, "MB": 1e6, "Gexp": 1e9, "Mexp": 1e6}
    units |= {"TFLOP/s": 1e12, "GB/s": 1e9, "Gexp/s": 1e9}
    line_pattern = re.compile(
        r"([\d.,]+) (\w+)(?: \(q.*\)|, one a pair)? / ([\d.,]+) (\w+/s)(?: \(\w+\))? = ([\d.,]+) us$"
    )
    for card in ("h200", "l4", "mi210"):
        for line in str(on(card, causal=Causal())).splitlines():
            if found := line_pattern.search(line):
                amount, unit, rate, rate_unit, time_us = found.groups()
                number = [float(text.replace(",", "")) for text in (amount, rate, time_us)]
                assert number[0] * units[unit] / (number[1] * units[rate_unit]) * 1e6 == pytest.approx(
                    number[2], rel=6e-3
                )
                checked += 1
    assert checked >= 9


def test_intensity_of_each_product_is_printed() -> None:
    text = str(on("h200", seqlen_q=1, head_dim_v=64))
    pairs, rows, keys = 4 * 16 * 4096, 4 * 16, 4 * 16 * 4096
    for name, width in (("QK^T", 128), ("PV", 64)):
        line = next(line for line in text.splitlines() if line.strip().startswith(name))
        assert f"{2 * pairs * width / ((rows + keys) * width * 2):.4g} FLOP a byte" in line


def test_measured_rates_stand_beside_the_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(
        gpu="NVIDIA H200", arch="sm_90", date="2026-11-21T13:00:00+00:00", read_gbps=4480.0, launch_us=1.5,
        product_tflops={"bfloat16": 800.0}, exponentials_gops=4000.0,
    )  # fmt: skip
    assert on("h200").measured is None
    (tmp_path / "shipped.json").write_text(measure.text(ceilings))
    shipped = on("h200")
    assert shipped.measured is not None and shipped.measured.time_us == pytest.approx(PLAIN.flops / 800e6)
    assert shipped.bounds is not None and shipped.bounds.time_us < shipped.measured.time_us
    header = next(line for line in str(shipped).splitlines() if "arithmetic" in line)
    assert (
        header.split("  ")[-1] == "arithmetic" and "data sheet" in header and "measured 2026-11-21, shipped" in header
    )
    measure.store(replace(ceilings, date="2026-12-24T13:00:00+00:00"))
    kept = on("h200").measured
    assert kept is not None and kept.rates.name == "measured 2026-12-24", "this machine's own come first"
    tiny = on("h200", batch=1, seqlen_q=4, seqlen_k=4, num_heads_q=1, num_heads_kv=1)
    assert "the launch: 1.50 us (measured)" in str(tiny)


def test_a_tiny_call_is_not_said_to_be_bound_by_nanoseconds_of_memory() -> None:
    text = str(on("h200", batch=1, seqlen_q=4, seqlen_k=4, num_heads_q=1, num_heads_kv=1))
    assert "the launch takes longer" in " ".join(text.split())


@pytest.mark.parametrize("name", ["sm_90", "cpu"])
def test_without_rates_it_says_how_to_get_them(name: str) -> None:
    said = warpwave.explain(PLAIN, gpu=resolve(name))
    assert said.bounds is None and said.measured is None
    assert ("h200" if name == "sm_90" else "warpwave roof") in said.rates_missing
    assert said.rates_missing.split(":")[0].split(";")[0] in " ".join(str(said).split())


def test_a_card_that_is_in_no_catalog() -> None:
    unknown = replace(resolve("sm_86"), name="NVIDIA A16", num_sms=10)
    assert "no NVIDIA A16" in warpwave.explain(PLAIN, gpu=unknown).rates_missing


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_is_known_before_it_is_allocated() -> None:
    said = on("h200", return_lse=True, head_dim_v=64)
    memory = said.memory
    assert memory is not None and memory.exact
    rows = 4 * 4096 * 16
    assert memory.inputs == rows * (128 + 128 + 64) * 2
    assert (memory.out, memory.lse, memory.workspace) == (rows * 64 * 2, rows * 4, 0)
    assert memory.peak == rows * 132 and "exactly" in str(said)


def test_the_log_sum_exp_of_float64_is_float64() -> None:
    """And its bytes are those of the memory bound too."""
    alone = on("h200", dtype="float64").memory
    said = on("h200", dtype="float64", return_lse=True)
    assert alone is not None and said.memory is not None
    assert (alone.lse, said.memory.lse) == (0, 8 * 4 * 4096 * 16)
    assert said.problem.compulsory_bytes - replace(said.problem, return_lse=False).compulsory_bytes == said.memory.lse
    assert said.problem.work(is_backward=True) == replace(said.problem, return_lse=False).work(is_backward=True)


def test_what_does_not_fit_the_card_is_said() -> None:
    assert "too much" in str(on("t4", batch=64, seqlen_q=65536, seqlen_k=65536))
    assert "too much" not in str(on("h200"))


def test_memory_counts_every_input() -> None:
    q, k, v = tensors()
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    bias = torch.zeros(1, 4, 8, 8)
    slopes, sinks = torch.zeros(4), torch.zeros(4)
    memory = warpwave.explain(q, k, v, mask=mask, bias=bias, alibi_slopes=slopes, sinks=sinks).memory
    inputs = [q, k, v, mask, bias, slopes, sinks]
    assert memory is not None and memory.inputs == sum(t.numel() * t.element_size() for t in inputs)


# Other arguments, losses and the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float7"}, "dtype is 'float7'"),
        ({"batch": -1}, "batch is -1"),
        ({"seqlen_k": 1.5}, r"seqlen_k is 1\.5"),
        ({"num_heads_kv": 3}, "k has 3 heads"),
        ({"precision": "tf64"}, "precision is 'tf64'"),
        ({"causal": True}, "causal is True; in a problem it must be a Causal"),
    ],
)
def test_a_problem_that_no_call_has_is_refused(changes: dict[str, Any], said: str) -> None:
    problem = replace(PLAIN, **changes)
    with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType), match=said):
        warpwave.explain(problem, gpu=resolve("h200"))
    with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType), match=said):
        warpwave.warmup([problem], "cpu")


def test_options_beside_a_problem_are_not_ignored() -> None:
    with pytest.raises(warpwave.InvalidInput, match="AttentionProblem"):
        warpwave.explain(PLAIN, gpu=resolve("h200"), causal=True)


@pytest.mark.parametrize("precision", ["tf32", "ieee", "default", 1e-3])
@pytest.mark.parametrize("return_lse", [False, True])  # by torch_sdpa, and by eager
def test_float32_products_on_a_cpu_are_float32(precision: str | float, return_lse: bool) -> None:
    said = warpwave.explain(*tensors(), precision=precision, return_lse=return_lse)
    assert said.kernel == ("eager" if return_lse else "torch_sdpa")
    assert said.accuracy is not None and said.accuracy.arithmetic == "ieee"
    if said.accuracy.measured is not None:
        assert said.accuracy.measured <= said.accuracy.promised


def test_a_remainder_that_leads_is_said_first_and_no_loss_of_ours_is_blamed() -> None:
    call = replace(PLAIN, batch=1, seqlen_q=4096, seqlen_k=4096, requires_grad=False)
    usual = warpwave.explain(call, gpu=resolve("h200"))
    assert usual.prediction is not None
    lines = str(warpwave.explain(call, gpu=resolve("h200"), measured_us=20 * usual.prediction.time_us)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("LOSSES"))
    assert lines[start + 1].startswith("  first    Remainder, 20 x")
    assert "--from-table" in " ".join(lines[start : start + 5])
    assert sum(line.startswith("  first ") for line in lines) == 1
    near = str(warpwave.explain(call, gpu=resolve("h200"), measured_us=1.05 * usual.prediction.time_us))
    assert "first    Remainder" not in near


def test_a_time_below_the_prediction_names_no_loss_smaller_than_the_error() -> None:
    usual = warpwave.explain(WINDOWED, gpu=resolve("rx7900xtx"))
    assert usual.prediction is not None
    fast = str(warpwave.explain(WINDOWED, gpu=resolve("rx7900xtx"), measured_us=0.3 * usual.prediction.time_us))
    leads = [line for line in fast.splitlines() if line.startswith("  first ")]
    assert len(leads) == 1 and leads[0].startswith("  first    Remainder, 0.3 x: the call took")
    near = str(warpwave.explain(WINDOWED, gpu=resolve("rx7900xtx"), measured_us=0.9 * usual.prediction.time_us))
    assert "first    Remainder" not in near and "this loss may be as small as" in " ".join(near.split())


def test_the_columns_of_losses_stand_below_each_other_on_wgps() -> None:
    text = str(warpwave.explain(WINDOWED, gpu=resolve("rx7900xtx")))
    lines = [line for line in text.splitlines() if re.match(r"  (clocks|idle WGPs) ", line)]
    assert len(lines) == 2 and lines[0].index(" us ") == lines[1].index(" us ")


def test_bounds_of_hot_calls_read_nothing_that_the_caches_hold() -> None:
    call = replace(PLAIN, batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1)
    cold, hot = (warpwave.explain(call, gpu=resolve("l4"), hot=is_hot).bounds for is_hot in (False, True))
    assert cold is not None and hot is not None
    memory, nothing = cold.of("memory"), hot.of("memory")
    assert memory is not None and memory.time_us > 1 and nothing is not None and nothing.time_us == 0


def test_the_command_explains_quantized_calls() -> None:
    command = ["explain", "--gpu", "h100", "--dtype", "fp8"]
    said = CliRunner().invoke(app, [*command, "--json"])
    assert said.exit_code == 0, said.output
    bounds = json.loads(said.output)["bounds"]
    resources = {bound["resource"]: bound for bound in bounds["bounds"]}
    assert bounds["path"] == "fp8"
    peak = catalog()["h100"].peak_tflops["fp8"]
    assert resources["tensor cores"]["time_us"] == pytest.approx(4 * 16 * 4096**2 * 128 / peak * 1e-6)
    text = CliRunner().invoke(app, command).output
    assert "q 8.389 MB, k 8.389 MB, v 8.389 MB, out 16.78 MB" in text and "more: out 16.78 MB" in text
    assert "over 25.17 MB of v and out" in text
    assert "never validated: no calibration has quantized calls" in text


def test_a_measured_time_on_an_architecture_is_refused_with_its_cards() -> None:
    with pytest.raises(InvalidInput, match="sm_86 has none; for times name a card: a10, rtx3060"):
        warpwave.explain(PLAIN, gpu=resolve("sm_86"), measured_us=1000.0)


# As data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [*catalog(), "cpu", "sm_120", "gfx1100"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seqlen_q": 1},
        {"dtype": "float32"},
        {"seqlen_q": 0, "seqlen_k": 0},
        {"batch": 0},
        {"mask_shape": (1, 1, 1, 1)},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_every_card_explains_every_kind_of_call(card: str, options: dict[str, Any]) -> None:
    said = on(card, **options)
    json.dumps(said.to_dict())
    text = str(said)
    assert said.kernel is not None and said.kernel in text and "nan" not in text and "inf " not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.count("TO CHANGE") == 1


def test_each_vendor_s_own_words() -> None:
    assert "304 CUs" in str(on("mi300x", batch=1)) and " SM" not in str(on("mi300x", batch=1))
    assert "132 SMs" in str(on("h200")) and " CU" not in str(on("h200"))


def test_explanations_are_plain_frozen_data() -> None:
    said = on("h200")
    with pytest.raises(dataclasses.FrozenInstanceError):
        said.kernel = "another"  # type: ignore[misc]
    assert {"bounds", "measured", "memory", "advice", "near_misses", "binding"} <= said.to_dict().keys()


def test_float32_on_hopper_is_split_from_where_it_lies() -> None:
    """Into a workspace that is said beforehand, whatever the strides, and copied nowhere else."""
    q, k, v = (torch.empty(1, 600, 8, 128, device="meta")[..., ::2] for _ in range(3))
    said = warpwave.explain(q, k, v, gpu=resolve("h200"))
    assert said.kernel == "hopper/flash_fwd" and said.memory is not None
    parts, inverses, maxima = 2 * 3 * 2 * 600 * 8 * 64, 2 * 8 + 10 * 8, 2 * 10 * 8
    assert said.memory.workspace == parts + 4 * (inverses + maxima), "two parts of two bytes for each element"
    assert "copies them first" not in str(said)


def test_a_section_of_bounds_names_what_its_rates_hold_for() -> None:
    geforce = str(on("rtx4090", dtype="float16"))
    assert "products of float16 accumulated in float32, at the highest clock, 3105 MHz" in geforce
    assert "no implementation that accumulates in float32 takes less than" in " ".join(geforce.split())
    assert "highest clock" not in str(on("h200")) and "accumulated in float32" in str(on("h200"))
    assert "accumulated" not in str(on("rtx3060", dtype="float32"))


def test_products_in_parts_are_a_step_of_their_own() -> None:
    said = on("rtx4090", dtype="float32")
    p = said.prediction
    assert p is not None and said.kernel == "flash_fwd" and p.factors["arithmetic"] == pytest.approx(3.0)
    assert p.times_us["arithmetic"] == pytest.approx(3 * said.flops / (82.6e6 * 3105 / 2520))
    assert 1.5 < p.factors["clocks"] < 2.5 and "products in more parts" in str(said)
    plain = on("rtx4090", dtype="float32", precision="ieee").prediction
    assert plain is not None and plain.factors["arithmetic"] == 1.0
    assert on("h200").prediction.factors["arithmetic"] == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(("card", "unit"), [("mi300x", "CU"), ("rx7900xtx", "WGP"), ("h200", "SM")])
def test_a_card_is_described_in_its_maker_s_words(card: str, unit: str) -> None:
    text = str(on(card))
    assert f" {unit}s" in text and f"a {unit}" in text.replace("an SM", "a SM") and "an CU" not in text
    assert ("matrix cores" in text) == (unit != "SM") and ("tensor cores" in text) == (unit == "SM")


def test_a_published_kernel_s_time_within_reach_of_the_bound_is_split() -> None:
    """FlashAttention-2's time on an RTX 4090, and one that is a tenth shorter than the bound."""
    problem = replace(PLAIN, num_heads_q=32, num_heads_kv=32, head_dim=64, head_dim_v=64, dtype="float16")
    gpu = resolve("rtx4090")
    said = warpwave.explain(problem, gpu=gpu, measured_us=3181)
    assert said.losses is not None and not said.losses.warning and said.losses.remainder < 1
    short = warpwave.explain(problem, gpu=gpu, measured_us=2450)
    assert short.losses is not None and "  warning  The measured time is 9.3% less than the bound" in str(short)
    with pytest.raises(warpwave.InvalidInput, match="takes less than"):
        warpwave.explain(problem, gpu=gpu, measured_us=2300)
