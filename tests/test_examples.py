"""The examples run, say that their checks held, and import public names only."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NUMBERED = [path for path in EXAMPLES if path.name[0].isdigit()]

# What the output of each numbered example must contain, on a CPU or a GPU.
SHOWN = {
    "01_first_call.py": r"largest difference from torch: \S+e-0\d",
    "02_masks.py": r"query 0  #####\.\.\.  5 visible",
    "03_packed_sequences.py": r"sequence 3,  64 tokens",
    "04_gradients.py": r"step 60: loss 0\.00\d+, most attended distance 1",
    "05_precision.py": r"precision=1e-9 is refused",
    "06_decode_with_a_cache.py": r"after 5 steps: 45 tokens .*(?s:.)*all sequences freed: 16 pages free",
    "07_merge_partial_results.py": r"keys   0 to  100: \d+\.\d%",
    "08_explain.py": r"on an H200:\n  kernel hopper/flash_fwd",
    "09_test_your_kernel.py": r"right:(?s:.)*(speed not tested|reaches 0\.\d+ of its bound)",
    "11_latent_cache.py": r"46 tokens in 3 pages of 64 columns each, no pool of v\nlargest difference \S.*e-0[5-9]",
    "10_quantized_attention.py": r"fp8 +moves logits by \S+ of attention's part(?s:.)*int8 q, k and v +moves",
}


def python(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )


def run(name: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "examples" / name), *arguments, timeout=timeout)


# Runs scripts one after another and prints what each printed, so that torch is imported once for all.
ONE_AFTER_ANOTHER = """
import contextlib, io, json, os, runpy, sys
for path in sys.argv[1:]:
    sys.path[0], printed = os.path.dirname(path), io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    print(json.dumps([path, printed.getvalue()]), flush=True)
