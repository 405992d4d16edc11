"""Reasons that several kernels have for not running a problem: the building blocks of their `why_not`."""

from __future__ import annotations

from collections.abc import Callable

from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem

MAX_HEAD_DIM_WITH_DROPOUT = 256  # of GPU kernels: the largest head_dim of flash_fwd, flash_bwd and hopper/flash_bwd
MEANT_FROM = 257  # head_dim from which kernels of wide heads are advertised; they can run narrower heads
FEW_QUERIES_OF_WIDE_HEADS = 64  # of a sequence, at most: large_head_dim, which splits keys, serves them
FLOAT8_CAPABILITY = 89
FLOAT8_ON_AMD = ("gfx942", "gfx950", "gfx1201")
# What a launch may not support, by the words of its reason.
FEATURES: dict[str, Callable[[AttentionProblem], bool]] = {
    "packed sequences": lambda problem: problem.packed,
    "a mask": lambda problem: problem.mask_shape is not None,
    "a bias": lambda problem: problem.bias_shape is not None,
    "ALiBi slopes": lambda problem: problem.alibi_shape is not None,
    "softcap": lambda problem: problem.softcap > 0,
}
NO_GRADIENTS = "it computes no gradients; call under torch.no_grad() if none are needed"


def of_triton(gpu: Gpu) -> list[str]:
    """Returns why no Triton kernel can be compiled for a GPU of this machine."""
    return [gpu.no_triton] if gpu.no_triton else []


def of_device(gpu: Gpu) -> list[str]:
    """Returns why a portable kernel that multiplies by the matrix unit cannot run on a device."""
    reasons = of_triton(gpu)
    if gpu.vendor == "cpu":
        reasons.append(
            "found tensors on the CPU; it needs an NVIDIA GPU of compute capability 8.0 or newer, or an AMD one"
        )
    return reasons + of_matrix_unit(gpu)


def of_matrix_unit(gpu: Gpu) -> list[str]:
    """Returns why Triton cannot use a GPU's matrix unit."""
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        return [f"found {gpu.name} ({gpu.arch}); it needs sm_80 or newer: Triton has no matrix path before"]
    return []


def of_hopper(gpu: Gpu) -> list[str]:
    """Returns why a Gluon kernel for Hopper cannot run on a device."""
    if gpu.arch == "sm_90":
        return of_triton(gpu)
    return [*of_triton(gpu), f"found {gpu.name} ({gpu.arch}); it needs an NVIDIA Hopper GPU (sm_90)"]


def of_quantized(problem: AttentionProblem, gpu: Gpu) -> list[str]:
    """Returns why a portable kernel cannot multiply quantized q and k by a GPU's matrix unit."""
    if not problem.is_quantized or gpu.is_cpu:
        return []
    if problem.dtype == "int8":
        able = gpu.vendor == "nvidia" or gpu.arch.startswith(("gfx9", "gfx11", "gfx12"))
        return [] if able else [f"found {gpu.name} ({gpu.arch}); its matrix unit has no int8"]
    return of_float8(gpu)


def of_float8(gpu: Gpu) -> list[str]:
    """Returns why kernels cannot use float8 numbers on a GPU."""
    if gpu.is_cpu or gpu.capability >= FLOAT8_CAPABILITY or gpu.arch in FLOAT8_ON_AMD:
        return []
    return [
        f"found {gpu.name} ({gpu.arch}); float8 needs NVIDIA sm_{FLOAT8_CAPABILITY} or newer, or AMD "
        f"{' or '.join(FLOAT8_ON_AMD)}; int8 runs here"
    ]


def of_gradients(problem: AttentionProblem, reason: str = NO_GRADIENTS) -> list[str]:
    """Returns the reason of a kernel without gradients if the call has them."""
    return [reason] if problem.requires_grad else []


def of_dropout(problem: AttentionProblem, other: str = "flash_fwd") -> list[str]:
    """Returns the reason of a kernel without dropout if the call has it, naming a kernel with dropout: `other`, or
    `eager` for heads that are too wide for it."""
    if not problem.dropout_p:
        return []
    is_wide = max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM_WITH_DROPOUT
    return [f"it has no dropout; {'eager' if is_wide else other} has"]


def of_widths(problem: AttentionProblem, most: int, why: str) -> list[str]:
    """Returns, for each head size above `most`, its value and why it is too large."""
    widths = (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v))
    return [f"{name} is {size}; {why}" for name, size in widths if size > most]


def of_pages(problem: AttentionProblem) -> list[str]:
    """Returns why a kernel that finds a token's page by shifts and masks cannot read the cache."""
    if problem.page_size & (problem.page_size - 1):
        return [f"page_size is {problem.page_size}; it must be a power of two, so that no address needs a division"]
    return []


def of_features(
    problem: AttentionProblem, who: str, others: dict[str, bool], without: tuple[str, ...] = ()
) -> list[str]:
    """Returns what a launch does not support and the call has: each of `FEATURES`, and others.

    Args:
        who: the beginning of each reason: "the launch for latents does not support".
        others: name of another feature -> whether the call has it.
        without: those of `FEATURES` that the launch supports.
    """
    there = {name: has(problem) for name, has in FEATURES.items() if name not in without} | others
    return [f"{who} {name}" for name, is_there in there.items() if is_there]


def of_shared_memory(needed: int, gpu: Gpu) -> str:
    """Returns the reason of a kernel whose smallest tile needs more bytes of shared memory than a block has."""
    return (
        f"its smallest tile needs {needed / 1024:.0f} KiB of shared memory and {gpu.name} has "
        f"{gpu.smem_per_block_bytes / 1024:.0f} for a block"
    )


def of_float32_masks(problem: AttentionProblem) -> list[str]:
    """Returns why the mask of a float32 problem has no kernel that scales keys and values by kv heads."""
    shape = problem.mask_shape
    if problem.dtype != "float32" or shape is None or shape[1] == 1 or problem.num_heads_q == problem.num_heads_kv:
        return []
    return [
        "the mask differs between query heads of a kv head; in float32 these share a scale of their keys and values, "
        "which a key that only one of them sees would change for all"
    ]
