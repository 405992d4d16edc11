"""Launches that follow one another in a call, and what they leave to each other; started as one where they can be.

To start a kernel takes the host 3 to 4 us; to start a CUDA graph of three, 2. So a call of several launches keeps a
graph of them for operands and outputs whose addresses come again: torch's allocator gives a loop the same ones. A graph
belongs to the memory that lies between its launches, which is one thread's and one stream's (scratch.py), and is found
by all other addresses that its launches take. It is then nothing but what the driver would be told for these
(driver.py), right whenever they come, whoever had the memory meanwhile; and no two calls start it at a time.

Inside somebody's capture, for memory that is not kept, and wherever launches are left to Triton, kernels start one by
one. A graph begins when all before it in its stream has ended, where a kernel may be let begin a little earlier: in a
full queue it costs the device 1 us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.runtime import driver, launch, scratch
from warpwave.runtime.triton_or_stub import triton

# A graph takes 45 to 62 us to make, and a call without one 5 to 10 more: both are the same after so many calls.
MADE_AFTER = 8
# For one memory, 0.1 MB of the device's each; a model meets one or two addresses for each of its layers. To exchange
# them would take longer than they spare: where more are wanted, all are made anew after so many calls without one.
MAX_GRAPHS, ANEW_AFTER = 128, 1 << 16
MAX_COUNTED = 4096

# A launcher, and the names of what it takes, in its order; None for what is absent.
Step = tuple[launch.Launcher, str]


class Between(NamedTuple):
    """What the launches of a call leave to one another.

    Attributes:
        names: of the tensors: "q_parts k_parts".
        needs: their shapes and dtypes.
        device: where.
        made: what makes the tensors of those in memory, where some are views of others.
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
    """One launcher for several, which starts one after another, each on those of its arguments that it takes."""
    calls = [f"step{i}({', '.join(taken.split())})" for i, (_, taken) in enumerate(steps)]
    source = _IN_TURN.format(
        steps=", ".join(f"step{i}" for i in range(len(steps))),
        every=", ".join(names.split()),
        calls="\n        ".join(calls),
    )
    return launch.generated(source)(*[step for step, _ in steps])


def bind(names: str, between: Between, *steps: Step) -> Callable[..., None]:
    """One launcher for several.

    Args:
        names: of its arguments, tensors or None, in order: "q k out".
        between: in memory that it gets by itself at each call.
        steps: launchers of one device (`launch.bind`), in order, each with those it takes: `(split, "q k q_parts")`.

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
    """The graphs of one series for one memory.

    Attributes:
        made: by the addresses of what the launches take besides.
    """

    def __init__(
        self,
        stream: int,
        steps: Sequence[tuple[launch.Prepared, Sequence[str]]],
        addressed: Sequence[str],
        between: Mapping[str, int],
    ) -> None:
        """On a stream.

        Args:
            steps: in order, each with the names of what it takes the addresses of.
            addressed: names of what a key has the addresses of.
            between: the addresses of the others.
        """
        self.made: dict[tuple[int, ...], driver.Graph] = {}
        self._stream, self._steps, self._addressed, self._between = stream, steps, addressed, between
        self._met: dict[tuple[int, ...], int] = {}
        self._missed = 0

    def meet(self, key: tuple[int, ...]) -> None:
        """Counts that launches were started one by one, and makes their graph once that has come to cost as much."""
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
