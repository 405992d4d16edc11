"""Makes the inputs of a problem, and the arguments of a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from warpwave.kernels import quantize_tensor
from warpwave.operands import AnyOperands, CachedOperands, DropoutOperands, Operands
from warpwave.problem import DTYPE_BYTES, AttentionProblem
from warpwave.workbench.bench.workloads import default_scale, padded_length

MOST_INPUT_SETS = 64
OF_FACTORS = ("k_descale", "v_descale")
CACHES_FILLED = 4  # inputs for a cold cache cycle through this many times the size of L2


def make_operands(problem: AttentionProblem, device: torch.device | str, *, seed: int = 0) -> Any:
    """Returns inputs from N(0, 1), equal for equal problem, seed and kind of device. Zeros would run faster than data.

    They are `Operands`, `DropoutOperands` with dropout, or `CachedOperands` for a problem on a paged cache.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    rows_q = (problem.total_q,) if problem.packed else (problem.batch, problem.seqlen_q)
    rows_k = (problem.total_k,) if problem.packed else (problem.batch, problem.seqlen_k)
    q = normal(*rows_q, problem.num_heads_q, problem.head_dim)
    k = normal(*rows_k, problem.num_heads_kv, problem.head_dim)
    v = None if problem.v_in_k else normal(*rows_k, problem.num_heads_kv, problem.head_dim_v)
    for tensor in (q, k) if v is None else (q, k, v):
        tensor.requires_grad_(problem.requires_grad)
    if problem.page_size:
        return _in_pages(problem, q, k, v, generator, device)
    operands = Operands(
        q,
        k,
        k[..., : problem.head_dim_v] if v is None else v,
        mask=None if problem.mask_shape is None else _mask(problem, generator, device),
        bias=None if problem.bias_shape is None else normal(*problem.bias_shape),
        alibi_slopes=None if problem.alibi_shape is None else _slopes(problem, device),
        sinks=normal(problem.num_heads_q, dtype=torch.float32) if problem.has_sinks else None,
        cu_seqlens_q=_offsets([q for q, _ in problem.items()], device) if problem.packed else None,
        cu_seqlens_k=_offsets([k for _, k in problem.items()], device) if problem.packed else None,
    )
    return DropoutOperands(*operands, torch.tensor([seed, 0], device=device)) if problem.dropout_p else operands


def _in_pages(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor | None, generator: torch.Generator,
    device: torch.device | str,
) -> CachedOperands:  # fmt: skip
    """Returns the keys and values in pages in random order, as in a server that has run for a while; v is None if it is
    part of k."""
    lengths = [n for _, n in problem.items()]
    size = problem.page_size
    counts = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(counts), generator=generator, device=device)
    table = torch.zeros(problem.batch, -(-problem.seqlen_k // size), dtype=torch.int32, device=device)
    pools: list[Tensor] = []
    factors: list[Tensor] = []
    for x in (k,) if v is None else (k, v):
        pool = x.new_zeros(len(order), size, *x.shape[-2:])
        first = page = 0
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tokens = x[first : first + length] if problem.packed else x[b]
            pages = order[page : page + count]
            table[b, :count] = pages.to(torch.int32)
            padded = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, count * size - length))
            pool[pages] = padded.unflatten(0, (count, size))
            first, page = first + length, page + count
        if problem.dtype_kv is not None:
            pool, factor = _in_8_bits(pool, getattr(torch, problem.dtype_kv), problem.kv_factors == "token")
            factors.append(factor)
        pools.append(pool)
    if v is None:
        pools.append(pools[0][..., : problem.head_dim_v])
        factors *= 2
    return CachedOperands(
        q,
        pools[0],
        pools[1],
        alibi_slopes=None if problem.alibi_shape is None else _slopes(problem, device),
        sinks=torch.randn(problem.num_heads_q, generator=generator, device=device) if problem.has_sinks else None,
        cu_seqlens_q=_offsets([q for q, _ in problem.items()], device) if problem.packed else None,
        page_table=table,
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        **dict(zip(OF_FACTORS, factors, strict=False)),
    )


