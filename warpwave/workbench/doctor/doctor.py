"""`warpwave doctor`: checks this machine and installation, and suggests a fix for each problem.

Every check is a function of the facts (facts.py), and nothing is changed, compiled or launched. It also runs if torch
or Triton is missing or broken.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import warpwave
from warpwave.workbench.doctor.facts import OPTIONAL, Card, Facts, look
from warpwave.workbench.terminal import columns, say

Status = Literal["ok", "warning", "problem"]

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 10)
OLDEST_CAPABILITY = 80
FULL_CACHE_BYTES = 200 << 20  # a kernel's files take about 1 MB; a tuned model has some hundreds
LITTLE_MEMORY_MB = 4096
# The oldest driver that runs programs of a CUDA major version (NVIDIA, CUDA Toolkit release notes, "minor version
# compatibility").
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
PYTORCH_BUILDS = {13: "cu130", 12: "cu126"}  # an index of PyTorch's own for each
THROTTLES = {0x008: "hardware slowdown", 0x020: "heat, by software", 0x040: "heat, by hardware", 0x080: "power brake"}
# Variables that change what runs or how long it takes, with what they do.
INFLUENTIAL = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the previous one: times are wrong",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver: times are wrong",
    "NVIDIA_TF32_OVERRIDE": "it changes the precision of torch's float32 products",
    "TRITON_ALWAYS_COMPILE": "every first call in a process compiles again",
    "TRITON_PTXAS_PATH": "another assembler than the one Triton was tested with",
    "DISABLE_PTXAS_OPT": "kernels are assembled without optimization",
    "TRITON_DEBUG": "kernels check themselves and run slower",
}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: the part of the machine that was checked.
        status: `"ok"`, `"warning"` (it works, but not as well as it could) or `"problem"` (something does not work).
        found: what was found.
        cure: a command, or what to do; empty if nothing is wrong.
    """

    name: str
    status: Status
    found: str
    cure: str = ""


# Checks ---------------------------------------------------------------------------------------------------------------


def check_python(f: Facts) -> Check:
    """Checks the running Python."""
    found = ".".join(map(str, f.python))
    if f.python[:2] < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return Check("Python", "problem", f"{found}; {needed} or newer is needed", f"install Python {needed}")
    return Check("Python", "ok", found)


def check_torch(f: Facts) -> Check:
    """Checks torch, and whether its build fits this machine."""
    if "torch" in f.errors:
        return Check("torch", "problem", f"does not import: {f.errors['torch']}", "pip install --force-reinstall torch")
    version = f.versions.get("torch")
    if version is None:
        return Check("torch", "problem", "not installed", "python3 bootstrap.py, or pip install torch")
    found = f"{version}, built for " + (f"CUDA {f.cuda}" if f.cuda else f"ROCm {f.hip}" if f.hip else "CPUs")
    if _numbers(version)[:2] < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        return Check("torch", "problem", f"{found}; {needed} or newer is needed", "pip install --upgrade torch")
    if f.cards and not f.cuda:
        cure = f"pip install --force-reinstall torch --index-url {_index(f.cards[0].driver)}"
        return Check("torch", "problem", f"{found}, beside {_names(f.cards)}, which it cannot use", cure)
    if f.amd_driver and not f.hip and not f.cards:
        cure = "python3 bootstrap.py --device rocm --no-reuse"
        return Check("torch", "problem", f"{found}, beside an AMD GPU, which it cannot use", cure)
    return Check("torch", "ok", found)


def check_driver(f: Facts) -> Check | None:
    """Checks the NVIDIA driver against torch's CUDA version."""
    if not f.cards:
        return None
    driver = f.cards[0].driver
    if not f.cuda:
        return Check("driver", "ok", driver)
    major, oldest = _numbers(f.cuda)[0], OLDEST_DRIVER.get(_numbers(f.cuda)[0], 0)
    if _numbers(driver)[0] < oldest:
        return Check(
            "driver",
            "problem",
            f"{driver}; torch is built for CUDA {f.cuda}, which needs {oldest} or newer",
            f"update the driver, or pip install --force-reinstall torch --index-url {_index(driver, below=major)}",
        )
    return Check("driver", "ok", f"{driver}, new enough for CUDA {f.cuda}")


