"""Bound launchers: compile once, then launch with nothing left to decide.

`bind` compiles a Triton kernel for the arguments of one call and returns a function that launches it again on other
tensors of the same shapes, strides and alignment. Triton's own call path binds, specialises and looks up every
argument anew, about 10 us a call; a bound launcher packs the pointers and calls the compiled kernel's launcher.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from warpwave.errors import UnsupportedProblem
from warpwave.kernels.triton_or_stub import INTERPRETED, triton

log = logging.getLogger("warpwave")

_compiled: set[tuple[Any, ...]] = set()  # variants compiled in this process, for the check during graph capture


class Launch(NamedTuple):
    """One kernel launch, fully decided.

    Args:
        kernel: a `triton.jit` function whose parameters are tensors, then scalars, then compile-time constants.
        grid: number of programs, at most 2^31 - 1.
        tensors: the pointer arguments, in order, None where absent; tensor descriptors for kernels that copy by TMA.
        scalars: the run-time sizes, strides and floats, in order.
        constants: the compile-time constants, in order, by name.
        options: num_warps, num_stages, enable_fp_fusion.
    """

    kernel: Any
    grid: int
    tensors: Sequence[torch.Tensor | None]
    scalars: Sequence[int | float]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


def bind(spec: Launch) -> Callable[..., None]:
    """Compiles a launch and returns its launcher.

    Returns:
        `launch(*tensors)`: launches on tensors of the same dtypes, shapes, strides and 16-byte alignment, on the
        current stream of their device.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
        UnsupportedProblem: the compiled kernel needs more shared memory than the GPU has.
    """
    kernel, grid, tensors, scalars, constants, options = spec
    if INTERPRETED:
        return lambda *tensors: kernel[(grid,)](*tensors, *scalars, **constants, **options)

    device = next(t.device for t in tensors if t is not None)
    compiled, run = loaded(spec, device)
    start = starter(run, getattr(run, "launch", None), compiled.function, compiled.packed_metadata)
    # The launcher takes every argument of the signature, compile-time ones included, and ignores the latter.
    rest = (*scalars, *constants.values())
    index = device.index
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    enter_hook = triton.knobs.runtime.launch_enter_hook

    def launch(*tensors: torch.Tensor | None) -> None:
        if current_device() != index or enter_hook.calls:
            # Another device is current, or a profiler listens to launches: the public call path serves both.
            with torch.cuda.device(index):
                kernel[(grid,)](*tensors, *scalars, **constants, **options)
            return
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        start(grid, current_stream(index), (*pointers, *rest))

    return launch


def loaded(spec: Launch, device: torch.device) -> tuple[Any, Any]:
    """What `compile_once` returns, its module loaded, and its `run`.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
        UnsupportedProblem: the compiled kernel needs more shared memory than the GPU has.
    """
    with torch.cuda.device(device):
        compiled = compile_once(spec, device)
        try:
            return compiled, compiled.run  # loads the module
        except triton.runtime.errors.OutOfResources as error:
            name = spec.kernel.__name__
            raise UnsupportedProblem(
                f"{name} with {dict(spec.options)} does not fit this GPU",
                {name: [str(error)]},
                "a config with a smaller block_m or block_n, or fewer num_stages",
            ) from None


# Triton versions whose launchers were read: what stands between `compiled.run` and the C function.
READ_VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
Start = Callable[[int, int, Sequence[Any]], None]


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def only_passes_on(run: Any) -> bool:
    """Whether `run` does nothing but to pass its arguments on, in a Triton that is known: no memory to allocate, no
    sanitizer's arguments to add."""
    wants = [getattr(run, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
    wants.append(getattr(run, "gsan_enabled", False))
    return _version() in READ_VERSIONS and torch.version.hip is None and not any(wants)


def starter(run: Any, launcher: Any, function: Any, metadata: Any) -> Start:
    """How to start a compiled kernel: `start(grid, stream, arguments)`, with an argument for each of its signature.

    Triton's `run` looks for scratch memory to allocate and passes on what it was given, in Python; where
    nothing is to be allocated and this Triton is known, its C function is called instead.

    Args:
        run: `run` of what `compile_once` returns.
        launcher: the C function inside, or None where it is not found.
        function, metadata: of what `compile_once` returns, `function` and `packed_metadata`.
    """
    if launcher is None or not only_passes_on(run):
        return lambda grid, stream, arguments: run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    if _version() == (3, 6):
        return lambda grid, stream, arguments: launcher(
            grid, 1, 1, stream, function, cooperative, pdl, None, None, metadata, None, None, None, *arguments
        )
    annotations, signature = run.arg_annotations, run.kernel_signature
    return lambda grid, stream, arguments: launcher(
        grid, 1, 1, stream, function, cooperative, pdl, metadata, None, None, None, None, None, annotations,
        signature, arguments,
    )  # fmt: skip


def variant(spec: Launch, device: torch.device) -> tuple[Any, ...]:
    """What Triton compiles anew for: launches of one variant share their machine code."""
    kernel, _, tensors, scalars, constants, options = spec
    classes: list[Any] = [_class_of(t) for t in tensors]
    for parameter, value in zip(kernel.params[len(tensors) :], scalars, strict=False):
        if isinstance(value, int):
            wide = not -(2**31) <= value < 2**31
            classes.append(wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0))
    return (kernel, device.index, *classes, *constants.items(), *options.items())


def _class_of(tensor: Any) -> Any:
    if tensor is None:
        return None
    if hasattr(tensor, "block_shape"):  # a tensor descriptor, which is always aligned
        return (tensor.base.dtype, tuple(tensor.block_shape), repr(getattr(tensor, "layout", None)))
    return (tensor.dtype, tensor.data_ptr() % 16 == 0)


def compile_once(spec: Launch, device: torch.device) -> Any:
    """Triton's compiled kernel for a launch, from its caches where it has one.

    Raises:
        RuntimeError: the kernel is not compiled yet and a CUDA graph is being captured.
    """
    kernel, _, tensors, scalars, constants, options = spec
    key = variant(spec, device)
    first_time = key not in _compiled
    if first_time and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernel.__name__} is not compiled for this call yet and a CUDA graph is being captured: make the same "
            "call once before the capture to warm it up"
        )
    start = time.perf_counter()
    compiled = kernel.warmup(*tensors, *scalars, **constants, **options, grid=(1,))
    if first_time:
        _compiled.add(key)
        log.info("compiled %s in %.2f s", kernel.__name__, time.perf_counter() - start)
    return compiled