def _in_8_bits(pool: Tensor, dtype: torch.dtype, of_tokens: bool) -> tuple[Tensor, Tensor]:
    """Returns a pool's numbers in 8 bits, and the factors of heads, or of heads of each token."""
    pool = pool.float()  # float16 has no factor as small as that of zeros
    factor = quantize_tensor.factors_of(pool.abs().amax(-1 if of_tokens else (0, 1, 3)), quantize_tensor.LARGEST[dtype])
    return quantize_tensor.eight_bit_by_torch(pool / factor[..., None], dtype), factor


def call_arguments(problem: AttentionProblem, operands: AnyOperands | CachedOperands) -> dict[str, Any]:
    """Returns the keyword arguments of a call that are not at their defaults: those after q, k and v for `attention` or
    `attention_varlen`, those after q and the cache for `attention_with_kv_cache`."""
    of_cache = ("page_table", "seqused_k", *(OF_FACTORS if problem.page_size else ()))
    arguments: dict[str, Any] = {
        name: tensor
        for name, tensor in operands._asdict().items()
        if name not in ("q", "k", "v", *of_cache) and tensor is not None
    }
    if problem.packed:
        arguments |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    if problem.causal is not None:
        arguments["causal"] = problem.causal
    if problem.window_size != (-1, -1):
        arguments["window_size"] = problem.window_size
    if problem.softcap:
        arguments["softcap"] = problem.softcap
    if problem.softmax_scale != default_scale(problem.head_dim):
        arguments["softmax_scale"] = problem.softmax_scale
    if problem.precision != "default":
        arguments["precision"] = problem.precision
    if problem.error_budget is not None:
        arguments["precision"] = problem.error_budget
    if problem.dropout_p:
        arguments["dropout_p"] = problem.dropout_p
    if problem.deterministic:
        arguments["deterministic"] = True
    return arguments


def operand_bytes(problem: AttentionProblem) -> int:
    """Returns the bytes of one set of inputs: q, k, v, and a mask or a bias."""
    size = DTYPE_BYTES[problem.dtype]
    rows_k = problem.total_k if problem.packed else problem.batch * problem.seqlen_k
    total = problem.rows * problem.num_heads_q * problem.head_dim * size
    total += rows_k * problem.num_heads_kv * problem.bytes_of_key
    if problem.mask_shape is not None:
        total += math.prod(problem.mask_shape) * DTYPE_BYTES["float32"]  # drawn as float32, then compared
    if problem.bias_shape is not None:
        total += math.prod(problem.bias_shape) * DTYPE_BYTES[problem.bias_dtype or problem.dtype]
    return total


def sets_for_cold_cache(problem: AttentionProblem, l2_bytes: int) -> int:
    """Returns how many sets of inputs calls must cycle through so that each call's inputs are no longer in L2."""
    wanted = math.ceil(CACHES_FILLED * l2_bytes / max(1, problem.compulsory_bytes))
    return max(2, min(MOST_INPUT_SETS, wanted))


def _mask(problem: AttentionProblem, generator: torch.Generator, device: torch.device | str) -> Tensor:
    assert problem.mask_shape is not None
    if problem.mask_shape[2] == 1:
        lengths = torch.tensor([padded_length(problem, b) for b in range(problem.batch)], device=device)
        return torch.arange(problem.seqlen_k, device=device) < lengths[:, None, None, None]
    return torch.rand(problem.mask_shape, generator=generator, device=device) < 0.5


def _slopes(problem: AttentionProblem, device: torch.device | str) -> Tensor:
    """Returns the geometric series from 2^(-8 / num_heads_q) to 2^-8 (Press et al., "Train Short, Test Long", 2021)."""
    steps = torch.arange(1, problem.num_heads_q + 1, device=device, dtype=torch.float32)
    return torch.exp2(-8 * steps / problem.num_heads_q)


def _offsets(lengths: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
