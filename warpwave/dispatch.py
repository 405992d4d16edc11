"""Chooses the kernel of a problem: the first of `KERNELS` that can run it, unless a later one is known to be faster.

A kernel is a module or package of `warpwave.kernels`, imported at its first use (kernels/family.py), with

    NAME                                       its name: "flash_fwd"
    NEEDS_GPU                                  whether it refuses CPU tensors
    QUANTIZED                                  optional: True if it attends with quantized q and k
    QUANTIZED_CACHE                            optional: True if it attends with a paged cache of 8-bit numbers
    Config                                     a frozen dataclass that checks its values
    why_not(problem, gpu) -> list[str]         every reason it cannot run the problem; empty if it can
    outrun(problem, gpu) -> list[str]          optional: why a later kernel is faster although this one can run the
                                               problem: thresholds in closed form, with measurements; read for "auto"
    cost(problem, gpu, config) -> Cost         bytes moved and operations computed
    configs(problem, gpu) -> list[Config]      the default first, then the search space
    default(problem, gpu) -> Config            optional: the first of `configs`, without listing the others
    notes(problem, gpu, config) -> list[str]   optional: what `explain` prints about a config: the rows of the family's
                                               table that chose it (kernels/rules.py)
    bind(problem, operands, config, out=None)  -> run(operands, out=None) -> (out, lse or None). Bound with a caller's
                                               out, it stores to the out of each call; that one is contiguous and
                                               begins at a multiple of 16 bytes unless
    STRIDED_OUT                                optional: True if out may have any address and any strides, the last 1
    refuses(operands) -> list[str]             optional: why it cannot read the pools of these operands of a cache
    Binder(gpu)                                optional: `bind` for calls that differ only in lengths and in strides of
                                               batches and heads; keeps what does not depend on these

Commands of the workbench read these, all of them optional:

    specify(problem, gpu, operands, out, lse, config) -> Launch, or a tuple of these: the launches of a call, which can
                                               be compiled without a GPU
    ABLE                                       the float32 arithmetics it has (precision.py); PORTABLE if absent
    arithmetic_of(problem, gpu) -> str         the float32 arithmetic of gradients, if not the forward's
    MEANT_FROM                                 the least head_dim for which `explain` recommends it
    SHARES_TILES                               True if the query heads that read one kv head always share tiles
    SKIPS_HIDDEN_TILES                         True if it skips tiles that a boolean mask hides
    WIDENS_VALUES                              True if it multiplies a v of 8 bits in float16

Errors, `explain` and the support matrix in the docs read these. Nothing about a kernel is stated elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.gpu import Gpu
from warpwave.kernels.family import Family
from warpwave.precision import PORTABLE, most_accurate, promised_error
from warpwave.problem import AttentionProblem, by_kind

split_kv, flash_fwd, large_head_dim = Family("split_kv"), Family("flash_fwd"), Family("large_head_dim")
three_kernel, torch_sdpa, eager = Family("three_kernel"), Family("torch_sdpa"), Family("eager")
hopper_flash_fwd = Family("hopper/flash_fwd")

# In order of preference. eager runs everything, except error budgets that it cannot keep. "auto" never takes the
# kernels after eager: rungs of the ladder (docs/kernels/ladder.md), which allocate all scores.
KERNELS: tuple[Any, ...] = (
    split_kv,
    hopper_flash_fwd,
    flash_fwd,
    Family("hopper/large_head_dim"),
    large_head_dim,
    three_kernel,
    torch_sdpa,
    eager,
    Family("tiled", "ladder.tiled"),
    Family("naive", "ladder.naive"),
)
# Gradients of calls of any forward kernel, in order of preference. A module of these has NAME, GRADIENTS (of which
# operands), why_not, configs, default and cost as above (of a problem that is `deterministic`, the bits of every config
# repeat), and
#     bind(problem, gpu, operands, wanted, config) -> run(operands, (out, lse), dout, dlse) -> gradients
# It may have outrun, as above; READS_RESULTS: False if it reads neither out nor lse; cost_of_bias(problem, gpu,
# config): what the gradient of a bias adds to its cost; and config_of_bias(problem, gpu): the config that computes it
# if the call's own does not.
three_kernel_backward = Family("three_kernel backward", "three_kernel.gradients")
GRADIENT_KERNELS: tuple[Any, ...] = (Family("hopper/flash_bwd"), Family("flash_bwd"), three_kernel_backward)
# Kernel name -> the modules of these that serve a call which names that kernel; all of them serve the others.
OWN_GRADIENTS: dict[str, tuple[Any, ...]] = {
    three_kernel.NAME: (three_kernel_backward,), torch_sdpa.NAME: (), eager.NAME: (),
}  # fmt: skip
# What eager's gradients cost: NAME, GRADIENTS, why_not, configs, default and cost as above.
eager_backward = Family("eager backward", "eager_backward_cost")
# The kernels that read a paged cache.
CACHE_KERNELS: tuple[Any, ...] = (hopper_flash_fwd, split_kv, large_head_dim, eager)


def kernels_for(problem: AttentionProblem) -> tuple[Any, ...]:
    """Returns the kernels among which one is chosen, in order of preference."""
    return CACHE_KERNELS if problem.page_size else KERNELS


class Choice(NamedTuple):
    """A kernel, its config, and where the config came from."""

    kernel: Any
    config: Any
    config_source: str


def why_not(kernel: Any, problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns every reason a kernel cannot run a problem; empty if it can."""
    reasons: list[str] = _refused_dtype(kernel, problem) or kernel.why_not(problem, gpu)
    return reasons


