"""`verify` finds what is wrong, says so and keeps a record: on sound kernels, and on kernels with a seeded fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warpwave import dispatch
from warpwave.gpu import CPU, Gpu
from warpwave.kernels import eager, torch_sdpa
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench import cli
from warpwave.workbench.bench.correctness import Verdict
from warpwave.workbench.bench.records import Measurement, Records, read_records
from warpwave.workbench.bench.timing import Method, Samples
from warpwave.workbench.verify import selfcheck, verify
from warpwave.workbench.verify.verify import Line, Outcome, Speed

ROOT = Path(verify.__file__).parents[3]
DEVICE = torch.device("cpu")


def faulty(name: str, change: Callable[[AttentionProblem, Operands, torch.Tensor], torch.Tensor]) -> Any:
    """eager with a fault in its output, as a kernel of its own."""

    def bind(problem: AttentionProblem, operands: Operands, config: Any) -> Any:
        run = eager.bind(problem, operands, config)

        def run_faulty(operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
            out, lse = run(operands)
            return change(problem, operands, out), lse

        return run_faulty

    return SimpleNamespace(**(vars(eager) | {"NAME": name, "bind": bind}))


def wider_window(problem: AttentionProblem, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    left, right = problem.window_size
    if left < 0:
        return out
    wider = replace(problem, window_size=(left + 1, right))
    return eager.bind(wider, operands, eager.configs(wider, CPU)[0])(operands)[0]


def last_row_unwritten(problem: AttentionProblem, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    out[..., -1, :, :] = torch.empty_like(out[..., -1, :, :])
    return out


def reads_what_is_hidden(problem: AttentionProblem, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    return out + 0 * operands.v.sum()


def checked(module: Any, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(dispatch, "KERNELS", (*dispatch.KERNELS, module))
    outcome = Outcome(CPU)
    verify.check_kernel(module, outcome, DEVICE, lambda line: None)
    return outcome


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (wider_window, "support, window"),
        (last_row_unwritten, "bfloat16 plain"),
        (reads_what_is_hidden, "poisoned keys"),
        (lambda problem, operands, out: out * 1.01, "bfloat16 plain"),
        (lambda problem, operands, out: out.float(), "bfloat16 plain"),
    ],
    ids=["window", "unwritten", "poison", "scaled", "dtype"],
)
def test_a_wrong_kernel_is_caught(change: Any, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "FEATURES_OF_DTYPE", {"bfloat16": ("plain", "window")})
    outcome = checked(faulty(f"faulty-{shown}-{id(change)}", change), monkeypatch)
    assert any(shown in line.what for line in outcome.wrong), outcome.lines
    assert verify.verdict(outcome).startswith("FAILED")
    assert "do not use" in verify.verdict(outcome)


def test_a_kernel_that_raises_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(problem: AttentionProblem, operands: Operands, config: Any) -> Any:
        raise RuntimeError("out of shared memory\nand a long trace")

    monkeypatch.setattr(verify, "FEATURES_OF_DTYPE", {"float32": ("plain", "causal")})
    outcome = checked(SimpleNamespace(**(vars(eager) | {"NAME": "raising", "bind": bind})), monkeypatch)
    assert len(outcome.wrong) == len(outcome.lines) > 2
    assert all(line.detail == "RuntimeError: out of shared memory" for line in outcome.wrong)


def test_the_sound_kernel_passes_what_the_faulty_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "FEATURES_OF_DTYPE", {"bfloat16": ("plain", "window")})
    outcome = Outcome(CPU)
    records = verify.check_kernel(eager, outcome, DEVICE, lambda line: None)
    assert outcome.wrong == []
    assert len(records) == 2
    assert all(m.verdict is not None and m.verdict.passed for m in records)


def test_torch_sdpa_passes_the_probes_although_it_hands_nan_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "FEATURES_OF_DTYPE", {"float32": ("plain", "mask")})
    outcome = checked(torch_sdpa, monkeypatch)
    assert outcome.wrong == []
    assert [line.what for line in outcome.lines if line.what.startswith("poisoned")] == [
        "poisoned keys, hidden keys",
        "poisoned keys, hidden keys, mask",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, where the interpreter is on")
def test_a_fault_in_the_triton_kernel_is_caught_in_the_interpreter(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "warpwave", tmp_path / "warpwave", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "warpwave" / "kernels" / "primitives.py"
    text, low = source.read_text(), "low = seqlen_k - seqlen_q - window_left"
    assert text.count(low) == 1
    source.write_text(text.replace(low, f"{low} + 1"))
    code = """