def check_gpu(f: Facts) -> Check:
    """Checks whether torch sees a GPU that the kernels support."""
    if f.gpus:
        found = ", ".join(f"{name} ({arch})" for name, arch in f.gpus)
        arch = f.gpus[0][1]
        if arch.startswith("sm_") and int(arch[3:]) < OLDEST_CAPABILITY:
            text = f"{found}: older than sm_{OLDEST_CAPABILITY}, for which Triton has matrix instructions"
            return Check("GPU", "warning", text, "none for this card: calls are served by eager, on the GPU")
        if f.torch_archs and arch not in f.torch_archs and not _covered(arch, f.torch_archs):
            text = f"{found}: torch was built for {', '.join(f.torch_archs)} and not for it"
            return Check("GPU", "problem", text, "pip install --upgrade torch")
        return Check("GPU", "ok", found)
    if not f.has_gpu:
        return Check("GPU", "ok", "none: the CPU kernels serve, GPU kernels can be compiled and inspected")
    hidden = f.environment.get("CUDA_VISIBLE_DEVICES", f.environment.get("HIP_VISIBLE_DEVICES"))
    if hidden is not None and hidden.strip() in ("", "-1"):
        variable = "CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in f.environment else "HIP_VISIBLE_DEVICES"
        return Check(
            "GPU", "problem", f"torch sees none, because {variable}={hidden!r} hides them", f"unset {variable}"
        )
    what = _names(f.cards) if f.cards else "an AMD GPU"
    cure = "see torch and driver above; in a container, start it with the GPUs passed through"
    return Check("GPU", "problem", f"the machine has {what} and torch sees none", cure)


def check_gpu_state(f: Facts) -> list[Check]:
    """Checks for conditions that disturb measurements: MIG slices, other processes, little memory, throttling."""
    checks = []
    for card in f.cards or ():
        if card.mig:
            text = f"{card.name} is cut into MIG slices: data sheets and shipped records are of the whole card"
            checks.append(Check("GPU share", "warning", text, "compare with records of the same slice only"))
        if card.memory_total_mb is not None and card.memory_used_mb is not None:
            free = card.memory_total_mb - card.memory_used_mb
            if free < LITTLE_MEMORY_MB:
                text = f"{free:,.0f} MB of {card.memory_total_mb:,.0f} are free on {card.name}"
                checks.append(Check("GPU memory", "warning", text, "end other processes: nvidia-smi lists them"))
        reasons = [name for bit, name in THROTTLES.items() if card.throttle is not None and card.throttle & bit]
        if reasons:
            heat = "" if card.temperature_c is None else f" at {card.temperature_c:.0f} C"
            text = f"{card.name} is held back by {', '.join(reasons)}{heat}: times will be too long"
            checks.append(Check("GPU clocks", "warning", text, "let it cool, check its fans and power supply"))
    if f.other_processes:
        n = f.other_processes
        text = f"{n} other process{'es' if n > 1 else ''} on the GPU: times will be disturbed"
        checks.append(Check("GPU neighbors", "warning", text, "nvidia-smi lists them"))
    return checks


def check_triton(f: Facts) -> Check:
    """Checks Triton's version."""
    if f.platform != "linux":
        return Check("Triton", "ok", "published for Linux only; the other kernels serve here")
    if "triton" in f.errors:
        cure = "pip install --force-reinstall 'triton>=3.6,<3.10'"
        if "numpy" in f.errors["triton"]:
            cure = "see numpy below, which its interpreter imports"
        return Check("Triton", "problem", f"does not import: {f.errors['triton']}", cure)
    version = f.versions.get("triton")
    if version is None:
        return Check("Triton", "problem", "not installed: no GPU kernel can run", "pip install 'triton>=3.6,<3.10'")
    if not (3, 6) <= _numbers(version)[:2] < (3, 10):
        cure = "pip install 'triton>=3.6,<3.10'"
        return Check("Triton", "problem", f"{version}; from 3.6 up to 3.9 is supported", cure)
    return Check("Triton", "ok", version)


