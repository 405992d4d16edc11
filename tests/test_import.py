"""What `import warpwave` costs and does, seen from fresh and forked processes."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys

import pytest

import warpwave


def run_python(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_neither_torch_nor_anything_else_heavy() -> None:
    code = "import sys, warpwave; print(*sorted({'torch', 'triton', 'numpy', 'typer', 'rich'} & set(sys.modules)))"
    assert run_python(code) == ""


def test_importing_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import warpwave; print(time.perf_counter() - t)"
    seconds = min(float(run_python(code)) for _ in range(5))
    assert seconds < 0.05, f"import warpwave took {seconds * 1000:.0f} ms at best"


def test_importing_changes_neither_environment_nor_warnings() -> None:
    code = (
        "import os, warnings; before = dict(os.environ), list(warnings.filters); import warpwave;"
        "assert before == (dict(os.environ), list(warnings.filters))"
    )
    run_python(code)


def test_every_public_name_resolves_and_starts_no_gpu() -> None:
    code = (
        "import warpwave; [getattr(warpwave, name) for name in warpwave.__all__];"
        "assert set(warpwave.__all__) <= set(dir(warpwave));"
        "import torch; print(torch.cuda.is_initialized())"
    )
    assert run_python(code) == "False"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_makes_plans() -> None:
    """The child waited forever for a lock that a thread of its parent held."""
    code = """
import os, signal, torch, warpwave
from warpwave import plans

q = torch.randn(1, 4, 2, 16)
plans._planning.acquire()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(20)
    warpwave.attention(q, q.clone(), q.clone())
    os._exit(0)
"""
    run_python(code)


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing a submodule sets its name on the package: a module `attention` would replace the function."""
    modules = {module.name for module in pkgutil.iter_modules(warpwave.__path__)}
    assert not modules & set(warpwave.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="atention"):
        warpwave.atention  # noqa: B018


def test_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it raises, as where it is not installed
import torch, warpwave
q = torch.randn(1, 5, 2, 16)
expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, q, q))).transpose(1, 2)
torch.testing.assert_close(warpwave.attention(q, q, q), expected)
from dataclasses import replace
from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.runtime.triton_or_stub import NO_TRITON
here = replace(Gpu.for_arch("sm_80"), no_triton=NO_TRITON)  # as `current_gpu` describes a GPU of this machine
print(dispatch.why_not(dispatch.flash_fwd, warpwave.explain(q, q, q).problem, here))
"""
    assert "Triton is not installed" in run_python(code)


MISSING = "import sys\nfor name in ('typer', 'rich', 'jinja2', 'matplotlib', 'numpy'): sys.modules[name] = None\n"


def test_attention_and_explain_need_no_package_of_the_workbench() -> None:
    code = f"""{MISSING}
import warnings
warnings.simplefilter("ignore")  # torch warns that it finds no numpy
import torch, warpwave, warpwave.testing
q = torch.randn(1, 5, 2, 16)
assert warpwave.attention(q, q, q).shape == q.shape
print(warpwave.explain(q, q, q))
"""
    assert "torch_sdpa" in run_python(code)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["explain"]])
def test_the_command_names_the_extra_that_it_lacks(arguments: list[str]) -> None:
    code = f"{MISSING}import runpy; sys.argv[1:] = {arguments}; runpy.run_module('warpwave', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "typer" in done.stderr and "warpwave[workbench]" in done.stderr


@pytest.mark.parametrize("arguments", [["explain", "--gpu", "h100"], ["report"], ["bench"], ["verify"]])
def test_the_command_names_torch_if_it_is_missing(arguments: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {arguments}\n"
    code += "import runpy; runpy.run_module('warpwave', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "torch" in done.stderr and "warpwave[workbench]" in done.stderr
