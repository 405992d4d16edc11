"""`explain` of a call with gradients: the backward's kernel, bounds, time and losses, with arithmetic that holds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import warpwave
from tests.workbench.explain.test_explanation import nothing_measured
from warpwave import AttentionProblem, Explanation, InvalidInput, dispatch
from warpwave.problem import Causal
from warpwave.workbench.cli import app
from warpwave.workbench.explain import other_cards
from warpwave.workbench.hardware import measure
from warpwave.workbench.hardware.catalog import resolve
from warpwave.workbench.model.roofline import us
from warpwave.workbench.model.steps import LOSSES

__all__ = ["nothing_measured"]  # fixture

CALL = AttentionProblem(
    batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
    dtype="bfloat16", softmax_scale=128**-0.5, requires_grad=True,
)  # fmt: skip
# By kernel and head_dim: above 128, flash_bwd has a launch each for dK and dV, hopper/flash_bwd one for both.
PRODUCTS = {
    ("hopper/flash_bwd", 128): 5, ("hopper/flash_bwd", 256): 7,
    ("flash_bwd", 64): 7, ("flash_bwd", 128): 7, ("flash_bwd", 256): 8,
}  # fmt: skip


# 32 blocks of keys, each in four parts, which the launch draws as blocks.
FEW_BLOCKS: dict[str, Any] = {"batch": 1, "seqlen_k": 1024, "num_heads_kv": 4}
LONG: dict[str, Any] = {"batch": 1, "seqlen_q": 16384, "seqlen_k": 16384}


def on(card: str, **options: Any) -> Explanation:
    return warpwave.explain(replace(CALL, **options), gpu=resolve(card))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def section(text: str, title: str) -> list[str]:
    """The lines of one section of a text."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))
    return lines[begin:end]


# What is printed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "kernel", "options"),
    [
        ("h200", "hopper/flash_bwd", {"causal": Causal()}),
        ("rtx4090", "flash_bwd", {"causal": Causal(), "head_dim": 64, "head_dim_v": 64}),
        ("mi300x", "flash_bwd", {"num_heads_kv": 4}),
        ("h200", "hopper/flash_bwd", {"head_dim": 256, "head_dim_v": 256, "dtype": "float16"}),
        ("a100-80gb", "flash_bwd", {"head_dim": 256, "head_dim_v": 256, "num_heads_kv": 2}),
    ],
)
def test_a_person_with_a_calculator_finds_the_same_figures(card: str, kernel: str, options: dict[str, Any]) -> None:
    said = on(card, **options)
    text, backward = str(said), said.backward
    assert backward is not None and backward.prediction is not None and backward.bounds is not None
    assert backward.kernel == kernel and f"gradients  {kernel}" in text

    # The work, from nothing but the call.
    p = said.problem
    rows, keys = p.batch * p.num_heads_q * p.seqlen_q, p.batch * p.num_heads_kv * p.seqlen_k
    pairs = rows * (p.seqlen_k + 1) // 2 if p.causal else rows * p.seqlen_k
    flops = 2 * pairs * 5 * p.head_dim
    moved = 2 * p.head_dim * (3 * rows + 4 * keys)  # q, dO, dQ; K, V, dK, dV
    assert (backward.flops, backward.compulsory_bytes) == (flops, moved) == tuple(p.work(is_backward=True)[0:3:2])
    assert backward.flops == 2.5 * said.flops
    at_least = section(text, "BACKWARD   at least")
    assert "2.5 x the work of the forward" in at_least[1]

    # Each bound is its amount over its rate.
    units = {"TFLOP": 1e12, "GFLOP": 1e9, "GB": 1e9, "MB": 1e6, "Gexp": 1e9, "Mexp": 1e6}
    units |= {"TFLOP/s": 1e12, "GB/s": 1e9, "Gexp/s": 1e9}
    pattern = r"([\d.,]+) (\w+)(?: \(q.*\)|, one a pair)? / ([\d.,]+) (\w+/s)(?: \(\w+\))? = ([\d.,]+) us$"
    found = [match.groups() for line in at_least if (match := re.search(pattern, line))]
    assert len(found) == len(backward.bounds.of_problem.bounds) >= 3
    for amount, unit, rate, rate_unit, time_us in found:
        expected = number(amount) * units[unit] / (number(rate) * units[rate_unit]) * 1e6
        assert number(time_us) == pytest.approx(expected, rel=6e-3)
    assert number(found[0][0]) * units[found[0][1]] == pytest.approx(flops, rel=1e-3)
    tensors = re.findall(r"(dout|dq|dk|dv|q|k|v) ([\d.]+) (MB|GB)", next(line for line in at_least if "(q " in line))
    assert sum(float(size) * units[unit] for _, size, unit in tensors) == pytest.approx(moved, rel=1e-3)

    # The kernel's tiles are the work times the products that it repeats and its padding.
    steps = printed_steps(section(text, "BACKWARD   time"))
    products = PRODUCTS[kernel, p.head_dim]
    assert f"{products} products of a visible tile" in text
    again = products / 5
    assert backward.cost.flops == pytest.approx(flops * again * padding(backward), rel=6e-3)

    # The steps lead from the bound to the time; steps of less than 0.5 % are not printed.
    assert steps[0][1] == us(backward.prediction.bound_us)
    assert number(steps[-1][1].split()[0]) == pytest.approx(backward.prediction.time_us, rel=1e-2)
    product = math.prod(factor for _, _, factor in steps[1:])
    assert product == pytest.approx(backward.prediction.time_us / backward.prediction.bound_us, rel=5e-3 * len(steps))
    for (_, before, _), (name, after, factor) in pairwise(steps):
        assert number(after.split()[0]) / number(before.split()[0]) == pytest.approx(factor, rel=0.011), name


