"""Fresh processes: the order of imports and compilation changes no result, and an installed wheel runs every example of
the page."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BEGINNINGS = {
    "transformers": "import transformers",
    "compiled": "import torch; early = torch.compile(block, backend='aot_eager', fullgraph=True); early(*given())",
    "warpwave": "import warpwave.integrations.pytorch, warpwave.integrations.flash_attn; early = None",
}
PROGRAM = """
import hashlib


def given():
    import torch
    torch.manual_seed(0)
    return [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]


def block(q, k, v):
    import torch.nn.functional as F
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, dropout_p=0.2)


early = None
{beginning}

import torch
from warpwave.integrations import flash_attn, pytorch

early = early or torch.compile(block, backend="aot_eager", fullgraph=True)
results = []
with pytorch.sdpa():
    for call in (block, early):
        q, k, v = given()
        out = call(q, k, v)
        results += [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
results.append(flash_attn.flash_attn_func(*given(), dropout_p=0.2, causal=True))
if importlib.util.find_spec("transformers"):
    from transformers import LlamaConfig, LlamaForCausalLM
    from warpwave.integrations import transformers as door

    registration = door.register()
    torch.manual_seed(0)
    sizes = {{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.set_attn_implementation("warpwave")
    results.append(model(input_ids=torch.arange(13)[None]).logits)
    registration.remove()
assert not pytorch.declined(), pytorch.declined()
print(*(hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for t in results))
"""


def run(command: list[str], **environment: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_order_of_imports_and_compilation_changes_nothing() -> None:
    """The same bits in processes that import transformers first, compile first, or import warpwave first."""
    found = {}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for name, beginning in BEGINNINGS.items():
        if name != "transformers" or importlib.util.find_spec(name):
            program = "import importlib.util" + PROGRAM.format(beginning=beginning)
            found[name] = run([sys.executable, "-c", program], PYTHONPATH=path, OMP_NUM_THREADS="1").split()
    assert len(found["warpwave"]) >= 9
    for name, digests in found.items():
        assert digests == found["warpwave"], name
    # Gradients of q, k and v differ from one another, and eager and compiled calls agree.
    eager, compiled = found["warpwave"][:4], found["warpwave"][4:8]
    assert eager == compiled and len(set(eager)) == 4


@pytest.mark.full
def test_an_installed_wheel_runs_every_example(tmp_path: Path) -> None:
    """The wheel that `pip wheel` builds is installed into a new environment, which has torch and Triton but nothing of
    this folder, and each example of docs/guide/integrations.md runs there."""
    from tests.test_docs import PYTHON

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "wheels"), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("pip cannot fetch hatchling, which builds the wheel")
    assert built.returncode == 0, built.stderr[-3000:]
    (wheel,) = (tmp_path / "wheels").glob("warpwave-*.whl")
    venv.create(tmp_path / "new", with_pip=False)
    python = str(tmp_path / "new" / "bin" / "python")
    run([*pip, "--python", python, "install", "--no-deps", str(wheel)])
    (packages,) = (tmp_path / "new").glob("lib/python*/site-packages")
    torch_at = importlib.util.find_spec("torch")
    assert torch_at is not None and torch_at.origin is not None
    (packages / "torch.pth").write_text(str(Path(torch_at.origin).parents[1]))
    code = "import warpwave.integrations.pytorch as door; print(door.__file__)"
    assert Path(run([python, "-I", "-c", code])).is_relative_to(packages)
    code = "from importlib.metadata import entry_points; print(*entry_points(group='vllm.general_plugins'))"
    assert "warpwave.integrations.vllm:plugin" in run([python, "-I", "-c", code])
    examples = PYTHON.findall((ROOT / "docs/guide/integrations.md").read_text())
    assert len(examples) >= 5
    for example in examples:
        run([python, "-I", "-c", example])
