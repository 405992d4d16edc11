"""Consecutive launches of a call, and the tensors they pass to one another; replayed as one CUDA graph if possible.

Launching a kernel costs 3 to 4 us on the host; launching a CUDA graph of three costs 2. A call of several launches
therefore keeps a graph of them for operands and outputs whose addresses recur: torch's allocator gives a loop the same
addresses. A graph belongs to the memory between its launches, which belongs to one thread and one stream (scratch.py).
It is looked up by all other addresses that its launches take. The graph replays exactly the launches that the driver
would run for these addresses (driver.py). It is therefore correct at any time, even if the memory was used otherwise in
between, and no two calls run it at a time.

During a capture by the caller, for memory that is not kept, and if Triton does the launching, kernels are launched one
by one. A graph starts when all preceding work in its stream has ended, but a kernel may start slightly earlier: in a
full queue a graph costs the device 1 us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.runtime import driver, launch, scratch
from warpwave.runtime.triton_or_stub import triton

# Creating a graph takes 45 to 62 us, and a call without one 5 to 10 more: after this many calls both cost the same.
MADE_AFTER = 8
# Per memory, with 0.1 MB of device memory for each graph; a model has one or two addresses per layer. Replacing single
# graphs would cost more than it saves: if more are needed, all are created anew after this many calls without one.
MAX_GRAPHS, ANEW_AFTER = 128, 1 << 16
MAX_COUNTED = 4096

# A launcher, and the names of its arguments, in its order; None for absent ones.
Step = tuple[launch.Launcher, str]


class Between(NamedTuple):
    """The tensors that the launches of a call pass to one another.

    Attributes:
        names: names of the tensors: "q_parts k_parts".
        needs: their shapes and dtypes.
        device: their device.
        made: derives the tensors from those in memory, if some are views of others.
    """

    names: str
    needs: Sequence[scratch.Need]
    device: torch.device
    made: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor | None, ...]] = tuple


_IN_TURN = """
def make({steps}):
    def in_turn({every}):
        {calls}

    return in_turn
"""
_ONE_BY_ONE = """
def make(in_turn, memory):
    def launch({given}):
        in_turn({given}, *memory()[0])

    return launch
"""
_AS_ONE = """
def make(in_turn, memory, index, start, hook, current_device):
    def launch({given}):
        between, stream, made, meet = memory()
        if stream is None or current_device() != index or hook.calls:
            return in_turn({given}, *between)
        key = {key},
        graph = made.get(key)
        if graph is None:
            in_turn({given}, *between)
            meet(key)
        elif start(graph, stream):
            in_turn({given}, *between)

    return launch
"""


def in_turn(names: str, *steps: Step) -> Callable[..., None]:
    """Returns one launcher for several, which runs them one after another, each on the arguments that it takes."""
    calls = [f"step{i}({', '.join(taken.split())})" for i, (_, taken) in enumerate(steps)]
    source = _IN_TURN.format(
        steps=", ".join(f"step{i}" for i in range(len(steps))),
        every=", ".join(names.split()),
        calls="\n        ".join(calls),
    )
    return launch.generated(source)(*[step for step, _ in steps])


def bind(names: str, between: Between, *steps: Step) -> Callable[..., None]:
    """Returns one launcher for several.

    Args:
        names: names of its arguments, tensors or None, in order: "q k out".
        between: tensors in memory that the launcher gets at each call.
        steps: launchers of one device (`launch.bind`), in order, each with its arguments: `(split, "q k q_parts")`.

    Returns:
        `launch(*arguments)`, which takes them all.
    """
    given, own = names.split(), between.names.split()
    prepared: list[launch.Prepared] = [step.prepared for step, _ in steps if hasattr(step, "prepared")]
    start = driver.graph_call()
    taken_by: list[list[str]] = []
    if start is not None and 1 < len(steps) == len(prepared):
        taken_by = [
            [taken.split()[number] for number in known.numbers]
            for known, (_, taken) in zip(prepared, steps, strict=True)
        ]
    addressed = [name for name in given if any(name in taken for taken in taken_by)]

    def with_graphs(tensors: tuple[torch.Tensor, ...], stream: int | None) -> tuple[Any, ...]:
        made = between.made(tensors)
        if stream is None or not addressed:
            return made, None, None, None
        addresses = {name: t.data_ptr() for name, t in zip(own, made, strict=True) if t is not None}
        graphs = Graphs(stream, list(zip(prepared, taken_by, strict=True)), addressed, addresses)
        return made, stream, graphs.made, graphs.meet

    one_by_one = in_turn(f"{names} {between.names}", *steps)
    memory = scratch.memory(between.needs, between.device, with_graphs)
    if not addressed:
        return launch.generated(_ONE_BY_ONE.format(given=", ".join(given)))(one_by_one, memory)
    key = ", ".join(f"{name}.data_ptr()" for name in addressed)
    return launch.generated(_AS_ONE.format(given=", ".join(given), key=key))(
        one_by_one,
        memory,
        between.device.index,
        start,
        triton.knobs.runtime.launch_enter_hook,
        torch._C._cuda_getDevice,
    )


class Graphs:
    """The graphs of one series of launches for one memory.

    Attributes:
        made: graphs by the addresses of the launches' other arguments.
    """

    def __init__(
        self,
        stream: int,
        steps: Sequence[tuple[launch.Prepared, Sequence[str]]],
        addressed: Sequence[str],
        between: Mapping[str, int],
    ) -> None:
        """Creates an empty table of graphs for a stream.

        Args:
            steps: launches in order, each with the names of the arguments whose addresses it takes.
            addressed: names of the arguments whose addresses form a key.
            between: the addresses of the other arguments.
        """
        self.made: dict[tuple[int, ...], driver.Graph] = {}
        self._stream, self._steps, self._addressed, self._between = stream, steps, addressed, between
        self._met: dict[tuple[int, ...], int] = {}
        self._missed = 0

    def meet(self, key: tuple[int, ...]) -> None:
        """Counts a call that launched one by one, and creates its graph once those calls have cost as much as a
        graph."""
        if len(self.made) >= MAX_GRAPHS:
            self._missed += 1
            if self._missed < ANEW_AFTER:
                return
            self.made.clear()
            self._missed = 0
        count = self._met.pop(key, 0) + 1
        if count < MADE_AFTER:
            if len(self._met) >= MAX_COUNTED:
                self._met.clear()
            self._met[key] = count
            return
        addresses = {**self._between, **dict(zip(self._addressed, key, strict=True))}
        launches = [step.of(self._stream, [addresses[name] for name in names]) for step, names in self._steps]
        graph = driver.graph(self._steps[0][0].device, launches)
        if graph is not None:
            self.made[key] = graph
