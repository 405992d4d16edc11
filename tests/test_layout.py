"""What may import what: the rooms of the package, checked on the source of every module."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "warpwave"
MAX_ROOT_MODULES = 16
FAMILIES = (
    "kernels.flash_bwd",
    "kernels.flash_fwd",
    "kernels.hopper.flash_bwd",
    "kernels.hopper.flash_fwd",
    "kernels.hopper.large_head_dim",
    "kernels.ladder",
    "kernels.large_head_dim",
    "kernels.prepass",
    "kernels.split_kv",
    "kernels.three_kernel",
)

# Each list must be exact: a test fails when a module needs an exception that is not here, and when one is not needed.
# (module, imported module): reason.
USES_THE_WORKBENCH = {
    ("__main__", "workbench.entry"): "`python -m warpwave` is the command",
    ("testing", "workbench.bench.correctness"): "`assert_reaches` is the public door to the workbench's timer",
    ("testing", "workbench.bench.inputs"): "as above",
    ("testing", "workbench.bench.timing"): "as above",
    ("testing", "workbench.hardware.catalog"): "as above",
    ("testing", "workbench.model.roofline"): "as above",
}
# (family, imported family): reason.
USES_ANOTHER_FAMILY = {
    ("kernels.flash_bwd", "kernels.prepass"): "zeros for tokens of no packed sequence precede these gradients",
    ("kernels.flash_fwd", "kernels.prepass"): "splitting float32 keys and values is the first launch of this forward",
    ("kernels.hopper.flash_bwd", "kernels.flash_bwd"): "`outrun` asks whether that kernel's joint launch takes a call",
    ("kernels.hopper.flash_bwd", "kernels.prepass"): "packing the mask into bits precedes these gradients",
    ("kernels.hopper.flash_fwd", "kernels.prepass"): "scaling q, and packing the mask into bits, precede this forward",
    ("kernels.large_head_dim", "kernels.hopper.large_head_dim"): "the kernel of latent caches uses its rings of chunks",
    ("kernels.large_head_dim", "kernels.three_kernel"): "`slower_because` compares its time with three_kernel's",
}


class Import(NamedTuple):
    """One import of a module of the package by another; names are relative to `warpwave`."""

    by: str
    of: str
    when: str  # "module", "function", or "types" for type checkers only


def name_of(path: Path) -> str:
    """Returns the dotted name of a module relative to the package, "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(statement: ast.AST) -> Iterator[str]:
    """Yields the modules of the package that an import statement names."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom):
        assert statement.level == 0, "imports are absolute"
        full = [f"{statement.module}.{alias.name}" for alias in statement.names]
        names = [name if name.removeprefix("warpwave.") in MODULES else statement.module or "" for name in full]
    else:
        return
    for name in dict.fromkeys(names):
        if name == "warpwave" or name.startswith("warpwave."):
            yield name.removeprefix("warpwave").removeprefix(".")


def imports(module: str) -> Iterator[Import]:
    """Yields every import of a module, those inside functions included."""

    def walk(node: ast.AST, when: str) -> Iterator[Import]:
        for name in imported(node):
            yield Import(module, name, when)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # which holds no import
                continue
            inner = when
            if isinstance(child, ast.FunctionDef):
                inner = "function"
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                inner = "types"
            yield from walk(child, inner)

    yield from walk(ast.parse(MODULES[module].read_text()), "module")


IMPORTS = [found for module in MODULES for found in imports(module)]


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def family(module: str) -> str:
    """Returns the kernel family of a module, "" outside of the families."""
    return next((name for name in FAMILIES if is_in(module, name)), "")


def test_imports_are_seen_at_every_depth() -> None:
    """Otherwise an empty list of imports would pass every test below."""
    assert Import("api", "checks.calls", "module") in IMPORTS
    assert Import("testing", "", "module") in IMPORTS
    assert Import("workbench.cli", "workbench.bench.run", "function") in IMPORTS
    assert Import("", "workbench.explain.explanation", "types") in IMPORTS
    assert len(IMPORTS) > 500


def test_only_the_listed_modules_import_the_workbench() -> None:
    used = {
        (i.by, i.of)
        for i in IMPORTS
        if is_in(i.of, "workbench") and not is_in(i.by, "workbench") and not (i.by == "" and i.when == "types")
    }
    assert used == set(USES_THE_WORKBENCH)


def test_runtime_imports_no_kernel() -> None:
    assert not [i for i in IMPORTS if is_in(i.by, "runtime") and is_in(i.of, "kernels")]


def test_no_kernel_family_imports_another() -> None:
    pairs = {(family(i.by), family(i.of)) for i in IMPORTS}
    assert {(a, b) for a, b in pairs if a and b and a != b} == set(USES_ANOTHER_FAMILY)


def test_what_families_share_imports_none_of_them() -> None:
    shared = [i for i in IMPORTS if is_in(i.by, "kernels") and not family(i.by)]
    assert not [i for i in shared if family(i.of)]


def test_kernels_know_neither_dispatch_nor_the_doors() -> None:
    above = ("api", "ops", "plans", "dispatch", "autograd")
    assert not [i for i in IMPORTS if i.by.startswith(("kernels", "runtime")) and i.of in above]


def test_every_family_is_a_folder_of_the_package() -> None:
    folders = {name_of(path) for path in ROOT.glob("kernels/**/__init__.py")}
    assert folders == {"kernels", "kernels.hopper", *FAMILIES}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Of imports that run when a module is imported; a package's `__init__` counts like any module."""
    arrows: dict[str, set[str]] = {module: set() for module in MODULES}
    for i in IMPORTS:
        if i.when == "module" and i.by != i.of:
            arrows[i.by].add(i.of)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for other in sorted(arrows[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_root_holds_few_modules() -> None:
    here = [path.name for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    assert len(here) <= MAX_ROOT_MODULES, sorted(here)


def test_nothing_imports_the_integrations_but_themselves() -> None:
    assert not [i for i in IMPORTS if is_in(i.of, "integrations") and not is_in(i.by, "integrations")]


@pytest.mark.parametrize("module", [name for name in MODULES if is_in(name, "integrations")])
def test_an_integration_imports_no_host_at_its_top(module: str) -> None:
    """torch excepted, on which the package stands."""
    tops = [
        node for node in ast.parse(MODULES[module].read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {alias.name if isinstance(node, ast.Import) else node.module or "" for node in tops for alias in node.names}
    own = set(sys.stdlib_module_names) | {"torch", "warpwave"}
    assert {name.split(".")[0] for name in names} <= own
    assert MODULES[module].stem != "torch", "a program in that folder would import it instead of torch"


@pytest.mark.parametrize("room", ["integrations", "kernels", "runtime", "workbench"])
def test_every_room_says_what_it_holds(room: str) -> None:
    for path in (ROOT / room).rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_the_wheel_carries_no_test_data() -> None:
    """The wheel holds every file of the package, so data of tests and of calibrations stays outside of it."""
    allowed = {
        "workbench/bench/suites": {".toml"},
        "workbench/diagnose/cases": {".toml"},
        "workbench/hardware/cards": {".toml"},
        "workbench/hardware/measured": {".json"},
        "workbench/model": {".json"},
        "workbench/model/calibrated": {".json"},
        "workbench/report": {".css", ".html"},
        "workbench/report/shipped": {".jsonl"},
    }
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    data = [path for path in files if path.suffix != ".py" and path.suffix not in allowed.get(str(path.parent), ())]
    assert [str(path) for path in data] == ["py.typed"]
    assert not [
        path for path in files if path.name.startswith(("model_grid", "case_report")) and "suites" in path.parts
    ]
    assert sum((ROOT / path).stat().st_size for path in files) < 4 << 20


def test_a_family_lists_everything_that_is_asked_of_a_kernel() -> None:
    """A name that `__init__` forgets is absent for `getattr(kernel, name, default)`, without an error."""
    from warpwave import dispatch

    optional = {
        "ABLE",
        "Binder",
        "MEANT_FROM",
        "SHARES_TILES",
        "SKIPS_HIDDEN_TILES",
        "default",
        "gradients",
        "notes",
        "outrun",
    }
    for kernel in dispatch.KERNELS:
        home = kernel.__name__.removeprefix("warpwave.")
        for module, path in MODULES.items():
            if module.startswith(f"{home}.") and not module.endswith("config"):
                tree = ast.parse(path.read_text())
                defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
                defined |= {
                    t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
                }
                missing = {name for name in defined & optional if not hasattr(kernel, name)}
                assert not missing, f"{kernel.NAME}: {module} defines {missing}, which its package does not list"
