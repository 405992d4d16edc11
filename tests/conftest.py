"""Selects the device of the tests, and prints a summary of every run: the tests of each kernel and their results, and
how many of the seeded faults were caught.

Without a GPU the Triton kernels run in Triton's interpreter, which must be selected before triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
import torch

from tests import interpreter
from tests.conformance.datasets import DATA_SETS

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:  # published for Linux only
        interpreter.patch()

# Kernels that nobody is served by unasked, and one in how many of their tests runs without a GPU in `make test`; all of
# them run in `make test-full`, and on a GPU. An interpreted call takes tiled half a second and naive more than one. No
# multiples of 3, so that the sample meets all three data sets.
SAMPLED = {"tiled": 80, "naive": 160, "split_kv": 100, "large_head_dim": 100, "three_kernel": 100}
# Without a GPU Hopper's kernels refuse every call of the conformance suite, for one reason.
SAMPLED_REFUSALS = 10
# Of flash_fwd every case of these, of the grid every third, runs without a GPU in `make test`, with one of the data
# sets or types, in turn: an interpreted call takes a third of a second, and seconds with products of rounded parts.
IN_TURN = {"test_case_grid[": 3 * len(DATA_SETS), "test_tile_edges[": len(DATA_SETS), "test_retrieval[": 3}
MAX_SKIPPED = 0.05  # of a kernel's tests; more means that the suite no longer says what it seems to say


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, default=100, help="steps of the paged cache's soak test (100000 on a GPU)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KernelAccount(), "kernel_account")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried = {
        outcome: sum("test_mutant_is_caught[" in r.nodeid for r in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed")
    }
    if total := sum(tried.values()):
        terminalreporter.section("seeded faults")
        terminalreporter.line(f"caught {tried['passed']} of {total} tried")


@pytest.hookimpl(tryfirst=True)  # before -m selects by the markers set here
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a GPU; torch sees none")
    seen: Counter[str] = Counter()
    for item in items:
        if torch.cuda.is_available() and item.path.parent.name == "conformance":
            item.add_marker(pytest.mark.gpu)  # the same tests, on the device and with the grid of a GPU
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        kernel = parameters.get("kernel")
        if isinstance(kernel, str):
            item.user_properties.append(("kernel", kernel))
            refused = kernel.startswith("hopper/") and item.path.parent.name == "conformance"
            every = SAMPLED_REFUSALS if refused else SAMPLED.get(kernel, 1)
            if seen[kernel] % every and not torch.cuda.is_available():
                item.add_marker(pytest.mark.full)
            seen[kernel] += refused or kernel in SAMPLED
        marked = item.get_closest_marker("one_in")
        every = marked.args[0] if marked else 1
        if kernel == "flash_fwd":
            every = next((n for name, n in IN_TURN.items() if item.name.startswith(name)), every)
        if every > 1 and not item.get_closest_marker("full") and not item.get_closest_marker("gpu"):
            # What a case takes in turn comes one after another.
            test = item.nodeid.partition("[")[0]
            nth, value = divmod(seen[test], every)
            if value != nth % every and not torch.cuda.is_available():
                item.add_marker(pytest.mark.full)
            seen[test] += 1


class KernelAccount:
    """Counts the tests of each kernel from their reports, also under pytest-xdist."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        kernel = properties.get("kernel")
        if kernel is None or not (report.when == "call" or report.outcome != "passed"):
            return
        outcome = "refused" if report.passed and properties.get("refused") else report.outcome
        self.outcomes[str(kernel)][outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[str(kernel)][report.longrepr[2]] += 1

    def too_many_skips(self) -> list[str]:
        return [name for name, n in self.outcomes.items() if n["skipped"] > MAX_SKIPPED * n.total()]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.too_many_skips() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.outcomes:
            return
        terminalreporter.section("kernels")
        for name, n in self.outcomes.items():
            terminalreporter.line(
                f"{name}: attempted {n.total()}, passed {n['passed']}, refused as documented {n['refused']}, "
                f"failed {n['failed']}, skipped {n['skipped']}"
            )
            for reason, count in self.reasons[name].most_common():
                terminalreporter.line(f"    skipped {count}: {reason.removeprefix('Skipped: ')}")
        for name in self.too_many_skips():
            terminalreporter.line(f"FAILED: more than {MAX_SKIPPED:.0%} of the tests of {name} were skipped", red=True)
