"""The command line as a user meets it: in fresh processes, without a terminal."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warpwave.workbench import cli
from warpwave.workbench.report import shipped


def warpwave(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-m", "warpwave", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL, env=environment
    )


def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same in this process, which has torch: (exit code, stdout, stderr). Whatever is no exit is raised."""
    monkeypatch.setattr(sys, "argv", ["warpwave", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, printed.out, printed.err


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
    assert "h100, h100-pcie, h200" in done.stdout
    assert "\x1b" not in done.stdout


def test_explain_json_is_the_same_in_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--seqlen-q", "100", "--seqlen-k", "300", "--heads", "8", "--heads-kv", "2"]
    call = ["--head-dim", "64", "--dtype", "fp16", "--window", "15,0", *sizes]
    code, out, _ = here(monkeypatch, capsys, "explain", "--gpu", "sm_90", "--json", *call)
    explanation = json.loads(out)
    assert code == 0
    assert explanation["kernel"].endswith("flash_fwd")
    assert explanation["problem"]["num_heads_kv"] == 2
    assert explanation["flops"] == 2 * 8 * 100 * 16 * 2 * 128  # 16 keys a query, two products of width 64


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_named_kernel_that_cannot_run_the_call_gives_exit_code_2_with_its_reasons(
    form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", "--kernel", "hopper/flash_fwd", "--head-dim", "512", "--gpu", "h100", *form]
    code, out, err = here(monkeypatch, capsys, *command)
    assert code == 2 and "'hopper/flash_fwd' cannot run this call" in err and "head_dim is 512" in err
    assert "large_head_dim" in out  # the explanation names the kernels that can
    if form:
        assert json.loads(out)["kernel"] is None


def test_a_record_of_another_card_is_refused_with_its_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = next(str(path) for path in shipped.paths() if "forward" in path.name)
    command = ["explain", "--batch", "16", "--seqlen-q", "1024", "--record", record]
    code, out, err = here(monkeypatch, capsys, *command, "--gpu", "h100")
    assert code == 2 and out == "" and "this call on NVIDIA H200 and not on NVIDIA H100" in err
    assert here(monkeypatch, capsys, *command, "--gpu", "h200")[0] == 0


def test_explain_has_bounds_for_a_card_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = here(monkeypatch, capsys, "explain", "--gpu", "H200", "--json")
    explanation = json.loads(out)
    assert explanation["bounds"]["rates"]["name"] == "data sheet"
    assert explanation["binding"] == "tensor cores"
    assert explanation["least_us"] == pytest.approx(explanation["flops"] / 989.4e6)


@pytest.mark.parametrize(
    ("arguments", "kernel", "said"),
    [
        ("--seqlen-q 2048 --page-size 16", "hopper/flash_fwd", "pages of 16"),
        ("--packed --batch 3 --seqlen-q 700 --page-size 64 --sinks", "hopper/flash_fwd", "packed, 2100 tokens"),
        ("--batch 64 --seqlen-q 1 --seqlen-k 8190 --page-size 16", "split_kv", "seqlen 1 x 8190"),
        ("--batch 4 --seqlen-q 1 --page-size 64 --cache int8:token", "split_kv", "int8, a factor for each token"),
        ("--seqlen-q 0 --seqlen-k 0 --page-size 16", "split_kv", "seqlen 0"),
    ],
)
def test_explain_describes_calls_on_a_cache(
    arguments: str, kernel: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"explain --gpu h200 --heads 32 --heads-kv 8 --causal {arguments}".split()
    code, out, _ = here(monkeypatch, capsys, *command)
    assert code == 0 and said in out.splitlines()[0]
    assert json.loads(here(monkeypatch, capsys, *command, "--json")[1])["kernel"] == kernel


def test_explain_is_quick() -> None:
    program = """
import sys, time
begin = time.perf_counter()
import torch
print(time.perf_counter() - begin, file=sys.stderr, flush=True)
from warpwave.workbench.entry import command
sys.argv = "warpwave explain --gpu h200 --seqlen-q 131072 --causal --head-dim 80".split()
command()
"""
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        took, torch_s = time.perf_counter() - started, float(done.stderr)
        # Two seconds with the machine to itself, most of which is importing torch; a busy one is slower at both.
        if took < max(2.0, 2.5 * torch_s):
            break
    else:
        pytest.fail(f"warpwave explain took {took:.2f} s, {torch_s:.2f} of them to import torch")


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
        (["--device", "cpu", "--out", "/no/such/folder/roof.json"], "there is no directory /no/such/folder"),
        (["--device", "cpu", "--out", __file__], "is not a file of `warpwave roof`"),
    ],
)
def test_a_mistake_with_roof_is_one_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = here(monkeypatch, capsys, "roof", *arguments)
    assert code == 2 and out == ""
    assert said in err and "measuring" not in err


def test_explain_describes_this_machine_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--dtype", "fp32", "--seqlen-q", "64", "--alibi", "--sinks", "--softcap", "20", "--grad", "--lse"]
    code, out, err = here(monkeypatch, capsys, "explain", *call)
    assert code == 0, err
    assert "eager" in out


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
        (["--dtype", "int4"], "'int4' is not a dtype"),
        (["--causal", "--causal-top-left"], "not both"),
        (["--deterministic"], "add --grad"),
        (["--precision", "tf32", "--dtype", "bf16"], "--precision belongs to float32"),
        (["--precision", "1e-3", "--dtype", "fp8"], "--precision belongs to float32"),
        (["--batch", "-1"], "--batch"),
        (["--heads", "many"], "--heads"),
        (["--seqlen-q", "1" + "0" * 18], "no tensor can have"),
        (["--seqlen-q", "1" + "0" * 22], "no tensor can have"),
        (["--seqlen-q", "1" + "0" * 13], "q would take 40,960.0 TB, more than any GPU has"),
        (["--page-size", "16", "--mask"], "a call on a cache has no --mask"),
        (["--page-size", "16", "--dtype", "int8"], "no quantized --dtype"),
        (["--page-size", "16", "--cache", "int4"], "use float8_e4m3fn:head"),
        (["--cache", "int8:token"], "add --page-size"),
        (["--hats", "16"], "No such option"),
        (["--gpu", "h200", "--measured-us", "inf"], "the measured time is inf us"),
        (["--gpu", "h200", "--record", "none.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (["--gpu", "h200", "--ablate", "--measured-us", "9"], "--ablate takes no --measured-us"),
        (["--gpu", "h200", "--ablate", "--kernel", "tiled"], "--ablate takes no --kernel"),
        (["--gpu", "h200,h100", "--ablate"], "--ablate takes one GPU"),
        (["--gpu", "all", "--ablate"], "--ablate takes one GPU"),
        (["--from-table", "case_report_0", "--mask"], "--from-table takes no --mask"),
        (["--from-table", "case_report_0", "--gpu", "h101"], "gpu 'h101' is not in the catalog"),
        (["--from-table", "case_report_0", "--dtype", "fp64"], "'fp64' is not a dtype"),
        (["--from-table", "case_report_0", "--heads", "0"], "heads must be a positive whole number"),
        (["--code", "block_m=64"], "facts about code belong to --from-table"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = here(monkeypatch, capsys, "explain", *arguments)
    assert code == 2
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor", "--force"], "add --bundle"),
        (["bench", "precision", "--peer-timeout", "5"], "precision takes --out"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = here(monkeypatch, capsys, *arguments)
    assert code == 2 and said in err


def test_bench_without_a_suite_lists_the_suites(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = here(monkeypatch, capsys, "bench")
    assert code == 2
    assert all(f"\n  {name} " in out for name in ("forward", "decode", "quick"))


def test_an_unknown_suite_is_said_plainly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = here(monkeypatch, capsys, "bench", "no-such-suite")
    assert code == 2
    assert "no-such-suite" in err


@pytest.mark.parametrize("device", ["abacus", "cuda"])
def test_the_demo_refuses_a_device_that_is_not_there(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, _, err = here(monkeypatch, capsys, "demo", "--device", device)
    assert code == 2 and "--device" in err


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_verdict_of_the_checks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    from warpwave.workbench.demo import demo

    monkeypatch.setattr(demo, "run", lambda device, out, verbose: code)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code


def test_report_writes_the_shipped_record(tmp_path: Path) -> None:
    done = warpwave("report", "--out", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Markdown: {tmp_path / 'r.md'}\nreport: {tmp_path / 'r.html'}\n"
    assert "not on this machine" in (tmp_path / "r.html").read_text()


def test_a_terminal_without_utf_8_is_served() -> None:
    command = [sys.executable, "-m", "warpwave", "report", "--markdown", "-"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert b" % of what the tensor cores allow" in done.stdout and b"?%" not in done.stdout


def test_report_of_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = warpwave("report", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "r.html"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("warpwave: ") and done.stderr.count("\n") == 1


# What a hostile shell does --------------------------------------------------------------------------------------------


def shell(command: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of shell, W standing for the command."""
    line = command.replace("W ", f"{shlex.quote(sys.executable)} -m warpwave ")
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    known |= {"PYTHONPATH": str(Path(cli.__file__).parents[2]), **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, timeout=120, check=False, cwd=cwd, env=known)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of Windows closes no streams")
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("W --version >&-", 2, "warpwave: the output could not be written: standard output is closed\n"),
        ("W doctor >&-", 2, "warpwave: the output could not be written: standard output is closed\n"),
        ("W doctor >&- 2>&-", 2, ""),
        ("W --version 2>&-", 0, ""),
        ("W nonsense 2>&-", 2, ""),
        ("W --help >/dev/full", 2, "warpwave: the output could not be written: No space left on device\n"),
        ("W --version >/dev/full", 2, "warpwave: the output could not be written: No space left on device\n"),
        ("W report none.jsonl 2>/dev/full", 2, ""),
        ("W nonsense 2>/dev/full", 2, ""),
        ("W --version <&- | head -0", 0, ""),
        ("COLUMNS=1 NO_COLOR=1 TERM=dumb W --version", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(command: str, code: int, said: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    done = shell(command)
    assert (done.returncode, done.stderr.decode()) == (code, said)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are UTF-8 there")
def test_names_that_are_not_utf_8_and_names_that_are_controls(tmp_path: Path) -> None:
    from warpwave.workbench.report import shipped

    record = shipped.paths()[0].read_bytes()
    for name in (b"b\xff.jsonl", b"e\x1b[31m\n.jsonl"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_bytes(record)
    done = shell("W report b*.jsonl e*.jsonl --out b*.jsonl --markdown -", tmp_path)
    assert done.returncode == 2 and b"already exists" in done.stderr
    done = shell("W report b*.jsonl e*.jsonl --out r.html --markdown -", tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert b"from b\\\\xff.jsonl, e\\\\x1b[31m\\\\x0a.jsonl" in done.stdout and b"\x1b" not in done.stdout
    written = (tmp_path / "r.html").read_text()
    assert "e\\x1b[31m\\x0a.jsonl" in written and "\x1b" not in written
    done = shell("W compare none*.jsonl b*.jsonl", tmp_path)
    assert done.returncode == 2 and b"\x1b" not in done.stderr and b"Traceback" not in done.stderr


def test_a_table_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from warpwave.workbench.report import shipped

    for width in ("1", "20", "80"):
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        arguments = ("--contender", "warpwave auto", "--contender", "sdpa_default", "--fail-on", "never")
        code, _, err = here(monkeypatch, capsys, "compare", str(shipped.paths()[-1]), *arguments)
        assert (code, err) == (0, "")


def test_a_user_without_a_home_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a container's, whose user identifier the system has no entry for."""

    def nobody(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    code, out, _ = here(monkeypatch, capsys, "explain", "--gpu", "cpu", "--seqlen-q", "64")
    assert code == 0 and out.startswith("call")


@pytest.mark.parametrize("gpu", ["cpu", "h200"])
def test_an_error_budget_that_nothing_keeps_is_said_in_few_lines(
    gpu: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("--dtype", "fp32", "--precision", "1e-12")
    code, out, err = here(monkeypatch, capsys, "explain", "--gpu", gpu, *call)
    assert code == 2 and out == "" and len(err.splitlines()) <= 3
    assert "keeps a relative error of 1e-12" in err and "a larger budget" in err


def test_a_long_call_with_gradients_is_explained_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.perf_counter()
    code, out, _ = here(monkeypatch, capsys, "explain", "--gpu", "cpu", "--seqlen-q", "100000000", "--grad", "--causal")
    assert code == 0 and "kernel     eager" in out
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1000000000", "--seqlen-q", "0"], "batch is 1,000,000,000; a call can have 1,048,576 sequences"),
        (["--seqlen-q", "200000000", "--heads", "1"], "seqlen_q is 200,000,000; a sequence can have 134,217,728"),
        (["--seqlen-q", "100000", "--seqlen-k", "10000000", "--bias"], "bias would take 64.0 TB"),
    ],
)
def test_a_call_that_nobody_could_count_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = here(monkeypatch, capsys, "explain", *arguments)
    assert code == 2 and said in err