def _refused_dtype(kernel: Any, problem: AttentionProblem) -> list[str]:
    """Returns the reason that many kernels share: all but `eager` refuse float64, kernels without `QUANTIZED` refuse
    quantized q and k, and kernels without `QUANTIZED_CACHE` refuse 8-bit caches."""
    if problem.dtype == "float64" and kernel.NAME != eager.NAME:
        return ["dtype is float64, which eager alone computes"]
    if problem.is_quantized and not getattr(kernel, "QUANTIZED", False):
        able = [module.NAME for module in KERNELS if getattr(module, "QUANTIZED", False)]
        return [f"q is {problem.dtype}; quantized calls are computed by {', '.join(able)}"]
    if problem.dtype_kv and not getattr(kernel, "QUANTIZED_CACHE", False):
        able = [module.NAME for module in CACHE_KERNELS if getattr(module, "QUANTIZED_CACHE", False)]
        return [f"the cache is {problem.dtype_kv}; such caches are read by {', '.join(able)}"]
    return []


@by_kind
def _candidates(problem: AttentionProblem, gpu: Gpu) -> list[Any]:
    """Returns the kernels that `auto` may choose, in order of preference, judged without lengths. Triton's interpreter
    is for tests, which name a kernel."""
    able = [module for module in kernels_for(problem) if not _refused_dtype(module, problem)]
    return [module for module in able if not (gpu.vendor == "interpreter" and module.NEEDS_GPU)]


def reasons_against(problem: AttentionProblem, gpu: Gpu) -> dict[str, list[str]]:
    """Returns kernel name -> why it cannot run the problem, in order of preference; an empty list if it can."""
    return {kernel.NAME: why_not(kernel, problem, gpu) for kernel in kernels_for(problem)}


def passed_over(problem: AttentionProblem, gpu: Gpu) -> dict[str, list[str]]:
    """Returns kernel name -> why `auto` leaves the problem to a later kernel, for kernels that could run it."""
    found = {
        kernel.NAME: outrun(kernel, problem, gpu)
        for kernel in kernels_for(problem)
        if not why_not(kernel, problem, gpu)
    }
    return {name: reasons for name, reasons in found.items() if reasons}


