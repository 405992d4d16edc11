"""large_head_dim's launches for latents on Hopper: their protocols on a CPU, what they refuse, their splits. On a GPU:
tests/conformance/test_large_heads.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance import cases, paged
from tests.conformance.cases import PLAIN
from tests.conformance.datasets import Data
from tests.conformance.gates import forward_references, judge_forward
from tests.kernels.hopper import gluon_on_cpu
from tests.marks import needs_triton, one_in
from warpwave.gpu import Gpu
from warpwave.kernels import partials
from warpwave.kernels.groups import Pages, Window
from warpwave.kernels.large_head_dim import latent_host as latent
from warpwave.operands import CachedOperands, Operands
from warpwave.problem import AttentionProblem
from warpwave.runtime import launch

H200 = replace(Gpu.for_arch("sm_90"), num_sms=3)
LATENT = replace(PLAIN, dtype="bfloat16", dims=(136, 72), heads=(4, 1), batch=2, lengths=(1, 300), v_in_k=True)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all heads": {"heads": (16, 1), "dims": (192, 128), "lengths": (1, 64)},
    "more shares than tiles": {"lengths": (1, 65), "sinks": True},
    "causal": {"causal": "bottom_right", "sinks": True, "dtype": "float16"},
    "top-left causal": {"causal": "top_left"},
    "window": {"window": (100, 0), "dims": (72, 72)},
    "window that shows nothing": {"window": (5, 0), "causal": "top_left", "sinks": True},
    "one key": {"lengths": (1, 1)},
}


# A wide piece is stored box after box; the emulated memory is by rows.
FAKES: dict[str, Any] = {
    "meet_neighbors": lambda threads: None,
    "box_of": lambda piece, i, k_map: piece.slice(64 * i, 64, dim=1).reshape([1, 1, 64, 64]),
}
DEEPSEEK = AttentionProblem(batch=16, seqlen_q=1, seqlen_k=4096, num_heads_q=16, num_heads_kv=1, head_dim=576,
                            head_dim_v=512, dtype="bfloat16", softmax_scale=0.04)  # fmt: skip


def in_pages(call: cases.Call, page_size: int, used: list[int]) -> tuple[AttentionProblem, CachedOperands]:
    """The call's keys in pages that lie in no order, of which sequence b has `used[b]`, NaN wherever no key is."""
    k = call.operands.k
    batch, length, _, width = k.shape
    pages = -(-length // page_size)
    order = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(0))
    table = order[: batch * pages].view(batch, pages).to(torch.int32)
    pool = torch.full((len(order), page_size, 1, width), torch.nan, dtype=k.dtype)
    for b in range(batch):
        for key in range(used[b]):
            pool[table[b, key // page_size], key % page_size] = k[b, key]
    problem = replace(call.problem, page_size=page_size)
    cached = CachedOperands(call.operands.q, pool, pool[..., : problem.head_dim_v], page_table=table,
                            seqused_k=torch.tensor(used, dtype=torch.int32), sinks=call.operands.sinks)  # fmt: skip
    return problem, cached


def device_modules() -> tuple[Any, ...]:
    """The modules of the device functions of both launches."""
    from warpwave.kernels.hopper import parts, rows, scheduler, softmax
    from warpwave.kernels.hopper.large_head_dim import roles
    from warpwave.kernels.large_head_dim import latent_device, latent_keys, latent_rows_device

    return (latent_device, latent_rows_device, latent_keys, roles, scheduler, parts, rows, softmax)


def on_cpu(
    problem: AttentionProblem, operands: Any, num_splits: int, rows: int = latent.FEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the source of the kernel, and the merge as Triton's interpreter runs it."""
    modules = device_modules()

    out, lse = gluon_on_cpu.unwritten(problem, operands.q)
    acc, state = partials.allocate(problem, num_splits, "cpu") if num_splits > 1 else (None, None)
    for tensor in (acc, state):
        if tensor is not None:
            tensor.fill_(torch.nan)
    arguments = (*operands[:3], out, lse, acc, state, *operands[3:], *[None] * (12 - len(operands)))
    spec, _ = latent.specify(problem, H200, operands, arguments, rows, num_splits)
    gluon_on_cpu.run_launch(spec, modules, spec.grid, {name: lambda fake=fake: fake for name, fake in FAKES.items()})
    if num_splits > 1:
        merge = latent.specify_merge(problem, num_splits, acc, state, out, lse, operands.sinks)
        merge = merge._replace(constants=dict(merge.constants) | {"LAUNCHED_AHEAD": False})
        launch.bind(merge)(*merge.tensors)
    return out, lse


def of_latent(features: dict[str, Any], data: Data) -> cases.Call:
    """A call whose v is the first columns of its k."""
    return cases.build(replace(LATENT, **features), data, torch.device("cpu"))


@one_in(4)
@needs_triton
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("features", "data"), [(f, "sharp" if i % 2 else "normal") for i, f in enumerate(CALLS)])
def test_the_protocol_on_a_cpu(features: str, data: Data, num_splits: int) -> None:
    """The source of the roles, every step and barrier where the kernel has it, NaN in memory that nobody wrote."""
    call = of_latent(CALLS[features], data)
    problem = replace(call.problem, return_lse=True)
    assert not latent.cannot(problem, H200, latent.FEW)
    out, lse = on_cpu(problem, call.operands, num_splits)
    verdict = judge_forward(problem, forward_references(problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


MANY_ROWS: dict[str, dict[str, Any]] = {
    "32 heads": {"heads": (32, 1)},
    "a second tile of rows": {"heads": (16, 1), "lengths": (5, 300), "causal": "bottom_right", "sinks": True},
    "heads that do not divide a tile": {"heads": (24, 1), "lengths": (7, 65), "causal": "bottom_right"},
    "more shares than tiles": {"heads": (20, 1), "lengths": (2, 65), "sinks": True, "dtype": "float16"},
    "top-left causal": {"heads": (8, 1), "lengths": (20, 130), "causal": "top_left"},
    "window": {"heads": (24, 1), "lengths": (9, 400), "window": (100, 0)},
    "window that shows nothing": {"heads": (32, 1), "lengths": (3, 300), "window": (5, 0), "causal": "top_left",
                                  "sinks": True},
    "more queries than keys": {"heads": (8, 1), "lengths": (90, 70), "causal": "bottom_right", "sinks": True},
    "one key": {"heads": (32, 1), "lengths": (1, 1), "dims": (264, 256)},
    "six pieces": {"heads": (32, 1), "dims": (448, 384)},
}  # fmt: skip


@one_in(4)
@needs_triton
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("features", "data"), [(f, "sharp" if i % 2 else "normal") for i, f in enumerate(MANY_ROWS)])
def test_the_protocol_of_many_rows_on_a_cpu(features: str, data: Data, num_splits: int) -> None:
    """The same for blocks of 64 rows, whose queries see different keys."""
    call = of_latent({"dims": (136, 128)} | MANY_ROWS[features], data)
    problem = replace(call.problem, return_lse=True)
    assert not latent.cannot(problem, H200, latent.MANY)
    out, lse = on_cpu(problem, call.operands, num_splits, latent.MANY)
    verdict = judge_forward(problem, forward_references(problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)


@one_in(4)
@needs_triton
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [latent.FEW, latent.MANY])
def test_pages_that_lie_in_no_order(rows: int, page_size: int, num_splits: int) -> None:
    """The latent's bits from pages are those of the same keys side by side; a sequence may have none."""
    many = {"lengths": (17, 300), "causal": "bottom_right", "dims": (136, 128)}
    call = of_latent({"lengths": (1, 300), "batch": 3, "sinks": True} | (many if rows == latent.MANY else {}), "normal")
    used = [300, 0, 77]
    problem, cached = in_pages(call, page_size, used)
    problem = replace(problem, return_lse=True)
    out, lse = on_cpu(problem, cached, num_splits, rows)
    for b, length in enumerate(used):
        alone = call.operands._replace(**{n: getattr(call.operands, n)[b : b + 1] for n in ("q", "k", "v")})
        if length == 0:
            assert torch.equal(out[b], torch.zeros_like(out[b]))
            continue
        alone = alone._replace(k=alone.k[:, :length], v=alone.v[:, :length])
        one = replace(call.problem, batch=1, seqlen_k=length, return_lse=True)
        expected, of_lse = on_cpu(one, alone, num_splits, rows)
        assert torch.equal(out[b], expected[0]), b
        assert torch.equal(lse[b], of_lse[0]), b


@one_in(2)
@needs_triton
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("mask", [{"causal": "bottom_right", "sinks": True}, {"window": (90, 0)}, {}], ids=str)
def test_packed_queries(mask: dict[str, Any], num_splits: int) -> None:
    """Tiles of 64 rows that begin and end anywhere in a sequence, and slots without rows."""
    lengths = ((3, 200), (0, 77), (1, 300), (20, 64), (5, 0), (9, 9))
    case = paged.PagedCase(
        16, "bfloat16", (136, 128), (24, 1), lengths, packed=True, max_seqlen_k=304, v_in_k=True, **mask
    )
    call = paged.build(case, "normal", torch.device("cpu"))
    operands: Any = call.operands
    problem = replace(call.problem, return_lse=True)
    assert not latent.cannot(problem, H200, latent.MANY)
    out, lse = on_cpu(problem, operands, num_splits, latent.MANY)
    verdict = judge_forward(problem, forward_references(problem, operands), out, lse)
    assert verdict.passed, str(verdict)


@needs_triton
@pytest.mark.parametrize("offsets", [[0, 100, 0, 40], [90, 3, 70, 100], [-5, 200, 1, -1]], ids=str)
def test_offsets_that_do_not_ascend(offsets: list[int]) -> None:
    """No program has rows before a sequence's first: their heads, as remainders, would be negative."""
    from warpwave.kernels.large_head_dim import latent_rows_device

    modules = {m.__name__: m for m in device_modules()}
    queries, heads, batch = 100, 24, len(offsets) - 1
    cu_seqlens = gluon_on_cpu.Pointer(torch.tensor(offsets))
    slots = queries * heads // latent.MANY + batch
    for slot in range(slots):
        device = gluon_on_cpu.functions(modules, gluon_on_cpu.Block(slot, slots))[latent_rows_device.__name__]
        tile = device.tile_of(device.Sequences(cu_seqlens, 100, queries, batch, True), heads, 1)
        last = min(int(tile.row_first) + latent.MANY, int(tile.seqlen_q) * heads)
        if tile.row_first < last:
            first = int(tile.q_begin) * heads
            assert 0 <= tile.row_first and 0 <= first and first + last <= queries * heads, slot


@needs_triton
@pytest.mark.parametrize(
    ("rows", "features", "unseen"),
    [
        (latent.FEW, {"window": (100, 0)}, slice(0, 199)),
        (latent.MANY, {"lengths": (17, 300), "causal": "top_left", "dims": (136, 128)}, slice(17, 64)),
    ],
)
def test_what_lies_beside_the_keys_has_no_effect(rows: int, features: dict[str, Any], unseen: slice) -> None:
    """NaN in keys that no query sees, also in a step of 64 keys of which it sees others."""
    call = of_latent(features, "normal")
    problem = replace(call.problem, return_lse=True)
    clean = on_cpu(problem, call.operands, 2, rows)
    call.operands.k[:, unseen] = torch.nan
    found = on_cpu(problem, call.operands, 2, rows)
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))


@needs_triton
def test_shares_are_even() -> None:
    """Every step of 64 keys is one share's, and no share has two more than another."""
    from warpwave.kernels.large_head_dim import latent_keys

    modules = {m.__name__: m for m in device_modules()}
    pages, window = Pages(None, None, None, 0, 0, 0, 0, False), Window(0, 0, False, False, False)
    for length, splits in ((1, 3), (64, 1), (640, 3), (4096, 16), (4100, 16), (128, 5)):
        ends, sizes = [0], []
        for split in range(splits):
            keys = gluon_on_cpu.functions(modules, gluon_on_cpu.Block(0, 1))[latent_keys.__name__]
            one, query = torch.tensor(1), torch.tensor(0)
            share = keys.share_of(pages, window, 1, length, one, torch.tensor(split), splits, query, query)
            assert int(share.first) == ends[-1]
            ends.append(int(share.last))
            sizes.append((int(share.last) - int(share.first)) // 64)
        assert ends[-1] == -(-length // 64) * 64
        assert max(sizes) - min(sizes) <= 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float32"}, "float32"),
    ({"seqlen_q": 2}, "several queries"),
    ({"num_heads_q": 32}, "more than 16 query heads"),
    ({"num_heads_q": 16, "num_heads_kv": 2}, "several heads of keys"),
    ({"softcap": 30.0}, "softcap"),
    ({"page_size": 8}, "pages of 8"),
    ({"head_dim": 580}, "head_dim 580"),
    ({"head_dim": 1024}, "does not fit"),
    ({"head_dim": 512, "head_dim_v": 576}, "values wider than keys"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_it_refuses(changes: dict[str, Any], text: str) -> None:
    assert not latent.cannot(DEEPSEEK, H200, latent.FEW)
    assert any(text in reason for reason in latent.cannot(replace(DEEPSEEK, **changes), H200, latent.FEW))


def test_another_gpu_and_another_v_take_the_portable_launch() -> None:
    assert latent.cannot(DEEPSEEK, Gpu.for_arch("sm_100"), latent.FEW)
    k = torch.zeros(16, 64, 1, 576, dtype=torch.bfloat16)
    q = torch.zeros(16, 1, 16, 576, dtype=torch.bfloat16)
    one = Operands(q, k, k[..., :512])
    assert latent.takes(DEEPSEEK, H200, one, latent.FEW)
    assert not latent.takes(DEEPSEEK, H200, one._replace(v=k.clone()[..., :512]), latent.FEW)
    misaligned = one._replace(q=q.flatten()[:-1].new_zeros(q.numel() + 1)[1:].view(q.shape))
    assert not latent.takes(DEEPSEEK, H200, misaligned, latent.FEW)


def test_two_blocks_share_a_multiprocessor() -> None:
    for head_dim, head_dim_v in ((576, 512), (640, 640), (320, 256), (72, 40)):
        problem = replace(DEEPSEEK, head_dim=head_dim, head_dim_v=head_dim_v)
        assert latent.stages(problem, H200) >= latent.boxes(problem)
        assert 2 * (latent.smem_bytes(problem, H200, latent.FEW) + 1024) <= H200.smem_per_block_bytes + 1024
