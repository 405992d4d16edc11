"""Calls of several launches, on an H200 that is made up: order, and the tensors that launches pass to one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import warpwave
from tests.kernels.test_three_kernel import CONFIG
from tests.test_driver import Device, device, known
from tests.test_new_lengths import Card, card, pytestmark
from warpwave.kernels.three_kernel.plan import least_bytes
from warpwave.runtime import launch

__all__ = ["card", "device", "known", "pytestmark"]

Tensors = list[torch.Tensor]
Attend = Callable[..., torch.Tensor]
Make = Callable[[], Tensors]


class Launched:
    """What launches took, in order.

    Attributes:
        made: number of launches that were bound.
        taken: of each launch its place among those bound, the tensors it was specified with, and those it took, both in
            the kernel's order.
    """

    def __init__(self) -> None:
        self.made = 0
        self.taken: list[tuple[int, list[torch.Tensor | None], list[torch.Tensor | None]]] = []


@pytest.fixture
def launched(card: Card, monkeypatch: pytest.MonkeyPatch) -> Launched:
    found, bind = Launched(), launch.Family.first

    def first(family: launch.Family) -> launch.Launcher:
        place, spec, given = found.made, family._spec, family._given
        found.made += 1
        assert spec is not None
        launcher = bind(family)
        numbers = [launch._number(take) for take in given]
        bases = [getattr(tensor, "base", tensor) for tensor in spec.tensors]
        specified = [base for base, number in zip(bases, numbers, strict=True) if number is not None]

        def noting(*arguments: torch.Tensor | None) -> None:
            found.taken.append((place, specified, [arguments[number] for number in numbers if number is not None]))
            launcher(*arguments)

        return noting

    monkeypatch.setattr(launch.Family, "first", first)
    return found


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    return [torch.zeros(shape, dtype=dtype) for _ in range(3)]


def hopper(rows: int, precision: str = "default", is_masked: bool = False) -> tuple[Attend, Make]:
    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v, *mask = tensors
        return warpwave.attention(
            q, k, v, mask=mask[0] if mask else None, kernel="hopper/flash_fwd", precision=precision
        )

    def made() -> Tensors:
        mask = [torch.ones(1, 1, rows, rows, dtype=torch.bool)] if is_masked else []
        return [*operands((1, rows, 4, 64), torch.float32), *mask]

    return attend, made


def decode() -> tuple[Attend, Make]:
    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return warpwave.attention(*qkv, kernel="split_kv")

    def made() -> Tensors:
        _, k, v = operands((2, 8192, 2, 128), torch.float32)
        return [torch.zeros(2, 1, 8, 128), k, v]

    return attend, made


def three(scores: str, values: str, in_chunks: bool = False) -> tuple[Attend, Make]:
    shape = (1, 248, 2, 512)
    tile = {"block_m": 128, "block_n": 256} if scores == "hopper" else {}
    config = replace(CONFIG, scores=scores, values=values, workspace_bytes=1 << 24, **tile)
    if in_chunks:
        problem = warpwave.explain(*operands(shape, torch.bfloat16)).problem
        config = replace(config, workspace_bytes=least_bytes(problem, config))

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return warpwave.attention(*qkv, kernel="three_kernel", config=config)

    return attend, lambda: operands(shape, torch.bfloat16)


# What makes a call, and its number of launches.
CASES: dict[str, tuple[Callable[[], tuple[Attend, Make]], int]] = {
    "hopper/flash_fwd: maxima, scale, attend": (lambda: hopper(1016), 3),
    "hopper/flash_fwd: scale, attend": (lambda: hopper(64), 2),
    "hopper/flash_fwd: split, attend": (lambda: hopper(1016, "bf16x6"), 2),
    "hopper/flash_fwd: pack, flag, maxima, scale, attend": (lambda: hopper(1016, is_masked=True), 5),
    "hopper/flash_fwd: pack, flag, scale, attend": (lambda: hopper(72, is_masked=True), 4),
    "hopper/flash_fwd: pack, split, attend": (lambda: hopper(1016, "bf16x6", is_masked=True), 3),
    "split_kv: attend, merge": (decode, 2),
    "three_kernel: scores, softmax, values": (lambda: three("triton", "triton"), 3),
    "three_kernel: scores with the softmax, values": (lambda: three("fused", "triton"), 2),
    "three_kernel: scores, values with the softmax": (lambda: three("triton", "online"), 2),
    "three_kernel: Hopper's": (lambda: three("hopper", "hopper"), 3),
    "three_kernel: softmax and scale, products by torch": (lambda: three("library", "library"), 2),
    "three_kernel: eight chunks": (lambda: three("triton", "triton", in_chunks=True), 24),
}


@pytest.mark.parametrize("case", CASES)
def test_launches_take_what_they_were_specified_with(case: str, launched: Launched, device: Device) -> None:
    """One tensor of the specification is one tensor of the call, of the same layout, in every launch; also for other
    operands, and inside a capture, whose memory no other call shares."""
    make, count = CASES[case]
    attend, made = make()
    memory: list[set[int]] = []
    for capturing in (False, False, True, True):
        qkv = made()
        device.capturing = capturing
        launched.taken.clear()
        out = attend(*qkv)
        assert [place for place, _, _ in launched.taken] == list(range(count)) and launched.made == count
        pairs = set()
        for _, specified, taken in launched.taken:
            for wanted, got in zip(specified, taken, strict=True):
                assert wanted is not None and got is not None
                assert (wanted.shape, wanted.stride(), wanted.dtype) == (got.shape, got.stride(), got.dtype)
                pairs.add((wanted.data_ptr(), got.data_ptr()))
        wanted_places, places = ({pair[i] for pair in pairs} for i in range(2))
        assert len(wanted_places) == len(places) == len(pairs)
        theirs = {t.data_ptr() for t in (*qkv, out)}
        memory.append(places - theirs)
    assert memory[0] == memory[1], "calls on a stream share"
    assert memory[2].isdisjoint(memory[0])
