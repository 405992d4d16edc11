"""Forces `split_kv` to use its warp-specialized kernel (kernels/split_kv/few_rows_device.py), through the public API.

The tests cover every page size, edge and feature that it serves. On other devices than Hopper the same configs load
through pointers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import paged
from tests.conformance.datasets import Data
from tests.conformance.gates import forward_references, judge_forward
from tests.conformance.harness import DEVICE, GPU, bits
from tests.conformance.paged import PagedCase
from warpwave import attention
from warpwave.kernels import split_kv
from warpwave.kernels.split_kv import few_rows_host as few_rows

pytestmark = pytest.mark.gpu

THREE = split_kv.Config(16, 64, 4, 2, 3, launched_ahead=True, by_map=True, roles=True)
CONFIGS = {
    "one": replace(THREE, num_splits=1, num_stages=3),
    "three": THREE,
    "long tiles, not ahead": replace(THREE, block_n=128, num_splits=2, num_stages=1, launched_ahead=False),
    "more than tiles": replace(THREE, num_splits=40),
}
LONG = ((3, 700), (3, 0), (3, 1029), (3, 64), (3, 2))
MORE = ((8, 700), (8, 0), (8, 1029), (8, 64), (8, 5))
RAGGED = ((3, 700), (0, 300), (1, 1029), (4, 64), (2, 2), (0, 0))
CASES: dict[str, dict[str, Any]] = {
    "plain": {"lengths": ((1, 700), (1, 0), (1, 2048), (1, 65))},
    "causal": {"lengths": LONG, "causal": "bottom_right", "sinks": True},
    "top-left": {"lengths": LONG, "causal": "top_left", "dtype": "bfloat16", "dims": (128, 128)},
    "window": {"lengths": LONG, "window": (300, 0), "dims": (72, 40), "sinks": True},
    "window both sides": {"lengths": LONG, "window": (70, 3), "dtype": "bfloat16"},
    "softcap": {"softcap": 15.0, "heads": (16, 1), "dims": (96, 96)},
    "a large group": {"heads": (5, 1), "lengths": LONG, "dims": (128, 64)},
    "wide": {"dims": (256, 256), "heads": (4, 4), "lengths": ((2, 700), (2, 33))},
    "32-rows": {"lengths": MORE, "heads": (8, 2), "causal": "bottom_right", "sinks": True, "dims": (128, 128)},
    "17-rows": {"heads": (17, 1), "window": (300, 0), "dims": (72, 40), "dtype": "bfloat16", "softcap": 15.0},
    "24-rows": {"lengths": MORE, "heads": (6, 2), "window": (70, 3), "softcap": 15.0, "sinks": True},
    "192 and 128": {"dims": (192, 128), "lengths": ((1, 500), (1, 129)), "lse": False},
    "packed": {"packed": True, "lengths": RAGGED, "causal": "bottom_right", "sinks": True, "dims": (128, 128)},
    "packed, one query each": {"packed": True, "lengths": ((1, 700), (1, 0), (1, 2048), (1, 65)), "heads": (8, 1)},
    "packed, window": {"packed": True, "lengths": RAGGED, "window": (70, 3), "dtype": "bfloat16", "heads": (6, 2)},
}


def config_of(name: str, rows: int) -> split_kv.Config:
    """Returns a config whose blocks hold `rows` queries of all heads of a kv head."""
    return replace(CONFIGS[name], block_m=next(most for most in few_rows.ROWS if rows <= most))


@pytest.mark.parametrize("data", ["normal", "sharp", "low"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_pages(page_size: int, name: str, config: str, data: Data) -> None:
    """NaN behind every sequence and in pages that nobody has; ids far outside the pool where there is no page."""
    case = PagedCase(page_size, max_seqlen_k=2048, **({"dims": (64, 64)} | CASES[name]))
    call = paged.build(case, data, DEVICE)
    operands: Any = call.operands
    assert few_rows.takes(call.problem, GPU, operands) or GPU.capability != 90
    of_rows = config_of(config, few_rows.rows_of(call.problem))
    out, lse = paged.run("split_kv", call, config=of_rows)
    verdict = judge_forward(call.problem, forward_references(call.problem, operands), out, lse)
    assert verdict.passed, str(verdict)
    for _ in range(20):
        again = paged.run("split_kv", call, config=of_rows)
        assert bits(*again) == bits(out, lse)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("window", [(-1, -1), (200, 0)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 777), (4, 1024), (2, 130), (8, 777)])
def test_contiguous_keys(seqlen_q: int, seqlen_k: int, window: tuple[int, int], config: str) -> None:
    """Views of a larger tensor, and a layout that no map describes, which goes by pointers."""
    g = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(3, seqlen_q, 8, 64, generator=g, device=DEVICE, dtype=torch.float16)
    together = torch.randn(3, seqlen_k, 6, 64, generator=g, device=DEVICE, dtype=torch.float16)
    k, v = together[:, :, 1:3], together[:, :, 4:]
    expected = attention(q.float(), k.float(), v.float(), window_size=window, kernel="eager")
    for values in (v, v.repeat_interleave(2, -1)[..., ::2]):
        out = attention(q, k, values, window_size=window, kernel="split_kv", config=config_of(config, 4 * seqlen_q))
        torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)


def test_replays_of_a_graph_see_changed_lengths_and_tables() -> None:
    case = PagedCase(16, dims=(128, 128), lengths=((1, 1000), (1, 77)), max_seqlen_k=1024)
    call = paged.build(case, "normal", DEVICE)
    o = call.operands
    paged.run("split_kv", call, config=THREE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = paged.run("split_kv", call, config=THREE)
    for step in range(40):
        o.seqused_k[o.rows[0].long()] = 1000 - 20 * step
        row = o.page_table[o.rows[0].long()]
        o.page_table[o.rows[0].long(), :62] = row[:62][torch.randperm(62, device=DEVICE)]
        o.k.nan_to_num_()
        o.v.nan_to_num_()
        graph.replay()
        assert bits(out) == bits(paged.run("split_kv", call, config=THREE)[0])
