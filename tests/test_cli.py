"""The command line as a user meets it: in fresh processes, without a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from warpwave import cli


def warpwave(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-m", "warpwave", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL, env=environment
    )


def test_help_is_quick_and_plain() -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        done = warpwave("--help")
        times.append(time.perf_counter() - started)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("demo", "explain", "bench"))
    assert "\x1b" not in done.stdout
    assert min(times) < 0.3, f"warpwave --help took {min(times):.2f} s at best"


def test_help_loads_nothing_heavy() -> None:
    imported = {
        line.rsplit("|", 1)[-1].strip() for line in warpwave("--help", python=("-X", "importtime")).stderr.splitlines()
    }
    assert "typer" in imported
    assert not imported & {"torch", "triton", "numpy", "rich"}


def test_version() -> None:
    import warpwave as package

    assert warpwave("--version").stdout == f"warpwave {package.__version__}\n"


def test_explain_names_the_kernel_and_the_reasons() -> None:
    done = warpwave("explain", "--gpu", "sm_90", "--causal")
    assert done.returncode == 0, done.stderr
    assert "flash_fwd" in done.stdout
    assert "\x1b" not in done.stdout


def test_explain_json_is_the_same_in_data() -> None:
    sizes = ["--batch", "2", "--seqlen-q", "100", "--seqlen-k", "300", "--heads", "8", "--heads-kv", "2"]
    done = warpwave(
        "explain", "--gpu", "sm_90", "--json", "--head-dim", "64", "--dtype", "fp16", "--window", "15,0", *sizes
    )
    explanation = json.loads(done.stdout)
    assert explanation["kernel"] == "flash_fwd"
    assert explanation["problem"]["num_heads_kv"] == 2
    assert explanation["flops"] == 2 * 8 * 100 * 16 * 2 * 128  # 16 keys a query, two products of width 64


def test_explain_describes_this_machine_by_default() -> None:
    done = warpwave(
        "explain", "--dtype", "fp32", "--seqlen-q", "64", "--alibi", "--sinks", "--softcap", "20", "--grad", "--lse"
    )
    assert done.returncode == 0, done.stderr
    assert "eager" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "16", "--heads-kv", "6"], "k has 6 heads, which does not divide the 16 heads of q"),
        (["--head-dim", "0"], "head_dim 0"),
        (["--softcap", "-1"], "softcap is -1"),
        (["--precision", "tf64"], "precision is 'tf64'"),
        (["--window=-3,0"], "each side must be at least -1"),
        (["--window", "12"], "'12' is not two whole numbers"),
        (["--gpu", "sm_20"], "'sm_20' is not known"),
        (["--dtype", "int8"], "'int8' is not a dtype"),
        (["--causal", "--causal-top-left"], "not both"),
        (["--batch", "-1"], "--batch"),
        (["--heads", "many"], "--heads"),
        (["--seqlen-q", "1" + "0" * 18], "no tensor can have"),
        (["--hats", "16"], "No such option"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = warpwave("explain", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_suite_is_said_plainly() -> None:
    done = warpwave("bench", "no-such-suite")
    assert done.returncode == 2
    assert "no-such-suite" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("device", ["abacus", "cuda"])
def test_the_demo_refuses_a_device_that_is_not_there(device: str) -> None:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = warpwave("demo", "--device", device)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_verdict_of_the_checks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    from warpwave import demo

    monkeypatch.setattr(demo, "run", lambda device: code)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code
