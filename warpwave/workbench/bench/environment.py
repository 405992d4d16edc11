"""Describes where and when a measurement was made: code, versions, card and processor, as plain data.

`describe` is called once per run, `snapshot` before and after timing. A figure that cannot be read is None, because a
missing figure must neither stop a benchmark nor be made up.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[2]
PEER_DISTRIBUTIONS = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "ffpa-attn")

# NVML's bits for the reasons of reduced clocks. Idle is left out: before a run it is always set.
THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "hardware power brake",
    0x100: "display clocks",
}


def describe(device: torch.device | str) -> dict[str, Any]:
    """Returns everything that stays fixed during the run."""
    device = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "code": _code(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "peers": {name: version for name in PEER_DISTRIBUTIONS if (version := _version(name)) is not None},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "device": device.type,
        "gpu": _gpu(device) if device.type == "cuda" else None,
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
    }


def snapshot(device: torch.device | str) -> dict[str, Any] | None:
    """Returns clocks, power, temperature and throttling now; None if no NVIDIA tool can read them."""
    device = torch.device(device)
    if device.type != "cuda" or (uuid := _uuid(device)) is None:
        return None
    reading = _read_nvml(uuid) or _read_nvidia_smi(uuid)
    if reading is None:
        return None
    return {key: reading[key] for key in ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "throttle")}


def _code() -> dict[str, Any]:
    """Returns the commit and state of the working tree, and a hash of the sources, which also identifies a tree without
    git."""
    # The tool that copied the tree to the GPU machine sets the commit; the copy's own history may be incomplete.
    commit, dirty = os.environ.get("WARPWAVE_COMMIT"), None
    top = None if commit else _run("git", "-C", str(PACKAGE), "rev-parse", "--show-toplevel")
    # An installed copy may lie inside another repository, whose commit would be meaningless.
    if top is not None and Path(top).resolve() == PACKAGE.parent:
        commit = _run("git", "-C", str(PACKAGE), "rev-parse", "HEAD")
        status = _run("git", "-C", str(PACKAGE), "status", "--porcelain")
        dirty = None if status is None else bool(status)
    digest = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".toml")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {"commit": commit or None, "dirty": dirty, "source_sha256": digest.hexdigest()[:16]}


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    uuid = _uuid(device)
    reading = (_read_nvml(uuid) or _read_nvidia_smi(uuid)) if uuid is not None else None
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": reading["driver"] if reading else None,
        "power_limit_w": reading["power_limit_w"] if reading else None,
    }


def _uuid(device: torch.device) -> str | None:
    """Returns the card's UUID for NVML. Its index would be wrong if CUDA_VISIBLE_DEVICES hides or reorders cards."""
    if torch.version.cuda is None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _read_nvml(uuid: str) -> dict[str, Any] | None:
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:  # a MIG partition, or a container that hides the card from NVML
        return None

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except nvml.NVMLError:  # this card does not report this figure
            return None

    def watts(milliwatts: int | None) -> float | None:
        return None if milliwatts is None else milliwatts / 1000

    driver = ask(nvml.nvmlSystemGetDriverVersion)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "power_limit_w": watts(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "sm_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "power_w": watts(ask(nvml.nvmlDeviceGetPowerUsage, handle)),
        "temperature_c": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle": None if reasons is None else _throttle_names(reasons),
    }


@cache
def _nvml() -> Any:
    """Returns the NVML bindings, initialized for the life of the process, or None."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # bindings without a driver
        return None
    return pynvml


def _read_nvidia_smi(uuid: str) -> dict[str, Any] | None:
    fields = {
        "driver": "driver_version",
        "power_limit_w": "enforced.power.limit",
        "sm_mhz": "clocks.sm",
        "memory_mhz": "clocks.mem",
        "power_w": "power.draw",
        "temperature_c": "temperature.gpu",
        "throttle": "clocks_throttle_reasons.active",
    }
    query = ",".join(fields.values())
    line = _run("nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    values = [] if line is None else [value.strip() for value in line.split(",")]
    if len(values) != len(fields):
        return None
    reading: dict[str, Any] = {}
    for key, value in zip(fields, values, strict=True):
        try:
            if key == "throttle":
                reading[key] = _throttle_names(int(value, 16))
            else:
                reading[key] = value if key == "driver" else float(value)
        except ValueError:  # "[N/A]"
            reading[key] = None
    return reading


def _throttle_names(bits: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def cpu_model() -> str | None:
    """Returns the processor's name for itself, or None."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    models = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(models, platform.machine())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """Returns the standard output of a command; None if it is missing, slow or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
