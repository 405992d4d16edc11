"""The checks of `verify` for one kernel: a sample of calls, compared with float64, and exact probes.

The results of the probes are known without arithmetic, so they need no tolerance. They find errors that rounding would
hide: an extra key, a lost tile, a read of hidden memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

import warpwave
from warpwave.gpu import Gpu
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.workbench.bench.correctness import Sample, Verdict
from warpwave.workbench.bench.inputs import call_arguments, make_operands
from warpwave.workbench.bench.workloads import default_scale

SEED = 0

# The sample: name -> the fields that differ from a plain call. Both lengths end inside a tile.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": Causal()},
    "causal top-left": {"causal": Causal("top_left")},
    "window": {"window_size": (63, 0)},
    "window both sides": {"window_size": (40, 17)},
    "grouped heads": {"num_heads_q": 6, "num_heads_kv": 2},
    "one query": {"seqlen_q": 1, "seqlen_k": 517},
    "more queries than keys": {"seqlen_q": 403, "seqlen_k": 97, "causal": Causal()},
    "packed": {"packed": True, "causal": Causal()},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "ALiBi": {"alibi": True, "causal": Causal()},
    "softcap": {"softcap": 15.0},
    "sinks": {"has_sinks": True, "causal": Causal()},
    "head_dim 64": {"head_dim": 64, "head_dim_v": 64},
    "head_dim 80": {"head_dim": 80, "head_dim_v": 80, "causal": Causal()},
    "head_dim 256": {"head_dim": 256, "head_dim_v": 256},
    "head_dim 192, head_dim_v 128": {"head_dim": 192, "causal": Causal()},
}
# All features in one dtype; in the others only those whose code depends on the dtype.
FEATURES_OF_DTYPE = {
    "bfloat16": tuple(FEATURES),
    "float16": ("plain", "causal", "packed", "head_dim 64"),
    "float32": ("plain", "causal", "mask", "head_dim 64"),
}
PACKED_LENGTHS = ((113, 257), (0, 31), (45, 0), (1, 140), (77, 77))
PROBED = ("plain", "causal", "causal top-left", "window", "window both sides", "packed", "mask", "bias")


# Calls ----------------------------------------------------------------------------------------------------------------


def problem_of(
    feature: str, dtype: str, *, head_dim: int = 128, lengths: tuple[int, int] = (301, 333)
) -> AttentionProblem:
    """Returns a small call with one feature."""
    fields = dict(FEATURES[feature])
    heads = fields.get("num_heads_q", 2)
    values: dict[str, Any] = {
        "batch": 2,
        "seqlen_q": lengths[0],
        "seqlen_k": lengths[1],
        "num_heads_q": heads,
        "num_heads_kv": heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "dtype": dtype,
    }
    if fields.pop("packed", False):
        rows, keys = (sum(side) for side in zip(*PACKED_LENGTHS, strict=True))
        longest = {"seqlen_q": max(q for q, _ in PACKED_LENGTHS), "seqlen_k": max(k for _, k in PACKED_LENGTHS)}
        values |= {"packed": True, "batch": len(PACKED_LENGTHS), "total_q": rows, "total_k": keys, **longest}
        values["lengths"] = PACKED_LENGTHS
    mask, bias, alibi = (fields.pop(name, False) for name in ("mask", "bias", "alibi"))
    values |= fields
    values["softmax_scale"] = default_scale(values["head_dim"])
    scores = (values["seqlen_q"], values["seqlen_k"])
    if mask:
        values["mask_shape"] = (values["batch"], 1, *scores)
    if bias:
        values |= {"bias_shape": (1, heads, *scores), "bias_dtype": dtype}
    if alibi:
        values["alibi_shape"] = (heads,)
    return AttentionProblem(**values)


def operands_of(problem: AttentionProblem, device: torch.device) -> Operands:
    """Returns inputs from N(0, 1), with a tenth of the bias at minus infinity; equal in every process."""
    operands = make_operands(problem, device, seed=SEED)
    if operands.bias is not None:
        g = torch.Generator(device).manual_seed(SEED)
        operands.bias.masked_fill_(torch.rand(operands.bias.shape, generator=g, device=device) < 0.1, -math.inf)
    return operands


def call(kernel: str, problem: AttentionProblem, operands: Operands) -> Any:
    """Runs the public call with a kernel. Its output is first filled with NaN, so that unwritten elements are found.

    Returns:
        out, or (out, lse) if the problem returns lse.
    """
    door = warpwave.attention_varlen if problem.packed else warpwave.attention
    arguments = call_arguments(problem, operands) | {"kernel": kernel, "return_lse": problem.return_lse}
    with torch.no_grad(), _memory_full_of_nan():
        return door(*operands[:3], **arguments)


@contextmanager
def _memory_full_of_nan() -> Iterator[None]:
    """Makes torch fill new memory with NaN, which is a part of its deterministic mode."""
    was, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operations without a deterministic form, which does not matter here
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


# Checks of one kernel -------------------------------------------------------------------------------------------------


def gates(kernel: str, problem: AttentionProblem, device: torch.device) -> Verdict:
    """Compares the output with float64."""
    operands = operands_of(problem, device)
    return Sample(problem, operands, seed=SEED).judge(call(kernel, problem, operands))


def visible(problem: AttentionProblem, operands: Operands) -> list[Tensor]:
    """Returns (num_heads_q, seqlen_q, seqlen_k) for each sequence: True where the pair is visible by definition."""
    left, right = problem.window_size
    shown = []
    for b, (seqlen_q, seqlen_k) in enumerate(problem.items()):
        i = torch.arange(seqlen_q, device=operands.q.device)[:, None]
        j = torch.arange(seqlen_k, device=operands.q.device)
        place = i + seqlen_k - seqlen_q  # aligned to the last key
        pairs = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=operands.q.device)
        if left >= 0:
            pairs &= j >= place - left
        if right >= 0:
            pairs &= j <= place + right
        if problem.causal is not None:
            pairs &= j <= (i if problem.causal.alignment == "top_left" else place)
        pairs = pairs.expand(problem.num_heads_q, seqlen_q, seqlen_k)
        for tensor in (operands.mask, None if operands.bias is None else operands.bias > -math.inf):
            if tensor is not None:
                pairs = pairs & tensor[min(b, tensor.shape[0] - 1)]
        shown.append(pairs)
    return shown


def count(kernel: str, problem: AttentionProblem, device: torch.device) -> str:
    """Checks with q = 0 that exp(lse) is the number of visible keys. Returns the fault, or an empty string."""
    operands = _without_logits(problem, operands_of(problem, device))
    _, lse = call(kernel, problem, operands)
    counted = torch.exp(lse.double()).round().long()
    shown = [pairs.sum(-1) for pairs in visible(problem, operands)]
    expected = torch.cat(shown, dim=-1) if problem.packed else torch.stack(shown)
    wrong = int((counted != expected).sum())
    return f"{wrong} of {expected.numel()} rows count a wrong number of keys" if wrong else ""


def support(kernel: str, problem: AttentionProblem, device: torch.device) -> str:
    """Checks with q = 0 and one-hot values that an output is 0 exactly if its key is hidden. Returns the fault."""
    operands = _without_logits(problem, operands_of(problem, device))
    shown, width = visible(problem, operands), problem.head_dim_v
    for first in range(0, problem.seqlen_k, width):
        operands.v.zero_()
        for v in _by_sequence(problem, operands.v, 1):
            n = max(0, min(width, len(v) - first))
            v[first : first + n, :, :n] = torch.eye(n, dtype=v.dtype, device=device)[:, None]
        out = _out(call(kernel, problem, operands))
        for b, (result, pairs) in enumerate(zip(_by_sequence(problem, out, 0), shown, strict=True)):
            seen = pairs[:, :, first : first + width].transpose(0, 1)
            wrong = (result[..., : seen.shape[-1]] != 0) != seen
            if wrong.any():
                row, head, key = wrong.nonzero()[0].tolist()
                fault = "misses a key" if seen[row, head, key] else "sees a hidden key"
                return f"query {row} of sequence {b}, head {head}, {fault}: {first + key}"
    return ""


def poison(kernel: str, problem: AttentionProblem, device: torch.device) -> str:
    """Checks that keys and values which no query sees have no effect. Returns the fault, or an empty string.

    They are set to NaN and then to infinity. Both outputs must pass the gates and have the same bits. They are not
    compared with the bits for finite values: torch_sdpa hands a call with non-finite elements to eager, which rounds
    differently.
    """
    operands = operands_of(problem, device)
    unseen = [~pairs.any(0).any(0) for pairs in visible(problem, operands)]
    if not any(bool(keys.any()) for keys in unseen):
        raise AssertionError("no key of this call is hidden from all queries")
    sample = Sample(problem, operands, seed=SEED)
    outs = []
    for value in (math.nan, math.inf):
        for tensor in (operands.k, operands.v):
            for x, keys in zip(_by_sequence(problem, tensor, 1), unseen, strict=True):
                x[keys] = value
        out = _out(call(kernel, problem, operands))
        verdict = sample.judge(out)
        if not verdict.passed:
            return f"{value} at keys that no query sees: {verdict.reason}"
        outs.append(out)
    if torch.equal(*outs):
        return ""
    return f"keys that no query sees change {int((outs[0] != outs[1]).sum())} of {outs[0].numel()} elements"


def _out(result: Any) -> Tensor:
    """Returns out without lse."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _without_logits(problem: AttentionProblem, operands: Operands) -> Operands:
    operands.q.zero_()
    if operands.bias is not None:
        operands.bias.masked_fill_(operands.bias > -math.inf, 0.0)
    return operands


