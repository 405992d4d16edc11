"""Times the backward of drawn calls on a GPU, for the time model.

    python -m benchmarks.time_gradients FOLDER [--seconds 150] [--rounds 5] [--suites SUITE.toml ...]
    python -m benchmarks.time_gradients --plan h200     what would be timed, and the bytes of each call; needs no GPU

For each suite it writes FOLDER/SUITE.jsonl: the environment, then one line for each call and kernel. Two phases share
the time. First several processes compile the kernels, run each once, and compare the gradients with eager's in float32.
Then one process times what was right: every kernel of a call in the same rounds, as `bench` does. Where the device runs
a kernel before the limit, the gradients alone are timed, from kept results of the forward; for some calls, forward and
backward through the public call too. What is not timed has a line with the reason.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import warpwave
from warpwave import autograd, dispatch
from warpwave.gpu import Gpu, current_gpu
from warpwave.kernels import eager
from warpwave.operands import DIFFERENTIABLE, Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench import environment
from warpwave.workbench.bench.inputs import call_arguments, make_operands
from warpwave.workbench.bench.timing import CaptureFailed, Samples, time_interleaved
from warpwave.workbench.bench.workloads import Case, load_suite
from warpwave.workbench.explain.backward import saving_of
from warpwave.workbench.hardware.catalog import resolve

SUITES = Path(__file__).with_name("suites")
DEFAULT = ("backward_grid_fit", "backward_grid_judge")
BACKWARD, BOTH = "backward", "forward + backward"
WORKERS = 14
LAST_CALL_S = 3.0  # before the limit no call begins
CHECKING = 0.6  # share of the time after which what is not compiled is left out
# Norm of the difference from eager's float32 gradients, over theirs. Rounding to 16 bits costs 0.3 %.
LARGEST_ERROR = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
LARGEST_ERROR_TF32 = 5e-3
WHOLE_FROM = 5e10  # FLOP: shorter calls wait for the host
WHOLE_EVERY = 3  # of the longer calls, one in this many is also timed forward and backward
Step = Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """One call by one kernel.

    Attributes:
        suite, case: the call.
        kernel: computes the gradients; `""` for the public call, forward and backward.
        config: of the kernel; None if it has none.
        of_bias: whether the gradient of the bias is wanted too.
    """

    suite: str
    case: Case
    kernel: str
    config: Any = None
    of_bias: bool = False

    @property
    def name(self) -> str:
        return f"{self.suite} {self.case.name} {self.kernel}{' with dbias' if self.of_bias else ''}"

    @property
    def passes(self) -> str:
        return BACKWARD if self.kernel else BOTH


def tasks_of(suites: Sequence[str], gpu: Gpu) -> list[Task]:
    """Returns the calls of all suites in turn, each with its kernels, so that a time limit leaves out no suite."""
    found: list[list[Task]] = []
    for name in suites:
        suite = load_suite(name if name.endswith(".toml") else SUITES / f"{name}.toml")
        of_suite = []
        for place, case in enumerate(suite.cases):
            of_case = list(_tasks_of_case(suite.name, case, case.kernels or suite.kernels, gpu))
            if of_case and place % WHOLE_EVERY == 0 and case.problem.flops >= WHOLE_FROM:
                of_case.append(Task(suite.name, case, ""))
            of_suite.append(of_case)
        found += of_suite
    places = [place for name in suites for place in range(_number_of_cases(name))]
    order = sorted(range(len(found)), key=lambda i: places[i])
    return [task for i in order for task in found[i]]


@functools.cache
def _number_of_cases(suite: str) -> int:
    return len(load_suite(suite if suite.endswith(".toml") else SUITES / f"{suite}.toml").cases)


def _tasks_of_case(suite: str, case: Case, kernels: Sequence[str], gpu: Gpu) -> Iterator[Task]:
    forward = saving_of(case.problem)
    for module in dispatch.GRADIENT_KERNELS:
        if module.NAME in kernels and not module.why_not(forward, gpu):
            config = module.default(forward, gpu)
            yield Task(suite, case, module.NAME, config)
            if case.problem.bias_shape is not None and "bias" in module.GRADIENTS:
                yield Task(suite, case, module.NAME, config, of_bias=True)
    for module in dispatch.KERNELS:
        named = module.NAME in kernels and module.NAME in dispatch.OWN_GRADIENTS
        if named and not module.why_not(case.problem, gpu):
            yield Task(suite, case, module.NAME)


# Steps ----------------------------------------------------------------------------------------------------------------


class Steps:
    """The inputs of one call, and what is run on them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.problem, self.device, self.gpu = case.problem, device, current_gpu(device)
        self.operands: Operands = make_operands(case.problem, device)
        q, v = self.operands.q, self.operands.v
        generator = torch.Generator(device).manual_seed(1)  # another than that of the operands
        self.dout = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator, device=device, dtype=q.dtype)
        self.detached = Operands(*(None if t is None else t.detach() for t in self.operands))
        # eager compiles nothing, and gradients take the results of any forward.
        forward, config = saving_of(case.problem), eager.configs(case.problem, self.gpu)[0]
        with torch.no_grad():
            self.results = eager.bind(forward, self.detached, config)(self.detached)

    def gradients(self, task: Task) -> Step:
        """Returns a step that computes the gradients of q, k and v by one kernel, and of the bias if named."""
        module = next((m for m in dispatch.GRADIENT_KERNELS if task.kernel == m.NAME), None)
        names = ("q", "k", "v", "bias") if task.of_bias else ("q", "k", "v")
        wanted = [name in names for name in DIFFERENTIABLE]
        if module is None:
            run = autograd.bind_gradients(self.problem, self.gpu, self.detached, wanted, task.kernel)
        else:
            run = module.bind(saving_of(self.problem), self.gpu, self.detached, wanted, task.config)

        def step() -> Any:
            with torch.no_grad():
                return run(self.detached, self.results, self.dout, None)

        return step

    def whole(self) -> Step:
        """Returns a step that runs the public call and its backward."""
        arguments = call_arguments(self.problem, self.operands)
        call = warpwave.attention_varlen if self.problem.packed else warpwave.attention
        q, k, v = self.operands[:3]

        def step() -> Any:
            return torch.autograd.grad(call(q, k, v, **arguments), (q, k, v), self.dout)

        return step

    def of(self, task: Task) -> Step:
        return self.gradients(task) if task.kernel else self.whole()

    def error(self, found: Sequence[torch.Tensor | None]) -> float:
        """Returns the largest error of dq, dk and dv of one kv head and sequence, from eager's in float32."""
        problem, group = self.problem, self.problem.num_heads_q // self.problem.num_heads_kv
        first = slice(0, 1)
        of_q: tuple[slice, ...]
        of_k: tuple[slice, ...]
        if problem.packed:
            (rows, keys) = next(problem.items())
            of_q, of_k = (slice(0, rows), slice(0, group)), (slice(0, keys), first)
        else:
            of_q, of_k = (first, slice(None), slice(0, group)), (first, slice(None), first)
        q, k, v = (self.detached[i][of_q if i == 0 else of_k] for i in range(3))
        dout = self.dout[of_q]
        if problem.packed:
            q, k, v, dout = (t[None] for t in (q, k, v, dout))
        q, k, v = (t.float().requires_grad_() for t in (q, k, v))
        bias = None if self.detached.bias is None else self.detached.bias[:, :group].float()
        out = warpwave.attention(
            q, k, v, causal=problem.causal or False, bias=bias, kernel="eager", softcap=problem.softcap,
            window_size=None if problem.window_size == (-1, -1) else problem.window_size,
        )  # fmt: skip
        expected = torch.autograd.grad(out, (q, k, v), dout.float())
        ours = [t[of_q if i == 0 else of_k] for i, t in enumerate(found[:3]) if t is not None]
        if problem.packed:
            ours = [t[None] for t in ours]
        pairs = zip(ours, expected, strict=True)
        return max(((a.float() - b).norm() / b.norm()).item() for a, b in pairs)


