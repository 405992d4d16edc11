"""Builds warpwave as a kernel for Hugging Face's `kernels` library: the package in the layout that `get_kernel` loads.

    python hub_kernel.py --out dist/hub          # or: make hub-kernel
    kernel = kernels.get_local_kernel(Path("dist/hub"))

A hub kernel is loaded from any path, under a name of its own, and several versions may be loaded into one process. The
build therefore makes the imports of the package relative, and gives torch's operators a namespace that contains a hash
of the sources. The workbench, the tests' tools and the integrations with other hosts are left out; FlashAttention-2's
functions, which transformers looks for in an attention kernel, are names of the module.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent
NAME = "warpwave"
BACKENDS = ("cpu", "cuda", "rocm")
LEFT_OUT = ("__main__.py", "workbench/", "testing.py", "integrations/")
KEPT = ("integrations/__init__.py", "integrations/caches.py", "integrations/flash_attn.py")
KERNELS_MINVER = "0.17.0"  # the version that the layout was tested with

_IMPORT = re.compile(rf"^(?P<indent>[ \t]*)from {NAME}(?P<module>[.\w]*) import ", re.MULTILINE)
# The namespace of torch's operators: where it is defined, in names of operators, and where operators are called.
_NAMESPACE = re.compile(rf'(?<=_Library\("){NAME}(?=")|(?<="){NAME}(?=::)|(?<=torch\.ops\.){NAME}(?=\.)')


def sources(package: Path) -> dict[str, str]:
    """Returns path -> text of the modules that a hub kernel needs, without the package's `__init__.py`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name in KEPT or (name != "__init__.py" and not name.startswith(LEFT_OUT)):
            found[name] = path.read_text()
    return found


def relocated(name: str, text: str, namespace: str) -> str:
    """Returns a module's text with relative imports and its own operator namespace.

    Raises:
        ValueError: an absolute import of the package would remain.
    """
    dots = "." * name.count("/") + "."
    text = _IMPORT.sub(lambda m: f"{m['indent']}from {dots}{m['module'].removeprefix('.')} import ", text)
    text = _NAMESPACE.sub(namespace, text)
    left = re.search(rf"\b{NAME}\b", text)  # most modules name the package nowhere else, and need not be parsed
    for node in ast.walk(ast.parse(text)) if left else ():
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules = [node.value] if re.fullmatch(rf"{NAME}(::\w+|(\.\w+)+)", node.value) else []
        if any(re.match(rf"{NAME}\b", module) for module in modules):
            line = getattr(node, "lineno", 0)
            raise ValueError(f"{name}:{line}: {modules[0]} is named absolutely, which a hub kernel cannot import")
    return text


def front(package: Path) -> str:
    """Returns the `__init__.py` of the kernel: the package's public names but for the workbench's, and
    FlashAttention-2's functions."""
    tree = ast.parse((package / "__init__.py").read_text())
    assigned = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Dict, ast.Constant))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    homes = {name: home for name, home in assigned["_HOME"].items() if ".workbench." not in home}
    lines = ['"""warpwave as a kernel of the Hugging Face hub: exact attention on GPUs."""', ""]
    lines += [f"from .{home.removeprefix(f'{NAME}.')} import {name} as {name}" for name, home in homes.items()]
    lines += ["from .integrations.flash_attn import *  # noqa: F403"]
    return "\n".join([*lines, "", f"__version__ = {assigned['__version__']!r}", ""])


def build(out: Path, package: Path = ROOT / NAME) -> list[Path]:
    """Writes the kernel's variants, one per backend, to `out/build`. Variants of an earlier build are replaced.

    Returns:
        The folders of the variants.

    Raises:
        FileExistsError: `out/build` holds something else, which would be lost.
    """
    for path in (out / "build").glob("*"):
        if path.name not in [f"torch-{backend}" for backend in BACKENDS] or not (path / "metadata.json").is_file():
            raise FileExistsError(f"{path} is not a variant of a kernel; pass --out a folder for the build alone")
    texts = sources(package)
    head = front(package)
    digest = hashlib.sha256(repr((head, sorted(texts.items()))).encode()).hexdigest()[:8]
    shutil.rmtree(out / "build", ignore_errors=True)
    variants = []
    for backend in BACKENDS:
        namespace = f"_{NAME}_{backend}_{digest}"
        variant = out / "build" / f"torch-{backend}"
        for name, text in {"__init__.py": head, **texts}.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(relocated(name, text, namespace))
        metadata = {
            "name": NAME, "id": namespace, "version": 1, "license": "Apache-2.0", "kernels-minver": KERNELS_MINVER,
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        shutil.copy(package.parent / "LICENSE", variant / "LICENSE")
        variants.append(variant)
    return variants


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "hub", help="the kernel's repository")
    given = parser.parse_args(arguments)
    for variant in build(given.out):
        size = sum(path.stat().st_size for path in variant.rglob("*") if path.is_file())
        print(f"{variant}  {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
