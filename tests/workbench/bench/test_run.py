import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warpwave.workbench.bench import contenders, measure, run
from warpwave.workbench.bench.records import RecordError, read_records
from warpwave.workbench.bench.resume import Journal
from warpwave.workbench.bench.run import main
from warpwave.workbench.bench.workloads import load_suite

ROOT = str(Path(run.__file__).parents[3])
ONE_CASE = """
description = "d"
cases = [{ batch = 1, seqlen_q = 40, num_heads_q = 4, num_heads_kv = 2, head_dim = 16, dtype = "float32", causal = true,
           softmax_scale = 0.5 }]
"""


@pytest.fixture
def one_case(tmp_path: Path) -> str:
    path = tmp_path / "one.toml"
    path.write_text(ONE_CASE.replace("\n           ", " "))
    return str(path)


def test_quick_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quick.jsonl"
    assert main("quick", out=path, rounds=2, device="cpu") == 0
    captured = capsys.readouterr()
    suite = load_suite("quick")
    for index, case in enumerate(suite.cases, start=1):
        assert case.name in captured.out
        assert f"{index}/{len(suite.cases)} {case.name}" in captured.err
    assert "warpwave auto against the best peer" in captured.out

    records = read_records(path)
    assert len(records.environments) == 1
    by_case = {(m.case, m.contender): m for _, m in records.measurements}
    for case in suite.cases:
        ours = by_case[case.name, "warpwave auto"]
        assert ours.problem == case.problem and ours.suite == "quick"
        assert ours.verdict is not None and ours.verdict.passed
        assert ours.timing is not None and len(ours.timing.samples_us) == 2
        assert ours.kernel in ("torch_sdpa", "eager") and ours.host is None
        assert by_case[case.name, "sdpa_cudnn"].refusal
    assert by_case[suite.cases[0].name, "sdpa_default"].timing is not None


