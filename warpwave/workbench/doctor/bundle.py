"""The bug report of `warpwave doctor --bundle`: the facts that a maintainer needs, without secrets.

Only listed environment variables are kept, and the home folder is written as ~ everywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpwave.workbench.input_files import Unreadable, read_json
from warpwave.workbench.output_files import CannotWrite, Kind, check_output, write_output

if TYPE_CHECKING:
    from warpwave.workbench.doctor.facts import Facts

# The environment variables in the file. All others are left out.
KEPT_VARIABLES = (
    *("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DEBUG", "TRITON_ALWAYS_COMPILE"),
    *("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBCUDA_PATH", "TRITON_DUMP_DIR"),
    *("TRITON_DISABLE_LINE_INFO", "TRITON_DEFAULT_FP_FUSION", "DISABLE_PTXAS_OPT", "CC", "PATH"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_HOME", "CUDA_MODULE_LOADING", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_LOGS", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("WARPWAVE_DEVICE", "WARPWAVE_COMMIT", "LANG", "LC_ALL"),
)
BUNDLE = Kind("bug report", lambda _: True)  # any file may be overwritten, but only with --force
RECENT_KERNELS = 10
KEPT_METADATA = ("name", "target", "num_warps", "num_stages", "num_ctas", "shared", "tmem_size", "maxnreg", "hash")


def write(path: Path, doctor: Mapping[str, Any], facts: Facts, *, force: bool) -> None:
    """Writes the bundle atomically.

    Raises:
        CannotWrite: the file exists and `force` is false, or it cannot be written.
    """
    check_output(path, BUNDLE)
    if path.exists() and not force:
        raise CannotWrite(f"{path} already exists; give --force to overwrite it, or another name")
    contents = {
        "kind": "warpwave bug report",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "doctor": dict(doctor),
        "cards": [asdict(card) for card in facts.cards or ()],
        "environment": {name: facts.environment[name] for name in KEPT_VARIABLES if name in facts.environment},
        "code": _or_error(_code),
        "explain": _or_error(_explanation),
        "recent_kernels": recent_kernels(Path(facts.cache)),
    }
    text = json.dumps(without_home(contents, os.path.expanduser("~")), indent=1, default=str) + "\n"
    write_output(path, text, BUNDLE, replace=force)


def without_home(value: Any, home: str) -> Any:
    """Returns plain data with the home folder replaced by ~ in every string."""
    if isinstance(value, str):
        return value if home == "/" else value.replace(home, "~")
    if isinstance(value, Mapping):
        return {without_home(k, home): without_home(v, home) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_home(item, home) for item in value]
    return value


def recent_kernels(cache: Path) -> list[dict[str, Any]]:
    """Returns Triton's metadata of the last compiled kernels, newest first."""
    try:
        notes = [path for path in cache.glob("*/*.json") if not path.name.startswith("__grp__")]
        notes = sorted(notes, key=lambda path: path.stat().st_mtime, reverse=True)[:RECENT_KERNELS]
    except OSError:  # no cache, or one that another process is clearing
        return []
    kernels = []
    for path in notes:
        with contextlib.suppress(Unreadable):
            noted = read_json(path)
            if isinstance(noted, dict):  # other versions of Triton may write other data
                kernels.append({name: noted[name] for name in KEPT_METADATA if name in noted})
    return kernels


def _or_error(ask: Any) -> Any:
    """Returns the result or the error message, because a report must also work on a broken installation."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _code() -> Any:
    from warpwave.workbench.bench import environment
    from warpwave.workbench.doctor.facts import this_device

    return environment.describe(this_device())


def _explanation() -> str:
    import warpwave
    from warpwave.workbench.doctor.facts import typical_problem

    return str(warpwave.explain(typical_problem()))
