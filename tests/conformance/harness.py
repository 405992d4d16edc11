"""Shared by all conformance tests: the device, its grid of cases, and calls of a kernel by name."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import cases
from tests.conformance.cases import Call, Case
from tests.conformance.gates import forward_references, judge_forward
from warpwave import UnsupportedProblem, attention, attention_varlen, dispatch
from warpwave.gpu import current_gpu
from warpwave.operands import NUM_COMMON, AnyOperands, QuantizedOperands
from warpwave.problem import AttentionProblem

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device(
    "cuda" if ON_GPU else "cpu"
)  # on a CPU, Triton kernels run in the interpreter (tests/conftest.py)
GPU = current_gpu(DEVICE)
KERNELS = {module.NAME: module for module in dispatch.KERNELS}
GRID = cases.FULL if ON_GPU else cases.SMALL

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
# Where every row of keys is wanted: interpreted programs cost milliseconds a tile.
LONG = 20_000 if ON_GPU else 1_300


def attend(
    kernel: str,
    operands: AnyOperands,
    options: dict[str, Any],
    problem: AttentionProblem,
    config: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns out and lse (None unless requested) of one public call."""
    tensors: dict[str, Any] = {name: getattr(operands, name) for name in ("alibi_slopes", "sinks", "dropout_seed")}
    if isinstance(operands, QuantizedOperands):
        tensors |= dict(zip(operands._fields[NUM_COMMON:], operands[NUM_COMMON:], strict=True))
    if problem.packed:
        tensors |= {"cu_seqlens_q": operands.cu_seqlens_q, "cu_seqlens_k": operands.cu_seqlens_k}
        tensors |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
        door: Any = attention_varlen
    else:
        tensors |= {"mask": operands.mask, "bias": operands.bias}
        door = attention
    result = door(*operands[:3], **tensors, **options, kernel=kernel, config=config)
    return result if options["return_lse"] else (result, None)


def run(kernel: str, call: Call, config: Any = None) -> tuple[Tensor, Tensor | None]:
    """Runs `attend` on a built call."""
    return attend(kernel, call.operands, call.options, call.problem, config)


def refuses(kernel: str, call: Call, request: pytest.FixtureRequest) -> bool:
    """Whether the kernel refuses the call. A refusal is checked against the contract and counted."""
    reasons = KERNELS[kernel].why_not(dispatch.forward_of(call.problem, GPU, kernel)[0], GPU)
    if not reasons:
        return False
    with pytest.raises(UnsupportedProblem) as refusal:
        run(kernel, call)
    assert refusal.value.reasons == {kernel: reasons}
    assert all(reason in str(refusal.value) for reason in reasons)
    request.node.user_properties.append(("refused", True))
    return True


def default_config(kernel: str, call: Call) -> Any:
    """Returns the kernel's default config for the call, to be kept while the call varies."""
    return KERNELS[kernel].configs(call.problem, GPU)[0]


def configs_by_tile(kernel: str, case: Case) -> dict[int, Any]:
    """Returns each tile size that the kernel can use for a case, with its first config of that size. For three_kernel
    the config is portable, because torch's products have no tiles, and neither they nor Hopper's support all calls."""
    module = KERNELS[kernel]
    problem = cases.build(case, "normal", torch.device("cpu")).problem
    found: dict[int, Any] = {}
    if not module.why_not(problem, GPU):
        for config in module.configs(problem, GPU):
            if {"library", "hopper"} & {getattr(config, "scores", ""), getattr(config, "values", "")}:
                continue
            for name in ("block_m", "block_n"):
                if hasattr(config, name):
                    found.setdefault(getattr(config, name), config)
    return found


def bits(*tensors: Tensor | None) -> list[str]:
    """Returns a digest of each tensor's values, equal only for equal bits, including NaN and -0."""
    values = (t.detach().contiguous().cpu().view(torch.uint8).numpy() for t in tensors if t is not None)
    return [hashlib.sha256(v.tobytes()).hexdigest()[:16] for v in values]


def band(problem: AttentionProblem, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Returns the pairs that the window and the causal mask show, bool [queries, keys]."""
    i, j = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)[None, :]
    position = i + seqlen_k - seqlen_q
    shown = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = problem.window_size
    if left >= 0:
        shown &= j >= position - left
    if right >= 0:
        shown &= j <= position + right
    if problem.causal is not None:
        shown &= j <= (position if problem.causal.alignment == "bottom_right" else i)
    return shown


def visible(call: Call) -> list[Tensor]:
    """Returns the visible pairs by the documented definition: for each sequence, bool [heads, rows, keys]."""
    problem, operands = call.problem, call.operands
    if problem.packed:
        ends = zip(operands.cu_seqlens_q.diff().tolist(), operands.cu_seqlens_k.diff().tolist(), strict=True)
        lengths = list(ends)
    else:
        lengths = [(problem.seqlen_q, problem.seqlen_k)] * problem.batch
    found = []
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        shown = band(problem, seqlen_q, seqlen_k, operands.q.device).repeat(problem.num_heads_q, 1, 1)
        if operands.mask is not None:
            shown &= operands.mask[b % len(operands.mask)]
        if operands.bias is not None:
            shown &= operands.bias[b % len(operands.bias)] != -torch.inf
        found.append(shown)
    return found


def by_sequence(call: Call, x: Tensor) -> list[Tensor]:
    """Returns the sequences of a tensor with the layout of q, k or v, each [tokens, heads, width]."""
    if not call.problem.packed:
        return list(x)
    cu_seqlens = call.operands.cu_seqlens_q if len(x) == call.problem.total_q else call.operands.cu_seqlens_k
    return list(x.split(cu_seqlens.diff().tolist()))


def assert_gates(kernel: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """Returns out and lse of a call after they pass the gates."""
    out, lse = run(kernel, call)
    verdict = judge_forward(call.problem, forward_references(call.problem, call.operands), out, lse)
    assert verdict.passed, str(verdict)
    return out, lse
