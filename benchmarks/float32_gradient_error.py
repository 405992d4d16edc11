"""Emulates Hopper's float32 gradients by two float16 parts on a CPU, and measures their error beside others.

    PYTHONPATH=. python benchmarks/float32_gradient_error.py --keys 16384 --head-dim 64

The matrix unit is that of float32_error.py. The forward's out and log-sum-exp, the parts, their scales, the order of
sums and the correction of dQ are those of `hopper/flash_bwd` (docs/notes/float32.md); tf32x3 is that of `flash_bwd`,
which computes statistics from its own products; float32 rounds every operation of the plain formula.

dQ is that of 64 queries over all keys, dK and dV those of 64 keys over as many queries. Prints the relative error,
|found - exact| / |exact| in Euclidean norms, and the largest RMS error of a row over the largest exact magnitude.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.float32_error import attention, cut, nearest, product
from tests.conformance.datasets import fill

LOG2_E = math.log2(math.e)
ROWS = 64
DATA = ("normal", "sharp", "low", "outliers")
Parts = tuple[Tensor, Tensor]


def halves(x: Tensor, dims: tuple[int, ...] | None) -> tuple[Parts, Tensor]:
    """Returns the parts of x, scaled so that the largest magnitude along `dims` is in [2^14, 2^15), and the scales;
    with None, times 2^15."""
    scale = torch.tensor(2.0**15)
    if dims is not None:
        scale = 2.0 ** (14 - x.abs().amax(dims, keepdim=True).clamp_min(1e-30).log2().floor())
    x = x * scale
    large = x.float().half().double()
    return (large, (x - large).float().half().double()), scale


def of_parts(a: Parts, b: Parts) -> Tensor:
    """Returns the product of a tile: fresh accumulators for the small products and the large one."""
    sums = []
    for pairs in (((1, 0), (0, 1)), ((0, 0),)):
        total = torch.zeros(())
        for i, j in pairs:
            for k in range(0, a[0].shape[1], 16):
                total = cut(total + a[i][:, k : k + 16] @ b[j][k : k + 16])
        sums.append(total)
    return nearest(sums[0] + sums[1])


def transposed(parts: Parts) -> Parts:
    """Returns the parts of the transpose."""
    return parts[0].T, parts[1].T


def tiles(x: Tensor) -> Iterator[Tensor]:
    """Yields 64 rows at a time."""
    return iter(x.split(ROWS))


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Returns lse, out, dq of all queries, and dk and dv of the first 64 keys, in float64."""
    lse, outs, dqs = [], [], []
    dk, dv = torch.zeros(2, ROWS, q.shape[1], dtype=torch.float64)
    for rows, of_rows in zip(q.split(512), dout.split(512), strict=True):
        scores = rows @ k.T * scale
        lse.append(scores.logsumexp(1, keepdim=True))
        p = scores.sub_(lse[-1]).exp_()
        outs.append(p @ v)
        ds = p * (of_rows @ v.T - (of_rows * outs[-1]).sum(1, keepdim=True))
        dqs.append(ds @ k * scale)
        dk += ds[:, :ROWS].T @ rows * scale
        dv += p[:, :ROWS].T @ of_rows
    return torch.cat(lse), torch.cat(outs), torch.cat(dqs), dk, dv