import torch
from warpwave.workbench.verify import selfcheck, verify
from warpwave.gpu import INTERPRETER
from warpwave.kernels import flash_fwd
outcome = verify.Outcome(INTERPRETER)
verify.FEATURES_OF_DTYPE = {}
verify.PROBES = {"count": (selfcheck.count, ("window", "plain"), True)}
verify.check_kernel(flash_fwd, outcome, torch.device("cpu"), lambda line: print(verify.describe_line(line)))
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert any(
        line.startswith("FAIL") and "count, window" in line and "a wrong number of keys" in line for line in lines
    )
    assert any(line.startswith("pass") and "count, plain" in line for line in lines)


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", selfcheck.FEATURES)
def test_every_feature_makes_a_call_that_describes_itself(feature: str) -> None:
    problem = selfcheck.problem_of(feature, "float16", head_dim=16, lengths=(9, 12))
    operands = selfcheck.operands_of(problem, DEVICE)
    out = selfcheck.call("eager", problem, operands)
    assert out.shape == (*operands.q.shape[:-1], problem.head_dim_v)
    assert out.isfinite().all()
    shown = selfcheck.visible(problem, operands)
    pairs = sum(int(pairs.sum()) for pairs in shown)
    if problem.mask_shape is None and problem.bias_shape is None:
        assert pairs == problem.visible_pairs


def test_memory_is_full_of_nan_within_and_as_before_without() -> None:
    with selfcheck._memory_full_of_nan():
        assert torch.empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# Speed ----------------------------------------------------------------------------------------------------------------

SAMPLES = Samples((10.0, 11.0, 12.0, 10.0, 11.0, 12.0, 10.0, 11.0, 12.0), "events", 3, 1, True)
RIGHT = Verdict(True, "", 1e-3, 1e-2, 1e-3, 1e-2, 64)


def measured(contender: str, problem: AttentionProblem, **change: Any) -> Measurement:
    values: dict[str, Any] = {"suite": "forward", "case": "c", "problem": problem, "contender": contender}
    return Measurement(**(values | {"verdict": RIGHT, "timing": SAMPLES} | change))


def test_the_record_of_the_same_card_is_found_and_the_newest_counts() -> None:
    a, b = selfcheck.problem_of("plain", "bfloat16"), selfcheck.problem_of("causal", "bfloat16")
    environments: dict[str, dict[str, Any]] = {
        "old": {"date": "2026-01-01", "gpu": {"name": "NVIDIA H200"}},
        "new": {"date": "2026-02-01", "gpu": {"name": "NVIDIA H200"}},
        "other": {"date": "2026-03-01", "gpu": {"name": "NVIDIA L4"}},
        "cpu": {"date": "2026-03-01", "gpu": None},
    }
    newest = measured("warpwave auto", a, case="newest")
    measurements = [
        ("old", measured("warpwave auto", a)),
        ("new", newest),
        ("new", measured("sdpa_default", a)),
        ("new", measured("warpwave eager", a)),
        ("old", measured("warpwave auto", b)),
        ("other", measured("warpwave auto", a)),
        ("cpu", measured("warpwave auto", a)),
        ("new", measured("warpwave auto", selfcheck.problem_of("window", "float16"), mode="streams")),
    ]
    found = verify.shipped_cases(Records(environments, measurements), "NVIDIA H200")
    assert [ours.problem for ours, _ in found] == [a, b]
    assert found[0][0] is newest
    assert found[0][1] is not None
    assert found[1][1] is None
    assert verify.shipped_cases(Records(environments, measurements), "NVIDIA B200") == []


def speed(us: float, method: Method = "events") -> Speed:
    now = replace(SAMPLES, samples_us=(us,) * 9, method=method)
    return Speed(f"case of {us}", now, replace(SAMPLES, samples_us=(100.0,) * 9), None, None)


def test_the_sentence_says_right_and_how_fast() -> None:
    h200 = Gpu("NVIDIA H200", "nvidia", "sm_90", 1 << 17, 255, 132, 32)
    outcome = Outcome(h200, [Line("flash_fwd", "plain", True, "")], speeds=[speed(102.0), speed(98.0)])
    text = verify.verdict(outcome)
    assert "All of 1 check passed on NVIDIA H200" in text
    assert "1.00 x the shipped record's speed" in text
    assert "0.98 x at the least" in text
    outcome.speeds.append(speed(140.0))
    assert "1 of them slower" in verify.verdict(outcome)
    outcome.lines.append(Line("naive", "mask", False, "RMS"))
    assert verify.verdict(outcome).startswith("FAILED: 1 of 2 checks found wrong results of naive: do not use it")
    outcome.broken = "after naive, mask the GPU answers nothing"
    assert "the remaining checks did not run" in verify.verdict(outcome)


def test_times_by_different_methods_are_not_compared() -> None:
    text = verify.describe_speed(speed(5.0, method="graph"))
    assert "cannot be compared" in text
    outcome = Outcome(CPU, [Line("a", "b", True, "")], speeds=[speed(5.0, method="graph")])
    assert "no time can be compared" in verify.verdict(outcome)


