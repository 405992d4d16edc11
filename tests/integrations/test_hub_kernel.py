"""The package as a kernel of the Hugging Face hub: built, and loaded in a fresh process from its folder, without the
package itself; by the rules of the `kernels` library, and by the library where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hub_kernel

ROOT = Path(__file__).parents[2]
LOADERS = {
    # What the library does with a variant: its folder is a module under the name in its metadata.
    "by the rules": """
def load(variant):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
""",
    "by the library": """
import kernels
def load(variant):
    return kernels.get_local_kernel(variant)
""",
}
PROGRAM = """
repository = Path(sys.argv[1])
import torch

hub = load(repository / "build" / "torch-cpu")
other = load(repository / "build" / "torch-cuda")
assert hub is not other and hub.attention is not other.attention
torch.manual_seed(0)
given = [torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2)]


def results(attention):
    out = attention(*given, causal=True)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def check(attention, expected, exactly=True):
    for one, two in zip(results(attention), expected, strict=True):
        torch.testing.assert_close(one, two, **{"rtol": 0, "atol": 0} if exactly else {})


found = results(hub.attention)
check(other.attention, found)
check(torch.compile(hub.attention, backend="aot_eager", fullgraph=True), found)
packed = [t.detach().flatten(0, 1) for t in given]
offsets = torch.tensor([0, 9], dtype=torch.int32)
torch.testing.assert_close(hub.flash_attn_varlen_func(*packed, offsets, offsets, 9, 9, causal=True), found[0][0])
torch.testing.assert_close(hub.flash_attn_func(*given, causal=True), found[0])
kernel = hub.attention(*[t.detach() for t in given], causal=True, kernel="flash_fwd")  # in Triton's interpreter
torch.testing.assert_close(kernel, found[0])
assert not [name for name in sys.modules if name.split(".")[0] == "warpwave"], "the kernel imports the package"

import warpwave

check(warpwave.attention, found)
check(hub.attention, found)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    hub_kernel.build(out)
    return out


def test_the_layout(repository: Path) -> None:
    names = sorted(path.name for path in (repository / "build").iterdir())
    assert names == ["torch-cpu", "torch-cuda", "torch-rocm"]
    for name in names:
        variant = repository / "build" / name
        metadata = json.loads((variant / "metadata.json").read_text())
        assert re.fullmatch(rf"_warpwave_{metadata['backend']['type']}_[0-9a-f]{{8}}", metadata["id"])
        assert name == f"torch-{metadata['backend']['type']}"
        assert metadata["id"] in (variant / "ops.py").read_text()
        assert not (variant / "workbench").exists() and not (variant / "testing.py").exists()
    first = [path.read_bytes() for path in sorted(repository.rglob("*")) if path.is_file()]
    assert [path.name for path in hub_kernel.build(repository)] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    assert first == [path.read_bytes() for path in sorted(repository.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("loader", LOADERS)
def test_it_runs_in_a_fresh_process_without_the_package(loader: str, repository: Path) -> None:
    if loader == "by the library" and importlib.util.find_spec("kernels") is None:
        pytest.skip("kernels is not installed")
    program = "import importlib.util, json, sys\nfrom pathlib import Path\n" + LOADERS[loader] + PROGRAM
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_another_program_built_is_not_replaced(tmp_path: Path) -> None:
    kept = tmp_path / "build" / "lib" / "module.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    with pytest.raises(FileExistsError, match="is not a variant of a kernel"):
        hub_kernel.build(tmp_path)
    assert kept.read_text() == "kept"


def test_what_a_kernel_could_not_import_stops_the_build() -> None:
    def relocate(text: str) -> str:
        return hub_kernel.relocated("kernels/one.py", text, "_n")

    assert relocate("from warpwave.errors import A\nfrom warpwave import ops") == (
        "from ..errors import A\nfrom .. import ops"
    )
    assert relocate('if a:\n    from warpwave.kernels import b\nx = torch.ops.warpwave.attention("warpwave::a")') == (
        'if a:\n    from ..kernels import b\nx = torch.ops._n.attention("_n::a")'
    )
    assert relocate('log = getLogger("warpwave")') == 'log = getLogger("warpwave")'
    for text in ("import warpwave.api", "import warpwave as w", "f('warpwave.api')", "from warpwave.a import(b)"):
        with pytest.raises(ValueError, match=r"kernels/one\.py:1: warpwave.* is named absolutely"):
            relocate(text)