def test_kernels_by_name_and_json(one_case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(one_case, out=None, rounds=1, json_output=True, kernels=("eager", "torch_sdpa"), device="cpu") == 0
    environment, *measurements = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert environment["kind"] == "environment"
    by_contender = {m["contender"]: m for m in measurements}
    assert list(by_contender)[:2] == ["warpwave eager", "warpwave torch_sdpa"]
    assert by_contender["warpwave eager"]["kernel"] == "eager"
    assert by_contender["warpwave eager"]["config"]["block_m"] > 0
    assert {m["environment_id"] for m in measurements} == {environment["id"]}


def test_a_wrong_result_has_no_speed(
    one_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly(*args: Any, **kwargs: Any) -> Any:
        out = attention(*args, **kwargs)
        out[:, -1] *= 1.001
        return out

    attention: Any = contenders.attention
    monkeypatch.setattr(contenders, "attention", nearly)
    path = tmp_path / "r.jsonl"
    assert main(one_case, out=path, rounds=1, device="cpu") == 1
    assert "warpwave auto: wrong, so not timed: RMS error" in capsys.readouterr().out
    (ours,) = [m for _, m in read_records(path).measurements if m.contender == "warpwave auto"]
    assert ours.timing is None and ours.verdict is not None and not ours.verdict.passed


def test_ctrl_c_keeps_what_is_written_and_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    measured: list[str] = []

    def interrupted(case: Any, *args: Any, **kwargs: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(case.name)
        return real(case, *args, **kwargs)

    real: Any = run.measure
    monkeypatch.setattr(run, "measure", interrupted)
    assert main("quick", out=path, rounds=1, device="cpu", peers=("none",)) == 130
    captured = capsys.readouterr()
    assert f"warpwave: interrupted; 2 of 6 cases are done and in {path}; the same command with --resume" in captured.err
    assert [m.case for _, m in read_records(path).measurements] == measured
    assert not path.with_name("r.jsonl.underway").exists()

    monkeypatch.setattr(run, "measure", real)
    assert main("quick", out=path, rounds=1, device="cpu", peers=("none",), resume=True) == 0
    assert f"2 of 6 cases are in {path} already" in capsys.readouterr().err
    names = [case.name for case in load_suite("quick").cases]
    assert [m.case for _, m in read_records(path).measurements] == names
    assert main("quick", out=path, rounds=1, device="cpu", peers=("none",), resume=True) == 0
    assert len(read_records(path).measurements) == len(names)


SIGNALLED = """
import os, signal, sys
from warpwave.workbench.bench import contenders
from warpwave.workbench.bench.run import main

def ours(kernel, problem, operands):
    # As a library that takes whatever is raised for a failure of its own: the signal is seen all the same.
    try:
        os.kill(os.getpid(), int(sys.argv[2]))
    except BaseException:
        raise RuntimeError("no luck") from None

contenders.ours = ours
signal.signal(int(sys.argv[2]), signal.SIG_DFL)  # under nohup, which the tests may run under, it is ignored
sys.exit(main(sys.argv[1], out=__import__("pathlib").Path("r.jsonl"), rounds=1, device="cpu", peers=("sdpa_math",)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_stop_blames_nobody(
    number: signal.Signals, one_case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", SIGNALLED, one_case, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == 128 + number, done.stderr
    assert f"warpwave: stopped by {number.name}; 0 of 1 cases are done and in r.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
    monkeypatch.chdir(tmp_path)
    assert not Path("r.jsonl.underway").exists()
    assert main(one_case, out=Path("r.jsonl"), rounds=1, device="cpu", peers=("sdpa_math",), resume=True) == 0
    assert all(m.timing is not None for _, m in read_records(Path("r.jsonl")).measurements)


def test_the_exit_code_counts_what_an_earlier_run_could_not_time(
    one_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash of ours stays in the record, and no later run with nothing left to do makes a success of it."""
    path = tmp_path / "r.jsonl"
    (case,) = load_suite(one_case).cases
    Journal(path, resume=False).about_to(case.name, "warpwave auto")  # and here the process dies
    for _ in range(2):
        assert main(one_case, out=path, rounds=1, device="cpu", peers=("none",), resume=True) == 1
    assert "1 of 1 cases are in" in capsys.readouterr().err
    ((_, m),) = read_records(path).measurements
    assert m.refusal == "it ended the process last time"


def test_inputs_that_do_not_fit_are_a_refusal(
    one_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_memory_bytes", lambda device: 1000)
    path = tmp_path / "r.jsonl"
    assert main(one_case, out=path, rounds=1, device="cpu", peers=("sdpa_math",)) == 1
    said = "its inputs take 0.0 GB and cpu memory is 0.0 GB"
    assert said in capsys.readouterr().out
    assert [m.refusal for _, m in read_records(path).measurements] == [said] * 2

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\x1b[31m\nand a trace")

    monkeypatch.undo()
    monkeypatch.setattr(measure, "make_operands", full)
    assert main(one_case, out=None, rounds=1, device="cpu", peers=("none",)) == 1
    assert (
        "its inputs could not be made: DefaultCPUAllocator: can't allocate memory\\x1b[31m\n" in capsys.readouterr().out
    )


def test_a_disk_that_fills_ends_the_run_in_a_sentence(
    one_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RecordError("r.jsonl cannot be written: No space left on device")

    monkeypatch.setattr(run.RecordWriter, "write", full)
    assert main(one_case, out=tmp_path / "r.jsonl", rounds=1, device="cpu", peers=("none",)) == 2
    assert "No space left on device; 0 of 1 cases are done" in capsys.readouterr().err


def test_a_lost_device_ends_the_run_and_is_known_to_the_next(
    one_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"

    def lost(*args: Any) -> None:
        raise measure.DeviceLost("sdpa_math on d left the GPU unusable: illegal address")

    def prepare(problem: Any, operands: Any) -> Any:
        raise RuntimeError("illegal address")

    monkeypatch.setitem(contenders.PEERS, "sdpa_math", prepare)
    monkeypatch.setattr(measure, "_still_usable", lost)
    assert main(one_case, out=path, rounds=1, device="cpu", peers=("sdpa_math", "sdpa_flash")) == 3
    assert "left the GPU unusable" in capsys.readouterr().err
    assert main(one_case, out=path, rounds=1, device="cpu", peers=("sdpa_math", "sdpa_flash"), resume=True) == 0
    by_name = {m.contender: m for _, m in read_records(path).measurements}
    assert by_name["sdpa_math"].refusal == "it ended the process last time"
    assert by_name["sdpa_flash"].timing is not None


def test_part_of_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("quick", out=None, rounds=1, device="cpu", peers=("sdpa_math",), only="bf16 causal") == 0
    captured = capsys.readouterr()
    assert captured.err == "1/1 d64 2x128 h4 bf16 causal\n" and "sdpa_math" in captured.out
    assert "three_calls" not in captured.out


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"suite": "nothing"}, "there is no suite 'nothing'; give one of "),
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"rounds": 1001}, "rounds is 1001; it must be at most 1,000"),
        ({"peer_timeout_s": float("inf")}, "--peer-timeout is inf; it is a number of seconds up to 1,000,000"),
        ({"peer_timeout_s": float("nan")}, "--peer-timeout is nan; it is a number of seconds up to 1,000,000"),
        ({"peer_timeout_s": -1.0}, "--peer-timeout is -1; it is a number of seconds up to 1,000,000, and 0 is no"),
        ({"out": Path(".")}, ". is a directory; name a file in it"),
        ({"out": Path("."), "resume": True}, ". is a directory; name a file in it"),
        ({"kernels": ("flash",)}, "unknown kernel flash; known are auto, "),
        ({"peers": ("fa5",)}, "unknown peer fa5; known are sdpa_default, "),
        ({"peers": ("none", "sdpa_math")}, "--peer none excludes every peer; give it alone, or only sdpa_math"),
        ({"modes": ("fast",)}, "unknown mode fast; known are auto, eager, graph, streams"),
        ({"modes": ("graph",)}, "mode graph needs a GPU; on a CPU there are auto and eager"),
        ({"only": "d999"}, "no case of quick has 'd999' in its name; the first is 'd64 2x128 h4 fp32'"),
        ({"resume": True}, "--resume continues a record file; name it with --out"),
        ({"device": "cuda:99"}, "device cuda:99 was asked for, and torch sees"),
        ({"device": "meta"}, "runs on cpu and cuda devices, not on meta"),
        ({"device": "toaster"}, "'toaster' is no device"),
        ({"out": Path("/dev/null/x")}, "/dev/null"),
    ],
)
def test_a_request_that_makes_no_sense(
    request_: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"suite": "quick", "out": None, "device": "cpu", **request_}
    assert main(arguments.pop("suite"), **arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("warpwave: ") and message in error


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["quick", "host"])
def test_suites_on_a_gpu(suite: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert main(suite, out=path, rounds=3, device="cuda") == 0
    for _, m in read_records(path).measurements:
        if m.timing is not None:
            assert m.timing.method in ("graph", "events")
            assert (m.host is None) == (m.contender.startswith("sdpa_") and m.contender != "sdpa_default")
            assert m.peak_memory_bytes is not None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