def largest_error(problem: AttentionProblem) -> float:
    """Returns the error above which no time is recorded."""
    return LARGEST_ERROR_TF32 if problem.precision == "tf32" else LARGEST_ERROR[problem.dtype]


# The two phases -------------------------------------------------------------------------------------------------------


def check(tasks: Sequence[Task], device: torch.device, out: Path) -> None:
    """Compiles and runs tasks, and appends a line with the error or the refusal of each."""
    for task in tasks:
        found: dict[str, Any] = {"task": task.name}
        try:
            steps = Steps(task.case, device)
            step = steps.of(task)
            step()  # what a kernel keeps from call to call is allocated now
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            gradients = step()
            if device.type == "cuda":
                torch.cuda.synchronize()
                found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            found["error"] = steps.error(gradients)
            if not found["error"] <= largest_error(task.case.problem):
                found["refusal"] = f"the gradients are {found['error']:.2g} from eager's"
        except Exception as error:
            found["refusal"] = f"{type(error).__name__}: {str(error)[:300]}"
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def cases_of(tasks: Sequence[Task]) -> list[list[Task]]:
    """Returns the tasks of each call together, in the order of the calls."""
    found: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        found.setdefault((task.suite, task.case.name), []).append(task)
    return list(found.values())


def checked_in_processes(folder: Path, arguments: Sequence[str], until: float) -> dict[str, dict[str, Any]]:
    """Returns task name -> its line. Processes that are not done in time are ended; a crash costs one process alone."""
    files = [_checked_file(folder, i) for i in range(WORKERS)]
    for file in files:
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.time_gradients", str(folder), *arguments]
    processes = [
        subprocess.Popen([*command, "--check", str(i)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(WORKERS)
    ]
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(0.2)
    for process in processes:
        process.kill()
        process.wait()
    lines: dict[str, dict[str, Any]] = {}
    for file in files:
        if file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.endswith("}"):  # the last line of a process that was ended may be cut
                    found = json.loads(line)
                    lines[found["task"]] = found
            file.unlink()
    return lines


def timed(tasks: Sequence[Task], device: torch.device, rounds: int) -> dict[str, Samples]:
    """Returns task name -> times, of one call's tasks: gradients in the same rounds, then the public call."""
    steps = Steps(tasks[0].case, device)
    found: dict[str, Samples] = {}
    for passes in (BACKWARD, BOTH):
        named = {task.name: steps.of(task) for task in tasks if task.passes == passes}
        if not named:
            continue
        options: dict[str, Any] = {"device": device, "rounds": rounds, "warmup_s": 0.03, "sample_s": 0.015}
        while named:
            try:
                found |= time_interleaved(named, **options)
                break
            except CaptureFailed as failure:  # torch's operations may need the host
                del named[failure.name]
    return found


def line(task: Task, checked: Mapping[str, Any], samples: Samples | None, refusal: str) -> dict[str, Any]:
    """Returns a line of the record."""
    problem = {**asdict(task.case.problem), "lengths": task.case.problem.lengths}
    found: dict[str, Any] = {
        "kind": "measurement",
        "case": task.case.name,
        "problem": problem,
        "passes": task.passes,
        "kernel": task.kernel,
        "config": None if task.config is None else asdict(task.config),
        "of_bias": task.of_bias,
        "error": checked.get("error"),
        "peak_bytes": checked.get("peak_bytes"),
    }
    if samples is None:
        return found | {"refusal": refusal}
    return found | {**asdict(samples), "median_us": samples.median_us}


def main() -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--seconds", type=float, default=150.0, help="limit of the whole run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suites", nargs="+", default=list(DEFAULT), help="names in benchmarks/suites, or files")
    parser.add_argument("--plan", metavar="GPU", help="print what would be timed on a card, and run nothing")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cuda"), help="cpu tries the program itself"
    )
    parser.add_argument("--check", type=int, metavar="PART", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.plan is not None:
        print_plan(tasks_of(asked.suites, resolve(asked.plan)))
        return 0
    begin = time.monotonic()
    tasks = tasks_of(asked.suites, current_gpu(asked.device))
    if asked.check is not None:
        if asked.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(0.9 / WORKERS)
        mine = cases_of(tasks)[asked.check :: WORKERS]
        check([task for of_case in mine for task in of_case], asked.device, _checked_file(asked.folder, asked.check))
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    files = {}
    here = environment.describe(asked.device)
    for name in dict.fromkeys(task.suite for task in tasks):
        files[name] = asked.folder / f"{name}.jsonl"
        files[name].write_text(json.dumps({"kind": "environment", **here}) + "\n", encoding="utf-8")
    options = ["--device", str(asked.device), "--suites", *asked.suites]
    checked = checked_in_processes(asked.folder, options, begin + CHECKING * asked.seconds)
    print(f"{len(checked)} of {len(tasks)} checked after {time.monotonic() - begin:.0f} s", flush=True)
    count = 0
    for of_case in cases_of(tasks):
        lines = list(_lines(of_case, checked, asked.device, asked.rounds, begin + asked.seconds))
        with files[of_case[0].suite].open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in lines)
        for task, one in zip(of_case, lines, strict=True):
            said = f"{one['median_us']:10.1f} us" if "median_us" in one else one["refusal"][:90]
            print(f"{task.name:90} {said}", flush=True)
            count += "median_us" in one
    print(f"{count} of {len(tasks)} timed in {time.monotonic() - begin:.0f} s: {', '.join(map(str, files.values()))}")
    return 0 if count else 1


def _lines(
    tasks: Sequence[Task], checked: Mapping[str, dict[str, Any]], device: torch.device, rounds: int, until: float
) -> Iterator[dict[str, Any]]:
    """Yields the lines of one call's tasks; times what was right unless the time is up."""
    missing = {"refusal": "not compiled in time"}
    refusals = {task.name: checked.get(task.name, missing).get("refusal", "") for task in tasks}
    able, samples = [task for task in tasks if not refusals[task.name]], {}
    if able and time.monotonic() > until - LAST_CALL_S:
        refusals |= {task.name: "no time left" for task in able}
    elif able:
        try:
            samples = timed(able, device, rounds)
        except Exception as error:
            refusals |= {task.name: f"{type(error).__name__}: {str(error)[:300]}" for task in able}
    for task in tasks:
        refusal = refusals[task.name] or "it needs the host, which a CUDA graph cannot capture"
        yield line(task, checked.get(task.name, {}), samples.get(task.name), refusal)


def _checked_file(folder: Path, part: int) -> Path:
    return folder / f".checked-{part}.jsonl"


def print_plan(tasks: Sequence[Task]) -> None:
    """Prints the tasks with their work, and their number by kernel."""
    by_kernel: dict[str, int] = {}
    for task in tasks:
        kernel = task.kernel or BOTH
        by_kernel[kernel] = by_kernel.get(kernel, 0) + 1
        print(f"{task.name:90} {2.5e-9 * task.case.problem.flops:9.1f} GFLOP {task.config or ''}")
    print(f"{len(tasks)} tasks:", ", ".join(f"{n} {kernel}" for kernel, n in by_kernel.items()))


if __name__ == "__main__":
    sys.exit(main())
