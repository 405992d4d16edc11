"""The 8-bit Hopper forward's own source on a CPU: its protocol, factors and masks, tile by tile."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.kernels.hopper import gluon_on_cpu
from warpwave import dispatch
from warpwave.checks import Options, describe_call
from warpwave.gpu import Gpu
from warpwave.kernels import descales
from warpwave.kernels.hopper import factors, flash_fwd_fp8, rows, scheduler, serial, softmax, visible
from warpwave.kernels.hopper import parts as device_parts
from warpwave.kernels.hopper import words as device_words
from warpwave.kernels.hopper.flash_fwd import consumer as of_16_bits
from warpwave.kernels.hopper.flash_fwd import mask_bias
from warpwave.kernels.hopper.flash_fwd import producer as producer_of_16_bits
from warpwave.kernels.hopper.flash_fwd_fp8 import Config, consumer, kernel, producer, products, turns
from warpwave.kernels.hopper.flash_fwd_fp8.config import fits
from warpwave.kernels.prepass import transpose_values
from warpwave.problem import AttentionProblem, QuantizedOperands
from warpwave.runtime.triton_or_stub import NO_TRITON
from warpwave.workbench.verify.reference import oracle

H200 = Gpu.for_arch("sm_90")
pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason="Triton is published for Linux only")


class Turns:
    """The named barriers of turns: one group arrives, another waits. A block must end without an arrival pending."""

    made: ClassVar[list[Turns]] = []

    def __init__(self) -> None:
        self.changed, self.pending, self.taken = threading.Condition(), [False] * 3, 0
        self.made.append(self)

    def __call__(self, op: str, group: int) -> None:
        with self.changed:
            if op == "arrive":
                assert not self.pending[group], "two turns at once"
                self.pending[group] = True
                self.changed.notify_all()
                return
            for _ in range(int(gluon_on_cpu.PATIENCE_S / 0.2)):
                if self.changed.wait_for(lambda: self.pending[group], 0.2):
                    self.pending[group] = False
                    self.taken += 1
                    return
                if gluon_on_cpu.Barrier.failed.is_set():
                    raise gluon_on_cpu.Failed
            raise AssertionError("deadlock")


def on_cpu(problem: AttentionProblem, operands: QuantizedOperands, config: Config) -> tuple[Tensor, Tensor]:
    """out and lse by the source of the kernel and its roles, one block after another."""
    out = torch.full((*operands.q.shape[:-1], problem.head_dim_v), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((problem.batch, problem.num_heads_q, problem.seqlen_q), torch.nan)
    if problem.packed:
        lse = torch.full((problem.num_heads_q, problem.total_q), torch.nan)
    ahead, spec = kernel.specify(problem, H200, operands, out, lse, config)
    ahead.tensors[-1].view(torch.uint8).copy_(transposed(problem, operands).view(torch.uint8))
    modules = (
        *(kernel, consumer, producer, products, turns, factors, of_16_bits, producer_of_16_bits, device_parts, rows),
        *(scheduler, serial, softmax, visible, mask_bias, device_words),
    )
    Turns.made.clear()
    gluon_on_cpu.run_launch(spec, modules, 2, {"turn_barrier": Turns})
    assert not any(any(turns.pending) for turns in Turns.made), "a turn is left"
    assert any(turns.taken for turns in Turns.made) == (config.groups > 1)
    return out, lse


def transposed(problem: AttentionProblem, operands: QuantizedOperands) -> Tensor:
    """V as the launch before leaves it on memory that held NaN (prepass/transpose_values.py), by torch."""
    made = torch.full(transpose_values.shape(problem), 0x7F, dtype=torch.uint8)
    values = operands.v.view(torch.uint8)
    cu_k = operands.cu_seqlens_k.tolist() if problem.packed else []
    cu_q = operands.cu_seqlens_q.tolist() if problem.packed else []
    for b in range(problem.batch):
        one = values[cu_k[b] : cu_k[b + 1]] if problem.packed else values[b]
        length_q = cu_q[b + 1] - cu_q[b] if problem.packed else problem.seqlen_q
        first = (cu_k[b] // 128 + b) * 128 if problem.packed else 0
        band = problem.band(length_q, len(one))
        begin = max(0, band.low or 0)
        end = min(len(one), len(one) if band.high is None else length_q + band.high)
        if begin >= end:
            continue
        padded = torch.zeros(-(-end // 128) * 128, *one.shape[1:], dtype=torch.uint8)
        padded[begin:end] = one[begin:end]
        # [16 keys, h, l, e, head, column] -> [head, column, 16 keys, l, h, e]
        places = padded.view(-1, 2, 4, 2, *one.shape[1:]).permute(4, 5, 0, 2, 1, 3).flatten(2)
        written = begin // 128 * 128
        made[0 if problem.packed else b][..., first + written : first + len(padded)] = places[..., written:]
    return made.view(operands.v.dtype)


def quantized(
    shape: tuple[int, ...], block: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random numbers in 8 bits, (batch, tokens, heads, width), whose factors differ by up to 4 between blocks."""
    batch, tokens, heads, _ = shape
    many = -(-tokens // block) if block else 1
    factor = 2.0 ** (2 * torch.rand(batch, heads, many, generator=generator) - 1) / 16
    of_tokens = factor.repeat_interleave(block or tokens, 2)[:, :, :tokens].transpose(1, 2)[..., None]
    eights = (torch.randn(shape, generator=generator) / of_tokens).clamp(-448, 448).to(dtype)
    return eights, factor if block else factor[..., 0]


def call(
    lengths: tuple[int, int] = (150, 330),
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (64, 64),
    blocks: tuple[int, int, int] = (0, 0, 0),
    dtype_v: torch.dtype = torch.float8_e4m3fn,
    batches: int = 2,
    packed: int = 0,
    sinks: bool = False,
    alibi: bool = False,
    **options: Any,
) -> tuple[AttentionProblem, QuantizedOperands]:
    """A dense call; or of so many packed sequences, among them one without queries and one without keys."""
    generator = torch.Generator().manual_seed(1)
    batch = packed or batches
    q, q_descale = quantized((batch, lengths[0], heads[0], dims[0]), blocks[0], torch.float8_e4m3fn, generator)
    k, k_descale = quantized((batch, lengths[1], heads[1], dims[0]), blocks[1], torch.float8_e4m3fn, generator)
    v, v_descale = quantized((batch, lengths[1], heads[1], dims[1]), blocks[2], dtype_v, generator)
    others: dict[str, Any] = {}
    if sinks:
        others["sinks"] = torch.randn(heads[0], generator=generator)
    if alibi:
        others["alibi_slopes"] = torch.rand(heads[0], generator=generator) / 8
    if packed:
        many_q = [lengths[0] * (i % 3) // 2 for i in range(batch)]
        many_k = [lengths[1] * ((i + 1) % 4) // 3 for i in range(batch)]
        q, k, v = (
            torch.cat([x.view(torch.int8)[i, :n] for i, n in enumerate(many)]).view(x.dtype)
            for x, many in ((q, many_q), (k, many_k), (v, many_k))
        )
        others["cu_seqlens_q"], others["cu_seqlens_k"] = (
            torch.tensor([0, *many]).cumsum(0).int() for many in (many_q, many_k)
        )
        options |= {"max_seqlen_q": max(many_q), "max_seqlen_k": max(many_k)}
    operands = QuantizedOperands(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **others)
    return describe_call(operands, Options(return_lse=True, **options)), operands


CALLS: dict[str, dict[str, Any]] = {
    "full": {"dims": (128, 128)},
    "causal, sinks": {"causal": "bottom_right", "sinks": True, "blocks": (64, 64, 128), "dtype_v": torch.float8_e5m2},
    "more queries than keys": {"causal": "bottom_right", "lengths": (330, 150), "dims": (256, 256)},
    "top left": {"causal": "top_left", "lengths": (210, 70), "dims": (48, 112), "blocks": (0, 128, 0)},
    "window": {"window_left": 52, "window_right": 5, "alibi": True, "softcap": 3.0, "blocks": (128, 64, 64)},
    "window, far": {"window_left": 146, "lengths": (70, 600), "blocks": (0, 128, 128), "dims": (192, 96)},
    "packed": {"packed": 5, "causal": "bottom_right", "heads": (4, 2), "dims": (32, 160)},
    "packed window": {"packed": 7, "window_left": 40, "window_right": 3, "lengths": (150, 520), "dims": (64, 96)},
    "one query": {"lengths": (1, 300)},
}


def gate(
    problem: AttentionProblem, operands: QuantizedOperands, out: Tensor, lse: Tensor, lse_error: float = 1e-5
) -> None:
    """out may err by the rounding of a probability to 4 bits in the mean of its values, and once by 8 bits."""
    wide, numbers = descales.dequantized(problem, operands, torch.float64)
    exact = oracle(wide, numbers)
    spread = oracle(wide, numbers._replace(v=numbers.v.abs())).out  # sum of P |V|
    error = (out.double() - exact.out).abs()
    assert not out.isnan().any()
    assert (error <= 2**-4 * spread + 2**-8 * exact.out.abs()).all(), (error / spread).max()
    assert error.pow(2).mean().sqrt() <= 0.02 * spread.pow(2).mean().sqrt()
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-5, atol=lse_error)


def with_nan_in_the_last_sequence(operands: QuantizedOperands) -> tuple[QuantizedOperands, int, int]:
    """The call with keys and values of its last sequence that are not numbers, and the first rows of its q and k."""
    first_q, first_k = (int(starts[-2]) for starts in (operands.cu_seqlens_q, operands.cu_seqlens_k))
    k, v = operands.k.clone(), operands.v.clone()
    for x in (k, v):
        x.view(torch.uint8)[first_k:] = 0x7F
    return operands._replace(k=k, v=v), first_q, first_k


def test_a_sequence_does_not_read_the_next() -> None:
    problem, operands = call(packed=3, dims=(64, 128), lengths=(70, 290))
    config = flash_fwd_fp8.default(problem, H200)
    out, lse = on_cpu(problem, operands, config)
    poisoned, first, first_k = with_nan_in_the_last_sequence(operands)
    assert first > 0 and first_k % 128 > 0, "the last sequence begins inside a tile"
    again, lse_again = on_cpu(problem, poisoned, config)
    assert torch.equal(again[:first], out[:first]) and torch.equal(lse_again[:, :first], lse[:, :first])
    assert again[first:].isnan().all()


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_protocol_on_a_cpu(name: str, takes_turns: bool) -> None:
    """With the default's warpgroups, and with three that take turns, or two where three do not fit."""
    problem, operands = call(**CALLS[name])
    config = flash_fwd_fp8.configs(problem, H200)[-1 if "far" in name else 0]
    if takes_turns:
        several = (replace(config, block_m=192), replace(config, block_m=128))
        config = next(made for made in several if fits(problem, H200, made))
    gate(problem, operands, *on_cpu(problem, operands, config))


@pytest.mark.parametrize("width", [64, 96, 256])
def test_factors_of_blocks_of_every_width(width: int) -> None:
    """One product with V, a product for each of two pieces, and four chunks."""
    problem, operands = call(dims=(64, width), lengths=(200, 520), causal="bottom_right", blocks=(0, 64, 64))
    config = Config(128, 64, 2)
    assert config in flash_fwd_fp8.configs(problem, H200)
    gate(problem, operands, *on_cpu(problem, operands, config))


@pytest.mark.parametrize("block", [0, 64, 128])
@pytest.mark.parametrize("causal", ["", "bottom_right"])
def test_every_default_fits(causal: str, block: int) -> None:
    for width, width_v in product(range(16, 257, 16), repeat=2):
        for lengths in ((150, 330), (8192, 8192)):
            problem = replace(
                call(causal=causal, blocks=(block, block, block))[0], head_dim=width, head_dim_v=width_v,
                seqlen_q=lengths[0], seqlen_k=lengths[1],
            )  # fmt: skip
            config = flash_fwd_fp8.default(problem, H200)
            assert fits(problem, H200, config), problem.describe()


def with_nan_where_unseen(problem: AttentionProblem, operands: QuantizedOperands) -> QuantizedOperands:
    """The call with keys and values that are not numbers where no query of their sequence sees them."""
    k, v = operands.k.clone(), operands.v.clone()
    cu_q, cu_k = (x.tolist() if problem.packed else [] for x in (operands.cu_seqlens_q, operands.cu_seqlens_k))
    hidden = 0
    for b in range(problem.batch):
        length_q = cu_q[b + 1] - cu_q[b] if problem.packed else problem.seqlen_q
        length_k = cu_k[b + 1] - cu_k[b] if problem.packed else problem.seqlen_k
        band = problem.band(length_q, length_k)
        unseen = torch.ones(length_k, dtype=torch.bool)
        unseen[max(0, band.low or 0) : max(0, length_q + (length_k if band.high is None else band.high))] = False
        hidden += int(unseen.sum())
        for x in (k, v):
            of_sequence = x.view(torch.uint8)[cu_k[b] : cu_k[b + 1]] if problem.packed else x.view(torch.uint8)[b]
            of_sequence[unseen] = 0x7F  # NaN
    assert hidden > 0, "every key is seen"
    return operands._replace(k=k, v=v)


@pytest.mark.parametrize("name", ["window, far", "window", "packed window"])
def test_values_that_no_query_sees_may_be_nan(name: str) -> None:
    problem, operands = call(**CALLS[name])
    config = flash_fwd_fp8.default(problem, H200)
    results = [on_cpu(problem, x, config) for x in (operands, with_nan_where_unseen(problem, operands))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, False),
        ({"lengths": (63, 600)}, True),
        ({"lengths": (64, 600)}, False),
        ({"packed": 4, "lengths": (90, 600)}, True),
    ],
)
def test_few_queries_of_a_kv_head_are_left_to_flash_fwd(changes: dict[str, Any], left: bool) -> None:
    """Two heads share a kv head: 64 queries each are 128."""
    problem, _ = call(**changes)
    assert flash_fwd_fp8.why_not(problem, H200) == []
    assert bool(flash_fwd_fp8.outrun(problem, H200)) == left
    assert (dispatch.choose(problem, H200).kernel.NAME == "flash_fwd") == left
