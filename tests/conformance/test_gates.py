"""Every kernel x every case x every data set against the four accuracy gates; see gates.py and cases.py.

A kernel that says it cannot run a case must refuse it with those reasons; one that claims a case must meet its gates.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.conformance import cases, harness
from tests.conformance.cases import PLAIN, Call, Case
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import ForwardReferences, forward_references, judge_forward
from tests.conformance.harness import DEVICE, GPU, GRID, KERNELS, each_kernel
from warpwave.gpu import Gpu

each_data_set = pytest.mark.parametrize("data", DATA_SETS)


@functools.lru_cache(maxsize=4)  # the kernels of one case run one after the other
def built(case: Case, data: Data) -> Call:
    return cases.build(case, data, DEVICE)


@functools.lru_cache(maxsize=4)
def references_of(case: Case, data: Data) -> ForwardReferences:
    call = built(case, data)
    return forward_references(call.problem, call.operands)


def check(kernel: str, case: Case, data: Data, request: pytest.FixtureRequest, config: Any = None) -> None:
    call = built(case, data)
    if harness.refuses(kernel, call, request):
        return
    out, lse = harness.run(kernel, call, config)
    assert (lse is not None) == case.lse
    verdict = judge_forward(call.problem, references_of(case, data), out, lse)
    assert verdict.passed, f"{kernel} on {case}, {data}: {verdict}"


@each_kernel
@each_data_set
@pytest.mark.parametrize("case", cases.singles(GRID) + cases.pairwise(GRID), ids=str)
def test_case_grid(case: Case, data: Data, kernel: str, request: pytest.FixtureRequest) -> None:
    check(kernel, case, data, request)


@each_kernel
@pytest.mark.parametrize("case", cases.DROPOUT, ids=str)
def test_dropout(case: Case, kernel: str, request: pytest.FixtureRequest) -> None:
    check(kernel, case, "normal", request)


@pytest.mark.gpu
@each_data_set
@pytest.mark.parametrize(
    "case", cases.pairwise(cases.SPLIT_FLOAT32) + cases.pairwise(cases.WIDE_ROWS) if harness.ON_GPU else [], ids=str
)
def test_grid_without_masks(case: Case, data: Data, request: pytest.FixtureRequest) -> None:
    """Most cases of the common grid have a mask or a bias, which this kernel refuses there."""
    check("hopper/flash_fwd", case, data, request)


@each_kernel
@pytest.mark.parametrize("dtype", ["float16", "float32:default"])
@pytest.mark.parametrize("dims", [(320, 320), (512, 40), (40, 272)], ids=str)
def test_heads_wider_than_the_grid(
    dims: tuple[int, int], dtype: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """Beyond 256 most kernels refuse; who does not is held to it."""
    check(kernel, replace(PLAIN, dtype=dtype, dims=dims, lengths=(65, 113), causal="bottom_right"), "normal", request)


def tile_edge_cases() -> list[Any]:
    """Lengths around every tile size a kernel can pick, with a config that has such tiles."""
    return [
        pytest.param(kernel, config, case, id=f"{kernel}-t{tile}-{case}")
        for kernel in KERNELS
        for dtype in ("float16", "bfloat16" if harness.ON_GPU else "float32:ieee")
        for tile, config in harness.configs_by_tile(kernel, replace(PLAIN, dtype=dtype, dims=(16, 16))).items()
        if tile <= cases.LARGEST_TILE
        for case in cases.at_tile_edges(tile, dtype)
    ]


@each_data_set
@pytest.mark.parametrize(("kernel", "config", "case"), tile_edge_cases())
def test_tile_edges(case: Case, data: Data, kernel: str, config: Any, request: pytest.FixtureRequest) -> None:
    check(kernel, case, data, request, config)


@pytest.mark.gpu
@each_kernel
@each_data_set
@pytest.mark.parametrize("case", cases.long(), ids=str)
def test_long_sequences(case: Case, data: Data, kernel: str, request: pytest.FixtureRequest) -> None:
    check(kernel, case, data, request)


def configs() -> list[Any]:
    """Every config of every kernel for the problems whose configs differ."""
    found = []
    for kernel, module in KERNELS.items():
        for case in cases.FOR_CONFIGS:
            problem = cases.build(case, "normal", DEVICE).problem
            if not module.why_not(problem, GPU):
                found += [
                    pytest.param(kernel, c, case, id=f"{kernel}-{c}-{case}") for c in module.configs(problem, GPU)
                ]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "config", "case"), configs() if harness.ON_GPU else [])
def test_every_config(case: Case, kernel: str, config: Any, request: pytest.FixtureRequest) -> None:
    check(kernel, case, "sharp", request, config)


@each_kernel
def test_nothing_is_refused_that_design_claims(kernel: str) -> None:
    """A kernel that refused everything would pass every test above."""
    gpu = Gpu.for_arch("sm_90") if kernel.startswith("hopper/") else GPU
    grid = [cases.build(case, "normal", DEVICE) for case in cases.singles(GRID)]
    refused = [str(call.problem.describe()) for call in grid if KERNELS[kernel].why_not(call.problem, gpu)]
    if kernel in ("flash_fwd", "eager"):
        assert not refused
    else:
        assert len(refused) < len(grid) or (kernel == "torch_sdpa" and not GPU.is_cpu)
