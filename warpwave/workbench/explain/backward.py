"""The backward of a call, for `explain`: its kernel, bounds, predicted time and losses, in the form of the
forward's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from warpwave import dispatch
from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost
from warpwave.problem import AttentionProblem
from warpwave.workbench.model.losses import Losses
from warpwave.workbench.model.predict import Prediction, predict
from warpwave.workbench.model.roofline import Roofline

PASSES = ("forward", "backward", "both")
PRODUCTS = 5  # S, dP, dV, dQ, dK


@dataclass(frozen=True)
class Backward:
    """What computes the gradients of q, k and v, what bounds its time, and where the time goes.

    Attributes:
        problem: the call as the kernel takes it, with the log-sum-exp.
        gpu: the device.
        kernel: the kernel of the gradients: one of `dispatch.GRADIENT_KERNELS`, or eager's.
        config: its config.
        config_source: always `"default"`: a call does not choose it.
        cost: what its launches move and compute.
        reasons: kernel name -> why it cannot compute these gradients, or why `auto` prefers another; else empty.
        bounds, measured: as in `Explanation`, for any implementation that recomputes the scores.
        rates_missing: as in `Explanation`.
        prediction: the time on the device; None without a data sheet.
        alternatives_us: kernel name -> predicted time, for the other kernels that could compute the gradients.
        bias_us: predicted time that the gradient of a bias adds; 0 without a bias.
        losses: a measured time of the backward split into losses; None if none was given.
    """

    problem: AttentionProblem
    gpu: Gpu
    kernel: str
    config: Any
    config_source: str
    cost: Cost
    reasons: dict[str, list[str]]
    bounds: Roofline | None
    measured: Roofline | None
    rates_missing: str
    prediction: Prediction | None
    alternatives_us: dict[str, float] = field(default_factory=dict)
    bias_us: float = 0.0
    losses: Losses | None = None

    @property
    def flops(self) -> int:
        """FLOP of the five products over visible pairs."""
        return self.problem.work(is_backward=True).flops

    @property
    def compulsory_bytes(self) -> int:
        """Bytes of reading q, k, v and the gradient of out once, and writing the gradients once."""
        return self.problem.work(is_backward=True).compulsory_bytes

    @property
    def roofline(self) -> Roofline | None:
        """The bounds by the data sheet; without one, the bounds as measured."""
        return self.bounds or self.measured

    @property
    def products(self) -> float:
        """Products that the kernel computes for each visible tile, where five are needed."""
        return PRODUCTS * self.cost.flops / max(1, self.cost.flops - self.cost.repeated_flops)


@dataclass(frozen=True)
class Both:
    """Forward and backward together.

    Attributes:
        prediction: the sums of both predictions, step by step; None if one is missing.
        losses: a measured time of both, split into losses; None if none was given.
    """

    prediction: Prediction | None
    losses: Losses | None = None


Rooflines = Callable[[AttentionProblem, Gpu, Any, Cost], tuple[Roofline | None, Roofline | None, str]]


def backward_of(
    asked: AttentionProblem, forward: AttentionProblem, gpu: Gpu, kernel: str, hot: bool, rooflines: Rooflines
) -> Backward:
    """Returns the backward of a call.

    Args:
        asked: the call, with gradients.
        forward: the problem of its forward.
        kernel: of the forward, as in `dispatch.choose`.
        rooflines: returns the bounds by the data sheet, as measured, and why both are missing.
    """
    module = dispatch.gradients_for(asked, gpu, kernel)
    config = module.default(forward, gpu)
    cost = module.cost(forward, gpu, config)
    bounds, measured, missing = rooflines(forward, gpu, module, cost)
    able = dispatch.gradient_kernels(asked, gpu, kernel)
    reasons = {m.NAME: m.why_not(forward, gpu) for m in dispatch.GRADIENT_KERNELS}
    if kernel == "auto":
        reasons |= {m.NAME: dispatch.outrun(m, forward, gpu) for m in able if m is not module}
    others = {}
    for other in able:
        found = None if other is module else predict(forward, other, other.default(forward, gpu), gpu, hot=hot)
        if found is not None:
            others[other.NAME] = found.time_us
    return Backward(
        forward,
        gpu,
        module.NAME,
        config,
        "default",
        cost,
        reasons,
        bounds,
        measured,
        missing,
        predict(forward, module, config, gpu, hot=hot),
        others,
        _bias_us(forward, module, config, gpu),
    )


def saving_of(problem: AttentionProblem) -> AttentionProblem:
    """Returns the problem of a forward that keeps the log-sum-exp for the backward."""
    return replace(problem, requires_grad=False, return_lse=True)


def _bias_us(problem: AttentionProblem, module: Any, config: Any, gpu: Gpu) -> float:
    """Returns the predicted time that the gradient of a bias adds; 0 if there is none, or no model."""
    if problem.bias_shape is None or not hasattr(module, "cost_of_bias"):
        return 0.0
    of_bias = module.config_of_bias(problem, gpu) if hasattr(module, "config_of_bias") else config
    with_bias = predict(problem, _WithBias(module), of_bias, gpu, hot=True, graph=True)
    without = predict(problem, module, config, gpu, hot=True, graph=True)
    return 0.0 if with_bias is None or without is None else max(0.0, with_bias.time_us - without.time_us)


class _WithBias:
    """A kernel of gradients whose cost includes the launch of a bias's gradient."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def cost(self, problem: AttentionProblem, gpu: Gpu, config: Any) -> Cost:
        from warpwave.kernels.cost import in_turn

        found: Cost = self._module.cost(problem, gpu, config)
        if problem.bias_shape is None:
            return found
        return in_turn((*found.parts, self._module.cost_of_bias(problem, gpu, config)), found.workspace_bytes)


def both_of(forward: Prediction | None, backward: Prediction | None) -> Prediction | None:
    """Returns the prediction of forward and backward, one after the other: the sum of the times of each step. The error
    bars are added too, which holds even if both are off in the same direction."""
    if forward is None or backward is None:
        return None
    return Prediction(
        f"{forward.kernel} + {backward.kernel}",
        forward.gpu,
        forward.time_us + backward.time_us,
        forward.low_us + backward.low_us,
        forward.high_us + backward.high_us,
        {name: time_us + backward.times_us[name] for name, time_us in forward.times_us.items()},
        0.0,
        0,
        "",
        (),
        f"forward: {forward.validated}; backward: {backward.validated}",
        min(forward.points, backward.points),
    )
