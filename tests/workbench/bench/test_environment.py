import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warpwave.workbench.bench import environment


def test_the_cpu_is_described_in_plain_data() -> None:
    facts = environment.describe("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__ and facts["gpu"] is None
    assert facts["cpu"]["model"] and facts["cpu"]["torch_threads"] == torch.get_num_threads()
    assert len(facts["code"]["source_sha256"]) == 16
    assert environment.snapshot("cpu") is None


def test_nvidia_smi_is_read_where_the_bindings_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(*command: str) -> str:
        asked.extend(command)
        return "580.159.04, 700.00, 1980, 3201, 412.50, [N/A], 0x0000000000000024"

    monkeypatch.setattr(environment, "_run", run)
    reading = environment._read_nvidia_smi("GPU-1")
    assert asked[:2] == ["nvidia-smi", "--id=GPU-1"]
    assert reading == {
        "driver": "580.159.04",
        "power_limit_w": 700.0,
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 412.5,
        "temperature_c": None,
        "throttle": ["power cap", "software thermal"],
    }
    monkeypatch.setattr(environment, "_run", lambda *command: None)
    assert environment._read_nvidia_smi("GPU-1") is None


def test_figures_nvml_does_not_have_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def unsupported(*args: Any) -> Any:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetClockInfo=lambda handle, clock: {1: 1980, 2: 3201}[clock],
        nvmlDeviceGetPowerUsage=unsupported,
        nvmlDeviceGetTemperature=lambda handle, sensor: 55,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1,
    )
    monkeypatch.setattr(environment, "_nvml", lambda: nvml)
    reading = environment._read_nvml("GPU-1")
    assert reading is not None
    assert (reading["driver"], reading["power_limit_w"], reading["power_w"]) == ("580.1", 700.0, None)
    assert (reading["sm_mhz"], reading["throttle"]) == (1980, [])
    nvml.nvmlDeviceGetHandleByUUID = unsupported
    assert environment._read_nvml("GPU-1") is None


def test_a_failing_command_is_none() -> None:
    assert environment._run("no-such-command-anywhere") is None
    assert environment._run(sys.executable, "-c", "raise SystemExit(3)") is None
    assert environment._run(sys.executable, "-c", "print(' x ')") == "x"


def test_the_commit_is_not_that_of_a_repository_around_an_installed_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    if environment._run("git", "--version") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / "site-packages" / "warpwave"
    package.mkdir(parents=True)
    (package / "x.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "PACKAGE", package)
    monkeypatch.delenv("WARPWAVE_COMMIT", raising=False)
    code = environment._code()
    assert code["commit"] is None and code["dirty"] is None
    monkeypatch.setenv("WARPWAVE_COMMIT", "abc123")
    assert environment._code()["commit"] == "abc123"
    (package / "x.py").write_text("x = 2\n")
    assert environment._code()["source_sha256"] != code["source_sha256"]


@pytest.mark.gpu
def test_a_gpu_is_described_and_read() -> None:
    facts = environment.describe("cuda")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["gpu"]["sm_count"] > 0 and facts["gpu"]["name"]
    reading = environment.snapshot("cuda")
    if reading is None:
        pytest.skip("neither NVML nor nvidia-smi can be read here")
    assert reading["sm_mhz"] > 0 and reading["temperature_c"] > 0
