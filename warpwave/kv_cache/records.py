"""The host's records of a paged cache: what a row holds, and what new tokens change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from warpwave.kernels import append_kv

EVICTED = -1  # marks a page in a page table that was given back


@dataclass(eq=False)
class SequenceRecord:
    """The host's record of one row.

    Attributes:
        length: tokens.
        pages: page ids in order; the first `evicted` of them are `EVICTED`.
        evicted: number of pages that were given back. Their tokens lie before the window of every later query.
        window_left: the window of `evict`, which later queries must keep; meaningless while `evicted` is 0.
    """

    length: int = 0
    pages: list[int] = field(default_factory=list)
    evicted: int = 0
    window_left: int = 0


class Growth(NamedTuple):
    """The new tokens of some sequences: the changes to the host's records, and the tensors that change the device.

    Attributes:
        num_pages: pages taken from the stack of free pages.
        replaced: (sequence, its last page, the free page that becomes its copy) if another sequence shares that page.
        ends: (sequence, its new length, its new pages).
        cells: indices in the device's tables that change, int64.
        after, before: the values at these indices after the growth, and those that undo it, int32.
        copies: int64 (2, pages): source and destination pages; None for no page.
        offsets: int32 (sequences + 1,): where each sequence's new tokens begin in a packed tensor.
    """

    num_pages: int
    replaced: list[tuple[SequenceRecord, int, int]]
    ends: list[tuple[SequenceRecord, int, list[int]]]
    cells: torch.Tensor
    after: torch.Tensor
    before: torch.Tensor
    copies: torch.Tensor | None
    offsets: torch.Tensor


class Append(NamedTuple):
    """An append that has been checked and compiled.

    Attributes:
        new: the new tokens.
        applied: returns a context manager that appends around its body, which sees the new tokens on the device. If the
            body raises, nothing is appended.
        tables: returns copies of the page table and the lengths as they will be after the append.
    """

    new: append_kv.New
    applied: Callable[[], AbstractContextManager[None]]
    tables: Callable[[], tuple[torch.Tensor, torch.Tensor]]