def _by_sequence(problem: AttentionProblem, x: Tensor, side: int) -> list[Tensor]:
    """Returns a view (tokens, heads, width) of each sequence; side 0 is queries, side 1 is keys."""
    if not problem.packed:
        return list(x)
    return list(x.split([lengths[side] for lengths in problem.items()]))


PROBES: dict[str, tuple[Callable[[str, AttentionProblem, torch.device], str], Sequence[str], bool]] = {
    # probe -> (its function, the features it checks, whether it needs the log-sum-exp)
    "count": (count, PROBED, True),
    "support": (support, PROBED, False),
    "poisoned keys": (poison, ("hidden keys", "hidden keys, mask"), False),
}


def probe_problem(feature: str, module: Any, gpu: Gpu, needs_lse: bool) -> AttentionProblem:
    """Returns the call of a probe: small, in float16, with lengths that end inside a tile. It asks for the log-sum-exp
    if the kernel has it, so that all probes of a feature share one compiled variant."""
    problem = replace(_probe_problem(feature), return_lse=True)
    if not needs_lse and module.why_not(problem, gpu):
        return replace(problem, return_lse=False)
    return problem


def _probe_problem(feature: str) -> AttentionProblem:
    if feature == "hidden keys":  # the first query sees 21 of 140 keys
        return replace(problem_of("plain", "float16", head_dim=64, lengths=(50, 140)), window_size=(20, 0))
    if feature == "hidden keys, mask":
        problem = problem_of("plain", "float16", head_dim=64, lengths=(113, 140))
        return replace(problem, mask_shape=(problem.batch, 1, 1, problem.seqlen_k))
    return problem_of(feature, "float16", head_dim=64, lengths=(113, 140))
