"""The sample of compile facts is one that kernels take, and a comparison reports what grew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compile_facts
from warpwave import dispatch
from warpwave.gpu import Gpu


@pytest.mark.parametrize("variant", compile_facts.VARIANTS, ids=lambda v: f"{v.kernel} {v.label}")
def test_every_variant_has_a_config(variant: compile_facts.Variant) -> None:
    kernel = next(kernel for kernel in dispatch.KERNELS if kernel.NAME == variant.kernel)
    problem = compile_facts.problem_of(variant.fields)
    for arch in variant.archs:
        gpu = Gpu.for_arch(arch)
        assert not kernel.why_not(problem, gpu)
        config = compile_facts.config_of(kernel, problem, gpu, variant.changes)
        assert all(getattr(config, field) == value for field, value in variant.changes.items())


def test_the_sample_is_large_enough() -> None:
    assert sum(len(variant.archs) for variant in compile_facts.VARIANTS) >= 60
    assert {variant.kernel for variant in compile_facts.VARIANTS} == {
        kernel.NAME for kernel in dispatch.KERNELS if hasattr(kernel, "specify")
    }


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({}, 0, "0 worse than allowed; the largest growth is 0.00%"),
        ({"registers": 101}, 0, "registers 100 -> 101 (+1.0%)"),
        ({"registers": 90}, 0, "registers 100 -> 90 (-10.0%)"),
        ({"spill_bytes": 8}, 1, "spill_bytes 0 -> 8"),
        ({"instructions": 1021}, 1, "instructions 1000 -> 1021 (+2.1%)"),
    ],
)
def test_what_a_comparison_says(
    change: dict[str, int], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch: dict[str, Any] = {
        "launch": "k", "registers": 100, "spill_bytes": 0, "smem_bytes": 1024, "instructions": 1000,
    }  # fmt: skip
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, figures in zip(paths, (launch, launch | change), strict=True):
        text_of_file = {"toolchain": {"triton": "3.7.1"}, "variants": {"v": {"config": {}, "launches": [figures]}}}
        path.write_text(json.dumps(text_of_file))
    assert compile_facts.compare(*paths) == code
    assert text in capsys.readouterr().out
