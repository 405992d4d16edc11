"""Tile counters: the blocks of a launch draw tiles from one. It is zero before and after each launch."""

from __future__ import annotations

import torch

from warpwave.runtime.scratch import outlasting


class Counters:
    """Tile counters of one device: one for each stream, and one for each launch that a CUDA graph captures.

    A graph may be replayed on any stream, concurrently with other work, so each of its launches has its own counter.
    """

    CAPTURED = 4096

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_stream: dict[int, torch.Tensor] = {}
        self.for_graphs = torch.zeros(self.CAPTURED, dtype=torch.int32, device=device)
        self.taken = 0
        torch.cuda.current_stream(device).synchronize()  # zero before any other stream draws

    def get(self, stream: int) -> torch.Tensor:
        """Returns the counter for a launch on this stream, or in the graph that is being captured on it."""
        if torch.cuda.is_current_stream_capturing():
            if self.taken < self.CAPTURED:
                self.taken += 1
                return self.for_graphs[self.taken - 1 : self.taken]
            return torch.zeros(1, dtype=torch.int32, device=self.device)  # the graph zeroes it at each replay
        counter = self.of_stream.get(stream)
        if counter is None:
            counter = outlasting(lambda: torch.zeros(1, dtype=torch.int32, device=self.device), self.device)
            self.of_stream[stream] = counter
        return counter


_counters: dict[int, Counters] = {}


def counters_of(device: torch.device) -> Counters:
    """Returns the device's tile counters, created on first use."""
    index = device.index
    if index not in _counters:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the device's tile counters do not exist yet and a CUDA graph is being captured: make the same call "
                "once before the capture to warm it up"
            )
        _counters[index] = outlasting(lambda: Counters(device), device)
    return _counters[index]