"""


def test_the_numbered_examples_run() -> None:
    result = python("-c", ONE_AFTER_ANOTHER, *map(str, NUMBERED))
    printed = {Path(path).name: text for path, text in map(json.loads, result.stdout.splitlines())}
    assert result.returncode == 0, f"after {list(printed)}: {result.stderr[-2000:]}"
    for path in NUMBERED:
        assert re.search(SHOWN[path.name], printed[path.name]), printed[path.name]


def test_examples_are_numbered_without_gaps() -> None:
    assert [int(path.name[:2]) for path in NUMBERED] == list(range(1, len(NUMBERED) + 1))
    assert set(SHOWN) == {path.name for path in NUMBERED}


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_a_numbered_example_is_short(path: Path) -> None:
    assert 20 <= len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_public_names_only(path: Path) -> None:
    import warpwave
    import warpwave.testing
    import warpwave.workbench.report.training as report_training

    public = {
        "warpwave": set(warpwave.__all__),
        "warpwave.testing": {"assert_reaches", "Reached"},
        "warpwave.workbench.report.command": {"check_writable"},
        "warpwave.workbench.report.training": {"TrainingRun", "write_training_page"},
    }
    assert all(hasattr(report_training, name) for name in public["warpwave.workbench.report.training"])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.split(".")[0] == "warpwave"]
            assert set(modules) <= {"warpwave", "warpwave.testing"}, f"{path.name} imports {modules}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "warpwave":
            assert node.module in public, f"{path.name} imports from {node.module}"
            names = {alias.name for alias in node.names} - public[node.module]
            assert not names, f"{path.name} imports {names}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "warpwave":
            assert node.attr in warpwave.__all__, f"{path.name} uses warpwave.{node.attr}"


def test_server_serves_and_checks_itself() -> None:
    small = ("--device", "cpu", "--requests", "6", "--tokens", "6", "--train-seconds", "1")
    result = run("server.py", *small)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert re.search(r"served 6 requests in [\d.]+ s, 36 tokens, [\d,]+ tokens a second", result.stdout)
    assert "36 of 36 tokens are equal alone and among all" in result.stdout
    moved = re.search(r"with a cache of float8_e4m3fn: .* moves logits by (\S+) of their RMS", result.stdout)
    assert moved and 1e-3 < float(moved[1]) < 5e-2, "0 would be a cache of other numbers"


@pytest.mark.parametrize("arguments", [("--requests", "0"), ("--device", "gpu")])
def test_server_refuses_what_makes_no_sense(arguments: tuple[str, str]) -> None:
    result = run("server.py", *arguments)
    assert result.returncode == 2 and arguments[0] in result.stderr and "Traceback" not in result.stderr


@pytest.mark.gpu
def test_server_on_a_gpu() -> None:
    result = run("server.py", timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_train_learns_the_same_by_both_attentions(tmp_path: Path) -> None:
    page = tmp_path / "train.html"
    result = run("train.py", "--device", "cpu", "--steps", "24", "--json", "--page", str(page))
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    found = json.loads(result.stdout)
    ours, theirs = found["runs"]
    assert [ours["attention"], theirs["attention"]] == ["warpwave", "sdpa"]
    assert len(ours["losses"]) == len(theirs["losses"]) == 24
    assert ours["losses"][0] > 5.0 and ours["losses"][-1] < 4.5, "ln(256) is 5.5: it starts from nothing, and learns"
    differences = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    assert found["largest_difference"] == max(differences) < 1e-4
    assert ours["tokens_per_second"] > 0
    assert page.read_text().count("<polyline") == 3


def test_train_checks_its_page_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("mine")
    result = run("train.py", "--device", "cpu", "--steps", "1000000", "--page", str(tmp_path / "notes.html"))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "notes.html already exists and is not a report of warpwave" in result.stderr
    assert not result.stdout


def test_train_by_other_ways_learns_the_same() -> None:
    """Checkpointed layers change nothing but the memory; dense batches hide no document from another."""
    train, device = importlib.import_module("examples.train"), torch.device("cpu")

    def losses(packed: bool, checkpointing: bool) -> list[float]:
        data = train.Data(4, 128, packed, device)
        trainer = train.Trainer(train.SMALL, 128, train.warpwave_attention, device, False, checkpointing)
        found: list[float] = train.train(trainer, data, 3, "warpwave").losses
        return found

    packed = losses(True, False)
    assert losses(True, True) == pytest.approx(packed, abs=1e-6)
    assert losses(False, False) != pytest.approx(packed, abs=1e-4)


def test_train_cuts_documents_to_fit() -> None:
    """Every sequence begins at a document or behind an empty line where one fits, and positions begin with it."""
    train = importlib.import_module("examples.train")
    data = train.Data(4, 128, True, torch.device("cpu"))
    documents = bytes(data.text.tolist())
    for step in (0, 1, 1000):
        batch, begin = data.batch(step), step * 512
        assert bytes(batch.tokens.tolist()) == documents[begin : begin + 512]
        assert bytes(batch.targets.tolist()) == documents[begin + 1 : begin + 513]
        lengths = batch.offsets.diff()
        assert batch.offsets[0] == 0 and batch.offsets[-1] == 512 and 0 < lengths.min() and lengths.max() <= 128
        assert batch.positions.tolist() == [i for n in lengths.tolist() for i in range(n)]
    starts = set(data.starts.tolist())
    assert {i for i, byte in enumerate(documents) if byte == 0} <= starts
    assert any(documents[i - 2 : i] == b"\n\n" for i in starts)


@pytest.mark.parametrize(
    "arguments",
    [("--steps", "1"), ("--context", "0"), ("--rows", "0"), ("--attention", "fast"), ("--device", "gpu")],
)
def test_train_refuses_what_makes_no_sense(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    train = importlib.import_module("examples.train")
    with pytest.raises(SystemExit) as caught:
        train.parse(["--device", "cpu", *arguments])
    assert caught.value.code == 2 and arguments[0] in capsys.readouterr().err
    with pytest.raises(SystemExit, match="more than the text"):
        train.Data(999999, 128, True, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [(), ("--compile",)])
def test_train_on_a_gpu(compiled: tuple[str, ...], tmp_path: Path) -> None:
    result = run("train.py", "--steps", "30", "--json", "--page", str(tmp_path / "train.html"), *compiled, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    found = json.loads(result.stdout)
    losses = found["runs"][0]["losses"]
    assert losses[-1] < losses[0] - 1.0
    assert found["largest_difference"] < 0.1
