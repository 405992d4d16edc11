"""Small calls of every kernel through its branches, and their gradients, one after another in one process, to be run
under a sanitizer.

    compute-sanitizer --tool memcheck  python -m tests.sanitized_calls           (or synccheck, racecheck, initcheck)
    compute-sanitizer --tool racecheck python -m tests.sanitized_calls hopper    kernels with "hopper" in the name
    compute-sanitizer --tool memcheck  python -m tests.sanitized_calls "" "swizzles 3:"     a twelfth of 252 calls whose
                                                                             tiles of K and V pad to other widths
    TRITON_INSTRUMENTATION_MODE=consan python -m tests.sanitized_calls hopper plain    and one call; Triton's own check
                                                                             of concurrent access, slow to compile

compute-sanitizer comes with CUDA, or as the wheel nvidia-cuda-sanitizer-api of the driver's CUDA version. It sees every
access of every thread, hence the reduced grids. Each result is compared with the eager kernel's; exit code 1 if one is
wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import Call, Case
from tests.conformance.harness import DEVICE, GPU, KERNELS, run
from tests.conformance.test_gradients import FORWARDS, NAMES, differentiate, upstream
from warpwave import dispatch

PLAIN = Case(dtype="bfloat16", lengths=(200, 300), heads=(4, 2), batch=2)
CALLS: dict[str, Case] = {
    "plain": PLAIN,
    # Enough rows for the tiles of large calls, of 192 queries in hopper/flash_fwd.
    "many rows": replace(PLAIN, lengths=(192, 300), heads=(12, 12), batch=11),
    "causal, head_dim 128": replace(PLAIN, dims=(128, 128), causal="bottom_right"),
    "window, sinks, softcap": replace(PLAIN, window=(64, 32), sinks=True, softcap=20.0),
    "packed, causal": replace(PLAIN, packed=True, batch=4, causal="bottom_right", dims=(80, 80)),
    "mask, bias, ALiBi": replace(PLAIN, mask="full", bias="full", alibi="heads"),
    "one query": replace(PLAIN, lengths=(1, 900), dims=(128, 128)),
    "a latent": replace(PLAIN, dims=(576, 512), heads=(16, 1), lengths=(1, 900), v_in_k=True),
    "a latent, several queries": replace(
        PLAIN, dims=(576, 512), heads=(24, 1), lengths=(7, 900), causal="bottom_right", v_in_k=True
    ),
    "head_dim 192, 128": replace(PLAIN, dims=(192, 128)),
    "head_dim 256": replace(PLAIN, dims=(256, 256), causal="bottom_right"),
    "head_dim 512": replace(PLAIN, dims=(512, 512), causal="bottom_right"),
    "float32": replace(PLAIN, dtype="float32"),
    "float32, head_dim 128, causal": replace(PLAIN, dtype="float32", dims=(128, 128), causal="bottom_right"),
}
NARROW = [(d, dv) for d in (17, 24, 31, 33, 34, 36, 40, 59, 65, 66, 72, 129, 130, 200) for dv in (1, 8, 9, 16, 17, 32)]
SWIZZLES = {
    f"swizzles {i % 12}: head_dim {dims[0]}, {dims[1]}": replace(
        PLAIN, dtype=("bfloat16", "float16")[i % 2], dims=dims, lengths=((65, 65), (257, 300))[i // 2 % 2],
        causal=("", "bottom_right")[i // 4 % 2],
    )
    for i, dims in enumerate(NARROW)
}  # fmt: skip
PORTABLE = ("flash_fwd", "split_kv", "large_head_dim")
# Of the largest element: what a lost or raced tile exceeds by far.
TOLERANCE = {"float16": 5e-3, "bfloat16": 2e-2, "float32": 1e-4}


def main(wanted: str = "", only: str = "") -> int:
    """Returns the exit code."""
    if DEVICE.type != "cuda":
        print("sanitizers watch GPU kernels, and there is no GPU", file=sys.stderr)
        return 2
    wrong = 0
    for name, module in KERNELS.items():
        if wanted not in name or name in ("eager", "torch_sdpa"):
            continue
        for title, case in (SWIZZLES if only.startswith("swizzles") else CALLS).items():
            call = cases.build(case, "normal", DEVICE)
            if only not in title or module.why_not(call.problem, GPU):
                continue
            if title in SWIZZLES and name not in PORTABLE:
                continue
            for what, found, exact in results(name, call):
                torch.cuda.synchronize()
                error = ((found - exact).abs().max() / exact.abs().max()).item()
                passed = error <= TOLERANCE[case.dtype]
                wrong += not passed
                print(f"{'pass' if passed else 'FAIL'}  {name:22} {title:30} {what:13} {error:.1e}", flush=True)
    return int(wrong > 0)


def results(kernel: str, call: Call) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields out, and the gradients if the kernel has any, each with its name and the eager kernel's."""
    yield "out", run(kernel, call)[0].float(), run("eager", call)[0].float()
    forward, _ = dispatch.forward_of(replace(call.problem, requires_grad=True), GPU, kernel)
    if kernel not in FORWARDS or KERNELS[kernel].why_not(forward, GPU):
        return
    dout, dlse = upstream(call)
    found, exact = (differentiate(name, call, dout, dlse) for name in (kernel, "eager"))
    for name, a, b in zip(NAMES, found, exact, strict=True):
        if a is not None and b is not None:
            yield f"d{name}", a.float(), b.float()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