def dq_of_parts(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> Tensor:
    """Returns dQ of 64 queries as split_dq.py computes it, behind the forward in fp16x3."""
    out = attention(q, k, v, "fp16x3")
    (qs, a), (ks, b), (vs, h), (dos, g) = (halves(x, (0, 1)) for x in (q, k, v, dout))
    factor = nearest(torch.tensor(scale * LOG2_E, dtype=torch.float64)) / (a * b)
    all_keys = list(zip(tiles(ks[0]), tiles(ks[1]), tiles(vs[0]), tiles(vs[1]), strict=True))
    x = [nearest(of_parts(qs, transposed((k0, k1))) * factor) for k0, k1, _, _ in all_keys]
    top = torch.stack([one.amax(1) for one in x]).amax(0)[:, None]
    total = nearest(torch.stack([torch.exp2(one - top).sum(1) for one in x]).sum(0))[:, None]
    lse = nearest(nearest(top + total.log2()) / LOG2_E)
    delta = nearest((nearest(dout * g) * nearest(out * h)).sum(1, keepdim=True))
    dq, excess = torch.zeros_like(q), torch.zeros(len(q), 1)
    for scores, (k0, k1, v0, v1) in zip(x, all_keys, strict=True):
        p = nearest(torch.exp2(nearest(scores - nearest(lse * LOG2_E))))
        ds = nearest(p * nearest(of_parts(dos, transposed((v0, v1))) - delta))
        excess = nearest(excess + nearest(ds.sum(1, keepdim=True)))
        of_rows, t = halves(ds, (1,))
        dq = nearest(dq + of_parts(of_rows, (k0, k1)) / (t * g * h * b))
    return (dq - excess / (g * h) * k[:ROWS].mean(0)) * scale


def dkv_of_parts(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, lse: Tensor, out: Tensor, b: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns dK and dV of 64 keys as split_dkv.py computes them, from rounded statistics. b, h: scales of k and v."""
    ks, vs = (halves(x * s / 2.0**15, None)[0] for x, s in ((k, b), (v, h)))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows, of_rows, l_of, o in zip(*map(tiles, (q, dout, lse, out)), strict=True):
        (qs, a), (dos, g) = halves(rows, (0, 1)), halves(of_rows, (0, 1))
        factor = nearest(torch.tensor(scale * LOG2_E, dtype=torch.float64)) / (a * b)
        x = nearest(of_parts(ks, transposed(qs)) * factor)
        p = nearest(torch.exp2(nearest(x - nearest(nearest(l_of) * LOG2_E).T)))
        delta = nearest((nearest(of_rows * g) * nearest(nearest(o) * h)).sum(1))
        ds = nearest(p * nearest(of_parts(vs, transposed(dos)) - delta))
        dv = nearest(dv + of_parts(halves(p, None)[0], dos) / (2.0**15 * g))
        of_keys, t = halves(ds, (1,))
        dk = nearest(dk + of_parts(of_keys, qs) / (t * g * h * a))
    return dk * scale, dv


def in_order(
    times: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Returns dQ from statistics of its own products, summed over tiles of 64 keys."""
    s = [nearest(times(q, one.T, torch.zeros(())) * scale) for one in tiles(k)]
    dp = [times(dout, one.T, torch.zeros(())) for one in tiles(v)]
    top = torch.cat(s, 1).amax(1, keepdim=True)
    e = [nearest(torch.exp(nearest(one - top))) for one in s]
    total = nearest(torch.cat(e, 1).sum(1, keepdim=True))
    delta = nearest(torch.cat([nearest(x * y) for x, y in zip(e, dp, strict=True)], 1).sum(1, keepdim=True))
    delta, dq = nearest(delta / total), torch.zeros_like(q)
    for one, of_value, keys in zip(e, dp, tiles(k), strict=True):
        dq = nearest(times(nearest(nearest(one / total) * nearest(of_value - delta)), keys, dq))
    return dq * scale


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> Tensor:
    """Returns dQ by the plain formula in float32."""
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    p = (q @ k.T * scale).softmax(1)
    dp = dout @ v.T
    return ((p * (dp - (p * dp).sum(1, keepdim=True))) @ k * scale).double()


def plain_dkv(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns dK and dV of the first 64 keys by the plain formula in float32."""
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    ps, all_ds = [], []
    for rows, of_rows in zip(q.split(512), dout.split(512), strict=True):
        p = (rows @ k.T * scale).softmax(1)
        dp = of_rows @ v.T
        ps.append(p[:, :ROWS])
        all_ds.append(ps[-1] * (dp[:, :ROWS] - (p * dp).sum(1, keepdim=True)))
    return (torch.cat(all_ds).T @ q * scale).double(), (torch.cat(ps).T @ dout).double()


def errors(found: Tensor, right: Tensor) -> dict[str, float]:
    """Returns the errors that are printed."""
    off = found - right
    row = (off.square().mean(1).sqrt().max() / right.abs().max()).item()
    return {"relative": (off.norm() / right.norm()).item(), "worst_row": row}


def measure(data: str, keys: int, head_dim: int, seed: int) -> dict[str, Any]:
    """Returns the errors of one data set."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(keys, head_dim, generator=generator) for _ in range(4))
    if data == "outliers":  # a few rows of what arrives, a channel of k and one of v
        dout[::16] *= 1000
        k[:, 3] *= 30
        v[:, 5] *= 30
    else:
        fill(data, head_dim, q, k, v)  # type: ignore[arg-type]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    scale = head_dim**-0.5
    lse, out, dq, dk, dv = exact(q, k, v, dout, scale)
    few = q[:ROWS], k, v, dout[:ROWS], scale
    b, h = (halves(x, (0, 1))[1] for x in (k, v))
    found_dk, found_dv = dkv_of_parts(q, k[:ROWS], v[:ROWS], dout, scale, lse, out, b, h)
    plain_dk, plain_dv = plain_dkv(q, k, v, dout, scale)
    return {
        "data": data, "keys": keys, "head_dim": head_dim,
        "dq": {
            "fp16x3": errors(dq_of_parts(*few), dq[:ROWS]),
            "tf32x3": errors(in_order(lambda x, y, acc: product(x, y, acc, "tf32x3"), *few), dq[:ROWS]),
            "float32": errors(plain(*few), dq[:ROWS]),
        },
        "dk": {"fp16x3": errors(found_dk, dk), "float32": errors(plain_dk, dk)},
        "dv": {"fp16x3": errors(found_dv, dv), "float32": errors(plain_dv, dv)},
    }  # fmt: skip


def main() -> None:
    """Prints a line of JSON for each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--data", nargs="*", default=DATA)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    for data in chosen.data:
        print(json.dumps(measure(data, chosen.keys, chosen.head_dim, chosen.seed)), flush=True)


if __name__ == "__main__":
    main()
