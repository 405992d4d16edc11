"""Dropout: the contract of the random numbers, the kernels that keep it, and what a caller sees of seeds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import warpwave
from tests.conformance.harness import DEVICE, GPU, KERNELS, bits
from tests.recalls import forget, recalled
from warpwave import dispatch, plans
from warpwave.gpu import Gpu
from warpwave.kernels import dropout, eager, flash_bwd, flash_fwd
from warpwave.kernels.flash_bwd import Tile
from warpwave.operands import DropoutOperands, Operands
from warpwave.options import Options
from warpwave.problem import AttentionProblem

__all__ = ["recalled"]  # fixture

SEED = (0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)


def seed_of(seed: int = SEED[0], offset: int = SEED[1]) -> Tensor:
    return torch.tensor([seed, offset], device=DEVICE)


def inputs(batch: int = 2, seqlen: int = 37, heads: int = 2, grad: bool = False) -> list[Tensor]:
    g = torch.Generator(DEVICE).manual_seed(0)
    shape = (batch, seqlen, heads, 16)
    return [torch.randn(shape, generator=g, device=DEVICE).requires_grad_(grad) for _ in range(3)]


# The random numbers ---------------------------------------------------------------------------------------------------

# From the known answers that Random123, the authors' own code, ships: counter, key, words after 7 rounds.
KNOWN_ANSWERS = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    found = dropout.philox(torch.tensor(key), (torch.tensor(counter[0]), torch.tensor(counter[1])))
    assert tuple(int(word) for word in found) == words


def kept_share(p: float) -> float:
    """The probability that a pair is kept: p counts in units of 2^-16."""
    return 1 - round(p * 2**16) / 2**16


def number_of(seed: tuple[int, int], b: int, h: int, i: int, j: int) -> int:
    """The random number of a pair by the contract, in Python's integers."""

    def philox(key: int, first: int, second: int) -> tuple[int, int]:
        for _ in range(7):
            product = 0xD256D193 * first
            first, second = product >> 32 ^ key ^ second, product & 0xFFFFFFFF
            key = key + 0x9E3779B9 & 0xFFFFFFFF
        return first, second

    low, high, offset_low, offset_high = (number >> shift & 0xFFFFFFFF for number in seed for shift in (0, 32))
    of_call, of_pairs = philox(*philox(low, high, offset_low), offset_high)
    u, v = philox(of_call, h, b)
    word = philox(of_pairs, u ^ j - (j & 8), v ^ i - (i & 8))[i >> 3 & 1]
    return word & 0xFFFF if j & 8 else word >> 16


@pytest.mark.parametrize("seed", [SEED, (-1, 5), (0, -(2**63)), (7, 2**32)], ids=str)
def test_the_mask_is_the_contract(seed: tuple[int, int]) -> None:
    """Far positions too: 32 bits of each are in the counter."""
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 3, 4), (2, 1, 8, 7), (70_000, 511, 9, 24), (5, 0, 2_000_000, 3_000_013)]:
        number = number_of(seed, b, h, i, j)
        for p in (0.25, 0.5, 0.9):
            where = [range(n, n + 1) for n in (b, h, i, j)]
            kept = dropout.kept(p, torch.tensor(seed), *where)
            assert kept.item() == (number - ((number & 2**15) << 1) >= round(p * 2**16) - 2**15), (b, h, i, j, p)


def test_any_part_of_the_mask_is_the_same_part() -> None:
    whole = dropout.kept(0.3, seed_of(), range(3), range(4), range(50), range(70))
    assert whole.shape == (3, 4, 50, 70)
    for rows, keys in [(range(13, 37), range(5, 64)), (range(8), range(16, 17)), (range(49, 50), range(70))]:
        part = dropout.kept(0.3, seed_of(), range(1, 3), range(2, 4), rows, keys)
        assert torch.equal(part, whole[1:3, 2:4, rows.start : rows.stop, keys.start : keys.stop])
    assert dropout.kept(0.3, seed_of(), range(2), range(1), range(0), range(9)).shape == (2, 1, 0, 9)


STATISTICS: dict[str, Any] = {"batch": range(4), "heads": range(4), "rows": range(256), "keys": range(256)}