def padding(backward: Any) -> float:
    """Tiles over pairs, from the tile shapes alone; these calls have whole tiles."""
    p, config = backward.problem, backward.config
    if p.causal is None:
        return 1.0
    shapes = [(config.block_m, 128)] if hasattr(config, "block_m") else [
        (tile.block_m, tile.block_n) for tile in (config.dq, config.dkv)
    ]  # fmt: skip
    of_shape = []
    for m, n in shapes:
        tiles = sum(
            min(p.seqlen_k, row + m) // n + (min(p.seqlen_k, row + m) % n > 0) for row in range(0, p.seqlen_q, m)
        )
        of_shape.append(tiles * m * n / (p.seqlen_q * (p.seqlen_q + 1) / 2))
    if len(of_shape) == 1:
        return of_shape[0]
    return (3 * of_shape[0] + 4 * of_shape[1]) / 7


def printed_steps(lines: list[str]) -> list[tuple[str, str, float]]:
    """(name, time, factor) of the printed steps; the bound's factor is 1."""
    found = []
    for line in lines:
        if match := re.match(r"  (\w[\w ]*?) +([\d.,]+ us)(?:  x ([\d.]+)  .*)?$", line):
            found.append((match[1], match[2], float(match[3] or 1.0)))
    return found[next(i for i, step in enumerate(found) if step[0] == "bound") :]


def test_both_passes_are_the_sum_of_each() -> None:
    said = on("h200", causal=Causal())
    assert said.both is not None and said.backward is not None
    both, forward, backward = said.both.prediction, said.prediction, said.backward.prediction
    assert both is not None and forward is not None and backward is not None
    assert list(both.times_us) == ["bound", *LOSSES]
    for name, time_us in both.times_us.items():
        assert time_us == forward.times_us[name] + backward.times_us[name]
    assert (both.low_us, both.high_us) == (forward.low_us + backward.low_us, forward.high_us + backward.high_us)
    lines = section(str(said), "BOTH")
    share = backward.time_us / both.time_us
    rate = 3.5 * said.flops / both.time_us * 1e-6
    assert f"{us(both.time_us)}, {rate:.4g} TFLOP/s, {share:.0%} of it the backward" in lines[1]


def test_a_launch_that_adds_says_how_much_and_one_that_repeats_says_what() -> None:
    hopper, portable = str(on("h200")), str(on("a100", dtype="float32", causal=Causal(), dropout_p=0.1))
    steps = 4 * 16 * 32 * 64  # heads x tiles of keys x tiles of queries
    assert f"{steps * 64 * 128 * 4 / 1e9:.4g} GB added to sums of dQ in L2" in hopper
    assert "5 products of a visible tile where 5 are needed\n" in hopper
    assert "9 products of a visible tile where 5 are needed: scores are computed again" in portable
    assert "launches of 4,096, 132 and 4,096 blocks on 132 SMs" in " ".join(hopper.split())
    # The last one adds up the parts of 68 blocks.
    long = " ".join(str(on("h200", **LONG)).split())
    assert "launches of 4,096, 132, 4,096 and 544 blocks on 132 SMs" in long
    few = " ".join(str(on("h200", **FEW_BLOCKS)).split())
    assert "launches of 1,024, 128, 1,024 and 256 blocks on 132 SMs" in few
    in_parts = str(on("h100", dtype="float32"))
    assert "7 products of a visible tile where 5 are needed: scores are computed again" in in_parts
    assert "launches of 8,192, 12,288, 132 and 132 blocks on 132 SMs" in in_parts


