"""The 8-bit Hopper forward on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.hopper.test_flash_fwd_fp8_on_cpu import (
    CALLS,
    call,
    gate,
    with_nan_in_the_last_sequence,
    with_nan_where_unseen,
)
from warpwave import dispatch
from warpwave.gpu import current_gpu
from warpwave.kernels.hopper import flash_fwd_fp8
from warpwave.problem import AttentionProblem, QuantizedOperands

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
LSE_ERROR = 5e-3  # the tensor cores sum scores of 8-bit operands with about 14 bits
LARGE: dict[str, dict[str, Any]] = {
    **{f"{d} {causal}": {"dims": (d, d), "lengths": (1000, 1920), "causal": causal, "heads": (6, 3)}
       for d in (64, 128, 256, 96, 192, 80, 160, 224, 32, 16) for causal in ("", "bottom_right")},
    **{f"factors {d} {block}": {"dims": (d, d), "lengths": (700, 1500), "blocks": (block, block, block)}
       for d in (64, 128, 256) for block in (64, 128)},
    "packed 128": {"packed": 9, "lengths": (900, 1100), "heads": (8, 2), "dims": (128, 128), "causal": "bottom_right"},
    "packed 256": {"packed": 9, "lengths": (900, 1100), "heads": (8, 2), "dims": (256, 256)},
    "e5m2": {"lengths": (900, 1100), "heads": (8, 2), "dims": (128, 64), "dtype_v": torch.float8_e5m2, "softcap": 5.0},
}  # fmt: skip


def on_gpu(operands: QuantizedOperands) -> QuantizedOperands:
    return QuantizedOperands(*(None if t is None else t.cuda() for t in operands))


def run(
    problem: AttentionProblem, operands: QuantizedOperands, config: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    config = config or flash_fwd_fp8.default(problem, current_gpu(torch.device("cuda")))
    out, lse = flash_fwd_fp8.bind(problem, operands, config)(operands)
    assert lse is not None
    return out, lse


@pytest.mark.parametrize("name", [*LARGE, *CALLS])
def test_values(name: str) -> None:
    problem, operands = call(**(CALLS | LARGE)[name])
    gpu = current_gpu(torch.device("cuda"))
    expected = "flash_fwd" if flash_fwd_fp8.outrun(problem, gpu) else flash_fwd_fp8.NAME
    assert dispatch.choose(problem, gpu).kernel.NAME == expected
    there = on_gpu(operands)
    first = run(problem, there)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(problem, there), first, strict=True)), "not the same bits"
    gate(problem, there, *first, lse_error=LSE_ERROR)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", ["", "bottom_right"])
@pytest.mark.parametrize("block_m", [64, 128, 192])
def test_every_config(head_dim: int, causal: str, block_m: int) -> None:
    """Every config of two stages, which differ from the others in what waits for what."""
    problem, operands = call(dims=(head_dim, head_dim), lengths=(600, 1000), heads=(4, 2), causal=causal)
    there = on_gpu(operands)
    for config in flash_fwd_fp8.configs(problem, current_gpu(torch.device("cuda"))):
        if (config.block_m, config.num_stages) == (block_m, 2):
            gate(problem, there, *run(problem, there, config), lse_error=LSE_ERROR)


@pytest.mark.parametrize("name", ["window, far", "window", "packed window"])
def test_values_that_no_query_sees_may_be_nan(name: str) -> None:
    problem, operands = call(**CALLS[name])
    results = [run(problem, on_gpu(x)) for x in (operands, with_nan_where_unseen(problem, operands))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_launches_of_calls_that_alternate(head_dim: int) -> None:
    """Calls of one stream share the memory of V transposed."""
    calls = []
    for i, causal in enumerate(("", "bottom_right") * 3):
        lengths = (200 + 731 * i, 300 + 977 * i)
        problem, operands = call(dims=(head_dim, head_dim), lengths=lengths, heads=(8, 8), causal=causal)
        there = on_gpu(operands)
        bound = flash_fwd_fp8.bind(problem, there, flash_fwd_fp8.default(problem, current_gpu(there.q.device)))
        calls.append((bound, there, bound(there)[0]))
    for _ in range(200):
        for bound, there, expected in calls:
            assert torch.equal(bound(there)[0], expected), "not the same bits"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_does_not_read_the_next(head_dim: int) -> None:
    problem, operands = call(packed=3, dims=(head_dim, head_dim), lengths=(700, 2900), heads=(8, 4))
    poisoned, first, _ = with_nan_in_the_last_sequence(operands)
    results = [run(problem, on_gpu(x))[0][:first] for x in (operands, poisoned)]
    assert torch.equal(*results)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_of_many_keys_are_float32(head_dim: int) -> None:
    """Equal scores and values of one sign: sums of about 14 bits, as the tensor cores add, would stop at some 8,192
    keys, 7/8 too low."""
    problem, operands = call(dims=(head_dim, head_dim), lengths=(64, 65536), heads=(1, 1))
    v = (operands.v.float().abs() + 1).to(operands.v.dtype)
    there = on_gpu(operands._replace(q=torch.zeros_like(operands.q), v=v))
    out, _ = run(problem, there)
    expected = (v.double().mean(1) * operands.v_descale.double()[..., None]).cuda()
    torch.testing.assert_close(out.double(), expected[:, None].expand(out.shape), rtol=0.01, atol=0)