@functools.cache
def sample(p: float, seed: int = 11, offset: int = 0) -> Tensor:
    """Mask of 2^20 pairs as +1 and -1 / variance 1, to correlate."""
    kept = dropout.kept(p, torch.tensor([seed, offset]), *STATISTICS.values()).float()
    return (kept - (1 - p)) / math.sqrt(p * (1 - p))


# With 60 comparisons of 5 standard deviations, one run of 30,000 would fail by chance; the seeds are fixed.
DEVIATIONS = 5.0


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_rate(p: float) -> None:
    """Over all pairs, and over each row, key, head and item: as many are dropped as independent draws would drop."""
    found = sample(p)
    for axes in [(0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2), (3,)]:
        sums = found.sum(axes) / math.sqrt(math.prod(found.shape[axis] for axis in axes))
        few = DEVIATIONS if sums.numel() < 1000 else DEVIATIONS + 1
        assert sums.abs().max() < few, axes
        if sums.numel() >= 256:
            assert abs(sums.square().mean() - 1) < DEVIATIONS * math.sqrt(2 / sums.numel()), axes
    # The four numbers of one call, apart.
    for row, key in itertools.product((0, 8), (0, 8)):
        corner = found.unflatten(2, (-1, 16)).unflatten(4, (-1, 16))[:, :, :, row : row + 8, :, key : key + 8]
        assert abs(corner.sum() / math.sqrt(corner.numel())) < DEVIATIONS


def shifted(x: Tensor, axis: int, by: int) -> tuple[Tensor, Tensor]:
    return x.narrow(axis, 0, x.shape[axis] - by), x.narrow(axis, by, x.shape[axis] - by)


def correlation(x: Tensor, y: Tensor) -> float:
    """In standard deviations of independent draws."""
    return abs((x * y).sum().item()) / math.sqrt(x.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_independence(p: float) -> None:
    """Of neighbors along each axis, of pairs exchanged, and of pairs that share a call."""
    found = sample(p)
    for axis, steps in ((0, (1, 2)), (1, (1, 3)), (2, (1, 2, 4, 8, 16, 128)), (3, (1, 2, 4, 8, 16, 128))):
        for by in steps:
            assert correlation(*shifted(found, axis, by)) < DEVIATIONS, (axis, by)
    above = torch.ones(256, 256).triu(1).bool()
    assert correlation(found[..., above], found.transpose(2, 3)[..., above]) < DEVIATIONS
    b, h = torch.ones(4, 4).triu(1).nonzero().unbind(1)
    assert correlation(found[b, h], found[h, b]) < DEVIATIONS
    assert correlation(found[:, :, :-8, :-8], found[:, :, 8:, 8:]) < DEVIATIONS


@pytest.mark.parametrize(
    "other", [(12, 0), (11, 1), (0, 11), (11 + 2**32, 0), (11, 2**32), (11 + 2**63 - 2**64, 0)], ids=str
)
def test_seeds_and_offsets_are_independent(other: tuple[int, int]) -> None:
    """Neighboring ones too, as of layers that count their offset up; also one call's heads against another's."""
    ours, theirs = sample(0.5), sample(0.5, *other)
    assert correlation(ours, theirs) < DEVIATIONS
    for axis in range(4):
        assert correlation(shifted(ours, axis, 1)[0], shifted(theirs, axis, 1)[1]) < DEVIATIONS


@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12])
def test_the_ends_of_the_range(p: float) -> None:
    kept = dropout.kept(p, seed_of(), range(1), range(2), range(64), range(64))
    assert kept.all() if p < 0.5 else kept.sum() < 8  # of 8,192, each with a probability of 2^-16
    assert -(2**31) <= dropout.threshold(p) < 2**31


# Kernels --------------------------------------------------------------------------------------------------------------


