"""Runs `flash_bwd` on a call of the conformance suite, behind the forward of another kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.conformance.cases import PLAIN, Call
from tests.conformance.harness import GPU
from warpwave.kernels import eager, flash_bwd, flash_fwd
from warpwave.kernels.flash_bwd import Config, Tile
from warpwave.workbench.verify.reference import Gradients

ALL = (True,) * 6
# Few tiles, for each costs the interpreter tens of milliseconds; queries and keys of a tile are told apart.
SMALL = Config(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))
# One tile holds any sequence of the tests, but for those that say otherwise.
JOINT = Config(Tile(128, 128, 8, 1), Tile(128, 128, 8, 1), joint=True)
CASE = replace(PLAIN, dims=(16, 24), heads=(2, 1), batch=1, lengths=(37, 40))


def forward(call: Call, kernel: Any = eager) -> tuple[Tensor, Tensor]:
    """out and lse."""
    problem = replace(call.problem, return_lse=True)
    out, lse = kernel.bind(problem, call.operands, kernel.configs(problem, GPU)[0])(call.operands)
    return out, lse


def differentiate(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None = None,
    wanted: Sequence[bool] = ALL,
    config: Config = SMALL,
    results: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """The gradients of sum(out * dout) + sum(lse * dlse)."""
    run = flash_bwd.bind(call.problem, GPU, call.operands, wanted, config)
    found = run(call.operands, results or forward(call), dout, dlse)
    return Gradients(*found)  # type: ignore[arg-type]


def flash_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of the portable forward."""
    return forward(call, flash_fwd)
