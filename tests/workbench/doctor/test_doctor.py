"""Every problem planted, one at a time; then the command itself, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warpwave.workbench.doctor import bundle, doctor
from warpwave.workbench.doctor import facts as doctor_facts
from warpwave.workbench.doctor.doctor import Check
from warpwave.workbench.doctor.facts import Card, Facts

H200 = Card("NVIDIA H200", "580.159.04", False, 143_771.0, 500.0, 0, 33.0, 120.0, 700.0)
SOUND = Facts(
    python=(3, 12, 3),
    platform="linux",
    environment={},
    versions={"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.3.5"},
    cuda="13.0",
    gpus=(("NVIDIA H200", "sm_90"),),
    torch_archs=("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"),
    cards=(H200,),
    compiler="/usr/bin/gcc",
    cache="/home/me/.triton/cache",
    cache_free_bytes=10 << 30,
    assembler="12.8",
    installations={"torch": ("/site",), "triton": ("/site",)},
    kernels={"flash_fwd": [], "torch_sdpa": ["it serves CPU tensors only"]},
)
CPU_ONLY = replace(
    SOUND, versions={**SOUND.versions, "torch": "2.13.0+cpu"}, cuda=None, gpus=(), torch_archs=(), cards=None
)


def faults(facts: Facts) -> list[Check]:
    return [check for check in doctor.examine(facts) if check.status != "ok"]


@pytest.mark.parametrize("facts", [SOUND, CPU_ONLY], ids=["GPU", "CPU"])
def test_nothing_is_said_of_a_sound_machine(facts: Facts) -> None:
    assert faults(facts) == []
    assert "No problems found." in doctor.report(facts, doctor.examine(facts))


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in SOUND.versions.items() if key != name}


def environment(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


PLANTED: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("old Python", {"python": (3, 10, 1)}, "problem", "3.11 or newer", "install Python"),
    ("no torch", {"versions": without("torch")}, "problem", "not installed", "pip install torch"),
    ("broken torch", {"versions": without("torch"), "errors": {"torch": "libcudart"}}, "problem", "libcudart", "pip"),
    ("old torch", {"versions": {**SOUND.versions, "torch": "2.9.1"}}, "problem", "2.10 or newer", "--upgrade"),
    (
        "CPU torch beside a GPU",
        {"cuda": None, "gpus": ()},
        "problem",
        "built for CPUs, beside NVIDIA H200",
        "whl/cu130",
    ),
    ("old driver", {"cards": (replace(H200, driver="550.54.15"),)}, "problem", "needs 580", "whl/cu126"),
    (
        "GPUs hidden",
        {"gpus": (), **environment(CUDA_VISIBLE_DEVICES="")},
        "problem",
        "hides them",
        "unset CUDA_VISIBLE",
    ),
    ("GPU lost", {"gpus": ()}, "problem", "torch sees none", "container"),
    ("old GPU", {"gpus": (("Tesla T4", "sm_75"),)}, "warning", "older than sm_80", "eager"),
    (
        "GPU newer than torch",
        {"gpus": (("X", "sm_90"),), "torch_archs": ("sm_80",)},
        "problem",
        "not for it",
        "upgrade",
    ),
    ("MIG", {"cards": (replace(H200, mig=True),)}, "warning", "MIG", "same slice"),
    ("little memory", {"cards": (replace(H200, memory_used_mb=143_000.0),)}, "warning", "are free", "nvidia-smi"),
    (
        "hot",
        {"cards": (replace(H200, throttle=0x40, temperature_c=91.0),)},
        "warning",
        "heat, by hardware at 91",
        "cool",
    ),
    ("neighbors", {"other_processes": 2}, "warning", "2 other processes", "nvidia-smi"),
    ("no Triton", {"versions": without("triton")}, "problem", "no GPU kernel", "pip install 'triton"),
    ("Triton too new", {"versions": {**SOUND.versions, "triton": "3.10.0"}}, "problem", "up to 3.9", "<3.10"),
    ("broken Triton", {"versions": without("triton"), "errors": {"triton": "GLIBC"}}, "problem", "GLIBC", "pip"),
    ("no compiler", {"compiler": None}, "problem", "Triton builds its launcher", "apt install gcc"),
    ("CC is not there", {"compiler": None, **environment(CC="xcc")}, "problem", "CC names xcc", "CC"),
    ("no headers", {"python_header": False}, "problem", "Python.h", "python3-dev"),
    ("no numpy", {"versions": without("numpy")}, "warning", "TRITON_INTERPRET", "warpwave[workbench]"),
    ("numpy too new", {"versions": {**SOUND.versions, "numpy": "2.4.1"}}, "warning", "Triton 3.6", "numpy<2.4"),
    ("interpreter on", environment(TRITON_INTERPRET="1"), "problem", "nothing is compiled", "unset TRITON_INTERPRET"),
    ("cache read-only", {"cache_error": "Permission denied"}, "problem", "Permission denied", "TRITON_CACHE_DIR"),
    ("disk full", {"cache_free_bytes": 1 << 20}, "warning", "1 MB free", "TRITON_CACHE_DIR"),
    ("no assembler", {"assembler": None}, "problem", "not where Triton expects it", "reinstall"),
    ("assembler does not run", {"assembler": ""}, "problem", "does not run", "reinstall"),
    ("two Tritons", {"installations": {"triton": ("/a", "/b")}}, "problem", "twice: /a, /b", "uninstall triton"),
    ("blocking launches", environment(CUDA_LAUNCH_BLOCKING="1"), "warning", "times are wrong", "unset CUDA_LAUNCH"),
]


@pytest.mark.parametrize(("change", "status", "found", "cure"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_each_problem_is_found_and_has_its_cure(change: dict[str, Any], status: str, found: str, cure: str) -> None:
    facts = replace(SOUND, **change)
    seen = faults(facts)
    assert any(c.status == status and found in c.found and cure in c.cure for c in seen), seen
    text = doctor.report(facts, doctor.examine(facts))
    assert found in text
    assert cure in text
    assert "No problems found" not in text


@pytest.mark.parametrize(
    "change", [{"compiler": None}, environment(TRITON_INTERPRET="1")], ids=["compiler", "interpreter"]
)
def test_what_only_a_gpu_needs_is_no_problem_without_one(change: dict[str, Any]) -> None:
    assert [check.status for check in faults(replace(CPU_ONLY, **change))] == ["warning"]


def test_code_for_an_older_card_of_the_generation_runs() -> None:
    assert faults(replace(SOUND, gpus=(("L4", "sm_89"),), torch_archs=("sm_80", "sm_86"))) == []


def test_a_line_of_nvidia_smi_is_read() -> None:
    line = "NVIDIA H200, 580.159.04, Disabled, 143771, 500, 0x0000000000000004, 33, 120.51, 700.00"
    card = doctor_facts.parse_card(line)
    assert card == replace(H200, throttle=4, power_w=120.51)
    unknown = doctor_facts.parse_card(line.replace("500,", "[N/A],").replace("0x0000000000000004", "[N/A]"))
    assert unknown is not None
    assert unknown.memory_used_mb is None
    assert unknown.throttle is None
    assert doctor_facts.parse_card("NVIDIA-SMI has failed because it couldn't communicate with the driver.") is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error, free = doctor_facts._try_to_write(tmp_path / "file")
    assert error
    assert free is None
    assert doctor_facts._try_to_write(tmp_path / "not" / "there" / "yet")[0] == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# The command ----------------------------------------------------------------------------------------------------------


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(doctor.__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-m", "warpwave", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=inherited | {"PYTHONPATH": root} | variables,
    )


def test_the_command_sees_planted_faults(tmp_path: Path) -> None:
    """A PATH without a compiler, the interpreter on, a cache folder that is a file."""
    cache = tmp_path / "cache"
    cache.touch()
    done = run("--json", PATH=str(tmp_path), CC="", TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(cache))
    found = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert "none found" in found["C compiler"]["found"]
    assert found["interpreter"]["cure"] == "unset TRITON_INTERPRET"
    assert found["kernel cache"]["status"] == "problem"
    assert done.returncode == 1


def test_it_runs_where_an_import_is_broken(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('numpy was built for something else')")
    path = os.pathsep.join([str(tmp_path), str(Path(doctor.__file__).parents[3])])
    done = run(TRITON_INTERPRET="1", PYTHONPATH=path)
    assert done.returncode == 1
    assert "problem  numpy" in done.stdout
    assert "built for something else" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_bundle_is_whole_and_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    home = tmp_path / "home"
    home.mkdir()
    secrets = {"GITHUB_TOKEN": "s3cr3t-token", "AWS_SECRET_ACCESS_KEY": "s3cr3t-key", "MY_PASSWORD": "s3cr3t-word"}
    done = run("--bundle", str(path), HOME=str(home), TRITON_CACHE_DIR=str(home / "cache"), **secrets)
    assert done.returncode == 0, done.stdout
    text = path.read_text()
    assert "s3cr3t" not in text
    assert str(home) not in text
    data = json.loads(text)
    assert data["environment"]["TRITON_CACHE_DIR"] == "~/cache"
    assert "kernel" in data["explain"]
    assert data["code"]["torch"]
    assert data["doctor"]["checks"]
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["report.json"]

    before = path.read_text()
    again = run("--bundle", str(path))
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert path.read_text() == before


def test_a_long_name_stands_apart_from_what_is_said_of_it() -> None:
    kernels = {"hopper/large_head_dim": ["it needs a GPU"], "eager": []}
    lines = doctor.report(
        replace(CPU_ONLY, kernels=kernels), [Check("a name longer than any", "ok", "found")]
    ).splitlines()
    assert "  hopper/large_head_dim  cannot: it needs a GPU" in lines
    assert "  eager                  can run it" in lines
    assert "ok  a name longer than any  found" in lines


def test_recent_kernels_come_newest_first(tmp_path: Path) -> None:
    for i, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        note = tmp_path / name / f"{name}.json"
        note.write_text(json.dumps({"name": name, "num_warps": 4, "child_paths": {"x": "/home/somebody"}}))
        os.utime(note, (i, i))
        (tmp_path / name / f"__grp__{name}.json").write_text("{}")
    for name, text in (("broken", "{"), ("list", '["name"]'), ("deep", "[" * 100_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(text)
    assert bundle.recent_kernels(tmp_path) == [{"name": "new", "num_warps": 4}, {"name": "old", "num_warps": 4}]
    assert bundle.recent_kernels(tmp_path / "nowhere") == []