def mask_by(kernel: str, config: Any, batch: int, heads: tuple[int, int], rows: int, keys: int, p: float) -> Tensor:
    """The pairs that a forward keeps: with equal scores and v the identity, out is the mask over what is kept."""
    q = torch.zeros(batch, rows, heads[0], 16, device=DEVICE)
    k = torch.zeros(batch, keys, heads[1], 16, device=DEVICE)
    v = torch.eye(keys, device=DEVICE)[None, :, None].expand(batch, keys, heads[1], keys)
    out = warpwave.attention(
        q, k, v, dropout_p=p, dropout_seed=seed_of(), kernel=kernel, config=config, precision="ieee"
    )
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / keys / kept_share(p)))
    return kept.transpose(1, 2)


FORWARD_CONFIGS = [
    ("eager", eager.Config(7, 5)),
    ("eager", eager.Config(64, 33)),
    ("flash_fwd", flash_fwd.Config(16, 16, 4, 1)),
    ("flash_fwd", flash_fwd.Config(32, 64, 4, 1)),
    ("flash_fwd", flash_fwd.Config(128, 32, 4, 2)),
]


@pytest.mark.parametrize(("kernel", "config"), FORWARD_CONFIGS, ids=str)
def test_forwards_drop_the_same_pairs(kernel: str, config: Any) -> None:
    sizes: dict[str, Any] = {"batch": 2, "heads": (4, 2), "rows": 41, "keys": 53}
    expected = dropout.kept(0.4, seed_of(), range(2), range(4), range(41), range(53))
    assert torch.equal(mask_by(kernel, config, **sizes, p=0.4), expected)


@pytest.mark.parametrize(("tiles", "split"), [((16, 16), False), ((32, 64), True), ((128, 32), False)], ids=str)
def test_both_launches_of_the_gradients_drop_the_same_pairs(tiles: tuple[int, int], split: bool) -> None:
    """With equal scores and dout the identity, dv is the mask; and dq of one feature of k that counts up is exact."""
    rows, keys, p, heads = 41, 37, 0.4, 2
    q, k = (torch.zeros(1, n, h, 16, device=DEVICE) for n, h in ((rows, heads), (keys, heads)))
    k[..., 0] = torch.arange(keys, device=DEVICE)[:, None] / 8
    v = torch.eye(keys, device=DEVICE)[None, :, None].expand(1, keys, heads, keys)
    problem = AttentionProblem(
        batch=1, seqlen_q=rows, seqlen_k=keys, num_heads_q=heads, num_heads_kv=heads, head_dim=16, head_dim_v=keys,
        dtype="float32", softmax_scale=0.25, precision="ieee", dropout_p=p, return_lse=True,
    )  # fmt: skip
    operands = DropoutOperands(q, k, v, dropout_seed=seed_of())
    results = eager.forward(problem, operands, eager.configs(problem, GPU)[0])
    config = flash_bwd.Config(Tile(*tiles, 4, 1), Tile(*tiles[::-1], 4, 1), split)
    run = flash_bwd.bind(problem, GPU, operands, (True, True, True, False, False, False), config)
    kept = dropout.kept(p, seed_of(), range(1), range(heads), range(rows), range(keys))[0].double()
    # A row of dout that is 1 in place of one key alone, another for each row.
    dout = torch.zeros(1, rows, heads, keys, device=DEVICE)
    chosen = torch.arange(rows, device=DEVICE) % keys
    dout[0, torch.arange(rows), :, chosen] = 1.0
    dq, _, dv = run(operands, results, dout, None)[:3]
    assert dq is not None and dv is not None
    d = kept / kept_share(p)  # [heads, rows, keys], q = 0, so that P is 1 / keys
    expected_dv = (d / keys).transpose(1, 2) @ torch.eye(keys, device=DEVICE, dtype=torch.float64)[chosen]
    torch.testing.assert_close(dv[0].transpose(0, 1).double(), expected_dv, rtol=1e-6, atol=1e-7)
    dp = d * torch.eye(keys, device=DEVICE, dtype=torch.float64)[chosen]
    ds = (dp - (dp / keys).sum(-1, keepdim=True)) / keys
    expected_dq = 0.25 * ds @ k[0, :, 0].double()
    torch.testing.assert_close(dq[0].transpose(0, 1).double(), expected_dq, rtol=1e-5, atol=1e-7)


