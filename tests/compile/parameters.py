"""Compiles what it is told on standard input and prints each launch's parameters twice: bytes of each as driver.py lays
them out, and as the compiled kernel has them. A process of its own, as worker.py."""

from __future__ import annotations

import json
import re
import struct
import sys
from types import SimpleNamespace
from typing import Any

from warpwave import dispatch
from warpwave.cached_calls import operands_without_memory
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.runtime import driver, parameters
from warpwave.runtime.launch import Launch, Mapped
from warpwave.workbench.inspect import compiled

RUN = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False)


def laid_out(spec: Launch, kernel: Any) -> list[int]:
    """Bytes of each parameter as a bound launcher would lay them out."""
    tensors: list[Any] = []
    for tensor in spec.tensors:
        address = driver.Address(1)
        tensors.append((tensor.plan, address) if isinstance(tensor, Mapped) else address)
    numbers = [driver.Number(i) for i in range(len(spec.scalars))]
    shape = SimpleNamespace(function=0, src=kernel.src, metadata=kernel.metadata)
    layout = driver.layout(shape, RUN, parameters.in_order(spec.kernel, tensors, numbers, spec.constants))
    assert layout is not None, "the driver is not asked"
    assert driver.Launches(layout, 0, 1, spec.scalars, [value[0] for value in tensors if isinstance(value, tuple)])
    sizes = [struct.calcsize(kind) if kind else 8 for kind in layout.kinds]
    for parameter, _, _ in layout.maps:
        sizes[parameter] = 128
    return sizes


def in_ptx(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel."""
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index(")\n")]
    sizes = []
    for line in entry.splitlines():
        if found := re.search(r"\.param \.align \d+ \.b8 \S+\[(\d+)\]", line):
            sizes.append(int(found.group(1)))
        elif found := re.search(r"\.param \.[a-z](\d+)", line):
            sizes.append(int(found.group(1)) // 8)
    return sizes


def main() -> None:
    # There is no driver here, and nothing is launched.
    driver.__dict__.update(start_call=lambda: lambda *_: 0)
    driver.__dict__.update(_encoder=lambda meta: lambda plan: lambda address: None)
    kernels = {module.NAME: module for module in dispatch.KERNELS}
    gpu = Gpu.for_arch("sm_90")
    for line in sys.stdin:
        job = json.loads(line)
        problem, kernel = AttentionProblem(**job["problem"]), kernels[job["kernel"]]
        config = kernel.configs(problem, gpu)[0]
        operands = operands_without_memory(problem)
        out = operands.q.new_empty((*operands.q.shape[:-1], problem.head_dim_v))
        specified = kernel.specify(problem, gpu, operands, out, None, config)
        found = []
        for spec in (specified,) if isinstance(specified, Launch) else specified:
            binary = compiled._compile(spec, gpu)
            found.append((laid_out(spec, binary), in_ptx(binary.asm["ptx"])))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
