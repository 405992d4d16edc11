import time
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch

from warpwave.operands import Operands
from warpwave.problem import AttentionProblem
from warpwave.workbench.bench import measure as module
from warpwave.workbench.bench.contenders import TimeLimit, contenders, time_limit
from warpwave.workbench.bench.measure import Settings, measure
from warpwave.workbench.bench.peers import Peer, PeerUnavailable, Prepared
from warpwave.workbench.bench.timing import CaptureFailed
from warpwave.workbench.bench.workloads import Case, parse_suite
from warpwave.workbench.verify.reference import oracle

CASE: Case = parse_suite(
    "s",
    {
        "description": "d",
        "cases": [{"batch": 1, "seqlen_q": 20, "num_heads_q": 2, "head_dim": 8, "dtype": "float32", "goal": 1.5}],
    },
    source="s",
).cases[0]
CPU = Settings(torch.device("cpu"), rounds=1)


def peer(scale: float = 1.0, **options: Any) -> Peer:
    """The right result, times `scale`."""

    def prepare(problem: AttentionProblem, operands: Operands) -> Prepared:
        out = (oracle(problem, operands).out * scale).float()
        return Prepared(lambda: out, to_out=lambda out: out, kernel="k", eager=True, **options)

    return prepare


def raises(error: BaseException) -> Peer:
    def prepare(problem: AttentionProblem, operands: Operands) -> NoReturn:
        raise error

    return prepare


def test_calls_with_gradients_keep_what_a_backward_takes() -> None:
    """Ours and torch's; a peer that has none refuses."""
    trained = replace(CASE, problem=replace(CASE.problem, requires_grad=True), goal=None)
    field = contenders(("auto",), ("sdpa_default", "flex_attention"))
    called: list[bool] = []

    def watched(prepare: Peer) -> Peer:
        def prepared(problem: AttentionProblem, operands: Operands) -> Prepared:
            found = prepare(problem, operands)

            def call() -> Any:
                out = found.call()
                called.append(out.requires_grad)
                return out

            return replace(found, call=call)

        return prepared

    results = measure(trained, "s", {name: watched(prepare) for name, prepare in field.items()}, CPU)
    refused = {m.contender: m.refusal for m in results if m.refusal}
    assert list(refused) == ["flex_attention"] and "gradients" in refused["flex_attention"]
    assert all(m.verdict is not None and m.verdict.passed and m.timing for m in results if not m.refusal)
    assert called and all(called)


def test_whatever_a_peer_does_the_others_are_timed() -> None:
    def hangs(problem: AttentionProblem, operands: Operands) -> NoReturn:
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # as some tuners do
                continue

    field = {
        "warpwave auto": contenders(("auto",), ())["warpwave auto"],
        "right": peer(),
        "wrong": peer(1.01),
        "wrong and told": peer(1.01, timed_if_wrong=True),
        "absent": raises(PeerUnavailable("not here")),
        "crashes": raises(KeyError("some\nthing")),
        "hangs": hangs,
        "skipped": raises(AssertionError("must not run")),
    }
    told: list[str] = []
    found = measure(
        CASE,
        "s",
        field,
        replace(CPU, peer_timeout_s=0.3),
        skip={"skipped": "it ended the process last time"},
        about_to=told.append,
    )
    assert told == [*(name for name in field if name != "skipped"), ""]
    by_name = {m.contender: m for m in found}
    assert list(by_name) == list(field)
    assert {name for name, m in by_name.items() if m.timing} == {"warpwave auto", "right", "wrong and told"}
    assert by_name["wrong and told"].inaccurate and not by_name["right"].inaccurate
    assert by_name["wrong"].refusal.startswith("wrong, so not timed: ")
    assert by_name["absent"].refusal == "not here"
    assert by_name["crashes"].refusal.startswith("KeyError: ")
    assert by_name["hangs"].refusal == "not ready after 0.3 s"
    assert by_name["skipped"].refusal == "it ended the process last time"
    assert {m.goal for m in found} == {CASE.goal}


def test_a_measurement_for_each_mode() -> None:
    found = measure(CASE, "s", {"right": peer()}, replace(CPU, modes=("auto", "eager")))
    assert [(m.contender, m.mode, m.timing is not None) for m in found] == [
        ("right", "auto", True),
        ("right", "eager", True),
    ]


def test_what_one_mode_cannot_hold_is_timed_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = module.time_modes

    def strict(calls: Any, modes: Any, *, leave_out: Any, **options: Any) -> Any:
        if ("eager", "b") not in leave_out:
            raise CaptureFailed("b", "eager", RuntimeError("operation not permitted\nmore"))
        return real(calls, modes, leave_out=leave_out, **options)

    monkeypatch.setattr(module, "time_modes", strict)
    found = measure(CASE, "s", {"a": peer(), "b": peer()}, replace(CPU, modes=("auto", "eager")))
    assert [(m.contender, m.mode, m.refusal) for m in found] == [
        ("a", "auto", ""),
        ("a", "eager", ""),
        ("b", "auto", ""),
        ("b", "eager", "cannot be captured in a CUDA graph: operation not permitted"),
    ]


def test_the_yardstick_is_asked_for_where_the_goal_needs_it() -> None:
    assert CASE.goal is not None
    case = replace(CASE, goal=replace(CASE.goal, ratio=None, over_launch_us=2.0))
    found = measure(case, "s", {"right": peer()}, CPU)
    assert (
        found[-1].contender == "yardstick empty_kernel" and found[-1].refusal == "there is nothing to launch on a CPU"
    )


def test_a_time_limit_is_no_exception_and_leaves_no_alarm() -> None:
    with pytest.raises(TimeLimit), time_limit(0.05):
        while True:
            time.sleep(0.01)
    assert not issubclass(TimeLimit, Exception)
    with time_limit(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.gpu
def test_memory_of_a_call_is_measured() -> None:
    case = replace(CASE, goal=None)
    (m,) = [
        m for m in measure(case, "s", contenders(("auto",), ()), Settings(torch.device("cuda"), rounds=1)) if m.timing
    ]
    assert m.peak_memory_bytes is not None and m.peak_memory_bytes >= 20 * 2 * 8 * 4


@pytest.mark.gpu
def test_modes_on_a_gpu() -> None:
    settings = Settings(torch.device("cuda"), modes=("auto", "eager", "graph", "streams"), rounds=3)
    for hot, sets in ((True, 1), (False, 64)):
        found = measure(replace(CASE, goal=None, hot=hot), "s", contenders(("auto",), ("sdpa_math",)), settings)
        methods = {m.mode: m.timing.method for m in found if m.timing is not None}
        assert methods == {"auto": "graph", "eager": "eager", "graph": "graph", "streams": "streams"}
        assert {m.timing.input_sets for m in found if m.timing is not None} == {sets}