SHORT: dict[str, Any] = {"batch": 2048, "seqlen_q": 16, "seqlen_k": 16, "head_dim": 64, "head_dim_v": 64}
APART = SHORT | {"seqlen_q": 129, "seqlen_k": 65}  # too long for the joint launches of flash_bwd


def test_kernels_before_and_after_the_chosen_one_are_listed_in_order() -> None:
    lines = str(on("h200", **SHORT)).splitlines()
    (before,) = (n for n, line in enumerate(lines) if line.startswith("  able, before flash_bwd: hopper/flash_bwd ("))
    assert lines[before + 1].startswith("  hopper/flash_bwd is passed over: a tile of 16 x 16 holds a sequence")
    assert not any(line.startswith("  not hopper/flash_bwd") for line in lines)
    (after,) = (n for n, line in enumerate(lines) if line.startswith("  able, after flash_bwd: three_kernel backward"))
    assert after > before


def test_large_multiples_have_no_exponent() -> None:
    text = str(on("h200", **APART | {"batch": 16384, "mask_shape": (16384, 1, 1, 65)}))
    assert "524,288 blocks on 132 SMs" in text and "1,986 rounds of tiles" in text
    assert not re.search(r"\de\+\d", text)


def test_the_work_of_a_tiny_call_is_not_that_of_a_kernel_s_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHIPPED", Path(measure.__file__).with_name("measured"))
    said = on("h200", **SHORT | {"batch": 4, "num_heads_q": 4, "num_heads_kv": 2}, bias_shape=(1, 4, 16, 16),
              bias_dtype="bfloat16")  # fmt: skip
    assert said.backward is not None and said.backward.bounds is not None
    work, tiles = said.backward.bounds.of_problem.time_us, said.backward.bounds.time_us
    bound = " ".join(str(said).split("BACKWARD   hopper/flash_bwd")[1].split())
    assert tiles > 5 * work and f"the work itself needs at least {us(work)} " in bound


def test_operators_of_torch_are_not_listed_as_launches_of_no_block() -> None:
    for shape in ({"mask_shape": (2048, 1, 1, 65)}, {"bias_shape": (1, 16, 129, 65), "bias_dtype": "bfloat16"}):
        grid = next(line for line in str(on("h200", **APART, **shape)).splitlines() if "grid     launches of" in line)
        assert " 0" not in grid, grid


def test_amd_has_compute_units_and_no_kernel_of_hoppers() -> None:
    text = str(on("mi300x", causal=Causal()))
    assert "not hopper/flash_bwd: found AMD Instinct MI300X" in text
    assert " SM" not in text.replace("SMEM", "") and "CUs" in "\n".join(section(text, "BACKWARD   flash_bwd: what"))


def test_the_gradient_of_a_bias_adds_time() -> None:
    said = on("a100-80gb", bias_shape=(1, 16, 4096, 4096), bias_dtype="bfloat16")
    assert said.backward is not None and said.backward.prediction is not None
    assert 0 < said.backward.bias_us < said.backward.prediction.time_us
    assert f"its gradient adds {us(said.backward.bias_us)}, predicted" in str(said)


@pytest.mark.parametrize(
    ("card", "options", "kernel"),
    [
        ("h200", {"head_dim": 512, "head_dim_v": 512, "seqlen_q": 1024, "seqlen_k": 1024}, "three_kernel backward"),
        (
            "h200",
            {"head_dim": 512, "head_dim_v": 512, "softcap": 20.0, "seqlen_q": 512, "seqlen_k": 512},
            "eager backward",
        ),
        ("mi300x", {"head_dim": 512, "head_dim_v": 512, "seqlen_q": 512, "seqlen_k": 512}, "eager backward"),
        ("cpu", {"seqlen_q": 512, "seqlen_k": 512, "dtype": "float32"}, "eager backward"),
    ],
)
def test_kernels_with_gradients_of_their_own_are_explained(card: str, options: dict[str, Any], kernel: str) -> None:
    said = on(card, **options)
    assert said.backward is not None and said.backward.kernel == kernel
    assert (said.backward.prediction is None) == (card == "cpu")
    assert said.backward.cost.flops >= said.backward.flops
    assert f"BACKWARD   {kernel}" in str(said)


def test_a_call_without_gradients_has_no_backward() -> None:
    said = on("h200", requires_grad=False)
    assert said.backward is None and said.both is None and "BACKWARD" not in str(said)


