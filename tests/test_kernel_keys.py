"""Kernels' cache keys remembered on disk: Triton's own, and never one of other sources or other values."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warpwave.kernels
from warpwave.runtime import kernel_keys
from warpwave.runtime.triton_or_stub import NO_TRITON

pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))

# In processes of their own: Triton's interpreter, which the suite needs on a machine without a GPU, makes no keys.
KEEP = """
from warpwave import kernel_keys
from warpwave.kernels.flash_fwd.kernel import flash_fwd_kernel as kernel
assert not kernel_keys.recall(kernel), "nothing is there yet"
key = kernel.cache_key
kernel_keys.keep(kernel)
print(key, len(kernel.used_global_vals))
"""
RECALL = """
import sys
from pathlib import Path
from warpwave import kernel_keys, kernels
from warpwave.kernels import primitives
from warpwave.kernels.flash_fwd.kernel import flash_fwd_kernel as kernel

assert kernel_keys.recall(kernel) and kernel_keys.recall(kernel)
remembered, values = kernel.hash, dict(kernel.used_global_vals)
kernel.hash = None
assert kernel.cache_key == remembered, "not what Triton makes"
assert kernel.used_global_vals.keys() == values.keys()

def forgotten():
    kernel.hash = None
    return not kernel_keys.recall(kernel) and kernel.hash is None

path = kernel_keys._path(kernel)
(_, name), (value, scope) = next(((None, n), v) for (n, _), v in values.items())
scope[name] = type(value)(12345)
assert forgotten(), "another value of a global"
scope[name] = value
assert not forgotten()
text = path.read_text()
for broken in ("", "{", "[]", "{}", text.replace("warpwave.kernels", "warpwave.gone")):
    path.write_text(broken)
    assert forgotten(), broken
path.write_text(text)
assert not forgotten()
changed = Path(sys.argv[1])
(changed / "one.py").write_text("x = 1")
kernel_keys.SOURCES = changed
kernels.IMPORTED_AT += 100
kernel_keys.sources.cache_clear()
assert forgotten(), "other sources"
kernel.cache_key
kernel_keys.keep(kernel)
assert not forgotten()
(changed / "one.py").write_text("x = 2")
kernel_keys.sources.cache_clear()
assert forgotten(), "a change that no size shows"
print("good")
"""
# Sources are edited, or replaced by such with an old date, when the process has imported them.
EDITED = """
import os
import sys
from pathlib import Path
from warpwave import kernel_keys, kernels
from warpwave.kernels import primitives
from warpwave.kernels.flash_fwd.kernel import flash_fwd_kernel as kernel

source, cache = Path(primitives.__file__), Path(sys.argv[2])
assert str(source).startswith(sys.argv[1])

def recalled():
    kernel.hash = None
    kernel_keys.sources.cache_clear()
    return kernel_keys.recall(kernel)

def kept():
    assert len(kernel.cache_key) == 64
    kernel_keys.keep(kernel)
    return len(list(cache.rglob("*.json")))

kernels.IMPORTED_AT = max(path.stat().st_ctime for path in kernel_keys.SOURCES.rglob("*.py"))
assert not recalled() and kept() == 0, "written as the process began: it may have read others"
kernels.IMPORTED_AT += 1.01
assert not recalled() and kept() == 1 and recalled()
text = source.read_text()
source.write_text(text + "# edited\\n")
assert not recalled() and kept() == 1, "the old key under the new digest"
source.write_text(text)
assert not recalled() and kept() == 1, "nobody knows what was read"
other = source.with_suffix(".other")
other.write_text(text + "# replaced\\n")
os.utime(other, (1e9, 1e9))
os.replace(other, source)
assert not recalled() and kept() == 1, "an old date"
kernels.IMPORTED_AT += 1000  # as of a process that begins now
assert not recalled() and kept() == 2 and recalled(), "other sources have a key of their own"
print("good")
"""
PTXAS = """
import os
import subprocess
from pathlib import Path
from warpwave import kernel_keys
from warpwave.kernels.triton_or_stub import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas_version
from triton.knobs import NvidiaTool

def key():
    return CUDABackend(GPUTarget("cuda", 90, 32)).hash()

def forget():
    get_ptxas_version.cache_clear()
    NvidiaTool.from_path.cache_clear()

assert not kernel_keys.recall_ptxas(90), "nothing is there yet"
asked = key()
kernel_keys.keep_ptxas(90)
forget()
ask, subprocess.check_output = subprocess.check_output, None
assert kernel_keys.recall_ptxas(90) and key() == asked, "what Triton is told, it would have been answered"
assert not kernel_keys.recall_ptxas(80) and not vars(triton.knobs.nvidia)
forget()
os.environ["TRITON_PTXAS_PATH"] = "/another/ptxas"
assert not kernel_keys.recall_ptxas(90)
del os.environ["TRITON_PTXAS_PATH"]
path = kernel_keys._path_of_ptxas(90)
text, tool = path.read_text(), kernel_keys._tools()[0]
for other in ("", "{}", text.replace(str(tool[1]), str(tool[1] + 1)), text.replace(str(tool[3]), str(tool[3] + 1))):
    path.write_text(other)
    assert other != text and not kernel_keys.recall_ptxas(90), other
subprocess.check_output = ask
assert key() == asked and not vars(triton.knobs.nvidia)
print("good")
"""


def run(code: str, cache: Path, *arguments: str, root: str = str(Path(warpwave.__file__).parents[1])) -> str:
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", "PYTHONPATH": search}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_key_is_remembered_for_the_same_sources_and_values_alone(tmp_path: Path) -> None:
    key, values = run(KEEP, tmp_path / "cache").split()
    assert len(key) == 64 and int(values) > 0
    sources = tmp_path / "sources"
    sources.mkdir()
    assert run(RECALL, tmp_path / "cache", str(sources)) == "good\n"


def test_a_process_whose_sources_changed_since_keeps_and_takes_no_key(tmp_path: Path) -> None:
    """It would keep the key of what it imported under the digest of what lies there now."""
    package, cache = tmp_path / "copy" / "warpwave", tmp_path / "cache"
    shutil.copytree(Path(warpwave.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(EDITED, cache, str(package), str(cache), root=str(package.parent)) == "good\n"


def test_what_ptxas_says_is_remembered_of_the_same_program_alone(tmp_path: Path) -> None:
    assert run(PTXAS, tmp_path) == "good\n"


def test_another_triton_is_left_alone(tmp_path: Path) -> None:
    class Kernel:
        fn = run
        cache_key = "k"

    kernel = Kernel()
    kernel_keys.keep(kernel)
    assert not kernel_keys.recall(kernel) and vars(kernel) == {}


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert len(run(KEEP, blocked).split()[0]) == 64


def test_all_device_code_is_among_the_sources() -> None:
    """A function from elsewhere could change without the digest."""
    for module in pkgutil.walk_packages(warpwave.kernels.__path__, "warpwave.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            function: Any = getattr(value, "fn", None)
            if hasattr(value, "fn") and hasattr(function, "__module__") and type(value).__module__.startswith("triton"):
                assert function.__module__.startswith(("warpwave.kernels.", "triton.")), f"{module.name}.{name}"
