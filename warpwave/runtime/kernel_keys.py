"""Cache keys of kernels, remembered on disk beside what they lead to.

To find a compiled kernel on disk Triton needs its key, for which it walks the syntax trees of the kernel and of every
function that it calls: 40 to 60 ms in each process, most of a first call from a warm cache. The key follows from the
sources of warpwave's kernels, from Triton and Python, and from the values of the globals that kernels read. All of that
is part of what a remembered key is found by, or is compared before it is used; what cannot be compared is not
remembered. A process whose sources changed since it read them neither keeps a key nor takes one. Triton's own sources
are in the key that Triton makes of this one.

What ptxas says of its version is part of that key too, and Triton starts it twice in each process to ask. Its words are
remembered as well, by the size and times of the program that said them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from warpwave import kernels
from warpwave.runtime.triton_or_stub import triton

FOLDER = "warpwave-keys"  # in Triton's cache
SOURCES = Path(__file__).parent / "kernels"  # where all device code is
_OURS = ("warpwave.kernels.", "triton.")


@functools.cache
def sources() -> str:
    """What all kernels' keys depend on beside values: a digest of their sources, of Triton's version and Python's.

    Raises:
        OSError: a source cannot be read, or may not be what this process imported.
    """
    digest = hashlib.sha256(f"{triton.__version__} {sys.version}".encode())
    top = str(SOURCES)
    paths = [os.path.join(at, name) for at, _, names in os.walk(top) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        with open(path, "rb") as file:
            source = file.read()
            found = os.fstat(file.fileno())
        # When an inode changed nobody can set back; file systems count time in steps of some milliseconds.
        if max(found.st_mtime, found.st_ctime) > kernels.IMPORTED_AT - 1.0:
            raise OSError(f"{path} is younger than this process")
        digest.update(f"{path[len(top) :]} {len(source)} ".encode())
        digest.update(source)
    return digest.hexdigest()[:32]


def recall(kernel: Any) -> bool:
    """Gives a kernel its key, if it is remembered and what it was made of is unchanged. Whether it has one now."""
    if getattr(kernel, "hash", "") is not None:  # no kernel of a Triton that is known, or it has its key
        return getattr(kernel, "hash", None) is not None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = json.loads(_path(kernel).read_text(encoding="utf-8"))
        values = {}
        for module, name, text in kept["values"]:
            scope = vars(sys.modules[module])
            if repr(scope[name]) != text:
                return False
            values[name, id(scope)] = (scope[name], scope)
        with kernel._hash_lock:
            if kernel.hash is None:
                kernel.used_global_vals = values  # which Triton compares at each launch of its own
                kernel.hash = kept["key"]
        return True
    return False


def keep(kernel: Any) -> None:
    """Remembers the key that Triton made for a kernel."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        values = [
            (scope["__name__"], name, repr(value)) for (name, _), (value, scope) in kernel.used_global_vals.items()
        ]
        if any(" at 0x" in text or not module.startswith(_OURS) for module, _, text in values):
            return
        _write(_path(kernel), {"key": kernel.cache_key, "values": values})


def recall_ptxas(arch: int) -> bool:
    """Tells Triton what its ptxas says of itself, if that is remembered of the same program. Whether it was.

    Args:
        arch: as Triton counts them: 90.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        kept = json.loads(_path_of_ptxas(arch).read_text(encoding="utf-8"))
        if kept["tools"] == _tools() and isinstance(kept["says"], str):
            from triton.backends.nvidia.compiler import get_ptxas_version

            # Triton keeps what the first question was answered, and this is how it lets itself be told.
            settings = vars(triton.knobs.nvidia)
            settings["mock_ptx_version"] = kept["says"]
            try:
                get_ptxas_version(arch)
            finally:
                settings.pop("mock_ptx_version", None)
            return True
    return False


def keep_ptxas(arch: int) -> None:
    """Remembers what ptxas told Triton."""
    with contextlib.suppress(OSError, TypeError, AttributeError, ImportError):
        tools = _tools()
        from triton.backends.nvidia.compiler import get_ptxas_version

        _write(_path_of_ptxas(arch), {"tools": tools, "says": get_ptxas_version(arch)})


def _tools() -> list[list[Any]]:
    """The programs that Triton comes with, as the file system knows them.

    Raises:
        AttributeError: others are to be used.
    """
    if vars(triton.knobs.nvidia) or any(name.startswith(("TRITON_PTXAS", "TRITON_MOCK")) for name in os.environ):
        raise AttributeError("ptxas")
    found = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    stats = [(str(path), path.stat()) for path in found]
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for path, stat in stats]


def _path_of_ptxas(arch: int) -> Path:
    return Path(triton.knobs.cache.dir) / FOLDER / f"ptxas-{triton.__version__}-{arch}.json"


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(file.name, path)


def _path(kernel: Any) -> Path:
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if not name.startswith(_OURS):
        raise AttributeError(name)  # whose sources are not in the digest
    return Path(triton.knobs.cache.dir) / FOLDER / sources() / f"{name}.json"