def test_the_workspace_is_what_the_launches_allocate() -> None:
    from warpwave.kernels.hopper.flash_bwd import kernel

    lengths = ((100, 100), (1000, 1000))
    packed = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "packed": True, "total_q": 1100, "total_k": 1100}
    for options in (
        {"causal": Causal()}, {"seqlen_q": 1001, "has_sinks": True}, {"head_dim": 200, "head_dim_v": 64},
        packed | {"lengths": lengths}, {"mask_shape": (1, 1, 1, 4096)}, FEW_BLOCKS,
    ):  # fmt: skip
        said = on("h200", **options)
        assert said.memory is not None and said.backward is not None
        workspace, _ = kernel.example(said.backward.problem, said.backward.config, "meta")
        found = sum(t.nbytes for t in (*workspace[:-1], *workspace.hidden) if t is not None)
        assert said.memory.backward == found
    portable = on("rtx4090").memory
    assert portable is not None and portable.backward == 8 * 4 * 16 * 4096, "the statistics of rows alone"


def test_parts_of_blocks_are_written_to_the_workspace_and_added_up() -> None:
    from warpwave.kernels.hopper.flash_bwd import kernel

    for options, blocks, divided, parts in ((FEW_BLOCKS, 32, 32, 4), (LONG, 2048, 68, 5)):
        said = on("h200", **options).backward
        assert said is not None
        problem, (*_, joint, finish, sums) = said.problem, said.cost.parts
        workspace, _ = kernel.example(problem, said.config, "meta")
        assert workspace.dk_splits is not None and workspace.dv_splits is not None
        written = workspace.dk_splits.nbytes + workspace.dv_splits.nbytes
        assert written == 4 * parts * divided * 128 * 2 * 128
        results = 2 * problem.batch * problem.num_heads_kv * problem.seqlen_k * 2 * 128
        whole = results * (blocks - divided) // blocks
        assert joint.write_bytes - joint.added_bytes == written + whole
        assert joint.scratch_bytes == written + 2 * finish.scratch_bytes, "each sum of dQ enters and leaves L2"
        assert (sums.read_bytes, sums.write_bytes, sums.scratch_bytes) == (written, results - whole, written)
        # Each byte of inputs and outputs is one launch's.
        rows = 2 * problem.batch * problem.num_heads_q * problem.seqlen_q * 128
        assert joint.first_bytes + sums.first_bytes == 2 * rows + 2 * results + 4 * rows // 128


# A measured time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["backward", "both"])
def test_a_measured_time_is_the_product_of_its_losses(passes: str) -> None:
    problem = replace(CALL, causal=Causal())
    said = warpwave.explain(problem, gpu=resolve("h200"), measured_us=3000.0, passes=passes)
    assert said.backward is not None and said.both is not None and said.losses is None
    pass_ = said.backward if passes == "backward" else said.both
    losses, prediction = pass_.losses, pass_.prediction
    assert losses is not None and prediction is not None
    assert math.prod(loss.factor for loss in losses.losses) * losses.bound_us == pytest.approx(3000.0)
    assert losses.remainder == pytest.approx(3000.0 / prediction.time_us)
    lines = section(str(said), "BACKWARD   measured" if passes == "backward" else "BOTH")
    assert any("remainder" in line for line in lines)
    others = said.both.losses if passes == "backward" else said.backward.losses
    assert others is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": "gradients", "measured_us": 1.0}, "passes is 'gradients'; it must be one of"),
        ({"passes": "backward"}, "give measured_us too"),
        ({"passes": "both", "record": Path("r.jsonl")}, "a record of bench holds times of forwards"),
        ({"passes": "backward", "measured_us": 10.0}, "takes less than"),
    ],
)
def test_what_was_measured_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        warpwave.explain(CALL, gpu=resolve("h200"), **options)


def test_a_backward_needs_gradients() -> None:
    with pytest.raises(InvalidInput, match="the call has no gradients"):
        warpwave.explain(replace(CALL, requires_grad=False), gpu=resolve("h200"), measured_us=1e3, passes="backward")


# Tensors, JSON, several cards -----------------------------------------------------------------------------------------


