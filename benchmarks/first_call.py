"""The time of a process's first call on a GPU, with an empty and with a filled cache of compiled kernels.

    python -m benchmarks.first_call OUT.json [--repeats 3] [--filled 1] [--calls causal decode] [--other FOLDER]

Each measurement is a fresh process that imports torch, starts CUDA, imports warpwave, and makes a call twice. Its
figures are the seconds of `import torch`, of the start of CUDA, of `import warpwave`, and of the first and the second
call with the device's work. A process with an empty cache compiles; the next ones find its files. With `--other`,
processes of this tree and of another one take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from warpwave.workbench.bench import environment

PREPARE = """
import json, time
begin = time.perf_counter()
import torch
torch_s = time.perf_counter() - begin
torch.cuda.init()
q = torch.randn({q}, device="cuda", dtype=torch.bfloat16)
k, v = (torch.randn({k}, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()
cuda_s = time.perf_counter() - begin - torch_s
begin = time.perf_counter()
import warpwave
imported_s = time.perf_counter() - begin
calls_s = []
for _ in range(2):
    begin = time.perf_counter()
    {call}
    torch.cuda.synchronize()
    calls_s.append(time.perf_counter() - begin)
print(json.dumps({{"torch_s": torch_s, "cuda_s": cuda_s, "import_s": imported_s, "calls_s": calls_s}}))
"""
DENSE = {"q": "(2, 2048, 16, 128)", "k": "(2, 2048, 16, 128)"}
CALLS = {
    "causal": {**DENSE, "call": "warpwave.attention(q, k, v, causal=True)"},
    "head_dim 64": {
        "q": "(2, 2048, 16, 64)", "k": "(2, 2048, 16, 64)", "call": "warpwave.attention(q, k, v)",
    },
    "softcap, window": {**DENSE, "call": "warpwave.attention(q, k, v, causal=True, window_size=(256, 0), softcap=9.0)"},
    "decode": {"q": "(8, 1, 32, 128)", "k": "(8, 4096, 8, 128)", "call": "warpwave.attention(q, k, v, causal=True)"},
    "gradients": {
        **DENSE,
        "call": "warpwave.attention(*(t.requires_grad_() for t in (q, k, v)), causal=True).sum().backward()",
    },
}  # fmt: skip


def measured(call: dict[str, str], cache: Path, tree: Path) -> dict[str, Any]:
    """Returns the figures of one process."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", PREPARE.format(**call)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measures the calls and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=3, help="caches that are filled")
    parser.add_argument("--filled", type=int, default=1, help="processes of a tree with each filled cache")
    parser.add_argument("--calls", nargs="+", default=[*CALLS], choices=[*CALLS])
    parser.add_argument("--other", type=Path, help="another tree of the package")
    given = parser.parse_args()
    trees = {"this": Path(__file__).parents[1]} | ({} if given.other is None else {"other": given.other.resolve()})
    rows: list[dict[str, Any]] = []

    def add(name: str, cached: str, cache: Path, tree: str) -> None:
        figures = measured(CALLS[name], cache, trees[tree])
        rows.append({"call": name, "cache": cached, **({"tree": tree} if given.other else {}), **figures})
        print(json.dumps(rows[-1]), flush=True)

    for name, _ in product(given.calls, range(given.repeats)):
        with ExitStack() as stack:
            caches = {tree: Path(stack.enter_context(tempfile.TemporaryDirectory())) for tree in trees}
            for cached in ("empty", *["filled"] * given.filled):
                for tree, cache in caches.items():
                    add(name, cached, cache, tree)
    given.out.write_text(json.dumps({"environment": environment.describe("cuda"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