def outrun(kernel: Any, problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why `auto` leaves a problem that a kernel could run to a later one; empty if it does not."""
    reasons: list[str] = kernel.outrun(problem, gpu) if hasattr(kernel, "outrun") else []
    return reasons


def choose(problem: AttentionProblem, gpu: Gpu, kernel: str = "auto", config: Any = None) -> Choice:
    """Returns the kernel that will run the problem, and its config.

    Args:
        kernel: `"auto"`, or a kernel's name: that one runs or the call raises; it never falls back.
        config: one of that kernel's configs, or None for its default.

    Raises:
        InvalidInput: no kernel has that name, or a config was given without naming its kernel.
        InvalidType: the config is another kernel's, or a GPU kernel was named for CPU tensors, and a GPU is available.
        UnsupportedProblem: the named kernel cannot run the problem; the error lists its reasons.
    """
    if kernel == "auto":
        if config is not None:
            raise InvalidInput("config was given with kernel='auto'; name the kernel the config is for")
        for module in _candidates(problem, gpu):
            if not module.why_not(problem, gpu) and not outrun(module, problem, gpu):
                return Choice(module, default_config(module, problem, gpu), "default")
        # eager refuses error budgets alone. The reason is that of the kernel with the most accurate products.
        without = replace(problem, error_budget=None)
        able = [module for module in _candidates(problem, gpu) if not module.why_not(without, gpu)]
        best = min(able, key=lambda module: _least_error(module, problem, gpu))
        raise UnsupportedProblem(
            f"no kernel can run {problem.describe()} on {gpu.name}",
            {best.NAME: best.why_not(problem, gpu)},
            "a larger budget, or precision='default'",
        )
    by_name = {module.NAME: module for module in kernels_for(problem)}
    if not isinstance(kernel, str):
        raise InvalidType(f"kernel is a {type(kernel).__name__}; it must be a str")
    if kernel not in by_name:
        raise InvalidInput(f"kernel is {kernel!r}; it must be 'auto' or one of {', '.join(map(repr, by_name))}")
    module = by_name[kernel]
    reasons = why_not(module, problem, gpu)
    if reasons:
        if gpu.vendor == "cpu" and module.NEEDS_GPU and _a_gpu_is_there():
            raise InvalidType(f"kernel {kernel!r} runs on a GPU and q is on the CPU; move q, k and v with .cuda()")
        raise UnsupportedProblem(
            f"kernel {kernel!r} cannot run {problem.describe()} on {gpu.name}",
            {kernel: reasons},
            _nearest(problem, gpu),
        )
    if config is None:
        return Choice(module, default_config(module, problem, gpu), "default")
    if not isinstance(config, module.Config):
        given = type(config)  # every kernel's class is named Config
        raise InvalidType(
            f"config is a {given.__name__} of {given.__module__}; kernel {kernel!r} takes {module.__name__}.Config"
        )
    return Choice(module, config, "given")


def _least_error(module: Any, problem: AttentionProblem, gpu: Gpu) -> float:
    """Returns the smallest error that a kernel's float32 arithmetics promise for a call."""
    able = getattr(module, "ABLE", PORTABLE) if module.NEEDS_GPU else ("ieee",)
    return promised_error(most_accurate(problem, gpu, able) or "ieee", problem)


def default_config(module: Any, problem: AttentionProblem, gpu: Gpu) -> Any:
    """Returns the config with which a kernel runs a problem that it accepts, if the caller names no other."""
    return module.default(problem, gpu) if hasattr(module, "default") else module.configs(problem, gpu)[0]


def bind(
    choice: Choice, problem: AttentionProblem, gpu: Gpu, operands: Any, binders: dict[str, Any], out: Any = None
) -> Any:
    """Binds a kernel to a call.

    Args:
        binders: kernel name -> its binder, shared by all calls of one class; filled here.
        out: the caller's tensor for the output, if any. The returned function then takes one at each call. If the
            kernel cannot store to this layout, its results are copied.
    """
    module = choice.kernel
    binder = binders.get(module.NAME)
    if binder is None:
        binder = binders[module.NAME] = module.Binder(gpu) if hasattr(module, "Binder") else module.bind
    if out is None:
        return binder(problem, operands, choice.config)
    if stores_to(module, out):
        return binder(problem, operands, choice.config, out)
    run = binder(problem, operands, choice.config)

    def run_and_copy(operands: Any, out: Any) -> Any:
        found, lse = run(operands)
        return out.copy_(found), lse

    return run_and_copy


def stores_to(module: Any, out: Any) -> bool:
    """Returns whether a kernel stores to an out of this layout, without a copy."""
    if getattr(module, "STRIDED_OUT", False):
        return bool(out.stride(-1) == 1)
    return bool(out.is_contiguous() and out.data_ptr() % 16 == 0)


def gradient_kernels(problem: AttentionProblem, gpu: Gpu, kernel: str = "auto") -> list[Any]:
    """Returns those of `GRADIENT_KERNELS` that can compute the gradients of a call, in order of preference.

    Args:
        kernel: of the forward, as in `choose`. "auto" does not use Triton's interpreter, and prefers modules that no
            other one outruns.
    """
    if (kernel == "auto" and gpu.vendor == "interpreter") or problem.page_size:
        return []
    if problem.dtype == "float64" or problem.is_quantized:
        return []
    able = [m for m in OWN_GRADIENTS.get(kernel, GRADIENT_KERNELS) if not m.why_not(problem, gpu)]
    return able if kernel != "auto" else sorted(able, key=lambda module: bool(outrun(module, problem, gpu)))


def gradients_for(problem: AttentionProblem, gpu: Gpu, kernel: str = "auto") -> Any:
    """Returns the module that computes the gradients of a call, or the one that states the cost of eager's.

    Args:
        kernel: of the forward, as in `choose`.
    """
    return next(iter(gradient_kernels(problem, gpu, kernel)), eager_backward)


def reads_results(problem: AttentionProblem, gpu: Gpu, kernel: str) -> bool:
    """Returns whether a gradient kernel that may serve a call reads out and the log-sum-exp of its forward. The first
    one may be another by the time of the backward: it depends on a setting of the process (`flash_bwd.outrun`)."""
    return _any_reads_results(gradient_kernels(problem, gpu, kernel))


def _any_reads_results(modules: list[Any]) -> bool:
    return any(getattr(module, "READS_RESULTS", True) for module in modules)


def forward_of(problem: AttentionProblem, gpu: Gpu, kernel: str = "auto") -> tuple[AttentionProblem, str]:
    """Returns the problem of a call's forward, and the name of the kernel of its gradients: "" for eager's.

    If a kernel computes the gradients, the forward runs on the fastest kernel for a call without gradients. It returns
    the log-sum-exp if the call does or the gradients may read it.
    """
    able = gradient_kernels(problem, gpu, kernel) if problem.requires_grad else []
    if not able:
        return problem, ""
    return_lse = problem.return_lse or _any_reads_results(able)
    return replace(problem, requires_grad=False, return_lse=return_lse), able[0].NAME


def _nearest(problem: AttentionProblem, gpu: Gpu) -> str:
    able = [m.NAME for m in kernels_for(problem) if not why_not(m, problem, gpu)]
    return f"kernel={able[0]!r}, or kernel='auto'" if able else ""


def _a_gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()