def explicit(q: Tensor, k: Tensor, v: Tensor, p: float, seed: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The formula in float64, through the mask."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        shown = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(scores.shape[3] - scores.shape[2])
        scores = scores.masked_fill(~shown, -torch.inf)
    kept = dropout.kept(p, seed, *map(range, scores.shape))
    return ((scores.softmax(-1) * kept / kept_share(p)) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize(("kernel", "causal"), [("eager", False), ("eager", True), ("flash_fwd", True)])
def test_gradients_are_those_of_the_explicit_mask(kernel: str, causal: bool) -> None:
    q, (k, v) = inputs(seqlen=33, heads=4, grad=True)[0], inputs(seqlen=40, grad=True)[1:]
    g = torch.Generator(DEVICE).manual_seed(1)
    dout, dlse = torch.randn(q.shape, generator=g, device=DEVICE), torch.randn(2, 4, 33, generator=g, device=DEVICE)

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), (q, k, v))

    expected = explicit(q, k, v, 0.3, seed_of(), causal)
    found = warpwave.attention(
        q, k, v, causal=causal, dropout_p=0.3, dropout_seed=seed_of(), return_lse=True, kernel=kernel, precision="ieee"
    )
    for one, exact in zip((*found, *gradients(*found)), (*expected, *gradients(*expected)), strict=True):
        torch.testing.assert_close(one.double(), exact.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", ["eager", "flash_fwd"])
def test_packed_sequences_drop_what_a_dense_batch_drops(kernel: str) -> None:
    """Positions count from the beginning of a sequence, and b counts sequences, empty ones included."""
    lengths = [19, 0, 37, 5]
    q, k, v = inputs(batch=4, heads=2)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (q, k, v)]
    options: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": seed_of(), "kernel": kernel, "precision": "ieee"}
    found = warpwave.attention_varlen(
        *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=37, max_seqlen_k=37, checked=True, **options
    )
    # A mask by key shortens the dense items, as their lengths do the packed ones.
    shown = torch.arange(37, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    dense = warpwave.attention(q, k, v, mask=shown[:, None, None], **options)
    expected = torch.cat([dense[b, :n] for b, n in enumerate(lengths)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["eager", "flash_fwd"])
def test_lse_is_that_of_the_softmax_without_dropout(kernel: str) -> None:
    q, k, v = inputs()
    _, plain = warpwave.attention(q, k, v, return_lse=True, kernel=kernel)
    _, lse = warpwave.attention(q, k, v, return_lse=True, kernel=kernel, dropout_p=0.9)
    torch.testing.assert_close(lse, plain, rtol=1e-6, atol=1e-6)


def test_a_strided_seed_is_read_by_its_strides() -> None:
    q, k, v = inputs()
    several = torch.stack([seed_of(), seed_of(5, 6)], 1)[:, 0]
    assert several.stride() == (2,)
    found = [
        warpwave.attention(q, k, v, dropout_p=0.3, dropout_seed=s, kernel="flash_fwd") for s in (several, seed_of())
    ]
    assert bits(found[0]) == bits(found[1])


REFUSING = [name for name in KERNELS if name not in ("flash_fwd", "hopper/flash_fwd", "eager")]


@pytest.mark.parametrize("kernel", REFUSING)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_other_kernels_refuse(kernel: str, arch: str) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=2, num_heads_kv=2, head_dim=64, head_dim_v=64,
        dtype="bfloat16", softmax_scale=0.125, dropout_p=0.1,
    )  # fmt: skip
    reasons = KERNELS[kernel].why_not(problem, Gpu.for_arch(arch))
    assert any("dropout" in reason for reason in reasons)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_the_kernels_that_serve(arch: str, dtype: str, head_dim: int) -> None:
    problem = AttentionProblem(
        batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=2, head_dim=head_dim,
        head_dim_v=head_dim, dtype=dtype, softmax_scale=0.125, dropout_p=0.1,
    )  # fmt: skip
    gpu, hopper = Gpu.for_arch(arch), dispatch.hopper_flash_fwd
    gradients = "hopper/flash_bwd" if arch == "sm_90" else "flash_bwd"
    on_hopper = arch == "sm_90" and dtype == "bfloat16"
    assert dispatch.choose(problem, gpu).kernel is (hopper if on_hopper else dispatch.flash_fwd)
    assert dispatch.gradient_kernels(problem, gpu)[0].NAME == gradients
    assert on_hopper == (not hopper.why_not(problem, gpu))
    if arch == "sm_90" and not on_hopper:
        assert hopper.why_not(problem, gpu) == ["it has dropout only in 16-bit types and up to head_dim 256"]


def test_above_every_tile_eager_serves() -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=2, num_heads_kv=2, head_dim=320, head_dim_v=320,
        dtype="bfloat16", softmax_scale=0.125, dropout_p=0.1, requires_grad=True,
    )  # fmt: skip
    for arch in ("sm_80", "sm_90", "gfx942"):
        assert dispatch.choose(problem, Gpu.for_arch(arch)).kernel is dispatch.eager
        assert dispatch.forward_of(problem, Gpu.for_arch(arch)) == (problem, "")


