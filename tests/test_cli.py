"""The command line as a user meets it: in fresh processes, without a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

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
    # On a machine that is busy with other things, importing typer alone takes longer than that.
    floors = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import typer"], check=True)
        floors.append(time.perf_counter() - started)
    limit = max(0.3, 1.5 * min(floors))
    assert min(times) < limit, f"warpwave --help took {min(times):.2f} s at best, and may take {limit:.2f}"


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
    assert explanation["kernel"].endswith("flash_fwd")
    assert explanation["problem"]["num_heads_kv"] == 2
    assert explanation["flops"] == 2 * 8 * 100 * 16 * 2 * 128  # 16 keys a query, two products of width 64


def test_explain_has_bounds_for_a_card_that_is_not_here() -> None:
    done = warpwave("explain", "--gpu", "H200", "--json")
    explanation = json.loads(done.stdout)
    assert explanation["bounds"]["rates"]["name"] == "data sheet"
    assert explanation["binding"] == "tensor cores"
    assert explanation["least_us"] == pytest.approx(explanation["flops"] / 989.4e6)
    assert "h100, h100-pcie, h200" in warpwave("explain", "--gpu", "sm_90").stdout


def test_explain_is_quick() -> None:
    def fastest_of_two(*command: str) -> float:
        times = []
        for _ in range(2):
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            times.append(time.perf_counter() - started)
        return min(times)

    long = ("--seqlen-q", "131072", "--causal", "--head-dim", "80")
    took = fastest_of_two("-m", "warpwave", "explain", "--gpu", "h200", *long)
    # Two seconds with the machine to itself, most of which is importing torch; a busy one is slower at both.
    assert took < max(2.0, 2.5 * fastest_of_two("-c", "import torch")), f"warpwave explain took {took:.2f} s at best"


def test_roof_measures_keeps_and_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "roof.json"
    done = warpwave("roof", "--device", "cpu", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    ceilings = json.loads(done.stdout)
    assert ceilings["product_tflops"]["float32"] > 0 and ceilings["arch"] == "cpu"
    assert json.loads(out.read_text()).items() >= ceilings.items()
    assert "measuring copy" in done.stderr and str(tmp_path) in done.stderr
    explained = json.loads(warpwave("explain", "--gpu", "cpu", "--json").stdout)
    assert explained["measured"]["rates"]["exponentials_gops"] == ceilings["exponentials_gops"]
    assert explained["binding"] in ("products", "exponentials", "memory", "call")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "abacus"], "'abacus' is not a device"),
        (["--device", "cuda:77"], "torch sees no GPU 77"),
        (["--device", "cpu", "--out", "/no/such/folder/roof.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_mistake_with_roof_is_one_sentence(arguments: list[str], said: str) -> None:
    done = warpwave("roof", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr


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

    monkeypatch.setattr(demo, "run", lambda device, out: code)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code


def test_report_writes_the_shipped_record(tmp_path: Path) -> None:
    done = warpwave("report", "--out", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Markdown: {tmp_path / 'r.md'}\nreport: {tmp_path / 'r.html'}\n"
    assert "not on this machine" in (tmp_path / "r.html").read_text()


def test_report_of_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = warpwave("report", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "r.html"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("warpwave: ") and done.stderr.count("\n") == 1
