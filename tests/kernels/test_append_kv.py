"""The launch that writes new tokens to pages and rotates them, beside torch's indexing."""

from __future__ import annotations

import pytest
import torch

from tests.test_kv_cache import DEVICE, make, tokens
from warpwave import Rotary
from warpwave.kernels import append_kv
from warpwave.kv_cache import new_tokens


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("rotation", ["none", "halves", "interleaved", "part of the head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_writes_what_torch_writes(dtype: torch.dtype, rotation: str, page_size: int, packed: bool) -> None:
    """Bit for bit where nothing turns; else to the last place, for sums may round elsewhere."""
    rotary = {
        "none": None,
        "halves": Rotary.of(24, 64, device=DEVICE),
        "interleaved": Rotary.of(24, 64, interleaved=True, device=DEVICE),
        "part of the head": Rotary.of(10, 64, device=DEVICE),
    }[rotation]
    written = []
    for by_kernel in (True, False):
        cache = make(num_pages=64, page_size=page_size, head_dim=24, head_dim_v=16, dtype=dtype)
        rows = [cache.add() for _ in range(3)]
        for layer in cache.layers:
            layer.k.zero_()
            layer.v.zero_()
        cache.extend(rows, [3, 9, 20])  # not packed, the first new token of the first row has no cell
        counts = [2, 0, 5] if packed else [4, 4, 4]
        shape = (sum(counts),) if packed else (3, 4)
        k, v, q = (tokens(*shape, h, d).to(dtype) for h, d in ((2, 24), (2, 16), (4, 24)))
        ends = torch.tensor([0, 2, 2, 7], dtype=torch.int32, device=DEVICE) if packed else None
        new = new_tokens(cache.layer, k, v, q=q, rows=cache.index(rows), cu_seqlens=ends, rotary=rotary)
        interleaved = rotary is not None and rotary.interleaved
        if by_kernel:
            append_kv.prepare(new, 5, interleaved)(new)
        else:
            append_kv.write_torch(new, interleaved)
        written.append((cache.k, cache.v, *(() if new.q_out is None else (new.q_out,))))
        assert written[-1][0].any()
    for a, b in zip(*written, strict=True):
        if rotary is None:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, atol=1e-6 if dtype == torch.float32 else 0.02, rtol=1e-6)


def test_rotation_turns_by_position() -> None:
    """Two tokens' rotated product depends on how far apart they stand, which is what rotation is for."""
    for interleaved in (False, True):
        rotary = Rotary.of(8, 100, interleaved=interleaved)
        q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

        def score(i: int, j: int, rotary: Rotary = rotary, q: torch.Tensor = q, k: torch.Tensor = k) -> float:
            a, b = (
                append_kv.rotated(x, torch.tensor([p]), rotary.cos, rotary.sin, rotary.interleaved)
                for x, p in ((q, i), (k, j))
            )
            return float((a * b).sum())

        assert abs(score(3, 1) - score(83, 81)) < 1e-4
        assert abs(score(3, 1) - score(3, 2)) > 1e-4
        assert append_kv.rotated(q, torch.tensor([0]), rotary.cos, rotary.sin, interleaved).equal(q)