def check_compiler(f: Facts) -> Check | None:
    """Checks the C compiler that Triton builds its launcher with."""
    if f.platform != "linux" or "triton" not in f.versions:
        return None
    needed: Status = "problem" if f.has_gpu else "warning"
    if f.compiler is None:
        cure = "apt install gcc, or point CC at a compiler"
        named = f.environment.get("CC")
        text = f"CC names {named}, which is not there" if named else "none found"
        return Check("C compiler", needed, f"{text}; Triton builds its launcher with one on a GPU", cure)
    if not f.python_header:
        cure = "apt install python3-dev (or python3-devel)"
        return Check("C compiler", needed, "Python.h is missing, which Triton's launcher includes", cure)
    return Check("C compiler", "ok", f.compiler)


def check_numpy(f: Facts) -> Check:
    """Checks numpy, which Triton's interpreter imports without requiring it."""
    if "numpy" in f.errors:
        return Check("numpy", "problem", f"does not import: {f.errors['numpy']}", "pip install --force-reinstall numpy")
    version = f.versions.get("numpy")
    if version is None:
        text = "not installed; only Triton's interpreter (TRITON_INTERPRET=1, and `warpwave demo` on a CPU) needs it"
        return Check("numpy", "warning", text, "pip install 'warpwave[workbench]'")
    if _numbers(f.versions.get("triton", "99"))[:2] == (3, 6) and _numbers(version)[:2] >= (2, 4):
        text = f"{version}: the interpreter of Triton 3.6 breaks on loops with numpy 2.4 and newer"
        return Check("numpy", "warning", text, "pip install 'numpy<2.4', or a newer Triton")
    return Check("numpy", "ok", version)


def check_interpreter(f: Facts) -> Check | None:
    """Checks whether Triton's interpreter replaces the compiler."""
    value = f.environment.get("TRITON_INTERPRET", "")
    if value.lower() not in ("1", "true", "yes", "on", "y"):
        return None
    text = f"TRITON_INTERPRET={value}: kernels run in Triton's interpreter, nothing is compiled"
    return Check("interpreter", "problem" if f.has_gpu else "warning", text, "unset TRITON_INTERPRET")


def check_cache(f: Facts) -> Check | None:
    """Checks the folder of Triton's compiled kernels."""
    if "triton" not in f.versions:
        return None
    cure = "export TRITON_CACHE_DIR=DIR, a folder of yours on a disk with room"
    if f.cache_error:
        return Check("kernel cache", "problem", f"{f.cache}: {f.cache_error}", cure)
    if f.cache_free_bytes is not None and f.cache_free_bytes < FULL_CACHE_BYTES:
        text = f"{f.cache}: {f.cache_free_bytes / 2**20:,.0f} MB free"
        return Check("kernel cache", "warning", text, cure)
    return Check("kernel cache", "ok", f.cache)


def check_assembler(f: Facts) -> Check | None:
    """Checks ptxas, which comes with Triton."""
    if "triton" not in f.versions or f.hip is not None:
        return None
    if not f.assembler:
        what = "ptxas is not where Triton expects it" if f.assembler is None else "ptxas is there and does not run"
        return Check("assembler", "problem", what, "pip install --force-reinstall triton")
    return Check("assembler", "ok", f"ptxas {f.assembler}")


def check_installations(f: Facts) -> list[Check]:
    """Checks for packages that are installed twice, where it is unclear which one is imported."""
    return [
        Check("installations", "problem", f"{name} is installed twice: {', '.join(folders)}", f"pip uninstall {name}")
        for name, folders in f.installations.items()
        if len(folders) > 1
    ]


def check_influences(f: Facts) -> list[Check]:
    """Checks environment variables that change results or times."""
    return [
        Check("environment", "warning", f"{name}={f.environment[name]}: {what}", f"unset {name}")
        for name, what in INFLUENTIAL.items()
        if f.environment.get(name, "") not in ("", "0")
    ]


def check_optional(f: Facts) -> Check:
    """Lists missing optional packages. Their absence is not a problem."""
    if not f.absent:
        return Check("optional parts", "ok", "all there")
    text = "; ".join(f"{module} ({OPTIONAL[module][0]}: {OPTIONAL[module][1]})" for module in f.absent)
    return Check("optional parts", "ok", f"not here: {text}")