# Calls ----------------------------------------------------------------------------------------------------------------


def state() -> Tensor:
    return torch.get_rng_state() if DEVICE.type == "cpu" else torch.cuda.get_rng_state()


@pytest.mark.parametrize("kernel", ["eager", "flash_fwd"])
def test_without_dropout_nothing_changes(kernel: str) -> None:
    """Not the bits, not torch's generator, whatever the seed; nor the arguments of a launch."""
    q, k, v = inputs()
    before = state()
    plain = warpwave.attention(q, k, v, kernel=kernel)
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0}, {"dropout_p": 0.0, "dropout_seed": seed_of()}):
        assert bits(warpwave.attention(q, k, v, kernel=kernel, **options)) == bits(plain)
    assert torch.equal(state(), before)
    assert dropout.scalars(0.0) == (None, None)


def test_calls_without_dropout_share_a_plan() -> None:
    q, k, v = inputs(seqlen=21)
    warpwave.attention(q, k, v)
    known = len(plans._plans._entries)
    warpwave.attention(q, k, v, dropout_p=0, dropout_seed=seed_of())
    assert len(plans._plans._entries) == known


def test_the_default_generator_determines_what_is_dropped() -> None:
    q, k, v = inputs()
    attend = functools.partial(warpwave.attention, q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    first, second = attend(), attend()
    assert not torch.equal(first, second), "each call draws"
    torch.manual_seed(3)
    assert bits(attend()) == bits(first)
    # What the guide says a call draws.
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (2,), device=DEVICE)
    before = state()
    assert bits(attend(dropout_seed=seed)) == bits(first)
    assert torch.equal(state(), before), "a given seed draws nothing"