# The command ----------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["warpwave", "verify", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_command_writes_a_record_and_never_over_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(verify, "FEATURES_OF_DTYPE", {"float32": ("plain",)})
    path = tmp_path / "record.jsonl"
    assert run(monkeypatch, "--out", str(path), "--kernel", "eager") == 0
    said = capsys.readouterr().out
    assert "pass  eager" in said
    assert "there is no GPU" in said
    records = read_records(path)
    assert [m.contender for _, m in records.measurements] == ["warpwave eager"]
    before = path.read_text()
    assert run(monkeypatch, "--out", str(path)) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == before

    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--json", "--kernel", "eager") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"]
    assert (tmp_path / data["record"]).exists()
    assert data["record"].startswith("warpwave-verify-")


def test_every_kernel_of_a_cpu_passes_every_check(tmp_path: Path) -> None:
    """The command itself, whole, as somebody runs it in a fresh clone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "warpwave", "verify", "--device", "cpu", "--out", str(tmp_path / "r.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "FAIL" not in done.stdout and "checks passed on CPU" in done.stdout
    checked = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("pass")}
    assert checked == {module.NAME for module in dispatch.KERNELS if not module.NEEDS_GPU}
    assert {m.kernel for _, m in read_records(tmp_path / "r.jsonl").measurements} == checked


def test_a_line_of_the_longest_names_stands_in_its_columns() -> None:
    """Names and checks are all known before the first line is printed."""
    names = [module.NAME for module in dispatch.KERNELS]
    lines = [verify.describe_line(Line(name, "float32 plain", True, "exact")) for name in names]
    assert len({line.index("float32 plain") for line in lines}) == len({line.index("exact") for line in lines}) == 1
    assert "hopper/large_head_dim  float32" in "\n".join(lines)


def test_nothing_checked_is_no_success() -> None:
    assert not Outcome(CPU).passed and verify.verdict(Outcome(CPU)).startswith("FAILED: no kernel ran any check")


def test_a_wrong_result_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = faulty("faulty-command", lambda problem, operands, out: out + 1)
    monkeypatch.setattr(verify, "FEATURES_OF_DTYPE", {"float32": ("plain",)})
    monkeypatch.setattr(dispatch, "KERNELS", (*dispatch.KERNELS, module))
    assert run(monkeypatch, "--out", str(tmp_path / "r.jsonl"), "--kernel", "faulty-command") == 1
    said = capsys.readouterr().out
    assert "FAIL  faulty-command" in said
    assert "FAILED" in said
    ((_, m),) = read_records(tmp_path / "r.jsonl").measurements
    assert m.refusal.startswith("wrong: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "nonsense"], "no kernel is called 'nonsense'"),
        (["--out", "file/record.jsonl"], "there is no directory"),  # a folder that is a file
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err


def test_everything_is_compiled_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks will call is what is asked for ahead."""
    bound: list[AttentionProblem] = []

    def bind(problem: AttentionProblem, operands: Operands, config: Any) -> Any:
        bound.append(problem)
        raise RuntimeError("not now")

    module = SimpleNamespace(**(vars(eager) | {"NAME": "ahead", "NEEDS_GPU": True, "bind": bind}))
    jobs = verify.asked_of([module, eager], CPU)
    assert {name for name, _ in jobs} == {"ahead"}  # eager has nothing to compile
    assert len(set(jobs)) == len(jobs)
    monkeypatch.setattr(dispatch, "KERNELS", (*dispatch.KERNELS, module))
    verify.check_kernel(module, Outcome(CPU), DEVICE, lambda line: None)
    assert {replace(p, lengths=None) for p in bound} == {replace(p, lengths=None) for _, p in jobs}


def test_what_fails_to_compile_ahead_stops_nothing(tmp_path: Path) -> None:
    """Processes of their own, the first of which meets a kernel that there is not and the last of which is killed."""
    script = tmp_path / "ahead.py"
    script.write_text("""
import os, signal, torch
from warpwave.workbench.verify import selfcheck, verify
def killed(job, device):
    if job[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    real(job, device)
real, verify._compile_one = verify._compile_one, killed
if __name__ == "__main__":
    p = selfcheck.problem_of("plain", "float32")
    verify.compile_ahead([], torch.device("cpu"))
    verify.compile_ahead([("nonsense", p), ("eager", p)], torch.device("cpu"))
    print("went on")
    verify.compile_ahead([("kill", p), ("eager", p)], torch.device("cpu"))
    print("went on again")
""")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.splitlines() == ["went on", "went on again"], done.stderr[-2000:]


def test_no_case_is_timed_when_time_is_over() -> None:
    ours = measured("warpwave auto", selfcheck.problem_of("plain", "bfloat16"))
    said: list[str] = []
    records = verify._compare_with_record([(ours, None)] * 2, Outcome(CPU), DEVICE, said.append, until=0.0)
    assert records == []
    assert said == ["not timed  2 more cases: the time limit is reached"]
