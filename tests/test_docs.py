"""The documentation: links resolve, snippets run, figures name their records, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import warpwave
from warpwave import dispatch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/records/README.md"]
)
FREE_LINES = (ROOT / "benchmarks" / "records" / "README.md",)
NO_PROSE = ("|", "![", "    ")  # tables, images, indented code
README_WORDS = 700
MAX_COLUMNS = 120

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^<!-- (?!end).*?^<!-- end.*?-->", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def slugs(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}


def test_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text().split())
    assert words <= README_WORDS, f"README.md has {words} words; at most {README_WORDS} are allowed"


def test_readme_names_the_two_commands_that_set_up_everything() -> None:
    commands = re.findall(r"^make (\w+) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*commands, "docs"} <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_short(page: Path) -> None:
    if page in FREE_LINES:
        pytest.skip("a list of records")
    text = GENERATED.sub("", FENCE.sub("", page.read_text()))
    long = [line for line in text.splitlines() if len(line) > MAX_COLUMNS and not line.startswith((*NO_PROSE, "  |"))]
    assert not long, f"{name(page)}: more than {MAX_COLUMNS} columns: {long[0]}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for link in LINK.finditer(FENCE.sub("", page.read_text())):
        if "://" in link["target"]:
            continue
        path, _, anchor = link["target"].partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link['target']}, which does not exist"
        if anchor:
            assert anchor in slugs(target), f"{name(page)} links to {link['target']}, which has no such heading"


def snippets() -> Iterator[tuple[str, str]]:
    """Yields (page, code) of each Python snippet that a reader may paste; what needs a GPU or pytest is left out."""
    for page in PAGES:
        if not page.is_relative_to(DOCS / "notes"):
            for code in PYTHON.findall(page.read_text()):
                if "cuda" not in code:
                    yield name(page), code


def test_snippets_run() -> None:
    found = list(snippets())
    assert {"README.md", "docs/guide/masks.md", "docs/guide/serving.md"} <= {page for page, _ in found}
    program = "\n".join(
        f"try:\n    exec(compile({code!r}, {page!r}, 'exec'), {{}})\nexcept Exception as error:\n"
        f"    raise SystemExit(f'{page}: {{type(error).__name__}}: {{error}}')"
        for page, code in found
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_figures_name_records_that_exist() -> None:
    text = (DOCS / "performance.md").read_text()
    records = set(re.findall(r"`(?:R/)?(20\d\d-[^`]+\.(?:jsonl|json|log))`", text))
    assert len(records) > 15
    known = {path.name for path in ROOT.rglob("20??-??-??-*") if ".venv" not in path.parts}
    assert records <= known, f"docs/performance.md names {records - known}, which no folder holds"


def test_the_table_of_kernels_is_the_order_of_the_dispatcher() -> None:
    """Ladder rungs run only by name, and the page says so below its table."""
    rows = re.findall(r"^\| `([\w/]+)` \|", (DOCS / "guide" / "choosing.md").read_text(), re.MULTILINE)
    assert rows == [kernel.NAME for kernel in dispatch.KERNELS if kernel.NAME not in ("tiled", "naive")]


def test_the_reference_has_every_public_name() -> None:
    described = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    public = {f"warpwave.{name}" for name in warpwave.__all__ if name != "__version__"}
    rooms = {path.stem for path in (ROOT / "warpwave/integrations").glob("[a-z]*.py")} - {"caches", "pytorch_flash"}
    public |= {f"warpwave.integrations.{room}" for room in rooms}
    public |= {f"warpwave.workbench.report.training.{name}" for name in ("write_training_page", "TrainingRun")}
    public.add("warpwave.workbench.report.command.check_writable")
    assert set(described) == public | {"warpwave.testing.assert_reaches", "warpwave.testing.Reached"}
    assert len(described) == len(set(described))


def test_code_names_pages_that_exist() -> None:
    sources = [path for room in ("warpwave", "tests", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")]
    for path in [*sources, *(ROOT / "warpwave").rglob("*.toml")]:
        for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|toml)", path.read_text()):
            assert (ROOT / page).exists(), f"{name(path)} names {page}, which does not exist"


@pytest.mark.full  # `.ci/run` builds it by `make docs`
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    missing = [module for module in ("mkdocs", "mkdocstrings", "mkdocstrings_handlers") if not installed(module)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make docs` installs what it needs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    assert "attention_varlen" in (tmp_path / "site" / "api.html").read_text()


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
