"""The command `warpwave inspect`: checks the request, inspects, and prints."""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpwave import dispatch
from warpwave.errors import InvalidInput
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench.table import plain, print_table
from warpwave.workbench.input_files import Unreadable, read_text
from warpwave.workbench.inspect.compiled import CannotCompile
from warpwave.workbench.inspect.inspection import Finding, Inspection, config_name, forward_of, inspect, parse_config
from warpwave.workbench.inspect.text import (
    Difference,
    compare,
    compare_configs,
    describe,
    describe_difference,
    describe_tools,
    table,
)
from warpwave.workbench.schema import Mismatch
from warpwave.workbench.terminal import say


@dataclass(frozen=True)
class Request:
    """The options of the command line; see `warpwave inspect --help`."""

    kernel: str | None
    archs: Sequence[str] = ()
    configs: Sequence[str] = ()
    all_configs: bool = False
    diff: tuple[str, str] | None = None
    save: Path | None = None
    as_json: bool = False


def run(problem: AttentionProblem, request: Request) -> int:
    """Runs the command. Returns the exit code: 1 if a config did not compile or does not fit.

    Raises:
        InvalidInput: the request is contradictory or names something unknown; the message says what is allowed.
        CannotCompile, UnsupportedProblem: nothing can be compiled here, or the kernel refuses the call.
    """
    if request.diff is not None and (files := _files(request.diff)) is not None:
        if request.kernel is not None or request.archs or request.configs or request.all_configs or request.save:
            raise InvalidInput("--diff of two files compiles nothing; give it no kernel, --arch, config or --save")
        return _print_file_differences(*files, as_json=request.as_json)
    if request.kernel is None:
        raise InvalidInput(f"name a kernel to inspect: {', '.join(_compilable())}")
    kernel = _kernel(request.kernel)
    gpus = [_target(arch) for arch in request.archs] or [_this_gpu()]
    asked = list(request.diff or request.configs)
    if request.all_configs and asked:
        raise InvalidInput("give --all-configs or particular configs, not both")
    if request.diff is not None and request.configs:
        raise InvalidInput("give --diff, which names both configs, or --config, not both")

    def configs(gpu: Gpu) -> Sequence[Any]:
        every = kernel.configs(forward_of(kernel, problem, gpu), gpu)
        if request.all_configs:
            return list(every)
        return [every[0] if text == "default" else parse_config(text, every[0]) for text in asked] or [every[0]]

    if request.diff is not None:
        for gpu in gpus:
            _check_they_differ(configs(gpu))
    if request.save is not None:
        try:
            request.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"--save: {request.save} cannot be made: {error.strerror or error}") from None
    inspection = inspect(kernel, problem, gpus, configs, save=request.save, on_done=_progress())
    if request.diff is not None:
        differences = [d for gpu in gpus for d in _config_differences(inspection.findings, gpu, configs(gpu))]
        if request.as_json:
            say(_differences_json(differences))
        else:
            say(f"{inspection.problem}\n{describe_tools(inspection)}\n")
            say("\n\n".join(map(describe_difference, differences)))
    elif request.as_json:
        say(inspection.to_json())
    else:
        say(f"call  {inspection.problem}\nby    {describe_tools(inspection)}\n")
        if len(inspection.findings) <= 3:
            say("\n\n".join(map(describe, inspection.findings)))
        elif sys.stdout.isatty():
            print_table(table(inspection.findings))
        else:
            say(plain(table(inspection.findings)), end="")
        if request.save is not None:
            say(f"\nsaved to {request.save}")
    return 0 if all(f.fits for f in inspection.findings) else 1


def _config_differences(findings: Sequence[Finding], gpu: Gpu, configs: Sequence[Any]) -> list[Difference]:
    first, second = (config_name(asdict(config)) for config in configs)
    return compare_configs([f for f in findings if f.arch == gpu.arch], first, second)


def _check_they_differ(configs: Sequence[Any]) -> None:
    if configs[0] == configs[1]:
        raise InvalidInput(f"both configs are {config_name(asdict(configs[0]))}: there is nothing to compare")


def _files(names: tuple[str, str]) -> tuple[Path, Path] | None:
    """Returns both names as paths if at least one of them looks like a file, else None."""
    paths = Path(names[0]), Path(names[1])
    if not any(path.suffix == ".json" or os.path.exists(path) for path in paths):
        return None
    for path in paths:
        if not os.path.isfile(path):
            raise InvalidInput(f"--diff: there is no file {path}; give two files of `inspect --json`, or two configs")
    return paths


def _print_file_differences(before: Path, after: Path, *, as_json: bool) -> int:
    loaded = []
    for path in (before, after):
        try:
            loaded.append(Inspection.from_json(read_text(path)))
        except (Unreadable, Mismatch) as error:
            raise InvalidInput(f"{path} is no file of `warpwave inspect --json`: {error}") from None
    old, new = loaded
    differences = compare(old.findings, new.findings)
    if as_json:
        say(_differences_json(differences))
        return 0
    for letter, inspection, path in (("A", old, before), ("B", new, after)):
        say(f"{letter}  {path}: warpwave {inspection.warpwave}, {describe_tools(inspection)}\n   {inspection.problem}")
    if old.problem != new.problem:
        say("   the calls differ, so the code may for that reason alone")
    say()
    say("\n\n".join(map(describe_difference, differences)))
    return 0


def _differences_json(differences: Sequence[Difference]) -> str:
    return json.dumps([{"title": d.title, "changed": d.changed, "opcodes": d.opcodes} for d in differences], indent=1)


def _compilable() -> list[str]:
    return [kernel.NAME for kernel in dispatch.KERNELS if hasattr(kernel, "specify")]


def _kernel(name: str) -> Any:
    kernel = next((kernel for kernel in dispatch.KERNELS if name == kernel.NAME), None)
    if kernel is None:
        close = difflib.get_close_matches(name, _compilable(), n=1)
        hint = f"did you mean {close[0]}? There are" if close else "there are"
        raise InvalidInput(f"no kernel is called {name!r}; {hint} {', '.join(_compilable())}")
    if not hasattr(kernel, "specify"):
        raise CannotCompile(
            f"kernel {name!r} is made of torch's operations: there is no code of ours to compile; there is in "
            f"{', '.join(_compilable())}"
        )
    return kernel


def _target(arch: str) -> Gpu:
    from warpwave.workbench.hardware import catalog

    try:
        gpu = catalog.resolve(arch)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
    if gpu.is_cpu:
        raise InvalidInput("nothing is compiled for a CPU; name a GPU architecture, --arch sm_90")
    return gpu


def _this_gpu() -> Gpu:
    import torch

    from warpwave.gpu import current_gpu

    if not torch.cuda.is_available():
        raise InvalidInput("torch sees no GPU here: name the target, --arch sm_90 or --arch gfx942")
    return current_gpu(torch.device("cuda"))


def _progress() -> Callable[[int, int], None] | None:
    """Returns a function that prints the progress of a long inspection to standard error; None without a terminal."""
    if not sys.stderr.isatty():
        return None
    started = time.monotonic()

    def tell(done: int, of: int) -> None:
        if of > 3:
            end = "\r" if done < of else "\r\033[K"
            say(f"compiled {done} of {of}, {time.monotonic() - started:.0f} s", end=end, to=sys.stderr, flush=True)

    return tell