CHECKS: tuple[Callable[[Facts], Check | list[Check] | None], ...] = (
    check_python,
    check_torch,
    check_driver,
    check_gpu,
    check_gpu_state,
    check_triton,
    check_assembler,
    check_compiler,
    check_numpy,
    check_interpreter,
    check_cache,
    check_installations,
    check_influences,
    check_optional,
)


def examine(facts: Facts) -> list[Check]:
    """Runs every check that applies, in order."""
    found: list[Check] = []
    for check in CHECKS:
        result = check(facts)
        found += result if isinstance(result, list) else [result] if result is not None else []
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3]) or (0,)


def _names(cards: Iterable[Card]) -> str:
    return ", ".join(dict.fromkeys(card.name for card in cards))


def _index(driver: str, below: int = 99) -> str:
    """Returns PyTorch's index with the newest CUDA build that a driver supports."""
    fitting = [major for major in PYTORCH_BUILDS if major < below and _numbers(driver)[0] >= OLDEST_DRIVER[major]]
    return f"https://download.pytorch.org/whl/{PYTORCH_BUILDS[max(fitting, default=min(PYTORCH_BUILDS))]}"


def _covered(arch: str, built_for: Iterable[str]) -> bool:
    """Returns whether a build for another architecture of the same generation runs there: sm_86 code runs on sm_89."""
    if not arch.startswith("sm_"):
        return any(name.split(":")[0] == arch for name in built_for)
    wanted = int(arch[3:])
    for name in built_for:
        number = re.match(r"(sm|compute)_(\d+)", name)
        if number is None:
            continue
        built = int(number.group(2))
        if built <= wanted and (number.group(1) == "compute" or built // 10 == wanted // 10):
            return True
    return False


# Output ---------------------------------------------------------------------------------------------------------------


def report(facts: Facts, checks: Iterable[Check]) -> str:
    """Returns the report as text."""
    lines = [f"warpwave {warpwave.__version__} in {Path(warpwave.__file__).resolve().parent}", platform.platform(), ""]
    rows: list[tuple[str, ...]] = []
    for check in checks:
        rows.append((check.status, check.name, check.found))
        if check.cure:
            rows.append(("", "fix:", check.cure))
    lines += columns(rows)
    if facts.kernels is not None:
        able = [name for name, reasons in facts.kernels.items() if not reasons]
        lines += ["", f"A plain causal call is served here by {able[0] if able else 'nothing'}."]
        answers = (
            (name, "can run it" if not reasons else f"cannot: {'; '.join(reasons)}")
            for name, reasons in facts.kernels.items()
        )
        lines += columns(list(answers), indent="  ")
    return "\n".join([*lines, "", summary(checks)])


def summary(checks: Iterable[Check]) -> str:
    """Returns the result in one sentence."""
    problems = [c.name for c in checks if c.status == "problem"]
    warnings = [c.name for c in checks if c.status == "warning"]
    if not problems and not warnings:
        return "No problems found."
    parts = [
        f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({', '.join(dict.fromkeys(names))})"
        for what, names in (("problem", problems), ("warning", warnings))
        if names
    ]
    return f"{' and '.join(parts)}: each has its fix above."


def as_data(facts: Facts, checks: Iterable[Check]) -> dict[str, Any]:
    """Returns the report as data for `--json`. Of the environment it contains only variables that a check mentions."""
    return {
        "warpwave": warpwave.__version__,
        "platform": platform.platform(),
        "python": ".".join(map(str, facts.python)),
        "versions": dict(facts.versions),
        "cuda": facts.cuda,
        "hip": facts.hip,
        "gpus": [{"name": name, "arch": arch} for name, arch in facts.gpus],
        "checks": [asdict(check) for check in checks],
        "kernels": facts.kernels,
        "problems": sum(check.status == "problem" for check in checks),
    }


def run(*, as_json: bool, bundle: Path | None, force: bool) -> int:
    """Runs the command. Returns the exit code: 1 if there is a problem.

    Raises:
        InvalidInput: the bundle's file exists, or cannot be written.
    """
    facts = look()
    checks = examine(facts)
    data = as_data(facts, checks)
    say(json.dumps(data, indent=1) if as_json else report(facts, checks))
    if bundle is not None:
        from warpwave.workbench.doctor.bundle import write

        write(bundle, data, facts, force=force)
        say(f"wrote {bundle}", to=sys.stderr)
    return 1 if data["problems"] else 0
