"""The softcap's tanh in inline PTX, executed instruction by instruction on a CPU."""

from __future__ import annotations

import itertools
import re
import struct
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton

pytestmark = needs_triton

WARP = 32
# Largest relative errors of the unit that computes exponentials and reciprocals, from the PTX manual.
OF_EX2, OF_RCP = 2.0**-22, 2.0**-23
RELATIVE = 7e-7
F32 = np.float32


def computed(operation: str, of: list[Any], off: float) -> Any:
    """Returns what one instruction computes, rounded once."""
    if operation == "selp":
        return np.where(of[2], of[0], of[1])
    if operation == "setp":
        return of[0] > of[1]
    x, *more = (np.asarray(operand, np.float64) for operand in of)
    if operation == "abs":
        return np.abs(x).astype(F32)
    if operation == "max":
        return np.fmax(x, more[0]).astype(F32)
    if operation == "mul":
        return (x * more[0]).astype(F32)
    if operation == "add":
        return (x + more[0]).astype(F32)
    if operation == "fma":
        return (x * more[0] + more[1]).astype(F32)
    if operation == "ex2":
        return np.asarray(np.exp2(x) * (1 + off * OF_EX2)).astype(F32)
    assert operation == "rcp", operation
    return np.asarray(1 / x * (1 + off * OF_RCP)).astype(F32)


def execute(asm: str, registers: list[np.ndarray], off: float = 0.0) -> list[str]:
    """Executes the PTX on a warp's registers in place. Returns the instructions that it executed.

    Args:
        registers: numbers of $0, $1, ..., each [32].
        off: the share of their largest error by which `ex2` and `rcp` are off, -1 to 1.
    """
    named: dict[str, Any] = {f"${i}": x for i, x in enumerate(registers)}
    lines = [line.strip() for line in asm.strip().strip("{}").split(";") if line.strip()]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if ":" in line}
    done, at = [], 0

    def value(name: str) -> Any:
        return F32(struct.unpack(">f", bytes.fromhex(name[2:]))[0]) if name.startswith("0f") else named[name]

    while at < len(lines):
        line = lines[at].split(":")[-1].strip()
        at += 1
        if not line or line.startswith(".reg"):
            continue
        if jump := re.fullmatch(r"(?:@(\w+) )?bra (\w+)", line):
            condition = np.ones(WARP, bool) if jump[1] is None else named[jump[1]]
            assert condition.all() or not condition.any(), "a warp's threads take different branches"
            at = labels[jump[2]] if condition.all() else at
            continue
        name, operands = line.split(" ", 1)
        to, *of = (operand.strip() for operand in operands.split(","))
        if name.startswith("vote.sync.any"):
            named[to] = np.full(WARP, named[of[0]].any())
            continue
        done.append(name.split(".")[0])
        named[to] = computed(done[-1], [value(x) for x in of], off)
    for i in range(len(registers)):
        registers[i] = named[f"${i}"]
    return done


def tanh(x: np.ndarray, off: float = 0.0) -> tuple[np.ndarray, list[str]]:
    """Returns tanh of [registers, 32] numbers, and the instructions that computed it."""
    from warpwave.kernels.hopper import parts

    registers = [row.astype(F32) for row in x]
    with np.errstate(all="ignore"):
        done = execute(parts._tanh_of_tile_asm(len(registers)), registers, off)
    return np.stack(registers), done


def error(found: np.ndarray, x: np.ndarray) -> float:
    exact = np.tanh(x.astype(F32).astype(np.float64))
    return float((np.abs(found - exact) / np.abs(exact)).max())


NEAR = np.concatenate([np.linspace(2e-4, 0.5, 1536), np.geomspace(1e-30, 2e-4, 512)]).reshape(64, WARP)
ALL = np.concatenate([NEAR[:32].ravel(), np.linspace(0.5, 12, 896), np.geomspace(12, 3e38, 128)]).reshape(64, WARP)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("off", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("x", [NEAR, ALL], ids=["up to 1/2", "any"])
def test_tanh_of_a_tile_is_within_its_bound(x: np.ndarray, off: float, sign: int) -> None:
    found, done = tanh(sign * x, off)
    assert error(found, sign * x) < RELATIVE
    assert ("ex2" in done) == (x is ALL)


def test_tiles_of_small_scores_take_five_instructions_a_score_and_one_branch() -> None:
    found, done = tanh(NEAR)
    assert len(done) - done.count("abs") - done.count("max") - done.count("setp") == 5 * len(NEAR)
    assert error(found, NEAR) < RELATIVE


def test_a_result_depends_on_its_own_score_alone() -> None:
    """Hidden keys and other rows of a tile, NaN and infinity among them, must not change the bits."""
    expected, _ = tanh(NEAR)
    for other, place in itertools.product((0.7, 20.0, np.inf, -np.inf, np.nan), ((0, 0), (1, 31), (63, 7))):
        x = NEAR.copy()
        x[place] = other
        found, _ = tanh(x)
        kept = np.ones(x.shape, bool)
        kept[place] = False
        assert np.array_equal(found[kept], expected[kept]), (other, place)
        assert np.isnan(found[place]) if np.isnan(other) else abs(found[place] - np.tanh(other)) < RELATIVE


def test_the_emulator_computes_the_same() -> None:
    found, _ = tanh(ALL)
    assert np.abs(gluon_on_cpu.tanh_of_tile(torch.from_numpy(ALL.astype(F32))).numpy() - found).max() < 2e-7


def test_infinity_and_zero() -> None:
    x = np.zeros((8, WARP))
    assert np.array_equal(tanh(x)[0], x)
    x[3] = [np.inf, -np.inf] * 16
    assert np.array_equal(tanh(x)[0], np.tanh(x))