def test_an_equal_call_with_another_seed_is_recalled(recalled: list[bool]) -> None:
    q, k, v = inputs(seqlen=23)
    ends = torch.tensor([0, 11, 23], dtype=torch.int32, device=DEVICE)
    dense = functools.partial(warpwave.attention, q, k, v)
    packed = functools.partial(
        warpwave.attention_varlen, q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=23,
        max_seqlen_k=23,
    )  # fmt: skip
    for call in (packed, dense):
        forget()
        outs = [call(dropout_p=0.5, dropout_seed=seed_of(n)) for n in (1, 2, 1)]
        assert bits(outs[0]) == bits(outs[2]) != bits(outs[1])
        assert recalled == [False, True, True]
        assert not torch.equal(call(dropout_p=0.25, dropout_seed=seed_of(1)), outs[0])
        recalled.clear()
    other = inputs(batch=3, seqlen=29)
    found = warpwave.attention(*other, dropout_p=0.5, dropout_seed=seed_of())
    assert recalled[0], "a new length of a known class"
    forget()
    assert bits(found) == bits(warpwave.attention(*other, dropout_p=0.5, dropout_seed=seed_of()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_again(reentrant: bool) -> None:
    q, k, v = inputs(grad=True)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return warpwave.attention(q, k, v, dropout_p=0.4)

    found = []
    for call in (block, functools.partial(checkpoint, block, use_reentrant=reentrant)):
        torch.manual_seed(7)
        out = call(q, k, v)
        torch.rand(5, device=DEVICE)  # others draw between forward and backward
        out.square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
        q.grad = k.grad = v.grad = None
    assert bits(*found[0]) == bits(*found[1])


def test_nothing_but_two_numbers_is_saved_besides() -> None:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    for p in (0.0, 0.4):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            warpwave.attention(*inputs(grad=True), dropout_p=p)
    assert len(saved) == 11
    assert (
        sum(t.numel() * t.element_size() for t in saved[5:])
        == sum(t.numel() * t.element_size() for t in saved[:5]) + 16
    )


def test_a_seed_changed_before_the_backward_is_noticed() -> None:
    seed = seed_of()
    out = warpwave.attention(*inputs(grad=True), dropout_p=0.4, dropout_seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_compiled_calls() -> None:
    """One graph; a given seed drops the same as eagerly, and a drawn one the same in both directions."""
    q, k, v = inputs(grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None = None) -> Tensor:
        return warpwave.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)

    compiled: Callable[..., Tensor] = torch.compile(loss, fullgraph=True, backend="aot_eager")
    out, expected = compiled(q, k, v, seed_of()), loss(q, k, v, seed_of())
    torch.testing.assert_close(out, expected)
    for one, exact in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected)), strict=True):
        torch.testing.assert_close(one, exact)
    torch.manual_seed(5)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(5)
    assert bits(compiled(q, k, v)) == bits(first) != bits(second)
    # out is linear in v: with another mask in the backward this would not hold, computed again or not.
    checkpointed = torch.compile(
        lambda q, k, v: checkpoint(loss, q, k, v, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    for out in (first, checkpointed(q, k, v)):
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        torch.testing.assert_close((dv * v).sum(), (out * dout).sum(), rtol=1e-4, atol=1e-2)


def test_transforms_of_torch_func() -> None:
    q, k, v = inputs(grad=True)

    def loss(q: Tensor) -> Tensor:
        return warpwave.attention(q, k.detach(), v.detach(), dropout_p=0.4, dropout_seed=seed_of()).square().sum()

    (expected,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), expected)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_probabilities_out_of_range(p: float) -> None:
    before = state()
    with pytest.raises(warpwave.InvalidInput, match=r"dropout_p is .*; it must be at least 0 and less than 1"):
        warpwave.attention(*inputs(), dropout_p=p)
    assert torch.equal(state(), before)
    with pytest.raises(warpwave.InvalidInput, match="dropout_p is"):
        torch.ops.warpwave.attention(
            *DropoutOperands(*Operands(*inputs()), seed_of()), None, *Options(dropout_p=p), "auto", ""
        )


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dropout_p": "0.1"}, warpwave.InvalidType, "dropout_p is '0.1'; it must be a number"),
    ({"dropout_p": True}, warpwave.InvalidType, "dropout_p is True"),
    ({"dropout_p": torch.tensor(0.1)}, warpwave.InvalidType, "dropout_p is a Tensor"),
    ({"dropout_seed": 5}, warpwave.InvalidType, "dropout_seed is a int; it must be an int64 torch.Tensor"),
    ({"dropout_seed": torch.zeros(2)}, warpwave.InvalidType, "dropout_seed is torch.float32; it must be torch.int64"),
    ({"dropout_seed": torch.zeros(3, dtype=torch.int64)}, warpwave.InvalidInput, r"shape \(3,\); it must be \(2,\)"),
    ({"dropout_seed": torch.zeros(2, 1, dtype=torch.int64)}, warpwave.InvalidInput, r"shape \(2, 1\)"),
    ({"dropout_seed": torch.zeros(2, dtype=torch.int64, device="meta")}, warpwave.InvalidInput, "is on meta and q on"),
    ({"deterministic": 1}, warpwave.InvalidType, "deterministic is 1; it must be True or False"),
    ({"deterministic": "yes"}, warpwave.InvalidType, "deterministic is 'yes'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for _ in range(2):  # also behind a known call
        warpwave.attention(*inputs(), dropout_p=0.1)
        with pytest.raises(error, match=message):
            warpwave.attention(*inputs(), **{"dropout_p": 0.1, **options})


def test_the_operator_needs_a_seed() -> None:
    with pytest.raises(warpwave.InvalidType, match="dropout_seed is a NoneType"):
        torch.ops.warpwave.attention(*Operands(*inputs()), None, None, *Options(dropout_p=0.1), "auto", "")


def test_a_call_without_a_tensor_q_names_q() -> None:
    with pytest.raises(warpwave.InvalidType, match="q is a list"):
        warpwave.attention([1.0], *inputs()[1:], dropout_p=0.1)  # type: ignore[arg-type]


def test_explain_shows_both_arguments() -> None:
    q, k, v = inputs(grad=True)
    options: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": seed_of(), "deterministic": True}
    for precision in ("default", 1e-3):  # a budget runs a call without dropout, to measure its error
        said = str(warpwave.explain(q, k, v, precision=precision, **options))
        assert "dropout 0.25" in said and "it has no dropout; flash_fwd has" in said
    assert warpwave.explain(q, k, v, **options).gradients == ("flash_bwd" if not GPU.is_cpu else "")
    for wrong in ({"dropout_p": 1.0}, {"dropout_p": "much"}, {"deterministic": 1}, {"dropout_seed": 5}):
        with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType)):
            warpwave.explain(q, k, v, **wrong)
        with pytest.raises((warpwave.InvalidInput, warpwave.InvalidType)):
            warpwave.explain(warpwave.explain(q, k, v).problem, **wrong)


