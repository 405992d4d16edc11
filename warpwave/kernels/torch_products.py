"""Matrix products by torch, accumulated in float32 whatever the settings of the process and the caller's contexts are.

Three settings outside a call change what torch computes: autocast casts operands to 16 bits, `fp32_precision` lets
float32 products drop bits (TF32, or bfloat16 on a CPU), and grad mode records a graph. A kernel of torch operations
therefore runs under `plainly`. A float32 product that the process's setting would round is computed in float64: the
setting is process-wide, and changing it, even for the length of a call, changes what other threads compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Runs torch's operations without autograd and without autocast, in this thread."""
    autocast = (
        torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else contextlib.nullcontext()
    )
    with torch.no_grad(), autocast:
        yield


def keeps_float32(device: torch.device) -> bool:
    """Returns whether torch's float32 products keep all bits of their operands under the process's settings. Returns
    False while a graph is compiled, which may run under other settings."""
    if torch.compiler.is_compiling():
        return False
    backends: Any = torch.backends
    backend = backends.cuda.matmul, backends.cudnn
    if device.type != "cuda":
        backend = backends.mkldnn.matmul, backends.mkldnn
    # The setting of an operation takes precedence over its backend's, and that over the setting of all backends.
    settings = (setting.fp32_precision for setting in (*backend, backends))
    return next((chosen for chosen in settings if chosen != "none"), "ieee") == "ieee"


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns `a @ b` in float32, with broadcast batch axes; in float64 if an operand is. A GPU takes 16-bit operands
    unchanged; a CPU would round the result to 16 bits, so its operands are up-cast."""
    if torch.float64 in (a.dtype, b.dtype):
        return a.double() @ b.double()
    if a.is_cuda and a.dtype != torch.float32:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
        b = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
        return torch.bmm(a, b, out_dtype=torch.float32).unflatten(0, batch)
    if keeps_float32(a.device):
        return a.float() @ b.float()
    return (a.double() @ b.double()).float()


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Sets `out` to `a @ b` of each head, (heads, rows, columns); out is float32, or of the operands' dtype."""
    if not _is_one_call(a):
        out.copy_(product(a, b))
    elif a.dtype != torch.float32:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a, b, out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds `a @ b` of each head to `total`, float32 (heads, rows, columns)."""
    if not _is_one_call(a):
        total += product(a, b)
    elif a.dtype != torch.float32:
        torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        torch.baddbmm(total, a, b, out=total)


def _is_one_call(a: torch.Tensor) -> bool:
    """Returns whether torch can write the product of such operands into its destination in one call and in float32."""
    return a.is_cuda and (a.dtype != torch.float32 or keeps_float32(a.device))