def test_tensors_that_require_gradients_are_explained() -> None:
    q, k, v = (torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    said = warpwave.explain(q.requires_grad_(), k, v, gpu=resolve("h200"))
    assert said.backward is not None and said.backward.kernel == said.gradients == "hopper/flash_bwd"


def test_the_command_prints_json_with_the_figures_of_the_text() -> None:
    arguments = ["explain", "--gpu", "rtx4090", "--head-dim", "64", "--grad", "--causal", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    backward = json.loads(result.output)["backward"]
    assert backward["kernel"] == "flash_bwd" and backward["binding"] == "tensor cores"
    assert backward["flops"] == 2.5 * json.loads(result.output)["flops"]
    assert list(backward["prediction"]["times_us"]) == ["bound", *LOSSES]
    assert backward["prediction"]["times_us"]["bound"] == backward["least_us"]
    assert json.loads(result.output)["both"]["prediction"]["time_us"] > backward["prediction"]["time_us"]


def test_several_cards_have_the_time_of_both_passes() -> None:
    rows = {row.card: row for row in other_cards.explain_on(CALL, other_cards.cards("h200,mi300x"))}
    said = on("h200").both
    assert said is not None and said.prediction is not None and rows["h200"].prediction is not None
    assert rows["h200"].prediction.time_us == said.prediction.time_us
    assert (rows["h200"].gradients, rows["mi300x"].gradients) == ("hopper/flash_bwd", "flash_bwd")
    text = other_cards.text(CALL, list(rows.values()))
    assert "hopper/flash_fwd + hopper/flash_bwd" in text and "of forward and backward" in text


@pytest.mark.parametrize("card", ["h200", "h100", "rtx4090", "mi300x", "a100-80gb"])
def test_every_kernel_of_gradients_climbs_from_the_bound(card: str) -> None:
    from warpwave.workbench.model.predict import predict

    gpu = resolve(card)
    for options in ({}, {"causal": Causal()}, {"num_heads_kv": 2}, {"seqlen_q": 100}, {"window_size": (64, 0)},
                    {"dtype": "float32"}, {"head_dim": 40, "head_dim_v": 24}):  # fmt: skip
        problem = replace(CALL, requires_grad=False, return_lse=True, **options)
        for module in (*dispatch.gradient_kernels(problem, gpu), dispatch.eager_backward):
            p = predict(problem, module, module.default(problem, gpu), gpu)
            assert p is not None
            times = list(p.times_us.values())
            assert times == sorted(times) and times[0] > 0 and times[-1] == p.time_us
            assert p.bound_us <= p.low_us <= p.time_us <= p.high_us
            assert math.prod(p.factors.values()) == pytest.approx(p.time_us / p.bound_us, rel=1e-9)


def test_what_is_computed_again_and_added_has_a_step_of_its_own() -> None:
    from warpwave.kernels import flash_bwd, flash_fwd
    from warpwave.kernels.hopper import flash_bwd as hopper_flash_bwd
    from warpwave.workbench.model.predict import predict

    gpu, problem = resolve("h200"), replace(CALL, requires_grad=False, return_lse=True)

    def factors(module: Any) -> dict[str, float]:
        p = predict(problem, module, module.configs(problem, gpu)[0], gpu)
        assert p is not None
        return p.factors

    class _WithMoreSums:
        """`hopper/flash_bwd` with blocks of so few keys that they add to dQ 8 times as often."""

        def __getattr__(self, name: str) -> Any:
            return getattr(hopper_flash_bwd, name)

        def cost(self, *arguments: Any) -> Any:
            cost = hopper_flash_bwd.cost(*arguments)
            parts = [replace(p, added_bytes=8 * p.added_bytes, write_bytes=p.write_bytes + 7 * p.added_bytes)
                     for p in cost.parts]  # fmt: skip
            return replace(cost, parts=tuple(parts))

    assert 1.4 <= factors(flash_bwd)["recomputation"] < 1.5, "7 products of 5, and twice the exponentials"
    assert factors(flash_fwd)["recomputation"] == factors(hopper_flash_bwd)["recomputation"] == 1
    assert factors(flash_fwd)["reductions"] == factors(flash_bwd)["reductions"] == 1
    assert factors(hopper_flash_bwd)["reductions"] < 1.05 < 1.5 < factors(_WithMoreSums())["reductions"]


def test_memory_traffic_is_at_least_the_gradients() -> None:
    problem = AttentionProblem(
        batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_q=8, num_heads_kv=2, head_dim=128, head_dim_v=64,
        dtype="bfloat16", softmax_scale=0.1, causal=Causal(), window_size=(300, 0), requires_grad=True,
    )  # fmt: skip
    backward = warpwave.explain(problem, gpu="h200").backward
    assert backward is not None and backward.prediction is not None
    memory = next(t for t in backward.prediction.traffic if t.level == "memory")
    assert memory.bytes >= backward.compulsory_bytes and memory.redundancy >= 1