def test_explain_on_hopper_names_kernels_with_dropout() -> None:
    from warpwave.workbench.hardware import catalog

    problem = AttentionProblem(
        batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=2, num_heads_kv=2, head_dim=128, head_dim_v=128,
        dtype="bfloat16", softmax_scale=0.125, dropout_p=0.1, requires_grad=True,
    )  # fmt: skip
    found = warpwave.explain(problem, gpu=catalog.resolve("h200"))
    assert (found.kernel, found.gradients) == ("hopper/flash_fwd", "hopper/flash_bwd")
    assert found.reasons["hopper/large_head_dim"] == ["it has no dropout; flash_fwd has"]
    assert "predicted  none: the model does not count the random numbers of dropout" in str(found)


def test_above_head_dim_256_only_eager_has_dropout() -> None:
    wide = AttentionProblem(
        batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=2, num_heads_kv=2, head_dim=64, head_dim_v=320,
        dtype="bfloat16", softmax_scale=0.125, dropout_p=0.1, requires_grad=True,
    )  # fmt: skip
    found = warpwave.explain(wide, gpu="h200")
    assert found.kernel == "eager"
    for name in ("split_kv", "hopper/large_head_dim", "large_head_dim", "three_kernel"):
        assert "it has no dropout; eager has" in found.reasons[name]
    assert found.backward is not None and found.backward.reasons["three_kernel backward"] == [
        "it has no dropout; eager has"
    ]


def test_samples_of_rows_are_not_compared() -> None:
    from warpwave.workbench.bench.correctness import Sample
    from warpwave.workbench.bench.inputs import call_arguments, make_operands

    problem = AttentionProblem(
        batch=1, seqlen_q=8, seqlen_k=8, num_heads_q=1, num_heads_kv=1, head_dim=16, head_dim_v=16,
        dtype="float32", softmax_scale=0.25, dropout_p=0.1, requires_grad=True, deterministic=True,
    )  # fmt: skip
    operands = make_operands(problem, DEVICE)
    arguments = call_arguments(problem, operands)
    assert arguments["dropout_p"] == 0.1 and arguments["deterministic"] is True
    assert warpwave.attention(*operands[:3], **arguments).shape == (1, 8, 1, 16)
    with pytest.raises(warpwave.InvalidInput, match="calls without dropout only"):
        Sample(problem, operands)


def test_calls_on_a_cache_have_no_dropout() -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=1, seqlen_k=64, num_heads_q=2, num_heads_kv=2, head_dim=64, head_dim_v=64,
        dtype="bfloat16", softmax_scale=0.125, page_size=16, dropout_p=0.1,
    )  # fmt: skip
    with pytest.raises(warpwave.InvalidInput, match="calls on a paged cache have no dropout"):
        warpwave.explain(problem)
