"""Runs the source of the Hopper backward's launches on a CPU, and judges their gradients by the gates."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.conformance import harness
from tests.conformance.cases import PLAIN, Call
from tests.conformance.gates import backward_references, judge_backward
from tests.kernels.hopper import gluon_on_cpu
from warpwave.gpu import Gpu
from warpwave.kernels.hopper import flash_bwd
from warpwave.kernels.hopper.flash_bwd import hidden, kernel
from warpwave.kernels.hopper.flash_bwd.launches import Tensors
from warpwave.runtime import launch
from warpwave.workbench.verify.reference import Forward, Gradients, oracle

H200 = Gpu.for_arch("sm_90")
CPU = torch.device("cpu")


def on_cpu(
    call: Call, dout: Tensor, dlse: Tensor | None, config: int, exact: Forward | None = None, more: bool = False,
    deterministic: bool = True,
) -> Gradients:  # fmt: skip
    """The gradients by the launches' own source, from out and lse of the reference, or from others. With `more`, those
    of bias and slopes as well."""
    from warpwave.kernels.hopper import parts, rows, scheduler, softmax, split_float32, words
    from warpwave.kernels.hopper.flash_bwd import (
        band,
        bias,
        dkv,
        dq,
        joint,
        joint_steps,
        producer,
        split_dkv,
        split_dq,
        split_steps,
        steps,
        turns,
    )

    problem = replace(call.problem, return_lse=True, deterministic=deterministic)
    exact = exact or oracle(problem, call.operands)
    out, lse = exact.out.to(call.operands.q.dtype), exact.lse.float()
    of = flash_bwd.configs(problem, H200)[config]
    workspace, grads = kernel.example(problem, of, CPU)
    for tensor in (*workspace[:-1], *workspace.hidden, *grads):  # what is not written must not be read
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    tensors = Tensors(call.operands, out, lse.contiguous(), dout, dlse, workspace, *grads)
    tensors = kernel.with_bias(problem, tensors, more)
    if any(tensor is not None for tensor in workspace.hidden):
        for flags in workspace.hidden.flags:
            flags.zero_()
        for step in hidden.steps(problem, tensors, of):
            launch.bind(step.launch)(*step.launch.tensors)
    if more:
        tensors = kernel.with_slopes(problem, tensors)
        if tensors.workspace.sums is not None and problem.dtype != "float32":
            tensors.workspace.sums.fill_(torch.nan)
    if tensors.dbias is not None and not problem.has_band and problem.mask_shape is None:
        tensors.dbias.fill_(torch.nan)
    for step in flash_bwd.specify(problem, H200, tensors, of):
        if step.plans:
            modules = (
                *(band, bias, dkv, dq, joint, joint_steps, parts, producer, rows, scheduler, steps, turns, words),
                *(softmax, split_dkv, split_dq, split_float32, split_steps),
            )
            gluon_on_cpu.run_launch(step.launch, modules, 2, {"meet": lambda: threading.Barrier(2).wait})
        else:
            launch.bind(step.launch)(*step.launch.tensors)
    of_sinks = workspace.of_sinks
    dsinks = None if of_sinks is None else of_sinks.view(-1, problem.num_heads_q, of_sinks.shape[1]).sum((0, 2))
    of_bias, of_slopes = kernel.bias_gradient(problem, tensors), kernel.slope_gradient(problem, tensors)
    return Gradients(tensors.dq, tensors.dk, tensors.dv, of_bias, of_slopes, dsinks)


SHORT = replace(PLAIN, lengths=(150, 330), heads=(2, 1), lse=True)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": "bottom_right", "sinks": True},
    "more queries than keys": {"causal": "bottom_right", "lengths": (330, 150), "heads": (2, 2), "sinks": True},
    "top left": {"causal": "top_left", "lengths": (210, 70)},
    "window": {"window": (60, 5), "alibi": "heads", "softcap": 15.0},
    "window beyond the keys": {"causal": "top_left", "window": (3, -1), "lengths": (37, 170)},
    "window wider than a block": {"window": (300, 5), "lengths": (400, 600), "heads": (1, 1)},
    "packed": {"packed": True, "batch": 4, "heads": (4, 2), "causal": "bottom_right", "lengths": (150, 140)},
    "packed, no groups": {"packed": True, "batch": 4, "heads": (2, 2), "causal": "bottom_right", "lengths": (150, 140)},
    "packed window": {"packed": True, "batch": 5, "window": (20, 7), "lengths": (200, 300)},
    "one query": {"lengths": (1, 300), "batch": 2},
}
DROPPED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right", "sinks": True, "heads": (4, 2), "batch": 2},
    "queries from 183 on": {"causal": "bottom_right", "lengths": (333, 150), "softcap": 15.0},
    "keys from 142 on": {"window": (60, 5), "lengths": (130, 332), "alibi": "heads"},
    "packed": {"packed": True, "batch": 4, "heads": (4, 2), "causal": "bottom_right", "lengths": (150, 140)},
    "packed window": {"packed": True, "batch": 5, "window": (20, 7), "lengths": (200, 300)},
}


def judge(
    call: Call, of_unseen: float | None = None, more: bool = True, config: int = -1, deterministic: bool = True
) -> None:
    """Judges the gradients, unless told otherwise by launches apart; with `of_unseen`, if given, in keys and values
    that no query sees, and in queries that see nothing."""
    q, k, v = call.operands[:3]
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(2)).to(q.dtype)
    references = backward_references(call.problem, call.operands, dout, None)
    exact = oracle(replace(call.problem, return_lse=True), call.operands)
    if of_unseen is not None:
        shown = torch.stack(harness.visible(call))  # [batch, heads, queries, keys]
        unseen = ~shown.any(-1).transpose(1, 2), ~shown.any(2).unflatten(1, (k.shape[2], -1)).any(2).transpose(1, 2)
        q, k, v, dout = (t.clone() for t in (q, k, v, dout))
        for tensor, of in ((q, 0), (dout, 0), (k, 1), (v, 1)):
            tensor[unseen[of]] = of_unseen
        call = call._replace(operands=call.operands._replace(q=q, k=k, v=v))
    verdict = judge_backward(call.problem, references, on_cpu(call, dout, None, config, exact, more, deterministic))
    assert verdict.passed, str(verdict)
