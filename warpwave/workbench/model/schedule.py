"""Schedules of blocks of unequal length: on the first free slot, and all at once. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MOST_SIMULATED = 40  # waves; beyond this the order of blocks no longer matters


def lateness(order: Sequence[tuple[tuple[int, ...], int]], slots: int) -> float:
    """Returns how much longer a schedule takes than work over slots, in units of the mean length.

    Args:
        order: `Cost.order`; each block starts on the first free slot.
        slots: blocks that run at the same time.
    """
    items = sum(len(lengths) * times for lengths, times in order)
    work = sum(sum(lengths) * times for lengths, times in order)
    if not work or items > MOST_SIMULATED * slots:
        return 0.0
    free = [0] * slots
    for lengths, times in order:
        for _ in range(times):
            for length in lengths:
                if length:
                    heapq.heapreplace(free, free[0] + length)
    there = sum(length > 0 for lengths, times in order for length in lengths for _ in range(times))
    return (max(free) - work / slots) * there / work


def companies(
    order: Sequence[tuple[tuple[int, ...], int]], blocks: int, sms: int, slots: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the lengths of the blocks that share an SM, longest first, for each SM, without duplicates. All blocks
    start at once and are distributed over the SMs in turn, including blocks beyond the end of a sequence. Empty if they
    do not all fit, or their order is unknown.

    Args:
        order: `Cost.order`.
        blocks: `Cost.blocks`, including blocks without work.
        slots: resident blocks per SM.
    """
    heads = sum(times for _, times in order)
    if not heads or blocks > sms * slots:
        return ()
    found: list[list[int]] = [[] for _ in range(sms)]
    place, width = 0, blocks // heads
    for lengths, times in order:
        for _ in range(times):
            for i, length in enumerate(lengths):
                if length:
                    found[(place + i) % sms].append(length)
            place += max(width, len(lengths))
    return tuple(dict.fromkeys(tuple(sorted(one, reverse=True)) for one in found if one))
